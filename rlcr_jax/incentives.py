"""From a rollout's outcome to the scalar that is reinforced.

The recipe's only incentive is the anytime return under a time limit: two
rollouts with the same progress at the deadline score the same, even if one was
done earlier. The others are for comparison, beside any schedule of deadlines.

An incentive sees whole groups, `[P, G]` tasks and rollouts, and what is
scheduled of it as traced numbers, so nothing compiles anew during training.
"""

from collections.abc import Callable
import dataclasses
import math

import chex
from envs.base import require
import jax
import jax.numpy as jnp
from rlcr_jax.rollout import Rollouts

Knobs = dict[str, chex.Array]  # Scheduled numbers of one update, [] float32.

_ROUNDING = 1e-6  # A share this close to a threshold has reached it.


@dataclasses.dataclass(frozen=True)
class IncentiveConfig:
  """All incentives share these fields; each uses what it needs."""

  name: str = 'deadline_return'  # One of INCENTIVES.
  penalty: float = 0.5  # latency_penalty: beta.
  max_ms: int = 180_000  # latency_penalty: T_max.
  penalty_floor: bool = False  # latency_penalty: success is at least 1 / G.
  gate: float = 0.0  # latency_penalty: progress to be penalised; 0: of all.
  toggle_every: int = 10  # toggle: m, updates with a budget, then without.
  toggle_accuracy: float = 0.8  # toggle: least share of correct rollouts.
  toggle_percentile: float = 50.0  # toggle: of the times of correct rollouts.
  solved_at: float = 1.0  # toggle: progress of a correct rollout.
  parallel: float = 0.2  # parl: lambda1 at first.
  finish: float = 0.2  # parl: lambda2 at first.
  anneal: float = 0.5  # parl: share of training after which both are 0.
  hires: int = 8  # parl: how many are rewarded in full.

  def __post_init__(self):
    known = tuple(INCENTIVES)
    require(self.name in known, 'incentive.name', self.name, f'one of {known}')
    for field in ('penalty', 'parallel', 'finish'):
      value = getattr(self, field)
      fits = 0 <= value < math.inf
      require(fits, f'incentive.{field}', value, '>= 0 and finite')
    for field in ('max_ms', 'toggle_every', 'hires'):
      value = getattr(self, field)
      require(value >= 1, f'incentive.{field}', value, '>= 1')
    for field in ('toggle_accuracy', 'anneal'):
      value = getattr(self, field)
      fits = 0 < value <= 1
      require(fits, f'incentive.{field}', value, 'above 0, at most 1')
    percentile = self.toggle_percentile
    fits = 0 <= percentile <= 100
    require(fits, 'incentive.toggle_percentile', percentile, 'from 0 to 100')
    for field in ('gate', 'solved_at'):
      value = getattr(self, field)
      require(math.isfinite(value), f'incentive.{field}', value, 'finite')
    require(self.gate >= 0, 'incentive.gate', self.gate, '>= 0')

  def knobs(self, step: int, steps: int) -> Knobs:
    """The scheduled numbers of one update, those that `name` needs."""
    scheduled = {}
    if self.name == 'toggle':
      scheduled = {'budgeted': (step // self.toggle_every) % 2 == 0}
    if self.name == 'parl':
      left = max(0.0, 1.0 - step / (self.anneal * max(steps - 1, 1)))
      scheduled = {
          'parallel': self.parallel * left,
          'finish': self.finish * left,
      }
    return {name: jnp.float32(value) for name, value in scheduled.items()}


def _reaches(progress: chex.Array, threshold: float) -> chex.Array:
  return progress >= threshold - _ROUNDING


def deadline_return(
    config: IncentiveConfig, rollouts: Rollouts, knobs: Knobs
) -> chex.Array:
  """Progress when the clock stopped, [P, G] float32."""
  del config, knobs
  return rollouts.progress


def latency_penalty(
    config: IncentiveConfig, rollouts: Rollouts, knobs: Knobs
) -> chex.Array:
  """`R - beta p T / T_max`, the shape of a penalty on reasoning length.

  p is the mean return of the task's rollouts, at least 0: tasks that are solved
  more often are pressed more. `penalty_floor` makes it at least 1 / G, as ALP
  (arXiv 2506.05256) does. T is the wall clock of the rollout. With `gate`, only
  rollouts that got so far are penalised.
  """
  del knobs
  progress = rollouts.progress
  success = jnp.mean(progress, axis=1, keepdims=True)
  least = 1.0 / progress.shape[1] if config.penalty_floor else 0.0
  success = jnp.maximum(success, least)
  share = jnp.asarray(rollouts.time_ms, jnp.float32) / config.max_ms
  penalty = config.penalty * success * share
  if config.gate > 0:
    penalty = jnp.where(_reaches(progress, config.gate), penalty, 0.0)
  return progress - penalty


def toggle(
    config: IncentiveConfig, rollouts: Rollouts, knobs: Knobs
) -> chex.Array:
  """Toggle of Kimi K2.5 (arXiv 2602.02276), on time instead of tokens.

  In phases with a budget, rollouts that took longer than it score 0, on tasks
  of which at least `toggle_accuracy` of the rollouts are correct. The budget is
  a percentile of the times of the correct ones.

  It deviates from the paper in two ways. There tasks come again, and a task's
  budget is fixed when training begins; here every task is new, and the budget
  is that of the group itself. And progress is anytime here, so a rollout is
  correct that got to `solved_at`; a budget takes away partial progress too.
  """
  progress = rollouts.progress
  time_ms = jnp.asarray(rollouts.time_ms, jnp.float32)
  correct = _reaches(progress, config.solved_at)
  count = jnp.sum(correct, axis=1, keepdims=True)  # [P, 1].
  budget_ms = _percentile(time_ms, correct, config.toggle_percentile)
  accuracy = count / progress.shape[1]
  applies = _reaches(accuracy, config.toggle_accuracy)
  applies &= (knobs['budgeted'] > 0) & (count > 0)
  return jnp.where(applies & (time_ms > budget_ms), 0.0, progress)


def _percentile(
    values: chex.Array, among: chex.Array, percentile: float
) -> chex.Array:
  """[P, 1]: percentiles of the values [P, G] `among`, linearly interpolated.

  Infinity where there are none.
  """
  ordered = jnp.sort(jnp.where(among, values, jnp.inf), axis=1)
  highest = jnp.maximum(jnp.sum(among, axis=1, keepdims=True) - 1, 0)
  place = percentile / 100.0 * highest
  below = jnp.floor(place).astype(jnp.int32)
  at = lambda index: jnp.take_along_axis(ordered, index, axis=1)
  low, high = at(below), at(jnp.minimum(below + 1, highest))
  return jnp.where(low < high, low + (place - below) * (high - low), low)


def parl(
    config: IncentiveConfig, rollouts: Rollouts, knobs: Knobs
) -> chex.Array:
  """`lambda1 r_parallel + lambda2 r_finish + r_perf` (Kimi K2.5).

  r_parallel is the number of hired agents over `hires`, at most 1; r_finish the
  share of hired agents that had an effect on the world at least once; r_perf is
  progress. Both lambdas fall along a line to 0.
  """
  hired = jnp.asarray(rollouts.hired, jnp.float32)
  r_parallel = jnp.minimum(hired / config.hires, 1.0)
  r_finish = rollouts.productive / jnp.maximum(hired, 1.0)
  bonus = knobs['parallel'] * r_parallel + knobs['finish'] * r_finish
  return rollouts.progress + bonus


INCENTIVES: dict[
    str, Callable[[IncentiveConfig, Rollouts, Knobs], chex.Array]
] = {
    'deadline_return': deadline_return,
    'latency_penalty': latency_penalty,
    'toggle': toggle,
    'parl': parl,
}


def score(
    config: IncentiveConfig, rollouts: Rollouts, group_size: int, knobs: Knobs
) -> chex.Array:
  """What is reinforced of B = P * G rollouts, [P, G] float32.

  Args:
    config: which incentive, and how strong.
    rollouts: [B] each; those of one task lie side by side.
    group_size: G.
    knobs: `config.knobs` of this update.
  """
  split = lambda x: (len(x) // group_size, group_size, *x.shape[1:])
  group = lambda x: x.reshape(split(x)) if x.ndim else x
  returns = INCENTIVES[config.name](
      config, jax.tree.map(group, rollouts), knobs
  )
  chex.assert_shape(returns, (None, group_size))
  return jnp.asarray(returns)
