"""A tiny language model from scratch: text in, commands out, on two CPU cores.

  python -m experiments.train --config=experiments/configs/llm_tiny.py \
      --workdir=DIR

A model of 0.1 M parameters with a tokenizer of its own first imitates random
legal moves (the warm start), and then learns by RLCR what pays. Held-out return
at 120 s on three seeds: 0.56 to 0.61, from 0.42 after the warm start, while the
oracle has 0.96. On 2 idle CPU cores all of it takes 16 minutes: 3 for the warm
start, 8 for RLCR, 2 for the solo baseline, the rest to compile and evaluate.
docs/llm.md tells more.
"""

import ml_collections
from rlcr_jax import config as config_lib


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  """The configuration; `variant` is '' or 'smoke'."""
  config = config_lib.defaults('software')
  config.policy.name = 'llm'
  config.steps = 40
  config.checkpoint_every = 10
  text_costs(config)
  config.env.num_modules = 4
  config.env.width = 2
  config.collective.num_agents = 3
  config.collective.max_hires = 2
  config.deadline.schedule = 'linear'
  config.deadline.first_ms = 60_000
  config.deadline.final_ms = 120_000
  config.deadline.ramp = 0.2
  config.llm.rules = False
  config.llm.warm_steps = 600
  config.llm.warm_rollouts = 512
  config.llm.error_ms = 9_000  # As long as to wait, or babble pays.
  config.llm.layers = 2
  config.llm.heads = 2
  config.llm.token_budget = 1024  # Stays in a CPU's cache.
  config.llm.max_tokens = 12
  config.llm.context = 512
  config.rlcr.tasks = 4
  config.rlcr.group_size = 16
  config.rlcr.learning_rate = 3e-4  # With 1e-3 the format is lost.
  config.rlcr.learning_rate_final = 1e-4
  config.rlcr.entropy_bonus = 0.0
  config.evaluation.num_tasks = 64
  config.evaluation.deadlines = 3
  if variant == 'smoke':
    config.steps = 2
    config.checkpoint_every = 1
    config.train_solo = False
    config.rlcr.tasks = 2
    config.rlcr.group_size = 2
    config.llm.width = 32
    config.llm.layers = 1
    config.llm.warm_steps = 2
    config.llm.warm_rollouts = 4
    config.llm.warm_batch = 4
    config.evaluation.num_tasks = 2
    config.evaluation.deadlines = 2
  elif variant:
    raise ValueError(f"variant {variant!r} is not allowed: '' or 'smoke'.")
  return config


def text_costs(config: ml_collections.ConfigDict) -> None:
  """Tokens are real here, so the time of the work itself is the tool's."""
  config.env.work_tokens = 4.0
  config.env.work_tool_ms = 20_000
  config.env.read_tokens = 4.0
  config.env.read_tool_ms = 30_000
  config.collective.task_tokens = 1
  config.collective.tell_tokens = 8.0
  config.collective.post_tokens = 8.0
  config.collective.hire_tokens = 3.0
  config.collective.fire_tokens = 4.0
  config.collective.wait_tokens = 3.0
