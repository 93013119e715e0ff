"""The packed decision buffer: the learner's record of turns, without gaps."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from rlcr_jax.observation import Action
from rlcr_jax.observation import Observation


class Decision(NamedTuple):
  """One row per decision; every leaf has a leading row axis in a buffer."""

  rollout: chex.Array  # int32, index into B.
  agent: chex.Array  # int32, seat.
  start_ms: chex.Array  # int32.
  observation: Observation
  action: Action
  log_prob: chex.Array  # float32, of the sampled action when sampled.
  output_tokens: chex.Array  # int32.
  trainable: chex.Array  # bool: False for padding and frozen agents.


class Buffer(NamedTuple):
  """`rows[:count]` are decisions; what lies behind is undefined."""

  rows: Decision  # [capacity + C] each.
  count: chex.Array  # [] int32.
  overflow: chex.Array  # [] bool: a chunk did not fit, and nothing after it.


class BufferFullError(RuntimeError):
  """The rollouts of one update took more decisions than the buffer holds."""


def empty(row: Any, capacity: int, chunk_size: int) -> Buffer:
  """An empty buffer.

  Args:
    row: shapes and dtypes of one chunk, `[C, ...]` each.
    capacity: most decisions that it must hold.
    chunk_size: C; the buffer is longer by one chunk so that a partly filled
      last chunk can be written whole.
  """
  size = capacity + chunk_size
  zeros = lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype)
  return Buffer(jax.tree.map(zeros, row), jnp.int32(0), jnp.asarray(False))


def append(buffer: Buffer, chunk: Decision, count: chex.Array) -> Buffer:
  """Appends the first `count` rows of a chunk; the rest is overwritten next."""
  capacity = buffer.rows.rollout.shape[0] - chunk.rollout.shape[0]
  write = lambda rows, new: jax.lax.dynamic_update_slice_in_dim(
      rows, new.astype(rows.dtype), buffer.count, axis=0
  )
  overflow = buffer.overflow | (buffer.count + count > capacity)
  return Buffer(
      rows=jax.tree.map(write, buffer.rows, chunk),
      count=buffer.count + jnp.where(overflow, 0, count),
      overflow=overflow,
  )


def chunk(buffer: Buffer, index: chex.Array, size: int) -> Decision:
  """Rows `[index * size, (index + 1) * size)`; zeros beyond `count`.

  The rows of the buffer may be any pytree, [capacity + C] each. The last chunk
  may be cut by the end of the storage; it is then read from further in front,
  and rows that an earlier chunk held are zeros too.
  """
  total = jax.tree.leaves(buffer.rows)[0].shape[0]
  start = index * size
  first = jnp.minimum(start, total - size)
  rows = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), buffer.rows
  )
  position = first + jnp.arange(size)
  inside = (position >= start) & (position < buffer.count)
  # Padding is zeroed, not only masked, so that not even a NaN in it can reach
  # a gradient.
  blank = lambda x: jnp.where(
      inside.reshape(-1, *([1] * (x.ndim - 1))), x, jnp.zeros((), x.dtype)
  )
  return jax.tree.map(blank, rows)
