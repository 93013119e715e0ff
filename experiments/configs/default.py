"""The default: a CEO and up to eight hires on software projects.

  python -m experiments.train --config=experiments/configs/default.py \
      --workdir=DIR

On 2 CPU cores: 6 minutes of training, one for the solo baseline, one for
compilation and evaluation. Held-out return at 180 s on three seeds: 0.91, 0.92
and 0.92; the oracle has 0.96 and one agent 0.29.
`--config.train_muted=True` adds the collective that never had a channel.

Append `:smoke` to the path for a run of seconds that exercises every part.
"""

import ml_collections
from rlcr_jax import config as config_lib


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  return varied(config_lib.defaults('software'), variant)


def varied(
    config: ml_collections.ConfigDict, variant: str
) -> ml_collections.ConfigDict:
  """The configuration itself, or shrunk to a run of seconds for 'smoke'."""
  if variant == 'smoke':
    _shrink(config)
  elif variant:
    raise ValueError(f"variant {variant!r} is not allowed: '' or 'smoke'.")
  return config


def _shrink(config: ml_collections.ConfigDict) -> None:
  config.steps = 4
  config.checkpoint_every = 2
  config.rlcr.tasks = 2
  config.rlcr.group_size = 4
  config.rlcr.chunk_size = 32
  config.policy.width = 16
  config.policy.layers = 1
  config.evaluation.num_tasks = 8
  config.evaluation.deadlines = 2
