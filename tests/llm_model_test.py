"""Tests of the decoder against transformers, and of what it must not notice."""

import dataclasses
import functools
import json

from envs.base import NotAllowedError
import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import numpy as np
import pytest
from rlcr_jax.llm import model
from rlcr_jax.llm.model_config import Llama3Scaling
from rlcr_jax.llm.model_config import ModelConfig
from tests import llm_tiny

NAMES = tuple(llm_tiny.HF_CONFIGS)
CLOSE = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
TOKENS = llm_tiny.TOKENS[:, :9]  # [1, 9]


def score(name, tokens, valid=None, **kwargs):
  """Logits [B, T, vocab] of a tiny model, and its cache."""
  config, params, _ = llm_tiny.loaded(name)
  tokens = jnp.asarray(tokens)
  valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid)
  logits, cache = llm_tiny.apply(config, params, tokens, valid, **kwargs)
  return np.asarray(logits), cache


@functools.cache
def plain(name):
  """Logits [9, vocab] of one row without padding."""
  return score(name, TOKENS)[0][0]


def make_mesh(data=1, fsdp=2, tp=2, axis_type=AxisType.Auto):
  devices = mesh_utils.create_device_mesh(
      (data, fsdp, tp), jax.devices()[: data * fsdp * tp]
  )
  return Mesh(devices, ('data', 'fsdp', 'tp'), axis_types=(axis_type,) * 3)


def random_lora(config, rank=3):
  lora = model.lora_init(config, jax.random.key(0), rank)
  draw = lambda x: 0.1 * jax.random.normal(jax.random.key(1), x.shape)
  return {k: {'a': v['a'], 'b': draw(v['b'])} for k, v in lora.items()}


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_transformers(name):
  golden = np.array(json.loads(llm_tiny.GOLDEN.read_text())[name])
  logits, cache = score(name, llm_tiny.TOKENS)
  assert logits.shape == (1, 40, llm_tiny.VOCAB)
  assert logits.dtype == np.float32 and cache is None
  picked = logits[0][np.ix_(llm_tiny.POSITIONS, llm_tiny.COLUMNS)]
  np.testing.assert_allclose(picked, golden, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_all_logits_are_those_of_transformers(name, tmp_path):
  folder = llm_tiny.write(tmp_path, llm_tiny.HF_CONFIGS[name])
  expected = llm_tiny.by_transformers(folder, llm_tiny.TOKENS)
  logits, _ = score(name, llm_tiny.TOKENS)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('left, right', [(3, 0), (0, 3), (2, 1)])
def test_padding_and_other_rows_do_not_matter(name, left, right):
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, llm_tiny.VOCAB, (3, left + 9 + right))
  tokens[1, left : left + 9] = TOKENS[0]
  valid = rng.random(tokens.shape) < 0.5  # Others have holes of all kinds.
  valid[1] = (np.arange(len(valid[1])) >= left) & (
      np.arange(len(valid[1])) < left + 9
  )
  logits, _ = score(name, tokens, valid)
  CLOSE(logits[1, left : left + 9], plain(name))
  assert np.isfinite(logits).all()


def test_later_tokens_do_not_matter():
  changed = TOKENS.copy()
  changed[0, 5:] += 1
  logits, _ = score('llama3', changed)
  CLOSE(logits[0, :5], plain('llama3')[:5])
  assert np.abs(logits[0, 5:] - plain('llama3')[5:]).max(axis=1).min() > 1e-3


@pytest.mark.parametrize('name', NAMES)
def test_a_cache_changes_nothing(name):
  """Two rows with different padding, read in pieces of 4, 1, 4 and 4."""
  config = llm_tiny.loaded(name).config
  left = np.array([2, 4])
  tokens, valid = np.zeros((2, 13), np.int32), np.zeros((2, 13), bool)
  for row, pad in enumerate(left):
    tokens[row, pad : pad + 9], valid[row, pad : pad + 9] = TOKENS[0], True
  cache = model.empty_cache(config, 2, 16)
  # What unwritten slots hold must not matter.
  cache = cache._replace(keys=cache.keys + 9.0, values=cache.values + 9.0)
  pieces = []
  for start, stop in ((0, 4), (4, 5), (5, 9), (9, 13)):
    piece = slice(start, stop)
    logits, cache = score(name, tokens[:, piece], valid[:, piece], cache=cache)
    pieces.append(logits)
    assert int(cache.length) == stop
  logits = np.concatenate(pieces, axis=1)
  for row, pad in enumerate(left):
    CLOSE(logits[row, pad : pad + 9], plain(name))
  np.testing.assert_array_equal(cache.valid[:, :13], valid)
  assert not cache.valid[:, 13:].any()
  assert cache.keys.shape == (3, 2, 16, 2, config.head_dim)


def test_a_cache_that_is_full_is_refused():
  cache = model.empty_cache(llm_tiny.loaded('smollm2').config, 1, 8)
  with pytest.raises(AssertionError):
    score('smollm2', TOKENS, cache=cache)


@pytest.mark.parametrize('last', [1, 3, len(TOKENS)])
def test_only_the_last_logits(last):
  logits, _ = score('qwen2', TOKENS, last=last)
  CLOSE(logits[0], plain('qwen2')[-last:])


@pytest.mark.parametrize('name', NAMES)
def test_fresh_adapters_change_nothing(name):
  lora = model.lora_init(llm_tiny.loaded(name).config, jax.random.key(0), 3)
  np.testing.assert_array_equal(
      score(name, TOKENS, lora=lora)[0][0], plain(name)
  )


@pytest.mark.parametrize('name', NAMES)
def test_merged_adapters_do_the_same(name):
  config, params, tokenizer = llm_tiny.loaded(name)
  lora = random_lora(config)
  logits, _ = score(name, TOKENS, lora=lora)
  assert np.abs(logits[0] - plain(name)).max() > 0.1
  merged = model.lora_merge(config, params, lora)
  valid = jnp.ones(TOKENS.shape, bool)
  expected, _ = llm_tiny.apply(config, merged, jnp.asarray(TOKENS), valid)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
  q = params['layers']['q']['kernel'][...]
  by_hand = q[1] + 2.0 * lora['q']['a'][1] @ lora['q']['b'][1]
  CLOSE(merged['layers']['q']['kernel'][...][1], by_hand)


def test_every_projection_has_an_adapter_that_matters():
  config = llm_tiny.loaded('smollm2').config
  lora = random_lora(config)
  assert set(lora) == {'q', 'k', 'v', 'o', 'gate', 'up', 'down'}
  for name in lora:
    off = {**lora[name], 'b': 0 * lora[name]['b']}
    without, _ = score('smollm2', TOKENS, lora={**lora, name: off})
    full, _ = score('smollm2', TOKENS, lora=lora)
    assert np.abs(full - without).max() > 1e-3, name


def loss(params, config, tokens, valid):
  logits, _ = model.apply(config, params, tokens, valid)
  log_p = jax.nn.log_softmax(logits[:, :-1])
  taken = jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[:, :, 0]
  return -jnp.sum(jnp.where(valid[:, 1:], taken, 0.0))


grad = jax.jit(jax.grad(loss), static_argnums=1)


def test_remat_gives_the_same_gradient_and_padding_a_finite_one():
  config, params, _ = llm_tiny.loaded('llama3')
  tokens = jnp.asarray(np.concatenate([TOKENS, TOKENS]))
  valid = jnp.stack([jnp.arange(9) < 6, jnp.zeros(9, bool)])
  direct = grad(params, config, tokens, valid)
  again = grad(params, dataclasses.replace(config, remat=True), tokens, valid)
  for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(again), strict=True):
    assert np.isfinite(a).all() and np.abs(a).max() > 0
    CLOSE(a, b)


def test_remat_computes_layers_again():
  config, params, _ = llm_tiny.loaded('llama3')
  traced = lambda config: str(
      jax.make_jaxpr(loss, static_argnums=1)(
          params, config, jnp.asarray(TOKENS), jnp.ones((1, 9), bool)
      )
  )
  assert 'remat' not in traced(config)
  assert 'remat' in traced(dataclasses.replace(config, remat=True))


def test_bfloat16_is_close_and_its_logits_are_float32():
  config, params, _ = llm_tiny.loaded('qwen3')
  config = dataclasses.replace(config, dtype='bfloat16')
  cache = model.empty_cache(config, 1, 9)
  assert cache.keys.dtype == jnp.bfloat16
  valid = jnp.ones(TOKENS.shape, bool)
  logits, cache = llm_tiny.apply(
      config, params, jnp.asarray(TOKENS), valid, cache
  )
  assert logits.dtype == jnp.float32 and cache.keys.dtype == jnp.bfloat16
  error = np.abs(logits[0] - plain('qwen3'))
  assert 1e-4 < error.mean() < 0.1


def test_init_is_float32_and_of_the_right_size():
  config = dataclasses.replace(
      llm_tiny.loaded('qwen2').config, dtype='bfloat16'
  )
  params = model.init(config, jax.random.key(0))
  leaves = jax.tree.leaves(params)
  assert {x.dtype for x in leaves} == {jnp.dtype('float32')}
  # Per layer 2 norms, q, o, k, v, their biases, and the MLP.
  layer = 2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + (32 + 16 + 16) + 3 * 32 * 48
  assert sum(x.size for x in leaves) == 288 * 32 + 3 * layer + 32
  kernel = params['layers']['q']['kernel'][...]
  assert np.abs(kernel[0] - kernel[1]).max() > 0.1  # Layers differ.
  assert float(kernel.std()) == pytest.approx(32**-0.5, rel=0.05)


def test_fresh_parameters_predict_nearly_uniformly():
  config = llm_tiny.loaded('llama3').config
  params = model.init(config, jax.random.key(0))
  valid = jnp.ones(TOKENS.shape, bool)
  logits, _ = llm_tiny.apply(config, params, jnp.asarray(TOKENS), valid)
  log_p = jax.nn.log_softmax(logits)
  entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  assert float(entropy.min()) > 0.99 * np.log(llm_tiny.VOCAB)


@pytest.mark.parametrize('name', NAMES)
def test_a_mesh_changes_nothing(name):
  config, params, _ = llm_tiny.loaded(name)
  mesh = make_mesh()
  model.check_mesh(config, mesh)
  specs = model.partition_specs(config)
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  sharded = jax.tree.map(place, params, specs)
  q, o = (sharded['layers'][n]['kernel'][...] for n in 'qo')
  assert q.sharding.shard_shape(q.shape) == (3, 16, q.shape[2] // 2)
  assert o.sharding.shard_shape(o.shape) == (3, o.shape[1] // 2, 16)
  embed = sharded['embed'][...]
  assert embed.sharding.shard_shape(embed.shape) == (144, 16)
  valid = jnp.ones(TOKENS.shape, bool)
  logits, _ = llm_tiny.apply(config, sharded, jnp.asarray(TOKENS), valid)
  CLOSE(logits[0], plain(name))


@pytest.mark.parametrize(
    'change, mesh, message',
    [
        ({}, {'tp': 4, 'fsdp': 1}, 'mesh.tp=4 .* divisor of num_kv_heads=2'),
        ({'vocab_size': 289}, {}, 'mesh.tp=2 .* divisor of vocab_size=289'),
        ({'hidden_size': 33}, {}, 'mesh.fsdp=2 .* divisor of hidden_size=33'),
        ({}, {'axis_type': AxisType.Explicit}, 'mesh.axis_types'),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(change, mesh, message):
  config = llm_tiny.loaded('smollm2').config
  config = dataclasses.replace(config, **change)
  with pytest.raises(NotAllowedError, match=message):
    model.check_mesh(config, make_mesh(**mesh))


def test_a_mesh_of_other_axes_is_refused():
  mesh = Mesh(np.array(jax.devices()[:1]), ('data',))
  with pytest.raises(NotAllowedError, match='mesh.axis_names'):
    model.check_mesh(llm_tiny.loaded('smollm2').config, mesh)


def test_config_of_llama_3():
  config = ModelConfig.from_hf(llm_tiny.HF_CONFIGS['llama3'])
  assert config == ModelConfig(
      vocab_size=288,
      hidden_size=32,
      intermediate_size=48,
      num_layers=3,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      rope_theta=500.0,
      rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
      tie_word_embeddings=False,
      max_position_embeddings=512,
  )


@pytest.mark.parametrize('name', NAMES)
def test_config_survives_a_round_trip(name):
  config = ModelConfig.from_hf(llm_tiny.HF_CONFIGS[name])
  assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'model_type': 'mamba'}, 'model_type=.mamba.* llama, qwen2, qwen3'),
        ({'model_type': None}, 'model_type=None'),
        ({'vocab_size': ...}, 'vocab_size=None.* a whole number'),
        ({'vocab_size': '288'}, "config.json: vocab_size='288'"),
        ({'hidden_act': 'gelu'}, 'hidden_act=.gelu.* silu'),
        ({'attention_bias': True}, 'attention_bias=True'),
        ({'mlp_bias': True}, 'mlp_bias=True'),
        ({'use_sliding_window': True}, 'use_sliding_window=True'),
        ({'layer_types': ['sliding_attention']}, 'layer_types'),
        ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config'),
        ({'rope_scaling': {'type': 'yarn'}}, 'rope_type=.yarn.'),
        ({'rope_scaling': {'rope_type': 'llama3'}}, 'rope_scaling.factor=None'),
    ],
)
def test_what_is_not_implemented_is_named(changes, message):
  hf = {**llm_tiny.HF_CONFIGS['smollm2'], **changes}
  hf = {key: value for key, value in hf.items() if value is not ...}
  with pytest.raises(NotAllowedError, match=message) as caught:
    ModelConfig.from_hf(hf)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    'field, value',
    [
        ('vocab_size', 0),
        ('num_layers', 0),
        ('num_kv_heads', 3),
        ('head_dim', 7),
        ('architecture', 'MambaForCausalLM'),
        ('dtype', 'float16'),
        ('qkv_bias', True),
        ('qk_norm', True),
        ('max_position_embeddings', 0),
    ],
)
def test_fields_are_validated(field, value):
  config = llm_tiny.loaded('smollm2').config
  with pytest.raises(NotAllowedError, match=f'model.{field}='):
    dataclasses.replace(config, **{field: value})


def test_adapters_need_a_rank():
  config = llm_tiny.loaded('smollm2').config
  with pytest.raises(NotAllowedError, match='lora.rank=0'):
    model.lora_init(config, jax.random.key(0), 0)
