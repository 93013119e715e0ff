"""Flat teams whose turns take just as long as they say, for tests of theory.

Nobody hires, and nothing is left to chance but what the world leaves to it.
"""

from collections.abc import Iterable
import itertools

import jax
import jax.numpy as jnp
from rlcr_jax import clock
from rlcr_jax import collective as collective_lib
from rlcr_jax import rollout
from rlcr_jax import roster

NEVER_MS = 3_600_000
# Reading and writing take 0.2 ms and 10 ms per token, turns whole seconds.
ROUND = {
    'prefill_tokens_per_s': 5000.0,
    'decode_tokens_per_s': 100.0,
    'quantum_ms': 1000,
}


def make_collective(env, agents, latency=None, **changes):
  """A collective without spread; `changes` are fields of its configuration."""
  usual = {
      'organisation': 'flat',
      'num_agents': agents,
      'peer_window': 1,
      'num_symbols': 1,
  }
  return collective_lib.Collective(
      env,
      collective_lib.CollectiveConfig(**(usual | changes)),
      clock.LatencyModel(**({'spread': 0.0} | (latency or {}))),
  )


def make_rules(
    teams: Iterable[int], deadlines_ms: Iterable[int] = (NEVER_MS,), **changes
) -> roster.Rules:
  """The rules of every team under every deadline, the teams first."""
  rules = [
      roster.rules('flat', int(ms), num_agents=int(n), max_hires=0, **changes)
      for n, ms in itertools.product(teams, deadlines_ms)
  ]
  return jax.tree.map(lambda *x: jnp.stack(x), *rules)


def play(
    collective, policy, tasks, rules, *, chunk_size=512, grid_ms=None, seed=0
) -> rollout.Rollouts:
  """Plays every task [P] under all of the rules [R]: leaves [R, P, ...]."""
  each = len(rules.deadline_ms)
  count = len(jax.tree.leaves(tasks)[0])
  rules = jax.tree.map(lambda x: jnp.repeat(x, count), rules)
  tasks = jax.tree.map(lambda x: jnp.concatenate([x] * each), tasks)
  keys = jax.random.split(jax.random.key(seed), each * count)

  @jax.jit
  def run(tasks, rules, keys):
    return rollout.play(
        collective,
        policy,
        (),
        tasks,
        rules,
        keys,
        chunk_size=chunk_size,
        grid_ms=None if grid_ms is None else jnp.asarray(grid_ms, jnp.int32),
    )[0]

  split = lambda x: x.reshape(each, count, *x.shape[1:]) if x.ndim else x
  return jax.tree.map(split, jax.device_get(run(tasks, rules, keys)))


def bounds(env, tasks, agents, limits_ms, turn_ms):
  """The bounds of every task [P] for some limits [T]: leaves [P, T]."""
  turn_ms = jnp.asarray(turn_ms, jnp.int32)
  bound = lambda task, ms: env.bounds(task, int(agents), ms, turn_ms)
  every = jax.vmap(jax.vmap(bound, (None, 0)), (0, None))
  return jax.device_get(every(tasks, jnp.asarray(limits_ms, jnp.int32)))
