"""Tests of what is reinforced, with values worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import incentives
from rlcr_jax import rollout
from rlcr_jax.incentives import IncentiveConfig

NAN = float('nan')


def make_rollouts(**fields):
  """Some of the fields, [P, G] each, laid out as they are played."""
  blank = dict.fromkeys(rollout.Rollouts._fields)
  flat = {name: np.asarray(x).reshape(-1) for name, x in fields.items()}
  return rollout.Rollouts(**(blank | flat))


def score(name, played, step=0, steps=1, group_size=4, **changes):
  config = IncentiveConfig(name, **changes)
  played = make_rollouts(**played)
  knobs = config.knobs(step, steps)
  return np.asarray(incentives.score(config, played, group_size, knobs))


# Return at the deadline.


def test_deadline_return_is_the_progress_when_the_clock_stopped():
  played = {'progress': np.float32([[0.0, 0.25, 1.0, 0.5]])}
  returns = score('deadline_return', played)
  assert returns.tolist() == [[0.0, 0.25, 1.0, 0.5]]


def test_deadline_return_does_not_ask_when_progress_was_made():
  """Two rollouts with the same progress score the same, early or late."""
  played = {
      'progress': np.float32([[0.5, 0.5]]),
      'time_ms': np.int32([[30_000, 60_000]]),
      'progress_ms': np.int32([[10_000, 59_000]]),
      'team_size': np.int32([[1, 9]]),
  }
  ((first, second),) = score('deadline_return', played, group_size=2)
  assert first == second


def test_rollouts_of_a_task_lie_side_by_side():
  """Also of fields with more axes, and of some that are empty."""
  played = make_rollouts(progress=np.float32([[1, 2], [3, 4], [5, 6]]))
  played = played._replace(
      turns=np.arange(18).reshape(6, 3),
      curve=np.zeros((6, 0)),
      decisions=np.int32(7),
  )
  seen = []

  def spy(config, grouped, knobs):
    seen.append(grouped)
    return grouped.progress

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(incentives.INCENTIVES, 'spy', spy)
    returns = incentives.score(IncentiveConfig('spy'), played, 2, {})
  assert returns.tolist() == [[1, 2], [3, 4], [5, 6]]
  assert seen[0].turns.shape == (3, 2, 3) and seen[0].curve.shape == (3, 2, 0)
  assert seen[0].turns[1, 0].tolist() == [6, 7, 8] and seen[0].decisions == 7


# Latency penalty.

# Means of the tasks are 0.5 and 0.125; T / T_max is 0.25, 0.5, 0.75 and 1.
PENALISED = {
    'progress': np.float32([[1, 0.5, 0.5, 0], [0.5, 0, 0, 0]]),
    'time_ms': np.int32([[20_000, 40_000, 60_000, 80_000]] * 2),
}


def penalise(**changes):
  changes = {'penalty': 0.5, 'max_ms': 80_000} | changes
  return score('latency_penalty', PENALISED, **changes)


def test_latency_penalty_by_hand():
  # 0.5 * 0.5 * T / T_max, and 0.5 * 0.125 * T / T_max.
  expected = [
      [1 - 0.0625, 0.5 - 0.125, 0.5 - 0.1875, -0.25],
      [0.5 - 0.015625, -0.03125, -0.046875, -0.0625],
  ]
  np.testing.assert_allclose(penalise(), expected, rtol=1e-6)


def test_the_penalty_is_relative_to_the_maximum_and_grows_with_beta():
  latency = PENALISED['progress'] - penalise()
  twice = PENALISED['progress'] - penalise(penalty=1.0)
  longer = PENALISED['progress'] - penalise(max_ms=160_000)
  np.testing.assert_allclose(twice, 2 * latency, rtol=1e-6)
  np.testing.assert_allclose(longer, latency / 2, rtol=1e-6)


def test_the_floor_of_alp_presses_tasks_that_are_hardly_solved():
  # 1 / G = 0.25 lies above the second task's mean of 0.125 only.
  expected = [
      [1 - 0.0625, 0.5 - 0.125, 0.5 - 0.1875, -0.25],
      [0.5 - 0.03125, -0.0625, -0.09375, -0.125],
  ]
  floored = penalise(penalty_floor=True)
  np.testing.assert_allclose(floored, expected, rtol=1e-6)


def test_the_gate_spares_what_is_not_correct():
  expected = [[1 - 0.0625, 0.5 - 0.125, 0.5 - 0.1875, 0], [0.484375, 0, 0, 0]]
  np.testing.assert_allclose(penalise(gate=0.5), expected, rtol=1e-6)
  expected = [[1 - 0.0625, 0.5, 0.5, 0], [0.5, 0, 0, 0]]
  np.testing.assert_allclose(penalise(gate=1.0), expected, rtol=1e-6)


def test_a_share_that_is_rounded_down_passes_the_gate():
  played = {
      'progress': np.float32([[1 - 1e-7, 0.9]]),
      'time_ms': np.int32([[80_000, 80_000]]),
  }
  returns = score(
      'latency_penalty', played, group_size=2, gate=1.0, max_ms=80_000
  )
  np.testing.assert_allclose(returns, [[0.525, 0.9]], rtol=1e-5)


def test_losses_do_not_make_latency_a_merit():
  """Profit can be negative, and its mean is then no rate of success."""
  played = PENALISED | {'progress': np.float32([[-1, -2, 0, 1]] * 2)}
  returns = score('latency_penalty', played)
  np.testing.assert_array_equal(returns, played['progress'])


@pytest.mark.parametrize('name', incentives.INCENTIVES)
def test_a_return_that_is_no_number_stays_in_its_task(name):
  progress = np.float32([[0.5, NAN, 1, 1], [0.5, 0.25, 1, 1]])
  ints = np.int32([[1, 2, 3, 4]] * 2)
  played = {'progress': progress, 'time_ms': ints}
  played |= {'hired': ints, 'productive': ints}
  first, second = score(name, played)
  assert np.isnan(first[1]) and np.isfinite(second).all()


# Toggle.

# Correct are 3 of 4 rollouts, whose times are 10, 20 and 60 s; then 1 of 4.
TOGGLED = {
    'progress': np.float32([[1, 1, 0.75, 1], [1, 0.5, 0, 0]]),
    'time_ms': np.int32([[10_000, 20_000, 30_000, 60_000], [9000] * 4]),
}


def toggled(step=0, **changes):
  changes = {'toggle_every': 2, 'toggle_accuracy': 0.75} | changes
  return score('toggle', TOGGLED, step, 10, **changes)


def test_what_takes_longer_than_the_budget_scores_nothing():
  # The median of 10, 20 and 60 s is 20 s.
  assert toggled().tolist() == [[1, 1, 0, 0], [1, 0.5, 0, 0]]


@pytest.mark.parametrize(
    'percentile, expected',
    [
        (0.0, [1, 0, 0, 0]),  # 10 s.
        (25.0, [1, 0, 0, 0]),  # 15 s.
        (75.0, [1, 1, 0.75, 0]),  # 40 s.
        (100.0, [1, 1, 0.75, 1]),  # 60 s.
    ],
)
def test_the_budget_is_a_percentile_of_correct_times(percentile, expected):
  assert toggled(toggle_percentile=percentile)[0].tolist() == expected


def test_percentiles_are_those_of_numpy():
  rng = np.random.default_rng(0)
  values = rng.integers(0, 10**6, (20, 8)).astype(np.float32)
  among = rng.random((20, 8)) < 0.5
  among[:, 3] = True
  for percentile in (0.0, 10.0, 50.0, 77.7, 100.0):
    found = incentives._percentile(
        jnp.array(values), jnp.array(among), percentile
    )
    expected = [
        np.percentile(v[a], percentile)
        for v, a in zip(values, among, strict=True)
    ]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)
  nothing = incentives._percentile(
      jnp.array(values), jnp.zeros_like(among), 50.0
  )
  assert np.isinf(nothing).all()


def test_a_task_needs_enough_correct_rollouts():
  assert toggled(toggle_accuracy=0.76)[0].tolist() == [1, 1, 0.75, 1]
  # Now 9 s is the second task's budget, and all took as long.
  assert toggled(toggle_accuracy=0.25)[1].tolist() == [1, 0.5, 0, 0]


def test_what_counts_as_correct_can_be_less_than_all():
  # All of the first task are correct at 0.75; the median is 25 s.
  returns = toggled(solved_at=0.75, toggle_accuracy=1.0)
  assert returns[0].tolist() == [1, 1, 0, 0]


def test_phases_alternate_beginning_with_a_budget():
  budgeted = [toggled(step)[0].tolist() == [1, 1, 0, 0] for step in range(8)]
  assert budgeted == [True, True, False, False] * 2
  np.testing.assert_array_equal(toggled(2), TOGGLED['progress'])


# PARL.

PARL = {
    'progress': np.float32([[0, 0.25, 0.5, 1]]),
    'hired': np.int32([[0, 2, 4, 6]]),
    'productive': np.int32([[0, 1, 4, 3]]),
}


def test_parl_by_hand():
  # r_parallel: 0, 1/2, 1, 1; r_finish: 0, 1/2, 1, 1/2.
  returns = score('parl', PARL, hires=4, parallel=0.4, finish=0.2)
  np.testing.assert_allclose(returns, [[0, 0.55, 1.1, 1.5]], rtol=1e-6)


@pytest.mark.parametrize(
    'step, left', [(0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (8, 0.0)]
)
def test_parl_is_annealed_along_a_line(step, left):
  # Half of 9 updates, the last of which is number 8.
  config = IncentiveConfig('parl', parallel=0.4, finish=0.2, anneal=0.5)
  knobs = config.knobs(step, 9)
  assert knobs['parallel'] == pytest.approx(0.4 * left)
  assert knobs['finish'] == pytest.approx(0.2 * left)
  assert all(x.shape == () and x.dtype == jnp.float32 for x in knobs.values())


def test_a_run_of_one_update_is_not_annealed():
  assert IncentiveConfig('parl').knobs(0, 1)['parallel'] > 0


# Configuration.


@pytest.mark.parametrize(
    'name, changes, step',
    [
        ('latency_penalty', {'penalty': 0.0}, 0),
        ('toggle', {'toggle_every': 2}, 2),
        ('parl', {'parallel': 0.0, 'finish': 0.0}, 0),
        ('parl', {}, 9),
    ],
)
def test_what_is_switched_off_is_the_return_to_the_bit(name, changes, step):
  rng = np.random.default_rng(0)
  played = {
      'progress': rng.normal(size=(5, 4)).astype(np.float32),
      'time_ms': rng.integers(1, 10**6, (5, 4), np.int32),
      'hired': rng.integers(0, 9, (5, 4), np.int32),
      'productive': rng.integers(0, 9, (5, 4), np.int32),
  }
  returns = score(name, played, step, 10, **changes)
  assert returns.tobytes() == played['progress'].tobytes()


CHANGES = {
    'latency_penalty': {
        'penalty': 0.25,
        'max_ms': 50_000,
        'penalty_floor': True,
        'gate': 1.0,
    },
    'toggle': {
        'toggle_every': 1,
        'toggle_accuracy': 1.0,
        'toggle_percentile': 0.0,
        'solved_at': 2.0,
    },
    'parl': {'parallel': 0.1, 'finish': 0.1, 'anneal': 0.25, 'hires': 3},
}


def test_the_test_below_knows_every_field():
  known = {'name'}.union(*CHANGES.values())
  assert known == {f.name for f in dataclasses.fields(IncentiveConfig)}


@pytest.mark.parametrize(
    'name, field', [(n, f) for n, fields in CHANGES.items() for f in fields]
)
def test_every_field_changes_something(name, field):
  played = {'latency_penalty': PENALISED, 'toggle': TOGGLED, 'parl': PARL}[name]
  base = {'toggle_accuracy': 0.75} if name == 'toggle' else {}
  returns = [
      score(name, played, 1, 10, **fields).tolist()
      for fields in (base, base | {field: CHANGES[name][field]})
  ]
  assert returns[0] != returns[1]


@pytest.mark.parametrize(
    'field, value, allowed',
    [
        ('name', 'fame', 'deadline_return'),
        ('penalty', -0.1, '>= 0 and finite'),
        ('penalty', NAN, '>= 0 and finite'),
        ('max_ms', 0, '>= 1'),
        ('gate', -1.0, '>= 0'),
        ('gate', NAN, 'finite'),
        ('toggle_every', 0, '>= 1'),
        ('toggle_accuracy', 0.0, 'above 0, at most 1'),
        ('toggle_percentile', 101.0, 'from 0 to 100'),
        ('solved_at', float('inf'), 'finite'),
        ('parallel', -1.0, '>= 0'),
        ('finish', float('inf'), '>= 0 and finite'),
        ('anneal', 1.5, 'above 0, at most 1'),
        ('hires', 0, '>= 1'),
    ],
)
def test_bad_values_are_told(field, value, allowed):
  with pytest.raises(ValueError) as told:
    IncentiveConfig(**{field: value})
  text = str(told.value)
  assert f'incentive.{field}={value!r} is not allowed' in text
  assert allowed in text
