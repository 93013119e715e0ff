"""Tests of the commands: what they say, what they write, and how they end."""

import json
import pathlib
import shutil
import subprocess
import sys

from absl.testing import flagsaver
from envs.base import NotAllowedError
from experiments import cli
from experiments import evaluate as evaluate_command
from experiments import train as train_command
from experiments.configs import default
import jax
import pytest
from rlcr_jax import checkpoints
from rlcr_jax import files
from rlcr_jax import train

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOKE = '--config=experiments/configs/default.py:smoke'


def call(command, *args):
  """Runs a command in this process, as its module would; its exit status."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', [command.__name__, *map(str, args)])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
      cli.run(command.main)
  return end.value.code or 0


def start(module, *args):
  """Runs a command in a process of its own."""
  command = [sys.executable, '-m', f'experiments.{module}', *map(str, args)]
  return subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=False
  )


def told(errors):
  """The one line that tells of an error; there must be nothing else."""
  lines = errors.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith('error: '), errors
  assert 'Traceback' not in errors
  return lines[0]


def contents(folder):
  """Bytes and times of all files."""
  return {
      path: (path.read_bytes(), path.stat().st_mtime_ns)
      for path in folder.rglob('*')
      if path.is_file()
  }


BAD = {
    'unknown field': (['--config.rlcr.tsks=3'], ['rlcr.tsks', '3', 'tasks']),
    'unknown section': (['--config.rlrc.tasks=3'], ['rlrc', 'rlcr']),
    'no integer': (['--config.rlcr.tasks=many'], ['rlcr.tasks', 'many', 'int']),
    'a fraction': (['--config.rlcr.tasks=2.5'], ['rlcr.tasks', '2.5', 'int']),
    'group of one': (
        ['--config.rlcr.group_size=1'],
        ['rlcr.group_size=1', '>= 2'],
    ),
    'no agents': (
        ['--config.collective.num_agents=0'],
        ['collective.num_agents=0', '>= 1'],
    ),
    'too short a deadline': (
        ['--config.deadline.first_ms=1000'],
        ['deadline.first_ms=1000', '>= '],
    ),
    'too many devices': (['--config.num_devices=99'], ['num_devices=99', '4']),
    'unknown environment': (
        ['--config.env.name=chess'],
        ["env.name='chess'", 'software'],
    ),
    'unknown flag': (['--wrkdir=x'], ['wrkdir']),
    'an argument': (['hello'], ['hello', 'flags']),
    'no such config': (['--config=nowhere.py'], ['nowhere.py']),
    'no such variant': (
        ['--config=experiments/configs/default.py:large'],
        ['large', 'smoke'],
    ),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_input_is_told_in_one_line(tmp_path, capfd, name):
  args, words = BAD[name]
  workdir = tmp_path / 'run'
  status = call(train_command, SMOKE, f'--workdir={workdir}', *args)
  assert status != 0
  line = told(capfd.readouterr().err)
  assert all(word in line for word in words), line
  assert '\\n' not in line and 'File "' not in line
  assert not workdir.exists()


@pytest.mark.parametrize(
    'args, words',
    [
        (['--config.rlcr.tsks=3'], ['rlcr.tsks', 'tasks']),
        (['--config.rlcr.group_size=1'], ['rlcr.group_size=1', '>= 2']),
    ],
)
def test_bad_input_ends_a_process(tmp_path, args, words):
  workdir = tmp_path / 'run'
  ended = start('train', SMOKE, f'--workdir={workdir}', *args)
  assert ended.returncode in (1, 2)
  line = told(ended.stderr)
  assert all(word in line for word in words), line
  assert not ended.stdout and not workdir.exists()


@pytest.mark.parametrize('command', [train_command, evaluate_command])
def test_a_missing_workdir_is_told(capfd, command):
  assert call(command) != 0
  assert '--workdir is missing' in told(capfd.readouterr().err)


def test_a_workdir_that_is_a_file_is_told(tmp_path, capfd):
  path = tmp_path / 'file'
  path.write_text('precious')
  assert call(train_command, SMOKE, f'--workdir={path}') != 0
  assert str(path) in told(capfd.readouterr().err)
  assert path.read_text() == 'precious'


def test_evaluating_what_is_no_run_is_told(tmp_path, capfd):
  workdir = tmp_path / 'run'
  assert call(evaluate_command, f'--workdir={workdir}') != 0
  line = told(capfd.readouterr().err)
  assert 'holds no run' in line and str(workdir / 'config.json') in line
  assert not workdir.exists()


@pytest.mark.parametrize(
    'error',
    [
        NotAllowedError('rlcr.tasks=0 is not allowed'),
        FileNotFoundError('no checkpoint'),
        train.NonFiniteError('loss=nan'),
        train.BufferFullError('rlcr.max_decisions=1 is too small'),
        checkpoints.CheckpointError('damaged'),
    ],
)
def test_errors_of_a_run_are_told_in_one_line(capfd, monkeypatch, error):
  def main():
    raise error

  monkeypatch.setattr(train_command, 'main', main)
  assert call(train_command) == 1
  assert told(capfd.readouterr().err) == f'error: {error}'


@pytest.mark.parametrize('defect', [ZeroDivisionError, ValueError])
def test_a_defect_keeps_its_traceback(monkeypatch, defect):
  """An error that is nobody's input must not be hidden."""

  def main():
    raise defect

  monkeypatch.setattr(sys, 'argv', ['train'])
  with flagsaver.flagsaver(), pytest.raises(defect):
    cli.run(main)


# One run of seconds, from the command to the report.


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The workdir of a finished run."""
  workdir = tmp_path_factory.mktemp('smoke') / 'run'
  assert call(train_command, SMOKE, f'--workdir={workdir}') == 0
  return workdir


def load(run, folder):
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  state = saved.restore(run.init())
  saved.close()
  state = state._replace(key=jax.random.key_data(state.key))
  return [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(state))]


def test_a_run_leaves_everything(finished):
  steps = default.get_config('smoke').steps
  for folder in (finished, finished / 'baselines' / 'solo'):
    rows = files.read_lines(folder / 'metrics.jsonl')
    assert [row['step'] for row in rows] == [*range(steps)]
    assert len((folder / 'metrics.csv').read_text().splitlines()) == steps + 1
    assert list((folder / 'tensorboard').glob('events.*'))
    assert (folder / 'checkpoints' / str(steps)).is_dir()
  config = json.loads((finished / 'config.json').read_text())
  assert config == default.get_config('smoke').to_dict()
  evaluation = json.loads((finished / 'evaluation.json').read_text())
  assert {'collective', 'solo', 'oracle'} <= set(evaluation['modes'])
  page = (finished / 'report.html').read_text()
  assert page.startswith('<!') and 'data:image/png;base64,' in page
  assert list((finished / 'figures').glob('*.png'))
  assert (finished / 'DONE').exists()


def test_a_second_start_says_so_and_does_nothing(finished, capfd):
  before = contents(finished)
  assert call(train_command, SMOKE, f'--workdir={finished}') == 0
  said = ' '.join(capfd.readouterr().err.split())
  assert 'finished run: nothing to do' in said
  assert contents(finished) == before


def test_a_start_with_another_config_is_told(finished, capfd):
  before = contents(finished)
  args = SMOKE, f'--workdir={finished}', '--config.seed=7'
  assert call(train_command, *args) == 1
  assert 'seed: 0 → 7' in told(capfd.readouterr().err)
  assert contents(finished) == before


def test_evaluating_again_gives_the_same(finished, tmp_path, capfd):
  workdir = tmp_path / 'copy'
  shutil.copytree(finished, workdir)
  (workdir / 'evaluation.json').unlink()
  (workdir / 'report.html').unlink()
  before = contents(workdir / 'checkpoints')
  assert call(evaluate_command, f'--workdir={workdir}') == 0
  for name in ('evaluation.json', 'metrics.jsonl', 'metrics.csv'):
    assert (workdir / name).read_bytes() == (finished / name).read_bytes()
  assert contents(workdir / 'checkpoints') == before
  assert (workdir / 'report.html').exists()
  said = capfd.readouterr().err
  assert 'collective' in said and 'oracle' in said and 'report: ' in said


def test_evaluation_changes_nothing_in_training(finished, tmp_path):
  """The same parameters as training alone gives."""
  run = train.train(default.get_config('smoke'), tmp_path)
  for folder in ('.', 'baselines/solo'):
    assert load(run, tmp_path / folder) == load(run, finished / folder)
  assert not (tmp_path / 'evaluation.json').exists()


def test_a_damaged_checkpoint_is_told_in_one_line(finished, tmp_path):
  workdir = tmp_path / 'copy'
  shutil.copytree(finished, workdir)
  steps = default.get_config('smoke').steps
  (path,) = (workdir / 'checkpoints' / str(steps) / 'default' / 'd').iterdir()
  path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))
  before = contents(workdir)
  ended = start('evaluate', f'--workdir={workdir}')
  assert ended.returncode == 1
  line = told(ended.stderr)
  assert str(workdir / 'checkpoints' / str(steps)) in line
  assert 'damaged' in line
  assert contents(workdir) == before
