"""What was read of prompts that begin alike, kept for the next ones.

Axes as in `model`; `[P]` slots of a prefix, which is padded on the left.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax.llm import model

Tokens = tuple[int, ...]


class Prefix(NamedTuple):
  """Keys and values of one prefix."""

  keys: chex.Array  # [L, 1, P, K, D]
  values: chex.Array  # [L, 1, P, K, D]
  valid: chex.Array  # [1, P] bool


class Prefixes:
  """The prefixes used last, as many as `slots` slots hold."""

  def __init__(self, slots: int):
    self._slots = slots
    self._kept: collections.OrderedDict[Tokens, Prefix] = (
        collections.OrderedDict()
    )

  def missing(self, wanted: Sequence[Tokens]) -> list[Tokens]:
    """Those that are not here, each once."""
    return [p for p in dict.fromkeys(wanted) if p not in self._kept]

  def add(self, prefixes: Sequence[Tokens], cache: model.Cache) -> None:
    """Keeps rows that were read, the first `len(prefixes)` of the cache."""
    for i, prefix in enumerate(prefixes):
      row = slice(i, i + 1)
      self._kept[prefix] = Prefix(
          cache.keys[:, row], cache.values[:, row], cache.valid[row]
      )

  def find(
      self, wanted: Sequence[Tokens]
  ) -> tuple[tuple[Prefix, ...], np.ndarray]:
    """The prefixes that are wanted and where each row [B] finds its own.

    All are widened to the same number of slots, and the last is repeated until
    their number is a power of two, so that few shapes occur.
    """
    different = list(dict.fromkeys(wanted))
    found = [self._kept[prefix] for prefix in different]
    slots = max(prefix.valid.shape[1] for prefix in found)
    found = [_widened(prefix, slots) for prefix in found]
    found += found[-1:] * ((1 << (len(found) - 1).bit_length()) - len(found))
    return tuple(found), np.array([different.index(p) for p in wanted])

  def trim(self, used: Sequence[Tokens]) -> None:
    """Forgets the prefixes used longest ago, until the rest is allowed."""
    for prefix in used:
      self._kept.move_to_end(prefix)
    total = sum(prefix.valid.shape[1] for prefix in self._kept.values())
    while total > self._slots:
      total -= self._kept.popitem(last=False)[1].valid.shape[1]


def _widened(prefix: Prefix, slots: int) -> Prefix:
  more = slots - prefix.valid.shape[1]
  if not more:
    return prefix
  widths = (0, 0), (0, 0), (more, 0), (0, 0), (0, 0)
  return Prefix(
      jnp.pad(prefix.keys, widths),
      jnp.pad(prefix.values, widths),
      jnp.pad(prefix.valid, widths[1:3]),
  )


def gather(prefixes: tuple[Prefix, ...], index: jax.Array) -> model.Cache:
  """The cache of rows that begin with the prefixes at index [B]."""
  keys, values = (
      jnp.concatenate([prefix[part] for prefix in prefixes], axis=1)[:, index]
      for part in (0, 1)
  )
  valid = jnp.concatenate([prefix.valid for prefix in prefixes])[index]
  return model.Cache(keys, values, valid, jnp.int32(valid.shape[1]))
