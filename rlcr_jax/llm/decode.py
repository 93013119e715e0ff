"""Draws tokens one after the other, on the device.

`model.apply` scans over stacked layers, which suits many tokens at once. One
token per row is bound by reading the weights, and slicing a layer out of the
stack would read and write them once more; so here layers are unrolled, each
with arrays of its own, and keys and values lie as attention reads them.

Axes: `[B]` rows, `[S]` slots, of which the last `[N]` are for drawn tokens,
`[K]` heads of keys and values, `[D]` features of a head, `[V]` vocabulary,
`[W]` edges of a node of the grammar.
"""

import math
from typing import Any, NamedTuple

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm.engine import FREE
from rlcr_jax.llm.engine import Grammar
from rlcr_jax.llm.engine import Sampling

_HALVINGS = 32  # Of an interval of log-probabilities.
_BLOCK = 256  # Tokens whose probabilities are summed before one is drawn.


class Rows(NamedTuple):
  """What stays the same while completions are drawn."""

  key: chex.Array  # [B] keys.
  valid: chex.Array  # [B, S] bool, slots that hold the prompt.
  ends: chex.Array  # [V] bool, tokens that end a completion.
  grammar: Grammar | None  # Of all rows together.


class State(NamedTuple):
  """What has been drawn so far."""

  keys: tuple[chex.Array, ...]  # [B, K, D, S] of each layer.
  values: tuple[chex.Array, ...]  # [B, K, S, D] of each layer.
  ids: chex.Array  # [B, N] int32.
  log_probs: chex.Array  # [B, N] float32.
  done: chex.Array  # [B] bool, has ended or is padding.
  size: chex.Array  # [B] int32, tokens drawn until then.
  node: chex.Array  # [B] int32, of the grammar.
  step: chex.Array  # [] int32, tokens drawn per row.


def unstack(config: model_lib.ModelConfig, params: nnx.State) -> tuple:
  """The parameters of each layer, in arrays of their own."""
  layer = lambda i: jax.tree.map(lambda x: x[i], params['layers'])
  return tuple(layer(i) for i in range(config.num_layers))


def read(
    config: model_lib.ModelConfig,
    params: nnx.State,
    cache: model_lib.Cache,
    tokens: chex.Array,
    valid: chex.Array,
) -> tuple[chex.Array, model_lib.Cache]:
  """Logits [B, V] after tokens [B, T], padded on the left; a longer cache.

  Unlike `model.apply`, it needs no empty slots in the cache, over which
  attention would go in vain.
  """
  model = model_lib.merged(config, params)
  logits, new = model(tokens, valid, cache, None, last=1)
  old = cache.keys, cache.values
  keys, values = (
      jnp.concatenate(pair, axis=2) for pair in zip(old, new, strict=True)
  )
  valid = jnp.concatenate([cache.valid, valid], axis=1)
  length = cache.length + tokens.shape[1]
  return logits[:, 0], model_lib.Cache(keys, values, valid, length)


def _grown(x: chex.Array, axis: int, more: int) -> chex.Array:
  return jnp.pad(x, [(0, more * (i == axis)) for i in range(x.ndim)])


def restrict(logits: chex.Array, sampling: Sampling) -> chex.Array:
  """Logits [B, V] of the distribution that is drawn from: temperature, k, p."""
  logits = logits / sampling.temperature
  if 0 < sampling.top_k < logits.shape[-1]:
    least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
    logits = jnp.where(logits < least, -jnp.inf, logits)
  if sampling.top_p < 1:
    kept = _nucleus(jax.nn.log_softmax(logits), sampling.top_p)
    logits = jnp.where(kept, logits, -jnp.inf)
  return logits


def _nucleus(log_probs: chex.Array, top_p: float) -> chex.Array:
  """[B, V] bool: the fewest likeliest indices that hold `top_p` together.

  The smallest of their log-probabilities is found by bisection, since sorting a
  vocabulary takes much longer than summing over it 32 times.
  """
  held = lambda least: jnp.sum(
      jnp.exp(log_probs), axis=-1, where=log_probs >= least[:, None]
  )

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    enough = held(middle) >= top_p
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

  high = jnp.max(log_probs, axis=-1)
  # Those below hold less than 1 - top_p, being V at most.
  low = jnp.full_like(high, math.log((1 - top_p) / log_probs.shape[-1]))
  low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (low, high))
  return log_probs >= low[:, None]


def draw(keys: chex.Array, logits: chex.Array) -> chex.Array:
  """Draws an index [B] int32 from logits [B, V], -inf where it must not be.

  First a block of indices is drawn and then one of them, which takes two random
  numbers per row and not V.
  """
  probs = jax.nn.softmax(logits)
  padding = -probs.shape[1] % _BLOCK
  probs = jnp.pad(probs, ((0, 0), (0, padding)))
  probs = probs.reshape(len(probs), -1, _BLOCK)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(jnp.sum(probs, axis=-1), uniform[:, 0])
  inside = jnp.take_along_axis(probs, block[:, None, None], axis=1)[:, 0]
  return block * _BLOCK + _invert(inside, uniform[:, 1])


def _invert(weights: chex.Array, uniform: chex.Array) -> chex.Array:
  """The index [B] at shares [B] in [0, 1) of the total of weights [B, n]."""
  # Sums may round so that they grow at a weight of 0, which must not be drawn.
  total = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
  whole = jnp.max(total, axis=-1)
  at = jnp.minimum(uniform * whole, jnp.nextafter(whole, 0.0))
  return jnp.argmax(total > at[:, None], axis=-1).astype(jnp.int32)


def begin(
    cache: model_lib.Cache,
    logits: chex.Array,
    rows: Rows,
    padding: chex.Array,
    root: chex.Array,
    sampling: Sampling,
) -> State:
  """Draws the first token of each row.

  Args:
    cache: of the prompts, [L, B, S - N, K, D].
    logits: [B, V] after the prompts.
    rows: of the batch.
    padding: [B] bool, rows that are no request.
    root: [B] int32, first node of the grammar.
    sampling: static, with N as `max_tokens`.

  Returns:
    The state after one token.
  """
  batch, size = len(padding), sampling.max_tokens
  # Layer by layer: moving the axes of all at once takes several times longer.
  layers = range(len(cache.keys))
  keys = (jnp.transpose(cache.keys[i], (0, 2, 3, 1)) for i in layers)
  values = (jnp.swapaxes(cache.values[i], 1, 2) for i in layers)
  state = State(
      keys=tuple(_grown(layer, 3, size) for layer in keys),
      values=tuple(_grown(layer, 2, size) for layer in values),
      ids=jnp.zeros((batch, size), jnp.int32),
      log_probs=jnp.zeros((batch, size)),
      done=padding,
      size=jnp.zeros(batch, jnp.int32),
      node=root,
      step=jnp.int32(0),
  )
  return _pick(state, logits, rows, sampling)


def _pick(state, logits, rows, sampling) -> State:
  """Draws token `step` of each row from logits [B, V]."""
  batch = jnp.arange(len(logits))
  node = state.node
  if rows.grammar is not None:
    edges, targets = (x[jnp.maximum(node, 0)] for x in rows.grammar)  # [B, W]
    places = jnp.where(edges < 0, logits.shape[1], edges)
    allowed = jnp.broadcast_to(node[:, None] == FREE, logits.shape)
    allowed = allowed.at[batch[:, None], places].set(True, mode='drop')
    logits = jnp.where(allowed, logits, -jnp.inf)
  if sampling.temperature == 0:
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    log_probs = jnp.zeros(len(ids))
  else:
    logits = restrict(logits, sampling)
    keys = jax.vmap(jax.random.fold_in, (0, None))(rows.key, state.step)
    ids = draw(keys, logits)
    log_probs = logits[batch, ids] - jax.nn.logsumexp(logits, axis=-1)
  if rows.grammar is not None:
    edge = jnp.argmax(edges == ids[:, None], axis=-1)
    node = jnp.where(node == FREE, FREE, targets[batch, edge])
  return state._replace(
      ids=state.ids.at[:, state.step].set(ids),
      log_probs=state.log_probs.at[:, state.step].set(log_probs),
      done=state.done | rows.ends[ids],
      size=state.size + ~state.done,
      node=node,
      step=state.step + 1,
  )


def advance(
    config: model_lib.ModelConfig,
    params: nnx.State,
    layers: tuple,
    state: State,
    rows: Rows,
    until: chex.Array,
    sampling: Sampling,
) -> State:
  """Draws until every row is done or has `until` [] tokens."""

  def more(state):
    return (state.step < until) & ~jnp.all(state.done)

  def body(state):
    state, logits = _read(config, params, layers, state, rows)
    return _pick(state, logits, rows, sampling)

  return jax.lax.while_loop(more, body, state)


def _read(config, params, layers, state, rows) -> tuple[State, chex.Array]:
  """Reads the newest token of each row; the logits [B, V] of the next one."""
  model = model_lib.merged(config, params)
  structure = nnx.graphdef(model.layers)
  slots = rows.valid.shape[1]
  start = slots - state.ids.shape[1]
  slot = start + state.step - 1
  drawn = (jnp.arange(slots) >= start) & (jnp.arange(slots) <= slot)
  seen = rows.valid | drawn[None, :]
  positions = jnp.sum(rows.valid, axis=1) + state.step - 1
  angles = positions[:, None] * model_lib.frequencies(config)[None, :]
  embed = model.embed[...].astype(config.dtype)
  x = embed[state.ids[:, state.step - 1]]
  keys, values = list(state.keys), list(state.values)
  for i, params_of_layer in enumerate(layers):
    layer = nnx.merge(structure, params_of_layer)
    x, keys[i], values[i] = _layer(
        layer, x, angles, keys[i], values[i], seen, slot
    )
  head = embed if model.head is None else model.head[...].astype(config.dtype)
  logits = jnp.einsum(
      'bd,vd->bv', model.norm(x), head, preferred_element_type=jnp.float32
  )
  state = state._replace(keys=tuple(keys), values=tuple(values))
  return state, logits


def _layer(layer: Any, x, angles, keys, values, seen, slot):
  """One layer of `model` on one token per row, x [B, d]."""
  q, k, v = layer.project(x[:, None], angles[:, None])
  k, v = k[:, 0, :, :, None], v[:, 0, :, None]
  keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, 0, slot))
  values = jax.lax.dynamic_update_slice(values, v, (0, 0, slot, 0))
  mixed = _attend(q[:, 0], keys, values, seen)
  return layer.finish(x, mixed), keys, values


def _attend(q, keys, values, seen) -> chex.Array:
  """Attention of q [B, H, D] to seen [B, S] of keys and values: [B, H D]."""
  rows, _, head_dim = q.shape
  q = q.reshape(rows, keys.shape[1], -1, head_dim) / math.sqrt(head_dim)
  logits = jnp.einsum(
      'bkgd,bkds->bkgs', q, keys, preferred_element_type=jnp.float32
  )
  logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
  weights = jax.nn.softmax(logits).astype(q.dtype)
  return jnp.einsum('bkgs,bksd->bkgd', weights, values).reshape(rows, -1)
