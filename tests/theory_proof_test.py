"""The simulator reproduces what is known of attempts that may fail.

Attempts at a lemma are Bernoulli trials. Of N agents in a race for one lemma
one at least succeeds within k rounds with chance 1 - (1 - p) ** (N k): they are
perfectly parallel. A chain of lemmas is done after k rounds as often as k
trials have so many successes, and more agents do not help. Where all attempts
succeed, the work is a task graph.
"""

import dataclasses
import math

from envs import proof
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import collective as collective_lib
from rlcr_jax import observation
from rlcr_jax.policies import scripted
from tests import exact

READ_MS, ATTEMPT_MS = 5000, 30_000
TEAMS = (1, 2, 4)
ROUNDS = np.arange(13)
GRID_MS = READ_MS + ATTEMPT_MS * ROUNDS
TASKS = 1000
P = 0.3
SIGMAS = 4.0  # Of some 80 shares, none is farther off by chance.

RACE = proof.Proof(
    num_lemmas=1,
    width=1,
    false_share=0.0,
    attempt_tokens=1000,
    attempt_tool_ms=20_000,
)
CHAIN = dataclasses.replace(
    RACE, num_lemmas=3, alternatives=1, min_premises=1, max_premises=1
)
# Nothing is left to chance: lemmas in layers of four, each from two below.
SURE = dataclasses.replace(
    CHAIN,
    num_lemmas=9,
    width=4,
    min_premises=2,
    max_premises=2,
    min_chance=1.0,
)


@dataclasses.dataclass(frozen=True)
class Race:
  """All attempt the first lemma."""

  collective: collective_lib.Collective

  def sample(self, params, keys, obs):
    del params, keys
    zeros = jnp.zeros(obs.me.shape[:1], jnp.int32)
    action = observation.Action(zeros, zeros, zeros, zeros)
    return action, jnp.zeros(zeros.shape)


def play(env, policy, chance):
  """Rollouts of every team: leaves [team, task, ...]; and the tasks."""
  collective = exact.make_collective(env, max(TEAMS))
  rules = exact.make_rules(
      TEAMS, [GRID_MS[-1] + 1], awareness=True, free_facts=True
  )
  keys = jax.random.split(jax.random.key(1), TASKS)
  tasks = jax.jit(jax.vmap(env.sample_task))(keys)
  shares = (tasks.credit > 0) / jnp.sum(tasks.credit > 0, 1, keepdims=True)
  tasks = tasks._replace(
      chance=jnp.full_like(tasks.chance, chance),
      credit=shares.astype(jnp.float32),
  )
  played = exact.play(
      collective,
      policy(collective),
      tasks,
      rules,
      chunk_size=4096,
      grid_ms=GRID_MS,
  )
  return played, jax.device_get(tasks)


def assert_shares(hits, chance):
  """Shares of `hits` [..., task, time] lie around the chances [..., time]."""
  error = np.sqrt(chance * (1 - chance) / TASKS)
  assert (abs(hits.mean(axis=-2) - chance) <= SIGMAS * error + 1e-6).all()


def test_attempts_at_once_are_worth_as_many_one_after_the_other():
  played, _ = play(RACE, Race, P)
  tries = np.multiply.outer(TEAMS, ROUNDS)
  assert_shares(played.curve, 1 - (1 - P) ** tries)


def at_least(successes, trials, p):
  """The chance of so many successes or more."""
  few = [
      math.comb(trials, k) * p**k * (1 - p) ** (trials - k)
      for k in range(min(successes, trials + 1))
  ]
  return 1 - sum(few)


def test_a_chain_is_done_as_often_as_trials_have_so_many_successes():
  played, _ = play(CHAIN, scripted.ListScheduler, P)
  # One agent is at the only open lemma, so all teams are worth one.
  for links in range(1, 4):
    chance = np.array([at_least(links, n, P) for n in ROUNDS])
    done = played.curve >= links / 3 - 1e-6
    assert_shares(done, np.broadcast_to(chance, (len(TEAMS), len(ROUNDS))))


def test_sure_attempts_are_scheduled_within_the_bounds():
  played, tasks = play(SURE, scripted.ListScheduler, 1.0)
  time = (played.time_ms - READ_MS) / ATTEMPT_MS
  np.testing.assert_array_equal(time, np.round(time))
  work = (tasks.credit > 0).sum(axis=1)  # With one route each: all needed.
  path, teams = SURE.depth + 1, np.array(TEAMS)[:, None]
  assert (time >= np.maximum(work / teams, path)).all()
  assert (time <= path + (work - path) / teams).all()
  np.testing.assert_array_equal(played.progress, 1.0)
  turns = played.effective[..., proof.ATTEMPT]
  assert (turns == work).all()  # Nobody proves more.


def test_progress_never_exceeds_its_bound():
  env = dataclasses.replace(
      SURE, num_lemmas=10, alternatives=2, false_share=0.3
  )
  played, tasks = play(env, scripted.ListScheduler, 1.0)
  turn_ms = ATTEMPT_MS, ATTEMPT_MS
  for i, agents in enumerate(TEAMS):
    bounds = exact.bounds(env, tasks, agents, GRID_MS - READ_MS, turn_ms)
    assert (played.curve[i] <= bounds.progress + 1e-5).all()
