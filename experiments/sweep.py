"""Runs a sweep: every arm with every seed, and compares the arms.

  python -m experiments.sweep --config=experiments/configs/ablation_X.py \
      --workdir=DIR [--parallel=2] [--only=ARM ...] [--dry_run] \
      [--config.FIELD=VALUE ...]

The configuration file has a function `get_sweep` beside `get_config`. Each unit
is a run of `experiments.train` in a process and a folder of its own,
`DIR/ARM/seed_S`, and its output goes to `DIR/ARM/seed_S.log`. A unit that fails
leaves the others alone. Started again, a sweep skips what is finished and goes
on with the rest. It leaves `sweep.json`, `sweep.csv`, `figures/` and
`report.html`.
"""

from collections.abc import Iterator
import contextlib
import pathlib
import shlex
import signal
import sys
import time

from absl import flags
from envs.base import require
from experiments import board as board_lib
from experiments import cli
from experiments import processes
from rlcr_jax import sweep_report
from rlcr_jax import sweep_results
from rlcr_jax import sweeps
from rlcr_jax.sweep_results import State

_PARALLEL = flags.DEFINE_integer('parallel', 1, 'Units that run at once.')
_ONLY = flags.DEFINE_multi_string(
    'only', [], 'An arm to run, given once or more; none: all of them.'
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Print the command of every unit, and do nothing.'
)

_POLL_S = 0.5


def main() -> int:
  """Runs the units that are not finished; 1 if one failed, 130 if stopped."""
  path, overrides = cli.config_path()
  require(_PARALLEL.value >= 1, 'parallel', _PARALLEL.value, '>= 1')
  workdir = cli.require_workdir()
  sweep, about = sweeps.load(path)
  sweep = sweep.only(_ONLY.value)
  units = sweeps.units(sweep, path, overrides)
  if _DRY_RUN.value:
    for unit in units:
      print(shlex.join(command(unit, workdir)))
    return 0
  sweeps.check_workdirs(units, workdir)
  done = {unit.name: sweeps.finished(unit, workdir) for unit in units}
  states = {n: State('finished' if d else 'waiting') for n, d in done.items()}

  def collect() -> dict:
    found = sweep_results.collect(sweep, units, states, workdir)
    sweep_report.write(found, pathlib.Path(path).stem, about, workdir)
    return found

  board = board_lib.Board(units, states, workdir, sweep.columns[0])
  try:
    with (
        _interrupted_by(signal.SIGTERM),
        processes.Processes(_PARALLEL.value) as runner,
        board,
    ):
      run(units, states, workdir, runner, board, collect)
  except KeyboardInterrupt:
    cli.CONSOLE.print('stopped; the same command goes on.')
    return 130
  cli.CONSOLE.print(sweep_report.table(collect()))
  failed = {n: state.error for n, state in states.items() if state.error}
  for name, error in failed.items():
    told = f'error: {name}: {error} (see {workdir / name}.log)'
    print(told, file=sys.stderr)
  cli.CONSOLE.print(f'report: {workdir / "report.html"}')
  return int(bool(failed))


def command(unit: sweeps.Unit, workdir: pathlib.Path) -> list[str]:
  """What runs a unit, here or anywhere."""
  folder = f'--workdir={workdir / unit.name}'
  return ['python', '-m', 'experiments.train', *unit.flags(), folder]


def run(units, states, workdir, runner, board, collect) -> None:
  """Runs all that are waiting.

  Args:
    units: of the sweep.
    states: of every unit by name; kept up to date.
    workdir: the folder of the sweep.
    runner: starts commands, and says what has ended, as `Processes` does.
    board: is refreshed all the time, and told of every change.
    collect: called whenever a unit has ended.
  """
  waiting = [unit for unit in units if states[unit.name].name == 'waiting']
  running = set()
  while waiting or running:
    while waiting and runner.free:
      unit = waiting.pop(0)
      try:
        log = workdir / f'{unit.name}.log'
        runner.start(unit.name, command(unit, workdir), log)
      except BlockingIOError:
        states[unit.name] = State('failed', 'another process is running it')
      else:
        states[unit.name] = State('running')
        running.add(unit.name)
      board.changed(unit.name)
    for name, error in runner.ended().items():
      states[name] = State('failed' if error else 'finished', error)
      running.remove(name)
      collect()
      board.changed(name)
    board.refresh()
    time.sleep(_POLL_S)


@contextlib.contextmanager
def _interrupted_by(number: int) -> Iterator[None]:
  """Has a signal do what Ctrl-C does."""
  before = signal.signal(number, signal.default_int_handler)
  try:
    yield
  finally:
    signal.signal(number, before)


if __name__ == '__main__':
  cli.run(main)
