"""Group-relative advantages: one flat number per collective.

All estimators map returns `[P, G]` (tasks, rollouts of one task) to advantages
`[P, G]`. The same number is later applied to every decision of every agent of
the rollout. A group without a signal (all returns equal up to rounding, or one
not finite) gets exactly zero and is reported as not informative, so that it
touches neither the update nor its denominators.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax.numpy as jnp

_ROUNDING = 1e-6  # Returns closer than this, relative to their size, are equal.


class Advantages(NamedTuple):
  """One number per rollout, and which groups have a signal."""

  values: chex.Array  # [P, G] float32.
  informative: chex.Array  # [P] bool.
  finite: chex.Array  # [P] bool: every return of the group is finite.


def group_mean(returns: chex.Array) -> chex.Array:
  """`R_i - mean_j R_j`: RLCR's default (the mean-only form of Dr. GRPO)."""
  return returns - jnp.mean(returns, axis=1, keepdims=True)


def rloo(returns: chex.Array) -> chex.Array:
  """Baseline = mean of the others; `G / (G - 1)` times `group_mean`."""
  group_size = returns.shape[1]
  return group_mean(returns) * (group_size / (group_size - 1))


def z_score(returns: chex.Array) -> chex.Array:
  """`(R_i - mean) / std` with the population std (GRPO, arXiv 2402.03300)."""
  centred = group_mean(returns)
  std = jnp.sqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True))
  return centred / jnp.maximum(std, _ROUNDING)


ESTIMATORS: dict[str, Callable[[chex.Array], chex.Array]] = {
    'group_mean': group_mean,
    'rloo': rloo,
    'z_score': z_score,
}


def estimate(name: str, returns: chex.Array) -> Advantages:
  """Advantages of a batch of groups.

  Args:
    name: one of `ESTIMATORS`.
    returns: [P, G] float32.
  """
  chex.assert_rank(returns, 2)
  finite = jnp.all(jnp.isfinite(returns), axis=1)
  safe = jnp.where(finite[:, None], returns, 0.0)
  size = jnp.maximum(jnp.max(jnp.abs(safe), axis=1), 1.0)
  spread = jnp.max(safe, axis=1) - jnp.min(safe, axis=1)
  informative = finite & (spread > _ROUNDING * size)
  values = jnp.where(informative[:, None], ESTIMATORS[name](safe), 0.0)
  return Advantages(values, informative, finite)
