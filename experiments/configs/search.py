"""search: see docs/environments.md.

python -m experiments.train --config=experiments/configs/search.py \
      --workdir=DIR
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = config_lib.defaults('search')
  config.steps = 150
  return default.varied(config, variant)
