"""Time-limit schedules: the deadline of every task at every update.

Latency pressure comes from the time limit alone, and the limit grows over
training, so that agents learn to coordinate over short horizons first (RLCR).
A schedule is a pure function of (step, key); the deadline it gives is a traced
value, so no schedule compiles anything anew.
"""

from collections.abc import Callable
import dataclasses

from envs.base import require
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class DeadlineConfig:
  """All schedules share these fields; each uses what it needs."""

  schedule: str = 'linear'  # One of SCHEDULES.
  first_ms: int = 45_000  # The deadline at step 0 (linear, staged, sampled).
  final_ms: int = 180_000  # The full limit: last step, and the evaluation.
  ramp: float = 0.06  # linear, staged: share of training spent growing.
  stages: int = 4  # staged: number of equal plateaus on the way.
  toggle_every: int = 10  # toggle: steps at `first_ms`, then at `final_ms`.

  def __post_init__(self):
    require(
        self.schedule in SCHEDULES,
        'deadline.schedule',
        self.schedule,
        f'one of {tuple(sorted(SCHEDULES))}',
    )
    require(self.first_ms >= 1, 'deadline.first_ms', self.first_ms, '>= 1 ms')
    require(
        self.final_ms >= self.first_ms,
        'deadline.final_ms',
        self.final_ms,
        f'>= deadline.first_ms={self.first_ms}',
    )
    require(0 <= self.ramp <= 1, 'deadline.ramp', self.ramp, 'from 0 to 1')
    require(self.stages >= 1, 'deadline.stages', self.stages, '>= 1')
    require(
        self.toggle_every >= 1,
        'deadline.toggle_every',
        self.toggle_every,
        '>= 1 steps',
    )


def _fraction(config: DeadlineConfig, step: int, steps: int) -> float:
  """How far the ramp has come, 0 to 1."""
  ramp_steps = config.ramp * (steps - 1)
  return 1.0 if ramp_steps <= step else step / ramp_steps


def _between(config: DeadlineConfig, fraction: float) -> int:
  return round(config.first_ms + fraction * (config.final_ms - config.first_ms))


def _constant(config, step, steps, key, tasks):
  del step, steps, key
  return np.full(tasks, config.final_ms)


def _linear(config, step, steps, key, tasks):
  del key
  return np.full(tasks, _between(config, _fraction(config, step, steps)))


def _staged(config, step, steps, key, tasks):
  del key
  # A millionth more, so that a plateau that is due does not wait for rounding.
  plateau = int(_fraction(config, step, steps) * config.stages + 1e-6)
  fraction = min(plateau / max(config.stages - 1, 1), 1.0)
  return np.full(tasks, _between(config, fraction))


def _sampled(config, step, steps, key, tasks):
  del step, steps
  drawn = jax.random.randint(
      key, (tasks,), config.first_ms, config.final_ms + 1
  )
  return np.asarray(drawn)


def _toggle(config, step, steps, key, tasks):
  del steps, key
  full = (step // config.toggle_every) % 2 == 1
  return np.full(tasks, config.final_ms if full else config.first_ms)


SCHEDULES: dict[str, Callable[..., np.ndarray]] = {
    'constant': _constant,
    'linear': _linear,
    'staged': _staged,
    'sampled': _sampled,
    'toggle': _toggle,
}


def deadlines_ms(
    config: DeadlineConfig,
    step: int,
    steps: int,
    key: jax.Array,
    tasks: int,
) -> jax.Array:
  """The deadline of each task of one update.

  Args:
    config: the schedule.
    step: the update, counted from 0.
    steps: the number of updates of the whole run, which is the horizon of a
      growing schedule (also after a resume).
    key: used by the `sampled` schedule only.
    tasks: P.

  Returns:
    [P] int32 milliseconds.
  """
  drawn = SCHEDULES[config.schedule](config, step, steps, key, tasks)
  return jnp.asarray(drawn, jnp.int32)


def mean_ms(config: DeadlineConfig, steps: int) -> float:
  """The mean deadline of a whole run; of what is drawn, that of a fixed draw.

  Times `steps`, it is the simulated time of a run, per rollout of an update.
  """
  tasks = 16
  limits = [
      SCHEDULES[config.schedule](
          config, step, steps, jax.random.key(step), tasks
      )
      for step in range(steps)
  ]
  return float(np.mean(limits))
