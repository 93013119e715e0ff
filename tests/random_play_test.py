"""Tests of the player that drives environments for the conformance test."""

from envs import random_play
from envs import software
import jax
import numpy as np
import pytest

ENV = software.Software(num_modules=4, width=2)
WAIT = len(ENV.verbs)


@pytest.fixture(scope='module')
def plays():
  """By agents and crowding."""
  key = jax.random.key(3)
  return {
      how: random_play.play(ENV, key, *how)
      for how in ((1, True), (4, False), (4, True))
  }


def test_shortest_durations_differ_by_verb():
  assert random_play.turn_ms(ENV).tolist() == [2000, 3000]


def test_plays_go_on_until_the_task_is_finished(plays):
  for play in plays.values():
    assert [bool(landing.after.finished) for landing in play[:-1]] == (
        [False] * (len(play) - 1)
    )
    assert play[-1].after.finished
    assert play[-1].after.progress == 1.0


def test_time_moves_to_the_next_end_of_a_turn(plays):
  for play in plays.values():
    now_ms = 0
    for landing in play:
      assert landing.before.now_ms == now_ms
      now_ms = landing.after.now_ms
      assert landing.turns.now_ms == now_ms > landing.before.now_ms
      assert (landing.turns.start_ms < now_ms).all()
      assert landing.turns.lands.any()


def test_turns_are_legal_when_they_begin_and_last_long_enough(plays):
  for play in plays.values():
    legal = {}  # By instant.
    for landing in play:
      now, turns = landing.before, landing.turns
      legal[int(now.now_ms)] = np.asarray(now.views.legal)
      for i in np.flatnonzero(turns.lands & (turns.verb != WAIT)):
        verb, start_ms = int(turns.verb[i]), int(turns.start_ms[i])
        assert legal[start_ms][i, verb, turns.target[i]]
        assert turns.now_ms - start_ms >= random_play.turn_ms(ENV)[verb]


def test_turns_tie_overlap_wait_and_last_longer(plays):
  landings = plays[4, False]
  count = [int(landing.turns.lands.sum()) for landing in landings]
  assert min(count) < 4 and max(count) > 1
  verbs = {int(v) for landing in landings for v in landing.turns.verb}
  assert verbs == {software.WORK, software.READ, WAIT}
  took = {
      int(landing.turns.now_ms - landing.turns.start_ms[i])
      for landing in landings
      for i in np.flatnonzero(
          landing.turns.lands & (landing.turns.verb == software.WORK)
      )
  }
  assert took == {2000, 3000}


def test_a_crowd_does_the_same_at_once(plays):
  first = plays[4, True][0].turns
  assert first.lands.all()
  legal = plays[4, True][0].before.views.legal[0]
  verb, target = np.argwhere(legal)[0]
  assert first.verb.tolist() == [verb] * 4
  assert first.target.tolist() == [target] * 4


def test_a_crowd_of_one_that_need_not_read_takes_the_serial_time(plays):
  landings = plays[1, True]
  assert landings[-1].after.now_ms == landings[0].before.bounds.serial_ms


def test_a_play_is_determined_by_its_key(plays):
  again = random_play.play(ENV, jax.random.key(3), 4, False)
  ends = lambda play: [int(landing.after.now_ms) for landing in play]
  assert ends(again) == ends(plays[4, False])
  other = random_play.play(ENV, jax.random.key(4), 4, False)
  assert ends(other) != ends(plays[4, False])
