"""Conservation laws: what the decision buffer and the states say adds up.

What became of every decision is worked out here from the buffer alone, in
integers, and is then compared with what the collectives have booked.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import observation
from tests.played import BATCH
from tests.played import COLLECTIVE
from tests.played import inputs
from tests.played import NETWORK
from tests.played import of_one
from tests.played import played
from tests.played import RECORDER
from tests.played import RULES
from tests.played import TOKEN_MS
from tests.played import VERBS


class Turn(NamedTuple):
  """A decision, and what became of it, worked out from the buffer alone."""

  agent: int
  verb: str
  tokens: int
  start_ms: int
  end_ms: int
  stop_ms: int  # When its agent was fired or the clock stopped, if before.
  whom: int  # The seat that it is addressed to.


def up_to_seconds(ms):
  return -(-ms // 1000) * 1000


@functools.cache
def turns_of(number):
  """All turns of a rollout, in the order of agents and time."""
  rollouts, table = played()
  pick = of_one(table, number)
  found = []
  for i, unread in enumerate(unread_of(pick)):
    spec = COLLECTIVE.verbs[pick.action.verb[i]]
    ms = TOKEN_MS * int(pick.output_tokens[i] + unread) + spec.tool_ms
    start_ms = int(pick.start_ms[i])
    found.append(
        Turn(
            agent=int(pick.agent[i]),
            verb=spec.name,
            tokens=int(pick.output_tokens[i]),
            start_ms=start_ms,
            end_ms=start_ms + up_to_seconds(ms),
            stop_ms=int(rollouts.time_ms[number]),
            whom=int(pick.observation.peer_seat[i, pick.action.peer[i]]),
        )
    )
  return cut_short(found)


def unread_of(decisions):
  """Tokens that were new to those who decided."""
  # The feature is log(1 + tokens / 100) / 3.
  column = observation.MY_FEATURES.index('unread')
  unread = decisions.observation.me[:, column].astype(float)
  return np.rint(100 * np.expm1(3 * unread)).astype(int)


def cut_short(turns):
  """Turns, some of which a dismissal ended."""
  fires = [t for t in turns if t.verb == 'fire' and lands(t)]
  cut = []
  for turn in turns:
    stops = [
        f.end_ms
        for f in fires
        if f.whom == turn.agent and turn.start_ms < f.end_ms < turn.end_ms
    ]
    cut.append(turn._replace(stop_ms=min([turn.stop_ms, *stops])))
  return cut


def lands(turn):
  return turn.end_ms <= turn.stop_ms


class Employment(NamedTuple):
  """A seat and the time that one agent spends on it."""

  seat: int
  hired_ms: int
  ready_ms: int  # It has read the task and the board.
  end_ms: int  # It is fired, or the clock stops.


def employments(number):
  """Who is there when, worked out from the chief's turns that land."""
  turns = turns_of(number)
  stop_ms = int(played().rollouts.time_ms[number])
  reading = lambda tokens: up_to_seconds(TOKEN_MS * tokens)
  posts = [t for t in turns if t.verb == 'post' and lands(t)]
  jobs = [
      Employment(seat, 0, reading(300), stop_ms)
      for seat in range(RULES.team_start[number])
  ]
  present = {job.seat: i for i, job in enumerate(jobs)}
  moves = [t for t in turns if t.verb in ('hire', 'fire') and lands(t)]
  for turn in sorted(moves, key=lambda t: t.end_ms):
    now_ms = turn.end_ms
    if turn.verb == 'fire':
      job = present.pop(turn.whom)
      jobs[job] = jobs[job]._replace(end_ms=now_ms)
    elif len(present) < RULES.team_limit[number]:
      seat = min(set(range(COLLECTIVE.num_agents)) - set(present))
      present[seat] = len(jobs)
      board = sum(t.tokens for t in posts if t.end_ms <= now_ms)
      ready_ms = now_ms + reading(300 + board)
      jobs.append(Employment(seat, now_ms, ready_ms, stop_ms))
  return jobs


def turns_during(job, number):
  return [
      turn
      for turn in turns_of(number)
      if turn.agent == job.seat and job.ready_ms <= turn.start_ms < job.end_ms
  ]


def test_the_sample_has_all_that_can_become_of_a_turn():
  landed = cut = late = 0
  for number, time_ms in enumerate(played().rollouts.time_ms):
    for turn in turns_of(number):
      landed += lands(turn)
      cut += not lands(turn) and turn.stop_ms < time_ms
      late += not lands(turn) and turn.stop_ms == time_ms
  assert landed > 500
  assert cut > 10
  assert late > 30


@pytest.mark.parametrize('number', range(BATCH))
def test_every_agent_is_always_at_exactly_one_turn(number):
  begun = 0
  for job in employments(number):
    free_ms = job.ready_ms
    for turn in turns_during(job, number):
      assert turn.start_ms == free_ms
      free_ms = turn.end_ms
      begun += 1
    assert free_ms >= job.end_ms  # Nobody idles until the end.
  assert begun == len(turns_of(number))  # And nobody acts at any other time.


@pytest.mark.parametrize('number', range(BATCH))
def test_everybody_reads_every_message_once(number):
  turns = turns_of(number)
  letters = [t for t in turns if t.verb in ('tell', 'post') and lands(t)]
  unread = dict(
      zip(turns, unread_of(of_one(played().decisions, number)), strict=True)
  )
  for job in employments(number):
    since_ms = job.hired_ms
    for turn in turns_during(job, number):
      news = sum(
          letter.tokens
          for letter in letters
          if since_ms < letter.end_ms <= turn.start_ms
          and letter.agent != job.seat
          and (letter.verb == 'post' or letter.whom == job.seat)
      )
      assert unread[turn] == news
      since_ms = turn.start_ms


@pytest.mark.parametrize('number', range(BATCH))
def test_turns_add_up(number):
  rollouts, _ = played()
  turns = turns_of(number)
  count = lambda chosen: [sum(t.verb == v for t in chosen) for v in VERBS]
  assert count(turns) == rollouts.turns[number].tolist()
  landed = count([t for t in turns if lands(t)])
  effective = rollouts.effective[number].tolist()
  assert all(x <= y for x, y in zip(effective, landed, strict=True))
  for verb in ('wait', 'post', 'fire'):  # These never fail.
    assert effective[VERBS.index(verb)] == landed[VERBS.index(verb)]


@pytest.mark.parametrize('number', range(BATCH))
def test_tokens_add_up(number):
  rollouts, _ = played()
  turns = turns_of(number)
  for verb, spent in zip(VERBS, rollouts.output_tokens[number], strict=True):
    mine = [t for t in turns if t.verb == verb]
    written = sum(
        t.tokens
        if lands(t)
        else t.tokens * (t.stop_ms - t.start_ms) // (t.end_ms - t.start_ms)
        for t in mine
    )
    unfinished = sum(not lands(t) for t in mine)
    # The library divides in float32, and may lose a token where it is exact.
    assert written - unfinished <= spent <= written, verb


def test_counts_add_up():
  for policy in (RECORDER, NETWORK):
    rollouts, table = played(policy)
    assert len(table.rollout) == rollouts.decisions == rollouts.turns.sum()
    assert table.trainable.all()


def test_the_clock_stops_at_the_deadline_or_when_all_is_done():
  rollouts, table = played()
  early = rollouts.time_ms < RULES.deadline_ms
  np.testing.assert_array_equal(
      rollouts.time_ms[~early], RULES.deadline_ms[~early]
  )
  assert (rollouts.progress[early] == 1).all()
  assert (table.start_ms < rollouts.time_ms[table.rollout]).all()
  assert (rollouts.progress_ms <= rollouts.time_ms).all()


def test_every_decision_is_legal_and_sees_finite_numbers():
  for policy in (RECORDER, NETWORK):
    table = played(policy).decisions
    legal = jax.vmap(functools.partial(observation.is_legal, COLLECTIVE.verbs))(
        table.observation, jax.tree.map(jnp.array, table.action)
    )
    assert legal.all()
    for x in (
        table.observation.me,
        table.observation.targets,
        table.observation.peers,
        table.log_prob,
    ):
      assert np.isfinite(x).all()


def test_progress_stays_within_its_bound():
  tasks, _ = inputs()
  turn_ms = jnp.array(COLLECTIVE.shortest_turn_ms())
  bounds = jax.vmap(COLLECTIVE.env.bounds, (0, 0, 0, None))(
      tasks, RULES.team_limit, RULES.deadline_ms, turn_ms
  )
  for policy in (RECORDER, NETWORK):
    progress = played(policy).rollouts.progress
    assert (progress <= bounds.progress + 1e-6).all()
    assert (progress > 0).any()
