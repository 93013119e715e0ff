"""Means with confidence intervals: over tasks by bootstrap, over seeds by t."""

import numpy as np
from scipy import special

_RESAMPLES = 2000


def _resamples(count: int) -> np.ndarray:
  """[R, count] indices: the same for all statistics, so that they pair."""
  return np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))


def mean_ci95(values: np.ndarray) -> tuple[float, list[float]]:
  """The mean of [P] values and its 95 % bootstrap interval.

  Args:
    values: one independent number per task.
  """
  values = np.asarray(values, np.float64)
  means = values[_resamples(len(values))].mean(1)
  return float(values.mean()), [float(q) for q in np.quantile(means, _TAILS)]


def ratio_ci95(
    numerator: np.ndarray, denominator: np.ndarray
) -> tuple[float, list[float]]:
  """Ratio of two means over the same [P] tasks, and its 95 % interval.

  Tasks are resampled as pairs. NaN where the denominator's mean is 0.
  """
  over = np.asarray(numerator, np.float64)
  under = np.asarray(denominator, np.float64)
  index = _resamples(len(over))
  with np.errstate(divide='ignore', invalid='ignore'):
    ratios = over[index].mean(1) / under[index].mean(1)
    ratio = over.mean() / under.mean()
  return float(ratio), [float(q) for q in np.quantile(ratios, _TAILS)]


_TAILS = (0.025, 0.975)


def mean_t95(values: np.ndarray) -> tuple[float, list[float]]:
  """The mean of few values [n], such as one per seed, and its 95 % interval.

  Student's t-interval, mean ± t(n - 1) s / √n, for values that are about
  normal. With few it is wide (t = 12.7 for n = 2, 4.3 for n = 3), as it should
  be: so few do not say how much they vary. NaN for a single value.
  """
  values = np.asarray(values, np.float64)
  mean, n = float(values.mean()), len(values)
  if n < 2:
    return mean, [float('nan')] * 2
  half = special.stdtrit(n - 1, _TAILS[1]) * values.std(ddof=1) / n**0.5
  return mean, [float(mean - half), float(mean + half)]


def first_crossing(
    x: np.ndarray, upper: np.ndarray, lower: np.ndarray
) -> float | None:
  """Where `upper` comes to lie above `lower` for good, interpolated.

  Args:
    x: [T] increasing.
    upper: [T] the curve that overtakes.
    lower: [T] the curve that is overtaken.

  Returns:
    None if `upper` is not above at the end; `x[0]` if it is so throughout.
  """
  gap = np.asarray(upper, np.float64) - np.asarray(lower, np.float64)
  below = np.flatnonzero(gap <= 0)
  if len(below) == 0:
    return float(x[0])
  last = below[-1]
  if last == len(gap) - 1:
    return None
  share = -gap[last] / (gap[last + 1] - gap[last])
  return float(x[last] + share * (x[last + 1] - x[last]))
