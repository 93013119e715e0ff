"""Direct messages, a public board, an issue board and a knowledge archive.

A message is a pair (subject target, symbol). Telling of a target whose fact
the sender knows also carries the fact. What it means to mention an unfinished
target, and what the symbols mean, is left to the policy to discover. Messages
are delivered at once and read at the start of the recipient's next turn, which
pays for them in prefill.

Of several messages about one target that reach one reader at one instant, one
that carries the fact is kept, then the one of the highest sender index.

The issue board lists targets as open, claimed by somebody, or closed. Everybody
reads each change, as with a post. The archive keeps facts: it is written once,
costs nobody else anything, and is looked up for the cost of reading.
"""

from typing import NamedTuple

import chex
from envs.base import first
from envs.base import VerbSpec
import jax
import jax.numpy as jnp
from rlcr_jax.clock import NEVER


class Heard(NamedTuple):
  """The latest message about each target, as one reader or a board has it."""

  ms: chex.Array  # [..., M] int32, NEVER where nothing was said.
  sender: chex.Array  # [..., M] int32.
  symbol: chex.Array  # [..., M] int32.


class Issues(NamedTuple):
  """The issue board: what is listed about each target. [M] int32 each."""

  status: chex.Array  # UNLISTED, OPEN, CLAIMED or CLOSED.
  owner: chex.Array  # The seat that claimed it; NOBODY.
  ms: chex.Array  # When it last changed, NEVER.


UNLISTED, OPEN, CLAIMED, CLOSED = range(4)
NOBODY = -1


class Mail(NamedTuple):
  """All channels of one collective."""

  direct: Heard  # [N, M] each.
  board: Heard  # [M] each.
  board_fact: chex.Array  # [M] bool: the board holds this fact.
  board_tokens: chex.Array  # [] int32, length of the whole board.
  contact_ms: chex.Array  # [N, N] int32: row last told column then.
  said_ms: chex.Array  # [N, M] int32: row last told anyone of column then.
  unread: chex.Array  # [N] int32, tokens to prefill at the next turn.
  issues: Issues | None = None  # None: there is no issue board.
  archive: chex.Array | None = None  # [M] bool: it holds this fact; or None.


class Letters(NamedTuple):
  """The messages that land at one instant, one row per sender."""

  direct: chex.Array  # [N] bool.
  post: chex.Array  # [N] bool.
  lists: chex.Array  # [N] bool: changes the issue board.
  target: chex.Array  # [N] int32.
  peer: chex.Array  # [N] int32, recipient of a direct message.
  symbol: chex.Array  # [N] int32.
  tokens: chex.Array  # [N] int32, length.


def verbs(
    costs: dict[str, tuple[float, int]],
    issues: bool = False,
    archive: bool = False,
) -> tuple[VerbSpec, ...]:
  """The verbs that write or look up messages.

  Args:
    costs: the median output tokens and the time of the tool, by name.
    issues: is there an issue board?
    archive: is there a knowledge archive?
  """
  names = ['tell', 'post']
  names += ['open', 'claim', 'close'] * issues
  names += ['archive', 'look_up'] * archive
  return tuple(
      VerbSpec(
          name,
          takes_target=True,
          output_tokens=costs[name][0],
          tool_ms=costs[name][1],
          acts_on_environment=False,
          takes_peer=name == 'tell',
          takes_symbol=name in ('tell', 'post'),
          talks=True,
      )
      for name in names
  )


def _silence(*shape: int) -> Heard:
  nobody = jnp.full(shape, NEVER, jnp.int32)
  return Heard(nobody, nobody, jnp.zeros(shape, jnp.int32))


def reset(
    num_agents: int,
    num_targets: int,
    issues: bool = False,
    archive: bool = False,
) -> Mail:
  """Empty channels."""
  zeros = jnp.zeros((num_targets,), jnp.int32)
  return Mail(
      direct=_silence(num_agents, num_targets),
      board=_silence(num_targets),
      board_fact=jnp.zeros((num_targets,), bool),
      board_tokens=jnp.zeros((), jnp.int32),
      contact_ms=jnp.full((num_agents, num_agents), NEVER, jnp.int32),
      said_ms=jnp.full((num_agents, num_targets), NEVER, jnp.int32),
      unread=jnp.zeros((num_agents,), jnp.int32),
      issues=Issues(zeros, zeros + NOBODY, zeros + NEVER) if issues else None,
      archive=zeros > 0 if archive else None,
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
  public = letters.post | letters.lists
  posts = jnp.where(public, letters.tokens, 0)  # [N]
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


def land_issues(
    issues: Issues,
    opens: chex.Array,
    claims: chex.Array,
    closes: chex.Array,
    present: chex.Array,
    now_ms: chex.Array,
) -> tuple[Issues, chex.Array]:
  """Changes the issue board by all turns that land now.

  An item is opened, then claimed, then closed. Of several agents who do the
  same to one item, the one of the lowest seat does it. A claim can be closed by
  its owner alone, and ends when its owner leaves.

  Args:
    issues: the board.
    opens: [N, M] bool, who opens what; likewise the next two.
    claims: [N, M] bool.
    closes: [N, M] bool.
    present: [N] bool, after those were fired who are fired now.
    now_ms: [] int32.

  Returns:
    The board, and [N] bool: whose turn changed it.
  """
  seats = jnp.arange(len(opens))
  status, owner, before = issues.status, issues.owner, issues
  changed = jnp.zeros_like(opens)
  of_each = jax.vmap(can_close, (None, None, 0))
  for rows, may, then in (
      (opens, can_open(status)[None, :], OPEN),
      (claims, can_claim(status)[None, :], CLAIMED),
      (closes, of_each(status, owner, seats), CLOSED),
  ):
    rows = first(rows & may)
    at = jnp.sum(rows, axis=0) > 0
    status = jnp.where(at, then, status)
    who = jnp.max(jnp.where(rows, seats[:, None], NOBODY), axis=0)
    owner = jnp.where(at, who if then == CLAIMED else NOBODY, owner)
    changed |= rows
  left = (status == CLAIMED) & ~present[owner]
  status = jnp.where(left, OPEN, status)
  owner = jnp.where(left, NOBODY, owner)
  moved = (status != before.status) | (owner != before.owner)
  ms = jnp.where(moved, now_ms, issues.ms)
  return Issues(status, owner, ms), jnp.sum(changed, axis=1) > 0


def land_archive(
    archive: chex.Array,
    writes: chex.Array,
    looks_up: chex.Array,
    knows: chex.Array,
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Adds to the archive, and teaches those who look something up.

  Args:
    archive: [M] bool, the facts that it holds.
    writes: [N, M] bool, who writes which fact now.
    looks_up: [N, M] bool, who looks up which.
    knows: [N, M] bool.

  Returns:
    The archive, `knows`, and [N] bool: whose turn had its effect. Who writes
    what is there already does not.
  """
  added = first(writes & knows & ~archive[None, :])
  learned = looks_up & archive[None, :]
  served = jnp.sum(added | learned, axis=1) > 0
  return archive | (jnp.sum(added, axis=0) > 0), knows | learned, served


def can_open(status: chex.Array) -> chex.Array:
  """[M] bool: may this be listed?"""
  return (status == UNLISTED) | (status == CLOSED)


def can_claim(status: chex.Array) -> chex.Array:
  """[M] bool: is this listed and not taken?"""
  return status == OPEN


def can_close(
    status: chex.Array, owner: chex.Array, seat: chex.Array
) -> chex.Array:
  """[M] bool: may `seat` ([] int32) close this?"""
  return (status == OPEN) | ((status == CLAIMED) & (owner == seat))
