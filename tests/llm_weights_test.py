"""Tests of reading and writing pretrained weights."""

import dataclasses
import functools
import json
import os
import pathlib

from envs.base import NotAllowedError
import gguf
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
import numpy as np
import pytest
from rlcr_jax.llm import model
from rlcr_jax.llm import sources
from rlcr_jax.llm import weights
from safetensors import numpy as safetensors_numpy
from tests import llm_tiny

NAMES = tuple(llm_tiny.HF_CONFIGS)
SMOLLM2 = os.environ.get('RLCR_JAX_SMOLLM2', '')
PROMPTS = (
    'The capital of France is',
    '<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n',
    'def mean(xs):\n  """The mean of a list."""\n  return sum(',
    'One, two, three, four, five, six, seven, eight. ' * 6,
    ' '.join(
        (pathlib.Path(__file__).parents[1] / 'LICENSE').read_text().split()
    ),
)


def write(folder, name='smollm2', **changes):
  return llm_tiny.write(folder, {**llm_tiny.HF_CONFIGS[name], **changes})


def rewrite(folder, change):
  """Changes the tensors of a folder."""
  file = folder / 'model.safetensors'
  tensors = dict(safetensors_numpy.load_file(file))
  change(tensors)
  safetensors_numpy.save_file(tensors, file)


def assert_same(params, expected):
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
  for a, b in pairs:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def refuses(path, message):
  with pytest.raises(NotAllowedError, match=message) as caught:
    weights.load(path)
  assert '\n' not in str(caught.value)


def test_tensors_are_stacked_and_transposed(tmp_path):
  loaded = weights.load(write(tmp_path))
  tensors = llm_tiny.tensors(llm_tiny.HF_CONFIGS['smollm2'])
  np.testing.assert_array_equal(
      loaded.params['layers']['down']['kernel'][...][2],
      tensors['model.layers.2.mlp.down_proj.weight'].T,
  )
  assert_same(loaded.params, jax.tree.map(jnp.asarray, loaded.params))
  shapes = model.shapes(loaded.config)
  assert jax.tree.structure(loaded.params) == jax.tree.structure(shapes)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', NAMES)
def test_what_is_saved_is_loaded_bit_for_bit(name, dtype, tmp_path):
  first = weights.load(write(tmp_path / 'a', name), dtype)
  assert first.config.dtype == dtype
  assert first.params['embed'][...].dtype == jnp.dtype(dtype)
  weights.save(tmp_path / 'b', *first)
  again = weights.load(tmp_path / 'b', dtype)
  assert again.config == first.config
  assert_same(again.params, first.params)
  assert again.tokenizer.chat_template == first.tokenizer.chat_template
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b']
  if dtype == 'float32':  # The very tensors that were there at first.
    read = lambda n: safetensors_numpy.load_file(
        tmp_path / n / 'model.safetensors'
    )
    old, new = read('a'), read('b')
    assert set(old) == set(new)
    assert all(np.array_equal(old[key], new[key]) for key in old)


def test_saved_settings(tmp_path):
  loaded = weights.load(write(tmp_path / 'a'), 'bfloat16')
  weights.save(tmp_path / 'b', *loaded)
  read = lambda name: json.loads((tmp_path / 'b' / name).read_text())
  ids = {'bos_token_id': 0, 'eos_token_id': [1], 'pad_token_id': 1}
  assert read('generation_config.json') == ids
  config = read('config.json')
  assert config.items() >= {**ids, 'torch_dtype': 'bfloat16'}.items()


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
  loaded = llm_tiny.loaded('smollm2')
  target = tmp_path / 'deep' / 'model'
  weights.save(target, *loaded)
  zeros = loaded._replace(params=jax.tree.map(jnp.zeros_like, loaded.params))
  weights.save(target, *zeros)
  assert_same(weights.load(target).params, zeros.params)
  assert [p.name for p in target.parent.iterdir()] == ['model']
  (tmp_path / 'precious').mkdir()
  weights.save(tmp_path / 'precious', *loaded)  # It was empty.
  (tmp_path / 'precious' / 'config.json').unlink()
  with pytest.raises(NotAllowedError, match='precious holds something other'):
    weights.save(tmp_path / 'precious', *loaded)


def test_a_save_that_fails_leaves_the_old_model(tmp_path):
  loaded = llm_tiny.loaded('smollm2')
  weights.save(tmp_path / 'model', *loaded)

  class Broken:
    stop_ids, pad_id, bos_id = (1,), 1, 0

    def save(self, directory):
      raise OSError('No space left on device')

  zeros = jax.tree.map(jnp.zeros_like, loaded.params)
  with pytest.raises(OSError, match='No space'):
    weights.save(tmp_path / 'model', loaded.config, zeros, Broken())
  assert_same(weights.load(tmp_path / 'model').params, loaded.params)
  assert [p.name for p in tmp_path.iterdir()] == ['model']


def shard(folder):
  """Splits the file of a folder in two, with an index."""
  file = folder / 'model.safetensors'
  tensors = safetensors_numpy.load_file(file)
  file.unlink()
  weight_map = {}
  for i in range(2):
    part = {name: tensors[name] for name in sorted(tensors)[i::2]}
    name = f'model-{i + 1:05}-of-00002.safetensors'
    safetensors_numpy.save_file(part, folder / name)
    weight_map |= dict.fromkeys(part, name)
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))


def test_shards(tmp_path):
  expected = weights.load(write(tmp_path)).params
  shard(tmp_path)
  assert_same(weights.load(tmp_path).params, expected)
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  refuses(tmp_path, 'model-00002-of-00002.safetensors is missing')
  (tmp_path / 'model.safetensors.index.json').write_text('{}')
  refuses(tmp_path, 'tensor model.embed_tokens.weight is missing')


def test_half_precision_is_read(tmp_path):
  half = lambda tensors: tensors.update(
      {name: value.astype(jnp.bfloat16) for name, value in tensors.items()}
  )
  exact = weights.load(write(tmp_path)).params
  rewrite(tmp_path, half)
  rounded = jax.tree.map(lambda x: x.astype('bfloat16').astype('f'), exact)
  assert_same(weights.load(tmp_path).params, rounded)


def test_a_mesh_gets_each_device_its_part(tmp_path, monkeypatch):
  config, expected, _ = weights.load(write(tmp_path, 'llama3'))
  sizes = []
  read = sources.Folder.read

  def spy(self, name, index):
    value = read(self, name, index)
    sizes.append((name, value.shape))
    return value

  monkeypatch.setattr(sources.Folder, 'read', spy)
  devices = np.array(jax.devices()[:4]).reshape(1, 2, 2)
  mesh = Mesh(devices, ('data', 'fsdp', 'tp'), axis_types=(AxisType.Auto,) * 3)
  params = weights.load(tmp_path, mesh=mesh).params
  assert_same(params, expected)
  specs = model.partition_specs(config)
  for leaf, spec in zip(
      jax.tree.leaves(params), jax.tree.leaves(specs), strict=True
  ):
    assert leaf.sharding.spec == spec
  shapes = {shape for name, shape in sizes if 'q_proj' in name}
  assert shapes == {(32, 16)}  # Never all of [64, 32].
  embeddings = {shape for name, shape in sizes if 'embed' in name}
  assert embeddings == {(144, 16)}


def test_a_mesh_that_does_not_fit(tmp_path):
  devices = np.array(jax.devices()[:4]).reshape(1, 1, 4)
  mesh = Mesh(devices, ('data', 'fsdp', 'tp'), axis_types=(AxisType.Auto,) * 3)
  with pytest.raises(NotAllowedError, match='mesh.tp=4'):
    weights.load(write(tmp_path), mesh=mesh)


def test_a_tied_head_that_is_stored_all_the_same(tmp_path):
  expected = weights.load(write(tmp_path)).params
  embed = 'model.embed_tokens.weight'
  rewrite(
      tmp_path,
      lambda tensors: tensors.update({'lm_head.weight': tensors[embed]}),
  )
  assert_same(weights.load(tmp_path).params, expected)


def test_weights_that_are_missing(tmp_path):
  refuses(tmp_path / 'none', 'none is missing')
  refuses(tmp_path, 'config.json is missing')
  write(tmp_path)
  (tmp_path / 'model.safetensors').unlink()
  refuses(tmp_path, 'model.safetensors is missing')


def test_a_file_that_is_cut_short(tmp_path):
  file = write(tmp_path) / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])
  refuses(tmp_path, 'model.safetensors is damaged')
  file.write_bytes(b'')
  refuses(tmp_path, 'model.safetensors is damaged')


def test_tensors_that_are_not_as_they_should_be(tmp_path):
  name = 'model.layers.1.mlp.up_proj.weight'
  write(tmp_path)
  rewrite(tmp_path, lambda t: t.update({name: t[name][:, :-1].copy()}))
  refuses(tmp_path, rf'shape of {name}=\(48, 31\).*\(48, 32\)')
  rewrite(tmp_path, lambda t: t.pop(name))
  refuses(tmp_path, f'tensor {name} is missing')
  write(tmp_path)
  bias = 'model.layers.0.self_attn.q_proj.bias'
  rewrite(tmp_path, lambda t: t.update({bias: np.zeros(32, 'f')}))
  refuses(tmp_path, f'tensor {bias} is not one of a LlamaForCausalLM')


def test_settings_that_are_not_as_they_should_be(tmp_path):
  refuses(write(tmp_path, model_type='mamba'), "model_type='mamba'")
  refuses(write(tmp_path, vocab_size=270), 'vocab_size=270.* at least the 273')
  (tmp_path / 'config.json').write_text('[]')
  refuses(tmp_path, 'config.json cannot be read: it is not an object')
  write(tmp_path)
  (tmp_path / 'tokenizer.json').unlink()
  refuses(tmp_path, 'tokenizer.json is missing')


def interleave(value, heads):
  """How llama.cpp's converter orders the rows of q and k of Llama."""
  split = value.reshape(heads, 2, value.shape[0] // heads // 2, -1)
  return split.swapaxes(1, 2).reshape(value.shape)


def as_gguf(path, name, kind=gguf.GGMLQuantizationType.F32, extra=()):
  """Writes a tiny model as llama.cpp's converter does."""
  hf = llm_tiny.HF_CONFIGS[name]
  theirs = dict(weights._NAMES.values())  # Hugging Face's name → GGUF's.
  tokens = llm_tiny.write_gguf(path.with_name('tokens.gguf'), template='t')
  writer = gguf.GGUFWriter(path, hf['model_type'])
  for field in tokens.fields.values():
    if field.name.startswith('tokenizer.'):
      sub = field.types[-1] if len(field.types) > 1 else None
      writer.add_key_value(field.name, field.contents(), field.types[0], sub)
  writer.add_block_count(hf['num_hidden_layers'])
  writer.add_context_length(hf['max_position_embeddings'])
  writer.add_embedding_length(hf['hidden_size'])
  writer.add_feed_forward_length(hf['intermediate_size'])
  writer.add_head_count(hf['num_attention_heads'])
  writer.add_head_count_kv(hf['num_key_value_heads'])
  writer.add_key_length(hf.get('head_dim', 8))
  rope = hf.get('rope_parameters', hf)
  writer.add_rope_freq_base(rope['rope_theta'])
  writer.add_layer_norm_rms_eps(hf['rms_norm_eps'])
  for key, value in extra:
    writer.add_string(key, value)
  for tensor, value in llm_tiny.tensors(hf).items():
    stem, end = tensor.rsplit('.', 1)
    if stem.startswith('model.layers.'):
      layer, stem = stem.removeprefix('model.layers.').split('.', 1)
      target = f'blk.{layer}.{theirs[stem]}.{end}'
    else:
      target = f'{theirs[stem]}.{end}'
    if hf['model_type'] == 'llama' and stem[-6:] in ('q_proj', 'k_proj'):
      value = interleave(value, 4 if stem[-6] == 'q' else 2)
    whole = value.ndim == 1 or value.shape[1] % 32  # Blocks are of 32.
    stored = gguf.GGMLQuantizationType.F32 if whole else kind
    data = gguf.quants.quantize(value, stored)
    writer.add_tensor(target, data, raw_dtype=stored)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize('name', ['smollm2', 'qwen2', 'qwen3'])
def test_gguf_holds_the_same_model(name, tmp_path):
  loaded = weights.load(as_gguf(tmp_path / 'a.gguf', name))
  expected = llm_tiny.loaded(name)
  assert_same(loaded.params, expected.params)
  config, epsilon = loaded.config, expected.config.rms_norm_eps
  assert config.rms_norm_eps == pytest.approx(epsilon)  # GGUF has float32.
  assert dataclasses.replace(config, rms_norm_eps=epsilon) == expected.config
  assert loaded.tokenizer.encode('work 3') == expected.tokenizer.encode(
      'work 3'
  )


def test_gguf_is_dequantised(tmp_path):
  kind = gguf.GGMLQuantizationType.Q8_0
  loaded = weights.load(as_gguf(tmp_path / 'a.gguf', 'smollm2', kind))
  pairs = zip(
      jax.tree.leaves(loaded.params),
      jax.tree.leaves(llm_tiny.loaded('smollm2').params),
      strict=True,
  )
  # Steps are 1/127 of the largest of 32, and the error is half a step.
  errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
  assert 1e-3 < max(errors) <= 0.51 / 127


def test_gguf_on_a_mesh(tmp_path):
  devices = np.array(jax.devices()[:4]).reshape(1, 2, 2)
  mesh = Mesh(devices, ('data', 'fsdp', 'tp'), axis_types=(AxisType.Auto,) * 3)
  loaded = weights.load(as_gguf(tmp_path / 'a.gguf', 'smollm2'), mesh=mesh)
  assert_same(loaded.params, llm_tiny.loaded('smollm2').params)


def test_gguf_files_that_are_refused(tmp_path):
  file = as_gguf(tmp_path / 'a.gguf', 'smollm2')
  data = file.read_bytes()
  for size in (0, 10, 3000, len(data) - 5000):
    file.write_bytes(data[:size])
    refuses(file, 'a.gguf is damaged')
  (tmp_path / 'b.bin').write_bytes(data)
  refuses(tmp_path / 'b.bin', 'must be a folder or .gguf')
  extra = [('llama.rope.scaling.type', 'linear')]
  file = as_gguf(tmp_path / 'c.gguf', 'smollm2', extra=extra)
  refuses(file, "rope_type='linear'")


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_transformers_agrees_on_what_is_saved(name, tmp_path):
  config, params, tokenizer = llm_tiny.loaded(name)
  params = jax.tree.map(lambda x: 0.9 * x, params)
  weights.save(tmp_path, config, params, tokenizer)
  expected = llm_tiny.by_transformers(tmp_path, llm_tiny.TOKENS)
  tokens = jnp.asarray(llm_tiny.TOKENS)
  valid = jnp.ones(tokens.shape, bool)
  logits, _ = llm_tiny.apply(config, params, tokens, valid)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope='module')
def smollm2(tmp_path_factory):
  """SmolLM2-135M-Instruct: ours, transformers' own reading of it, a folder."""
  if not SMOLLM2:
    pytest.skip('RLCR_JAX_SMOLLM2 names no .gguf file.')
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  loaded, file = weights.load(SMOLLM2), pathlib.Path(SMOLLM2)
  load = transformers.AutoModelForCausalLM.from_pretrained
  theirs = load(file.parent, gguf_file=file.name, dtype=torch.float32)
  folder = tmp_path_factory.mktemp('smollm2') / 'model'
  weights.save(folder, *loaded)
  return loaded, theirs.eval(), folder


@functools.partial(jax.jit, static_argnums=0)
def score(config, params, tokens):
  return model.apply(config, params, tokens, jnp.ones(tokens.shape, bool))[0]


@pytest.mark.slow
@pytest.mark.parametrize('exported', [False, True])
def test_smollm2_has_the_logits_of_transformers(smollm2, exported):
  import torch
  import transformers

  (config, params, tokenizer), theirs, folder = smollm2
  if exported:
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(folder, dtype=torch.float32)
  lengths = []
  for prompt in PROMPTS:
    ids = tokenizer.encode(prompt)[:420]
    lengths.append(len(ids))
    with torch.no_grad():
      expected = theirs(torch.tensor([ids])).logits[0].numpy()
    logits = np.asarray(score(config, params, jnp.asarray([ids]))[0])
    error = np.abs(logits - expected).max()
    print(f'{len(ids)} tokens: max abs logit difference {error:.1e}')
    assert error < 1e-3
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))
  assert len(lengths) >= 5 and min(lengths) <= 6 and max(lengths) >= 400


@pytest.mark.slow
def test_smollm2_reads_and_writes_text_as_transformers_does(smollm2):
  import transformers

  (_, _, tokenizer), _, folder = smollm2
  file = pathlib.Path(SMOLLM2)
  load = transformers.AutoTokenizer.from_pretrained
  talk = [{'role': 'user', 'content': 'Hello, 12 wörlds!'}]
  for theirs in (load(folder), load(file.parent, gguf_file=file.name)):
    for prompt in (*PROMPTS, 'naïve  \n\n\t x=1234; 😀 <|im_end|>'):
      ids = theirs.encode(prompt, add_special_tokens=False)
      assert tokenizer.encode(prompt) == ids
      assert tokenizer.decode(ids) == prompt
    text = theirs.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.chat(talk) == text
    assert theirs.eos_token_id in tokenizer.stop_ids


@pytest.mark.slow
def test_smollm2_writes_the_same_tokens_in_a_padded_batch(smollm2):
  """Greedy, left-padded, with a cache, against one row at a time."""
  import torch

  (config, params, tokenizer), theirs, _ = smollm2
  prompts = [tokenizer.encode(prompt)[-60:] for prompt in PROMPTS]
  width = max(map(len, prompts))
  tokens = np.full((len(prompts), width), tokenizer.pad_id, np.int32)
  for row, ids in enumerate(prompts):
    tokens[row, width - len(ids) :] = ids
  lengths = np.array([len(ids) for ids in prompts])
  valid = np.arange(width)[None] >= width - lengths[:, None]
  cache, written = model.empty_cache(config, len(prompts), width + 24), []
  for _ in range(24):
    logits, cache = llm_tiny.apply(config, params, tokens, valid, cache, last=1)
    tokens = np.asarray(logits.argmax(-1), np.int32)
    valid = np.ones(tokens.shape, bool)
    written.append(tokens[:, 0])
  for ids, ours in zip(prompts, np.stack(written, axis=1), strict=True):
    with torch.no_grad():
      out = theirs.generate(
          torch.tensor([ids]), max_new_tokens=24, do_sample=False
      )
    expected = out[0, len(ids) :].tolist()
    assert ours[: len(expected)].tolist() == expected
    print(repr(tokenizer.decode(expected)))
