"""What a sweep has found so far: a row for each unit, a summary of each arm."""

import csv
import io
import pathlib
from typing import Any, NamedTuple

from rlcr_jax import files
from rlcr_jax import report
from rlcr_jax import statistics
from rlcr_jax import sweeps

_TOTALS = ('decisions', 'deadline_ms', 'seconds')


class State(NamedTuple):
  """How far a unit is."""

  name: str  # waiting, running, finished or failed.
  error: str = ''  # Why it failed, in one line.


def numbers(workdir: pathlib.Path) -> dict[str, float | None]:
  """All numbers of a run, by name; null where there is none.

  * Those of `evaluation.json`, named by their place: `modes.solo.return_mean`.
    The ends of an interval are `….low` and `….high`; curves are left out.
  * `training.COLUMN`: of the collective's last update, see `metrics.jsonl`.
  * `total.COLUMN`: sum over its updates, of decisions, seconds, `deadline_ms`
    (the simulated time of one rollout after the other).
  """
  result: dict[str, float | None] = {}
  _flatten(report.read_evaluation(workdir) or {}, '', result)
  result.pop('seed', None)  # Names a run; nothing was measured.
  rows = files.read_lines(workdir / 'metrics.jsonl')
  for name, value in (rows[-1] if rows else {}).items():
    result[f'training.{name}'] = value
  for name in _TOTALS if rows else ():
    result[f'total.{name}'] = sum(row[name] for row in rows)
  return result


def _flatten(value: Any, name: str, result: dict[str, float | None]) -> None:
  if isinstance(value, dict):
    for key, item in value.items():
      _flatten(item, f'{name}.{key}' if name else key, result)
  elif not isinstance(value, list):
    result[name] = value
  elif name.endswith('_ci95') and not isinstance(value[0], list):
    result[f'{name}.low'], result[f'{name}.high'] = value


def collect(
    sweep: sweeps.Sweep,
    units: list[sweeps.Unit],
    states: dict[str, State],
    workdir: pathlib.Path,
) -> dict[str, Any]:
  """What is known of all units, as it stands in `sweep.json`.

  Args:
    sweep: what is compared.
    units: its units.
    states: of every unit, by its name.
    workdir: the folder of the sweep.
  """
  rows = [
      {
          'arm': unit.arm,
          'seed': unit.seed,
          'state': states[unit.name].name,
          'error': states[unit.name].error,
          'workdir': unit.name,
          'log': f'{unit.name}.log',
          'config': unit.path,
          'overrides': unit.overrides,
          'numbers': numbers(workdir / unit.name),
      }
      for unit in units
  ]
  return {
      'columns': list(sweep.columns),
      'curves': list(sweep.curves),
      'arms': {arm: _summary(rows, arm) for arm in sweep.arms},
      'units': rows,
  }


def finished(found: dict[str, Any], arm: str) -> list[dict[str, Any]]:
  """The rows of an arm's finished units."""
  return [
      row
      for row in found['units']
      if row['arm'] == arm and row['state'] == 'finished'
  ]


def _summary(rows: list[dict[str, Any]], arm: str) -> dict[str, Any]:
  """Mean and interval over the finished seeds of an arm, of every number."""
  done = finished({'units': rows}, arm)
  names = dict.fromkeys(name for row in done for name in row['numbers'])
  summary = {}
  for name in names:
    of_seeds = [row['numbers'].get(name) for row in done]
    known = [value for value in of_seeds if value is not None]
    if known and not name.endswith(('.low', '.high')):
      mean, ci95 = statistics.mean_t95(known)
      summary[name] = {'mean': mean, 'ci95': ci95, 'seeds': len(known)}
  return {'seeds': [row['seed'] for row in done], 'numbers': summary}


def write(found: dict[str, Any], workdir: pathlib.Path) -> None:
  """Writes `sweep.json`, and `sweep.csv` with a row for each unit."""
  files.write_json(workdir / 'sweep.json', found)
  rows = [
      {name: row[name] for name in ('arm', 'seed', 'state', 'error', 'config')}
      | row['overrides']
      | row['numbers']
      for row in found['units']
  ]
  text = io.StringIO()
  table = csv.DictWriter(text, dict.fromkeys(n for row in rows for n in row))
  table.writeheader()
  table.writerows(rows)
  files.write_text(workdir / 'sweep.csv', text.getvalue())
