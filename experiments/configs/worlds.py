r"""Every environment with its own configuration, on three seeds.

  python -m experiments.sweep \
      --config=experiments/configs/worlds.py --workdir=DIR

An arm is an environment. The table has what the collective returns at the full
deadline, what one trained agent does, and what the scripted references do.
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import sweeps

_NAMES = ('software', 'search', 'proof', 'pipeline', 'trading', 'reasoning')


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """That of `software`; each arm has its own."""
  return default.varied(config_lib.defaults('software'), variant)


def get_sweep(variant: str = '') -> sweeps.Sweep:
  """The environments."""
  columns = (
      'modes.collective.return_mean',
      'modes.solo.return_mean',
      'modes.oracle.return_mean',
      'modes.random.return_mean',
      'modes.muted.return_mean',
      'total.seconds',
  )
  files = {'software': 'default'} | {name: name for name in _NAMES[1:]}
  arms = {
      name: {'config': f'experiments/configs/{file}.py:{variant}'}
      for name, file in files.items()
  }
  if variant == 'smoke':
    return sweeps.Sweep({'search': arms['search']}, (0,), columns)
  return sweeps.Sweep(arms, columns=columns)
