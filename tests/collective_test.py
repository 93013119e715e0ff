"""Tests of a collective, played by hand; see `by_hand` for its numbers."""

import jax
import numpy as np
import pytest
from rlcr_jax.collective import CollectiveConfig
from tests import by_hand
from tests.by_hand import Game

LATE_MS = 60_000  # A deadline that does not matter.


def knows(game):
  """The pairs (agent, target) whose fact is known."""
  return [tuple(pair) for pair in np.argwhere(game.state.knows).tolist()]


def present(game):
  return np.flatnonzero(game.state.present).tolist()


def ceo(deadline_ms=LATE_MS, **changes):
  """The CEO, who has read the task."""
  return Game(deadline_ms, organisation='ceo', **changes).advance()


def hired():
  """The CEO, who hired 1 at 5 s."""
  game = ceo().act(0, 'hire').advance()
  assert (game.now_ms, present(game)) == (5000, [0, 1])
  return game


# Time.


@pytest.mark.parametrize(
    'organisation, seats', [('solo', [0]), ('ceo', [0]), ('flat', [0, 1, 2])]
)
def test_those_present_read_the_task_first(organisation, seats):
  game = Game(LATE_MS, organisation=organisation)
  assert present(game) == seats
  assert game.ready == []
  game.advance()
  assert game.now_ms == 3000
  assert game.ready == seats
  assert not game.booked('turns') and not game.spent()  # It is no decision.


def test_each_advance_goes_to_the_next_event_and_lands_all_that_ends_there():
  game = Game(LATE_MS).advance()
  game.act(0, 'wait').act(1, 'work', 0).act(2, 'work', 1)
  assert game.ready == []
  assert game.advance().now_ms == 4000
  assert game.ready == [0]
  game.act(0, 'wait').advance()  # Until 5 s, as the two others.
  assert game.now_ms == 5000
  assert game.ready == [0, 1, 2]


def test_work_lands_at_its_end():
  game = Game(LATE_MS).advance().act(0, 'work', 0).act(1, 'wait')
  assert game.advance().now_ms == 4000
  assert game.progress == 0
  assert knows(game) == []
  assert game.act(1, 'wait').advance().now_ms == 5000
  assert game.progress == 0.1
  assert knows(game) == [(0, 0)]  # Writing a module teaches it.
  assert game.booked('effective') == {'work': 1, 'wait': 2}


def test_may_not_leaves_everything_as_it_is():
  game = Game(LATE_MS).advance().act(0, 'work', 0)
  collective, state = game.collective, game.state
  after, ready = collective.advance(
      game.task, game.rules, state, jax.random.key(0), may=False
  )
  data = lambda tree: tree._replace(agent_keys=None)
  jax.tree.map(np.testing.assert_array_equal, data(after), data(state))
  np.testing.assert_array_equal(ready, collective.ready(state))


# The deadline.


def test_a_turn_that_ends_at_the_deadline_lands():
  game = Game(5000, organisation='solo').advance().act(0, 'work', 0).advance()
  assert game.now_ms == 5000
  assert game.state.done
  assert game.ready == []
  assert game.progress == 0.1
  assert knows(game) == [(0, 0)]
  assert game.booked('effective') == {'work': 1}


def test_a_turn_that_ends_after_the_deadline_never_lands():
  game = Game(4999, organisation='solo').advance().act(0, 'work', 0).advance()
  assert game.now_ms == 4999  # The clock stops at the deadline.
  assert game.state.done
  assert game.ready == []
  assert game.progress == 0
  assert knows(game) == []
  assert game.booked('turns') == {'work': 1}
  assert game.booked('effective') == {}


def test_only_turns_within_the_deadline_land():
  game = Game(5500).advance()
  game.act(0, 'work', 0)  # Until 5 s.
  game.act(1, 'work', 1, end_ms=5501)
  game.act(2, 'post', 1, end_ms=6000)
  game.advance(2)
  assert game.now_ms == 5500
  assert game.state.done
  assert game.progress == 0.1
  assert game.booked('effective') == {'work': 1}


@pytest.mark.parametrize(
    'verb, changes',
    [('tell', {'peer': 1}), ('post', {}), ('hire', {}), ('fire', {'peer': 1})],
)
def test_no_kind_of_turn_lands_after_the_deadline(verb, changes):
  game = Game(7999, organisation='ceo').advance()
  game.act(0, 'hire').advance().act(0, verb, end_ms=8000, **changes).advance()
  assert game.now_ms == 7999
  assert present(game) == [0, 1]
  assert game.booked('effective') == {'hire': 1}
  assert (game.state.mail.direct.ms < 0).all()
  assert (game.state.mail.board.ms < 0).all()


def test_nothing_changes_after_the_deadline():
  game = Game(4000).advance().act(0, 'work', 0).act(1, 'wait').advance()
  assert game.state.done
  state = game.state
  game.advance(3)
  data = lambda tree: tree._replace(agent_keys=None)
  jax.tree.map(np.testing.assert_array_equal, data(game.state), data(state))


@pytest.mark.parametrize('deadline_ms', [1, 2999, 3000])
def test_a_deadline_before_anybody_has_read_the_task(deadline_ms):
  game = Game(deadline_ms).advance()
  assert game.now_ms == deadline_ms
  assert game.state.done and game.ready == []
  assert game.progress == 0


def test_a_deadline_of_zero_is_over_at_once():
  game = Game(0)
  assert game.state.done
  assert game.advance().now_ms == 0


def test_a_collective_stops_when_nothing_is_left_to_do():
  game = Game(LATE_MS, organisation='solo').advance()
  plan = [(0, 1), (1, 2), (2, 3), (3, 1)]  # (module, effort).
  for module, effort in plan:
    for _ in range(effort):
      assert not game.state.done
      game.act(0, 'work', module).advance()
  assert game.progress == 1
  assert game.state.done and game.ready == []
  assert game.now_ms == 3000 + 7 * 2000
  assert game.advance().now_ms == 17_000


# Turns.


def test_an_illegal_turn_costs_time_and_changes_nothing():
  # Module 2 needs module 0, which is not finished.
  game = Game(LATE_MS).advance().act(0, 'work', 2, legal=False).advance()
  assert game.now_ms == 5000
  assert game.ready == [0, 1, 2]
  assert game.progress == 0
  np.testing.assert_array_equal(game.state.world.remaining, [1, 2, 3, 1])
  assert game.booked('turns') == {'work': 1}
  assert game.booked('effective') == {}
  assert game.booked('output_tokens') == {'work': 100}


@pytest.mark.parametrize(
    'verb, changes',
    [('tell', {'peer': 1}), ('post', {}), ('hire', {}), ('fire', {'peer': 1})],
)
def test_no_kind_of_illegal_turn_has_an_effect(verb, changes):
  game = Game(LATE_MS).advance().act(0, verb, legal=False, **changes)
  before = game.state
  game.advance()
  after = game.state
  same = lambda x, y: jax.tree.map(np.testing.assert_array_equal, x, y)
  same((after.present, after.knows), (before.present, before.knows))
  same((after.mail, after.world), (before.mail, before.world))
  assert game.booked('effective') == {}


def test_the_effect_of_the_last_turn_is_remembered():
  game = Game(LATE_MS).advance()
  assert not game.state.effective.any()
  game.act(0, 'work', 0).act(1, 'work', 2, legal=False).act(2, 'wait')
  game.advance(2)
  assert game.state.effective.tolist() == [True, False, True]
  game.act(0, 'work', 2, legal=False).advance()
  assert game.state.effective.tolist() == [False, False, True]


def test_turns_are_counted_when_they_begin_and_tokens_when_they_are_written():
  game = Game(LATE_MS).advance().act(0, 'work', 0).act(1, 'work', 1)
  game.act(2, 'wait')
  assert game.booked('turns') == {'work': 2, 'wait': 1}
  assert game.booked('output_tokens') == {}
  assert game.spent() == {}
  game.advance()  # 4 s: half of the two works is written.
  assert game.booked('output_tokens') == {'wait': 10}
  assert game.spent() == {'work': 100, 'wait': 10}
  game.act(2, 'wait').advance()
  assert game.booked('output_tokens') == {'work': 200, 'wait': 20}
  assert game.spent() == {'work': 200, 'wait': 20}
  np.testing.assert_array_equal(game.state.turn_index, [1, 1, 2])


def test_spent_tokens_at_the_deadline_are_those_written_by_then():
  game = Game(4250).advance().act(0, 'work', 0)  # 3 to 5 s.
  game.act(1, 'post', 0, output_tokens=101, end_ms=8000)
  game.advance()
  assert game.now_ms == 4250
  # 100 * 1250 / 2000 = 62.5; 101 * 1250 / 5000 = 25.25.
  assert game.spent() == {'work': 62, 'post': 25}
  assert game.booked('output_tokens') == {}


def test_progress_ms_is_when_progress_last_changed():
  game = Game(LATE_MS, organisation='solo').advance()
  assert (game.now_ms, game.state.progress_ms) == (3000, 0)
  game.act(0, 'work', 0).advance()
  assert (game.now_ms, game.state.progress_ms) == (5000, 5000)
  game.act(0, 'wait').advance()
  assert (game.now_ms, game.state.progress_ms) == (6000, 5000)
  game.act(0, 'work', 1).advance().act(0, 'work', 1).advance()
  assert (game.progress, game.state.progress_ms) == (0.4, 10_000)


def test_one_who_reads_pays_for_all_that_is_new():
  # 2300 tokens take 2.3 s to read: 1 s of waiting becomes 4 s.
  game = Game(LATE_MS).advance()
  game.act(0, 'post', 0, output_tokens=2300, end_ms=5000)
  game.act(1, 'work', 1).act(2, 'work', 0).advance()
  assert game.now_ms == 5000
  np.testing.assert_array_equal(game.state.mail.unread, [0, 2300, 2300])
  game.act(1, 'wait').act(0, 'wait').act(2, 'work', 1)
  np.testing.assert_array_equal(game.state.turn.end_ms, [6000, 9000, 10_000])
  np.testing.assert_array_equal(game.state.mail.unread, [0, 0, 0])


# Messages.


def test_a_fact_told_is_known_when_the_message_lands():
  game = Game(LATE_MS).advance().act(0, 'work', 0).act(1, 'work', 1)
  game.advance().act(0, 'tell', 0, peer=2, symbol=1)
  assert knows(game) == [(0, 0)]
  assert game.advance().now_ms == 6000
  assert knows(game) == [(0, 0), (2, 0)]
  heard = jax.tree.map(lambda x: int(x[2, 0]), game.state.mail.direct)
  assert (heard.ms, heard.sender, heard.symbol) == (6000, 0, 1)


def test_a_message_about_what_one_does_not_know_carries_nothing():
  game = Game(LATE_MS).advance().act(0, 'tell', 0, peer=2).advance()
  assert game.state.mail.direct.ms[2, 0] == 4000
  assert knows(game) == []


def test_a_message_to_one_who_was_fired_meanwhile_has_no_effect():
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(0, 'fire', peer=1).act(1, 'tell', 0, peer=0, end_ms=8500).advance()
  assert game.booked('effective')['tell'] == 1  # The CEO heard it.
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(1, 'wait', end_ms=20_000).act(0, 'fire', peer=1).advance()
  game.act(0, 'tell', 0, peer=1).advance()
  assert 'tell' not in game.booked('effective')
  assert game.booked('turns')['tell'] == 1


def test_a_fact_on_the_board_is_learned_at_the_readers_next_turn():
  game = Game(LATE_MS).advance().act(0, 'work', 0).act(1, 'work', 1)
  game.advance().act(0, 'post', 0).act(1, 'wait')  # Until 7 and 6 s.
  game.advance()
  game.act(1, 'work', 1)  # From 6 to 8 s, before the post is there.
  game.advance()
  assert game.now_ms == 7000
  assert knows(game) == [(0, 0)]  # Nobody has looked yet.
  game.act(2, 'wait')
  assert knows(game) == [(0, 0), (2, 0)]
  game.advance()  # 1 finishes module 1 at 8 s, and has not looked.
  assert knows(game) == [(0, 0), (1, 1), (2, 0)]
  game.act(1, 'wait')
  assert knows(game) == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_a_cut_board_teaches_nothing():
  game = Game(LATE_MS, board=False).advance()
  mail = game.state.mail
  posted = mail._replace(board_fact=mail.board_fact.at[0].set(True))
  game.state = game.state._replace(mail=posted)
  game.act(2, 'wait')
  assert knows(game) == []


# Hiring and firing.


def test_a_hire_reads_the_task_before_it_is_ready():
  game = hired()
  assert game.ready == [0]  # 1 reads from 5 to 8 s.
  assert game.booked('effective') == {'hire': 1}
  game.act(0, 'wait', end_ms=10_000).advance()
  assert game.now_ms == 8000
  assert game.ready == [1]
  assert game.booked('turns') == {'hire': 1, 'wait': 1}
  assert not game.state.effective[1]


def test_a_hire_reads_the_board_too():
  # 1500 tokens are on the board: it takes 3 + 1.5 s, and so 5 s.
  game = hired().act(0, 'post', 0, output_tokens=1500, end_ms=8000).advance()
  game.act(0, 'hire').advance()
  assert game.now_ms == 10_000
  assert game.state.turn.end_ms[2] == 15_000


def test_a_hire_knows_nothing_but_what_is_on_the_board():
  game = ceo().act(0, 'work', 0).advance().act(0, 'hire').advance()
  assert game.now_ms == 7000
  assert knows(game) == [(0, 0)]
  game.act(0, 'post', 0).advance()  # At 9 s; 1 has read the task at 10 s.
  game.act(0, 'work', 1).advance()
  assert (game.now_ms, game.ready) == (10_000, [1])
  game.act(1, 'wait')
  assert knows(game) == [(0, 0), (1, 0)]


def test_a_full_team_hires_nobody():
  game = ceo(max_hires=1).act(0, 'hire').advance()
  game.act(0, 'hire').advance()
  assert present(game) == [0, 1]
  assert game.booked('turns') == {'hire': 2}
  assert game.booked('effective') == {'hire': 1}


def test_firing_loses_the_turn_in_flight_and_books_what_was_written():
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(1, 'work', 0, output_tokens=200, end_ms=12_000)  # 8 to 12 s.
  game.act(0, 'fire', peer=1).advance()
  assert game.now_ms == 9000
  assert present(game) == [0]
  assert game.ready == [0]
  # A quarter of 200 tokens was written.
  spent = {'work': 50, 'wait': 10, 'hire': 100, 'fire': 100}
  assert game.booked('output_tokens') == game.spent() == spent
  game.act(0, 'wait', end_ms=14_000).advance()
  assert game.now_ms == 14_000
  assert game.progress == 0
  assert game.booked('effective') == {'wait': 2, 'hire': 1, 'fire': 1}
  assert game.spent() == spent | {'wait': 20}


def test_a_turn_that_ends_as_its_agent_is_fired_lands():
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(1, 'work', 0, end_ms=9000).act(0, 'fire', peer=1).advance()
  assert present(game) == [0]
  assert game.progress == 0.1
  assert game.booked('output_tokens')['work'] == 100


def test_firing_one_who_reads_the_task_costs_no_tokens():
  game = hired().act(0, 'fire', peer=1).advance()
  assert (game.now_ms, present(game), game.ready) == (6000, [0], [0])
  assert game.spent() == {'hire': 100, 'fire': 100}


def test_a_seat_that_is_filled_again_is_a_newcomers():
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(0, 'tell', 1, peer=1).act(1, 'work', 0)  # 9 and 10 s.
  game.advance().act(0, 'wait').advance()
  game.act(0, 'fire', peer=1).act(1, 'wait', end_ms=20_000).advance()
  assert knows(game) == [(1, 0)]
  game.act(0, 'hire').advance()
  assert (game.now_ms, present(game)) == (13_000, [0, 1])
  assert knows(game) == []
  assert not game.state.effective[1]
  mail = game.state.mail
  assert (mail.direct.ms[1] < 0).all() and (mail.contact_ms < 0).all()
  assert game.state.turn_index[1] == 2  # So no key is ever used twice.
  game.act(0, 'wait', end_ms=30_000)
  game.advance()
  assert (game.now_ms, game.ready) == (16_000, [1])


def hires(game):
  """How many were hired, and how many of them had an effect on the world."""
  ledger = game.state.ledger
  return int(ledger.hired), int(ledger.productive)


def test_hires_are_counted_and_which_of_them_had_an_effect():
  game = hired().act(0, 'wait', end_ms=8000)
  assert hires(game) == (1, 0)
  game.advance().act(0, 'work', 0).act(1, 'wait')  # To 10 and 9 s.
  game.advance().act(1, 'tell', 0, peer=0, legal=False, end_ms=10_000).advance()
  assert game.progress == 0.1  # By the CEO, who was not hired.
  assert hires(game) == (1, 0)
  game.act(0, 'wait', end_ms=20_000).act(1, 'read', 1, legal=False).advance()
  assert hires(game) == (1, 0)  # Nothing illegal has an effect.
  game.act(1, 'work', 1).advance()
  assert hires(game) == (1, 1)
  game.act(1, 'work', 1).advance()
  assert (game.progress, hires(game)) == (0.4, (1, 1))  # Once is enough.


def test_who_is_hired_anew_must_have_an_effect_anew():
  game = hired().act(0, 'wait', end_ms=8000).advance()
  game.act(1, 'work', 0).act(0, 'wait', end_ms=10_000).advance()
  assert hires(game) == (1, 1)
  game.act(0, 'fire', peer=1).act(1, 'wait', end_ms=30_000).advance()
  game.act(0, 'hire').advance()
  assert hires(game) == (2, 1)
  game.act(0, 'wait', end_ms=40_000).advance().act(1, 'work', 1).advance()
  assert hires(game) == (2, 2)


def test_those_present_from_the_start_are_no_hires():
  game = Game(LATE_MS).advance().act(0, 'work', 0)
  game.act(1, 'wait').act(2, 'wait').advance(2)
  assert game.progress == 0.1 and hires(game) == (0, 0)


def test_a_full_team_brings_nobody():
  game = ceo(max_hires=1).act(0, 'hire').advance().act(0, 'hire').advance()
  assert hires(game) == (1, 0)


def test_peak_team_is_the_most_present_at_once():
  assert Game(LATE_MS).state.peak_team == 3
  game = ceo()
  assert game.state.peak_team == 1
  game.act(0, 'hire').advance()
  assert game.state.peak_team == 2
  game.act(0, 'fire', peer=1).advance().act(0, 'hire').advance()
  assert (present(game), game.state.peak_team) == ([0, 1], 2)
  game.act(0, 'hire').advance()
  assert game.state.peak_team == 3
  game.act(0, 'fire', peer=1).advance()
  assert (present(game), game.state.peak_team) == ([0, 2], 3)


# Statics.


def test_verbs_and_their_shortest_durations():
  collective = by_hand.make_collective()
  names = ['work', 'read', 'wait', 'tell', 'post', 'hire', 'fire']
  assert [v.name for v in collective.verbs] == names
  assert [collective.verb(name) for name in names] == list(range(7))
  seconds = (2, 1, 1, 1, 2, 2, 1)
  assert collective.shortest_turn_ms() == tuple(1000 * s for s in seconds)
  # Without quanta, and with tokens down to exp(-1) = 0.368 of the median.
  collective = by_hand.make_collective(latency={'spread': 0.5, 'quantum_ms': 1})
  assert collective.shortest_turn_ms() == (
      1370, 680, 940, 680, 870, 1370, 370
  )  # fmt: skip


@pytest.mark.parametrize(
    'agents, window, peers', [(9, 4, 4), (9, 8, 8), (3, 8, 2), (1, 8, 1)]
)
def test_the_peer_window_holds_no_more_than_there_are(agents, window, peers):
  collective = by_hand.make_collective(num_agents=agents, peer_window=window)
  assert collective.num_peers == peers


def test_rules_are_those_of_the_config_unless_changed():
  config = by_hand.make_collective(organisation='ceo', board=False).config
  rules = config.rules(7000)
  assert (rules.deadline_ms, rules.team_start, rules.team_limit) == (7000, 1, 3)
  assert rules.hiring and rules.direct and not rules.board
  rules = config.rules(7000, organisation='flat', board=True, awareness=True)
  assert (rules.team_start, rules.team_limit) == (3, 3)
  assert rules.board and rules.awareness and not rules.hiring


@pytest.mark.parametrize(
    'field, value, allowed',
    [
        ('num_agents', 0, '>= 1'),
        ('num_symbols', 0, '>= 1'),
        ('peer_window', 0, '>= 1'),
        ('max_hires', -1, '>= 0'),
        ('task_tokens', 0, '>= 1 token'),
        ('tell_tokens', 0.0, '>= 1 token'),
        ('post_tokens', 0.0, '>= 1 token'),
        ('hire_tokens', 0.0, '>= 1 token'),
        ('fire_tokens', 0.0, '>= 1 token'),
        ('wait_tokens', 0.0, '>= 1 token'),
        ('message_tool_ms', -1, '>= 0'),
        ('hire_tool_ms', -1, '>= 0'),
        ('wait_ms', -1, '>= 0'),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(field, value, allowed):
  with pytest.raises(ValueError) as error:
    CollectiveConfig(**{field: value})
  message = str(error.value)
  assert f'collective.{field}={value}' in message
  assert allowed in message
  assert '\n' not in message
