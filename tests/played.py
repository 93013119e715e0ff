"""A batch of random rollouts that several tests look at."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import rollout
from rlcr_jax.policies import scripted
from rlcr_jax.policies import transformer
from tests import by_hand

# All times are multiples of 10 ms before they are rounded up to seconds, so
# that what a turn takes can be worked out in integers.
COLLECTIVE = by_hand.make_collective(
    latency={'prefill_tokens_per_s': 100.0, 'spread': 0.3},
    organisation='ceo',
    num_agents=4,
    max_hires=3,
    task_tokens=300,
)
VERBS = [v.name for v in COLLECTIVE.verbs]
TOKEN_MS = 10  # Of reading it and of writing it.
# Every organisation, with and without channels and privileges; two deadlines
# are no whole number of seconds.
KINDS = (
    COLLECTIVE.config.rules(60_000),
    COLLECTIVE.config.rules(40_000, organisation='flat'),
    COLLECTIVE.config.rules(45_500),
    COLLECTIVE.config.rules(25_000, organisation='solo'),
    COLLECTIVE.config.rules(20_000, organisation='flat', direct=False),
    COLLECTIVE.config.rules(
        25_001, organisation='flat', awareness=True, free_facts=True
    ),
)
RULES = by_hand.batch_rules(KINDS * 6)
BATCH = len(RULES.deadline_ms)
CAPACITY = 2000
GRID_MS = jnp.arange(0, 64_000, 4000)


@dataclasses.dataclass(frozen=True)
class Recorder(scripted.RandomPolicy):
  """Random, with a restless chief.

  Instead of a log-probability it gives a draw from the decision's key.
  """

  def sample(self, params, keys, obs):
    action, _ = super().sample(params, keys, obs)
    draws = jax.vmap(jax.random.normal)(keys)
    hire, fire = COLLECTIVE.verb('hire'), COLLECTIVE.verb('fire')
    hires = obs.legal_verb[:, hire] & (draws < -0.5)
    fires = obs.legal_verb[:, fire] & (draws > 0.5)
    someone = jax.vmap(lambda key, legal: jax.random.uniform(key, legal.shape))
    whom = jnp.argmax(someone(keys, obs.legal_peer) * obs.legal_peer, axis=1)
    action = jax.tree.map(lambda x: jnp.where(hires | fires, 0, x), action)
    verb = jnp.where(hires, hire, jnp.where(fires, fire, action.verb))
    peer = jnp.where(fires, whom.astype(jnp.int32), action.peer)
    return action._replace(verb=verb, peer=peer), draws


RECORDER = Recorder(COLLECTIVE)
NETWORK = transformer.TransformerPolicy(
    COLLECTIVE, transformer.TransformerConfig(width=8, layers=1, heads=2)
)
TRACES = []


@functools.partial(jax.jit, static_argnames=('policy', 'chunk_size'))
def play_jit(policy, params, tasks, rules, keys, chunk_size):
  TRACES.append((policy, chunk_size, len(keys)))
  return rollout.play(
      COLLECTIVE,
      policy,
      params,
      tasks,
      rules,
      keys,
      chunk_size=chunk_size,
      capacity=CAPACITY,
      grid_ms=GRID_MS,
  )


@functools.cache
def params_of(policy):
  return policy.init(jax.random.key(7))


@functools.cache
def inputs(seed=0):
  """Tasks and keys of `BATCH` rollouts, each of a task of its own."""
  tasks, _, keys = rollout.group_inputs(
      COLLECTIVE, jax.random.key(seed), jnp.arange(BATCH), RULES, 1
  )
  return tasks, keys


class Played(NamedTuple):
  """Rollouts [B], and their decisions by rollout, agent and time."""

  rollouts: rollout.Rollouts
  decisions: rollout.decisions.Decision


def play(policy=RECORDER, chunk_size=32, rows=None, seed=0, rules=RULES):
  """Plays all rollouts, or the `rows` of them."""
  pick = lambda tree: jax.tree.map(lambda x: x[jnp.array(rows)], tree)
  batch = (*inputs(seed), rules)
  tasks, keys, rules = batch if rows is None else map(pick, batch)
  rollouts, buffer = play_jit(
      policy, params_of(policy), tasks, rules, keys, chunk_size
  )
  assert not buffer.overflow
  table = jax.tree.map(lambda x: np.asarray(x)[: buffer.count], buffer.rows)
  order = np.lexsort((table.start_ms, table.agent, table.rollout))
  return Played(
      jax.tree.map(np.asarray, rollouts),
      jax.tree.map(lambda x: x[order], table),
  )


@functools.cache
def played(policy=RECORDER, chunk_size=32):
  """What most tests look at, played once."""
  return play(policy, chunk_size)


def of_one(table, number):
  """The decisions of one rollout."""
  rows = table.rollout == number
  return jax.tree.map(lambda x: x[rows], table)._replace(rollout=None)
