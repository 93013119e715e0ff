"""From a rollout's outcome to the scalar that is reinforced.

The recipe's only incentive is the anytime return under a time limit: two
rollouts with the same progress at the deadline score the same, even if one was
done earlier.
"""

from collections.abc import Callable

import chex
from rlcr_jax.rollout import Rollouts


def deadline_return(rollouts: Rollouts) -> chex.Array:
  """Progress when the clock stopped, [B] float32."""
  return rollouts.progress


INCENTIVES: dict[str, Callable[[Rollouts], chex.Array]] = {
    'deadline_return': deadline_return,
}
