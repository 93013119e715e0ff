"""Tiny random language models, and what transformers makes of them.

Weights follow from the names of the tensors, so that every framework gets the
same ones. `python -m tests.llm_tiny` writes the golden logits anew; it needs
torch and transformers.
"""

import functools
import json
import pathlib
import tempfile
from typing import Any
import zlib

import gguf
import jax
import numpy as np
import pytest
from rlcr_jax.llm import model
from rlcr_jax.llm import weights
from rlcr_jax.llm.tokens import Tokenizer
from safetensors import numpy as safetensors_numpy

GOLDEN = pathlib.Path(__file__).parent / 'data' / 'llm_golden.json'
VOCAB = 288
_HEADS = ('attention', 'key_value')
_BASE = {
    'vocab_size': VOCAB,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 512,
    'rms_norm_eps': 1e-5,
    'hidden_act': 'silu',
}
_SCALING = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 64,
}
# As people write `config.json`: with other names and defaults left out.
HF_CONFIGS = {
    'llama3': {
        **_BASE,
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'head_dim': 16,
        'rope_theta': 500.0,
        'rope_scaling': _SCALING,
        'tie_word_embeddings': False,
    },
    'smollm2': {
        **_BASE,
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'rope_theta': 100000,
        'tie_word_embeddings': True,
    },
    'qwen2': {
        **_BASE,
        'architectures': ['Qwen2ForCausalLM'],
        'model_type': 'qwen2',
        'rope_theta': 1000000.0,
        'rms_norm_eps': 1e-6,
        'use_sliding_window': False,
        'sliding_window': 16,
        'tie_word_embeddings': True,
    },
    'qwen3': {
        **_BASE,
        'architectures': ['Qwen3ForCausalLM'],
        'model_type': 'qwen3',
        'head_dim': 16,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1000.0},
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
    },
}


# Where the golden logits are, of one row of tokens.
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (1, 40)).astype(np.int32)
POSITIONS, COLUMNS = (0, 7, 23, 39), (0, 1, 50, 100, 287)


def tensors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
  """Weights by Hugging Face's names, so large that everything matters."""
  d, mlp = hf['hidden_size'], hf['intermediate_size']
  head = hf.get('head_dim', d // hf['num_attention_heads'])
  q, kv = (hf[f'num_{kind}_heads'] * head for kind in _HEADS)
  layer = {
      'input_layernorm.weight': (d,),
      'post_attention_layernorm.weight': (d,),
      'self_attn.q_proj.weight': (q, d),
      'self_attn.k_proj.weight': (kv, d),
      'self_attn.v_proj.weight': (kv, d),
      'self_attn.o_proj.weight': (d, q),
      'mlp.gate_proj.weight': (mlp, d),
      'mlp.up_proj.weight': (mlp, d),
      'mlp.down_proj.weight': (d, mlp),
  }
  if hf['model_type'] == 'qwen2':
    layer['self_attn.q_proj.bias'] = (q,)
    layer['self_attn.k_proj.bias'] = layer['self_attn.v_proj.bias'] = (kv,)
  if hf['model_type'] == 'qwen3':
    layer['self_attn.q_norm.weight'] = layer['self_attn.k_norm.weight'] = (
        head,
    )
  shapes = {'model.embed_tokens.weight': (VOCAB, d), 'model.norm.weight': (d,)}
  if not hf['tie_word_embeddings']:
    shapes['lm_head.weight'] = (VOCAB, d)
  for i in range(hf['num_hidden_layers']):
    shapes |= {f'model.layers.{i}.{name}': s for name, s in layer.items()}
  return {name: _draw(name, shape) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  value = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
  norm = 'norm' in name
  value = 1 + 0.3 * value if norm else 1.5 * value / np.sqrt(shape[-1])
  return value.astype(np.float32)


@functools.cache
def tokenizer() -> Tokenizer:
  """Of `VOCAB` tokens at most."""
  corpus = [f'work {i}, then tell {i + 1} about {i}' for i in range(40)]
  return Tokenizer.byte_level(corpus, VOCAB)


def write(directory: pathlib.Path, hf: dict[str, Any]) -> pathlib.Path:
  """Writes a folder as it would come from Hugging Face."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(hf))
  file = directory / 'model.safetensors'
  safetensors_numpy.save_file(tensors(hf), file, {'format': 'pt'})
  tokenizer().save(directory)
  return directory


def write_gguf(
    path: pathlib.Path, model: str = 'gpt2', pre: str = 'smollm', **extra: Any
) -> gguf.GGUFReader:
  """Writes the tokenizer as llama.cpp keeps it, and reads the file."""
  content = json.loads(tokenizer().backend.to_str())
  vocab = content['model']['vocab']
  special = {token['content'] for token in content['added_tokens']}
  tokens = sorted(vocab, key=vocab.get)
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3 if token in special else 1 for token in tokens])
  merges = content['model']['merges']
  writer.add_token_merges([' '.join(merge) for merge in merges])
  writer.add_eos_token_id(vocab['<|im_end|>'])
  if 'bos' in extra:
    writer.add_bos_token_id(extra['bos'])
  if 'template' in extra:
    writer.add_chat_template(extra['template'])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return gguf.GGUFReader(path)


@functools.cache
def loaded(name: str) -> weights.Loaded:
  """One of `HF_CONFIGS`, through `weights.load`."""
  with tempfile.TemporaryDirectory() as folder:
    return weights.load(write(pathlib.Path(folder), HF_CONFIGS[name]))


apply = jax.jit(model.apply, static_argnums=0, static_argnames='last')


def by_transformers(directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """Logits [B, T, vocab] of tokens [B, T], without padding."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  reference = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32
  )
  with torch.no_grad():
    return reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def main():
  """Writes the golden logits."""
  golden = {}
  for name, hf in HF_CONFIGS.items():
    with tempfile.TemporaryDirectory() as folder:
      logits = by_transformers(write(pathlib.Path(folder), hf), TOKENS)
    picked = logits[0][np.ix_(POSITIONS, COLUMNS)]
    golden[name] = [[float(x) for x in row] for row in picked]
  GOLDEN.parent.mkdir(exist_ok=True)
  GOLDEN.write_text(json.dumps(golden, indent=1) + '\n')


if __name__ == '__main__':
  main()
