"""pipeline: see docs/environments.md.

python -m experiments.train --config=experiments/configs/pipeline.py \
      --workdir=DIR
"""

from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = config_lib.defaults('pipeline')
  config.steps = 150
  config.deadline.first_ms = 120_000  # Before, nothing has been merged yet.
  return default.varied(config, variant)
