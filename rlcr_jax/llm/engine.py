"""Who continues prompts: one protocol, and the grammar of commands.

The prompt of a request is a prefix, which many requests share and whose keys
and values an engine may keep, and a suffix of its own.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple, Protocol

from envs.base import require
import jax
import numpy as np

FREE = -1  # Node of a grammar at which any token may follow.
NO_EDGE = -1
_FEWEST_NODES, _FEWEST_EDGES = 256, 16  # Of joined grammars, for padding.


class EngineError(RuntimeError):
  """An engine cannot answer; the message says which, and why."""


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn, the same for all requests of a call."""

  temperature: float = 1.0  # 0 takes the likeliest token.
  top_k: int = 0  # Draw among so many likeliest tokens; 0 is off.
  top_p: float = 1.0  # Of those, the fewest that hold this probability.
  max_tokens: int = 64  # Longest completion, the stop token included.
  stop: tuple[str, ...] = ()  # Strings that end a completion.

  def __post_init__(self):
    checks = (
        ('temperature', 0 <= self.temperature < float('inf'), '>= 0'),
        ('top_k', self.top_k >= 0, '>= 0'),
        ('top_p', 0 < self.top_p <= 1, 'above 0 and at most 1'),
        ('max_tokens', self.max_tokens >= 1, '>= 1'),
        ('stop', '' not in self.stop, 'strings that are not empty'),
    )
    for field, holds, allowed in checks:
      require(holds, f'sampling.{field}', getattr(self, field), allowed)


class Request(NamedTuple):
  """A prompt to continue."""

  prefix: tuple[int, ...]  # Tokens that many requests begin with.
  suffix: tuple[int, ...]  # The other tokens of the prompt.
  key: jax.Array  # Token t is drawn with fold_in(key, t).
  commands: tuple[str, ...] | None = None  # All that may be said; None: all.


class Completion(NamedTuple):
  """What was drawn, T tokens."""

  ids: np.ndarray  # [T] int32, with the stop token if it was drawn.
  log_probs: np.ndarray  # [T] float32, of the distribution drawn from.
  text: str  # Without stop token and stop string.
  finish: str  # 'stop' or 'length'.
  cached_tokens: int  # Tokens of the prompt that had been read before.


class Engine(Protocol):
  """Continues prompts with the newest weights that it was given."""

  def generate(
      self, requests: Sequence[Request], sampling: Sampling
  ) -> list[Completion]:
    """One completion per request, in order.

    Raises:
      NotAllowedError: of a request that cannot be, which it names.
      EngineError: if the engine is at fault.
    """

  def update(self, params: Any, lora: Any = None) -> None:
    """Takes new weights, and forgets the prefixes read with older ones."""

  def close(self) -> None:
    """Frees what is held; nothing may be asked afterwards."""


class Grammar(NamedTuple):
  """Commands as a trie over tokens, with W edges at most at a node."""

  token: np.ndarray  # [nodes, W] int32, what an edge reads; NO_EDGE: none.
  target: np.ndarray  # [nodes, W] int32, the node after it, or FREE.


def grammar(
    commands: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    stop_ids: Sequence[int],
) -> Grammar:
  """The trie that permits these commands and no others; its root is node 0.

  Args:
    commands: one that ends in ':' permits any text after it.
    encode: text → ids.
    stop_ids: tokens that end a completion.

  Raises:
    NotAllowedError: if there is no command, or an empty one.
  """
  some = bool(commands) and all(commands)
  require(some, 'request.commands', commands, 'None, or commands with text')
  nodes = [{}]
  for command in commands:
    node, ids = 0, encode(command)
    for token in ids[:-1]:
      node = nodes[node].setdefault(token, len(nodes))
      if node == FREE:  # A shorter command permits this one, too.
        break
      if node == len(nodes):
        nodes.append({})
    else:
      if command.endswith(':'):
        nodes[node][ids[-1]] = FREE
        continue
      node = nodes[node].setdefault(ids[-1], len(nodes))
      if node == len(nodes):
        nodes.append({})
      if node != FREE:  # Nothing is drawn after a stop.
        nodes[node].update(dict.fromkeys(stop_ids, FREE))
  return _table(nodes)


def _table(nodes: Sequence[dict[int, int]]) -> Grammar:
  """A trie as arrays."""
  shape = len(nodes), max(len(edges) for edges in nodes)
  table = Grammar(np.full(shape, NO_EDGE), np.full(shape, FREE))
  for row, edges in enumerate(nodes):
    table.token[row, : len(edges)] = list(edges)
    table.target[row, : len(edges)] = list(edges.values())
  return Grammar(*(x.astype(np.int32) for x in table))


def join(grammars: Sequence[Grammar]) -> tuple[Grammar, np.ndarray]:
  """One grammar of several, and their roots [len(grammars)] int32 in it.

  Sizes are rounded up to powers of four, so that few shapes occur.
  """
  sizes = [len(g.token) for g in grammars]
  roots = np.cumsum([0, *sizes], dtype=np.int32)
  edges = max(g.token.shape[1] for g in grammars)
  shape = [_FEWEST_NODES, _FEWEST_EDGES]
  for axis, size in enumerate((roots[-1], edges)):
    while shape[axis] < size:
      shape[axis] *= 4
  joined = Grammar(np.full(shape, NO_EDGE), np.full(shape, FREE))
  for root, (token, target) in zip(roots[:-1], grammars, strict=True):
    at = slice(root, root + len(token)), slice(token.shape[1])
    joined.token[at] = token
    joined.target[at] = np.where(target == FREE, FREE, target + root)
  return Grammar(*(x.astype(np.int32) for x in joined)), roots[:-1]
