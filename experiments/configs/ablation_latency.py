r"""Ablation: a time limit against a penalty on latency.

  python -m experiments.sweep \
      --config=experiments/configs/ablation_latency.py --workdir=DIR
  python -m experiments.train \
      --config=experiments/configs/ablation_latency.py --workdir=DIR

The second command trains the arm `neither` alone. Projects are small, so that
a team may be done before the longest limit. All arms are tested on one grid of
deadlines, from 60 to 360 s, and the headline is the return at 360 s;
`modes.collective.time_ms_mean` says when they were done, or gave up.

  neither                 360 s in training as well
  limit                   the limit grows from 45 to 180 s, the default
  penalty=B,max_ms=T      360 s, and R - B p T / T_max is reinforced
  both                    the limit of `limit`, and B = 0.5 at T_max = 360 s

A time limit does not care how early one is done; a penalty does, without end.
Only B / T_max matters: T_max is no limit, but a second name for the strength.

`:smoke` is two arms of seconds.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import sweeps

_LONG_MS = 360_000
_LIMIT = {
    'deadline.schedule': 'linear',
    'deadline.first_ms': 45_000,
    'deadline.final_ms': 180_000,
}
_PENALTY = {'incentive.name': 'latency_penalty'}
_STRENGTHS = sweeps.chain(
    sweeps.product(
        sweeps.values('incentive.penalty', (0.5,)),
        sweeps.values('incentive.max_ms', (90_000, _LONG_MS, 1_440_000)),
    ),
    sweeps.product(
        sweeps.values('incentive.penalty', (0.05,)),
        sweeps.values('incentive.max_ms', (_LONG_MS,)),
    ),
)
_ARMS = {
    'neither': {},
    'limit': _LIMIT,
    **{name: _PENALTY | arm for name, arm in _STRENGTHS.items()},
    'both': _LIMIT
    | _PENALTY
    | {'incentive.penalty': 0.5, 'incentive.max_ms': _LONG_MS},
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = config_lib.defaults('software')
  config.env.num_modules, config.env.width = 6, 3
  config.train_solo = False
  config.steps = 200
  config.rlcr.tasks = 8
  config.deadline.schedule = 'constant'
  config.deadline.first_ms = config.deadline.final_ms = _LONG_MS
  config.evaluation.first_ms = 60_000
  config.evaluation.final_ms = _LONG_MS
  config.evaluation.deadlines = 6
  return default.varied(config, variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The incentives."""
  columns = (
      'modes.collective.return_mean',
      'modes.collective.time_ms_mean',
      'modes.collective.team_size_mean',
      'modes.collective.output_tokens_mean',
      'total.seconds',
  )
  curves = ('return_mean', 'progress_mean', 'deadline_ms')
  if variant == 'smoke':
    arms = {name: _ARMS[name] for name in ('limit', 'both')}
    return sweeps.Sweep(arms, (0,), columns, curves)
  return sweeps.Sweep(_ARMS, columns=columns, curves=curves)
