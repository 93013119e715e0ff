"""Tests of the training loop: it goes on where it stopped, to the same end."""

import dataclasses
import json
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rlcr_jax import checkpoints
from rlcr_jax import files
from rlcr_jax import train
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS, EVERY = 6, 2


class Killed(BaseException):
  """Nothing catches it, as nothing catches a kill."""


@pytest.fixture(scope='module')
def run():
  return train.build(tiny.config(steps=STEPS, checkpoint_every=EVERY))


def with_fields(run, **fields):
  """The same run with other fields, and nothing compiled anew."""
  changed = dataclasses.replace(run.config.run, **fields)
  config = dataclasses.replace(run.config, run=changed)
  return dataclasses.replace(run, config=config)


def kill_at(arm, step):
  """A progress callback that ends training in the midst of an update."""

  def progress(this_arm, row):
    if (this_arm, row['step']) == (arm, step):
      raise Killed

  return progress


def load(run, folder):
  """The newest state of an arm, as arrays on the host."""
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  state = saved.restore(run.init())
  saved.close()
  state = state._replace(key=jax.random.key_data(state.key))
  return jax.device_get(state)


def assert_same_state(left, right):
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def rows(folder):
  """The metrics of every update, but for the time that it took."""
  lines = files.read_lines(folder / 'metrics.jsonl')
  return [{k: v for k, v in row.items() if k != 'seconds'} for row in lines]


def contents(folder):
  """Bytes and times of all files."""
  return {
      path: (path.read_bytes(), path.stat().st_mtime_ns)
      for path in folder.rglob('*')
      if path.is_file()
  }


@pytest.fixture(scope='module')
def whole(run, tmp_path_factory):
  """A folder that was trained in one go."""
  folder = tmp_path_factory.mktemp('whole')
  train.train_arm(run, 'collective', folder)
  return folder


def test_a_run_leaves_its_metrics_and_its_state(run, whole):
  assert [row['step'] for row in rows(whole)] == [*range(STEPS)]
  state = load(run, whole)
  assert state.step == STEPS
  weights = jax.tree.leaves(state.params)
  assert all(np.isfinite(weight).all() for weight in weights)
  initial = jax.device_get(jax.tree.leaves(run.init().params))
  assert any((a != b).any() for a, b in zip(initial, weights, strict=True))


def test_the_deadline_grows_and_is_recorded(whole):
  # Half of 5 steps is 2.5: from 60 s by 120 s / 2.5 each step, up to 180 s.
  deadlines_ms = [row['deadline_ms'] for row in rows(whole)]
  assert deadlines_ms == [60_000, 108_000, 156_000, 180_000, 180_000, 180_000]


# Checkpoints are written after steps 1, 3 and 5.
@pytest.mark.parametrize('moments', [[4], [0], [1, 2], [3, 5, 5]])
def test_two_halves_make_a_whole(run, whole, tmp_path, moments):
  for step in moments:
    with pytest.raises(Killed):
      train.train_arm(run, 'collective', tmp_path, kill_at('collective', step))
  train.train_arm(run, 'collective', tmp_path)
  assert_same_state(load(run, tmp_path), load(run, whole))
  assert rows(tmp_path) == rows(whole)


def test_two_halves_make_a_whole_with_a_critic(tmp_path):
  run = train.build(
      tiny.config(
          steps=4,
          checkpoint_every=2,
          rlcr__advantage='gae',
          rlcr__gae_lambda=0.9,
          rlcr__gamma=0.99,
          rlcr__discount_per='second',
      )
  )
  train.train_arm(run, 'collective', tmp_path / 'whole')
  with pytest.raises(Killed):
    train.train_arm(run, 'collective', tmp_path, kill_at('collective', 3))
  train.train_arm(run, 'collective', tmp_path)
  state = load(run, tmp_path)
  assert_same_state(state, load(run, tmp_path / 'whole'))
  assert rows(tmp_path) == rows(tmp_path / 'whole')
  fresh = jax.device_get(run.init().critic.params)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), fresh, state.critic[0])
  same = jax.tree_util.tree_leaves_with_path(same)
  same = [jax.tree_util.keystr(path) for path, at_rest in same if at_rest]
  # With one layer, relations of targets do not reach the agent's own token.
  assert len(same) == 1 and 'relation' in same[0]
  told = rows(tmp_path)
  assert all(row['critic_loss'] > 0 for row in told)
  assert all(row['explained_variance'] <= 1 for row in told)
  assert 'critic_loss' in (tmp_path / 'metrics.csv').read_text()


def test_a_scheduled_incentive_goes_on_where_it_stopped(tmp_path):
  run = train.build(
      tiny.config(
          steps=5,
          checkpoint_every=2,
          incentive__name='parl',
          incentive__hires=2,
          incentive__parallel=0.4,
          incentive__finish=0.2,
      )
  )
  with pytest.raises(Killed):
    train.train_arm(run, 'collective', tmp_path, kill_at('collective', 2))
  train.train_arm(run, 'collective', tmp_path)
  told = rows(tmp_path)
  parallel = [row['incentive_parallel'] for row in told]
  finish = [row['incentive_finish'] for row in told]
  # Half of 5 updates, the last of which is number 4.
  np.testing.assert_allclose(parallel, [0.4, 0.2, 0, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(finish, [0.2, 0.1, 0, 0, 0], rtol=1e-6)
  bonus = [row['return_mean'] - row['progress_mean'] for row in told]
  assert bonus[0] > 0.1
  np.testing.assert_allclose(bonus[2:], 0, atol=1e-6)


def test_a_harmful_combination_is_warned_of_once(monkeypatch, caplog):
  monkeypatch.setattr(logging.getLogger('absl'), 'propagate', True)
  train._warn.cache_clear()
  config = tiny.config(
      incentive__name='latency_penalty', rlcr__advantage='z_score'
  )
  with caplog.at_level(logging.WARNING, 'absl'):
    train.checked(config)
    train.build(config)
  (told,) = [r.getMessage() for r in caplog.records]
  assert 'latency_penalty' in told and "rlcr.advantage='z_score'" in told


def test_goes_on_from_the_newest_checkpoint(run, tmp_path):
  with pytest.raises(Killed):
    train.train_arm(run, 'collective', tmp_path, kill_at('collective', 4))
  seen = []
  train.train_arm(
      run, 'collective', tmp_path, lambda arm, row: seen.append(row['step'])
  )
  assert seen == [4, 5]


def test_a_kill_between_two_files_of_a_checkpoint(
    run, whole, tmp_path, monkeypatch
):
  """The checkpoint is there, but what follows it is not."""

  def kill(self):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(train.metrics.MetricsWriter, 'flush', kill)
    with pytest.raises(Killed):
      train.train_arm(run, 'collective', tmp_path)
  train.train_arm(run, 'collective', tmp_path)
  assert_same_state(load(run, tmp_path), load(run, whole))
  assert rows(tmp_path) == rows(whole)


def test_a_finished_arm_is_left_as_it_is(run, whole, tmp_path):
  before = contents(whole / 'checkpoints')
  calls = []
  state = train.train_arm(
      run, 'collective', whole, lambda arm, row: calls.append(row)
  )
  assert not calls
  assert contents(whole / 'checkpoints') == before
  assert [row['step'] for row in rows(whole)] == [*range(STEPS)]
  assert int(state.step) == STEPS


def test_every_seed_is_another_run(run, whole, tmp_path):
  other = with_fields(run, seed=1)
  train.train_arm(other, 'collective', tmp_path)
  returns = [[row['return_mean'] for row in rows(f)] for f in (whole, tmp_path)]
  assert returns[0] != returns[1]
  weights = [jax.tree.leaves(load(run, f).params) for f in (whole, tmp_path)]
  assert any((a != b).any() for a, b in zip(*weights, strict=True))


def test_arms_differ_in_their_rules_only(run, whole, tmp_path):
  for arm in ('solo', 'muted'):
    train.train_arm(run, arm, tmp_path / arm)
  solo, muted = rows(tmp_path / 'solo'), rows(tmp_path / 'muted')
  assert {row['team_size_mean'] for row in solo} == {1.0}
  assert max(row['team_size_mean'] for row in muted) > 1.0
  talk = 'communication_tokens_per_s_mean'
  assert max(row[talk] for row in rows(whole)) > 0.0
  for quiet in (solo, muted):
    assert {row[talk] for row in quiet} == {0.0}
    deadlines_ms = [row['deadline_ms'] for row in quiet]
    assert deadlines_ms == [row['deadline_ms'] for row in rows(whole)]


def test_train_trains_every_arm_that_is_asked_for(tmp_path):
  config = tiny.config(
      steps=2, checkpoint_every=1, train_solo=True, train_muted=True
  )
  seen = []
  run = train.train(
      config, tmp_path, lambda arm, row: seen.append((arm, row['step']))
  )
  arms = ('collective', 'solo', 'muted')
  assert run.arms == arms
  assert seen == [(arm, step) for arm in arms for step in range(2)]
  assert run.learner.update._cache_size() == 1  # One program for all.
  for folder in ('.', 'baselines/solo', 'baselines/muted'):
    assert len(rows(tmp_path / folder)) == 2
    assert load(run, tmp_path / folder).step == 2
  config_file = json.loads((tmp_path / 'config.json').read_text())
  assert config_file == config.to_dict()


# What must not be.


def faulty(run, monkeypatch, step, **fields):
  """Makes one update report a fault."""
  honest = run.learner.step

  def learn(state, rules, knobs):
    at = int(state.step)
    state, updates = honest(state, rules, knobs)
    if at == step:
      updates = {env: u._replace(**fields) for env, u in updates.items()}
    return state, updates

  monkeypatch.setattr(run.learner, 'step', learn)


def test_a_nonfinite_loss_stops_the_run_and_is_not_saved(
    run, whole, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    fields = {'finite': np.asarray(False), 'loss': np.float32('nan')}
    faulty(run, patch, 3, **fields)
    with pytest.raises(train.NonFiniteError) as told:
      train.train_arm(run, 'collective', tmp_path)
  text = str(told.value)
  assert 'loss=nan' in text and 'step 3' in text and 'collective' in text
  assert '\n' not in text
  assert load(run, tmp_path).step == 2
  assert [row['step'] for row in rows(tmp_path)] == [0, 1, 2]
  train.train_arm(run, 'collective', tmp_path)  # The fault has gone.
  assert_same_state(load(run, tmp_path), load(run, whole))


def test_a_full_buffer_names_what_to_raise(run, tmp_path, monkeypatch):
  faulty(run, monkeypatch, 2, overflow=np.asarray(True))
  with pytest.raises(train.BufferFullError) as told:
    train.train_arm(run, 'collective', tmp_path)
  text = str(told.value)
  assert 'rlcr.max_decisions=60 is too small' in text and 'step 2' in text
  assert 'Raise it' in text and '\n' not in text
  assert load(run, tmp_path).step == 2


def test_dropped_groups_are_warned_of(run, tmp_path, monkeypatch, caplog):
  faulty(run, monkeypatch, 1, nonfinite_groups=np.int32(3))
  monkeypatch.setattr(logging.getLogger('absl'), 'propagate', True)
  with caplog.at_level(logging.WARNING, 'absl'):
    train.train_arm(run, 'collective', tmp_path)
  assert 'collective, step 1: 3 groups dropped' in caplog.text
  assert [row['nonfinite_groups'] for row in rows(tmp_path)][:3] == [0, 3, 0]


def claim(folder, **changes):
  train.claim_workdir(tiny.config(**changes), folder)


@pytest.mark.parametrize(
    'changes, named',
    [
        ({'seed': 1}, 'seed: 0 → 1'),
        ({'rlcr__tasks': 8}, 'rlcr.tasks: 4 → 8'),
        ({'env__coupling': 0.5}, 'env.coupling: 1.0 → 0.5'),
    ],
)
def test_a_workdir_of_another_config_is_told(tmp_path, changes, named):
  claim(tmp_path, env__coupling=1.0)
  before = contents(tmp_path)
  with pytest.raises(train.WorkdirError) as told:
    claim(tmp_path, **({'env__coupling': 1.0} | changes))
  text = str(told.value)
  assert named in text and str(tmp_path) in text and '\n' not in text
  assert isinstance(told.value, ValueError)
  assert contents(tmp_path) == before


def test_all_differing_fields_are_named(tmp_path):
  claim(tmp_path)
  with pytest.raises(train.WorkdirError) as told:
    claim(tmp_path, seed=1, steps=9)
  assert 'seed: 0 → 1; steps: 4 → 9' in str(told.value)


def test_fields_that_change_no_result_may_differ(tmp_path):
  claim(tmp_path)
  before = contents(tmp_path)
  claim(tmp_path, checkpoint_every=7, num_devices=2, evaluation__num_tasks=16)
  assert contents(tmp_path) == before


def test_the_config_file_follows_what_a_finished_part_is_continued_with(
    tmp_path,
):
  train.train(tiny.config(), tmp_path)
  again = tiny.config(evaluation__num_tasks=16)
  train.train(again, tmp_path)  # Nothing is left to train.
  saved = json.loads((tmp_path / 'config.json').read_text())
  assert saved == again.to_dict()


def test_a_folder_of_something_else_is_told(tmp_path):
  (tmp_path / 'thesis.tex').write_text('precious')
  with pytest.raises(train.WorkdirError, match='thesis.tex'):
    claim(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_a_broken_config_file_is_told(tmp_path):
  (tmp_path / 'config.json').write_text('{"seed": ')
  with pytest.raises(train.WorkdirError, match='config.json is not valid JSON'):
    claim(tmp_path)
  assert (tmp_path / 'config.json').read_text() == '{"seed": '


def test_a_kill_while_the_workdir_is_claimed(tmp_path, monkeypatch):
  """What a half-written config.json leaves is no other run."""

  def kill(*unused):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', kill)
    with pytest.raises(Killed):
      claim(tmp_path / 'run')
  claim(tmp_path / 'run')
  assert (tmp_path / 'run' / 'config.json').exists()


def test_a_bad_config_claims_nothing(tmp_path):
  config = tiny.config()
  config.rlcr.group_size = 1
  with pytest.raises(ValueError, match='rlcr.group_size=1'):
    train.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


# Real kills.

_SCRIPT = """
import pathlib, sys
from rlcr_jax import train
from tests import tiny
config = tiny.config(steps=int(sys.argv[2]), checkpoint_every=int(sys.argv[3]))
train.train(config, pathlib.Path(sys.argv[1]))
"""


def train_and_kill(folder, steps, every, may_kill, within_s):
  """Starts training in a process and kills it; how it ended, and where."""
  command = [sys.executable, '-c', _SCRIPT, folder, str(steps), str(every)]
  with subprocess.Popen(
      command, cwd=ROOT, stderr=subprocess.PIPE, text=True
  ) as process:
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until:
      if may_kill():
        break
      time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    errors = process.communicate()[1]
  return process.returncode, errors


def lines(folder):
  path = folder / 'metrics.jsonl'
  return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_killed_and_started_again_ends_the_same(run, tmp_path):
  steps, every = 30, 2
  longer = with_fields(run, steps=steps, checkpoint_every=every)
  train.train_arm(longer, 'collective', tmp_path / 'whole')
  killed = tmp_path / 'killed'
  code, errors = train_and_kill(
      killed, steps, every, lambda: lines(killed) >= 5, 120
  )
  assert code == -signal.SIGKILL, errors
  assert 5 <= lines(killed) < steps
  train.train(tiny.config(steps=steps, checkpoint_every=every), killed)
  assert_same_state(load(run, killed), load(run, tmp_path / 'whole'))
  assert rows(killed) == rows(tmp_path / 'whole')


@pytest.mark.slow
def test_killed_again_and_again_ends_the_same(run, tmp_path):
  """At any moment: also while it starts, and while it saves."""
  steps, every = 60, 1
  longer = with_fields(run, steps=steps, checkpoint_every=every)
  train.train_arm(longer, 'collective', tmp_path / 'whole')
  killed, chance, kills = tmp_path / 'killed', random.Random(0), 0
  for _ in range(8):
    before, wait_s = lines(killed), chance.uniform(0, 0.3)
    more = chance.choice([0, 1, 3, 8])

    def may_kill(before=before, more=more, wait_s=wait_s):
      if (killed / 'config.json').exists() and lines(killed) >= before + more:
        time.sleep(wait_s)
        return True
      return False

    code, errors = train_and_kill(killed, steps, every, may_kill, 120)
    assert code in (0, -signal.SIGKILL), errors
    kills += code != 0
  assert kills >= 3
  train.train(tiny.config(steps=steps, checkpoint_every=every), killed)
  assert_same_state(load(run, killed), load(run, tmp_path / 'whole'))
  assert rows(killed) == rows(tmp_path / 'whole')
