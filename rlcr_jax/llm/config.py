"""The fields of `config.llm`: which model speaks, and how it is trained."""

import dataclasses
import math

from envs.base import require


@dataclasses.dataclass(frozen=True)
class LlmConfig:
  """Used where `policy.name` is `llm`."""

  # A Hugging Face directory or a GGUF file. '': a tiny model with a tokenizer
  # of its own is made and warm-started (`experiments.warm_start`).
  model: str = ''
  width: int = 64  # Of the tiny model.
  layers: int = 3
  heads: int = 4
  vocab_size: int = 512
  dtype: str = 'float32'  # Of computation: float32 or bfloat16.
  remat: bool = False  # Recompute activations in the backward pass.
  lora_rank: int = 0  # 0: all parameters are trained.
  fsdp: int = 1  # Devices that share the parameters,
  tp: int = 1  # and that share each matrix product.

  context: int = 1024  # Most tokens of a prompt and its completion.
  max_tokens: int = 16  # Of a completion.
  temperature: float = 1.0
  top_k: int = 0  # 0: off.
  top_p: float = 1.0
  error_ms: int = 0  # Time lost on a command that is not understood.
  grammar: bool = False  # Permit only well-formed, legal commands.
  reasoning: bool = False  # Invite reasoning before the command.
  rules: bool = True  # Tell agents the rules, or only the task.
  max_batch: int = 128  # Rows sampled at once.

  server_url: str = ''  # An OpenAI-compatible server; '': sample here.
  server_model: str = ''  # Its name for the model.
  # Where it is told, after each update, to read new weights: a path that takes
  # {"model_path": DIR}, such as SGLang's /update_weights_from_disk.
  server_reload: str = ''
  importance_cap: float = 2.0  # Of truncated weights, with a server.

  token_budget: int = 16_384  # Tokens of a micro-batch, padding included.
  max_gap_growth: float = 5.0  # Stop when the log-probability gap grows so.

  # Imitation of a scripted teacher before RL; 0 steps: none.
  warm_steps: int = 400
  warm_rollouts: int = 256  # Of which transcripts are made.
  warm_batch: int = 64  # Turns per step.
  warm_learning_rate: float = 3e-3
  warm_prompts: float = 1.0  # Weight of prompts in the loss; of answers: 1.
  warm_skill: float = 0.0  # Share of sensible moves among random legal ones.
  warm_seed: int = 0  # Apart from `seed`, so that runs share a warm start.

  def __post_init__(self):
    need = require
    positive = (
        'width', 'layers', 'heads', 'fsdp', 'tp', 'context', 'max_tokens',
        'max_batch', 'token_budget', 'warm_rollouts', 'warm_batch',
    )  # fmt: skip
    for field in positive:
      value = getattr(self, field)
      need(value >= 1, f'llm.{field}', value, '>= 1')
    for field in ('lora_rank', 'top_k', 'warm_steps', 'error_ms'):
      value = getattr(self, field)
      need(value >= 0, f'llm.{field}', value, '>= 0')
    for field in ('importance_cap', 'max_gap_growth', 'warm_learning_rate'):
      value = getattr(self, field)
      need(0 < value < math.inf, f'llm.{field}', value, '> 0 and finite')
    need(
        0 <= self.warm_prompts < math.inf,
        'llm.warm_prompts',
        self.warm_prompts,
        '>= 0 and finite',
    )
    need(
        0 < self.temperature < math.inf,
        'llm.temperature',
        self.temperature,
        '> 0, since decisions must be drawn to be learned from',
    )
    need(
        not self.server_url or self.server_reload.startswith('/'),
        'llm.server_reload',
        self.server_reload,
        'a path of the server, which must follow the training',
    )
    need(0 < self.top_p <= 1, 'llm.top_p', self.top_p, 'above 0, at most 1')
    need(0 <= self.warm_skill <= 1, 'llm.warm_skill', self.warm_skill, '0 to 1')
    need(
        self.dtype in ('float32', 'bfloat16'),
        'llm.dtype',
        self.dtype,
        "'float32' or 'bfloat16'",
    )
    need(
        self.vocab_size >= 300,
        'llm.vocab_size',
        self.vocab_size,
        '>= 300: 256 bytes and some words',
    )
    need(
        self.width % (2 * self.heads) == 0,
        'llm.width',
        self.width,
        f'a multiple of 2 * llm.heads={2 * self.heads}',
    )
    need(
        self.max_tokens < self.context,
        'llm.max_tokens',
        self.max_tokens,
        f'below llm.context={self.context}',
    )
