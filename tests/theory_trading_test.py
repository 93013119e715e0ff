"""The simulator reproduces what is known of parallel research and of noise.

Where no signal needs another and every asset may be held, each is a matter of
its own: n agents open n positions per round of research and trade, so profit
can be summed by hand, and the bounds are reached. Where signals are exact, the
team ends with the portfolio of hindsight, whose profit grows at the rate of 1
per horizon.

With noise a signal s = c + e of variance 1 + v says only so much of c. The
estimates of the drifts are jointly normal with the covariance of the drifts,
divided by 1 + v. So whatever the budget and the combination, the portfolio that
is best by the estimates earns, on average, 1 / sqrt(1 + v) times the optimum.
"""

import dataclasses

from envs import trading
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib
from rlcr_jax import rollout
from rlcr_jax import roster
from rlcr_jax.policies import scripted
from tests import exact

M = 12
TEAMS = (1, 2, 3, 4, 6, 12)  # Divisors of M.
TASK_MS = 5000  # Reading the task: 25,000 tokens at 5000 per second.
RESEARCH_MS = 10_000  # 100 tokens at 100 per second, then 9 s of tool.
TRADE_MS = 5000
TURN_MS = (RESEARCH_MS, TRADE_MS, TRADE_MS)
HORIZON_MS = 400_000
TIMES_MS = (15_000, 20_000, 34_000, 61_000, 100_000, 250_000, 400_000, 500_000)
LATER_MS = (*TIMES_MS[:6], 300_000, 380_000)

TOGETHER = trading.Trading(
    noise=0.0,
    horizon_ms=HORIZON_MS,
    research_tokens=100,
    research_tool_ms=9000,
    trade_tokens=100,
    trade_tool_ms=4000,
)
APART = dataclasses.replace(
    TOGETHER, combination=0.0, coupling=0.0, risk_budget=M
)


def play(env, tasks, times_ms):
  """Progress [task, team, time] of a list schedule with all facts free."""
  collective = exact.make_collective(
      env,
      max(TEAMS),
      exact.ROUND,
      task_tokens=25_000,
      wait_tokens=100,
      wait_ms=4000,  # Waits of 5 s: some end whenever a turn does.
  )
  rules = exact.make_rules(TEAMS, times_ms, awareness=True, free_facts=True)
  policy = scripted.ListScheduler(collective)
  played = exact.play(collective, policy, tasks, rules)
  return played.progress.T.reshape(-1, len(TEAMS), len(times_ms))


def sample(env, count):
  return jax.vmap(env.sample_task)(jax.random.split(jax.random.key(1), count))


@pytest.fixture(scope='module')
def apart():
  """Tasks, the last of them with the best assets first, and their progress."""
  tasks = sample(APART, 8)
  drift = np.array(tasks.drift)
  rank = np.argsort(np.argsort(-np.abs(drift[-1])))
  tasks = tasks._replace(place=tasks.place.at[-1].set(rank))
  return tasks, play(APART, tasks, TIMES_MS)


def test_independent_assets_earn_what_a_hand_says(apart):
  tasks, progress = apart
  drift, place = np.abs(tasks.drift), np.asarray(tasks.place)
  for i, agents in enumerate(TEAMS):
    rounds = place // agents + 1  # [task, M]
    opens_ms = TASK_MS + rounds * (RESEARCH_MS + TRADE_MS)
    for j, ms in enumerate(TIMES_MS):
      held_ms = np.maximum(min(ms, HORIZON_MS) - opens_ms, 0)
      profit = (drift * held_ms).sum(axis=1) / HORIZON_MS
      np.testing.assert_allclose(
          progress[:, i, j], profit / drift.sum(axis=1), atol=1e-5
      )


@pytest.mark.parametrize('agents', TEAMS)
def test_independent_assets_reach_the_bounds_if_the_best_come_first(
    apart, agents
):
  tasks, progress = apart
  progress = progress[:, TEAMS.index(agents)]
  limits_ms = [ms - TASK_MS for ms in TIMES_MS if ms <= HORIZON_MS]
  bounds = exact.bounds(APART, tasks, agents, limits_ms, TURN_MS).progress
  progress = progress[:, : len(limits_ms)]
  assert (progress <= bounds + 1e-5).all()
  if agents in (1, M):  # Others could stagger their rounds.
    np.testing.assert_allclose(progress[-1], bounds[-1], atol=1e-5)


@pytest.fixture(scope='module')
def together():
  """Tasks with partners and a budget, and their progress late and later."""
  tasks = sample(TOGETHER, 16)
  return tasks, play(TOGETHER, tasks, LATER_MS)


def test_exact_signals_lead_to_the_portfolio_of_hindsight(together):
  _, progress = together
  earned = progress[..., -1] - progress[..., -2]
  np.testing.assert_allclose(earned, 80_000 / HORIZON_MS, atol=1e-5)


def test_larger_teams_earn_more_but_not_in_proportion(together):
  # Of a budget, the first lots come soon, whatever the team.
  final = together[1][..., -1].mean(axis=0)
  assert (np.diff(final) > 0).all()
  assert (final[1:] < final[0] * np.array(TEAMS[1:])).all()


def test_progress_never_exceeds_its_bound(together):
  tasks, progress = together
  limits_ms = np.array(LATER_MS) - TASK_MS
  for i, agents in enumerate(TEAMS):
    bounds = exact.bounds(TOGETHER, tasks, agents, limits_ms, TURN_MS)
    assert (progress[:, i] <= bounds.progress + 1e-5).all()


@pytest.mark.parametrize('noise', [0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    'budget, combination', [(1, 0.5), (4, 0.5), (4, 0.0), (12, 0.2)]
)
def test_noise_costs_the_same_share_whatever_the_market(
    noise, budget, combination
):
  env = trading.Trading(
      risk_budget=budget, combination=combination, noise=noise
  )
  tasks = sample(env, 2000)
  nothing = jnp.zeros_like(tasks.place)
  world = trading.World(nothing == 0, nothing, nothing)
  features = jax.vmap(env.view)(tasks, world, nothing == 0).features
  held = features[..., env.feature_names.index('desired')]
  rate, optimum = (held * tasks.drift).sum(axis=1), tasks.optimum
  share = 1 / np.sqrt(1 + noise**2)
  rest = np.asarray(rate - share * optimum)
  error = rest.std() / np.sqrt(len(rest))
  assert abs(rest.mean()) <= 3.0 * error + 1e-6


def test_the_curve_is_what_an_earlier_deadline_would_have_given():
  """Profit accrues while nothing lands, also between two points of a curve."""
  market = trading.Trading()
  team = collective_lib.Collective(market)
  keys = jax.random.split(jax.random.key(0), 8)
  tasks = jax.vmap(market.sample_task)(keys)
  oracle = scripted.ListScheduler(team, 8)
  grid_ms = jnp.array([60_000, 101_500, 150_000], jnp.int32)

  @jax.jit
  def play(deadline_ms):
    rules = team.rules(deadline_ms, awareness=True, free_facts=True)
    return rollout.play(
        team,
        oracle,
        (),
        tasks,
        roster.repeat(rules, len(keys)),
        keys,
        chunk_size=64,
        grid_ms=grid_ms,
    )[0]

  curve = play(180_000).curve
  assert (curve[:, 2] > 0).any()
  for i, deadline_ms in enumerate(grid_ms):
    earlier = play(deadline_ms).progress
    np.testing.assert_allclose(curve[:, i], earlier, atol=1e-6)
