"""Direct messages and a public board, and what they carry.

A message is a pair (subject target, symbol). Telling of a target whose fact
the sender knows also carries the fact. What it means to mention an unfinished
target, and what the symbols mean, is left to the policy to discover. Messages
are delivered at once and read at the start of the recipient's next turn, which
pays for them in prefill.

Of several messages about one target that reach one reader at one instant, one
that carries the fact is kept, then the one of the highest sender index.
"""

from typing import NamedTuple

import chex
from envs.base import VerbSpec
import jax.numpy as jnp
from rlcr_jax.clock import NEVER


class Heard(NamedTuple):
  """The latest message about each target, as one reader or a board has it."""

  ms: chex.Array  # [..., M] int32, NEVER where nothing was said.
  sender: chex.Array  # [..., M] int32.
  symbol: chex.Array  # [..., M] int32.


class Mail(NamedTuple):
  """All channels of one collective."""

  direct: Heard  # [N, M] each.
  board: Heard  # [M] each.
  board_fact: chex.Array  # [M] bool: the board holds this fact.
  board_tokens: chex.Array  # [] int32, length of the whole board.
  contact_ms: chex.Array  # [N, N] int32: row last told column then.
  said_ms: chex.Array  # [N, M] int32: row last told anyone of column then.
  unread: chex.Array  # [N] int32, tokens to prefill at the next turn.


class Letters(NamedTuple):
  """The messages that land at one instant, one row per sender."""

  direct: chex.Array  # [N] bool.
  post: chex.Array  # [N] bool.
  target: chex.Array  # [N] int32.
  peer: chex.Array  # [N] int32, recipient of a direct message.
  symbol: chex.Array  # [N] int32.
  tokens: chex.Array  # [N] int32, length.


def verbs(tell_tokens: float, post_tokens: float, tool_ms: int):
  """The two verbs that write messages."""
  return (
      VerbSpec('tell', True, tell_tokens, tool_ms, False, True, True),
      VerbSpec('post', True, post_tokens, tool_ms, False, False, True),
  )


def _silence(*shape: int) -> Heard:
  nobody = jnp.full(shape, NEVER, jnp.int32)
  return Heard(nobody, nobody, jnp.zeros(shape, jnp.int32))


def reset(num_agents: int, num_targets: int) -> Mail:
  """Empty channels."""
  return Mail(
      direct=_silence(num_agents, num_targets),
      board=_silence(num_targets),
      board_fact=jnp.zeros((num_targets,), bool),
      board_tokens=jnp.zeros((), jnp.int32),
      contact_ms=jnp.full((num_agents, num_agents), NEVER, jnp.int32),
      said_ms=jnp.full((num_agents, num_targets), NEVER, jnp.int32),
      unread=jnp.zeros((num_agents,), jnp.int32),
  )


def forget(mail: Mail, who: chex.Array) -> Mail:
  """Clears what the seats `who` [N] bool heard and said, for newcomers."""
  clear = lambda x, value: jnp.where(who[:, None], value, x)
  return mail._replace(
      direct=Heard(
          ms=clear(mail.direct.ms, NEVER),
          sender=clear(mail.direct.sender, NEVER),
          symbol=clear(mail.direct.symbol, 0),
      ),
      contact_ms=jnp.where(who[:, None] | who[None, :], NEVER, mail.contact_ms),
      said_ms=clear(mail.said_ms, NEVER),
      unread=jnp.where(who, 0, mail.unread),
  )


def _hear(
    heard: Heard, code: chex.Array, num_agents: int, num_symbols: int, now_ms
) -> tuple[Heard, chex.Array]:
  """Decodes a message per target; returns what is heard and facts [..., M]."""
  new, code = code > 0, code - 1
  sender = (code // num_symbols) % num_agents
  fact = new & (code >= num_agents * num_symbols)
  heard = Heard(
      ms=jnp.where(new, now_ms, heard.ms),
      sender=jnp.where(new, sender, heard.sender),
      symbol=jnp.where(new, code % num_symbols, heard.symbol),
  )
  return heard, fact


def land(
    mail: Mail,
    letters: Letters,
    knows: chex.Array,
    present: chex.Array,
    num_symbols: int,
    now_ms: chex.Array,
) -> tuple[Mail, chex.Array]:
  """Delivers all messages that land now.

  Args:
    mail: the channels.
    letters: who writes what to whom; nothing is sent to absent agents.
    knows: [N, M] bool, facts known to each agent.
    present: [N] bool.
    num_symbols: size of the vocabulary.
    now_ms: [] int32.

  Returns:
    The channels, and `knows` with the facts that direct messages carried. The
    board's facts are learned when a reader's next turn begins.
  """
  n, m = knows.shape
  about = letters.target[:, None] == jnp.arange(m)[None, :]  # [N, M]
  to = letters.peer[:, None] == jnp.arange(n)[None, :]  # [N, N]
  to &= letters.direct[:, None] & present[None, :]
  # One integer per message, so that a single maximum settles who is heard:
  # 1 + ((carries the fact, sender), symbol) in mixed radix; 0 says nothing.
  sender = jnp.arange(n)[:, None]
  code = (knows * n + sender) * num_symbols + letters.symbol[:, None] + 1
  code = jnp.where(about, code, 0).astype(jnp.int32)  # [N, M]
  received = jnp.max(jnp.where(to[:, :, None], code[:, None, :], 0), axis=0)
  posted = jnp.max(jnp.where(letters.post[:, None], code, 0), axis=0)
  direct, told = _hear(mail.direct, received, n, num_symbols, now_ms)
  board, shared = _hear(mail.board, posted, n, num_symbols, now_ms)
  posts = jnp.where(letters.post, letters.tokens, 0)  # [N]
  inbox = jnp.sum(jnp.where(to, letters.tokens[:, None], 0), axis=0)
  news = inbox + jnp.sum(posts) - posts  # Nobody reads what she wrote.
  mail = mail._replace(
      direct=direct,
      board=board,
      board_fact=mail.board_fact | shared,
      board_tokens=mail.board_tokens + jnp.sum(posts),
      contact_ms=jnp.where(to, now_ms, mail.contact_ms),
      said_ms=jnp.where(about & letters.direct[:, None], now_ms, mail.said_ms),
      unread=mail.unread + jnp.where(present, news, 0),
  )
  return mail, knows | told
