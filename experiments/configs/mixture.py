"""All environments at once: one policy learns on all of them.

  python -m experiments.train --config=experiments/configs/mixture.py \
      --workdir=DIR

`--config.env.weights.NAME` changes how many of an update's tasks, and how much
of its gradient, an environment has.
"""

from envs import registry
from experiments.configs import default
import ml_collections
from rlcr_jax import config as config_lib


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = default.varied(config_lib.defaults(*registry.names()), variant)
  config.rlcr.tasks = max(config.rlcr.tasks, len(registry.names()))
  return config
