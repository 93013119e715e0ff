"""A learned critic: what it says of a batch, and how well it knows."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from rlcr_jax import decisions
from rlcr_jax.policies.base import Critic
from rlcr_jax.policies.base import Params

_LEAST = 1e-12  # A variance below it is none.


class CriticState(NamedTuple):
  """What is learned of returns."""

  params: Params
  opt_state: optax.OptState


def values(
    critic: Critic, params: Params, buffer: decisions.Buffer, size: int
) -> chex.Array:
  """Values [D] float32 of all decisions of a buffer, `size` at a time."""
  total = buffer.rows.rollout.shape[0]

  def body(index, result):
    rows = decisions.chunk(buffer, index, size)
    found = critic.value(params, rows.observation)
    return jax.lax.dynamic_update_slice_in_dim(
        result, found, index * size, axis=0
    )

  chunks = (buffer.count + size - 1) // size
  return jax.lax.fori_loop(0, chunks, body, jnp.zeros((total,), jnp.float32))


def explained_variance(
    found: chex.Array,
    target: chex.Array,
    used: chex.Array,
    total: Callable[[chex.Array], chex.Array] = lambda x: x,
) -> chex.Array:
  """`1 - Var(target - value) / Var(target)` of the decisions `used`, [].

  At most 1; 0 for a constant, and where the targets do not differ.

  Args:
    found: [D] float32, the critic's values.
    target: [D] float32.
    used: [D] bool.
    total: sums over all devices.
  """
  count = jnp.maximum(total(jnp.sum(used)), 1)
  mean = lambda x: total(jnp.sum(jnp.where(used, x, 0.0))) / count
  variance = lambda x: mean(jnp.square(x - mean(x)))
  whole = variance(target)
  left = variance(target - found)
  known = 1.0 - left / jnp.maximum(whole, _LEAST)
  return jnp.where(whole > _LEAST, known, 0.0)
