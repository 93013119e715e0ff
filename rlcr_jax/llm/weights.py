"""Pretrained weights: Hugging Face directories and GGUF files.

A tensor is read layer by layer and slice by slice into its place among the
stacked parameters, on the device where it belongs.
"""

import dataclasses
import os
import pathlib
import shutil
from typing import Any, NamedTuple

from envs.base import NotAllowedError
from envs.base import require
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import numpy as np
from rlcr_jax import files
from rlcr_jax.llm import model
from rlcr_jax.llm import sources
from rlcr_jax.llm.tokens import Tokenizer
from safetensors import numpy as safetensors_numpy

_NAMES = {  # Of a parameter, in Hugging Face's files and in GGUF.
    'embed': ('model.embed_tokens', 'token_embd'),
    'norm': ('model.norm', 'output_norm'),
    'head': ('lm_head', 'output'),
    'norm_attention': ('input_layernorm', 'attn_norm'),
    'norm_mlp': ('post_attention_layernorm', 'ffn_norm'),
    'q': ('self_attn.q_proj', 'attn_q'),
    'k': ('self_attn.k_proj', 'attn_k'),
    'v': ('self_attn.v_proj', 'attn_v'),
    'o': ('self_attn.o_proj', 'attn_output'),
    'norm_q': ('self_attn.q_norm', 'attn_q_norm'),
    'norm_k': ('self_attn.k_norm', 'attn_k_norm'),
    'gate': ('mlp.gate_proj', 'ffn_gate'),
    'up': ('mlp.up_proj', 'ffn_up'),
    'down': ('mlp.down_proj', 'ffn_down'),
}


class Loaded(NamedTuple):
  """What a pretrained model is made of."""

  config: model.ModelConfig
  params: nnx.State
  tokenizer: Tokenizer


def load(
    path: pathlib.Path | str, dtype: str = 'float32', mesh: Mesh | None = None
) -> Loaded:
  """Reads a model and its tokenizer.

  Args:
    path: a folder with `config.json`, `model.safetensors` (or an index and
      shards) and `tokenizer.json`, or a `.gguf` file, which is dequantised
      and must not scale rotary embeddings.
    dtype: of the parameters and of computation, float32 or bfloat16.
    mesh: with axes data, fsdp and tp, to put each tensor on by its partition
      spec. Each device's part is read for it alone.

  Raises:
    NotAllowedError: if something is missing, damaged or not implemented.
  """
  path = pathlib.Path(path)
  source = sources.open_source(path)
  config = model.ModelConfig.from_hf(source.config)
  config = dataclasses.replace(config, dtype=dtype)
  if mesh is not None:
    model.check_mesh(config, mesh)
  tokenizer = source.tokenizer()
  require(
      tokenizer.vocab_size <= config.vocab_size,
      f'{path}: vocab_size',
      config.vocab_size,
      f'at least the {tokenizer.vocab_size} tokens of the tokenizer',
  )
  _check(source, config, path)

  def place(path, leaf, spec):
    def read(index):
      value = _read(source, path, leaf, index)
      return value.astype(jnp.dtype(dtype), copy=False)

    if mesh is None:
      return jnp.asarray(read((slice(None),) * leaf.ndim))
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(leaf.shape, sharding, read)

  shapes, specs = model.shapes(config), model.partition_specs(config)
  params = jax.tree.map_with_path(place, shapes, specs)
  return Loaded(config, params, tokenizer)


def save(
    directory: pathlib.Path | str,
    config: model.ModelConfig,
    params: nnx.State,
    tokenizer: Tokenizer,
) -> None:
  """Writes a folder that transformers and inference servers load.

  It is written beside and renamed, so that it is never there in part. A model
  that is there already is replaced.

  Raises:
    NotAllowedError: if something else is there.
  """
  directory = pathlib.Path(directory).absolute()
  model_there = (directory / 'config.json').exists()
  empty = directory.is_dir() and not any(directory.iterdir())
  if directory.exists() and not (model_there or empty):
    raise NotAllowedError(f'{directory} holds something other than a model.')
  draft = directory.with_name(f'.{directory.name}.{os.getpid()}')
  old = draft.with_name(f'{draft.name}.old')
  shutil.rmtree(draft, ignore_errors=True)
  draft.mkdir(parents=True)
  try:
    _write(draft, config, params, tokenizer)
    if directory.exists():
      os.replace(directory, old)
    os.replace(draft, directory)
  finally:
    shutil.rmtree(draft, ignore_errors=True)
  shutil.rmtree(old, ignore_errors=True)


def _write(folder: pathlib.Path, config, params, tokenizer) -> None:
  """Writes the files of `save`."""
  tensors = _unstack(params)
  safetensors_numpy.save_file(
      tensors, folder / sources.SINGLE, {'format': 'pt'}
  )
  ids = {
      'bos_token_id': tokenizer.bos_id,
      'eos_token_id': list(tokenizer.stop_ids),
      'pad_token_id': tokenizer.pad_id,
  }
  stored = str(tensors['model.embed_tokens.weight'].dtype)
  settings = {**config.to_hf(), **ids, 'torch_dtype': stored}
  files.write_json(folder / 'config.json', settings)
  files.write_json(folder / 'generation_config.json', ids)
  tokenizer.save(folder)


def _tensors(path: Any, leaf: Any, style: int) -> list[str]:
  """The tensors of a parameter, one per layer or a single one."""
  names = model.names_of(path)
  end = 'bias' if names[-1] == 'bias' else 'weight'
  if names[0] != 'layers':
    return [f'{_NAMES[names[0]][style]}.{end}']
  prefix, name = ('model.layers', 'blk')[style], _NAMES[names[1]][style]
  return [f'{prefix}.{i}.{name}.{end}' for i in range(leaf.shape[0])]


def _read(source: sources.Source, path: Any, leaf: Any, index) -> np.ndarray:
  """Part of a parameter. Tensors of layers are [out, in] or [out]."""
  names = _tensors(path, leaf, source.style)
  if model.names_of(path)[0] != 'layers':
    return source.read(names[0], index)
  layers, *rest = index
  part = tuple(reversed(rest))
  return np.stack([source.read(name, part).T for name in names[layers]])


def _unstack(params: nnx.State) -> dict[str, np.ndarray]:
  """Tensors by the names of Hugging Face's files."""
  tensors = {}
  for path, leaf in jax.tree.leaves_with_path(params):
    names, value = _tensors(path, leaf, sources.HF), np.asarray(leaf)
    layers = model.names_of(path)[0] == 'layers'
    # Others than contiguous arrays are written wrong, without an error.
    parts = map(np.ascontiguousarray, (x.T for x in value))
    tensors.update(zip(names, parts if layers else [value], strict=True))
  return tensors


def _check(source: sources.Source, config: model.ModelConfig, path) -> None:
  """Raises an error unless the tensors are those of the architecture."""
  left = set(source.names)
  for where, leaf in jax.tree.leaves_with_path(model.shapes(config)):
    layers = model.names_of(where)[0] == 'layers'
    expected = leaf.shape[:0:-1] if layers else leaf.shape
    for name in _tensors(where, leaf, source.style):
      if name not in source.names:
        raise NotAllowedError(f'{path}: tensor {name} is missing.')
      found = source.shape(name)
      require(found == expected, f'{path}: shape of {name}', found, expected)
      left.discard(name)
  if config.tie_word_embeddings:  # A head that is the embedding once more.
    left.discard(f'{_NAMES["head"][source.style]}.weight')
  left = sorted(name for name in left if not name.endswith('.inv_freq'))
  if left:
    raise NotAllowedError(
        f'{path}: tensor {left[0]} is not one of a {config.architecture}.'
    )
