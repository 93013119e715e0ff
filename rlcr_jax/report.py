"""The report of a run: one self-contained page, and tables for the terminal."""

import json
import math
import pathlib
from typing import Any

from rich import table as table_lib
from rlcr_jax import figures
from rlcr_jax import files
from rlcr_jax import pages

_number, _seconds, _text = pages.number, pages.seconds, pages.text

_ARMS = {
    'collective': '.',
    'solo': 'baselines/solo',
    'muted': 'baselines/muted',
}
_COLUMNS = (
    '',
    'return\n[95 % interval]',
    'of\noracle',
    'team',
    'output\ntokens',
    'useful\ntokens',
    'talk\ntok/s',
    'time\ns',
)
# Column of `metrics.jsonl`, its name in the table, factor, format.
_HEADLINES = (
    ('step', 'last update', 1, '.0f'),
    ('deadline_ms', 'deadline (s)', 1e-3, '.0f'),
    ('return_mean', 'return (0 to 1)', 1, '.3f'),
    ('team_size_mean', 'team size (agents)', 1, '.1f'),
    ('output_tokens_mean', 'output tokens', 1, ',.0f'),
    ('useful_token_share_mean', 'useful tokens', 1, '.0%'),
    ('effective_share_mean', 'effective turns', 1, '.0%'),
    ('communication_tokens_per_s_mean', 'message tokens/s', 1, '.1f'),
    ('decisions', 'decisions', 1, ',.0f'),
    ('seconds', 'real time of the update (s)', 1, '.2f'),
)


def write_report(workdir: pathlib.Path) -> pathlib.Path:
  """Writes `report.html` and `figures/*.png` from what a workdir holds.

  Args:
    workdir: a folder with `config.json`. Metrics, baselines and
      `evaluation.json` may be missing; the report then says so.

  Returns:
    The path of the page, which needs no other file.

  Raises:
    FileNotFoundError: if there is no `config.json`.
  """
  config = json.loads((workdir / 'config.json').read_text(encoding='utf-8'))
  evaluation = read_evaluation(workdir)
  runs = {
      arm: files.read_lines(workdir / folder / 'metrics.jsonl')
      for arm, folder in _ARMS.items()
  }
  charts = figures.evaluation_charts(evaluation) if evaluation else []
  for env, own in environments(evaluation or {}).items():
    charts += [
        chart._replace(
            name=f'{env}_{chart.name}', title=f'{env}: {chart.title}'
        )
        for chart in figures.evaluation_charts(own)
    ]
  charts += figures.training_charts(runs)
  for chart in charts:
    files.write_bytes(workdir / 'figures' / f'{chart.name}.png', chart.png)
  path = workdir / 'report.html'
  files.write_text(
      path,
      _render(
          workdir.resolve().name,
          config,
          runs,
          evaluation,
          charts,
          files.read_lines(workdir / 'transcript.jsonl'),
      ),
  )
  return path


def environments(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """The evaluations of the environments of a mixture, by name."""
  return evaluation.get('environments') or {}


def tables(evaluation: dict[str, Any]) -> list[table_lib.Table]:
  """What each mode achieved: one table, or one per environment and of all.

  Args:
    evaluation: the contents of `evaluation.json`.
  """
  parts = environments(evaluation)
  whole = table(evaluation, 'all environments' if parts else None)
  return [*(table(own, env) for env, own in parts.items()), whole]


def table(
    evaluation: dict[str, Any], title: str | None = None
) -> table_lib.Table:
  """What each mode achieved on the held-out tasks, and how.

  Args:
    evaluation: of one environment, or of a mixture as a whole.
    title: stands above it.
  """
  result = pages.empty_table(
      *_COLUMNS, title=title, caption=caption(evaluation)
  )
  for mode, cells in summary(evaluation).items():
    result.add_row(figures.style(mode).label, *cells)
  return result


def training_table(rows: figures.Rows) -> table_lib.Table:
  """The headline metrics of the last update.

  Args:
    rows: those of `metrics.jsonl`; without any, the table has no rows.
  """
  result = pages.empty_table('', 'value')
  for name, value in headlines(rows):
    result.add_row(name, value)
  return result


def summary(evaluation: dict[str, Any]) -> dict[str, tuple[str, ...]]:
  """The cells of every mode, as text; see `_COLUMNS`."""
  modes = evaluation['modes']
  oracle = _number(modes.get('oracle', {}).get('return_mean'))
  return {
      mode: (
          _with_interval(entry, 'return_mean', 'return_ci95'),
          _text(_ratio(_number(entry.get('return_mean')), oracle), '.0%'),
          _text(entry.get('team_size_mean'), '.1f'),
          _text(entry.get('output_tokens_mean'), ',.0f'),
          _text(entry.get('useful_token_share'), '.0%'),
          _text(entry.get('communication_tokens_per_s'), '.1f'),
          _text(_number(entry.get('time_ms_mean')) / 1000, '.0f'),
      )
      for mode, entry in modes.items()
  }


def headlines(rows: figures.Rows) -> list[tuple[str, str]]:
  """Name and value of the headline metrics of the last update, as text."""
  return [
      (name, _text(_number(rows[-1].get(column)) * factor, spec))
      for column, name, factor, spec in (_HEADLINES if rows else ())
  ]


def headline(evaluation: dict[str, Any]) -> str:
  """The result in a sentence or two."""
  modes = evaluation['modes']
  if 'collective' not in modes:
    return 'The collective was not evaluated.'
  mine = _number(modes['collective'].get('return_mean'))
  sentence = (
      f'Within {_seconds(evaluation.get("deadline_ms"))}, the collective'
      f' returns {_with_interval(modes["collective"])}'
  )
  if parts := environments(evaluation):
    names = ', '.join(parts)
    sentence += f' of what the oracle does, over {len(parts)} worlds ({names})'
  parts = []
  if other := figures.one_agent(modes):
    ratio = _ratio(mine, _number(modes[other].get('return_mean')))
    who = 'one trained agent' if other == 'solo' else 'one greedy agent'
    parts.append(
        f'{_text(ratio, ".2f")} times the {_with_interval(modes[other])} of'
        f' {who}'
    )
  if 'oracle' in modes:
    best = _number(modes['oracle'].get('return_mean'))
    parts.append(
        f'{_text(_ratio(mine, best), ".0%")} of the {_text(best, ".3f")} of'
        ' the oracle'
    )
  sentence += f': {" and ".join(parts)}.' if parts else '.'
  if 'muted' in modes:
    cut = _text(modes['muted'].get('return_mean'), '.3f')
    sentence += f' With its channels cut it returns {cut}.'
  return sentence


def caption(evaluation: dict[str, Any]) -> str:
  """Matched tokens, the crossover, and what the numbers are based on."""
  sentences = []
  if parts := environments(evaluation):
    sentences.append(
        f'Means over {len(parts)} environments of the returns, each divided by'
        ' what the oracle returns there.'
    )
  for _, name, matched in matched_tokens(evaluation)[:1]:
    ratio = _with_interval(matched, 'time_ratio', 'time_ratio_ci95', '.2f')
    never = _text(matched.get('never_reached_share'), '.0%')
    sentences.append(
        f'Given as many output tokens, {name} takes {ratio} times as long to'
        f' get as far (never on {never} of the tasks).'
    )
  sentences.append(_crossover(evaluation))
  spoken = evaluation.get('modes', {}).get('collective', {})
  if 'malformed_share' in spoken:
    sentences.append(
        f'Of its commands {_text(spoken["malformed_share"], ".1%")} were not'
        f' understood and {_text(spoken["illegal_share"], ".0%")} not allowed.'
    )
  sentences.append(
      f'Deadline {_seconds(evaluation.get("deadline_ms"))},'
      f' {_text(evaluation.get("num_tasks"), ",.0f")} held-out tasks.'
  )
  return ' '.join(s for s in sentences if s)


def matched_tokens(
    evaluation: dict[str, Any],
) -> list[tuple[str, str, dict[str, Any]]]:
  """Mode, name and measurements of each single agent that was matched."""
  entry = evaluation.get('matched_tokens') or {}
  # The trained agent's numbers, where there is one, are not nested.
  pairs = [
      ('solo', 'one trained agent', entry if 'time_ratio' in entry else None),
      ('greedy_solo', 'one greedy agent', entry.get('greedy_solo')),
  ]
  return [pair for pair in pairs if pair[2]]


def _crossover(evaluation: dict[str, Any]) -> str:
  """From which deadline on a collective is the better choice."""
  sweep = evaluation.get('by_deadline') or {}
  other = figures.one_agent(sweep.get('modes') or {})
  if other is None:
    return ''
  name = figures.style(other).label
  crossover = _number(sweep.get('crossover_ms'))
  if not math.isfinite(crossover):
    return f'The collective is not ahead of {name} at the longest deadline.'
  if crossover <= sweep['deadline_ms'][0]:
    return (
        f'The collective overtakes {name} at {_seconds(crossover)} or sooner,'
        ' the shortest deadline tested.'
    )
  return (
      f'The collective overtakes {name} at a deadline of {_seconds(crossover)}.'
  )


def _render(
    name: str,
    config: dict[str, Any],
    runs: dict[str, figures.Rows],
    evaluation: dict[str, Any] | None,
    charts: list[figures.Chart],
    transcript: list[dict[str, Any]],
) -> str:
  """The page, with the figures inside."""
  rows = runs['collective']
  return pages.render(
      'report.html.jinja',
      name=name,
      config=config,
      config_text=json.dumps(config, indent=2, sort_keys=True),
      updates=len(rows),
      evaluation=evaluation,
      columns=_COLUMNS,
      style=figures.style,
      results=[
          (env, summary(own), caption(own))
          for env, own in environments(evaluation or {}).items()
      ]
      + (
          [('', summary(evaluation), caption(evaluation))] if evaluation else []
      ),
      headline=headline(evaluation) if evaluation else _so_far(rows),
      headlines=headlines(rows),
      matched=matched_tokens(evaluation) if evaluation else [],
      window=figures.window_of(rows),
      charts=charts,
      transcript=transcript,
  )


def read_evaluation(workdir: pathlib.Path) -> dict[str, Any] | None:
  """The contents of `evaluation.json`, None before it is written."""
  path = workdir / 'evaluation.json'
  if not path.exists():
    return None
  return json.loads(path.read_text(encoding='utf-8'))


def _so_far(rows: figures.Rows) -> str:
  """The headline of a run that was not evaluated."""
  if not rows:
    return 'No update has been recorded yet.'
  value = _text(rows[-1].get('return_mean'), '.3f')
  limit = _seconds(rows[-1].get('deadline_ms'))
  return (
      f'After {len(rows)} updates the collective returns {value} in training,'
      f' under a deadline of {limit}.'
  )


def _ratio(over: float, under: float) -> float:
  return over / under if under else math.nan


def _with_interval(
    entry: dict[str, Any],
    mean: str = 'return_mean',
    interval: str = 'return_ci95',
    spec: str = '.3f',
) -> str:
  """`0.812 [0.790, 0.834]`."""
  ends = pages.interval(entry.get(interval), spec)
  return f'{_text(entry.get(mean), spec)} {ends}'
