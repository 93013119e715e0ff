"""Tests of the time-limit schedules, in milliseconds worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import deadlines

STEPS = 101  # Steps 0 to 100, of which a ramp of 0.5 takes 50.
KEY = jax.random.key(0)


def make_config(schedule, **changes):
  known = {
      'first_ms': 10_000,
      'final_ms': 50_000,
      'ramp': 0.5,
      'stages': 4,
      'toggle_every': 10,
  }
  return deadlines.DeadlineConfig(schedule=schedule, **(known | changes))


def limit_ms(config, step, steps=STEPS):
  """The one deadline of all tasks."""
  drawn = deadlines.deadlines_ms(config, step, steps, KEY, 3)
  assert drawn.shape == (3,)
  assert drawn.dtype == jnp.int32
  assert len(set(drawn.tolist())) == 1
  return int(drawn[0])


@pytest.mark.parametrize(
    'schedule, changes, expected',
    [
        ('constant', {}, {0: 50_000, 50: 50_000, 100: 50_000}),
        (
            'linear',  # 800 ms per step.
            {},
            {0: 10_000, 1: 10_800, 25: 30_000, 49: 49_200, 50: 50_000,
             51: 50_000, 100: 50_000},
        ),
        (
            'linear',  # 400 ms per step.
            {'ramp': 1.0},
            {0: 10_000, 50: 30_000, 99: 49_600, 100: 50_000},
        ),
        ('linear', {'ramp': 0.0}, {0: 50_000, 50: 50_000, 100: 50_000}),
        (
            'staged',  # Four plateaus, the first three of 12.5 steps each.
            {},
            {0: 10_000, 12: 10_000, 13: 23_333, 24: 23_333, 25: 36_667,
             37: 36_667, 38: 50_000, 50: 50_000, 100: 50_000},
        ),
        (
            'staged',
            {'stages': 2, 'ramp': 1.0},
            {0: 10_000, 49: 10_000, 50: 50_000, 100: 50_000},
        ),
        ('staged', {'stages': 1}, {0: 10_000, 49: 10_000, 50: 50_000}),
        (
            'toggle',
            {},
            {0: 10_000, 9: 10_000, 10: 50_000, 19: 50_000, 20: 10_000,
             55: 50_000, 99: 50_000, 100: 10_000},
        ),
        ('toggle', {'toggle_every': 1}, {0: 10_000, 1: 50_000, 2: 10_000}),
    ],
)  # fmt: skip
def test_schedule_by_hand(schedule, changes, expected):
  config = make_config(schedule, **changes)
  assert {step: limit_ms(config, step) for step in expected} == expected


@pytest.mark.parametrize('schedule', ['constant', 'linear', 'staged', 'toggle'])
def test_no_schedule_depends_on_the_key_unless_it_samples(schedule):
  config = make_config(schedule)
  draw = lambda seed: deadlines.deadlines_ms(
      config, 15, STEPS, jax.random.key(seed), 4
  )
  np.testing.assert_array_equal(draw(0), draw(1))


@pytest.mark.parametrize('schedule', ['constant', 'linear', 'staged'])
def test_a_single_update_is_at_the_full_limit(schedule):
  assert limit_ms(make_config(schedule), 0, steps=1) == 50_000


@pytest.mark.parametrize('schedule', ['linear', 'staged'])
def test_growing_schedules_never_fall_and_end_at_the_full_limit(schedule):
  for ramp in (0.3, 0.7, 1.0):
    config = make_config(schedule, ramp=ramp, stages=7)
    limits = [limit_ms(config, step) for step in range(STEPS)]
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (10_000, 50_000)


@pytest.mark.parametrize('stages', [7, 49, 100])
@pytest.mark.parametrize('ramp', [0.1, 0.3, 0.7, 1.0])
def test_no_plateau_comes_late(stages, ramp):
  config = make_config('staged', ramp=ramp, stages=stages)
  tenths = round(10 * ramp)
  for step in range(STEPS):  # The ramp ends at step `10 * tenths`.
    plateau = min(stages * step // (10 * tenths), stages - 1)
    due = 10_000 + round(40_000 * plateau / max(stages - 1, 1))
    assert abs(limit_ms(config, step) - due) <= 1, step


@pytest.mark.parametrize('schedule', ['linear', 'staged'])
def test_the_horizon_is_the_whole_run_also_when_resumed(schedule):
  config = make_config(schedule)
  # A run that stopped after step 24 goes on where it was: a deadline depends
  # on the step and on the length of the whole run, not on when it started.
  whole = [limit_ms(config, step) for step in range(STEPS)]
  resumed = [limit_ms(config, step) for step in range(25, STEPS)]
  assert whole[:25] + resumed == whole
  # A run of twice as many steps is half as far on its ramp.
  for step in (0, 10, 25, 40, 50):
    assert limit_ms(config, 2 * step, 2 * STEPS - 1) == whole[step]


def test_sampled_covers_the_range_with_both_ends():
  config = make_config('sampled', first_ms=7, final_ms=9)
  drawn = deadlines.deadlines_ms(config, 0, STEPS, KEY, 3000)
  assert drawn.shape == (3000,)
  assert drawn.dtype == jnp.int32
  values, counts = np.unique(drawn, return_counts=True)
  assert values.tolist() == [7, 8, 9]
  assert counts.min() > 900  # 1000 are expected, give or take 26.


def test_sampled_depends_on_the_key_alone():
  config = make_config('sampled')
  draw = lambda seed, step: deadlines.deadlines_ms(
      config, step, STEPS, jax.random.key(seed), 8
  )
  np.testing.assert_array_equal(draw(1, 0), draw(1, 70))
  assert (draw(1, 0) != draw(2, 0)).any()
  assert len(set(draw(1, 0).tolist())) > 1  # Tasks differ.


def test_a_sampled_range_of_one_value():
  config = make_config('sampled', first_ms=8, final_ms=8)
  assert limit_ms(config, 0) == 8


@pytest.mark.parametrize(
    'field, value, allowed',
    [
        ('schedule', 'quadratic', "'linear'"),
        ('first_ms', 0, '>= 1 ms'),
        ('final_ms', 9999, '>= deadline.first_ms=10000'),
        ('ramp', -0.1, 'from 0 to 1'),
        ('ramp', 1.1, 'from 0 to 1'),
        ('stages', 0, '>= 1'),
        ('toggle_every', 0, '>= 1'),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(field, value, allowed):
  with pytest.raises(ValueError) as error:
    make_config(**({'schedule': 'linear'} | {field: value}))
  message = str(error.value)
  assert f'deadline.{field}={value!r}' in message
  assert allowed in message
  assert '\n' not in message


@pytest.mark.parametrize(
    'schedule, changes, expected',
    [
        ('constant', {}, 50_000),
        ('linear', {'ramp': 1.0}, 30_000),
        ('toggle', {'toggle_every': 50}, (51 * 10_000 + 50 * 50_000) / 101),
    ],
)
def test_mean_deadline_by_hand(schedule, changes, expected):
  config = make_config(schedule, **changes)
  assert deadlines.mean_ms(config, STEPS) == pytest.approx(expected)


def test_mean_of_sampled_deadlines_is_about_the_middle():
  mean_ms = deadlines.mean_ms(make_config('sampled'), STEPS)
  # The standard error of 101 x 16 of them is 290 ms.
  assert mean_ms == pytest.approx(30_000, abs=900)
