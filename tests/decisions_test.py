"""Tests of the packed decision buffer, filled by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import decisions
from rlcr_jax.observation import Action

CAPACITY, CHUNK = 9, 4  # So the storage holds 13 rows.
NAN = float('nan')


def make_rows(ids, garbage=False):
  """Decisions that can be told apart, or rows that nobody should ever use."""
  ids = np.asarray(ids)
  ints = jnp.array(ids, jnp.int32)
  floats = jnp.array(np.full(ids.shape, NAN) if garbage else ids, jnp.float32)
  return decisions.Decision(
      rollout=ints,
      agent=ints + 100,
      start_ms=ints * 1000,
      observation={'me': jnp.stack([floats, -floats], axis=1)},
      action=Action(ints, ints, ints, ints),
      log_prob=floats / 2,
      output_tokens=ints + 7,
      trainable=jnp.ones(ids.shape, bool),
  )


def make_chunk(first, count):
  """`count` decisions from number `first` on, then garbage."""
  good, bad = make_rows(range(first, first + count)), make_rows([-9] * 4, True)
  return jax.tree.map(lambda x, y: jnp.concatenate([x, y])[:CHUNK], good, bad)


def fill(counts, append=decisions.append):
  """A buffer after chunks of so many decisions, which are numbered from 1."""
  buffer = decisions.empty(make_chunk(1, 0), CAPACITY, CHUNK)
  first = 1
  for count in counts:
    buffer = append(buffer, make_chunk(first, count), jnp.int32(count))
    first += count
  return buffer


chunk_of = jax.jit(decisions.chunk, static_argnums=2)


def same(x, y):
  jax.tree.map(np.testing.assert_array_equal, x, y)


def held(buffer):
  """The decisions in the buffer."""
  return jax.tree.map(lambda x: x[: int(buffer.count)], buffer.rows)


def test_empty():
  buffer = fill([])
  assert buffer.count == 0
  assert not buffer.overflow
  like = make_chunk(1, 0)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape[1:], x.dtype), tree)
  assert shapes(buffer.rows) == shapes(like)
  assert {len(x) for x in jax.tree.leaves(buffer.rows)} == {13}
  # Shapes alone are enough, as they are known before anything has run.
  abstract = decisions.empty(jax.eval_shape(lambda: like), CAPACITY, CHUNK)
  same(abstract, buffer)


@pytest.mark.parametrize(
    'counts',
    [[3], [4, 4], [3, 0, 4, 2], [1] * 9, [0, 0, 4, 4, 1], [2, 3, 4, 0]],
)
def test_partly_filled_chunks_leave_no_gaps(counts):
  for append in (decisions.append, jax.jit(decisions.append)):
    buffer = fill(counts, append)
    assert buffer.count == sum(counts)
    assert not buffer.overflow
    same(held(buffer), make_rows(range(1, sum(counts) + 1)))


@pytest.mark.parametrize(
    'counts, kept',
    [
        ([4, 4, 2], 8),  # The tenth does not fit, so neither is the ninth kept.
        ([4, 4, 1, 1], 9),
        ([3, 3, 3, 4], 9),
        ([4, 4, 2, 1, 1], 8),  # It stays an error, whatever comes after.
        ([4, 4, 2, 0], 8),
    ],
)
def test_a_full_buffer_is_an_error_and_keeps_what_it_had(counts, kept):
  buffer = fill(counts)
  assert buffer.overflow
  assert buffer.count == kept
  same(held(buffer), make_rows(range(1, kept + 1)))


def test_no_decision_is_dropped_without_an_overflow():
  rng = np.random.default_rng(0)
  append = jax.jit(decisions.append)
  for _ in range(30):
    counts = rng.integers(0, CHUNK + 1, 5).tolist()
    buffer = fill(counts, append)
    assert bool(buffer.overflow) == (sum(counts) > CAPACITY)
    assert buffer.overflow or buffer.count == sum(counts)


@pytest.mark.parametrize('count', [0, 1, 4, 7, 9])
@pytest.mark.parametrize('size', [1, 4, 5, 6, 8, 13])
def test_chunks_hold_every_decision_once_and_zeros(count, size):
  # 13 rows of storage are no multiple of 5, 6 or 8: their last chunk is cut.
  buffer = fill([1] * count)
  chunks = [chunk_of(buffer, i, size) for i in range(-(-13 // size))]
  all_rows = jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)
  assert all_rows.trainable.sum() == count
  picked = jax.tree.map(lambda x: x[all_rows.trainable], all_rows)
  same(picked, make_rows(range(1, count + 1)))
  for leaf in jax.tree.leaves(all_rows):
    assert (leaf[~all_rows.trainable] == 0).all()


def test_a_chunk_that_the_end_of_the_storage_cuts():
  chunk = chunk_of(fill([4, 4, 1]), 1, 8)
  # Rows 8 to 15, of which 8 is the last decision and 13 does not exist; rows
  # 5 to 7 fill it up, and belong to chunk 0.
  np.testing.assert_array_equal(chunk.rollout, [0, 0, 0, 9, 0, 0, 0, 0])
  np.testing.assert_array_equal(chunk.trainable, np.arange(8) == 3)


def test_garbage_in_the_padding_is_zeroed():
  buffer = fill([3])
  assert jnp.isnan(buffer.rows.log_prob[3])
  chunk = chunk_of(buffer, 0, CHUNK)
  np.testing.assert_array_equal(chunk.log_prob, [0.5, 1, 1.5, 0])
  np.testing.assert_array_equal(
      chunk.observation['me'], [[1, -1], [2, -2], [3, -3], [0, 0]]
  )
  np.testing.assert_array_equal(chunk.trainable, [True, True, True, False])

  def total(weight):
    rows = decisions.chunk(buffer, jnp.int32(0), CHUNK)
    return jnp.sum(weight * rows.log_prob * rows.observation['me'][:, 0])

  assert jax.grad(total)(2.0) == 0.5 + 2 + 4.5  # Not NaN.


def test_chunks_are_read_in_a_compiled_loop():
  buffer = fill([3, 4, 2])

  def total(index, sum_):
    return sum_ + decisions.chunk(buffer, index, CHUNK).log_prob.sum()

  loop = jax.jit(lambda: jax.lax.fori_loop(0, 3, total, jnp.float32(0)))
  assert loop() == sum(range(1, 10)) / 2
