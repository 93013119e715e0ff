"""Tests of means, intervals and crossings."""

import numpy as np
import pytest
from rlcr_jax import statistics


def coverage(interval_of, draw, truth, repeats=300):
  """Share of data sets whose interval holds the truth."""
  rng = np.random.default_rng(0)
  inside = 0
  for _ in range(repeats):
    low, high = interval_of(*draw(rng))[1]
    inside += low <= truth <= high
  return inside / repeats


def test_interval_of_a_mean_covers_it_95_times_in_100():
  draw = lambda rng: (rng.normal(3.0, 2.0, 64),)
  # The bootstrap is a little narrow; sampling error is 1.3 points.
  assert 0.90 <= coverage(statistics.mean_ci95, draw, 3.0) <= 0.98


def test_t_interval_by_hand():
  mean, (low, high) = statistics.mean_t95([1.0, 2.0, 3.0, 4.0])
  # t = 3.1824 for 3 degrees of freedom; s² = 5 / 3; √n = 2.
  half = 3.1824 * (5 / 3) ** 0.5 / 2
  assert mean == 2.5
  np.testing.assert_allclose([low, high], [2.5 - half, 2.5 + half], rtol=1e-4)


def test_t_interval_of_a_single_value_is_unknown():
  mean, ends = statistics.mean_t95([0.5])
  assert mean == 0.5 and np.isnan(ends).all()


def test_t_interval_of_three_values_covers_the_mean_95_times_in_100():
  draw = lambda rng: (rng.normal(3.0, 2.0, 3),)
  assert 0.93 <= coverage(statistics.mean_t95, draw, 3.0, 2000) <= 0.97


def test_interval_of_a_ratio_covers_it_95_times_in_100():
  def draw(rng):
    under = rng.uniform(1.0, 2.0, 64)
    return 3.0 * under + rng.normal(0.0, 1.0, 64), under

  assert 0.90 <= coverage(statistics.ratio_ci95, draw, 3.0) <= 0.98


def test_mean_and_interval_by_hand():
  mean, interval = statistics.mean_ci95(np.array([0.0] * 50 + [1.0] * 50))
  assert mean == 0.5
  # 0.5 -+ 1.96 * 0.5 / sqrt(100).
  np.testing.assert_allclose(interval, [0.402, 0.598], atol=0.015)


def test_interval_of_one_value_is_that_value():
  assert statistics.mean_ci95(np.full(8, 0.25)) == (0.25, [0.25, 0.25])


def test_ratio_of_means_by_hand():
  # (2 + 6) / (1 + 3), which the mean of the ratios, 2, hides; 8 / 5 shows it.
  assert statistics.ratio_ci95([2.0, 6.0], [1.0, 3.0])[0] == 2.0
  assert statistics.ratio_ci95([2.0, 6.0], [1.0, 4.0])[0] == 1.6


def test_tasks_are_resampled_as_pairs():
  """A fixed ratio on every task leaves no doubt about it."""
  under = np.array([1.0, 10.0, 100.0, 1000.0])
  ratio, interval = statistics.ratio_ci95(2.5 * under, under)
  np.testing.assert_allclose([ratio, *interval], 2.5, rtol=1e-12)


def test_ratio_to_nothing_is_nan_without_a_warning(recwarn):
  ratio, interval = statistics.ratio_ci95(np.zeros(4), np.zeros(4))
  assert np.isnan([ratio, *interval]).all()
  assert not recwarn.list


def test_results_are_plain_and_repeat():
  values = np.random.default_rng(1).random(16)
  first, second = statistics.mean_ci95(values), statistics.mean_ci95(values)
  assert first == second
  assert [type(x) for x in (first[0], *first[1])] == [float] * 3


@pytest.mark.parametrize(
    'upper, lower, expected',
    [
        # From -1 to 1 between 20 and 30: half way.
        ([0, 0, 2, 3], [0, 1, 1, 1], 25.0),
        # From -1 to 3: a quarter of the way from 10 to 20.
        ([0, 4, 4, 4], [1, 1, 1, 1], 12.5),
        # Overtakes, falls back, overtakes for good: the last time counts.
        ([2, 0, 2, 2], [1, 1, 1, 1], 25.0),
        # Equal at 30 is not above yet.
        ([0, 0, 1, 2], [1, 1, 1, 1], 30.0),
        # Above throughout, and never.
        ([2, 2, 2, 2], [1, 1, 1, 1], 10.0),
        ([0, 2, 2, 1], [1, 1, 1, 1], None),
        ([0, 2, 2, 0], [1, 1, 1, 1], None),
    ],
)
def test_first_crossing_by_hand(upper, lower, expected):
  x = np.array([10, 20, 30, 40])
  found = statistics.first_crossing(x, np.array(upper), np.array(lower))
  assert found == expected
