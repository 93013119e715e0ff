r"""Every system that docs/methods.md names, on two worlds.

  python -m experiments.sweep \
      --config=experiments/configs/methods.py --workdir=DIR
  python -m experiments.train \
      --config=experiments/configs/methods.py --workdir=DIR

The second command trains the arm `software,rlcr` alone. Budgets are small, half
the tasks and half the updates of the default: this compares, and does not
compete. All arms are tested at 180 s.

`:smoke` is two arms of seconds.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import sweeps

_ENVS = ('software', 'search')
_LONG = {'deadline.schedule': 'constant'}
_ARMS = {
    'rlcr': {},
    'grpo': {
        'rlcr.advantage': 'z_score',
        'rlcr.aggregation': 'rollout_mean',
    },
    'dr_grpo': {'rlcr.aggregation': 'constant'},
    'rloo': {'rlcr.advantage': 'rloo'},
    'dr_mas': {'rlcr.advantage': 'agent_z_score'},
    'wideseek_r1': {'rlcr.aggregation': 'agent_mean'},
    'gae': {'rlcr.advantage': 'gae'},
    'ppo': {
        'rlcr.advantage': 'gae',
        'rlcr.loss': 'clipped_surrogate',
        'rlcr.epochs': 2,
    },
    'parl': {
        'collective.organisation': 'orchestrator',
        'collective.refresh_every': 25,
        'incentive.name': 'parl',
    },
    'toggle': _LONG | {'incentive.name': 'toggle'},
    'alp': _LONG
    | {
        'incentive.name': 'latency_penalty',
        'incentive.penalty': 0.1,
        'incentive.penalty_floor': True,
    },
    'islands': {
        'collective.organisation': 'flat',
        'collective.islands': 3,
        'collective.island_size': 3,
    },
    'naive_parallel': {
        'collective.organisation': 'flat',
        'collective.islands': 9,
        'collective.island_size': 1,
    },
    'flat': {'collective.organisation': 'flat'},
    'solo': {'collective.organisation': 'solo'},
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '', 'software', 'search' or 'smoke'."""
  config = config_lib.defaults(variant if variant in _ENVS else _ENVS[0])
  config.train_solo = False
  config.steps = 200
  config.rlcr.tasks = 8
  config.evaluation.deadlines = 2
  return default.varied(config, '' if variant in _ENVS else variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The systems, in both worlds."""
  columns = (
      'modes.collective.return_mean',
      'modes.muted.return_mean',
      'modes.collective.team_size_mean',
      'modes.collective.output_tokens_mean',
      'total.seconds',
  )
  if variant == 'smoke':
    arms = {name: _ARMS[name] for name in ('ppo', 'parl')}
    return sweeps.Sweep(arms, (0,), columns)
  path = 'experiments/configs/methods.py:'
  worlds = {name: {sweeps.CONFIG: path + name} for name in _ENVS}
  return sweeps.Sweep(sweeps.product(worlds, _ARMS), columns=columns)
