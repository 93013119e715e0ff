"""The engine that samples in this process.

Prompts are padded on the left and sizes rounded up, so that few programs are
compiled. What a row draws depends on its prompt and its key alone.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from envs.base import require
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from rlcr_jax.llm import decode
from rlcr_jax.llm import engine
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm import prefixes
from rlcr_jax.llm.engine import Completion
from rlcr_jax.llm.engine import Request
from rlcr_jax.llm.engine import Sampling
from rlcr_jax.llm.tokens import Tokenizer

_CHUNK = 8  # Tokens between two searches for stop strings.
_SMALLEST = 16  # Slots; more are rounded up to 16, 24, 32, 48, 64, 96 ...
_MODELS = 8  # Whose programs are remembered.
_TRIES = 256  # Grammars that are remembered.


class _Programs:
  """What is compiled for a model; one for all engines of the process."""

  def __init__(self, config: model_lib.ModelConfig):
    self.compilations = 0
    self.unstack = self._jit(decode.unstack, config)
    self.gather = self._jit(prefixes.gather)
    self.read = self._jit(decode.read, config)
    self.begin = self._jit(decode.begin, static_argnums=5)
    self.advance = self._jit(
        decode.advance, config, static_argnums=5, donate_argnums=2
    )

  def _jit(self, function, *constants, **kwargs):
    def traced(*args):
      self.compilations += 1
      return function(*constants, *args)

    traced.__name__ = function.__name__  # For profiles.
    return jax.jit(traced, **kwargs)


_programs = functools.lru_cache(_MODELS)(_Programs)


class LocalEngine:
  """Samples in this process; see `engine.Engine`."""

  def __init__(
      self,
      config: model_lib.ModelConfig,
      params: nnx.State,
      tokenizer: Tokenizer,
      *,
      max_batch: int = 64,
      slots_limit: int | None = None,
      prefix_slots: int = 16_384,
  ):
    """Compiles nothing yet.

    Args:
      config: of the model.
      params: its weights. They are kept, not copied, and the rows of a batch
        are divided over the mesh that they are on.
      tokenizer: of the model.
      max_batch: most rows at once.
      slots_limit: most tokens of a prompt and its completion; None: as many as
        the model has positions.
      prefix_slots: slots of prefixes that are kept, those used last.
    """
    require(max_batch >= 1, 'engine.max_batch', max_batch, '>= 1')
    self._config, self._tokenizer = config, tokenizer
    self._max_batch, self._prefix_slots = max_batch, prefix_slots
    self._limit = slots_limit or config.max_position_embeddings
    self._run = _programs(config)
    self._ends = functools.cache(self._tokens_that_end)
    self._grammar = functools.lru_cache(_TRIES)(
        lambda commands: engine.grammar(
            commands, tokenizer.encode, tokenizer.stop_ids
        )
    )
    self.update(params)

  @property
  def compilations(self) -> int:
    """Programs compiled in this process for models of this shape."""
    return self._run.compilations

  def update(self, params: nnx.State, lora: Any = None) -> None:
    """See `engine.Engine`."""
    if lora is not None:
      params = model_lib.lora_merge(self._config, params, lora)
    self._params, self._layers = params, self._run.unstack(params)
    self._prefixes = prefixes.Prefixes(self._prefix_slots)
    self._sharding, self._parts = jax.tree.leaves(params)[0].sharding, 1
    if isinstance(self._sharding, NamedSharding):
      self._sharding, self._parts = model_lib.row_sharding(self._sharding.mesh)

  def close(self) -> None:
    """See `engine.Engine`."""
    self._params = self._layers = self._prefixes = None

  def generate(
      self, requests: Sequence[Request], sampling: Sampling
  ) -> list[Completion]:
    """See `engine.Engine`."""
    requests = [self._checked(i, r, sampling) for i, r in enumerate(requests)]
    # Rows of similar length need little padding.
    size = lambda i: (len(requests[i].prefix), len(requests[i].suffix))
    order = sorted(range(len(requests)), key=size)
    completions: dict[int, Completion] = {}
    for at in range(0, len(order), self._max_batch):
      batch = order[at : at + self._max_batch]
      drawn = self._batch([requests[i] for i in batch], sampling)
      completions.update(zip(batch, drawn, strict=True))
    return [completions[i] for i in range(len(requests))]

  def _checked(self, index: int, request: Request, sampling: Sampling):
    """The request, with a suffix that is not empty."""
    field = f'requests[{index}]'
    size = len(request.prefix) + len(request.suffix)
    require(size > 0, f'{field} prompt tokens', size, '>= 1')
    room = self._limit - sampling.max_tokens
    require(
        size <= room,
        f'{field} prompt tokens',
        size,
        f'<= {room}, for {sampling.max_tokens} more must fit into a context of'
        f' {self._limit}',
    )
    prompt = tuple(request.prefix) + tuple(request.suffix)
    at = min(len(request.prefix), size - 1)
    return request._replace(prefix=prompt[:at], suffix=prompt[at:])

  def _batch(
      self, requests: Sequence[Request], sampling: Sampling
  ) -> list[Completion]:
    """Completions of at most `max_batch` requests."""
    count, size = len(requests), _rounded(sampling.max_tokens)
    rows = self._num_rows(count)
    requests = [*requests, *[requests[-1]] * (rows - count)]
    cache, cached = self._read_prefixes([r.prefix for r in requests])
    logits, cache = self._read_suffixes(cache, [r.suffix for r in requests])
    grammar, root = self._join([r.commands for r in requests])
    constant = decode.Rows(
        key=self._put(jnp.stack([r.key for r in requests])),
        valid=jnp.pad(cache.valid, ((0, 0), (0, size))),
        ends=self._ends(sampling.stop),
        grammar=grammar,
    )
    padding = self._put(np.arange(rows) >= count)
    static = dataclasses.replace(sampling, max_tokens=size, stop=())
    state = self._run.begin(
        cache, logits, constant, padding, self._put(root), static
    )
    del cache, logits  # The state has them in another layout.
    state = self._finish(state, constant, sampling, static)
    ids, log_probs, sizes = jax.device_get(
        (state.ids, state.log_probs, state.size)
    )
    return [
        self._completion(ids[i, : sizes[i]], log_probs[i], cached[i], sampling)
        for i in range(count)
    ]

  def _finish(self, state, constant, sampling, static) -> decode.State:
    """Draws until all rows have ended or `max_tokens` are drawn."""
    # A stop string of one byte always ends with a token that contains it.
    spans = any(len(text.encode()) > 1 for text in sampling.stop)
    chunk = _CHUNK if spans else sampling.max_tokens
    step, last = 1, sampling.max_tokens
    while step < last and not state.done.all():
      step = min(step + chunk, last)
      state = self._run.advance(
          self._params, self._layers, state, constant, step, static
      )
      if spans and step < last:
        done = np.array(state.done)
        ids, sizes = jax.device_get((state.ids, state.size))
        for i in np.flatnonzero(~done):
          done[i] = self._cut(ids[i, : sizes[i]], sampling.stop) is not None
        state = state._replace(done=self._put(done))
    return state

  def _completion(self, ids, log_probs, cached, sampling) -> Completion:
    """A row that has ended, cut after the token that completes a stop."""
    cut = self._cut(ids, sampling.stop)
    ids = ids[:cut]
    stopped = int(ids[-1]) in self._tokenizer.stop_ids
    text = self._tokenizer.decode(ids[:-1] if stopped else ids)
    for stop in sampling.stop:
      text = text.split(stop, 1)[0]
    finish = 'stop' if stopped or cut is not None else 'length'
    return Completion(ids, log_probs[: len(ids)], text, finish, cached)

  def _cut(self, ids: np.ndarray, stop: tuple[str, ...]) -> int | None:
    """How many of the ids complete the first stop string, if any is there."""

    def complete(size: int) -> bool:
      text = self._tokenizer.decode(ids[:size])
      return any(string in text for string in stop)

    if not stop or not complete(len(ids)):
      return None
    return bisect.bisect_left(range(len(ids)), True, key=complete)

  def _tokens_that_end(self, stop: tuple[str, ...]) -> jax.Array:
    """[V] bool: stop tokens, and those that contain a stop string."""
    ends = np.zeros(self._config.vocab_size, bool)
    ends[list(self._tokenizer.stop_ids)] = True
    for i in range(self._tokenizer.vocab_size if stop else 0):
      text = self._tokenizer.decode([i])
      ends[i] |= any(string in text for string in stop)
    return jnp.array(ends)

  def _join(self, commands) -> tuple[engine.Grammar | None, np.ndarray]:
    """The grammar of all rows, and where each row [B] begins in it."""
    wanted = {c: None for c in commands if c is not None}
    if not wanted:
      return None, np.full(len(commands), engine.FREE, np.int32)
    grammar, roots = engine.join([self._grammar(c) for c in wanted])
    root = dict(zip(wanted, roots, strict=True))
    at = [root.get(c, engine.FREE) for c in commands]
    return grammar, np.array(at, np.int32)

  def _read_prefixes(
      self, wanted: Sequence[tuple[int, ...]]
  ) -> tuple[model_lib.Cache, list[int]]:
    """The cache after each row's prefix, and tokens that were not read anew."""
    empty = model_lib.empty_cache(self._config, len(wanted), 0)
    if not any(wanted):
      return empty, [0] * len(wanted)
    missing = self._prefixes.missing(wanted)
    for at in range(0, len(missing), self._max_batch):
      some = missing[at : at + self._max_batch]
      rows = self._num_rows(len(some))
      empty = model_lib.empty_cache(self._config, rows, 0)
      padded = some + [()] * (rows - len(some))
      self._prefixes.add(some, self._read_suffixes(empty, padded)[1])
    found, index = self._prefixes.find(wanted)
    cache = self._run.gather(found, self._put(index))
    self._prefixes.trim(wanted)
    first = {wanted.index(prefix) for prefix in missing}
    cached = [len(p) * (i not in first) for i, p in enumerate(wanted)]
    return cache, cached

  def _read_suffixes(self, cache, suffixes) -> tuple[jax.Array, Any]:
    """Logits [B, V] after the suffixes, and the cache with them."""
    shape = len(suffixes), _rounded(max(map(len, suffixes)))
    tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for i, suffix in enumerate(suffixes):
      at = shape[1] - len(suffix)
      tokens[i, at:], valid[i, at:] = suffix, True
    tokens, valid = self._put(tokens), self._put(valid)
    return self._run.read(self._params, cache, tokens, valid)

  def _num_rows(self, count: int) -> int:
    """Rows of a batch for so many requests: a power of two, or all."""
    rows = min(1 << (count - 1).bit_length(), self._max_batch)
    return -(-rows // self._parts) * self._parts

  def _put(self, x) -> jax.Array:
    """Puts an array [B, ...] where the rows are."""
    return jax.device_put(x, self._sharding)


def _rounded(size: int) -> int:
  """The next of 16, 24, 32, 48, 64, 96, ..."""
  power = max(_SMALLEST, 1 << (size - 1).bit_length())
  less = power * 3 // 4
  return less if _SMALLEST <= less and size <= less else power
