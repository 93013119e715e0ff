"""A decoder of the Llama family: Llama 3, SmolLM2, Qwen 2 and Qwen 3.

Configured by a Hugging Face `config.json`. Parameters are one pytree with the
layers stacked on a leading axis, over which `apply` scans.

Axes: `[B]` rows, `[T]` tokens, `[S]` slots of the cache, `[L]` layers, `[d]`
hidden features, `[H]` heads of queries in `[K]` groups that share keys and
values, `[D]` features of a head, `[r]` rank of the low-rank adapters.
"""

import functools
import math
from typing import Any, NamedTuple

import chex
from envs.base import require
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rlcr_jax.llm.model_config import ModelConfig

_MASKED = -1e30  # Finite, so that rows of padding have finite gradients.
_LORA_SCALE = 2.0  # alpha / rank, for alpha = 2 rank.
_IN = P(None, 'fsdp', 'tp')  # [L, d, features]
_OUT = P(None, 'tp', 'fsdp')  # [L, features, d]
_PROJECTIONS = {  # Where their kernels live; all of them can be adapted.
    'q': _IN,
    'k': _IN,
    'v': _IN,
    'o': _OUT,
    'gate': _IN,
    'up': _IN,
    'down': _OUT,
}


class Cache(NamedTuple):
  """Keys and values of tokens that were read before."""

  keys: chex.Array  # [L, B, S, K, D]
  values: chex.Array  # [L, B, S, K, D]
  valid: chex.Array  # [B, S] bool: the slot holds a token.
  length: chex.Array  # [] int32, slots written, the same for all rows.


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
  """A cache of `slots` unwritten slots for `batch` rows."""
  c = config
  shape = (c.num_layers, batch, slots, c.num_kv_heads, c.head_dim)
  # Two arrays, since one cannot be donated twice.
  keys, values = jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)
  return Cache(keys, values, jnp.zeros((batch, slots), bool), jnp.int32(0))


def frequencies(config: ModelConfig) -> jax.Array:
  """Rotary frequencies [D / 2], float32, in radians per position."""
  steps = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
  frequency = 1.0 / config.rope_theta**steps
  s = config.rope_scaling
  if s is None:
    return frequency
  # Rotations within the original context: few of them are stretched whole, and
  # many not at all.
  turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
  keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
  keep = jnp.clip(keep, 0.0, 1.0)
  return frequency * (keep + (1 - keep) / s.factor)


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Turns pairs (i, i + D / 2) of [B, T, heads, D] by angles [B, T, D / 2]."""
  cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class _Layer(nnx.Module):
  """Pre-norm attention, then a gated MLP."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = c = config
    d, queries, keys = c.hidden_size, c.num_heads, c.num_kv_heads
    residual = 1.0 / (2 * c.num_layers)

    def linear(d_in, d_out, scale=1.0, bias=False):
      init = nnx.initializers.variance_scaling(scale, 'fan_in', 'normal')
      return nnx.Linear(
          d_in, d_out, use_bias=bias, dtype=c.dtype, kernel_init=init, rngs=rngs
      )

    self.norm_attention = _norm(d, c, rngs)
    self.norm_mlp = _norm(d, c, rngs)
    self.q = linear(d, queries * c.head_dim, bias=c.qkv_bias)
    self.k = linear(d, keys * c.head_dim, bias=c.qkv_bias)
    self.v = linear(d, keys * c.head_dim, bias=c.qkv_bias)
    self.o = linear(queries * c.head_dim, d, residual)
    self.norm_q = _norm(c.head_dim, c, rngs) if c.qk_norm else None
    self.norm_k = _norm(c.head_dim, c, rngs) if c.qk_norm else None
    self.gate = linear(d, c.intermediate_size)
    self.up = linear(d, c.intermediate_size)
    self.down = linear(c.intermediate_size, d, residual)

  def __call__(self, x, angles, masks, past, lora):
    """Maps x [B, T, d]; returns the new keys and values [B, T, K, D] too.

    Args:
      x: [B, T, d].
      angles: [B, T, D / 2] float32.
      masks: [B, T, S] and [B, T, T] bool, slots and tokens that are attended.
      past: keys and values [B, S, K, D] of the cache.
      lora: name → a, b of this layer, or None.
    """
    q, k, v = self.project(x, angles, lora)
    mixed = _attend(q, (past[0], k), (past[1], v), masks)
    return self.finish(x, mixed, lora), (k, v)

  def project(self, x, angles, lora=None):
    """Queries, keys and values [B, T, heads, D] of x [B, T, d]."""
    h = self.norm_attention(x)
    q, k, v = (
        self._linear(name, h, lora).reshape(
            *h.shape[:2], -1, self.config.head_dim
        )
        for name in 'qkv'
    )
    if self.config.qk_norm:
      q, k = self.norm_q(q), self.norm_k(k)
    return _rotate(q, angles), _rotate(k, angles), v

  def finish(self, x, mixed, lora=None):
    """Adds to x [..., d] what attention mixed [..., H D], and the MLP."""
    x = x + self._linear('o', mixed, lora)
    h = self.norm_mlp(x)
    gate = jax.nn.silu(self._linear('gate', h, lora))
    return x + self._linear('down', gate * self._linear('up', h, lora), lora)

  def _linear(self, name, x, lora):
    y = getattr(self, name)(x)
    if lora is None:
      return y
    a, b = (lora[name][side].astype(x.dtype) for side in 'ab')
    return y + (x @ a) @ b * _LORA_SCALE


def _norm(features: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(
      features, epsilon=config.rms_norm_eps, dtype=config.dtype, rngs=rngs
  )


def _attend(q, keys, values, masks) -> jax.Array:
  """Attention over the cache and the new tokens, each in its own place.

  Args:
    q: [B, T, H, D].
    keys: [B, S, K, D] and [B, T, K, D].
    values: the same.
    masks: [B, T, S] and [B, T, T] bool.

  Returns:
    [B, T, H D].
  """
  rows, tokens, _, head_dim = q.shape
  q = q.reshape(rows, tokens, keys[0].shape[2], -1, head_dim)
  q = q / math.sqrt(head_dim)
  logits = [
      jnp.where(
          mask[:, None, None],
          jnp.einsum(
              'btkgd,bskd->bkgts', q, key, preferred_element_type=jnp.float32
          ),
          _MASKED,
      )
      for key, mask in zip(keys, masks, strict=True)
  ]
  weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1))
  weights = jnp.split(weights.astype(q.dtype), [keys[0].shape[1]], axis=-1)
  mixed = sum(
      jnp.einsum('bkgts,bskd->btkgd', weight, value)
      for weight, value in zip(weights, values, strict=True)
  )
  return mixed.reshape(rows, tokens, -1)


class Decoder(nnx.Module):
  """Embedding, stacked layers, final norm and head."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = c = config

    @nnx.split_rngs(splits=c.num_layers)
    @nnx.vmap(axis_size=c.num_layers)
    def stack(rngs):
      return _Layer(c, rngs)

    table = lambda: nnx.Param(
        0.02 * rngs.params.normal((c.vocab_size, c.hidden_size))
    )
    self.embed = table()
    self.layers = stack(rngs)
    self.norm = _norm(c.hidden_size, c, rngs)
    self.head = None if c.tie_word_embeddings else table()

  def __call__(self, tokens, valid, cache, lora, last):
    """See `apply`; the cache is always there and returned as it was written."""
    dtype = self.config.dtype
    read = jnp.sum(cache.valid, axis=1, dtype=jnp.int32)
    positions = read[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    angles = positions[:, :, None] * frequencies(self.config)[None, None]
    causal = jnp.tri(tokens.shape[1], dtype=bool)
    seen = jnp.broadcast_to(
        cache.valid[:, None], (*tokens.shape, cache.valid.shape[1])
    )
    masks = seen, valid[:, None] & causal[None]
    structure, stacked = nnx.split(self.layers)

    def layer(x, scanned):
      state, keys, values, lora = scanned
      module = nnx.merge(structure, state)
      return module(x, angles, masks, (keys, values), lora)

    layer = jax.checkpoint(layer) if self.config.remat else layer
    x = self.embed[...].astype(dtype)[tokens]
    scanned = (stacked, cache.keys, cache.values, lora)
    x, new = jax.lax.scan(layer, x, scanned)
    x = self.norm(x[:, x.shape[1] - last :])
    head = self.embed if self.head is None else self.head
    logits = jnp.einsum(
        'btd,vd->btv',
        x,
        head[...].astype(dtype),
        preferred_element_type=jnp.float32,
    )
    return logits, new


def init(config: ModelConfig, key: jax.Array) -> nnx.State:
  """Random parameters, float32, layers stacked on a leading [L]."""
  return nnx.state(Decoder(config, nnx.Rngs(params=key)))


@functools.cache
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
  return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))))


def merged(config: ModelConfig, params: nnx.State) -> Decoder:
  """The module with these parameters."""
  return nnx.merge(_abstract(config)[0], params)


def shapes(config: ModelConfig) -> nnx.State:
  """Shapes and types of the parameters that `init` makes."""
  return _abstract(config)[1]


def apply(
    config: ModelConfig,
    params: nnx.State,
    tokens: chex.Array,
    valid: chex.Array,
    cache: Cache | None = None,
    lora: Any = None,
    last: int | None = None,
) -> tuple[jax.Array, Cache | None]:
  """Scores the next token after each token.

  A token attends to all valid tokens in the cache and, causally, to the valid
  ones beside it. Its position is the number of valid tokens before it, so that
  padding may stand on either side. Logits after tokens of padding mean nothing.

  Args:
    config: of the model, static.
    params: from `init` or `weights.load`.
    tokens: [B, T] int32.
    valid: [B, T] bool, false for padding.
    cache: what was read before, or None. `cache.length + T` slots must exist.
    lora: from `lora_init`, or None.
    last: score only after so many columns, the last ones; static. None: all.

  Returns:
    Logits [B, last, vocab] float32, and the cache with the tokens written to
    slots `length` to `length + T - 1`, or None.
  """
  chex.assert_rank([tokens, valid], 2)
  chex.assert_equal_shape([tokens, valid])
  chex.assert_type(valid, bool)
  past = empty_cache(config, tokens.shape[0], 0) if cache is None else cache
  model = merged(config, params)
  last = tokens.shape[1] if last is None else last
  logits, (keys, values) = model(tokens, valid, past, lora, last)
  if cache is None:
    return logits, None
  chex.assert_axis_dimension_gteq(cache.valid, 1, tokens.shape[1])
  write = lambda old, new, at: jax.lax.dynamic_update_slice(old, new, at)
  at = cache.length
  cache = Cache(
      write(cache.keys, keys, (0, 0, at, 0, 0)),
      write(cache.values, values, (0, 0, at, 0, 0)),
      write(cache.valid, valid, (0, at)),
      at + tokens.shape[1],
  )
  return logits, cache


def lora_init(config: ModelConfig, key: jax.Array, rank: int) -> Any:
  """Low-rank adapters that change nothing yet (Hu et al., 2021).

  Args:
    config: of the model.
    key: for `a`; `b` is zero.
    rank: r.

  Returns:
    Projection (q, k, v, o, gate, up, down) → {'a': [L, in, r], 'b': [L, r,
    out]}, float32.
  """
  require(rank >= 1, 'lora.rank', rank, '>= 1')
  keys = jax.random.split(key, len(_PROJECTIONS))
  lora = {}
  for name, key in zip(_PROJECTIONS, keys, strict=True):
    layers, d_in, d_out = shapes(config)['layers'][name]['kernel'].shape
    a = jax.random.normal(key, (layers, d_in, rank)) / math.sqrt(d_in)
    lora[name] = {'a': a, 'b': jnp.zeros((layers, rank, d_out))}
  return lora


def lora_merge(config: ModelConfig, params: nnx.State, lora: Any) -> nnx.State:
  """Parameters that do alone what `params` do with the adapters."""
  del config

  def merge(path, leaf):
    names = names_of(path)
    if names[-1] != 'kernel':
      return leaf
    a, b = lora[names[1]]['a'], lora[names[1]]['b']
    return leaf + (a @ b * _LORA_SCALE).astype(leaf.dtype)

  return jax.tree.map_with_path(merge, params)


def names_of(path: Any) -> tuple[str, ...]:
  """The names along a path of the parameters, such as layers, q, kernel."""
  keys = [getattr(entry, 'key', None) for entry in path]
  return tuple(key for key in keys if key is not None)


def partition_specs(config: ModelConfig) -> nnx.State:
  """Where parameters live on a mesh with axes data, fsdp and tp.

  Features of heads and of the MLP, and the vocabulary, are divided over tp, and
  hidden features over fsdp (Shoeybi et al., 2019). Everything is replicated
  over data.

  Args:
    config: of the model.

  Returns:
    `PartitionSpec`s in the structure of the parameters.
  """

  def spec(path, leaf):
    names = names_of(path)
    if names[0] in ('embed', 'head'):
      return P('tp', 'fsdp')
    if names[-1] == 'kernel':
      return _PROJECTIONS[names[1]]
    return P(None, 'tp') if names[-1] == 'bias' else P(*[None] * leaf.ndim)

  return jax.tree.map_with_path(spec, shapes(config))


def row_sharding(mesh: Mesh) -> tuple[NamedSharding, int]:
  """How rows are divided over a mesh (data and fsdp), and by how many."""
  axes = tuple(axis for axis in ('data', 'fsdp') if axis in mesh.axis_names)
  rows = NamedSharding(mesh, P(axes))
  return rows, math.prod(mesh.shape[axis] for axis in axes)


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
  """Raises `NotAllowedError` if the model cannot be divided over a mesh."""
  axes = ('data', 'fsdp', 'tp')
  names = mesh.axis_names
  require(set(names) == set(axes), 'mesh.axis_names', names, ', '.join(axes))
  automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
  require(automatic, 'mesh.axis_types', mesh.axis_types, 'AxisType.Auto')
  divided = {
      'tp': ('num_kv_heads', 'intermediate_size', 'vocab_size'),
      'fsdp': ('hidden_size',),
  }
  for axis, fields in divided.items():
    for field in fields:
      size, total = mesh.shape[axis], getattr(config, field)
      allowed = f'a divisor of {field}={total}'
      require(total % size == 0, f'mesh.{axis}', size, allowed)
