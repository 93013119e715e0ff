"""What is measured in every update, and where it is written."""

import csv
import io
import json
import pathlib
from typing import Any

from envs import base
import numpy as np
from rlcr_jax import files
from rlcr_jax import learner
from rlcr_jax import rollout
import tensorboardX

TEAM_BINS = ((1, 1), (2, 5), (6, 9), (10, 10**9))  # Agents, CEO included.


def verb_groups(verbs: tuple[base.VerbSpec, ...]) -> dict[str, np.ndarray]:
  """[V] bool masks: turns that act on the environment, and that talk."""
  return {
      'useful': np.array([v.acts_on_environment for v in verbs]),
      'talk': np.array([v.talks for v in verbs]),
  }


def signs_of_life(
    verbs: tuple[base.VerbSpec, ...], played: rollout.Rollouts
) -> dict[str, np.ndarray]:
  """Per rollout [B]: what collectives did, beside their return.

  Useful work is the output tokens of turns that act on the environment;
  communication is output tokens of messages per second of the rollout.
  """
  groups = verb_groups(verbs)
  tokens = np.asarray(played.output_tokens, np.float64)  # [B, V]
  total = tokens.sum(1)
  useful = tokens @ groups['useful']
  turns = np.asarray(played.turns, np.float64) @ groups['useful']
  effective = np.asarray(played.effective, np.float64) @ groups['useful']
  seconds = np.maximum(np.asarray(played.time_ms) / 1000.0, 1e-3)
  return {
      'team_size': np.asarray(played.team_size, np.float64),
      'critical_steps': np.asarray(played.critical_steps, np.float64),
      'output_tokens': total,
      'useful_tokens': useful,
      'useful_token_share': useful / np.maximum(total, 1.0),
      'effective_share': effective / np.maximum(turns, 1.0),
      'communication_tokens_per_s': (tokens @ groups['talk']) / seconds,
      'time_ms': np.asarray(played.time_ms, np.float64),
  }


def useful_by_team(signs: dict[str, np.ndarray]) -> dict[str, float]:
  """Useful work by team size, relative to the batch's average rollout."""
  mean = max(float(signs['useful_tokens'].mean()), 1e-9)
  result = {}
  for low, high in TEAM_BINS:
    inside = (signs['team_size'] >= low) & (signs['team_size'] <= high)
    name = f'useful_work_team_{low}' + (f'_{high}' if high > low else '')
    relative = signs['useful_tokens'][inside] / mean
    result[name] = float(relative.mean()) if inside.any() else float('nan')
  return result


def summarise(
    verbs: tuple[base.VerbSpec, ...],
    update: learner.Update,
    deadlines_ms: np.ndarray,
    knobs: learner.Knobs,
) -> dict[str, float]:
  """The row of one update. Means are over rollouts."""
  returns = np.asarray(update.returns, np.float64)
  signs = signs_of_life(verbs, update.rollouts)
  decided = int(update.rollouts.decisions)
  row = {
      'deadline_ms': float(np.mean(deadlines_ms)),
      'return_mean': float(
          np.nanmean(np.where(np.isfinite(returns), returns, np.nan))
      ),
      'return_std_in_group': float(returns.std(1).mean()),
      'progress_mean': float(np.mean(update.rollouts.progress)),
  }
  row |= {f'{name}_mean': float(v.mean()) for name, v in signs.items()}
  row |= useful_by_team(signs)
  row |= {
      f'turns_{verb.name}': float(np.mean(update.rollouts.turns[:, i]))
      for i, verb in enumerate(verbs)
  }
  scalars = (
      'loss',
      'entropy',
      'grad_norm',
      'log_prob_gap',
      'informative',
      'nonfinite_groups',
  )
  row |= {name: float(getattr(update, name)) for name in scalars}
  scheduled = knobs._asdict()
  for name, value in scheduled.pop('incentive').items():
    scheduled[f'incentive_{name}'] = value
  row |= {name: float(value) for name, value in scheduled.items()}
  row['decisions'] = float(decided)
  return row | {name: float(value) for name, value in update.extra.items()}


def mixed(
    rows: dict[str, dict[str, float]], weights: dict[str, float]
) -> dict[str, float]:
  """The row of an update of several environments.

  Args:
    rows: of `summarise`, by environment.
    weights: of the environments, adding up to 1.

  Returns:
    The only row, or the weighted means of what all rows have (of decisions,
    which are counted, the sum), and then every row's own numbers as `env/name`.
  """
  if len(rows) == 1:
    return next(iter(rows.values()))
  result = {}
  for name in next(iter(rows.values())):
    if all(name in row for row in rows.values()):
      result[name] = sum(weights[env] * row[name] for env, row in rows.items())
  result['decisions'] = sum(row['decisions'] for row in rows.values())
  for env, row in rows.items():
    result |= {f'{env}/{name}': value for name, value in row.items()}
  return result


class MetricsWriter:
  """Appends rows to `metrics.jsonl`, and mirrors them for other tools.

  The JSON lines are the record; the CSV is made from them, so that a resumed
  run has each step exactly once in both.
  """

  def __init__(self, directory: pathlib.Path, first_step: int):
    """Keeps the rows before `first_step`; later ones were never saved."""
    self._directory = directory
    self.rows = [
        row
        for row in files.read_lines(directory / 'metrics.jsonl')
        if row['step'] < first_step
    ]
    text = ''.join(files.dumps(row) + '\n' for row in self.rows)
    files.write_text(directory / 'metrics.jsonl', text)
    self._lines = (directory / 'metrics.jsonl').open('a', encoding='utf-8')
    self._events = tensorboardX.SummaryWriter(
        str(directory / 'tensorboard'), purge_step=first_step
    )

  def write(self, row: dict[str, Any]) -> None:
    """Appends one update."""
    line = files.dumps(row)
    self.rows.append(json.loads(line))  # As a resumed run will read it.
    self._lines.write(line + '\n')
    self._lines.flush()
    for name, value in row.items():
      if name != 'step' and np.isfinite(value):
        self._events.add_scalar(name, value, row['step'])

  def flush(self) -> None:
    """Brings the CSV and the TensorBoard events up to date."""
    if self.rows:
      text = io.StringIO()
      table = csv.DictWriter(text, fieldnames=list(self.rows[0]))
      table.writeheader()
      table.writerows(self.rows)
      files.write_text(self._directory / 'metrics.csv', text.getvalue())
    self._events.flush()

  def close(self) -> None:
    """Flushes and closes all files."""
    self.flush()
    self._lines.close()
    self._events.close()
