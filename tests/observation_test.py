"""Tests of what an agent sees and may do; see `by_hand` for the numbers."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import channels
from rlcr_jax import observation
from tests import by_hand
from tests.by_hand import Game

LATE_MS = 60_000
WORKERS = {'work', 'wait'}
TALKERS = WORKERS | {'tell', 'post'}


def legal(game, agent):
  """The names of the legal verbs."""
  verbs = game.collective.verbs
  mask = game.observe(agent).legal_verb
  return {v.name for v, ok in zip(verbs, mask, strict=True) if ok}


def legal_targets(game, agent, verb):
  obs = game.observe(agent)
  return np.flatnonzero(obs.legal_target[game.collective.verb(verb)]).tolist()


def legal_peers(game, agent):
  obs = game.observe(agent)
  return obs.peer_seat[obs.legal_peer].tolist()


def my(obs, name):
  return float(obs.me[observation.MY_FEATURES.index(name)])


def of_targets(game, obs, name):
  """A column of target features [M], by name; `in_flight` follows the env's."""
  names = [*game.collective.env.feature_names, 'in_flight']
  return obs.targets[:, names.index(name)].tolist()


def news(game):
  """How many pieces of news each agent has."""
  count = lambda agent: np.expm1(my(game.observe(agent), 'news')).round()
  return [count(agent) for agent in range(game.collective.num_agents)]


def differ(x, y):
  """Are two observations different?"""
  same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), x, y)
  return not all(jax.tree.leaves(same))


def observe_all(game):
  return [game.observe(agent) for agent in range(game.collective.num_agents)]


def finish(game, module, agent=0):
  """`agent` finishes a module of effort 1, the others wait for it."""
  others = set(range(game.collective.num_agents)) - {agent}
  end_ms = game.now_ms + 2000
  game.act(agent, 'work', module)
  for other in others & set(game.ready):
    game.act(other, 'wait', end_ms=end_ms)
  return game.advance()


# What is legal.


@pytest.mark.parametrize(
    'organisation, channels_cut, verbs',
    [
        ('solo', {}, WORKERS),
        ('ceo', {}, WORKERS | {'hire'}),  # Alone, so there is nobody to tell.
        ('flat', {}, TALKERS),
        ('flat', {'direct': False}, WORKERS | {'post'}),
        ('flat', {'board': False}, WORKERS | {'tell'}),
        ('flat', {'direct': False, 'board': False}, WORKERS),
    ],
)
def test_verbs_by_organisation_and_channels(organisation, channels_cut, verbs):
  game = Game(LATE_MS, organisation=organisation, **channels_cut).advance()
  assert legal(game, 0) == verbs


def test_only_the_chief_hires_and_fires_within_limits():
  game = Game(LATE_MS, organisation='ceo').advance().act(0, 'hire').advance()
  assert legal(game, 0) == TALKERS | {'hire', 'fire'}
  assert legal(game, 1) == TALKERS
  assert legal_peers(game, 0) == [1]
  game.act(0, 'hire').advance(2)
  assert legal(game, 0) == TALKERS | {'fire'}  # Three seats are taken.
  assert legal(game, 1) == legal(game, 2) == TALKERS
  game.act(0, 'fire', peer=1).act(1, 'wait').advance()
  assert legal(game, 0) == TALKERS | {'hire', 'fire'}
  assert legal_peers(game, 0) == [2]
  assert legal_peers(game, 2) == [0]


def test_nobody_hires_in_a_flat_organisation():
  game = Game(LATE_MS).advance()
  for agent in range(3):
    assert legal(game, agent) == TALKERS
    assert legal_peers(game, agent) == [
        seat % 3 for seat in (agent + 1, agent + 2)
    ]


def test_work_and_reading_follow_dependencies_and_facts():
  game = Game(LATE_MS, board=False).advance()
  assert legal_targets(game, 0, 'work') == [0, 1]
  assert legal_targets(game, 0, 'read') == []
  finish(game, 0)
  assert legal(game, 0) == WORKERS | {'tell'}  # It knows what it wrote.
  assert legal_targets(game, 0, 'work') == [1, 2]
  assert legal(game, 1) == WORKERS | {'tell', 'read'}
  assert legal_targets(game, 1, 'work') == [1]  # 2 needs the fact of 0.
  assert legal_targets(game, 1, 'read') == [0]
  game.act(1, 'read', 0).advance()
  assert legal_targets(game, 1, 'work') == [1, 2]
  assert legal_targets(game, 1, 'read') == []


def test_no_target_is_left_for_a_verb_without_one_or_that_is_illegal():
  game = Game(LATE_MS, direct=False).advance()
  assert legal_targets(game, 0, 'post') == [0, 1]
  for verb in ('tell', 'read', 'wait', 'hire', 'fire'):
    assert legal_targets(game, 0, verb) == []


def test_one_speaks_of_what_one_knows_and_of_what_there_is_to_do():
  game = Game(LATE_MS).advance()
  for verb in ('tell', 'post'):
    assert legal_targets(game, 0, verb) == [0, 1]
  finish(game, 0)
  for verb in ('tell', 'post'):
    assert legal_targets(game, 0, verb) == [0, 1, 2]
    assert legal_targets(game, 1, verb) == [1, 2]


def test_is_legal_by_parts():
  game = Game(LATE_MS, organisation='ceo').advance().act(0, 'hire').advance()
  verbs, obs = game.collective.verbs, game.observe(0)
  assert obs.peer_seat.tolist() == [1, 2]  # And 2 is absent.

  def may(verb, target=0, peer=0):
    index = game.collective.verb(verb)
    action = observation.Action(*map(jnp.int32, (index, target, peer, 0)))
    return bool(observation.is_legal(verbs, obs, action))

  assert may('work', 0) and may('work', 1) and not may('work', 2)
  assert not may('read', 0)
  assert may('wait', 2, 1)  # It has neither target nor peer.
  assert may('tell', 1, 0) and not may('tell', 1, 1) and not may('tell', 3, 0)
  assert may('fire', 0, 0) and not may('fire', 0, 1)
  assert may('hire')


def test_parts_that_verbs_take():
  verbs = by_hand.make_collective().verbs
  takes = lambda part: {
      v.name
      for v, used in zip(verbs, observation.takes(verbs, part), strict=True)
      if used
  }
  assert takes('target') == {'work', 'read', 'tell', 'post'}
  assert takes('peer') == {'tell', 'fire'}
  assert takes('symbol') == {'tell', 'post'}


# What is visible of others' turns.


def in_flight(target, verb='work', **rules):
  """At 4 s: 1 is at a target since 3 s, and 0 is free."""
  game = Game(LATE_MS, **rules).advance()
  game.act(0, 'wait').act(1, verb, target, end_ms=9000)
  return game.act(2, 'wait', end_ms=9000).advance()


def test_awareness_shows_turns_in_flight():
  game = in_flight(1, awareness=True)
  obs = game.observe(0)
  assert of_targets(game, obs, 'in_flight') == [0, 1, 0, 0]
  # It does not show me my own, nor that 2 waits for something.
  assert of_targets(game, game.observe(1), 'in_flight') == [0, 0, 0, 0]
  game.act(0, 'work', 1, end_ms=9000)
  assert of_targets(game, game.observe(2), 'in_flight') == [0, 1, 0, 0]


def test_awareness_shows_how_many_are_at_it():
  game = in_flight(1, awareness=True).act(0, 'work', 1).advance()
  assert of_targets(game, game.observe(2), 'in_flight') == [0, 1, 0, 0]
  game = Game(LATE_MS, awareness=True).advance()
  game.act(0, 'work', 1).act(1, 'work', 1).act(2, 'wait').advance()
  assert of_targets(game, game.observe(2), 'in_flight') == [0, 2, 0, 0]


def test_awareness_shows_no_messages_in_flight():
  game = in_flight(1, verb='post', awareness=True)
  assert of_targets(game, game.observe(0), 'in_flight') == [0, 0, 0, 0]


def test_without_awareness_nothing_in_flight_is_visible():
  seen = [
      in_flight(target, verb).observe(0)
      for target, verb in ((0, 'work'), (1, 'work'), (3, 'post'), (0, 'wait'))
  ]
  assert not any(differ(obs, seen[0]) for obs in seen[1:])
  game = in_flight(0)
  assert of_targets(game, game.observe(0), 'in_flight') == [0, 0, 0, 0]


@pytest.mark.parametrize('awareness', [False, True])
def test_decisions_of_the_same_instant_are_invisible(awareness):
  game = Game(LATE_MS, awareness=awareness).advance()
  before = game.observe(2)
  game.act(0, 'work', 0).act(1, 'tell', 1, peer=2)
  assert not differ(game.observe(2), before)


@pytest.mark.parametrize('awareness', [False, True])
@pytest.mark.parametrize('order', [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_in_which_free_agents_are_served_does_not_matter(
    awareness, order
):
  game = finish(Game(LATE_MS, awareness=awareness).advance(), 0)
  game.act(0, 'post', 0).act(1, 'work', 1).act(2, 'work', 1).advance()
  assert game.ready == [0, 1, 2]  # All are free, and a fact is on the board.
  before = observe_all(game)
  plan = {0: ('work', 2), 1: ('work', 1), 2: ('read', 0)}
  for agent in order:
    assert not differ(game.observe(agent), before[agent])
    game.act(agent, *plan[agent])


def test_rank_breaks_ties_only_with_awareness():
  ranks = lambda game: [my(obs, 'rank') for obs in observe_all(game)]
  assert ranks(Game(LATE_MS, awareness=True).advance()) == [2, 1, 0]
  assert ranks(Game(LATE_MS).advance()) == [0, 0, 0]
  assert ranks(in_flight(1, awareness=True))[0] == 0  # Nobody else is free.


# Peers.


def test_features_of_an_absent_peer_are_zero():
  game = Game(LATE_MS, organisation='ceo').advance()
  obs = game.observe(0)
  assert not obs.legal_peer.any()
  assert (obs.peers == 0).all()
  game.act(0, 'hire').advance()
  obs = game.observe(0)
  assert obs.legal_peer.tolist() == [True, False]
  assert (obs.peers[0] != 0).any()
  assert (obs.peers[1] == 0).all()


def test_one_agent_without_others_has_a_window_of_nobody():
  collective = by_hand.make_collective(num_agents=1)
  obs = Game(LATE_MS, collective).advance().observe(0)
  assert obs.legal_peer.tolist() == [False]
  assert (obs.peers == 0).all()


WIDE = by_hand.make_collective(num_agents=6, peer_window=3)


def with_contacts(contacts, absent=()):
  """Six agents, of whom some told others something: {(from, to): ms}."""
  game = Game(LATE_MS, WIDE).advance()
  contact_ms = game.state.mail.contact_ms
  for pair, ms in contacts.items():
    contact_ms = contact_ms.at[pair].set(ms)
  present = game.state.present & ~np.isin(np.arange(6), absent)
  game.state = game.state._replace(
      mail=game.state.mail._replace(contact_ms=contact_ms), present=present
  )
  return game


@pytest.mark.parametrize(
    'contacts, absent, window',
    [
        ({}, [], [2, 3, 4]),  # The next in the ring.
        ({(1, 0): 1000}, [], [0, 2, 3]),
        ({(0, 1): 1000}, [], [0, 2, 3]),  # Told or was told.
        ({(1, 0): 1000, (5, 1): 2000}, [], [5, 0, 2]),
        ({(1, 0): 3000, (5, 1): 2000, (1, 5): 0}, [], [0, 5, 2]),
        ({(1, 0): 1, (5, 1): 2, (1, 4): 3, (3, 1): 4}, [], [3, 4, 5]),
        ({(0, 5): 1000, (4, 3): 2000}, [], [2, 3, 4]),  # Of others.
        ({(1, 0): 1000}, [0], [2, 3, 4]),
        ({(1, 0): 1000}, [0, 2, 3], [4, 5, 0]),  # The absent come last,
        ({}, [0, 2, 3, 4], [5, 2, 3]),  # and are no legal peers.
    ],
)
def test_a_small_window_shows_those_last_in_contact(contacts, absent, window):
  obs = with_contacts(contacts, absent).observe(1)
  present = [seat not in absent for seat in window]
  # The absent are only padding, in any order.
  assert obs.legal_peer.tolist() == present
  seats = obs.peer_seat[obs.legal_peer].tolist()
  assert seats == [seat for seat in window if seat not in absent]


def test_a_window_that_is_large_enough_is_the_ring():
  game = Game(LATE_MS)
  assert [game.observe(i).peer_seat.tolist() for i in range(3)] == [
      [1, 2],
      [2, 0],
      [0, 1],
  ]


# Facts.


def test_free_facts_give_every_fact_and_leave_no_trace():
  game = finish(Game(LATE_MS, free_facts=True).advance(), 0)
  obs = game.observe(1)
  assert legal_targets(game, 1, 'work') == [1, 2]
  assert legal_targets(game, 1, 'read') == []
  assert of_targets(game, obs, 'missing') == [0, 0, 0, 0]
  assert not game.state.knows[1].any()
  game = finish(Game(LATE_MS).advance(), 0)
  assert of_targets(game, game.observe(1), 'missing') == [0, 0, 1, 2]


def test_facts_on_the_board_count_when_one_looks():
  game = finish(Game(LATE_MS).advance(), 0)
  game.act(0, 'post', 0).act(1, 'work', 1).act(2, 'work', 1).advance()
  assert not game.state.knows[1, 0]
  assert legal_targets(game, 1, 'work') == [1, 2]
  game.rules = game.rules._replace(board=jnp.asarray(False))
  assert legal_targets(game, 1, 'work') == [1]


# Channels: who sees what.


def with_message(to, target, symbol, sender=0):
  """Observations of all three before and after a message has landed."""
  game = finish(Game(LATE_MS).advance(), 0, agent=2)
  knows = game.state.knows.at[0, 0].set(True)  # So 0 and 2 know 0.
  game.state = game.state._replace(knows=knows)
  before = observe_all(game)
  seats, ints = jnp.arange(3), jnp.ones(3, jnp.int32)
  sends = seats == sender
  never = sends & False
  letters = channels.Letters(
      direct=never if to == 'board' else sends,
      post=sends if to == 'board' else never,
      lists=never,
      target=target * ints,
      peer=(0 if to == 'board' else to) * ints,
      symbol=symbol * ints,
      tokens=50 * ints,
  )
  state = game.state
  mail, knows = channels.land(
      state.mail, letters, state.knows, state.present, 2, state.clock_ms
  )
  game.state = state._replace(mail=mail, knows=knows)
  return before, observe_all(game)


@pytest.mark.parametrize('target', [0, 1, 3])  # The fact of 0 is known.
@pytest.mark.parametrize('symbol', [0, 1])
def test_a_message_is_seen_by_its_reader_and_by_nobody_else(target, symbol):
  before, after = with_message(1, target, symbol)
  assert differ(after[1], before[1])
  assert differ(after[0], before[0])  # The sender remembers what she said.
  assert not differ(after[2], before[2])


@pytest.mark.parametrize('target', [0, 1, 3])
@pytest.mark.parametrize('symbol', [0, 1])
def test_a_post_is_seen_by_all(target, symbol):
  before, after = with_message('board', target, symbol)
  for agent in range(3):
    assert differ(after[agent], before[agent])


@pytest.mark.parametrize('to', [1, 'board'])
def test_every_part_of_a_message_is_seen(to):
  read = lambda *args, **kwargs: with_message(to, *args, **kwargs)[1][1]
  reference = read(1, 0)
  assert not differ(read(1, 0), reference)
  assert differ(read(1, 1), reference)  # The symbol,
  assert differ(read(3, 0), reference)  # the subject
  assert differ(read(1, 0, sender=2), reference)  # and the sender.


@pytest.mark.parametrize('to', [1, 'board'])
def test_a_fact_is_seen_by_its_reader(to):
  before, after = with_message(to, 0, 0)
  work = 0
  assert before[1].legal_target[work].tolist() == [False, True, False, False]
  assert after[1].legal_target[work].tolist() == [False, True, True, False]


# Numbers.


def test_my_features_by_hand():
  game = finish(Game(10_000, organisation='ceo').advance(), 0)
  obs = game.observe(0)
  assert my(obs, 'one') == 1
  assert my(obs, 'time_left_share') == 0.5  # 5 of 10 s.
  assert my(obs, 'time_left') == pytest.approx(np.log1p(5 / 30))
  assert my(obs, 'deadline') == pytest.approx(np.log1p(10 / 30))
  assert my(obs, 'log_team') == 0
  assert my(obs, 'solitude') == 1
  assert my(obs, 'chief') == 1
  assert my(obs, 'progress') == pytest.approx(0.1)
  assert my(obs, 'unread') == 0
  assert my(obs, 'experience') == pytest.approx(np.log(2) / 3)
  assert my(obs, 'effective') == 1
  flat = Game(10_000).advance().observe(0)
  assert my(flat, 'log_team') == pytest.approx(np.log(3) / 2)
  assert my(flat, 'solitude') == pytest.approx(1 / 3)
  assert my(flat, 'chief') == 0


@pytest.mark.parametrize('board', [True, False])
def test_a_direct_message_makes_a_fact_old_only_without_a_board(board):
  game = finish(Game(LATE_MS, board=board).advance(), 0)
  assert news(game) == [1, 0, 0]  # Nobody else knows it, and 2 and 3 need it.
  game.act(0, 'tell', 0, peer=1, end_ms=7000)
  game.act(1, 'wait', end_ms=7000).act(2, 'wait', end_ms=7000).advance()
  assert news(game) == ([1, 1, 0] if board else [0, 1, 0])


def test_a_post_makes_a_fact_old_for_everybody():
  game = finish(Game(LATE_MS).advance(), 0)
  game.act(0, 'post', 0, end_ms=7000)
  game.act(1, 'wait', end_ms=7000).act(2, 'wait', end_ms=7000).advance()
  assert news(game) == [0, 0, 0]


def test_a_fact_that_nobody_wants_is_no_news():
  game = finish(Game(LATE_MS).advance(), 0)
  world = game.state.world
  nothing_left = world.remaining.at[2:].set(0)
  game.state = game.state._replace(world=world._replace(remaining=nothing_left))
  assert news(game) == [0, 0, 0]


@pytest.mark.parametrize('deadline_ms', [1, 3000, 2**31 - 1])
@pytest.mark.parametrize('organisation', ['solo', 'flat', 'ceo'])
def test_features_are_finite_at_any_deadline(deadline_ms, organisation):
  game = Game(deadline_ms, organisation=organisation)
  for _ in range(2):
    for obs in observe_all(game):
      for part in (obs.me, obs.targets, obs.peers):
        assert part.dtype == jnp.float32
        assert np.isfinite(part).all()
    game.advance()


def test_agents_and_targets_that_are_alike_can_be_told_apart():
  game = Game(LATE_MS).advance()
  assert differ(game.observe(0).me, game.observe(1).me)
  rows = game.observe(0).targets
  assert len({tuple(row) for row in rows.tolist()}) == 4


def test_observations_compile_for_any_number_of_targets():
  # In a process of its own, which a compiler may abort, and fully optimised.
  script = """
import jax
import jax.numpy as jnp
from tests import by_hand
rows = 32
keys = jax.random.split(jax.random.key(0), rows)
for modules in (6, 8):
  collective = by_hand.make_collective({'num_modules': modules}, num_agents=4)
  rules = by_hand.batch_rules([collective.config.rules(60_000)] * rows)
  tasks = jax.vmap(collective.env.sample_task)(keys)
  states = jax.vmap(collective.reset)(tasks, rules, keys)
  look = jax.jit(jax.vmap(collective.observe))
  look(tasks, rules, states, jnp.zeros(rows, jnp.int32))
"""
  done = subprocess.run(
      [sys.executable, '-c', script],
      env=os.environ | {'XLA_FLAGS': ''},
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr[-500:]
