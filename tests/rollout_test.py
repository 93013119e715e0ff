"""Tests of the packed event loop: reproducibility and conservation laws."""

import dataclasses
import functools
from typing import NamedTuple

from experiments import benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import observation
from rlcr_jax import rollout
from rlcr_jax.policies import scripted
from rlcr_jax.policies import transformer
from tests import by_hand

# All times are multiples of 10 ms before they are rounded up to seconds, so
# that what a turn takes can be worked out in integers.
COLLECTIVE = by_hand.make_collective(
    latency={'prefill_tokens_per_s': 100.0, 'spread': 0.3},
    organisation='ceo',
    num_agents=4,
    max_hires=3,
    task_tokens=300,
)
VERBS = [v.name for v in COLLECTIVE.verbs]
TOKEN_MS = 10  # Of reading it and of writing it.
# Every organisation, with and without channels and privileges; two deadlines
# are no whole number of seconds.
KINDS = (
    COLLECTIVE.config.rules(60_000),
    COLLECTIVE.config.rules(40_000, organisation='flat'),
    COLLECTIVE.config.rules(45_500),
    COLLECTIVE.config.rules(25_000, organisation='solo'),
    COLLECTIVE.config.rules(20_000, organisation='flat', direct=False),
    COLLECTIVE.config.rules(
        25_001, organisation='flat', awareness=True, free_facts=True
    ),
)
RULES = by_hand.batch_rules(KINDS * 6)
BATCH = len(RULES.deadline_ms)
CAPACITY = 2000
GRID_MS = jnp.arange(0, 64_000, 4000)


@dataclasses.dataclass(frozen=True)
class Recorder(scripted.RandomPolicy):
  """Random, with a restless chief.

  Instead of a log-probability it gives a draw from the decision's key.
  """

  def sample(self, params, keys, obs):
    action, _ = super().sample(params, keys, obs)
    draws = jax.vmap(jax.random.normal)(keys)
    hire, fire = COLLECTIVE.verb('hire'), COLLECTIVE.verb('fire')
    hires = obs.legal_verb[:, hire] & (draws < -0.5)
    fires = obs.legal_verb[:, fire] & (draws > 0.5)
    someone = jax.vmap(lambda key, legal: jax.random.uniform(key, legal.shape))
    whom = jnp.argmax(someone(keys, obs.legal_peer) * obs.legal_peer, axis=1)
    action = jax.tree.map(lambda x: jnp.where(hires | fires, 0, x), action)
    verb = jnp.where(hires, hire, jnp.where(fires, fire, action.verb))
    peer = jnp.where(fires, whom.astype(jnp.int32), action.peer)
    return action._replace(verb=verb, peer=peer), draws


RECORDER = Recorder(COLLECTIVE)
NETWORK = transformer.TransformerPolicy(
    COLLECTIVE, transformer.TransformerConfig(width=8, layers=1, heads=2)
)
TRACES = []


@functools.partial(jax.jit, static_argnames=('policy', 'chunk_size'))
def play_jit(policy, params, tasks, rules, keys, chunk_size):
  TRACES.append((policy, chunk_size, len(keys)))
  return rollout.play(
      COLLECTIVE,
      policy,
      params,
      tasks,
      rules,
      keys,
      chunk_size=chunk_size,
      capacity=CAPACITY,
      grid_ms=GRID_MS,
  )


@functools.cache
def params_of(policy):
  return policy.init(jax.random.key(7))


@functools.cache
def inputs(seed=0):
  """Tasks and keys of `BATCH` rollouts, each of a task of its own."""
  tasks, _, keys = rollout.group_inputs(
      COLLECTIVE, jax.random.key(seed), jnp.arange(BATCH), RULES, 1
  )
  return tasks, keys


class Played(NamedTuple):
  """Rollouts [B], and their decisions by rollout, agent and time."""

  rollouts: rollout.Rollouts
  decisions: rollout.decisions.Decision


def play(policy=RECORDER, chunk_size=32, rows=None, seed=0, rules=RULES):
  """Plays all rollouts, or the `rows` of them."""
  pick = lambda tree: jax.tree.map(lambda x: x[jnp.array(rows)], tree)
  batch = (*inputs(seed), rules)
  tasks, keys, rules = batch if rows is None else map(pick, batch)
  rollouts, buffer = play_jit(
      policy, params_of(policy), tasks, rules, keys, chunk_size
  )
  assert not buffer.overflow
  table = jax.tree.map(lambda x: np.asarray(x)[: buffer.count], buffer.rows)
  order = np.lexsort((table.start_ms, table.agent, table.rollout))
  return Played(
      jax.tree.map(np.asarray, rollouts),
      jax.tree.map(lambda x: x[order], table),
  )


@functools.cache
def played(policy=RECORDER, chunk_size=32):
  """What most tests look at, played once."""
  return play(policy, chunk_size)


def assert_equal(got, want):
  """Equal; numbers that are not counted may differ by rounding."""

  def check(x, y):
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    else:
      np.testing.assert_array_equal(x, y)

  jax.tree.map(check, got, want)


def of_collectives(rollouts):
  """All but what is of the loop, not of the collectives."""
  return rollouts._replace(iterations=None, decisions=None)


def of_one(table, number):
  """The decisions of one rollout."""
  rows = table.rollout == number
  return jax.tree.map(lambda x: x[rows], table)._replace(rollout=None)


# Reproducibility.


def test_the_sample_is_worth_looking_at():
  for policy in (RECORDER, NETWORK):
    rollouts, table = played(policy)
    assert rollouts.decisions > 800
    assert (rollouts.turns.sum(axis=0) > 0).all()  # Every verb occurs,
    assert (rollouts.effective.sum(axis=0) > 0).all()  # and does something.
    # More agents are free at once than fit into a chunk.
    assert np.unique(table.start_ms, return_counts=True)[1].max() > 32
  turns = [turn for number in range(BATCH) for turn in turns_of(number)]
  assert sum(is_cut(turn) for turn in turns) > 10


def test_same_seed_same_rollouts():
  jax.tree.map(np.testing.assert_array_equal, play(), play())


@pytest.mark.parametrize('chunk_size', [128, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
  small, large = played(NETWORK, 32), played(NETWORK, chunk_size)
  assert large.rollouts.iterations < small.rollouts.iterations
  assert large.rollouts.decisions == small.rollouts.decisions
  assert_equal(large.decisions, small.decisions)
  assert_equal(of_collectives(large.rollouts), of_collectives(small.rollouts))


@pytest.mark.parametrize(
    'policy, rows',
    [
        (RECORDER, [1]),
        (RECORDER, [2] * BATCH),
        (NETWORK, list(reversed(range(BATCH)))),
    ],
)
def test_the_batch_that_a_rollout_is_in_changes_nothing(policy, rows):
  batch, other = played(policy), play(policy, rows=rows)
  pick = jax.tree.map(lambda x: x[rows], of_collectives(batch.rollouts))
  assert_equal(of_collectives(other.rollouts), pick)
  for i, row in enumerate(rows):
    assert_equal(of_one(other.decisions, i), of_one(batch.decisions, row))


def test_the_packed_loop_equals_the_dense_scan():
  tasks, keys = inputs()
  states = jax.jit(
      lambda: benchmark.play_dense(
          COLLECTIVE, RECORDER, (), tasks, RULES, keys, ticks=60
      )
  )()
  packed = played().rollouts
  np.testing.assert_array_equal(states.done, True)
  np.testing.assert_array_equal(states.clock_ms, packed.time_ms)
  np.testing.assert_array_equal(states.progress_ms, packed.progress_ms)
  np.testing.assert_array_equal(states.peak_team, packed.team_size)
  np.testing.assert_array_equal(states.ledger.turns, packed.turns)
  np.testing.assert_array_equal(states.ledger.effective, packed.effective)
  np.testing.assert_array_equal(
      jax.vmap(COLLECTIVE.spent_tokens)(states), packed.output_tokens
  )
  progress = jax.vmap(COLLECTIVE.env.progress)(
      tasks, states.world, states.clock_ms
  )
  np.testing.assert_array_equal(progress, packed.progress)


def test_deadlines_organisations_and_channels_compile_nothing_anew():
  played()
  compiled = len(TRACES)
  for deadline_ms in (1, 7000, 33_333):
    play(rules=RULES._replace(deadline_ms=RULES.deadline_ms * 0 + deadline_ms))
  play(rules=jax.tree.map(lambda x: x[::-1], RULES))
  for organisation in ('solo', 'flat', 'ceo'):
    rules = COLLECTIVE.config.rules(
        9000, organisation=organisation, direct=False, board=False
    )
    play(rules=by_hand.batch_rules([rules] * BATCH))
  assert len(TRACES) == compiled


def test_seeds_differ_in_every_random_outcome():
  # Of the same tasks, and with agents that are all there from the start.
  rules = by_hand.batch_rules(
      [COLLECTIVE.config.rules(20_000, organisation='flat')] * BATCH
  )
  one, two = play(rules=rules).decisions, play(rules=rules, seed=1).decisions
  first = lambda table, part: part(table)[:100].tolist()
  for part in (
      lambda x: x.action.verb,
      lambda x: x.action.target,
      lambda x: x.action.peer,
      lambda x: x.action.symbol,
      lambda x: x.output_tokens,
      lambda x: x.start_ms,
      lambda x: x.log_prob,
  ):
    assert first(one, part) != first(two, part)
  for x, y in zip(inputs(0)[0], inputs(1)[0], strict=True):
    assert (x != y).any()  # Every part of the tasks.


def test_no_key_is_used_twice():
  table = played().decisions
  draws = table.log_prob  # Of the key of every decision.
  assert len(np.unique(draws)) == len(draws)
  # What a turn takes is drawn from another key than what it does.
  medians = np.array([v.output_tokens for v in COLLECTIVE.verbs])
  noise = np.log(table.output_tokens / medians[table.action.verb])
  assert abs(np.corrcoef(noise, draws)[0, 1]) < 0.15


# Groups.


def test_groups_share_a_task_and_no_key():
  rules = jax.tree.map(lambda x: x[:3], RULES)
  index = jnp.array([4, 0, 7])
  make = jax.jit(
      lambda index, rules: rollout.group_inputs(
          COLLECTIVE, jax.random.key(1), index, rules, 2
      )
  )
  tasks, repeated, keys = make(index, rules)
  for x in jax.tree.leaves((tasks, repeated)):
    np.testing.assert_array_equal(x[0::2], x[1::2])
  assert (tasks.effort[0] != tasks.effort[2]).any()
  np.testing.assert_array_equal(repeated.deadline_ms[::2], rules.deadline_ms)
  data = jax.random.key_data(keys)
  assert len({tuple(key) for key in data.tolist()}) == 6
  # A group does not depend on those beside it.
  alone = make(index[1:2], jax.tree.map(lambda x: x[1:2], rules))
  same = np.testing.assert_array_equal
  jax.tree.map(lambda x, y: same(x, y[2:4]), alone[0], tasks)
  same(jax.random.key_data(alone[2]), data[2:4])


# Conservation.


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
  """Tokens that were new to whom decided; the feature is log(1 + x / 100) / 3."""
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


def is_cut(turn):
  return not lands(turn) and turn.stop_ms < int(played().rollouts.time_ms.max())


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
  unread = dict(zip(turns, unread_of(of_one(played().decisions, number))))
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
  for verb in ('wait', 'tell', 'post', 'fire'):  # These never fail.
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


# Progress over time.


def test_the_curve_is_what_an_earlier_deadline_would_have_given():
  # Random agents do not look at the deadline, so a rollout under an earlier one
  # is the beginning of the rollout.
  curve = played().rollouts.curve
  for i, time_ms in enumerate(GRID_MS):
    limit_ms = jnp.minimum(RULES.deadline_ms, time_ms)
    earlier = play(rules=RULES._replace(deadline_ms=limit_ms)).rollouts
    np.testing.assert_array_equal(curve[:, i], earlier.progress)


def test_the_curve_rises_to_the_return():
  for policy in (RECORDER, NETWORK):
    rollouts = played(policy).rollouts
    assert (np.diff(rollouts.curve, axis=1) >= 0).all()
    assert (rollouts.curve[:, 0] == 0).all()
    np.testing.assert_array_equal(rollouts.curve[:, -1], rollouts.progress)
    changed = rollouts.curve[:, 1:] != rollouts.curve[:, :-1]
    last = np.where(changed, GRID_MS[1:], 0).max(axis=1)
    assert (rollouts.progress_ms <= last).all()
    assert (rollouts.progress_ms > last - 4000).all()


def test_a_full_buffer_stops_the_loop_and_says_so():
  tasks, keys = inputs()
  rollouts, buffer = jax.jit(
      lambda: rollout.play(
          COLLECTIVE,
          RECORDER,
          (),
          tasks,
          RULES,
          keys,
          chunk_size=32,
          capacity=100,
      )
  )()
  assert buffer.overflow
  assert buffer.count <= 100
  assert rollouts.decisions < played().rollouts.decisions
