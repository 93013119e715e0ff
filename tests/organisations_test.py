"""Tests of what sets each organisation apart, in play and in learning."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib
from rlcr_jax import rollout
from rlcr_jax import train
from rlcr_jax.policies import scripted
from tests import by_hand
from tests import tiny
from tests.by_hand import Game

LATE_MS = 60_000


def legal(game, agent, verb):
  """The targets of a legal verb; None where it is not legal."""
  obs, index = game.observe(agent), game.collective.verb(verb)
  if not obs.legal_verb[index]:
    return None
  return np.flatnonzero(obs.legal_target[index]).tolist()


def peers(game, agent):
  obs = game.observe(agent)
  return sorted(np.asarray(obs.peer_seat)[np.asarray(obs.legal_peer)].tolist())


# Orchestrator.


def orchestrated():
  """Agent 0 has hired 1 and 2, who have read the task: it is 11 s."""
  game = Game(LATE_MS, organisation='orchestrator').advance()
  game.act(0, 'hire').advance().act(0, 'hire').advance()
  game.act(0, 'wait', end_ms=11_000).advance().act(1, 'wait', end_ms=11_000)
  game.advance().act(2, 'wait', end_ms=11_000).advance()
  assert (game.now_ms, game.ready) == (11_000, [0, 1, 2])
  return game


def test_sub_agents_talk_to_the_orchestrator_alone():
  game = orchestrated()
  assert peers(game, 0) == [1, 2]
  assert peers(game, 1) == peers(game, 2) == [0]
  assert legal(game, 0, 'post') is None and legal(game, 1, 'post') is None
  assert legal(game, 1, 'hire') is None


def test_sub_agents_act_on_what_they_were_told_of_last():
  game = orchestrated()
  assert legal(game, 0, 'work') == [0, 1]
  assert legal(game, 1, 'work') is None  # Nothing has been assigned.
  game.act(0, 'tell', 1, peer=1).act(1, 'wait').act(2, 'wait').advance()
  assert game.now_ms == 12_000
  assert legal(game, 1, 'work') == [1]
  assert legal(game, 2, 'work') is None
  game.act(1, 'wait').act(2, 'wait').act(0, 'tell', 0, peer=1).advance()
  assert legal(game, 1, 'work') == [0]
  game.act(1, 'work', 0).act(0, 'wait').act(2, 'wait').advance(2)
  assert legal(game, 1, 'work') is None  # It is done.


def test_sub_agents_may_read_what_they_like():
  game = orchestrated().act(0, 'work', 0).act(1, 'wait').act(2, 'wait')
  game.advance(2)
  assert legal(game, 1, 'read') == [0]


def test_hires_of_a_ceo_are_bound_by_none_of_this():
  game = Game(LATE_MS, organisation='ceo').advance().act(0, 'hire').advance()
  game.act(0, 'wait', end_ms=8000).advance()
  assert legal(game, 1, 'work') == [0, 1]
  assert legal(game, 1, 'post') == [0, 1]


# Critical steps: a stage counts 1, and the busiest of the others.


def test_critical_steps():
  game = Game(LATE_MS).advance()
  steps = lambda: int(game.collective.steps(game.state))
  act = lambda agent, end_s: game.act(agent, 'wait', end_ms=1000 * end_s)
  assert steps() == 0  # Reading the task is no step.
  act(0, 9), act(1, 4), act(2, 6)
  game.advance()  # 4 s: all three began a turn.
  assert steps() == 1 + 1
  act(1, 5)
  game.advance()
  assert steps() == 1 + 2
  act(1, 6)
  game.advance()  # 6 s: three turns of 1, one of 2.
  assert steps() == 1 + 3
  act(2, 9), act(1, 9)
  game.advance()  # 9 s: four turns of 1, two of 2, and all are free.
  assert steps() == 1 + 4
  act(0, 10), act(1, 12), act(2, 12)
  game.advance()  # A new stage, in which each has begun one.
  assert steps() == 1 + 4 + 1 + 1
  act(0, 11)
  game.advance()
  assert steps() == 1 + 4 + 1 + 1 + 1


def test_critical_steps_count_what_begins_at_one_instant_in_any_order():
  for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
    game = Game(LATE_MS).advance()
    for _ in range(3):
      for agent in order:
        game.act(agent, 'wait')
      game.advance()
    assert game.collective.steps(game.state) == 3 * (1 + 1)


@pytest.mark.parametrize('limit', [1, 2, 3, 4, 7])
def test_a_limit_of_critical_steps_is_never_exceeded(limit):
  collective = by_hand.make_collective(
      organisation='ceo', max_critical_steps=limit
  )
  policy = scripted.RandomPolicy(collective)
  rollouts = play(collective, policy, 32, 60_000)
  assert rollouts.critical_steps.max() == limit
  assert rollouts.time_ms.max() < 60_000  # All of them ended by it.
  # What began within the limit has landed.
  assert rollouts.effective.sum() > 0


def play(collective, policy, tasks, deadline_ms, seed=0, **rules):
  rules = collective.rules(deadline_ms, **rules)
  rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (tasks,)), rules)
  key = jax.random.key(seed)

  @jax.jit
  def run(key, rules):
    return rollout.play_groups(
        collective,
        policy,
        (),
        key,
        jnp.arange(tasks),
        rules,
        group_size=1,
        chunk_size=32,
    )[0]

  return jax.tree.map(np.asarray, run(key, rules))


def test_without_a_limit_nothing_ends_early():
  collective = by_hand.make_collective(organisation='ceo')
  policy = scripted.RandomPolicy(collective)
  rollouts = play(collective, policy, 32, 20_000)
  assert rollouts.time_ms.min() == 20_000
  assert rollouts.critical_steps.max() > 7


# Frozen agents.


def start(config):
  run = train.build(config)
  return run, run.init()


def update(run, state, deadline_ms=60_000, step=0):
  rules = run.rules('collective', jnp.full((4,), deadline_ms))
  return tiny.learn(run.learner, state, rules, run.config.rlcr.knobs(step, 10))


ORCHESTRATED = {'collective__organisation': 'orchestrator'}


@functools.cache
def buffer_of(seed_of_params, seed_of_frozen):
  """The decisions of eight orchestrated collectives."""
  run, state = start(tiny.config(**ORCHESTRATED))
  part = tiny.only(run.learner.parts)
  params = [
      part.policy.init(jax.random.key(seed))
      for seed in (seed_of_params, seed_of_frozen)
  ]
  rules = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (8,)), part.collective.rules(90_000)
  )

  @jax.jit
  def play_it(params, frozen, key, rules):
    return rollout.play_groups(
        part.collective,
        part.policy,
        params,
        key,
        jnp.arange(8),
        rules,
        group_size=1,
        chunk_size=32,
        capacity=800,
        frozen=frozen,
    )[1]

  buffer = play_it(*params, state.key, rules)
  rows = jax.tree.map(lambda x: np.asarray(x)[: buffer.count], buffer.rows)
  return part, params, rows


def test_only_the_chief_is_trained_where_the_others_are_frozen():
  _, _, rows = buffer_of(1, 2)
  assert (rows.agent > 0).sum() > 20
  np.testing.assert_array_equal(rows.trainable, rows.agent == 0)


def test_frozen_agents_are_played_by_the_snapshot():
  part, (params, frozen), rows = buffer_of(1, 2)
  score = jax.jit(part.policy.log_prob)
  by_live = score(params, rows.observation, rows.action)[0]
  by_frozen = score(frozen, rows.observation, rows.action)[0]
  wanted = np.where(rows.trainable, by_live, by_frozen)
  np.testing.assert_allclose(rows.log_prob, wanted, atol=1e-5)
  assert np.abs(by_live - by_frozen).max() > 1e-3


@pytest.mark.parametrize('every, fresh', [(0, []), (2, [2])])
def test_the_snapshot_is_refreshed_now_and_then(every, fresh):
  config = tiny.config(**ORCHESTRATED, collective__refresh_every=every)
  run, state = start(config)
  first = jax.device_get(state.params)
  same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
  assert same(state.frozen, first)
  played_with = first
  for step in range(4):
    before = jax.device_get(state.params)
    if step in fresh:
      played_with = before
    state, _ = update(run, state, step=step)
    assert same(jax.device_get(state.frozen), played_with)
    assert not same(jax.device_get(state.params), before)


def test_a_run_with_a_snapshot_goes_on_where_it_stopped(tmp_path):
  config = tiny.config(**ORCHESTRATED, collective__refresh_every=3)
  for arm in ('whole', 'again'):
    train.train(config, tmp_path / arm)
  done = train.build(config)
  states = []
  for arm in ('whole', 'again'):
    states.append(train.train_arm(done, 'collective', tmp_path / arm))
  data = lambda s: (jax.device_get(s.params), jax.device_get(s.frozen))
  jax.tree.map(np.testing.assert_array_equal, *map(data, states))


def test_a_language_model_cannot_be_orchestrated():
  with pytest.raises(ValueError, match="organisation='orchestrator'"):
    train.checked(tiny.config(**ORCHESTRATED, policy__name='llm'))


# Islands.


ISLANDS = by_hand.make_collective(
    organisation='flat', islands=4, island_size=2, latency={'spread': 0.3}
)


def apart(tasks=6, rules=None):
  """Every island's rollout, [tasks * 4]."""
  policy = scripted.RandomPolicy(ISLANDS)
  given = rules or ISLANDS.rules(20_000)
  given = jax.tree.map(lambda x: jnp.broadcast_to(x, (tasks,)), given)
  inputs = rollout.group_inputs(
      ISLANDS, jax.random.key(0), jnp.arange(tasks), given, 1
  )

  @jax.jit
  def run(inputs):
    return rollout.play(
        ISLANDS,
        policy,
        (),
        *inputs,
        chunk_size=32,
        grid_ms=jnp.arange(0, 20_000, 4000),
    )[0]

  return inputs, run, jax.tree.map(np.asarray, run(inputs))


def test_islands_have_the_same_task_and_worlds_and_chance_of_their_own():
  (tasks, rules, keys), _, played = apart()
  assert rules.island.tolist() == [0, 1, 2, 3] * 6
  for leaf in jax.tree.leaves(tasks):
    rows = np.asarray(leaf).reshape(6, 4, -1)
    np.testing.assert_array_equal(rows, rows[:, :1] + np.zeros_like(rows))
  assert len(np.unique(jax.random.key_data(keys), axis=0)) == 24
  differ = played.turns.reshape(6, 4, -1)
  assert (differ[:, 0] != differ[:, 1]).any(axis=1).sum() >= 5


def test_islands_cannot_read_each_other():
  (tasks, rules, keys), run, played = apart()
  # Island 0 gets another world and other chance; island 2, another deadline.
  other = jax.random.split(jax.random.key(99), 24)
  at = lambda island: rules.island == island
  keys = jax.random.wrap_key_data(
      jnp.where(
          at(0)[:, None], jax.random.key_data(other), jax.random.key_data(keys)
      )
  )
  rules = rules._replace(deadline_ms=jnp.where(at(2), 9000, rules.deadline_ms))
  changed = jax.tree.map(np.asarray, run((tasks, rules, keys)))
  odd = np.asarray(rules.island) % 2 == 1
  for field in ('progress', 'turns', 'effective', 'output_tokens', 'curve'):
    before, after = getattr(played, field), getattr(changed, field)
    np.testing.assert_array_equal(after[odd], before[odd])
    assert (after[~odd] != before[~odd]).any()


def test_the_best_island_counts_and_all_its_like_are_paid_for():
  _, _, played = apart()
  merged = rollout.merge_islands(played, 4)
  by_island = lambda x: x.reshape(6, 4, *x.shape[1:])
  best = by_island(played.progress).argmax(1)
  np.testing.assert_array_equal(
      merged.progress, by_island(played.progress).max(1)
  )
  assert len(set(best.tolist())) > 1  # It is not always the same.
  np.testing.assert_array_equal(
      merged.output_tokens, by_island(played.output_tokens).sum(1)
  )
  np.testing.assert_array_equal(merged.team_size, [8] * 6)
  np.testing.assert_array_equal(merged.time_ms, [20_000] * 6)
  for task in range(6):
    progress = by_island(played.progress)[task]
    when = by_island(played.progress_ms)[task]
    winners = progress == progress.max()
    assert merged.progress_ms[task] == when[winners].min()
  assert merged.decisions == played.decisions


def test_one_island_is_no_island():
  _, _, played = apart()
  assert rollout.merge_islands(played, 1) is played


def test_one_agent_alone_plays_on_one_island():
  solo = ISLANDS.rules(20_000, organisation='solo')
  (_, rules, _), _, played = apart(rules=solo)
  assert rules.team_start.tolist() == [1, 0, 0, 0] * 6
  merged = rollout.merge_islands(played, 4)
  first = jax.tree.map(lambda x: x[::4] if x.ndim else x, played)
  for field in ('progress', 'progress_ms', 'time_ms', 'turns', 'team_size'):
    np.testing.assert_array_equal(getattr(merged, field), getattr(first, field))
  assert played.turns.reshape(6, 4, -1)[:, 1:].sum() == 0


def test_an_island_knows_which_it_is():
  game = Game(LATE_MS, ISLANDS)
  seen = []
  for island in range(4):
    game.rules = game.rules._replace(island=jnp.int32(island))
    seen.append(np.asarray(game.observe(0).me))
  assert len(np.unique(np.stack(seen), axis=0)) == 4
  plain = by_hand.make_collective(organisation='flat', num_agents=2)
  assert len(seen[0]) == len(Game(LATE_MS, plain).observe(0).me) + 8


def test_all_agents_of_all_islands_share_one_advantage_and_are_trained():
  config = tiny.config(
      collective__organisation='flat',
      collective__islands=3,
      collective__island_size=1,
  )
  run, state = start(config)
  part = tiny.only(run.learner.parts)
  rules = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (4,)), part.collective.rules(60_000)
  )
  play_it = functools.partial(
      rollout.play_groups,
      part.collective,
      part.policy,
      group_size=2,
      chunk_size=32,
      capacity=2000,
  )
  rollouts, buffer = jax.jit(play_it)(
      state.params, state.key, jnp.arange(4), rules
  )
  assert rollouts.progress.shape == (8,)
  rows = jax.tree.map(lambda x: np.asarray(x)[: buffer.count], buffer.rows)
  assert set(rows.rollout.tolist()) == set(range(8))
  assert set(rows.agent.tolist()) == {0, 1, 2}
  turns = np.bincount(rows.rollout, minlength=8)
  np.testing.assert_array_equal(turns, rollouts.turns.sum(axis=1))
  state, update_ = update(run, state)
  assert update_.finite and update_.rollouts.team_size.tolist() == [3] * 16


@pytest.mark.parametrize(
    'changes, field',
    [
        ({'islands': 0}, 'collective.islands=0'),
        ({'island_size': -1}, 'collective.island_size=-1'),
        ({'refresh_every': -1}, 'collective.refresh_every=-1'),
        ({'max_critical_steps': -1}, 'collective.max_critical_steps=-1'),
    ],
)
def test_refused(changes, field):
  with pytest.raises(ValueError, match=field):
    collective_lib.CollectiveConfig(**changes)


# What is switched off.


OFF = {
    'refresh_every': {'refresh_every': 1},
    'costs of channels that are closed': {
        'issue_tokens': 7.0,
        'archive_tokens': 9.0,
        'look_up_tokens': 9.0,
        'look_up_tool_ms': 9,
    },
}


@functools.cache
def two_updates(**changes):
  run, state = start(
      tiny.config(**{f'collective__{k}': v for k, v in changes.items()})
  )
  for step in range(2):
    state, _ = update(run, state, step=step)
  return jax.device_get(state.params)


@pytest.mark.parametrize('what', OFF)
def test_what_is_switched_off_changes_no_bit(what):
  jax.tree.map(
      np.testing.assert_array_equal, two_updates(**OFF[what]), two_updates()
  )


# The issue board and the archive, in play.


SHARED = by_hand.make_collective(
    issues=True,
    archive=True,
    issue_tokens=20.0,
    archive_tokens=50.0,
    look_up_tokens=10.0,
    look_up_tool_ms=2900,
)


def shared(**rules):
  return Game(LATE_MS, SHARED, **rules).advance()


def column(game, agent, offset):
  """A column of the issue board or the archive, counted from the last."""
  return np.asarray(game.observe(agent).targets)[:, offset].tolist()


# Of the columns that are added: open, claimed, closed, mine, 8 waves of the
# owner, recency, archived.
OPENED, CLAIMED, CLOSED, MINE, ARCHIVED = -14, -13, -12, -11, -1


def rest(game, *agents):
  """They wait for one second, however much they have to read."""
  for agent in agents:
    game.act(agent, 'wait', end_ms=game.now_ms + 1000)
  return game


def test_an_item_is_opened_claimed_and_closed():
  game = shared()
  assert legal(game, 0, 'open') == [0, 1]  # What there is to do now.
  assert legal(game, 0, 'claim') is None and legal(game, 0, 'close') is None
  rest(game.act(0, 'open', 1), 1, 2).advance()
  for agent in range(3):
    assert column(game, agent, OPENED) == [0, 1, 0, 0]
    assert legal(game, agent, 'open') == [0]
    assert legal(game, agent, 'claim') == [1]
    assert legal(game, agent, 'close') == [1]
  rest(game.act(2, 'claim', 1), 0, 1).advance()
  for agent in range(3):
    assert column(game, agent, CLAIMED) == [0, 1, 0, 0]
    assert column(game, agent, MINE) == [0, float(agent == 2), 0, 0]
    assert legal(game, agent, 'claim') is None
    assert legal(game, agent, 'close') == ([1] if agent == 2 else None)
  rest(game.act(2, 'close', 1), 0, 1).advance()
  assert column(game, 0, CLOSED) == [0, 1, 0, 0]
  assert column(game, 0, CLAIMED) == [0, 0, 0, 0]
  assert legal(game, 0, 'open') == [0, 1]
  assert game.booked('effective') == {
      'open': 1,
      'claim': 1,
      'close': 1,
      'wait': 6,
  }


def test_the_issue_board_is_read_by_all_at_the_price_of_reading():
  game = shared().act(0, 'open', 1, output_tokens=70)
  game.act(1, 'wait', end_ms=game.now_ms + 2000).act(2, 'wait').advance()
  np.testing.assert_array_equal(game.state.mail.unread, [0, 0, 0])
  game.act(2, 'wait').advance()
  np.testing.assert_array_equal(game.state.mail.unread, [0, 70, 70])
  assert game.state.mail.board_tokens == 70  # A newcomer would read it too.


def test_of_two_claims_one_counts():
  game = shared().act(0, 'open', 0).act(1, 'wait').act(2, 'wait').advance()
  game.act(1, 'claim', 0).act(2, 'claim', 0).act(0, 'wait').advance()
  assert game.state.mail.issues.owner.tolist() == [1, -1, -1, -1]
  assert game.booked('effective')['claim'] == 1
  assert game.booked('turns')['claim'] == 2


def test_a_claim_ends_when_its_owner_is_fired():
  game = shared(organisation='ceo').act(0, 'hire').advance()
  game.act(0, 'open', 0, end_ms=8000).advance()
  game.act(1, 'claim', 0, end_ms=9000).act(0, 'wait', end_ms=9000).advance()
  assert game.state.mail.issues.owner[0] == 1
  game.act(0, 'fire', peer=1).act(1, 'wait', end_ms=20_000).advance()
  assert column(game, 0, OPENED) == [1, 0, 0, 0]
  assert game.state.mail.issues.owner[0] == -1
  assert legal(game, 0, 'claim') == [0]


def test_an_archive_entry_survives_the_firing_of_its_author():
  game = shared(organisation='ceo').act(0, 'hire').advance()
  game.act(0, 'wait', end_ms=8000).advance()
  game.act(1, 'work', 0, end_ms=10_000).act(0, 'wait', end_ms=10_000).advance()
  assert legal(game, 1, 'archive') == [0]
  assert legal(game, 0, 'archive') is None  # It does not know it.
  game.act(1, 'archive', 0, end_ms=11_000).act(0, 'wait', end_ms=11_000)
  game.advance()
  assert column(game, 0, ARCHIVED) == [1, 0, 0, 0]
  assert legal(game, 1, 'look_up') is None  # It knows it.
  game.act(0, 'fire', peer=1).act(1, 'wait', end_ms=30_000).advance()
  assert not game.state.present[1] and not game.state.knows[0, 0]
  assert legal(game, 0, 'look_up') == [0]
  game.act(0, 'look_up', 0).advance()
  assert game.now_ms == 12_000 + 3000  # 10 tokens, and 2.9 s of reading.
  assert game.state.knows[0, 0]
  assert game.booked('effective')['look_up'] == 1


def test_the_archive_costs_nobody_else_anything():
  game = shared().act(0, 'work', 0).act(1, 'wait').act(2, 'wait').advance(2)
  game.act(0, 'archive', 0).advance()
  np.testing.assert_array_equal(game.state.mail.unread, [0, 0, 0])
  assert game.state.mail.board_tokens == 0


@pytest.mark.parametrize('channel', ['issues', 'archive'])
def test_a_channel_that_is_cut_takes_and_gives_nothing(channel):
  game = shared(**{channel: False}).act(0, 'work', 0).act(1, 'wait')
  game.act(2, 'wait').advance(2)
  cut = {'issues': ('open', 'claim'), 'archive': ('archive', 'look_up')}
  for name, verbs in cut.items():
    for verb in verbs[:1]:
      assert (legal(game, 0, verb) is None) == (name == channel)


def test_channels_that_are_not_configured_add_no_verb_and_no_column():
  plain = by_hand.make_collective()
  names = [v.name for v in plain.verbs]
  added = ['open', 'claim', 'close', 'archive', 'look_up']
  assert not set(names) & set(added)
  assert [v.name for v in SHARED.verbs if v.name not in names] == added
  width = lambda game: game.observe(0).targets.shape[1]
  assert width(shared()) == width(Game(LATE_MS, plain)) + 14
  talks = {v.name for v in SHARED.verbs if v.talks}
  assert talks == {'tell', 'post', *added}


# Firing that pays.


def test_firing_one_who_chatters_saves_its_readers_time():
  """1 posts all the time, and the chief has to read all of it.

  A post of 2000 tokens takes the chief 2 s to read. With it, a unit of work
  takes 2 + 2 s; without, 2 s.
  """

  def spent_ms(fires):
    game = Game(LATE_MS, organisation='ceo').advance().act(0, 'hire').advance()
    game.act(0, 'wait', end_ms=8000).advance()
    if fires:
      game.act(1, 'post', 0, output_tokens=2000, end_ms=9000)
      game.act(0, 'fire', peer=1, end_ms=8500).advance()
      assert 'post' not in game.booked('effective')  # Lost in flight.
      assert not game.state.mail.unread.any()
    for _ in range(2):
      if not fires:
        game.act(1, 'post', 0, output_tokens=2000, end_ms=game.now_ms + 500)
        game.act(0, 'wait', end_ms=game.now_ms + 500).advance()
      start_ms = game.now_ms
      game.act(0, 'work', 1)
      if not fires:
        game.act(1, 'wait', end_ms=50_000)
      game.advance()
      took_ms = game.now_ms - start_ms
    return took_ms

  assert spent_ms(fires=False) == 4000
  assert spent_ms(fires=True) == 2000


def test_the_team_of_an_island_is_that_of_the_config():
  config = dataclasses.replace(ISLANDS.config, island_size=0)
  assert config.seats == 3 and ISLANDS.config.seats == 2
