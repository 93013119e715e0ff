"""Sizes and features of a model, as Hugging Face's `config.json` names them."""

import dataclasses
from typing import Any

from envs.base import require

_MODEL_TYPES = {
    'LlamaForCausalLM': 'llama',
    'Qwen2ForCausalLM': 'qwen2',
    'Qwen3ForCausalLM': 'qwen3',
}
_SIZES = {  # Field by its name in `config.json`.
    'vocab_size': 'vocab_size',
    'hidden_size': 'hidden_size',
    'intermediate_size': 'intermediate_size',
    'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads',
}
_ONLY = {  # What `config.json` may say of features that are not implemented.
    'hidden_act': ('silu',),
    'attention_bias': (False,),
    'mlp_bias': (False,),
    'use_sliding_window': (False,),
    'partial_rotary_factor': (1.0,),
    'quantization_config': (None,),
}


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """Llama 3's stretching of low rotary frequencies to longer contexts."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and features of a model."""

  vocab_size: int
  hidden_size: int  # d
  intermediate_size: int
  num_layers: int  # L
  num_heads: int  # H
  num_kv_heads: int  # K
  head_dim: int  # D
  rope_theta: float = 10000.0
  rope_scaling: Llama3Scaling | None = None
  rms_norm_eps: float = 1e-5
  tie_word_embeddings: bool = True
  qkv_bias: bool = False  # Of Qwen 2, and of no other.
  qk_norm: bool = False  # Of Qwen 3, and of no other.
  max_position_embeddings: int = 2048  # Tokens of context.
  architecture: str = 'LlamaForCausalLM'  # Hugging Face's name.
  dtype: str = 'float32'  # Of computation.
  remat: bool = False  # Compute activations again for gradients, per layer.

  def __post_init__(self):
    sizes = (*_SIZES.values(), 'num_kv_heads', 'head_dim')
    for field in (*sizes, 'max_position_embeddings'):
      value = getattr(self, field)
      require(value >= 1, f'model.{field}', value, '>= 1')
    divides = self.num_heads % self.num_kv_heads == 0
    allowed = f'a divisor of num_heads={self.num_heads}'
    require(divides, 'model.num_kv_heads', self.num_kv_heads, allowed)
    even = self.head_dim % 2 == 0
    require(even, 'model.head_dim', self.head_dim, 'even')
    known = self.architecture in _MODEL_TYPES
    allowed = ', '.join(_MODEL_TYPES)
    require(known, 'model.architecture', self.architecture, allowed)
    dtypes = ('float32', 'bfloat16')
    known = self.dtype in dtypes
    require(known, 'model.dtype', self.dtype, ' or '.join(dtypes))
    for field, model_type in (('qkv_bias', 'qwen2'), ('qk_norm', 'qwen3')):
      expected = _MODEL_TYPES[self.architecture] == model_type
      value = getattr(self, field)
      allowed = f'{expected} for {self.architecture}'
      require(value == expected, f'model.{field}', value, allowed)

  @classmethod
  def from_hf(cls, config: dict[str, Any]) -> 'ModelConfig':
    """Reads a `config.json`.

    Raises:
      NotAllowedError: of an architecture or feature that is not implemented.
    """
    types = {name: model_type for model_type, name in _MODEL_TYPES.items()}
    model_type = config.get('model_type')
    _require_hf(model_type in types, 'model_type', model_type, ', '.join(types))
    for name in (*_SIZES, 'max_position_embeddings'):
      value = config.get(name)
      _require_hf(isinstance(value, int), name, value, 'a whole number')
    for name, allowed in _ONLY.items():
      value = config.get(name, allowed[0])
      _require_hf(value in allowed, name, value, f'{allowed[0]}')
    layer_types = set(config.get('layer_types') or ()) - {'full_attention'}
    _require_hf(
        not layer_types, 'layer_types', sorted(layer_types), 'full_attention'
    )
    theta, scaling = _rope_from_hf(config)
    heads = config['num_attention_heads']
    return cls(
        **{field: config[name] for name, field in _SIZES.items()},
        num_kv_heads=config.get('num_key_value_heads') or heads,
        head_dim=config.get('head_dim') or config['hidden_size'] // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.get('rms_norm_eps', 1e-6),
        tie_word_embeddings=config.get('tie_word_embeddings', False),
        qkv_bias=model_type == 'qwen2',
        qk_norm=model_type == 'qwen3',
        max_position_embeddings=config['max_position_embeddings'],
        architecture=types[model_type],
    )

  def to_hf(self) -> dict[str, Any]:
    """Writes a `config.json`, which `from_hf` reads as the same model."""
    scaling = self.rope_scaling and {
        'rope_type': 'llama3',
        **dataclasses.asdict(self.rope_scaling),
    }
    return {
        'architectures': [self.architecture],
        'model_type': _MODEL_TYPES[self.architecture],
        **{name: getattr(self, field) for name, field in _SIZES.items()},
        'num_key_value_heads': self.num_kv_heads,
        'head_dim': self.head_dim,
        'rope_theta': self.rope_theta,
        'rope_scaling': scaling,
        'rms_norm_eps': self.rms_norm_eps,
        'tie_word_embeddings': self.tie_word_embeddings,
        'max_position_embeddings': self.max_position_embeddings,
        'hidden_act': 'silu',
    }


def _require_hf(condition, field, value, allowed):
  require(condition, f'config.json: {field}', value, allowed)


def _rope_from_hf(config: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
  """Base and scaling, as transformers 4 or 5 writes them."""
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  theta = rope.get('rope_theta', config.get('rope_theta', 10000.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  known = kind in ('default', 'llama3')
  _require_hf(known, 'rope_scaling.rope_type', kind, 'default or llama3')
  if kind == 'default':
    return float(theta), None
  names = [field.name for field in dataclasses.fields(Llama3Scaling)]
  for name in names:
    value = rope.get(name)
    number = isinstance(value, (int, float))
    _require_hf(number, f'rope_scaling.{name}', value, 'a number')
  return float(theta), Llama3Scaling(**{name: rope[name] for name in names})
