"""Tests of what a critic says of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import critic as critic_lib
from rlcr_jax import decisions
from rlcr_jax.observation import Action


class First:
  """The first feature, as it is."""

  def value(self, params, obs):
    return params * obs['me'][:, 0]


def make_buffer(count, capacity=12, chunk_size=4):
  """Decisions that are numbered from 1 on; garbage behind them."""
  size = capacity + chunk_size
  number = np.where(np.arange(size) < count, np.arange(size) + 1.0, np.nan)
  ints = jnp.zeros(size, jnp.int32)
  rows = decisions.Decision(
      rollout=ints,
      agent=ints,
      start_ms=ints,
      observation={'me': jnp.asarray(number, jnp.float32)[:, None]},
      action=Action(ints, ints, ints, ints),
      log_prob=ints,
      output_tokens=ints,
      trainable=ints > 0,
  )
  return decisions.Buffer(rows, jnp.int32(count), jnp.asarray(False))


@pytest.mark.parametrize('count', [0, 1, 4, 11, 12])
@pytest.mark.parametrize('chunk_size', [1, 3, 4])
def test_every_decision_has_its_value(count, chunk_size):
  buffer = make_buffer(count)
  found = critic_lib.values(First(), jnp.float32(2.0), buffer, chunk_size)
  assert found.shape == (16,)
  np.testing.assert_array_equal(found[:count], 2.0 * np.arange(1, count + 1))
  assert np.isfinite(found).all()


TARGET = np.float32([1, 2, 3, 4, 100])
USED = np.array([True, True, True, True, False])


def explained(found, target=TARGET, used=USED):
  arrays = (jnp.asarray(x, jnp.float32) for x in (found, target))
  return float(critic_lib.explained_variance(*arrays, jnp.asarray(used)))


@pytest.mark.parametrize(
    'found, expected',
    [
        (TARGET, 1.0),
        (TARGET + 7, 1.0),  # A bias is no variance.
        ([5, 5, 5, 5, 0], 0.0),
        ([1, 2, 4, 3, 0], 0.6),  # Errors 0, 0, -1, 1: 0.5 of 1.25.
        (-TARGET, -3.0),  # Worse than nothing: four times the variance.
    ],
)
def test_explained_variance_by_hand(found, expected):
  assert explained(found) == pytest.approx(expected, abs=1e-6)


def test_explained_variance_of_nothing_is_0():
  assert explained([1, 2, 3, 4, 5], target=[2] * 5) == 0.0
  assert explained(TARGET, used=[False] * 5) == 0.0


def test_explained_variance_is_over_all_devices():
  found = np.float32([1, 2, 4, 3, 0, 0])
  target = np.float32([1, 2, 3, 4, 100, 100])
  used = np.array([True] * 4 + [False] * 2)
  total = lambda x: jax.lax.psum(x, 'data')
  split = jax.vmap(
      lambda *x: critic_lib.explained_variance(*x, total), axis_name='data'
  )(*(jnp.asarray(x).reshape(2, 3) for x in (found, target, used)))
  np.testing.assert_allclose(split, 0.6, rtol=1e-5)
