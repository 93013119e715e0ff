"""Advantages: of collectives, of agents, or of single decisions.

Group-relative estimators map the returns `[P, G]` (tasks, rollouts of one task)
to one number per collective, which every decision of every agent is given, or
to one per agent. A group without a signal (all returns equal up to rounding, or
one not finite) gets exactly zero and is reported as not informative, so that it
touches neither the update nor its denominators.

`gae` gives every decision its own, by a learned critic.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

_ROUNDING = 1e-6  # Returns closer than this, relative to their size, are equal.

GAE = 'gae'
DISCOUNTS = ('turn', 'second')  # What gamma is per.
STANDARDISED = ('z_score', 'agent_z_score')  # Divided by a deviation.


class Groups(NamedTuple):
  """Which groups can be learned from. [P] bool each."""

  informative: chex.Array  # The returns differ.
  finite: chex.Array  # Every return is finite.


class Advantages(NamedTuple):
  """One number per agent of a rollout, and which groups have a signal."""

  values: chex.Array  # [P, G, N] float32.
  informative: chex.Array  # [P] bool.
  finite: chex.Array  # [P] bool.


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


def agent_z_score(returns: chex.Array, counts: chex.Array) -> chex.Array:
  """`(R_i - mean_n) / std_n` of agent n (Dr. MAS, arXiv 2602.08847, eq. 5).

  The mean and the population std of an agent are over its own decisions in all
  rollouts of the task, so a rollout in which it decided more weighs more, and
  one in which it had no part does not count. An agent whose decisions all had
  the same return has advantage 0.

  Args:
    returns: [P, G] float32.
    counts: [P, G, N], decisions.

  Returns:
    [P, G, N] float32, 0 where an agent had no part.
  """
  share = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
  mean = jnp.sum(share * returns[:, :, None], axis=1, keepdims=True)
  centred = jnp.where(counts > 0, returns[:, :, None] - mean, 0.0)
  std = jnp.sqrt(jnp.sum(share * jnp.square(centred), axis=1, keepdims=True))
  size = jnp.maximum(jnp.max(jnp.abs(returns), axis=1)[:, None, None], 1.0)
  differs = std > _ROUNDING * size
  return jnp.where(differs, centred / jnp.where(differs, std, 1.0), 0.0)


def _flat(of_returns: Callable[[chex.Array], chex.Array]):
  """The same number for all agents."""
  return lambda returns, counts: of_returns(returns)[:, :, None]


ESTIMATORS: dict[str, Callable[[chex.Array, chex.Array], chex.Array]] = {
    'group_mean': _flat(group_mean),
    'rloo': _flat(rloo),
    'z_score': _flat(z_score),
    'agent_z_score': agent_z_score,
}


def groups(returns: chex.Array) -> Groups:
  """Which groups of returns [P, G] can be learned from."""
  chex.assert_rank(returns, 2)
  finite = jnp.all(jnp.isfinite(returns), axis=1)
  safe = jnp.where(finite[:, None], returns, 0.0)
  size = jnp.maximum(jnp.max(jnp.abs(safe), axis=1), 1.0)
  spread = jnp.max(safe, axis=1) - jnp.min(safe, axis=1)
  return Groups(finite & (spread > _ROUNDING * size), finite)


def estimate(name: str, returns: chex.Array, counts: chex.Array) -> Advantages:
  """Group-relative advantages of a batch of groups.

  Args:
    name: one of `ESTIMATORS`.
    returns: [P, G] float32.
    counts: [P, G, N] int32, decisions of every agent that are learned from.
  """
  informative, finite = groups(returns)
  chex.assert_shape(counts, (*returns.shape, None))
  safe = jnp.where(finite[:, None], returns, 0.0)
  values = ESTIMATORS[name](safe, counts)
  values = jnp.where(informative[:, None, None], values, 0.0)
  return Advantages(jnp.broadcast_to(values, counts.shape), informative, finite)


def gae(
    values: chex.Array,
    returns: chex.Array,
    start_ms: chex.Array,
    end_ms: chex.Array,
    sequence: chex.Array,
    *,
    gamma: float,
    lambda_: float,
    discount_per: str,
) -> chex.Array:
  """Generalised advantages of decisions (Schulman et al., arXiv 1506.02438).

  The decisions of one agent of one rollout are a sequence of turns of unequal
  length. Its only reward is the rollout's return R, when the rollout ends:

    delta_j = d_j V_{j+1} - V_j    at its last decision: d_j R - V_j
    A_j = delta_j + d_j lambda A_{j+1}

  Per turn `d_j` is gamma, and 1 at the last decision. Per second it is gamma to
  the power of the seconds from the beginning of a decision to that of the
  agent's next one, or to the end of the rollout. lambda acts per decision.

  Args:
    values: [D] float32, the critic's V.
    returns: [D] float32, of the decision's rollout.
    start_ms: [D] int32, when the decision was made.
    end_ms: [D] int32, when the decision's rollout ended.
    sequence: [D] int32, which sequence it belongs to, and below 0 none. Those
      of one sequence are in order of time, with others between them.
    gamma: above 0, at most 1.
    lambda_: from 0 to 1.
    discount_per: one of `DISCOUNTS`.

  Returns:
    [D] float32, 0 for decisions of no sequence.
  """
  chex.assert_rank([values, returns, start_ms, end_ms, sequence], 1)
  chex.assert_equal_shape([values, returns, start_ms, end_ms, sequence])
  order = jnp.argsort(sequence, stable=True)
  values, returns, start_ms, end_ms, sequence = (
      x[order] for x in (values, returns, start_ms, end_ms, sequence)
  )
  following = lambda x: jnp.roll(x, -1)
  last = sequence != following(sequence)
  last = last.at[-1].set(True)
  if discount_per == 'second':
    until_ms = jnp.where(last, end_ms, following(start_ms))
    discount = jnp.power(gamma, (until_ms - start_ms) / 1000.0)
  else:
    discount = jnp.where(last, 1.0, gamma)
  ahead = jnp.where(last, returns, following(values))
  # Rows of no sequence may hold anything, so they are replaced, not masked.
  delta = jnp.where(sequence >= 0, discount * ahead - values, 0.0)
  decay = jnp.where(last | (sequence < 0), 0.0, discount * lambda_)

  def join(later, earlier):
    (decay_later, sum_later), (decay, total) = later, earlier
    return decay * decay_later, total + decay * sum_later

  _, advantage = jax.lax.associative_scan(join, (decay, delta), reverse=True)
  return jnp.zeros_like(advantage).at[order].set(advantage)
