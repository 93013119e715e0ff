"""The figures of a report: drawn in memory, one colour per mode throughout.

Values that JSON writes as null (no such team, nothing played) are gaps.
"""

from collections.abc import Container
import io
from typing import Any, NamedTuple

import matplotlib
from matplotlib import axes
from matplotlib import colors
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np
from rlcr_jax import statistics

Rows = list[dict[str, Any]]  # Those of `metrics.jsonl`, one per update.

_SIZE_IN = (6.0, 3.9)
_DPI = 144
_TEXT, _LIGHT = '#30343b', '#d9dce1'
_TEAM = 'useful_work_team_'


class Style(NamedTuple):
  """How a mode looks in every figure and table."""

  label: str
  colour: str
  dash: str = '-'


class Chart(NamedTuple):
  """One finished figure."""

  name: str  # Of its file, without `.png`.
  title: str
  caption: str  # A sentence or two of plain text.
  png: bytes


# Solid lines are learned, broken ones are references that learn nothing.
STYLES: dict[str, Style] = {
    'collective': Style('collective', '#0072b2'),
    'solo': Style('solo', '#d55e00'),
    'muted': Style('channels cut', '#cc79a7'),
    'muted_trained': Style('trained muted', '#009e73'),
    'warm_start': Style('warm start', '#56b4e9', '--'),
    'random': Style('random', '#9a9a9a', '--'),
    'oracle': Style('oracle', '#222222', '--'),
    'oracle_muted': Style('oracle, muted', '#8c6d31', '--'),
    'greedy_solo': Style('greedy solo', '#e6a800', '--'),
}

# The arms of training are modes of the evaluation under other names: there,
# `muted` is the collective with its channels cut after training.
_MODE_OF_ARM = {'muted': 'muted_trained'}


class Trend(NamedTuple):
  """A column of `metrics.jsonl` over training."""

  column: str
  title: str
  axis: str
  caption: str
  scale: float = 1.0
  smooth: bool = True
  cut_outliers: bool = False  # Leave far outliers out of the frame.
  arms: tuple[str, ...] = ('collective', 'solo', 'muted')


_TRENDS: dict[str, Trend] = {
    'learning_curve': Trend(
        'return_mean',
        'Learning curve',
        'return (0 to 1)',
        'Mean return of the training rollouts, each under the deadline of its'
        ' update, which the next figure shows.',
    ),
    'deadline': Trend(
        'deadline_ms',
        'Deadline schedule',
        'deadline (s)',
        'Time limit of a rollout at every update, mean over tasks.',
        scale=1e-3,
        smooth=False,
        arms=('collective',),
    ),
    'team_size': Trend(
        'team_size_mean',
        'Team size',
        'agents at the peak',
        'Most agents present at once in a rollout, the CEO included.',
    ),
    'communication': Trend(
        'communication_tokens_per_s_mean',
        'Communication intensity',
        'message tokens per second',
        'Output tokens of messages per second of simulated time; volume alone'
        ' proves nothing, so compare with what cutting the channels costs.',
        arms=('collective',),
    ),
    'useful_tokens': Trend(
        'useful_token_share_mean',
        'Useful tokens',
        'share of output tokens (0 to 1)',
        'Share of the output tokens written in turns that act on the'
        ' environment.',
    ),
    'effective_turns': Trend(
        'effective_share_mean',
        'Effective turns',
        'share of useful turns (0 to 1)',
        'Share of the turns that act on the environment that landed in time'
        ' and had their effect, rather than collide or come too late.',
    ),
    'decisions': Trend(
        'decisions',
        'Decisions per update',
        'decisions',
        'Turns decided in all rollouts of an update, which is what an update'
        ' costs.',
    ),
    'seconds': Trend(
        'seconds',
        'Time per update',
        'real time (s)',
        'Real time of an update; the first after a start compiles as well, and'
        ' may lie above the frame.',
        smooth=False,
        cut_outliers=True,
    ),
}


def style(mode: str) -> Style:
  """How a mode looks; grey if nobody gave it a style."""
  return STYLES.get(mode, Style(mode.replace('_', ' '), '#777777', ':'))


def trend_of(column: str) -> Trend:
  """How a column of `metrics.jsonl` is drawn, be it described or not."""
  known = {trend.column: trend for trend in _TRENDS.values()}
  words = column.replace('_', ' ')
  return known.get(column, Trend(column, words.capitalize(), words, ''))


def column(rows: Rows, name: str) -> np.ndarray:
  """[T] float64, NaN where a row lacks the value."""
  return np.array([row.get(name) for row in rows], np.float64)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
  """Centred running mean of [T] values over an odd `window` <= T.

  Averages what there is: fewer values at the ends and beside gaps. It bridges
  a gap shorter than half a window, and never runs on past the last value.
  """
  valid = np.isfinite(values)
  count = np.convolve(valid, np.ones(window), 'same')
  total = np.convolve(np.where(valid, values, 0.0), np.ones(window), 'same')
  half = np.ones(window // 2 + 1)
  before = np.convolve(valid, half)[: len(valid)] > 0.5
  after = np.convolve(valid[::-1], half)[: len(valid)][::-1] > 0.5
  return np.where(before & after, total / np.maximum(count, 1.0), np.nan)


def window_of(rows: Rows) -> int:
  """Updates that a smooth line averages over, an odd number."""
  return 2 * (len(rows) // 60) + 1


def training_charts(runs: dict[str, Rows]) -> list[Chart]:
  """What happened over training. Figures without any value are left out.

  Args:
    runs: the rows of every arm that has some.
  """
  charts = [_trend(name, trend, runs) for name, trend in _TRENDS.items()]
  charts.insert(-2, _useful_by_team(runs.get('collective', [])))
  return [chart for chart in charts if chart]


def evaluation_charts(evaluation: dict[str, Any]) -> list[Chart]:
  """What was measured on held-out tasks, from `evaluation.json`."""
  charts = (_curves(evaluation), _by_deadline(evaluation))
  return [chart for chart in charts if chart]


def canvas(x: str, y: str) -> tuple[figure_lib.Figure, axes.Axes]:
  """An empty plot. No pyplot: its global state would leak between reports."""
  figure = figure_lib.Figure(_SIZE_IN, dpi=_DPI, layout='constrained')
  plot = figure.add_subplot()
  plot.set_xlabel(x, color=_TEXT)
  plot.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  plot.set_ylabel(y, color=_TEXT)
  plot.tick_params(colors=_TEXT, length=0)
  plot.grid(color=_LIGHT, linewidth=0.6)
  plot.set_axisbelow(True)
  plot.spines[['top', 'right', 'left']].set_visible(False)
  plot.spines['bottom'].set_color(_LIGHT)
  plot.margins(x=0.01)
  return figure, plot


def png(figure: figure_lib.Figure, legend_columns: int = 4) -> bytes:
  """Adds the legend and renders, with the same bytes for the same figure."""
  if figure.axes[0].get_legend_handles_labels()[0]:
    figure.legend(
        loc='outside upper left',
        ncols=legend_columns,
        frameon=False,
        fontsize='small',
        labelcolor=_TEXT,
    )
  stream = io.BytesIO()
  figure.savefig(stream, format='png', metadata={'Software': None})
  return stream.getvalue()


def from_zero(plot: axes.Axes) -> None:
  """Lets an axis of a quantity that is never negative begin at 0."""
  plot.set_ylim(bottom=0.0)


def line(look: Style) -> dict[str, Any]:
  """How every line of a mode is drawn; the collective's lies on top."""
  top = look is STYLES['collective']
  return {
      'color': look.colour,
      'ls': look.dash,
      'lw': 1.9,
      'label': look.label,
      'zorder': 2.2 if top else 2.1,
  }


def banded(
    plot: axes.Axes,
    x: np.ndarray,
    y: np.ndarray,
    band: np.ndarray,
    look: Style,
    **kwargs: Any,
) -> None:
  """A line [T] and around it, pale, what lies between the two of `band`."""
  plot.fill_between(x, *band, color=look.colour, alpha=0.15, lw=0)
  plot.plot(x, y, **line(look), **kwargs)


def _draw_smooth(
    plot: axes.Axes, rows: Rows, values: np.ndarray, look: Style
) -> None:
  """Raw values [T], pale, below their running mean."""
  steps = column(rows, 'step')
  pale = {'alpha': 0.25, 'lw': 0.8, 'marker': '.', 'ms': 2.5}
  plot.plot(steps, values, color=look.colour, **pale)
  plot.plot(steps, smooth(values, window_of(rows)), **line(look))


def _trend(name: str, trend: Trend, runs: dict[str, Rows]) -> Chart | None:
  """One metric of all arms over training."""
  drawn = {
      arm: column(runs[arm], trend.column) * trend.scale
      for arm in trend.arms
      if runs.get(arm)
  }
  drawn = {arm: v for arm, v in drawn.items() if np.isfinite(v).any()}
  if not drawn:
    return None
  figure, plot = canvas('update', trend.axis)
  for arm, values in drawn.items():
    look = style(_MODE_OF_ARM.get(arm, arm))
    if trend.smooth:
      _draw_smooth(plot, runs[arm], values, look)
    else:
      steps = column(runs[arm], 'step')
      plot.plot(steps, values, marker='.', ms=2.5, **line(look))
  from_zero(plot)
  if trend.cut_outliers:
    usual = max(np.nanquantile(v, 0.9) for v in drawn.values())
    plot.set_ylim(top=min(plot.get_ylim()[1], 2.0 * usual))
  return Chart(name, trend.title, trend.caption, png(figure))


def _team_label(name: str) -> str:
  """`useful_work_team_2_5` → '2 to 5 agents'; the last bin has no end."""
  low, *high = name.removeprefix(_TEAM).split('_')
  if not high:
    return '1 agent' if low == '1' else f'{low} agents'
  return f'{low} or more' if int(high[0]) >= 10**6 else f'{low} to {high[0]}'


def _useful_by_team(rows: Rows) -> Chart | None:
  """Useful work of small and large teams of the collective over training."""
  names = [n for n in (rows[-1] if rows else {}) if n.startswith(_TEAM)]
  present = [n for n in names if np.isfinite(column(rows, n)).any()]
  if not present:
    return None
  figure, plot = canvas('update', 'useful tokens (× average rollout)')
  plot.axhline(1.0, color=_TEXT, lw=0.9, ls=':')
  blues = matplotlib.colormaps['Blues'](np.linspace(0.4, 1.0, len(names)))
  for name, blue in zip(names, blues, strict=True):
    if name in present:
      look = Style(_team_label(name), colors.to_hex(blue))
      _draw_smooth(plot, rows, column(rows, name), look)
  from_zero(plot)
  return Chart(
      'useful_by_team',
      'Useful work by team size',
      'Useful output tokens of the collectives of one size, relative to the'
      ' average rollout of the same update (dotted); gaps: no such team.',
      png(figure),
  )


def _mark(plot: axes.Axes, x_ms: float | None, other: str | None) -> str:
  """Marks where the collective overtakes `other`; says so for the caption."""
  if other is None:
    return ''
  if x_ms is None or not np.isfinite(x_ms):
    return f' The collective does not overtake {style(other).label} for good.'
  x_s = x_ms / 1000
  plot.axvline(x_s, color=_TEXT, lw=0.9, ls=':')
  left, right = plot.get_xlim()
  beyond = x_s > (left + right) / 2  # Then there is more room on its left.
  plot.annotate(
      f'crossover {x_s:.0f} s',
      (x_s, 0.03),
      xycoords=('data', 'axes fraction'),
      xytext=(-4 if beyond else 4, 0),
      textcoords='offset points',
      ha='right' if beyond else 'left',
      color=_TEXT,
      fontsize='small',
  )
  return (
      ' Dotted: where the collective overtakes'
      f' {style(other).label} for good.'
  )


def one_agent(modes: Container[str]) -> str | None:
  """What a collective is compared with: a trained agent if there is one."""
  if 'collective' not in modes:
    return None
  return next((n for n in ('solo', 'greedy_solo') if n in modes), None)


def _curves(evaluation: dict[str, Any]) -> Chart | None:
  """Return over time within the rollouts of the full deadline."""
  curves = evaluation.get('curves') or {}
  values = {
      name: np.array(curve, np.float64)
      for name, curve in (curves.get('modes') or {}).items()
  }
  if not values:
    return None
  times_ms = np.array(curves['time_ms'], np.float64)
  figure, plot = canvas('time within the rollout (s)', 'return (0 to 1)')
  for name, curve in values.items():
    plot.plot(times_ms / 1000, curve, **line(style(name)))
  from_zero(plot)
  other = one_agent(values)
  crossing = None
  if other and np.isfinite(pair := (values['collective'], values[other])).all():
    crossing = statistics.first_crossing(times_ms, *pair)
  return Chart(
      'return_over_time',
      'Return over time',
      'Mean return at every instant of the held-out rollouts under the full'
      ' deadline.' + _mark(plot, crossing, other),
      png(figure),
  )


def _by_deadline(evaluation: dict[str, Any]) -> Chart | None:
  """Return against the deadline that the rollouts were played under."""
  sweep = evaluation.get('by_deadline') or {}
  modes = sweep.get('modes') or {}
  if not modes:
    return None
  limits_ms = np.array(sweep['deadline_ms'], np.float64)
  figure, plot = canvas('deadline (s)', 'return (0 to 1)')
  for name, points in modes.items():
    means = np.array(points['return_mean'], np.float64)
    ci95 = np.array(points['return_ci95'], np.float64)
    banded(plot, limits_ms / 1000, means, ci95.T, style(name), marker='.')
  from_zero(plot)
  return Chart(
      'return_by_deadline',
      'Return against the deadline',
      'Mean return of held-out rollouts that were played under each deadline,'
      ' with 95 % intervals over tasks.'
      + _mark(plot, sweep.get('crossover_ms'), one_agent(modes)),
      png(figure),
  )


def oracle_label(agents: int) -> str:
  """The oracle with a number of agents."""
  return f'oracle, {agents} agent' + 's' * (agents > 1)


def scaling(
    env: str,
    deadlines_ms: np.ndarray,
    teams: dict[int, np.ndarray],
    others: dict[str, np.ndarray],
) -> Chart:
  """How far more agents get, and how much less than in proportion.

  Args:
    env: name of the environment.
    deadlines_ms: [D].
    teams: number of agents → returns [D, P] of the oracle.
    others: mode → returns [D, P].
  """
  figure, plot = canvas('deadline (s)', 'return (0 to 1)')
  greys = matplotlib.colormaps['Greys'](np.linspace(0.4, 1.0, len(teams)))
  looks = {
      n: Style(oracle_label(n), colors.to_hex(grey))
      for n, grey in zip(teams, greys, strict=True)
  }
  lines = [(looks[n], values) for n, values in teams.items()]
  lines += [(style(mode), values) for mode, values in others.items()]
  for look, values in lines:
    means, ci95 = zip(*map(statistics.mean_ci95, values), strict=True)
    x = np.asarray(deadlines_ms) / 1000
    banded(plot, x, np.array(means), np.array(ci95).T, look, marker='.')
  from_zero(plot)
  return Chart(
      f'{env}_scaling',
      f'{env}: return against the deadline',
      'Mean return of scripted policies under each deadline, with 95 %'
      ' intervals over tasks.',
      png(figure, legend_columns=3),
  )


def task(
    env: str,
    relations: np.ndarray,
    value: np.ndarray,
    is_open: np.ndarray,
) -> Chart:
  """One task as a graph: targets, and arrows from what is needed to who needs.

  Args:
    env: name of the environment.
    relations: [M, M] bool; row i names what target i needs.
    value: [M], what completing a target is worth.
    is_open: [M] bool, may one act on it at the beginning?
  """
  place = _layered(relations)
  mutual = relations & relations.T
  figure, plot = canvas('', '')
  for i, j in np.argwhere(
      relations & ~(mutual & np.tri(len(value), k=-1, dtype=bool))
  ):
    plot.annotate(
        '',
        place[i],
        place[j],
        zorder=1,
        arrowprops={
            'arrowstyle': '-' if mutual[i, j] else '-|>',
            'color': '#9aa1ab',
            'lw': 0.8,
            'shrinkA': 9,
            'shrinkB': 9,
        },
    )
  size = 180 + 420 * value / max(value.max(), 1e-9)
  colour = np.where(is_open, '#56b4e9', '#eceef1')
  plot.scatter(*place.T, s=size, c=colour, edgecolors=_TEXT, lw=0.8, zorder=2)
  for i, at in enumerate(place):
    plot.annotate(
        str(i), at, ha='center', va='center', fontsize='small', zorder=3
    )
  plot.grid(visible=False)
  plot.set_xticks([])
  plot.set_yticks([])
  plot.spines['bottom'].set_visible(False)
  plot.margins(0.12)
  return Chart(
      f'{env}_task',
      f'{env}: one task',
      'Targets by number. Area: what a target is worth. Blue: one may act on'
      ' it at once. Arrows lead from what is needed to what needs it; lines'
      ' without heads relate both ways.',
      png(figure),
  )


def _layered(relations: np.ndarray) -> np.ndarray:
  """Places [M, 2]: what is needed stands on the left of what needs it.

  Targets that need each other stand one above the other.
  """
  m = len(relations)
  reach = np.linalg.matrix_power(np.eye(m) + relations, m) > 0
  together = reach & reach.T
  before = relations & ~together
  layer = np.zeros(m, int)
  for _ in range(m):
    ahead = np.where(before, layer[None, :] + 1, 0).max(1)
    layer = np.where(together, ahead[None, :], 0).max(1)
  group = together.argmax(1)  # Its first member.
  place = np.zeros((m, 2))
  loose = not before.any()  # Nothing comes first: one column per group.
  columns = np.unique(group, return_inverse=True)[1] if loose else layer
  if loose and len(set(group)) == m:
    columns = np.arange(m) % max(int(np.ceil(np.sqrt(m))), 1)
  for x in np.unique(columns):
    rows = np.flatnonzero(columns == x)
    place[rows, 0] = x
    place[rows, 1] = (len(rows) - 1) / 2 - np.arange(len(rows))
  return place
