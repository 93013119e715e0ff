r"""Ablation: organisations of nine agents, and of one.

  python -m experiments.sweep \
      --config=experiments/configs/ablation_organisations.py --workdir=DIR
  python -m experiments.train \
      --config=experiments/configs/ablation_organisations.py --workdir=DIR

The second command trains the arm `coupled,ceo` alone.

  solo          one agent
  solo_tokens   one agent with nine times the time, and so as many tokens
  naive         nine agents, each in a world of its own; the best return counts
  islands       three teams of three in worlds of their own, likewise
  orchestrator  one agent hires up to eight and assigns them targets; they talk
                to it alone, and are played by a snapshot of 25 updates ago at
                most (Kimi K2.5)
  ceo           one agent hires up to eight; all talk to all
  flat          nine agents from the beginning; all talk to all

All but `solo` have as many tokens, at most; all but `solo_tokens` have as much
time. Each is trained and tested on a task that needs no talk (`separable`:
`reasoning`, where independent attempts help) and on one that does (`coupled`:
`software`).

`:smoke` is two arms of seconds.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import sweeps

_LIMIT_MS = 180_000
_ENVS = {'coupled': 'software', 'separable': 'reasoning'}
_SOLO = {'collective.organisation': 'solo', 'collective.num_agents': 1}


def _islands(count: int, size: int) -> dict[str, str | int]:
  return {
      'collective.organisation': 'flat',
      'collective.islands': count,
      'collective.island_size': size,
  }


_ARMS = {
    'solo': _SOLO,
    'solo_tokens': _SOLO
    | {f'deadline.{end}_ms': 9 * _LIMIT_MS for end in ('first', 'final')},
    'naive': _islands(9, 1),
    'islands': _islands(3, 3),
    'orchestrator': {
        'collective.organisation': 'orchestrator',
        'collective.refresh_every': 25,
    },
    'ceo': {'collective.organisation': 'ceo'},
    'flat': {'collective.organisation': 'flat'},
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '', 'coupled', 'separable' or 'smoke'."""
  env = _ENVS.get(variant, 'software')
  config = config_lib.defaults(env)
  config.train_solo = False
  config.steps = 200
  config.rlcr.tasks = 8
  config.deadline.schedule = 'constant'
  config.deadline.first_ms = config.deadline.final_ms = _LIMIT_MS
  config.evaluation.deadlines = 2
  return default.varied(config, '' if variant in _ENVS else variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The organisations, on both tasks."""
  columns = (
      'modes.collective.return_mean',
      'modes.collective.output_tokens_mean',
      'modes.collective.time_ms_mean',
      'modes.collective.team_size_mean',
      'modes.muted.return_mean',
      'total.seconds',
  )
  if variant == 'smoke':
    arms = {name: _ARMS[name] for name in ('naive', 'orchestrator')}
    return sweeps.Sweep(arms, (0,), columns)
  path = 'experiments/configs/ablation_organisations.py:'
  tasks = {name: {sweeps.CONFIG: path + name} for name in _ENVS}
  return sweeps.Sweep(sweeps.product(tasks, _ARMS), columns=columns)
