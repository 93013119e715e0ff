r"""Ablation: what lets thinking grow.

  python -m experiments.sweep \
      --config=experiments/configs/ablation_gae.py --workdir=DIR
  python -m experiments.train \
      --config=experiments/configs/ablation_gae.py --workdir=DIR

The second command trains the arm `rlcr` alone. One agent has one chain of
thought and ample time: each thought makes an answer right a little more often,
and the first answer is final. So what RL does to length can be read off
`turns_think`, the thoughts of a rollout.

  rlcr          group-relative, one advantage for all decisions
  gae           a critic, gamma = 1 and lambda = 1
  gae,lambda    a critic, gamma = 1 and lambda = 0.95
  gae,gamma     a critic, gamma = 0.95 a turn and lambda = 1
  weak_prior    `rlcr` from a policy that answers at once

`:smoke` is two arms of seconds.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import sweeps

_LIMIT_MS = 600_000  # Sixty thoughts.
_GAE = {'rlcr.advantage': 'gae'}
_ARMS = {
    'rlcr': {},
    'gae': _GAE,
    'gae,lambda': _GAE | {'rlcr.gae_lambda': 0.95},
    'gae,gamma': _GAE | {'rlcr.gamma': 0.95},
    'weak_prior': {'policy.prior': 'answer=6'},
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = config_lib.defaults('reasoning')
  config.env.num_chains = 1
  config.collective.organisation = 'solo'
  config.collective.num_agents = 1
  config.train_solo = False
  config.steps = 100
  config.deadline.schedule = 'constant'
  config.deadline.first_ms = config.deadline.final_ms = _LIMIT_MS
  config.evaluation.first_ms = 60_000
  return default.varied(config, variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The estimators."""
  columns = (
      'modes.collective.return_mean',
      'training.turns_think',
      'training.turns_check',
      'modes.collective.time_ms_mean',
      'total.seconds',
  )
  curves = ('turns_think', 'return_mean', 'entropy')
  if variant == 'smoke':
    arms = {name: _ARMS[name] for name in ('rlcr', 'gae,lambda')}
    return sweeps.Sweep(arms, (0,), columns, curves)
  return sweeps.Sweep(_ARMS, columns=columns, curves=curves)
