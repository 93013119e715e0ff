r"""Ablation: how the time limit moves during training.

  python -m experiments.sweep \
      --config=experiments/configs/ablation_time_limits.py --workdir=DIR
  python -m experiments.train \
      --config=experiments/configs/ablation_time_limits.py --workdir=DIR

The second command trains the arm `linear` alone. All arms are tested on one
grid of deadlines, from 45 to 180 s, and the headline is the return at 180 s.

  short     90 s throughout
  long      180 s throughout
  linear    from 45 s to 180 s within the first 6 % of training, the default
  staged    the same way in four steps
  sampled   for each task anew, uniform from 45 to 180 s
  toggle    45 s for ten updates, then 180 s for ten, and so on

With as many updates, longer limits also buy more experience: more simulated
time, more turns, more to compute. `:equal_time` therefore gives every arm the
simulated time of `long`, and so more updates where limits are short. As turns
take as long under any limit, that is about equal compute as well;
`total.decisions` and `total.seconds` say how equal it was.

Each of the 18 units takes about 6 minutes on 2 CPU cores, and those of
`:equal_time` as long. `:smoke` is two arms of seconds.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import deadlines
from rlcr_jax import sweeps

_SHORT_MS, _LONG_MS = 90_000, 180_000
_ARMS = {
    'short': {
        'deadline.schedule': 'constant',
        'deadline.first_ms': _SHORT_MS,
        'deadline.final_ms': _SHORT_MS,
    },
    'long': {'deadline.schedule': 'constant'},
    'linear': {'deadline.schedule': 'linear'},
    'staged': {'deadline.schedule': 'staged'},
    'sampled': {'deadline.schedule': 'sampled'},
    'toggle': {'deadline.schedule': 'toggle'},
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '', 'equal_time' or 'smoke'."""
  config = config_lib.defaults('software')
  config.train_solo = False
  config.steps = 200
  config.rlcr.tasks = 8
  config.deadline.first_ms = config.evaluation.first_ms = 45_000
  config.deadline.final_ms = config.evaluation.final_ms = _LONG_MS
  return default.varied(config, '' if variant == 'equal_time' else variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The schedules."""
  columns = (
      'modes.collective.return_mean',
      'modes.collective.team_size_mean',
      'total.deadline_ms',
      'total.decisions',
      'total.seconds',
  )
  curves = ('return_mean', 'deadline_ms', 'team_size_mean')
  if variant == 'smoke':
    arms = {name: _ARMS[name] for name in ('short', 'linear')}
    return sweeps.Sweep(arms, (0,), columns, curves)
  arms = _ARMS
  if variant == 'equal_time':
    arms = {name: arm | _equal_time(arm) for name, arm in arms.items()}
  return sweeps.Sweep(arms, columns=columns, curves=curves)


def _equal_time(arm: dict[str, int | str]) -> dict[str, int]:
  """As many updates as add up to the simulated time of `long`."""
  config = get_config()
  fields = {field.split('.')[1]: value for field, value in arm.items()}
  schedule = deadlines.DeadlineConfig(**config.deadline.to_dict() | fields)
  mean_ms = deadlines.mean_ms(schedule, config.steps)
  return {'steps': round(config.steps * _LONG_MS / mean_ms)}
