"""Tests of the figures: what is drawn, and how it is told apart."""

import numpy as np
import pytest
from rlcr_jax import figures

NAN = float('nan')


@pytest.fixture
def plots(monkeypatch):
  """The plots that are drawn while a test runs."""
  axes = []
  canvas = figures.canvas

  def spy(x, y):
    figure, plot = canvas(x, y)
    axes.append(plot)
    return figure, plot

  monkeypatch.setattr(figures, 'canvas', spy)
  return axes


def test_every_mode_has_its_own_colour_and_label():
  colours = [style.colour for style in figures.STYLES.values()]
  labels = [style.label for style in figures.STYLES.values()]
  assert len(set(colours)) == len(colours)
  assert len(set(labels)) == len(labels)
  assert figures.style('new_mode').label == 'new mode'


def test_smooth_averages_what_there_is():
  smoothed = figures.smooth(np.array([0.0, 3.0, 6.0, 3.0]), 3)
  np.testing.assert_allclose(smoothed, [1.5, 3.0, 4.0, 4.5])


def test_smooth_bridges_short_gaps_only():
  values = np.array([NAN, NAN, 2.0, NAN, 4.0, NAN, NAN])
  # Window 5 looks two to either side: 3 lies between 2 and 4.
  np.testing.assert_allclose(
      figures.smooth(values, 5), [NAN, NAN, 3.0, 3.0, 3.0, NAN, NAN]
  )
  np.testing.assert_array_equal(figures.smooth(values, 1), values)


@pytest.mark.parametrize('count, window', [(1, 1), (59, 1), (60, 3), (300, 11)])
def test_window_is_odd_and_light(count, window):
  assert figures.window_of([{}] * count) == window


def test_column_has_gaps_for_nulls_and_absent_values():
  rows = [{'a': 1.0}, {'a': None}, {}]
  np.testing.assert_array_equal(figures.column(rows, 'a'), [1.0, NAN, NAN])


def test_collective_is_compared_with_a_trained_agent_first():
  assert figures.one_agent(['collective', 'greedy_solo', 'solo']) == 'solo'
  assert figures.one_agent(['collective', 'greedy_solo']) == 'greedy_solo'
  assert figures.one_agent(['collective', 'oracle']) is None
  assert figures.one_agent(['solo']) is None


def test_arms_are_drawn_in_the_colours_of_their_modes(monkeypatch):
  drawn = []
  plot_smooth = figures._draw_smooth

  def spy(plot, rows, values, look):
    drawn.append((look.label, values.tolist()))
    plot_smooth(plot, rows, values, look)

  monkeypatch.setattr(figures, '_draw_smooth', spy)
  runs = {
      'collective': [{'step': 0, 'return_mean': 0.3}],
      'solo': [{'step': 0, 'return_mean': 0.2}],
      'muted': [{'step': 0, 'return_mean': 0.1}],
  }
  charts = figures.training_charts(runs)
  assert [chart.name for chart in charts] == ['learning_curve']
  assert drawn == [
      ('collective', [0.3]),
      ('solo', [0.2]),
      ('trained muted', [0.1]),
  ]


def test_every_column_can_be_drawn():
  known, unknown = map(figures.trend_of, ('deadline_ms', 'turns_tell'))
  assert (known.axis, known.scale) == ('deadline (s)', 1e-3)
  assert (unknown.title, unknown.axis) == ('Turns tell', 'turns tell')
  assert (unknown.column, unknown.scale) == ('turns_tell', 1.0)


def test_deadline_is_drawn_in_seconds(plots):
  rows = [{'step': s, 'deadline_ms': 30_000.0 * s} for s in range(3)]
  figures.training_charts({'collective': rows, 'solo': rows})
  (plot,) = plots
  assert plot.get_ylabel() == 'deadline (s)'
  assert [list(line.get_ydata()) for line in plot.lines] == [[0.0, 30.0, 60.0]]


def test_compilation_does_not_flatten_the_time_of_updates(plots):
  seconds = [100.0] + [1.0] * 30
  rows = [{'step': s, 'seconds': v} for s, v in enumerate(seconds)]
  slow = [row | {'seconds': 3.0} for row in rows]
  figures.training_charts({'collective': slow, 'solo': rows})
  (plot,) = plots
  assert plot.get_ylim() == (0.0, 6.0)  # Twice the slowest arm, not 100.


@pytest.mark.parametrize(
    'solo, words',
    [
        # The collective is 0.2 behind at 60 s and 0.2 ahead at 100 s.
        ([0.0, 0.5, 0.5], 'overtakes solo for good'),
        ([0.0, 0.8, 0.9], 'does not overtake solo'),
    ],
)
def test_crossover_within_rollouts(solo, words):
  evaluation = {
      'curves': {
          'time_ms': [0, 60_000, 100_000],
          'modes': {'collective': [0.0, 0.3, 0.7], 'solo': solo},
      }
  }
  (chart,) = figures.evaluation_charts(evaluation)
  assert chart.name == 'return_over_time'
  assert words in chart.caption


def test_crossover_is_marked_where_the_curves_cross(plots):
  evaluation = {
      'curves': {
          'time_ms': [0, 60_000, 100_000],
          'modes': {'collective': [0.0, 0.3, 0.7], 'solo': [0.0, 0.5, 0.5]},
      }
  }
  figures.evaluation_charts(evaluation)
  (plot,) = plots
  assert [text.get_text() for text in plot.texts] == ['crossover 80 s']
  assert plot.lines[-1].get_xdata() == pytest.approx([80.0, 80.0])


def test_figures_are_reproducible():
  runs = {'collective': [{'step': 0, 'return_mean': 0.3}]}
  first, second = (figures.training_charts(runs)[0].png for _ in range(2))
  assert first == second
