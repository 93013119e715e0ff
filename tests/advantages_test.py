"""Tests of the estimators, with values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import advantages

NAN, INF = float('nan'), float('inf')


def estimate(name, returns):
  result = advantages.estimate(name, jnp.asarray(returns, jnp.float32))
  return advantages.Advantages(*map(np.asarray, result))


@pytest.mark.parametrize(
    'name, expected',
    [
        # Means are 0.5 and 0.25.
        ('group_mean', [[-0.5, 0.5, 0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]),
        # 4 / 3 as much.
        ('rloo', [[-2 / 3, 2 / 3, 2 / 3, -2 / 3], [1, -1 / 3, -1 / 3, -1 / 3]]),
        # Standard deviations are 0.5 and sqrt(0.75 / 4) = sqrt(3) / 4.
        (
            'z_score',
            [[-1, 1, 1, -1], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]],
        ),
    ],
)
def test_by_hand(name, expected):
  result = estimate(name, [[0, 1, 1, 0], [1, 0, 0, 0]])
  np.testing.assert_allclose(result.values, expected, rtol=1e-6)
  assert result.values.dtype == np.float32
  assert result.informative.tolist() == [True, True]
  assert result.finite.tolist() == [True, True]


def test_rloo_is_the_return_less_the_mean_of_the_others():
  returns = np.array([[0.1, 0.7, 0.4], [0.2, 0.2, 0.9]])
  others = [[np.delete(row, i).mean() for i in range(3)] for row in returns]
  result = estimate('rloo', returns)
  np.testing.assert_allclose(result.values, returns - others, atol=1e-6)
  group_mean = estimate('group_mean', returns).values
  np.testing.assert_allclose(result.values, group_mean * 1.5, atol=1e-6)


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_equal_returns_are_exactly_zero_and_not_informative(name):
  # In float32 the mean of eight times 0.35 need not be 0.35.
  result = estimate(name, [[0.35] * 8, [0.1] * 8, [0.0] * 8, [1.0] * 8])
  assert not result.values.any()
  assert not result.informative.any()
  assert result.finite.all()


@pytest.mark.parametrize(
    'name, rest, one',
    [
        ('group_mean', -0.00125, 0.00875),  # The mean is 0.35125.
        ('rloo', -0.01 / 7, 0.01),
        ('z_score', -(7**-0.5), 7**0.5),  # std = 0.00125 * sqrt(7).
    ],
)
def test_one_of_eight_differs_by_a_hundredth(name, rest, one):
  result = estimate(name, [[0.35] * 7 + [0.36]])
  assert result.informative.tolist() == [True]
  expected = [[rest] * 7 + [one]]
  np.testing.assert_allclose(result.values, expected, rtol=2e-4)


def test_rounding_noise_is_no_signal():
  just_above = np.nextafter(np.float32(0.35), np.float32(1))
  result = estimate('z_score', [[0.35] * 7 + [just_above]])
  assert not result.values.any() and not result.informative.any()


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
@pytest.mark.parametrize('bad', [NAN, INF, -INF])
def test_a_nonfinite_return_silences_its_own_group_only(name, bad):
  good = [[0.0, 1.0, 0.25], [0.5, 0.75, 0.5]]
  expected = estimate(name, good).values
  result = estimate(name, [good[0], [0.0, bad, 1.0], good[1]])
  np.testing.assert_array_equal(result.values[[0, 2]], expected)
  assert not result.values[1].any()
  assert result.finite.tolist() == [True, False, True]
  assert result.informative.tolist() == [True, False, True]


def test_groups_are_tasks_whatever_the_number_of_agents():
  # Two rollouts of one task: a group of two, for collectives of any size.
  result = estimate('group_mean', [[0.0, 1.0]])
  assert result.values.tolist() == [[-0.5, 0.5]]
  for shape in [(2,), (1, 2, 2)]:  # No tasks; an axis of agents.
    with pytest.raises(AssertionError):
      advantages.estimate('group_mean', jnp.zeros(shape))


def test_groups_do_not_mix():
  returns = np.array([[0.0, 1.0], [10.0, 14.0]])
  result = estimate('group_mean', returns)
  assert result.values.tolist() == [[-0.5, 0.5], [-2.0, 2.0]]
