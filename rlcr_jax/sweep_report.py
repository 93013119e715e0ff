"""The comparison of a sweep's arms: a table, figures, and one page."""

import json
import math
import pathlib
from typing import Any, NamedTuple

from rich import table as table_lib
from rlcr_jax import figures
from rlcr_jax import files
from rlcr_jax import pages
from rlcr_jax import sweep_figures
from rlcr_jax import sweep_results

# Name or last part of a name, what it is called, factor, format.
_FIELDS = {
    'return_mean': ('return', 1, '.3f'),
    'team_size_mean': ('team', 1, '.1f'),
    'output_tokens_mean': ('output tokens', 1, ',.0f'),
    'useful_token_share': ('useful tokens', 1, '.0%'),
    'effective_share': ('effective turns', 1, '.0%'),
    'communication_tokens_per_s': ('talk tok/s', 1, '.1f'),
    'time_ms_mean': ('time s', 1e-3, '.0f'),
    'crossover_ms': ('crossover s', 1e-3, '.0f'),
    'deadline_ms': ('deadline s', 1e-3, ',.0f'),
    'time_ratio': ('relative time', 1, '.2f'),
    'total.deadline_ms': ('simulated s', 1e-3, ',.0f'),
    'decisions': ('decisions', 1, ',.0f'),
    'seconds': ('real time s', 1, ',.0f'),
}
# Parts of a name that go without saying.
_SILENT = ('modes', 'collective', 'environments', 'matched_tokens')


class Column(NamedTuple):
  """How a number is shown."""

  label: str
  scale: float
  spec: str

  def text(self, value: float | None) -> str:
    """A value of the column."""
    return pages.text(pages.number(value) * self.scale, self.spec)

  def cell(self, entry: dict[str, Any] | None, interval: bool) -> str:
    """A mean over seeds, with its interval if that is wanted and there."""
    entry = entry or {'mean': None, 'ci95': [None, None]}
    mean = self.text(entry['mean'])
    if not (interval and math.isfinite(pages.number(entry['ci95'][0]))):
      return mean
    return f'{mean} {pages.interval(entry["ci95"], self.spec, self.scale)}'


def column(name: str) -> Column:
  """How a number of that name is shown, be it known or not."""
  *place, field = name.split('.')
  if name in _FIELDS:
    return Column(*_FIELDS[name])
  words = [figures.style(part).label for part in place if part not in _SILENT]
  label, scale, spec = _FIELDS.get(field, (field.replace('_', ' '), 1, '.3g'))
  return Column(' '.join([*words, label]), scale, spec)


def write(
    found: dict[str, Any], title: str, about: str, workdir: pathlib.Path
) -> pathlib.Path:
  """Writes `sweep.json`, `sweep.csv`, `figures/*.png` and `report.html`.

  Args:
    found: of `sweep_results.collect`.
    title: of the page.
    about: what the sweep is for.
    workdir: the folder of the sweep.

  Returns:
    The path of the page, which needs no other file.
  """
  sweep_results.write(found, workdir)
  first = column(found['columns'][0])
  charts = sweep_figures.charts(found, first.label, first.scale, workdir)
  for chart in charts:
    files.write_bytes(workdir / 'figures' / f'{chart.name}.png', chart.png)
  columns = {name: column(name) for name in found['columns']}
  page = pages.render(
      'sweep.html.jinja',
      title=title,
      about=about,
      found=found,
      found_text=json.dumps(
          {unit['workdir']: unit['overrides'] for unit in found['units']},
          indent=2,
      ),
      finished=sum(unit['state'] == 'finished' for unit in found['units']),
      columns=columns,
      looks=sweep_figures.looks(list(found['arms'])),
      headline=headline(found),
      charts=charts,
  )
  path = workdir / 'report.html'
  files.write_text(path, page)
  return path


def table(found: dict[str, Any]) -> table_lib.Table:
  """A row for each arm: means over seeds, and the headline's interval."""
  columns = {name: column(name) for name in found['columns']}
  labels = [c.label.replace(' ', '\n') for c in columns.values()]
  labels[0] += '\n[95 % interval]'
  result = pages.empty_table('', *labels, 'seeds', caption=headline(found))
  for arm, entry in found['arms'].items():
    cells = [
        c.cell(entry['numbers'].get(name), interval=i == 0)
        for i, (name, c) in enumerate(columns.items())
    ]
    result.add_row(arm, *cells, str(len(entry['seeds'])))
  return result


def headline(found: dict[str, Any]) -> str:
  """Which arms have most and least of the headline, and how sure that is."""
  name = found['columns'][0]
  first = column(name)
  known = {
      arm: entry['numbers'][name]
      for arm, entry in found['arms'].items()
      if name in entry['numbers']
  }
  if not known:
    return 'No unit is finished.'
  order = sorted(known, key=lambda arm: known[arm]['mean'])
  low, high = known[order[0]], known[order[-1]]
  tell = lambda arm: f'{arm} has {first.cell(known[arm], interval=True)}'
  if len(order) == 1:
    return f'{first.label.capitalize()}: {tell(order[0])}.'
  gap = pages.number(low['ci95'][1]), pages.number(high['ci95'][0])
  if not all(map(math.isfinite, gap)):
    doubt = ' Of single seeds there is no interval: it may be chance.'
  elif gap[0] >= gap[1]:
    doubt = ' Their intervals over seeds overlap, so this may be chance.'
  else:
    doubt = ' Their intervals over seeds do not overlap.'
  return (
      f'{first.label.capitalize()}: {tell(order[-1])}, the most, and'
      f' {tell(order[0])}, the least.{doubt}'
  )
