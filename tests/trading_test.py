"""Tests of trading, on a market small enough for a hand.

asset      0     1     2     3
partner    2     3     1     0      a ring: 0, 2, 1, 3
drift      2    -1   -0.5   1.5     half its own part, half its partner's
signal    2.5  -2.5  1.25   0.5
estimate  1.5  -0.8  -0.5   1.2     0.4 times both signals, as noise is 1/2
public           x

Two lots may be held; the optimum is 2 + 1.5. The market closes after 100 ms.
"""

import dataclasses
import functools

from envs import base
from envs import conformance
from envs import random_play
from envs import trading
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

RESEARCH, BUY, SELL = trading.RESEARCH, trading.BUY, trading.SELL
ENV = trading.Trading(num_assets=4, risk_budget=2, horizon_ms=100)
APART = dataclasses.replace(ENV, combination=0.0)
ALL = range(4)
PARTNER = np.array([2, 3, 1, 0])


def assets(*which):
  """[M] bool, these assets."""
  return jnp.zeros((4,), bool).at[jnp.array(which, int)].set(True)


TASK = trading.Task(
    needs=jnp.asarray(PARTNER[:, None] == np.arange(4)[None, :]),
    place=jnp.array([0, 2, 1, 3]),
    drift=jnp.array([2.0, -1.0, -0.5, 1.5]),
    signal=jnp.array([2.5, -2.5, 1.25, 0.5]),
    private=~assets(1),
    optimum=jnp.float32(3.5),
)


def make_world(researched=(), position=(0, 0, 0, 0), booked=(0, 0, 0, 0)):
  position, booked = np.int32(position), np.int32(booked)
  return trading.World(
      assets(*researched), jnp.array(position), jnp.array(booked)
  )


def look(researched=(), position=(0, 0, 0, 0), known=ALL, env=ENV, task=TASK):
  """A view, and its columns by name."""
  view = env.view(task, make_world(researched, position), assets(*known))
  columns = np.array(view.features).T
  return view, dict(zip(env.feature_names, columns, strict=True))


def column(name, *args, **kwargs):
  """One column of a view, as a list of rounded numbers."""
  return [round(float(x), 4) for x in look(*args, **kwargs)[1][name]]


def land(world, *rows, knows=None, now_ms=10, env=ENV):
  """Lands turns given as (verb, asset), or (verb, asset, lands)."""
  rows = [(*row, True)[:3] for row in rows]
  verb, target, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, verb * 0, lands, jnp.int32(now_ms))
  knows = jnp.zeros((len(rows), 4), bool) if knows is None else knows
  world, knows, outcome = env.land(TASK, world, turns, knows, None)
  return world, np.argwhere(knows).tolist(), outcome.effective.tolist()


def trade(position, *rows, now_ms=10):
  """Positions, bookings and who was effective."""
  world, knows, effective = land(
      make_world(ALL, position), *rows, now_ms=now_ms
  )
  assert not knows
  return world.position.tolist(), world.booked.tolist(), effective


@pytest.mark.parametrize(
    'researched, known, expected',
    [
        ((), ALL, [0, 0, 0, 0]),
        ((0,), ALL, [1.0, 0, 0, 1.0]),  # It is also the partner of 3.
        ((0, 2), ALL, [1.5, 0, 0.5, 1.0]),
        (ALL, ALL, [1.5, -0.8, -0.5, 1.2]),
        (ALL, (0,), [1.0, -1.0, -1.0, 1.0]),  # And 1, which is public.
        ((0,), (1, 2, 3), [0, 0, 0, 0]),
    ],
)
def test_estimates_worked_by_hand(researched, known, expected):
  assert column('estimate', researched, known=known) == expected


def test_an_estimate_is_the_mean_of_the_drift_given_the_signals():
  """By regression over many markets: slope 1, and no slope on the rest."""
  env = trading.Trading(combination=0.3, noise=0.7, coupling=0.0)
  tasks = jax.vmap(env.sample_task)(jax.random.split(jax.random.key(0), 2000))
  world = trading.World(tasks.private | True, tasks.place * 0, tasks.place * 0)
  view = jax.jit(jax.vmap(env.view))(tasks, world, tasks.private)
  estimate = view.features[..., env.feature_names.index('estimate')].ravel()
  x = np.stack([estimate, tasks.signal.ravel()])
  slopes = np.linalg.solve(x @ x.T, x @ tasks.drift.ravel())
  np.testing.assert_allclose(slopes, [1.0, 0.0], atol=0.02)


def test_without_noise_an_estimate_is_the_drift():
  env = dataclasses.replace(ENV, noise=0.0)
  task = env.sample_task(jax.random.key(3))
  np.testing.assert_allclose(
      column('estimate', ALL, env=env, task=task), task.drift, atol=1e-4
  )


@pytest.mark.parametrize(
    'researched, position, known, expected',
    [
        (ALL, (0, 0, 0, 0), ALL, [1, 0, 0, 1]),  # The two largest.
        ((0, 2), (0, 0, 0, 0), ALL, [1, 0, 0, 0]),
        ((1, 2, 3), (0, 0, 0, 0), ALL, [0, -1, -1, 0]),
        (ALL, (0, -1, 1, 0), ALL, [1, 0, 0, 1]),
        # Those that one cannot judge stay, and use up the budget.
        ((0, 2), (0, -1, 0, 0), ALL, [1, -1, 0, 0]),
        ((0, 2), (0, -1, 0, 1), ALL, [0, -1, 0, 1]),
        ((1, 2, 3), (0, 0, 0, 1), ALL, [0, -1, 0, 1]),
        # 1 is public and so are 1 and 3 to who knows 3.
        (ALL, (1, 0, 0, 0), (3,), [1, -1, 0, 0]),
        ((), (1, 0, -1, 0), ALL, [1, 0, -1, 0]),
    ],
)
def test_the_desired_portfolio(researched, position, known, expected):
  assert column('desired', researched, position, known) == expected


def test_a_signal_of_zero_is_no_reason_to_trade():
  task = TASK._replace(signal=jnp.zeros((4,)))
  assert column('desired', ALL, (1, 0, 0, 0), task=task) == [0, 0, 0, 0]


def test_an_estimate_of_zero_takes_no_side():
  task = TASK._replace(signal=jnp.zeros((4,)))
  assert legal(ALL, (1, 0, 0, 0), task=task) == [[], [], [0]]


def test_of_equal_estimates_the_first_is_desired():
  task = TASK._replace(signal=jnp.ones((4,)))
  assert column('desired', ALL, task=task) == [1, 1, 0, 0]


def legal(*args, **kwargs):
  """Assets per verb."""
  return [
      np.flatnonzero(row).tolist() for row in look(*args, **kwargs)[0].legal
  ]


@pytest.mark.parametrize(
    'researched, position, known, expected',
    [
        ((), (0, 0, 0, 0), ALL, [[0, 1, 2, 3], [], []]),
        ((0,), (0, 0, 0, 0), ALL, [[1, 2, 3], [], []]),
        # Not 2: it needs 1. One opens on the side of one's estimate.
        ((0, 2), (0, 0, 0, 0), ALL, [[1, 3], [0], []]),
        (ALL, (0, 0, 0, 0), ALL, [[], [0, 3], [1, 2]]),
        # And closes on whatever side.
        (ALL, (1, 0, 0, 0), ALL, [[], [3], [0, 1, 2]]),
        (ALL, (0, -1, 0, 0), ALL, [[], [0, 1, 3], [2]]),
        (ALL, (-1, 1, 0, 0), ALL, [[], [0], [1]]),  # The budget is used up.
        (ALL, (1, -1, 0, 0), ALL, [[], [1], [0]]),
        (ALL, (0, 0, 0, 0), (), [[0, 2, 3], [], []]),  # 1 is public.
        (ALL, (0, 0, 0, 0), (3,), [[0, 2], [], [1]]),
        (ALL, (0, 0, 0, 0), (0,), [[2, 3], [], []]),  # Not 3: not known itself.
    ],
)
def test_what_is_legal(researched, position, known, expected):
  assert legal(researched, position, known) == expected


def test_without_combination_no_partner_is_needed():
  task = TASK._replace(needs=jnp.zeros((4, 4), bool))
  look_apart = functools.partial(column, env=APART, task=task)
  assert legal((2,), env=APART, task=task) == [[0, 1, 3], [2], []]
  assert look_apart('estimate', (2,)) == [0, 0, 1, 0]  # 0.8 times 1.25.
  assert look_apart('partner_known', ()) == [1, 1, 1, 1]
  assert look_apart('wanted', ALL) == [1, 0, 1, 1]
  assert not APART.sample_task(jax.random.key(0)).needs.any()


def test_features_of_a_hand_worked_view():
  seen = functools.partial(column, researched=(0, 1, 2), known=(0, 2))
  # Known are 0 and 2, and 1, which is public; so 0 and 2 are judged.
  assert seen('open') == [1, 1, 1, 1]
  assert seen('missing') == [0, 1, 0, 0]  # 1 needs 3.
  assert seen('blocks_me') == [0, 0, 0, 1]
  assert seen('wanted') == [2, 0, 2, 0]
  assert seen('known') == [1, 1, 1, 0]
  assert seen('signal') == [2.5, -2.5, 1.25, 0]
  assert seen('partner_known') == [1, 0, 1, 1]
  assert seen('desired') == [1, 0, -1, 0]
  assert seen('turns_left') == [1, 2, 1, 2]
  assert column('turns_left', ()) == [3, 3, 3, 3]
  assert column('turns_left', ALL, (-1, 0, 0, 1)) == [2, 0, 0, 0]
  assert column('position', (), (1, 0, -1, 0)) == [1, 0, -1, 0]
  assert column('lots_left', (), (0, 0, -1, 0)) == [0.5] * 4
  # A budget that is used up leaves nothing to do in 1, whatever one learns.
  full = functools.partial(seen, position=(1, 0, -1, 0))
  assert full('open') == [1, 0, 1, 1]
  assert full('missing') == [0, 1, 0, 0]
  assert full('blocks_me') == [0, 0, 0, 0]


def test_the_value_is_the_estimated_gain():
  # Times M / budget, per standard deviation of a drift: 1 / sqrt(2).
  unit = 2 * np.sqrt(2)
  typical = np.sqrt(2 / np.pi) / np.sqrt(2)
  expected = [1.5, typical, 0.5, typical]
  value = column('value', (0, 1, 2), known=(0, 2))
  np.testing.assert_allclose(value, unit * np.array(expected), atol=1e-3)
  value = column('value', ALL, (-1, 1, 0, 1))  # From short to long: twice.
  np.testing.assert_allclose(
      value, unit * np.array([3.0, 0.8, 0, 0]), atol=1e-3
  )


def order(*args, **kwargs):
  """Open assets, largest priority first."""
  _, columns = look(*args, **kwargs)
  return np.argsort(-columns['priority'], kind='stable').tolist()


def test_trades_come_before_research_and_pairs_are_completed():
  assert order(()) == [0, 2, 1, 3]  # Along the ring.
  assert order((2,))[:2] == [0, 1]  # Either makes a pair with 2.
  assert order((0,))[:2] == [2, 3]  # Likewise; along the ring.
  assert order((0, 1))[0] == 2  # Two pairs.
  assert order((0, 2))[0] == 0  # A trade.
  assert order(ALL)[:2] == [0, 3]  # The larger gain.
  assert order(ALL, (0, 1, 0, 0))[:3] == [1, 0, 3]  # What frees a lot.
  assert column('priority', ALL, (1, 0, 0, 1)) == [0] * 4  # All is done.


def advice(*args, **kwargs):
  view, _ = look(*args, **kwargs)
  return ENV.reference_verb(view.features, view.legal).tolist()


def test_the_reference_researches_and_trades_towards_the_desired():
  assert advice(()) == [RESEARCH] * 4
  assert advice((0, 2)) == [BUY, RESEARCH, -1, RESEARCH]
  assert advice((1, 2, 3)) == [RESEARCH, SELL, SELL, -1]
  assert advice(ALL, (1, 0, 0, 1)) == [-1, -1, -1, -1]
  # Closing comes first where the budget is used up.
  assert advice(ALL, (1, 0, -1, 0)) == [-1, -1, BUY, -1]
  assert advice(ALL, (-1, 1, 0, 0)) == [BUY, SELL, -1, -1]


def test_research_lands():
  world, knows, effective = land(
      make_world([1]), (RESEARCH, 0), (RESEARCH, 2, False), (RESEARCH, 3)
  )
  assert np.flatnonzero(world.researched).tolist() == [0, 1, 3]
  assert knows == [[0, 0], [2, 3]]
  assert effective == [True, False, True]


def test_a_second_research_teaches_its_agent_the_same_signal():
  world, knows, effective = land(make_world([0]), (RESEARCH, 0))
  assert np.flatnonzero(world.researched).tolist() == [0]
  assert (knows, effective) == ([[0, 0]], [True])
  # Unless the agent was told meanwhile.
  _, _, effective = land(
      make_world([0]), (RESEARCH, 0), knows=assets(0)[None, :]
  )
  assert effective == [False]


def test_a_second_research_of_a_public_signal_is_in_vain():
  _, knows, effective = land(make_world([]), (RESEARCH, 1), (RESEARCH, 1))
  assert (knows, effective) == ([], [True, False])
  assert land(make_world([1]), (RESEARCH, 1))[1:] == ([], [False])


def test_of_research_at_one_instant_all_learn():
  _, knows, effective = land(make_world([]), (RESEARCH, 3), (RESEARCH, 3))
  assert (knows, effective) == ([[0, 3], [1, 3]], [True, True])


@pytest.mark.parametrize(
    'position, rows, after, effective',
    [
        ((0, 0, 0, 0), [(BUY, 2)], (0, 0, 1, 0), [True]),
        ((0, 0, 0, 0), [(SELL, 2)], (0, 0, -1, 0), [True]),
        ((0, 0, 1, 0), [(SELL, 2)], (0, 0, 0, 0), [True]),
        ((0, 0, -1, 0), [(BUY, 2)], (0, 0, 0, 0), [True]),
        ((0, 0, 0, 0), [(BUY, 2, False)], (0, 0, 0, 0), [False]),
        # Somebody was faster.
        ((0, 0, 1, 0), [(BUY, 2)], (0, 0, 1, 0), [False]),
        ((0, 1, -1, 0), [(BUY, 0)], (0, 1, -1, 0), [False]),
        # Several in one asset: the first seat's counts.
        ((0, 0, 0, 0), [(BUY, 2), (SELL, 2)], (0, 0, 1, 0), [True, False]),
        ((0, 0, 0, 0), [(SELL, 2), (SELL, 2)], (0, 0, -1, 0), [True, False]),
        # The first that the position allows.
        ((0, 0, 1, 0), [(BUY, 2), (SELL, 2)], (0, 0, 0, 0), [False, True]),
        # Of more than the budget allows, the first seats go through.
        (
            (0, 0, 0, 0),
            [(BUY, 3), (SELL, 1), (BUY, 0)],
            (0, -1, 0, 1),
            [True, True, False],
        ),
        (
            (0, 0, 0, -1),
            [(BUY, 3, False), (BUY, 2), (BUY, 0)],
            (0, 0, 1, -1),
            [False, True, False],
        ),
        # An opening that loses its asset uses no lot.
        (
            (0, 0, 0, 1),
            [(BUY, 2), (BUY, 2), (BUY, 3), (SELL, 0)],
            (0, 0, 1, 1),
            [True, False, False, False],
        ),
        # Whatever the seats, closing makes room.
        ((0, 1, -1, 0), [(BUY, 0), (BUY, 2)], (1, 1, 0, 0), [True, True]),
        (
            (0, 1, -1, 0),
            [(BUY, 0), (SELL, 3), (BUY, 2)],
            (1, 1, 0, 0),
            [True, False, True],
        ),
        ((0, 0, 0, 0), [(3, 0), (-1, 1)], (0, 0, 0, 0), [False, False]),
    ],
)
def test_trades_land(position, rows, after, effective):
  got = trade(position, *rows)
  booked = [10 * (b - a) for a, b in zip(position, after, strict=True)]
  assert got == (list(after), booked, effective)


def test_research_and_trades_land_at_one_instant():
  world, knows, effective = land(
      make_world([0, 2]), (RESEARCH, 3), (BUY, 0), (RESEARCH, 1)
  )
  assert world.researched.all()
  assert world.position.tolist() == [1, 0, 0, 0]
  assert (knows, effective) == ([[0, 3]], [True] * 3)


@pytest.mark.parametrize('now_ms, open_', [(99, True), (100, False)])
def test_nothing_is_traded_after_the_horizon(now_ms, open_):
  position, _, effective = trade((0, 0, 0, 0), (BUY, 0), now_ms=now_ms)
  assert (position, effective) == ([1 * open_, 0, 0, 0], [open_])


def test_profit_accrues_while_a_position_is_held():
  progress = lambda world, ms: float(ENV.progress(TASK, world, jnp.int32(ms)))
  world = make_world(ALL)
  assert progress(world, 50) == 0
  world, _, _ = land(world, (BUY, 0), now_ms=10)
  assert progress(world, 10) == 0
  share = lambda profit: pytest.approx(profit / 3.5)
  assert progress(world, 20) == share(0.1 * 2)
  world, _, _ = land(world, (SELL, 1), now_ms=30)  # Short of what falls.
  assert progress(world, 30) == share(0.2 * 2)
  assert progress(world, 50) == share(0.4 * 2 + 0.2 * 1)
  world, _, _ = land(world, (SELL, 0), now_ms=60)
  assert progress(world, 60) == share(0.5 * 2 + 0.3 * 1)
  assert progress(world, 70) == share(0.5 * 2 + 0.4 * 1)  # It is kept.
  world, _, _ = land(world, (BUY, 2), now_ms=70)  # Wrong: 2 falls.
  assert progress(world, 90) == share(0.5 * 2 + 0.6 * 1 - 0.2 * 0.5)
  end = share(0.5 * 2 + 0.7 * 1 - 0.3 * 0.5)
  assert progress(world, 100) == end
  assert progress(world, 1000) == end  # The market is closed.
  assert not ENV.finished(TASK, world)


def test_a_loss_is_no_progress():
  world, _, _ = land(make_world(ALL), (SELL, 0), now_ms=0)
  assert ENV.progress(TASK, world, jnp.int32(50)) == 0
  world, _, _ = land(world, (BUY, 0), (BUY, 3), now_ms=50)  # It lost 1.
  assert ENV.progress(TASK, world, jnp.int32(80)) == 0
  assert ENV.progress(TASK, world, jnp.int32(100)) == 0
  world, _, _ = land(make_world(ALL), (SELL, 0), now_ms=0)
  world, _, _ = land(world, (BUY, 0), (BUY, 3), now_ms=20)  # 0.4 of them.
  assert ENV.progress(TASK, world, jnp.int32(100)) == pytest.approx(0.8 / 3.5)


def test_the_best_portfolio_held_from_the_start_is_all_progress():
  world, _, _ = land(make_world(ALL), (BUY, 0), (BUY, 3), now_ms=0)
  assert ENV.progress(TASK, world, jnp.int32(100)) == 1.0


def test_random_play_keeps_the_limits_and_earns_what_it_holds():
  env = trading.Trading(num_assets=5, risk_budget=2, horizon_ms=90_000)
  play = random_play.play(env, jax.random.key(2), agents=4, crowd=False)
  profit, most = 0.0, 0
  for at in play:
    then_ms, now_ms = (
        min(int(ms), 90_000) for ms in (at.before.now_ms, at.turns.now_ms)
    )
    held = np.asarray(at.before.world.position)
    profit += (held @ np.asarray(at.task.drift)) * (now_ms - then_ms) / 90_000
    most = max(most, np.abs(held).sum())
    assert np.abs(held).max() <= 1 and np.abs(held).sum() <= 2
    share = np.clip(profit / at.task.optimum, 0, 1)
    assert at.after.progress == pytest.approx(share, abs=1e-5)
    if at.turns.now_ms >= 90_000:
      after = at.after.world.position
      np.testing.assert_array_equal(after, held)
  assert most == 2 and play[-1].turns.now_ms > 90_000


@pytest.mark.parametrize(
    'knobs', [{}, {'combination': 0.0}, {'risk_budget': 12}]
)
def test_without_noise_the_reference_reaches_the_best_portfolio(knobs):
  """One trade after the other, from a portfolio that others left at random."""
  env = trading.Trading(noise=0.0, **knobs)
  m, k, sole = env.num_assets, env.risk_budget, jnp.zeros((1,), jnp.int32)
  priority = env.feature_names.index('priority')

  def play(key):
    task_key, place_key, sign_key = jax.random.split(key, 3)
    task = env.sample_task(task_key)
    knows = jnp.ones((1, m), bool)
    held = jax.random.permutation(place_key, m) < k
    held *= jax.random.randint(sign_key, (m,), -1, 2)
    world = env.reset(task)._replace(researched=knows[0], position=held)

    def step(world, now_ms):
      view = env.view(task, world, knows[0])
      verb = env.reference_verb(view.features, view.legal)
      score = jnp.where(verb < 0, -jnp.inf, view.features[:, priority])
      at = jnp.argmax(score)[None]
      turns = base.Turns(verb[at], at, sole, verb[at] >= 0, now_ms)
      return env.land(task, world, turns, knows, None)[0], verb[at][0]

    return task, *jax.lax.scan(step, world, jnp.arange(2 * k + 1))

  keys = jax.random.split(jax.random.key(1), 32)
  task, world, verbs = jax.device_get(jax.jit(jax.vmap(play))(keys))
  least = np.sort(np.abs(task.drift), axis=1)[:, -k, None]
  best = np.sign(task.drift) * (np.abs(task.drift) >= least)
  np.testing.assert_array_equal(world.position, best)
  # A lot is closed and one opened at most; then it does nothing.
  assert (verbs[:, 0] >= 0).all() and (verbs[:, -1] == -1).all()


TURN_MS = jnp.array([10, 4, 3], jnp.int32)  # Research, buy, sell.


@pytest.mark.parametrize(
    'agents, opens_ms',
    [
        (1, (23, 36)),  # 2 of research and a trade; 3 and 2.
        # The work, halved: 36 / 2; and two rounds of research and a trade.
        (2, (13, 23)),
        (3, (13, 13)),
        (9, (13, 13)),
    ],
)
@pytest.mark.parametrize('limit_ms', [0, 13, 14, 23, 30, 36, 50, 100, 500])
def test_the_bounds(agents, opens_ms, limit_ms):
  bound = ENV.bounds(TASK, agents, jnp.int32(limit_ms), TURN_MS)
  held = [max(min(limit_ms, 100) - ms, 0) / 100 for ms in opens_ms]
  profit = 2 * held[0] + 1.5 * held[1]
  assert bound.progress == pytest.approx(profit / 3.5)
  # The best are 0 and 3: with the partner 2 of 0, three signals.
  assert (bound.serial_ms, bound.critical_path_ms) == (36, 13)


def test_work_that_agents_share_bounds_it_too():
  env = dataclasses.replace(ENV, risk_budget=4)
  task = TASK._replace(optimum=jnp.float32(5.0))
  # Of 4 signals and 4 trades by 3 agents: 52 / 3 < 20 + 3. With slow trades
  # of 30 ms by 3 agents: 2, 3, 4 and 4 signals, and 1 to 4 trades.
  bound = env.bounds(task, 3, jnp.int32(100), jnp.array([10, 30, 30]))
  opens_ms = [40, 40, 50, 54]  # 160 / 3 = 53.3 is more than 20 + 30.
  drifts = [2, 1.5, 1, 0.5]
  profit = sum(d * (100 - ms) for d, ms in zip(drifts, opens_ms, strict=True))
  assert bound.progress == pytest.approx(profit / 500)


def test_bounds_without_combination():
  task = TASK._replace(needs=jnp.zeros((4, 4), bool))
  bound = APART.bounds(task, 1, jnp.int32(100), TURN_MS)
  assert bound.progress == pytest.approx((2 * 0.87 + 1.5 * 0.74) / 3.5)
  assert bound.serial_ms == 26


def test_a_lucky_agent_reaches_the_bound():
  world = make_world()
  for now_ms, *turn in (
      (10, RESEARCH, 3),
      (20, RESEARCH, 0),
      (30, RESEARCH, 2),
      (34, BUY, 0),
      (38, BUY, 3),
  ):
    world, _, effective = land(world, turn, now_ms=now_ms)
    assert effective == [True]
  turn_ms = jnp.array([10, 4, 4], jnp.int32)
  bound = ENV.bounds(TASK, 1, jnp.int32(100), turn_ms)
  assert bound.serial_ms == 38
  # But for 10 ms, in which 0 could have been held: 3 was researched first.
  got = ENV.progress(TASK, world, jnp.int32(100))
  assert got == pytest.approx(float(bound.progress) - 2 * 0.1 / 3.5)


# Others of all that is hidden but the signals of 0 and 1.
OTHER = TASK._replace(
    drift=-TASK.drift,
    signal=jnp.array([2.5, -2.5, -3.0, 4.0]),
    optimum=jnp.float32(9.0),
)


@pytest.mark.parametrize('researched', [(), (0,), (0, 1)])
def test_what_is_hidden_does_not_show(researched):
  world, knows = make_world(researched, (1, 0, 0, -1)), assets(*ALL)
  one, other = (ENV.view(task, world, knows) for task in (TASK, OTHER))
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert ENV.describe(TASK) == ENV.describe(OTHER)
  text = lambda task: ENV.describe_view(task, world, knows, one.legal)
  assert text(TASK) == text(OTHER)


def test_what_others_researched_in_private_does_not_show():
  knows, task = assets(0), TASK
  worlds = [make_world(which) for which in ((0, 1), ALL)]
  views = [ENV.view(task, world, knows) for world in worlds]
  jax.tree.map(np.testing.assert_array_equal, *views)
  texts = {
      ENV.describe_view(task, world, knows, view.legal)
      for world, view in zip(worlds, views, strict=True)
  }
  assert len(texts) == 1


def test_without_coupling_it_does_not_matter_what_one_was_told():
  task, world = TASK._replace(private=assets()), make_world((0, 2))
  views = [ENV.view(task, world, knows) for knows in (assets(), assets(*ALL))]
  jax.tree.map(np.testing.assert_array_equal, *views)


@pytest.mark.parametrize('num_assets', [2, 3, 12])
def test_partners_form_one_ring(num_assets):
  tasks = worlds.sample(
      trading.Trading(num_assets=num_assets, risk_budget=1), 16
  )
  assert (tasks.needs.sum(axis=2) == 1).all()
  for needs, place in zip(tasks.needs, tasks.place, strict=True):
    partner, at = needs.argmax(axis=1), 0
    ring = [at := partner[at] for _ in range(num_assets)]
    assert sorted(ring) == list(range(num_assets))
    np.testing.assert_array_equal(place[partner], (place + 1) % num_assets)


@pytest.mark.parametrize('combination', [0.0, 0.25, 1.0])
def test_drifts_mix_an_assets_part_with_its_partners(combination):
  # Without noise a signal is the part.
  env = trading.Trading(combination=combination, noise=0.0)
  tasks = worlds.sample(env)
  partner = (tasks.needs @ tasks.signal[..., None])[..., 0]
  mix = (1 - combination) * tasks.signal + combination * partner
  np.testing.assert_allclose(tasks.drift, mix, rtol=1e-5, atol=1e-6)
  best = np.sort(np.abs(mix), axis=1)[:, -env.risk_budget :]
  np.testing.assert_allclose(tasks.optimum, best.sum(axis=1), rtol=1e-5)


def test_signals_are_as_noisy_as_the_knob_says():
  clean, noisy = (
      worlds.sample(trading.Trading(noise=noise), 256).signal
      for noise in (0.0, 0.5)
  )
  assert clean.std() == pytest.approx(1.0, abs=0.05)
  assert (noisy - clean).std() == pytest.approx(0.5, abs=0.025)
  assert np.corrcoef(noisy.ravel() - clean.ravel(), clean.ravel())[
      0, 1
  ] == pytest.approx(0.0, abs=0.06)


@pytest.mark.parametrize('coupling', [0.0, 0.25, 1.0])
def test_coupling_is_the_share_of_private_signals(coupling):
  private = worlds.sample(trading.Trading(coupling=coupling)).private
  slack = 0.05 * (0 < coupling < 1)
  assert private.mean() == pytest.approx(coupling, abs=slack)


def _profit(env):
  world = make_world(ALL, (1, 0, 0, 0))
  return env.progress(TASK, world, jnp.int32(1000)).tolist()


test_every_knob_changes_something = worlds.each_changes_something(
    ENV,
    num_assets=(5, worlds.sampled),
    risk_budget=(3, worlds.sampled),
    combination=(1.0, worlds.sampled),
    noise=(1.0, worlds.sampled),
    horizon_ms=(4000, _profit),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        trading.Trading,
        ('num_assets', 1, '>= 2'),
        ('risk_budget', 0, 'from 1 to num_assets=12'),
        ('risk_budget', 13, 'from 1 to num_assets=12'),
        ('combination', 1.5, 'from 0 to 1'),
        ('noise', -1.0, '>= 0 and finite'),
        ('noise', float('inf'), '>= 0 and finite'),
        ('horizon_ms', 0, '>= 1'),
    )
)


def test_a_task_as_text():
  first, *lines = ENV.describe(TASK).splitlines()
  assert 'A market of 4 assets that closes after 0.1 s.' in first
  assert 'at most one lot of each and 2 in all' in first
  assert '0.5 times' in first and 'to trade takes both signals' in first
  assert lines == [
      'asset 0: its partner is 2, its signal is private',
      'asset 1: its partner is 3, its signal is public',
      'asset 2: its partner is 1, its signal is private',
      'asset 3: its partner is 0, its signal is private',
  ]
  first, line, *_ = APART.describe(APART.sample_task(jax.random.key(0))).split(
      '\n'
  )
  assert 'partner' not in first
  assert line == 'asset 0: its signal is private'


def test_a_view_as_text():
  world, knows = make_world((0, 1, 2), (0, 0, 1, -1)), assets(0, 2)
  view = ENV.view(TASK, world, knows)
  text = ENV.describe_view(TASK, world, knows, view.legal)
  assert text.splitlines() == [
      'asset 0: flat, signal +2.50, estimate +1.50, better long',
      'asset 1: flat, signal -2.50',
      'asset 2: long, signal +1.25, estimate -0.50, better flat, sell 2',
      'asset 3: short, signal not known, research 3',
  ]


@pytest.mark.parametrize(
    'knobs',
    [
        {'num_assets': 4, 'risk_budget': 4, 'combination': 0.0},
        {'num_assets': 2, 'risk_budget': 1, 'noise': 0.0, 'coupling': 0.5},
    ],
)
def test_it_conforms_with_other_knobs(knobs):
  conformance.check_environment(trading.Trading(**knobs), jax.random.key(1))
