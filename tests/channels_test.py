"""Tests of messages and the board."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import channels
from rlcr_jax.clock import NEVER

N, M, SYMBOLS = 4, 3, 2
SENDS = 'direct', 'post', 'lists'
NOW_MS = 5000


def knowing(*pairs):
  """[N, M] bool: the pairs (agent, target) whose fact is known."""
  knows = np.zeros((N, M), bool)
  for agent, target in pairs:
    knows[agent, target] = True
  return jnp.array(knows)


def letters(*messages):
  """Messages as (sender, peer or 'board', target, symbol, tokens)."""
  fields = {
      name: np.zeros(N, bool if name in SENDS else np.int32)
      for name in channels.Letters._fields
  }
  for sender, to, target, symbol, tokens in messages:
    fields['post' if to == 'board' else 'direct'][sender] = True
    fields['peer'][sender] = 0 if to == 'board' else to
    fields['target'][sender] = target
    fields['symbol'][sender] = symbol
    fields['tokens'][sender] = tokens
  return channels.Letters(**jax.tree.map(jnp.array, fields))


@jax.jit
def land_jit(mail, sent, knows, present, now_ms):
  return channels.land(mail, sent, knows, present, SYMBOLS, now_ms)


def land(*messages, knows=(), absent=(), mail=None, now_ms=NOW_MS):
  """Lands messages in silence, unless `mail` says what was said before."""
  mail = channels.reset(N, M) if mail is None else mail
  present = ~np.isin(np.arange(N), absent)
  return land_jit(mail, letters(*messages), knowing(*knows), present, now_ms)


def heard(mail, agent, target):
  """`(ms, sender, symbol)` of the latest message, or None."""
  box = mail.board if agent == 'board' else mail.direct
  at = (target,) if agent == 'board' else (agent, target)
  ms, sender, symbol = (int(x[at]) for x in box)
  return None if ms == NEVER else (ms, sender, symbol)


def all_heard(mail):
  """Everything in every inbox and on the board."""
  places = [(a, t) for a in (*range(N), 'board') for t in range(M)]
  said = {place: heard(mail, *place) for place in places}
  return {place: message for place, message in said.items() if message}


def test_nothing_is_heard_at_first():
  mail = channels.reset(N, M)
  assert not all_heard(mail)
  assert not mail.board_fact.any()
  assert mail.board_tokens == 0
  assert (mail.unread == 0).all()
  assert (mail.contact_ms == NEVER).all()
  assert (mail.said_ms == NEVER).all()


def test_landing_nothing_changes_nothing():
  before, knows = land((0, 1, 2, 1, 30), (3, 'board', 0, 1, 40))
  after, still = land(mail=before, now_ms=NOW_MS + 1000)
  jax.tree.map(np.testing.assert_array_equal, after, before)
  np.testing.assert_array_equal(still, knows)


def test_direct_message_reaches_only_its_recipient():
  mail, _ = land((0, 2, 1, 1, 30))
  assert all_heard(mail) == {(2, 1): (NOW_MS, 0, 1)}
  np.testing.assert_array_equal(mail.unread, [0, 0, 30, 0])
  assert mail.board_tokens == 0
  assert not mail.board_fact.any()


def test_direct_message_carries_a_fact_that_its_sender_knows():
  _, knows = land((0, 2, 1, 1, 30), knows=[(0, 1), (0, 0)])
  expected = knowing((0, 1), (0, 0), (2, 1))
  np.testing.assert_array_equal(knows, expected)


def test_direct_message_carries_no_fact_that_its_sender_lacks():
  # 1 and 3 know it, but it is 0 who speaks.
  mail, knows = land((0, 2, 1, 1, 30), knows=[(0, 0), (1, 1), (3, 1)])
  np.testing.assert_array_equal(knows, knowing((0, 0), (1, 1), (3, 1)))
  assert heard(mail, 2, 1) == (NOW_MS, 0, 1)


@pytest.mark.parametrize('to', [1, 'board'])
@pytest.mark.parametrize(
    'carriers, kept',
    [((), 3), ((0,), 0), ((0, 2), 2), ((2, 3), 3), ((0, 2, 3), 3)],
)
def test_of_several_messages_a_fact_wins_then_the_highest_sender(
    to, carriers, kept
):
  # 0 says symbol 1, 2 says 0 and 3 says 1, all about target 2.
  symbols = {0: 1, 2: 0, 3: 1}
  mail, knows = land(
      *[(sender, to, 2, symbol, 30) for sender, symbol in symbols.items()],
      knows=[(sender, 2) for sender in carriers],
  )
  assert all_heard(mail) == {(to, 2): (NOW_MS, kept, symbols[kept])}
  fact = bool(carriers)
  assert bool(mail.board_fact[2]) == (fact and to == 'board')
  assert bool(knows[1, 2]) == (fact and to == 1)


def test_messages_about_other_targets_do_not_compete():
  mail, knows = land(
      (0, 3, 0, 1, 30),
      (1, 3, 1, 0, 30),
      (2, 3, 2, 1, 30),
      knows=[(1, 1)],
  )
  assert all_heard(mail) == {
      (3, 0): (NOW_MS, 0, 1),
      (3, 1): (NOW_MS, 1, 0),
      (3, 2): (NOW_MS, 2, 1),
  }
  np.testing.assert_array_equal(knows, knowing((1, 1), (3, 1)))


def test_a_later_message_replaces_an_earlier_one_but_no_fact_is_lost():
  before, _ = land((0, 1, 2, 1, 30), (3, 'board', 0, 1, 40), knows=[(3, 0)])
  mail, _ = land(
      (2, 1, 2, 0, 30), (1, 'board', 0, 0, 40), mail=before, now_ms=9000
  )
  assert all_heard(mail) == {
      (1, 2): (9000, 2, 0),
      ('board', 0): (9000, 1, 0),
  }
  assert before.board_fact[0] and mail.board_fact[0]


def test_a_post_is_on_the_board_and_teaches_nobody_yet():
  mail, knows = land((1, 'board', 2, 1, 40), knows=[(1, 2)])
  assert all_heard(mail) == {('board', 2): (NOW_MS, 1, 1)}
  np.testing.assert_array_equal(mail.board_fact, [False, False, True])
  np.testing.assert_array_equal(knows, knowing((1, 2)))
  np.testing.assert_array_equal(mail.unread, [40, 0, 40, 40])
  assert mail.board_tokens == 40


def test_a_post_without_the_fact_puts_none_on_the_board():
  mail, _ = land((1, 'board', 2, 1, 40), knows=[(0, 2), (1, 0)])
  assert not mail.board_fact.any()


def test_unread_tokens_add_up():
  # Only one of 0 and 1 is heard, but 2 reads both. 3 does not read her post.
  mail, _ = land((0, 2, 1, 0, 10), (1, 2, 1, 0, 20), (3, 'board', 0, 0, 400))
  np.testing.assert_array_equal(mail.unread, [400, 400, 430, 0])
  mail, _ = land((2, 'board', 0, 0, 500), (3, 'board', 0, 0, 7000), mail=mail)
  np.testing.assert_array_equal(mail.unread, [7900, 7900, 7430, 500])
  assert mail.board_tokens == 7900


def test_absent_agents_get_nothing():
  mail, knows = land(
      (0, 2, 1, 1, 30), (1, 'board', 0, 1, 40), knows=[(0, 1)], absent=[2]
  )
  assert all_heard(mail) == {('board', 0): (NOW_MS, 1, 1)}
  np.testing.assert_array_equal(knows, knowing((0, 1)))
  np.testing.assert_array_equal(mail.unread, [40, 0, 0, 40])
  assert (mail.contact_ms == NEVER).all()


def test_contact_and_said_are_remembered_by_the_sender():
  mail, _ = land((0, 2, 1, 1, 30), (3, 'board', 0, 1, 40))
  contact, said = np.full((N, N), NEVER), np.full((N, M), NEVER)
  contact[0, 2] = said[0, 1] = NOW_MS
  np.testing.assert_array_equal(mail.contact_ms, contact)
  np.testing.assert_array_equal(mail.said_ms, said)  # A post tells nobody.
  mail, _ = land((0, 2, 0, 1, 30), mail=mail, now_ms=9000)
  contact[0, 2] = said[0, 0] = 9000
  np.testing.assert_array_equal(mail.contact_ms, contact)
  np.testing.assert_array_equal(mail.said_ms, said)


def test_a_newcomer_has_heard_and_said_nothing():
  mail, _ = land(
      (0, 1, 0, 1, 10),
      (1, 0, 1, 1, 20),
      (2, 3, 2, 1, 30),
      (3, 'board', 2, 1, 40),
      knows=[(3, 2)],
  )
  mail = channels.forget(mail, jnp.array([False, True, False, False]))
  assert all_heard(mail) == {
      (0, 1): (NOW_MS, 1, 1),  # Others keep what they heard of the last one.
      (3, 2): (NOW_MS, 2, 1),
      ('board', 2): (NOW_MS, 3, 1),
  }
  assert mail.board_fact[2]
  assert mail.board_tokens == 40
  np.testing.assert_array_equal(mail.unread, [60, 0, 40, 30])
  contact, said = np.full((N, N), NEVER), np.full((N, M), NEVER)
  contact[2, 3] = said[0, 0] = said[2, 2] = NOW_MS
  np.testing.assert_array_equal(mail.contact_ms, contact)
  np.testing.assert_array_equal(mail.said_ms, said)
  empty = channels.reset(N, M).direct
  for name, values in mail.direct._asdict().items():
    np.testing.assert_array_equal(values[1], getattr(empty, name)[1])


def test_every_sender_symbol_and_fact_is_decoded():
  n, symbols = 20, 7
  cases = jnp.stack(
      jnp.meshgrid(jnp.arange(n), jnp.arange(symbols), jnp.arange(2)), -1
  ).reshape(-1, 3)

  def send(case):
    sender, symbol, fact = case
    none = jnp.zeros(n, jnp.int32)
    sends = jnp.arange(n) == sender
    sent = channels.Letters(
        sends, sends, ~sends, none, none, none + symbol, none + sends
    )
    knows = (sends & (fact == 1))[:, None]  # All write to 0.
    present = jnp.ones(n, bool)
    mail = channels.reset(n, 1)
    return channels.land(mail, sent, knows, present, symbols, 1)

  mail, knows = jax.jit(jax.vmap(send))(cases)
  for box in (mail.board, jax.tree.map(lambda x: x[:, 0], mail.direct)):
    np.testing.assert_array_equal(box.sender[:, 0], cases[:, 0])
    np.testing.assert_array_equal(box.symbol[:, 0], cases[:, 1])
    np.testing.assert_array_equal(box.ms[:, 0], 1)
  np.testing.assert_array_equal(mail.board_fact[:, 0], cases[:, 2] == 1)
  np.testing.assert_array_equal(knows[:, 0, 0], cases[:, 2] == 1)


def test_verbs_say_what_they_take_and_cost():
  tell, post = channels.verbs({'tell': (50.0, 500), 'post': (100.0, 500)})
  assert (tell.name, tell.output_tokens, tell.tool_ms) == ('tell', 50.0, 500)
  assert (post.name, post.output_tokens, post.tool_ms) == ('post', 100.0, 500)
  takes = lambda v: (v.takes_target, v.takes_peer, v.takes_symbol)
  assert takes(tell) == (True, True, True)
  assert takes(post) == (True, False, True)
  assert not tell.acts_on_environment and not post.acts_on_environment
