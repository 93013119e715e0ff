"""Tests of what is measured, on collectives small enough to count."""

import csv
import json
import math
import types

from envs import base
import numpy as np
import pytest
from rlcr_jax import learner
from rlcr_jax import metrics
from rlcr_jax import rollout

NAN = float('nan')
VERBS = (
    base.VerbSpec('work', True, 10.0, 0, True),
    base.VerbSpec('read', True, 10.0, 0, True),
    base.VerbSpec('wait', False, 10.0, 0, False),
    base.VerbSpec('tell', True, 10.0, 0, False, True, True, talks=True),
    base.VerbSpec('hire', False, 10.0, 0, False),
)


def make_rollouts():
  """A team of 1 that only works, one of 4 that talks, and one of 9 that idles.

  Columns are work, read, wait, tell and hire.
  """
  return rollout.Rollouts(
      progress=np.float32([0.5, 1.0, 0.0]),
      time_ms=np.int32([10_000, 20_000, 10_000]),
      progress_ms=np.int32([8000, 20_000, 0]),
      turns=np.int32([[4, 0, 0, 0, 0], [3, 1, 1, 5, 3], [0, 0, 7, 0, 8]]),
      effective=np.int32([[2, 0, 0, 0, 0], [3, 0, 1, 5, 3], [0, 0, 7, 0, 8]]),
      output_tokens=np.int32(
          [[300, 0, 0, 0, 0], [500, 100, 10, 60, 30], [0, 0, 70, 0, 80]]
      ),
      team_size=np.int32([1, 4, 9]),
      critical_steps=np.int32([4, 7, 3]),
      hired=np.int32([0, 3, 8]),
      productive=np.int32([0, 2, 0]),
      curve=np.zeros((3, 0), np.float32),
      iterations=np.int32(20),
      decisions=np.int32(32),
  )


def make_update(returns=((0.5, 1.0, 0.0),), **changes):
  fields = {
      'loss': -0.25,
      'entropy': 1.5,
      'grad_norm': 0.125,
      'log_prob_gap': 0.0,
      'informative': 1.0,
      'nonfinite_groups': 0,
      'extra': {'malformed_share': 0.125},
  }
  return types.SimpleNamespace(
      rollouts=make_rollouts(),
      returns=np.array(returns),
      **(fields | changes),
  )


def summarise(update):
  knobs = learner.Knobs(np.float32(0.5), np.float32(0.25))
  return metrics.summarise(VERBS, update, np.array([10_000, 20_000]), knobs)


def test_verb_groups():
  groups = metrics.verb_groups(VERBS)
  assert groups['useful'].tolist() == [True, True, False, False, False]
  assert groups['talk'].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    'name, expected',
    [
        ('team_size', [1, 4, 9]),
        ('critical_steps', [4, 7, 3]),
        ('output_tokens', [300, 700, 150]),
        ('useful_tokens', [300, 600, 0]),
        ('useful_token_share', [1, 6 / 7, 0]),
        ('effective_share', [0.5, 0.75, 0]),  # 2 of 4; 3 of 4; none of none.
        ('communication_tokens_per_s', [0, 3, 0]),  # 60 tokens in 20 s.
        ('time_ms', [10_000, 20_000, 10_000]),
    ],
)
def test_signs_of_life_by_hand(name, expected):
  signs = metrics.signs_of_life(VERBS, make_rollouts())
  np.testing.assert_allclose(signs[name], expected, rtol=1e-12)


def test_signs_of_life_of_a_rollout_of_no_time_are_finite():
  nothing = {f: np.zeros_like(x) for f, x in make_rollouts()._asdict().items()}
  signs = metrics.signs_of_life(VERBS, rollout.Rollouts(**nothing))
  assert all(np.isfinite(values).all() for values in signs.values())


def test_useful_work_by_team_size_by_hand():
  signs = {
      'team_size': np.array([1, 1, 2, 5, 6, 9]),
      'useful_tokens': np.array([0.0, 100, 200, 400, 200, 300]),
  }
  by_team = metrics.useful_by_team(signs)  # The mean is 200.
  one, few, many, rest = by_team.values()
  assert (one, few, many) == (0.25, 1.5, 1.25) and math.isnan(rest)
  names = list(by_team)
  assert names[:3] == [f'useful_work_team_{x}' for x in ('1', '2_5', '6_9')]
  assert names[3].startswith('useful_work_team_10')


def test_useful_work_without_any_is_no_division_by_zero():
  signs = {'team_size': np.array([1, 9]), 'useful_tokens': np.zeros(2)}
  by_team = list(metrics.useful_by_team(signs).values())
  np.testing.assert_array_equal(by_team, [0.0, NAN, 0.0, NAN])


def test_row_by_hand():
  row = summarise(make_update())
  expected = {
      'deadline_ms': 15_000.0,
      'return_mean': 0.5,
      'return_std_in_group': math.sqrt(1 / 6),  # Of 0.5, 1 and 0.
      'progress_mean': 0.5,
      'team_size_mean': 14 / 3,
      'output_tokens_mean': 1150 / 3,
      'useful_tokens_mean': 300.0,
      'communication_tokens_per_s_mean': 1.0,
      'useful_work_team_1': 1.0,
      'useful_work_team_2_5': 2.0,
      'useful_work_team_6_9': 0.0,
      'turns_work': 7 / 3,
      'turns_tell': 5 / 3,
      'decisions': 32.0,
      'loss': -0.25,
      'entropy': 1.5,
      'learning_rate': 0.5,
      'entropy_bonus': 0.25,
      'malformed_share': 0.125,
  }
  assert {name: row[name] for name in expected} == pytest.approx(expected)
  assert all(type(value) is float for value in row.values())


def test_the_scheduled_numbers_of_an_incentive_are_written():
  scheduled = {'parallel': np.float32(0.125), 'finish': np.float32(0.0)}
  knobs = learner.Knobs(np.float32(0.5), np.float32(0.25), scheduled)
  row = metrics.summarise(VERBS, make_update(), np.array([1000]), knobs)
  assert row['incentive_parallel'] == 0.125 and row['incentive_finish'] == 0.0
  assert row['learning_rate'] == 0.5 and 'incentive' not in row
  assert not [name for name in summarise(make_update()) if 'incentive' in name]


def test_a_return_that_is_not_finite_is_left_out_of_the_mean():
  row = summarise(make_update([[0.5, 1.0, NAN]], nonfinite_groups=1))
  assert row['return_mean'] == 0.75
  assert row['nonfinite_groups'] == 1.0


def make_row(step, **changes):
  return {'step': step, 'loss': step / 8, 'seen': NAN} | changes


def write(folder, first, steps, **changes):
  writer = metrics.MetricsWriter(folder, first)
  for step in steps:
    writer.write(make_row(step, **changes))
  writer.close()


def read_jsonl(folder):
  text = (folder / 'metrics.jsonl').read_text(encoding='utf-8')
  return [json.loads(line) for line in text.splitlines()]


def read_csv(folder):
  with (folder / 'metrics.csv').open(encoding='utf-8', newline='') as stream:
    return list(csv.DictReader(stream))


def test_every_row_is_on_disk_at_once(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, 0)
  for step in range(3):
    writer.write(make_row(step))
    assert [row['step'] for row in read_jsonl(tmp_path)] == [*range(step + 1)]
  writer.close()


def test_nan_is_null_in_jsonl(tmp_path):
  write(tmp_path, 0, range(1))
  line = (tmp_path / 'metrics.jsonl').read_text(encoding='utf-8')
  assert line == '{"step": 0, "loss": 0.0, "seen": null}\n'


def test_each_step_is_there_once_after_a_resume(tmp_path):
  write(tmp_path, 0, range(4))
  write(tmp_path, 2, range(2, 6), loss=9.0)  # Steps 2 and 3 were not saved.
  losses = [0.0, 0.125, 9.0, 9.0, 9.0, 9.0]
  rows = read_jsonl(tmp_path)
  assert [row['step'] for row in rows] == [0, 1, 2, 3, 4, 5]
  assert [row['loss'] for row in rows] == losses
  table = read_csv(tmp_path)
  assert [int(row['step']) for row in table] == [0, 1, 2, 3, 4, 5]
  assert [float(row['loss']) for row in table] == losses


@pytest.mark.parametrize('name', ['metrics.jsonl', 'metrics.csv'])
def test_a_resumed_file_is_that_of_one_go(tmp_path, name):
  write(tmp_path / 'whole', 0, range(4))
  write(tmp_path / 'halves', 0, range(2))
  write(tmp_path / 'halves', 2, range(2, 4))
  whole, halves = (
      (tmp_path / run / name).read_text() for run in ('whole', 'halves')
  )
  assert halves == whole


def test_a_line_that_was_cut_off_is_written_anew(tmp_path):
  write(tmp_path, 0, range(2))
  with (tmp_path / 'metrics.jsonl').open('a', encoding='utf-8') as stream:
    stream.write('{"step": 2, "lo')
  write(tmp_path, 2, range(2, 4))
  assert [row['step'] for row in read_jsonl(tmp_path)] == [0, 1, 2, 3]


def test_a_new_run_starts_empty_and_keeps_events(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, 0)
  assert writer.rows == []
  assert (tmp_path / 'metrics.jsonl').read_text() == ''
  writer.write(make_row(0))
  writer.close()
  events = list((tmp_path / 'tensorboard').glob('events.out.tfevents.*'))
  assert len(events) == 1
  data = events[0].read_bytes()
  assert b'loss' in data and b'seen' not in data  # NaN draws no point.
