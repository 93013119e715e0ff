"""What policies that learn nothing return: the frame for every result.

One compiled program per policy plays all deadlines and team sizes at once,
since both are traced.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import rollout
from rlcr_jax import roster
from rlcr_jax.collective import Collective
from rlcr_jax.policies import scripted
from rlcr_jax.policies.base import Policy

MUTED = dict.fromkeys(roster.CHANNELS, False)
ORACLE = {'awareness': True, 'free_facts': True}

# Mode → the policy, and changes to the rules of the collective.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    'random': ('random', {}),
    'oracle': ('oracle', ORACLE),
    'oracle_muted': ('oracle', {'awareness': True} | MUTED),
    'greedy_solo': ('greedy', {'organisation': 'solo'}),
}


def policies(collective: Collective) -> dict[str, Policy]:
  """The scripted policies of `MODES`."""
  hires = collective.config.max_hires
  return {
      'random': scripted.RandomPolicy(collective),
      'oracle': scripted.ListScheduler(collective, hires),
      'greedy': scripted.ListScheduler(collective, 0, by_value=True),
  }


def returns(
    collective: Collective,
    mode: str,
    deadlines_ms: np.ndarray,
    *,
    hires: tuple[int, ...] | None = None,
    num_tasks: int = 64,
    seed: int = 0,
    chunk_size: int = 64,
) -> np.ndarray:
  """Returns of one mode under several deadlines and limits of hiring.

  Args:
    collective: the world, the roster, the channels and the clock.
    mode: one of `MODES`.
    deadlines_ms: [D] int.
    hires: [H], most agents that the chief may employ; None: as configured.
    num_tasks: P, the same for all.
    seed: of the tasks and of chance.
    chunk_size: decisions evaluated at once.

  Returns:
    [H, D, P] float32.
  """
  name, changes = MODES[mode]
  policy = policies(collective)[name]
  limits = (collective.config.max_hires,) if hires is None else hires
  rules = [
      collective.rules(int(d), **({'max_hires': h} | changes))
      for h in limits
      for d in deadlines_ms
  ]
  rules = jax.tree.map(lambda *x: jnp.repeat(jnp.stack(x), num_tasks), *rules)
  index = jnp.tile(jnp.arange(num_tasks), len(limits) * len(deadlines_ms))

  @jax.jit
  def play(key, index, rules):
    rollouts, _ = rollout.play_groups(
        collective,
        policy,
        (),
        key,
        index,
        rules,
        group_size=1,
        chunk_size=chunk_size,
    )
    return rollouts.progress

  played = play(jax.random.key(seed), index, rules)
  return np.asarray(played).reshape(len(limits), len(deadlines_ms), num_tasks)
