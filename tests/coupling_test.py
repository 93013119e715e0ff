"""Silence costs nothing where facts are public, and more where more are not."""

from envs import registry
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib
from rlcr_jax import references
from rlcr_jax import rollout
from rlcr_jax import roster

# Of `reasoning`, verdicts mostly concern the agent that asked for them.
NAMES = [name for name in registry.names() if name != 'reasoning']
COUPLINGS = 0.0, 1 / 3, 2 / 3, 1.0
TASKS = 32
DEADLINE_MS = 180_000


def play(name):
  """Returns [mode, coupling, task] of the oracle with and without privileges.

  Coupling shapes tasks and not what happens on them, so one program plays all.
  """
  keys = jax.random.split(jax.random.key(0), TASKS)
  tasks = [
      jax.vmap(registry.make(name, coupling=c).sample_task)(keys)
      for c in COUPLINGS
  ]
  tasks = jax.tree.map(lambda *x: jnp.concatenate([*x] * 2), *tasks)
  collective = collective_lib.Collective(registry.make(name))
  count = len(COUPLINGS) * TASKS
  modes = [
      roster.repeat(
          collective.rules(DEADLINE_MS, **references.MODES[mode][1]), count
      )
      for mode in ('oracle', 'oracle_muted')
  ]
  rules = jax.tree.map(lambda *x: jnp.concatenate(x), *modes)
  policy = references.policies(collective)['oracle']

  @jax.jit
  def run(tasks, rules, keys):
    return rollout.play(
        collective, policy, (), tasks, rules, keys, chunk_size=256
    )[0].progress

  keys = jnp.tile(
      jax.random.split(jax.random.key(1), TASKS), 2 * len(COUPLINGS)
  )
  return np.asarray(run(tasks, rules, keys)).reshape(2, len(COUPLINGS), TASKS)


@pytest.mark.parametrize('name', NAMES)
def test_silence_costs_more_the_more_is_private(name):
  spoken, silent = play(name)
  cost = (spoken - silent).mean(axis=1)
  assert cost[0] == pytest.approx(0.0, abs=1e-6), cost
  assert (np.diff(cost) > 0.0).all(), cost
  assert cost[-1] > 0.1, cost
