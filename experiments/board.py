"""The live table of a sweep: what each unit is at."""

import pathlib
import textwrap
import time

from experiments import cli
from rich import live
from rich import markup
from rich import table as table_lib
from rlcr_jax import files
from rlcr_jax import pages
from rlcr_jax import sweep_report
from rlcr_jax import sweep_results
from rlcr_jax import sweeps

_ORDER = ('failed', 'running', 'waiting', 'finished')
_LINE_EVERY_S = 60.0  # Where there is no terminal.


class Board:
  """Unit, state, step, time left and headline; lines without a terminal."""

  def __init__(
      self,
      units: list[sweeps.Unit],
      states: dict[str, sweep_results.State],
      workdir: pathlib.Path,
      headline: str,
  ):
    """Shows nothing before it is entered.

    Args:
      units: of the sweep.
      states: of every unit by name; others keep them up to date.
      workdir: the folder of the sweep.
      headline: the number that is shown of finished units.
    """
    self._units = {unit.name: unit for unit in units}
    self._states, self._workdir, self._name = states, workdir, headline
    self._headline = sweep_report.column(headline)
    self._began: dict[str, tuple[float, int]] = {}  # When, and after how much.
    self._results: dict[str, str] = {}  # Headlines of finished units.
    self._spoke = time.monotonic()
    self._live = live.Live(console=cli.CONSOLE, refresh_per_second=2)

  def __enter__(self) -> 'Board':
    if cli.CONSOLE.is_terminal:
      self._live.start()
    return self

  def __exit__(self, *unused) -> None:
    self._live.stop()

  def changed(self, name: str) -> None:
    """A unit has another state."""
    if self._states[name].name == 'running':
      self._began[name] = time.monotonic(), self._done(name)
    if not cli.CONSOLE.is_terminal:
      self._say(name)

  def refresh(self) -> None:
    """Shows what there is now."""
    if cli.CONSOLE.is_terminal:
      self._live.update(self.table())
    elif time.monotonic() - self._spoke > _LINE_EVERY_S:
      self._spoke = time.monotonic()
      for name, state in self._states.items():
        if state.name == 'running':
          self._say(name)

  def table(self) -> table_lib.Table:
    """A row for each unit: those first that are not as they should be."""
    result = pages.empty_table(
        'unit', 'state', 'update', 'left', self._headline.label
    )
    result.columns[1].no_wrap = True
    result.columns[-1].no_wrap = False  # Of what failed it says why.
    order = lambda name: _ORDER.index(self._states[name].name)
    for name in sorted(self._units, key=order):
      result.add_row(name, *self._cells(name))
    return result

  def _say(self, name: str) -> None:
    state, steps, left, news = self._cells(name)
    cli.CONSOLE.print(f'{name}: {state}  {steps}  {left}  {news}'.rstrip())

  def _cells(self, name: str) -> tuple[str, str, str, str]:
    state = self._states[name]
    total = sweeps.total_steps(self._units[name])
    if state.name == 'finished':
      return 'finished', f'{total}/{total}', '', self._result(name)
    done = self._done(name)
    left = self._left(name, done, total) if state.name == 'running' else ''
    error = markup.escape(textwrap.shorten(state.error, 60))
    at_end = state.name == 'running' and done == total
    news = error or ('evaluating' if at_end else self._so_far(name))
    return state.name, f'{done}/{total}', left, news

  def _done(self, name: str) -> int:
    return sweeps.steps_done(self._units[name], self._workdir)

  def _left(self, name: str, done: int, total: int) -> str:
    """The time that is left at the speed since the start, less evaluation."""
    at, before = self._began[name]
    if done == before:
      return '–'
    left_s = (time.monotonic() - at) * (total - done) / (done - before)
    minutes, seconds = divmod(round(left_s), 60)
    return f'{minutes}:{seconds:02d}'

  def _so_far(self, name: str) -> str:
    """The return in training."""
    row = files.last_line(self._workdir / name / 'metrics.jsonl') or {}
    value = row.get('return_mean')
    return '' if value is None else f'training {value:.3f}'

  def _result(self, name: str) -> str:
    if name not in self._results:
      numbers = sweep_results.numbers(self._workdir / name)
      self._results[name] = self._headline.text(numbers.get(self._name))
    return self._results[name]
