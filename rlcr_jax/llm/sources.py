"""Files of tensors: Hugging Face directories and GGUF."""

import pathlib
from typing import Any, Protocol

from envs.base import NotAllowedError
from envs.base import require
import gguf
import numpy as np
from rlcr_jax.llm.tokens import read_json
from rlcr_jax.llm.tokens import Tokenizer
import safetensors

HF, GGUF = 0, 1  # By whose names tensors go.
SINGLE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_GGUF_SIZES = {  # Field of `config.json` by its name in GGUF.
    'embedding_length': 'hidden_size',
    'feed_forward_length': 'intermediate_size',
    'block_count': 'num_hidden_layers',
    'attention.head_count': 'num_attention_heads',
    'attention.head_count_kv': 'num_key_value_heads',
    'attention.key_length': 'head_dim',
    'context_length': 'max_position_embeddings',
    'rope.freq_base': 'rope_theta',
    'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
}


class Source(Protocol):
  """A file or a folder of tensors, by their own names."""

  config: dict[str, Any]  # As in `config.json`.
  names: set[str]
  style: int  # HF or GGUF, by which tensors are named.

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Part of a tensor."""

  def tokenizer(self) -> Tokenizer:
    """The tokenizer that came with the tensors."""


def open_source(path: pathlib.Path) -> Source:
  """Opens a folder or a `.gguf` file.

  Raises:
    NotAllowedError: if it is missing, damaged or something else.
  """
  if not path.exists():
    raise NotAllowedError(f'{path} is missing: name a folder or a .gguf file.')
  return Folder(path) if path.is_dir() else Gguf(path)


class Folder:
  """A folder in Hugging Face's layout."""

  style = HF

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.config = read_json(path / 'config.json')
    shards = [SINGLE]
    if not (path / SINGLE).exists() and (path / _INDEX).exists():
      weight_map = read_json(path / _INDEX).get('weight_map', {})
      shards = sorted(set(weight_map.values()))
    self._slices = {}
    for shard in shards:
      tensors = self._open(path / shard)
      self._slices |= {k: tensors.get_slice(k) for k in tensors.keys()}
    self.names = set(self._slices)

  def _open(self, file):
    try:
      return safetensors.safe_open(file, framework='numpy')
    except FileNotFoundError as error:
      raise NotAllowedError(f'{file} is missing.') from error
    except safetensors.SafetensorError as error:
      raise NotAllowedError(f'{file} is damaged: {error}') from error

  def shape(self, name):
    return tuple(self._slices[name].get_shape())

  def read(self, name, index):
    return self._slices[name][index]

  def tokenizer(self):
    return Tokenizer.from_directory(self.path)


class Gguf:
  """A file of llama.cpp."""

  style = GGUF

  def __init__(self, path: pathlib.Path):
    require(path.suffix == '.gguf', 'weights', str(path), 'a folder or .gguf')
    try:
      self.reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
      raise NotAllowedError(f'{path} is damaged: {error}') from error
    self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
    self.names = set(self._tensors)
    self.config = self._read_config()

  def _get(self, name):
    field = self.reader.get_field(name)
    return None if field is None else field.contents()

  def _read_config(self):
    kind = self._get('general.architecture')
    values = {hf: self._get(f'{kind}.{k}') for k, hf in _GGUF_SIZES.items()}
    scaling = self._get(f'{kind}.rope.scaling.type')
    if scaling not in (None, 'none'):
      values['rope_scaling'] = {'rope_type': scaling}
    values['model_type'] = kind
    values['tie_word_embeddings'] = 'output.weight' not in self.names
    if 'token_embd.weight' in self.names:
      values['vocab_size'] = self.shape('token_embd.weight')[0]
    return {k: value for k, value in values.items() if value is not None}

  def shape(self, name):
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name, index):
    tensor, shape = self._tensors[name], self.shape(name)
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    value = value.reshape(shape)
    # Of Llama, llama.cpp interleaves the halves that rotary embeddings pair.
    heads = {
        'attn_q.weight': 'num_attention_heads',
        'attn_k.weight': 'num_key_value_heads',
    }.get(name.split('.', 2)[-1])
    if heads and self.config['model_type'] == 'llama':
      split = value.reshape(self.config[heads], -1, 2, shape[1])
      value = split.swapaxes(1, 2).reshape(shape)
    return np.array(value[index])  # Lest it be the file that is mapped.

  def tokenizer(self):
    return Tokenizer.from_gguf(self.reader)
