"""Tests of sweeps: their units, how they are run, and what is collected."""

import fcntl
import importlib
import json
import math
import pathlib
import shlex
import sys
import time

from absl.testing import flagsaver
from envs.base import NotAllowedError
from experiments import board
from experiments import cli
from experiments import processes
from experiments import sweep as sweep_command
from experiments import train as train_command
import pytest
from rlcr_jax import files
from rlcr_jax import sweep_report
from rlcr_jax import sweep_results
from rlcr_jax import sweeps
from rlcr_jax import train
from rlcr_jax.sweep_results import State
from tests.cli_test import call
from tests.cli_test import contents
from tests.cli_test import told

ROOT = pathlib.Path(__file__).resolve().parents[1]
SWEEPS = sorted(
    path
    for path in ROOT.glob('experiments/configs/*.py')
    if 'def get_sweep' in path.read_text()
)

# A sweep of which one arm needs more decisions than its buffer holds.
FILE = '''"""What it is for."""
from rlcr_jax import sweeps
from tests import tiny

def get_config(variant=''):
  return tiny.config(steps=2)

def get_sweep(variant=''):
  arms = {arms}
  return sweeps.Sweep(arms, {seeds}, curves=('return_mean', 'turns_tell'))
'''
ARMS = {
    'rloo': {'rlcr.advantage': 'rloo'},
    'small': {'rlcr.max_decisions': 1},
}
MORE = {
    'quiet,fast': {
        'collective.board': False,
        'rlcr.learning_rate': 1e-5,
        'rlcr.entropy_bonus': 1,
    },
    'search': {
        sweeps.CONFIG: 'experiments/configs/search.py:smoke',
        'env.num_rich': 3,
    },
}


def write(folder, arms, seeds=(0, 1)):
  path = folder / 'config.py'
  path.write_text(FILE.format(arms=repr(arms), seeds=seeds))
  return str(path)


# What the units are.


def test_values_by_hand():
  assert sweeps.values('deadline.ramp', (0.5, 1)) == {
      'ramp=0.5': {'deadline.ramp': 0.5},
      'ramp=1': {'deadline.ramp': 1},
  }


def test_product_zip_and_chain_by_hand():
  left = {'a': {'x': 1}, 'b': {'x': 2}}
  right = {'c': {'y': 3}, 'd': {'y': 4, 'z': 5}}
  assert sweeps.product(left, right) == {
      'a,c': {'x': 1, 'y': 3},
      'a,d': {'x': 1, 'y': 4, 'z': 5},
      'b,c': {'x': 2, 'y': 3},
      'b,d': {'x': 2, 'y': 4, 'z': 5},
  }
  assert sweeps.zipped(left, right) == {
      'a,c': {'x': 1, 'y': 3},
      'b,d': {'x': 2, 'y': 4, 'z': 5},
  }
  assert sweeps.chain(left, right) == left | right
  assert left == {'a': {'x': 1}, 'b': {'x': 2}}


@pytest.mark.parametrize(
    'make, words',
    [
        (lambda a: sweeps.product(a, a), ['x=1', 'is set too']),
        (lambda a: sweeps.zipped(a, {}), ['zipped=[1, 0]', 'as many']),
        (lambda a: sweeps.chain(a, a), ["arm='a'", 'taken']),
        (lambda a: sweeps.Sweep({'a/b': {}}), ["arm='a/b'", 'letters']),
        (lambda a: sweeps.Sweep({}), ['arms={}', 'one at least']),
        (lambda a: sweeps.Sweep(a, ()), ['seeds=()', 'one at least']),
        (lambda a: sweeps.Sweep(a, (1, 1)), ['seeds=(1, 1)', 'different']),
    ],
)
def test_what_is_no_sweep_is_told(make, words):
  with pytest.raises(NotAllowedError) as error:
    make({'a': {'x': 1}})
  assert all(word in str(error.value) for word in words), error.value


def parsed(command):
  """The configuration and the workdir that a command's flags give."""
  got = []
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', command[2:])
    with flagsaver.flagsaver(), pytest.raises(SystemExit):
      cli.run(lambda: got.extend([cli.config(), cli.require_workdir()]))
  return got


def dry_run(path, capfd, *args):
  """The commands that are printed, and nothing else."""
  workdir = '/nowhere/a b'
  config = f'--config={path}'
  args = [config, *args, f'--workdir={workdir}', '--dry_run']
  assert call(sweep_command, *args) == 0
  captured = capfd.readouterr()
  assert not captured.err and not pathlib.Path('/nowhere').exists()
  return [shlex.split(line) for line in captured.out.splitlines()]


def test_some_of_the_arms(tmp_path, capfd):
  path = write(tmp_path, ARMS | MORE)
  everything = dry_run(path, capfd)
  first, last = 'quiet,fast', 'rloo'
  some = dry_run(path, capfd, f'--only={last}', f'--only={first}')
  arms = [c[-1].split('/')[-2] for c in everything]
  wanted = [
      command
      for command, arm in zip(everything, arms, strict=True)
      if arm in (first, last)
  ]
  assert some == wanted and len(some) == 4 < len(everything)
  with pytest.raises(NotAllowedError, match="only='nobody'.*'rloo'"):
    sweeps.Sweep(ARMS).only(['nobody'])


def test_printed_commands_give_the_very_units(tmp_path, capfd):
  path = write(tmp_path, ARMS | MORE)
  commands = dry_run(path, capfd, '--config.num_devices=1')
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    sweep, about = sweeps.load(path)
    units = sweeps.units(sweep, path, {'num_devices': 1})
  assert about == 'What it is for.'
  assert len(commands) == len(units) == 8
  for command, unit in zip(commands, units, strict=True):
    assert command[:3] == ['python', '-m', 'experiments.train']
    config, workdir = parsed(command)
    assert config.to_dict() == unit.config.to_dict()
    assert workdir == pathlib.Path('/nowhere/a b') / unit.arm / (
        f'seed_{unit.seed}'
    )
    assert config.seed == unit.seed and config.num_devices == 1
    for field, value in sweep.arms[unit.arm].items():
      if field != sweeps.CONFIG:
        *sections, leaf = field.split('.')
        assert (config[sections[0]] if sections else config)[leaf] == value
  assert [u.config.env.name for u in units[::2]] == 3 * ['software'] + [
      'search'
  ]


@pytest.mark.parametrize(
    'arm, words',
    [
        ({'rlcr.tsks': 3}, ['rlcr.tsks=3', 'rlcr.tasks']),
        ({'rlcr': 3}, ['rlcr=3', 'no such field']),
        ({'rlcr.group_size': 1}, ['rlcr.group_size=1', '>= 2']),
        ({'rlcr.tasks': 'many'}, ["rlcr.tasks='many'", 'int']),
        ({'seed': 3}, ['seed=', 'set too']),
        ({'num_devices': 2}, ['num_devices=2', 'set too']),
        ({sweeps.CONFIG: 'nowhere.py'}, ['nowhere.py']),
        (
            {sweeps.CONFIG: 'experiments/configs/search.py:large'},
            ["variant 'large'", 'smoke'],
        ),
    ],
)
def test_a_bad_arm_ends_it_before_any_work(tmp_path, capfd, arm, words):
  path = write(tmp_path, {'good': {}, 'odd': arm})
  workdir = tmp_path / 'sweep'
  args = f'--config={path}', '--config.num_devices=1', f'--workdir={workdir}'
  assert call(sweep_command, *args) == 1
  line = told(capfd.readouterr().err)
  assert "arm 'odd', seed 0: " in line
  assert all(word in line for word in words), line
  assert not workdir.exists()


@pytest.mark.parametrize(
    'args, words',
    [
        (['--config=experiments/configs/search.py'], ['get_sweep(variant)']),
        (['--config=nowhere.py'], ['nowhere.py']),
        (
            ['--config=experiments/configs/ablation_time_limits.py:large'],
            ['large', 'smoke'],
        ),
        (
            [
                '--config=experiments/configs/ablation_time_limits.py',
                '--parallel=0',
            ],
            ['parallel=0', '>= 1'],
        ),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path, capfd, args, words):
  assert call(sweep_command, *args, f'--workdir={tmp_path / "sweep"}') != 0
  line = told(capfd.readouterr().err)
  assert all(word in line for word in words), line
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('path', SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_is_allowed(path, monkeypatch):
  monkeypatch.chdir(ROOT)
  module = importlib.import_module(f'experiments.configs.{path.stem}')
  told_by_name = str(path.relative_to(ROOT))
  assert f'--config={told_by_name} --workdir=DIR' in module.__doc__
  sizes = []
  for variant in ('', ':smoke'):
    sweep, _ = sweeps.load(told_by_name + variant)
    units = sweeps.units(sweep, told_by_name + variant, {})
    sizes.append(sum(map(sweeps.total_steps, units)))
    assert len(units) == len(sweep.arms) * len(sweep.seeds)
  assert sizes[1] < sizes[0] / 50


def test_equal_time_adds_up_to_the_time_of_the_long_arm():
  module = importlib.import_module('experiments.configs.ablation_time_limits')
  arms = module.get_sweep('equal_time').arms
  assert arms['long']['steps'] == 200
  assert arms['short']['steps'] == 400  # 90 s instead of 180 s.
  assert arms['toggle']['steps'] == 320  # 112.5 s on average.
  assert arms['sampled']['steps'] == pytest.approx(320, abs=3)
  assert 200 < arms['linear']['steps'] < 206  # 6 % at 112.5 s.


# How they are run.


def python(code):
  return ['python', '-c', code]


def until_ended(runner):
  result = {}
  while runner._running:
    result |= runner.ended()
    time.sleep(0.01)
  return result


def test_processes_say_how_they_ended(tmp_path):
  with processes.Processes(3) as runner:
    codes = {
        'good': 'print(7)',
        'bad': 'import sys; print(1); sys.exit("error: too small\\n")',
        'killed': 'import os; os.kill(os.getpid(), 9)',
    }
    for name, code in codes.items():
      assert runner.free
      runner.start(name, python(code), tmp_path / 'logs' / name)
    assert not runner.free
    assert until_ended(runner) == {
        'good': '',
        'bad': 'too small',
        'killed': 'killed by SIGKILL',
    }
    assert runner.free == 3
  assert (tmp_path / 'logs/good').read_text() == "$ python -c 'print(7)'\n7\n"


def test_what_runs_is_not_started_again_and_is_stopped(tmp_path):
  log = tmp_path / 'log'
  sleep = python('import time; time.sleep(60)')
  with processes.Processes(2) as runner, processes.Processes(2) as other:
    runner.start('a', sleep, log)
    with pytest.raises(BlockingIOError):
      other.start('a', sleep, log)
    began = time.monotonic()
    runner.stop()
    assert time.monotonic() - began < 5
    other.start('a', python('pass'), log)  # The lock is gone.
    assert until_ended(other) == {'a': ''}


def test_cores_are_shared_out(tmp_path, monkeypatch):
  monkeypatch.setattr(processes.os, 'cpu_count', lambda: 5)
  show = python('import os; print(os.environ.get("JAX_NUM_CPU_DEVICES"))')
  seen = []
  for given, parallel in ((None, 1), (None, 2), (None, 9), ('3', 2)):
    if given:
      monkeypatch.setenv('JAX_NUM_CPU_DEVICES', given)
    else:
      monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
    with processes.Processes(parallel) as runner:
      runner.start('a', show, tmp_path / 'log')
      until_ended(runner)
    seen.append((tmp_path / 'log').read_text().split()[-1])
  assert seen == ['None', '2', '1', '3']


class InThisProcess:
  """Runs units at once; all that a launcher must do."""

  free = 1

  def __init__(self, units, workdir):
    self._units, self._workdir, self._ended = units, workdir, {}

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    pass

  def start(self, name, command, log):
    assert command[-1] == f'--workdir={self._workdir / name}'
    assert log == self._workdir / f'{name}.log'
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(cli, 'config', lambda: self._units[name].config)
      patch.setattr(cli, 'require_workdir', lambda: self._workdir / name)
      try:
        train_command.main()
        self._ended[name] = ''
      except train.BufferFullError as error:
        self._ended[name] = str(error)

  def ended(self):
    ended, self._ended = self._ended, {}
    return ended


def sweep_in_this_process(path, workdir):
  """The exit status of a sweep whose units share what is compiled."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    units = {u.name: u for u in sweeps.units(sweeps.load(path)[0], path, {})}
    runner = InThisProcess(units, workdir)
    patch.setattr(processes, 'Processes', lambda parallel: runner)
    patch.setattr(sweep_command, '_POLL_S', 0)
    return call(sweep_command, f'--config={path}', f'--workdir={workdir}')


@pytest.mark.parametrize('path', SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_runs(path, tmp_path):
  path = f'{path.relative_to(ROOT)}:smoke'
  assert sweep_in_this_process(path, tmp_path) == 0
  found = json.loads((tmp_path / 'sweep.json').read_text())
  for unit in found['units']:
    assert unit['state'] == 'finished'
    absent = [n for n in found['columns'] if unit['numbers'].get(n) is None]
    assert not absent, f'{unit["workdir"]} has no {absent}.'
  drawn = {chart.stem for chart in tmp_path.glob('figures/*.png')}
  assert drawn >= {'sweep'} | {f'curve_{name}' for name in found['curves']}


# One sweep, from the command to the report.


@pytest.fixture(scope='module')
def swept(tmp_path_factory):
  """The configuration, the workdir and the exit status of a whole sweep."""
  folder = tmp_path_factory.mktemp('swept')
  path, workdir = write(folder, ARMS), folder / 'sweep'
  return path, workdir, sweep_in_this_process(path, workdir)


def found_in(workdir):
  """What was found, and its units by name."""
  found = json.loads((workdir / 'sweep.json').read_text())
  return found, {unit['workdir']: unit for unit in found['units']}


def states_in(workdir):
  return {name: unit['state'] for name, unit in found_in(workdir)[1].items()}


def test_a_unit_that_fails_leaves_the_others_alone(swept):
  _, workdir, status = swept
  assert status == 1
  assert states_in(workdir) == {
      'rloo/seed_0': 'finished',
      'rloo/seed_1': 'finished',
      'small/seed_0': 'failed',
      'small/seed_1': 'failed',
  }


def test_units_run_in_processes(tmp_path, capfd):
  path, workdir = write(tmp_path, ARMS, (0,)), tmp_path / 'sweep'
  args = f'--config={path}', f'--workdir={workdir}', '--parallel=2'
  assert call(sweep_command, *args) == 1
  assert states_in(workdir) == {
      'rloo/seed_0': 'finished',
      'small/seed_0': 'failed',
  }
  failed = found_in(workdir)[1]['small/seed_0']
  assert failed['error'].startswith('rlcr.max_decisions=1 is too small')
  assert failed['error'] in (workdir / failed['log']).read_text()
  page = (workdir / 'report.html').read_text()
  assert failed['error'] in page and failed['log'] in page
  said = capfd.readouterr().err
  assert f'error: small/seed_0: {failed["error"]} (see {workdir}' in said


def test_collected_numbers_are_those_of_the_units(swept):
  _, workdir, _ = swept
  _, units = found_in(workdir)
  table = (workdir / 'sweep.csv').read_text().splitlines()
  assert len(table) == 1 + len(units)
  for name, unit in units.items():
    if unit['state'] != 'finished':
      assert not any(n.startswith('modes.') for n in unit['numbers'])
      continue
    folder = workdir / name
    mine = json.loads((folder / 'evaluation.json').read_text())
    for mode, entry in mine['modes'].items():
      for field, value in entry.items():
        if field == 'return_ci95':
          low, high = value
          place = f'modes.{mode}.{field}'
          assert unit['numbers'][f'{place}.low'] == low
          assert unit['numbers'][f'{place}.high'] == high
        else:
          assert unit['numbers'][f'modes.{mode}.{field}'] == value
    rows = files.read_lines(folder / 'metrics.jsonl')
    assert unit['numbers']['training.return_mean'] == rows[-1]['return_mean']
    decisions = [row['decisions'] for row in rows]
    assert unit['numbers']['total.decisions'] == sum(decisions)


def test_arms_are_summarised_over_their_finished_seeds(swept):
  _, workdir, _ = swept
  found, units = found_in(workdir)
  assert list(found['arms']) == list(ARMS)
  assert found['arms']['small'] == {'seeds': [], 'numbers': {}}
  name = 'modes.collective.return_mean'
  a, b = (units[f'rloo/seed_{seed}']['numbers'][name] for seed in (0, 1))
  entry = found['arms']['rloo']['numbers'][name]
  assert entry['mean'] == pytest.approx((a + b) / 2)
  # Student's t with one degree of freedom, times |a - b| / √2, over √2.
  half = 12.7062 * abs(a - b) / 2
  assert entry['ci95'] == pytest.approx(
      [entry['mean'] - half, entry['mean'] + half], rel=1e-4
  )
  assert entry['seeds'] == 2
  assert found['arms']['rloo']['seeds'] == [0, 1]


def test_a_second_start_runs_what_is_not_finished(swept, capfd):
  path, workdir, _ = swept
  done = [path.parent for path in workdir.rglob('DONE')]
  assert len(done) == 2
  before = [contents(folder) for folder in done]
  found = found_in(workdir)
  assert sweep_in_this_process(path, workdir) == 1
  assert [contents(folder) for folder in done] == before
  assert found_in(workdir) == found
  said = capfd.readouterr().err
  assert 'small/seed_0: running' in said and 'rloo/seed_0: running' not in said


def test_a_workdir_of_another_sweep_is_told(swept, tmp_path, capfd):
  _, workdir, _ = swept
  before = contents(workdir)
  for arm, named in (
      ({'rlcr.advantage': 'z_score'}, "rlcr.advantage: 'rloo' → 'z_score'"),
      (
          {'rlcr.advantage': 'rloo', 'evaluation.num_tasks': 16},
          'evaluation.num_tasks: 8 → 16',
      ),
  ):
    path = write(tmp_path, {'rloo': arm})
    args = f'--config={path}', f'--workdir={workdir}'
    assert call(sweep_command, *args) == 1
    line = told(capfd.readouterr().err)
    assert named in line and str(workdir / 'rloo' / 'seed_0') in line
  assert contents(workdir) == before


def test_an_interrupted_sweep_ends_its_processes(tmp_path, monkeypatch, capfd):
  path, workdir = write(tmp_path, {'a': {}}), tmp_path / 'sweep'

  def interrupt(self):
    raise KeyboardInterrupt

  monkeypatch.setattr(board.Board, 'refresh', interrupt)
  args = f'--config={path}', f'--workdir={workdir}'
  assert call(sweep_command, *args) == 130
  assert 'the same command goes on' in capfd.readouterr().err
  with (workdir / 'a/seed_0.log').open() as log:
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Nothing has it.


# What is shown.


def made(tmp_path, returns):
  """What is found of arms whose seeds returned so much, by hand."""
  units, states = [], {}
  for arm, of_seeds in returns.items():
    for seed, value in enumerate(of_seeds):
      unit = sweeps.Unit(arm, seed, 'x.py', {'seed': seed}, None)
      units.append(unit)
      states[unit.name] = State('waiting' if value is None else 'finished')
      if value is not None:
        files.write_json(
            tmp_path / unit.name / 'evaluation.json',
            {'modes': {'collective': {'return_mean': value}}, 'seed': seed},
        )
  sweep = sweeps.Sweep(dict.fromkeys(returns, {}))
  return sweep_results.collect(sweep, units, states, tmp_path)


@pytest.mark.parametrize(
    'returns, doubt',
    [
        ({'a': (0.1, 0.12, 0.11), 'b': (0.9, 0.92, 0.91)}, 'do not overlap'),
        ({'a': (0.1, 0.8, 0.3), 'b': (0.9, 0.2, 0.91)}, 'seeds overlap'),
        ({'a': (0.1,), 'b': (0.9, 0.9)}, 'single seeds'),
    ],
)
def test_the_headline_says_how_sure_it_is(tmp_path, returns, doubt):
  text = sweep_report.headline(made(tmp_path, returns))
  assert text.startswith('Return: b has 0.') and doubt in text


def test_intervals_by_hand(tmp_path):
  found = made(tmp_path, {'a': (0.1, 0.2, 0.3, None)})
  entry = found['arms']['a']['numbers']['modes.collective.return_mean']
  # t = 4.3027 for two degrees of freedom; s = 0.1; √3.
  half = 4.3027 * 0.1 / math.sqrt(3)
  assert entry['mean'] == pytest.approx(0.2)
  assert entry['ci95'] == pytest.approx([0.2 - half, 0.2 + half], rel=1e-4)
  assert found['arms']['a']['seeds'] == [0, 1, 2]


@pytest.mark.parametrize(
    'name, label, text',
    [
        ('modes.collective.return_mean', 'return', '0.250'),
        ('modes.solo.return_mean', 'solo return', '0.250'),
        (
            'environments.search.modes.muted.x_y',
            'search channels cut x y',
            '0.25',
        ),
        ('total.deadline_ms', 'simulated s', '0'),
        ('training.turns_tell', 'training turns tell', '0.25'),
    ],
)
def test_numbers_have_labels(name, label, text):
  column = sweep_report.column(name)
  assert column.label == label and column.text(0.25) == text
  assert column.text(None) == '–'


def test_the_board_shows_what_each_unit_is_at(tmp_path, monkeypatch):
  path = write(tmp_path, {'a': {'train_solo': True}}, (0, 1, 2))
  monkeypatch.chdir(ROOT)
  units = sweeps.units(sweeps.load(path)[0], path, {})
  names = ('finished', 'running', 'failed')
  states = {
      unit.name: State(name) for unit, name in zip(units, names, strict=True)
  }
  states['a/seed_2'] = State('failed', 'too [small]')
  name = 'modes.collective.return_mean'
  files.write_json(
      tmp_path / 'a/seed_0/evaluation.json',
      {'modes': {'collective': {'return_mean': 0.5}}},
  )
  shown = board.Board(units, states, tmp_path, name)
  clock = iter((0.0, 70.0, 70.0))
  monkeypatch.setattr(board.time, 'monotonic', lambda: next(clock))
  shown.changed('a/seed_1')
  row = {'step': 1, 'return_mean': 0.25}
  files.write_text(tmp_path / 'a/seed_1/metrics.jsonl', files.dumps(row) + '\n')
  solo = tmp_path / 'a/seed_1/baselines/solo/metrics.jsonl'
  files.write_text(solo, '{"step": 0}\n{"st')
  cells = [list(column.cells) for column in shown.table().columns]
  assert list(zip(*cells, strict=True)) == [
      ('a/seed_2', 'failed', '0/4', '', 'too \\[small]'),
      # Three of four updates, two of the collective's, in 70 s.
      ('a/seed_1', 'running', '3/4', '0:23', 'training 0.250'),
      ('a/seed_0', 'finished', '4/4', '', '0.500'),
  ]


def test_nothing_finished_is_no_error(tmp_path):
  found = made(tmp_path, {'a': (None,), 'b': (None,)})
  page = sweep_report.write(found, 'title', '', tmp_path)
  assert 'No unit is finished.' in page.read_text()
  assert not list(tmp_path.glob('figures/*'))
  assert sweep_report.table(found).row_count == 2


def test_the_page_loads_nothing(swept):
  _, workdir, _ = swept
  page = (workdir / 'report.html').read_text()
  assert page.count('src="') == page.count('src="data:image/png;base64,') == 4
  assert 'href' not in page and '<script' not in page
  assert 'What it is for.' in page
  names = {chart.stem for chart in workdir.glob('figures/*.png')}
  assert names == {
      'sweep',
      'return_by_deadline',
      'curve_return_mean',
      'curve_turns_tell',
  }
