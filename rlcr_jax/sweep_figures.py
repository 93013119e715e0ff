"""The figures of a sweep: one colour per arm throughout."""

import itertools
import pathlib
from typing import Any

from matplotlib import ticker
import numpy as np
from rlcr_jax import figures
from rlcr_jax import files
from rlcr_jax import report
from rlcr_jax import sweep_results

_COLOURS = (
    '#0072b2',
    '#d55e00',
    '#009e73',
    '#cc79a7',
    '#e6a800',
    '#56b4e9',
    '#8c6d31',
    '#222222',
)
_DASHES = ('-', '--', ':', '-.')


def looks(arms: list[str]) -> dict[str, figures.Style]:
  """How each arm is drawn; after the last colour, lines are broken."""
  pairs = itertools.cycle(itertools.product(_DASHES, _COLOURS))
  return {
      arm: figures.Style(arm, colour, dash)
      for arm, (dash, colour) in zip(arms, pairs, strict=False)
  }


def charts(
    found: dict[str, Any], label: str, scale: float, workdir: pathlib.Path
) -> list[figures.Chart]:
  """What can be drawn so far.

  Args:
    found: of `sweep_results.collect`.
    label: of the headline.
    scale: what it is multiplied by.
    workdir: the folder of the sweep.
  """
  drawn = [_headline(found, label, scale), _by_deadline(found, workdir)]
  drawn += [_curve(found, column, workdir) for column in found['curves']]
  return [chart for chart in drawn if chart]


def _headline(
    found: dict[str, Any], label: str, scale: float
) -> figures.Chart | None:
  """The headline of every arm: its seeds, their mean, and its interval."""
  name = found['columns'][0]
  arms = {
      arm: entry['numbers'][name]
      for arm, entry in found['arms'].items()
      if name in entry['numbers']
  }
  if not arms:
    return None
  figure, plot = figures.canvas(label, '')
  figure.set_figheight(1.2 + 0.4 * len(arms))
  plot.xaxis.set_major_locator(ticker.AutoLocator())
  styles = looks(list(found['arms']))
  for y, (arm, entry) in enumerate(arms.items()):
    colour = styles[arm].colour
    rows = sweep_results.finished(found, arm)
    seeds = np.array([row['numbers'].get(name) for row in rows], np.float64)
    plot.plot(
        seeds * scale, np.full(len(seeds), y), 'o', color=colour, alpha=0.4
    )
    ends = np.array(entry['ci95'], np.float64) * scale
    plot.hlines(y, *ends, color=colour, lw=1.9)
    plot.plot(entry['mean'] * scale, y, '|', color=colour, ms=14, mew=2.4)
  plot.set_yticks(range(len(arms)), list(arms))
  plot.invert_yaxis()
  plot.margins(x=0.05, y=0.15)
  return figures.Chart(
      'sweep',
      label.capitalize(),
      'Dots are seeds, the stroke is their mean, and the line its 95 % interval'
      ' over seeds (Student t: with few seeds it is wide).',
      figures.png(figure),
  )


def _stack(rows: list[np.ndarray]) -> np.ndarray:
  """[S, T], as long as the shortest."""
  shortest = min(map(len, rows))
  return np.array([row[:shortest] for row in rows])


def _over_seeds(
    values: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
  """Mean [T] of [S, T], and the lowest and the highest seed."""
  return values.mean(0), (values.min(0), values.max(0))


def _curve(
    found: dict[str, Any], column: str, workdir: pathlib.Path
) -> figures.Chart | None:
  """A column of `metrics.jsonl` over training, of every arm."""
  trend = figures.trend_of(column)
  figure, plot = figures.canvas('update', trend.axis)
  for arm, look in looks(list(found['arms'])).items():
    runs = [
        files.read_lines(workdir / row['workdir'] / 'metrics.jsonl')
        for row in sweep_results.finished(found, arm)
    ]
    values = [figures.column(rows, column) * trend.scale for rows in runs]
    if not values or not np.isfinite(stacked := _stack(values)).any():
      continue
    window = figures.window_of(runs[0]) if trend.smooth else 1
    mean, band = _over_seeds(
        np.array([figures.smooth(row, window) for row in stacked])
    )
    figures.banded(plot, np.arange(len(mean)), mean, band, look)
  if not plot.lines:
    return None
  return figures.Chart(
      f'curve_{column}',
      trend.title,
      f'{trend.caption} Lines are means over seeds'
      f'{" and running means over updates" if trend.smooth else ""}; bands go'
      ' from the lowest to the highest seed.'.lstrip(),
      figures.png(figure, legend_columns=3),
  )


def _by_deadline(
    found: dict[str, Any], workdir: pathlib.Path
) -> figures.Chart | None:
  """Held-out return of every arm's collective under each deadline."""
  figure, plot = figures.canvas('deadline (s)', 'return (0 to 1)')
  for arm, look in looks(list(found['arms'])).items():
    grids = [
        (report.read_evaluation(workdir / row['workdir']) or {})['by_deadline']
        for row in sweep_results.finished(found, arm)
        if 'by_deadline.crossover_ms' in row['numbers']
    ]
    if grids:
      values = [grid['modes']['collective']['return_mean'] for grid in grids]
      seconds = np.array(grids[0]['deadline_ms']) / 1000
      mean, band = _over_seeds(np.array(values, np.float64))
      figures.banded(plot, seconds, mean, band, look, marker='.')
  if not plot.lines:
    return None
  figures.from_zero(plot)
  return figures.Chart(
      'return_by_deadline',
      'Return against the deadline',
      'Mean return of the collective on held-out tasks under each deadline;'
      ' bands go from the lowest to the highest seed.',
      figures.png(figure, legend_columns=3),
  )
