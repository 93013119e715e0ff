"""Policy-gradient losses and what they weight equally.

A loss is a sum over decisions of `weight * term`. The aggregation is in the
weights alone, which are computed once for the whole batch; the sum may then be
split into any chunks, devices and hosts without changing the gradient.
"""

from collections.abc import Callable

import chex
import jax.numpy as jnp

AGGREGATIONS = ('decision_mean', 'rollout_mean', 'agent_mean', 'constant')


def reinforce(
    log_prob: chex.Array,
    old_log_prob: chex.Array,
    advantage: chex.Array,
    clip: float,
) -> chex.Array:
  """`-A log pi`, per decision [C] (Williams, 1992)."""
  del old_log_prob, clip
  return -advantage * log_prob


def clipped_surrogate(
    log_prob: chex.Array,
    old_log_prob: chex.Array,
    advantage: chex.Array,
    clip: float,
) -> chex.Array:
  """`-min(r A, clip(r, 1 - eps, 1 + eps) A)`, [C] (PPO, arXiv 1707.06347)."""
  ratio = jnp.exp(log_prob - old_log_prob)
  clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
  return -jnp.minimum(ratio * advantage, clipped * advantage)


LOSSES: dict[str, Callable[..., chex.Array]] = {
    'reinforce': reinforce,
    'clipped_surrogate': clipped_surrogate,
}


def weights(
    aggregation: str,
    counts: chex.Array,
    constant: float,
    total: Callable[[chex.Array], chex.Array] = lambda x: x,
) -> chex.Array:
  """The weight of each decision of agent n in rollout b.

  Args:
    aggregation: `decision_mean` weights all decisions equally; `rollout_mean`
      all rollouts, and within one its decisions; `agent_mean` all rollouts,
      within one its agents, and within an agent its decisions (WideSeek-R1);
      `constant` divides by a number that does not depend on the data
      (Dr. GRPO, arXiv 2503.20783).
    counts: [B, N] int32, trainable decisions in informative groups.
    constant: the divisor of `constant`, per rollout.
    total: sums a scalar over all devices.

  Returns:
    [B, N] float32. Weights over all decisions sum to 1, except for `constant`.
  """
  chex.assert_rank(counts, 2)
  counts = counts.astype(jnp.float32)
  per_rollout = jnp.sum(counts, axis=1, keepdims=True)
  agents = jnp.sum(counts > 0, axis=1, keepdims=True)
  rollouts = jnp.maximum(total(jnp.sum(per_rollout > 0)), 1)
  one = lambda x: jnp.maximum(x, 1.0)
  divisor = {
      'decision_mean': one(total(jnp.sum(counts))),
      'rollout_mean': rollouts * one(per_rollout),
      'agent_mean': rollouts * one(agents) * one(counts),
      'constant': constant * total(jnp.float32(counts.shape[0])),
  }[aggregation]
  return jnp.broadcast_to(1.0 / divisor, counts.shape)
