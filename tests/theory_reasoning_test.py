"""The simulator reproduces what is known of independent attempts.

A chain with n thoughts is right with a chance p(n) in closed form. Of N chains
with n thoughts each, perfect checks find a right one with chance
1 - (1 - p(n)) ** N, and thoughts in one chain do not add up over agents.
Verdicts that err leave a belief, which must come true as often as it says.
"""

import dataclasses

from envs import base
from envs import reasoning
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib
from rlcr_jax import observation
from rlcr_jax import rollout
from tests import exact

THINK, CHECK, ANSWER = reasoning.THINK, reasoning.CHECK, reasoning.ANSWER
DIFFICULTY, LEAST = 6.0, 2
READ_MS, THINK_MS, CHECK_MS, ANSWER_MS = 5000, 10_000, 10_000, 2000
TEAMS = (1, 2, 4)
THOUGHTS = (1, 2, 4, 7)
TASKS = 1000
SIGMAS = 4.0  # Of 12 shares, none is farther off by chance.

ENV = reasoning.Reasoning(
    num_chains=4,
    least_thoughts=LEAST,
    min_difficulty=DIFFICULTY,
    max_difficulty=DIFFICULTY,
    check_error=0.0,
    coupling=0.0,
)
COLLECTIVE = exact.make_collective(ENV, max(TEAMS))


@dataclasses.dataclass(frozen=True)
class Attempts:
  """Thinks for as long as there is time to check and to answer.

  All are always free at the same instants, so that by their ranks each has a
  chain of its own; or all share chain 0. They answer the chain of the largest
  posterior.
  """

  collective: collective_lib.Collective
  apart: bool = True

  def sample(self, params, keys, obs):
    del params, keys
    action = jax.vmap(self._row)(obs)
    return action, jnp.zeros(action.verb.shape)

  def _row(self, obs):
    mine = dict(zip(observation.MY_FEATURES, obs.me, strict=False))
    names = self.collective.env.feature_names
    column = {name: obs.targets[:, i] for i, name in enumerate(names)}
    left_ms = 30_000 * jnp.expm1(mine['time_left']) + 1.0
    chain = mine['rank'].astype(jnp.int32) * self.apart
    best = jnp.argmax(column['posterior']).astype(jnp.int32)
    thinks = left_ms >= THINK_MS + CHECK_MS + ANSWER_MS
    checks = left_ms >= CHECK_MS + ANSWER_MS
    verb = jnp.where(thinks, THINK, jnp.where(checks, CHECK, ANSWER))
    target = jnp.where(thinks | checks, chain, best)
    zero = jnp.int32(0)
    return observation.Action(verb.astype(jnp.int32), target, zero, zero)


def deadline_ms(thoughts):
  """Time for so many thoughts, a check and an answer."""
  return READ_MS + thoughts * THINK_MS + CHECK_MS + ANSWER_MS


def play(apart):
  """`TASKS` rollouts of every team and number of thoughts: leaves [N, n, P]."""
  rules = exact.make_rules(TEAMS, map(deadline_ms, THOUGHTS), awareness=True)
  rules = jax.tree.map(lambda x: jnp.repeat(x, TASKS), rules)
  index = jnp.arange(len(rules.deadline_ms))  # Other tasks for every rule.
  run = jax.jit(
      lambda index, rules: rollout.play_groups(
          COLLECTIVE,
          Attempts(COLLECTIVE, apart),
          (),
          jax.random.key(1),
          index,
          rules,
          group_size=1,
          chunk_size=8192,
      )[0]
  )
  played = jax.device_get(run(index, rules))
  shape = len(TEAMS), len(THOUGHTS), TASKS
  split = lambda x: x.reshape(*shape, *x.shape[1:]) if x.ndim else x
  return jax.tree.map(split, played)


@pytest.fixture(scope='module')
def independent():
  return play(apart=True)


@pytest.fixture(scope='module')
def crowded():
  return play(apart=False)


def p(thoughts):
  """The chance that a chain is right."""
  tries = np.maximum(np.asarray(thoughts) - LEAST + 1, 0)
  return 1 - (1 - 1 / DIFFICULTY) ** tries


def assert_shares(hits, chance):
  """Shares of `hits` [..., P] lie around the chances [...]."""
  chance = np.broadcast_to(chance, hits.shape[:-1])
  error = np.sqrt(chance * (1 - chance) / hits.shape[-1])
  assert (abs(hits.mean(axis=-1) - chance) <= SIGMAS * error + 1e-9).all()


def test_one_chain_is_right_with_the_chance_in_closed_form(independent):
  assert TEAMS[0] == 1
  assert_shares(independent.progress[0], p(THOUGHTS))


def test_independent_attempts_with_perfect_checks(independent):
  chance = 1 - (1 - p(THOUGHTS)[None, :]) ** np.array(TEAMS)[:, None]
  assert_shares(independent.progress, chance)
  effective = independent.effective.astype(int)  # [N, n, P, V]
  spent = np.multiply.outer(TEAMS, THOUGHTS)[:, :, None]
  assert (effective[..., THINK] == spent).all()
  assert (effective[..., CHECK] == np.array(TEAMS)[:, None, None]).all()
  assert (effective[..., ANSWER] == 1).all()


def test_agents_in_one_chain_are_worth_one(crowded):
  assert_shares(crowded.progress, p(THOUGHTS)[None, :])
  effective = crowded.effective.astype(int)
  assert (effective[..., THINK] == np.array(THOUGHTS)[None, :, None]).all()
  assert (effective[..., [CHECK, ANSWER]] == 1).all()
  turns = crowded.turns[..., THINK]
  assert (turns == np.multiply.outer(TEAMS, THOUGHTS)[:, :, None]).all()


def test_without_preparation_attempts_scale_as_one_long_chain():
  """N chains with n thoughts each are worth one with N n, and fewer if not."""
  agents = np.array(TEAMS)[:, None]
  tasks = ENV.sample_task(jax.random.key(0))
  for least, is_equal in ((1, True), (LEAST, False)):
    env = dataclasses.replace(ENV, least_thoughts=least)
    chance = lambda n, env=env: np.asarray(env.chance_right(tasks, n))
    attempts = 1 - (1 - chance(np.array(THOUGHTS)[None, :])) ** agents
    long = chance(agents * np.array(THOUGHTS)[None, :])
    if is_equal:
      np.testing.assert_allclose(attempts, long, atol=1e-5)
    else:
      assert (attempts[1:] < long[1:] - 1e-3).all()


def test_beliefs_come_true_as_often_as_they_say():
  env = reasoning.Reasoning(
      num_chains=4, min_difficulty=2.0, max_difficulty=12.0, check_error=0.2
  )
  chains = jnp.arange(4)  # And one agent for each.
  plan = [THINK, CHECK, THINK, THINK, CHECK, THINK, CHECK]

  def think_and_check(key):
    task_key, key = jax.random.split(key)
    task = env.sample_task(task_key)
    world, knows = env.reset(task), jnp.zeros((4, 4), bool)
    beliefs = []
    for i, verb in enumerate(plan):
      start_ms = jnp.full((4,), 10 * i, jnp.int32)
      turns = base.Turns(
          start_ms * 0 + verb, chains, start_ms, chains >= 0, 10 * (i + 1)
      )
      chance = jax.random.fold_in(key, i)
      world, knows, _ = env.land(task, world, turns, knows, chance)
      view = env.view(task, world, chains >= 0)
      posterior = view.features[:, env.feature_names.index('posterior')]
      beliefs.append((posterior, world.thoughts >= task.need))
    return beliefs

  keys = jax.random.split(jax.random.key(3), 2000)
  for belief, right in jax.device_get(jax.jit(jax.vmap(think_and_check))(keys)):
    rank = np.argsort(belief, axis=None)
    # In bins of like belief: [10, 800].
    belief, right = (
        x.reshape(-1)[rank].reshape(10, -1) for x in (belief, right)
    )
    error = np.sqrt((belief * (1 - belief)).mean(axis=1) / belief.shape[1])
    off = abs(belief.mean(axis=1) - right.mean(axis=1))
    assert (off <= SIGMAS * error + 1e-6).all()
