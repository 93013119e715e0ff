"""Says what an environment is, what it costs and what can be reached in it.

  python -m experiments.describe --env=search [--workdir=DIR] [--config=...]

Prints knobs, verbs with their costs, one task as text, its bounds, and
what policies that learn nothing return at several deadlines and team sizes.
With --workdir, draws the task and the returns into PNG files there.

An environment's knobs are changed in its configuration:

  python -m experiments.describe --config=experiments/configs/search.py \
      --config.env.num_places=20
"""

import importlib
import pathlib

from absl import flags
from envs import registry
from envs.base import require
from experiments import cli
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from rich.table import Table
from rlcr_jax import config as config_lib
from rlcr_jax import figures
from rlcr_jax import files
from rlcr_jax import references
from rlcr_jax import statistics
from rlcr_jax.collective import Collective

_ENV = flags.DEFINE_string('env', None, 'Environment; see envs/registry.py.')
_TASKS = flags.DEFINE_integer('tasks', 64, 'Tasks that are played.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the tasks.')

_TEAMS = 1, 2, 4, 8  # Agents, the CEO included.
_OTHERS = 'oracle_muted', 'greedy_solo', 'random'
_DEADLINES = 5


def main() -> None:
  """Describes one environment."""
  config = _config()
  resolved = config_lib.resolve(config)
  require(len(resolved.envs) == 1, 'env', list(resolved.envs), 'one of them')
  ((name, collective),) = resolved.make_collectives().items()
  require(_TASKS.value >= 2, 'tasks', _TASKS.value, '>= 2')
  task = collective.env.sample_task(jax.random.key(_SEED.value))
  deadlines_ms = np.linspace(
      resolved.deadline.first_ms, resolved.deadline.final_ms, _DEADLINES
  ).astype(int)
  show = cli.CONSOLE.print
  show(_knobs(name, config))
  show(_verbs(collective))
  show(collective.env.describe(task), markup=False)
  show(_bounds(collective, task, deadlines_ms))
  show('playing ...')
  teams = {n: n - 1 for n in _TEAMS if n <= collective.num_agents}
  play = lambda mode, hires=None: references.returns(
      collective,
      mode,
      deadlines_ms,
      hires=hires,
      num_tasks=_TASKS.value,
      seed=_SEED.value,
  )
  oracle = play('oracle', tuple(teams.values()))
  oracle = dict(zip(teams, oracle, strict=True))
  others = {mode: play(mode)[0] for mode in _OTHERS}
  show(_returns(deadlines_ms, oracle, others))
  if cli.WORKDIR.value:
    charts = (
        _picture(name, collective, task),
        figures.scaling(name, deadlines_ms, oracle, others),
    )
    for chart in charts:
      path = pathlib.Path(cli.WORKDIR.value) / f'{chart.name}.png'
      files.write_bytes(path, chart.png)
      show(f'{chart.title}: {path}')


def _config() -> ml_collections.ConfigDict:
  """The configuration that is given, or the environment's own."""
  config = cli.config()
  name = _ENV.value or config.env.name
  known = registry.names()
  require(name in known, 'env', name, f'one of {known}')
  if name == config.env.name:
    return config
  name = 'default' if name == 'software' else name
  module = importlib.import_module(f'experiments.configs.{name}')
  return module.get_config()


def _table(title: str, *columns: str) -> Table:
  table = Table(title=title, title_justify='left')
  for i, column in enumerate(columns):
    table.add_column(column, justify='right' if i else 'left')
  return table


def _knobs(name: str, config: ml_collections.ConfigDict) -> Table:
  table = _table(f'{name}: knobs (--config.env.KNOB=VALUE)', 'knob', 'value')
  for knob, value in config.env.to_dict().items():
    if knob != 'name':
      table.add_row(knob, str(value))
  return table


def _verbs(collective: Collective) -> Table:
  """What can be done, and how long it takes."""
  table = _table('verbs', 'verb', 'tokens', 'tool (s)', 'turn (s)', 'does')
  for verb in collective.verbs:
    takes_ms = collective.latency.duration_ms(
        jnp.int32(round(verb.output_tokens)),
        jnp.int32(0),
        jnp.int32(verb.tool_ms),
    )
    kind = 'work' if verb.acts_on_environment else 'coordination'
    table.add_row(
        verb.name,
        f'{verb.output_tokens:.0f}',
        f'{verb.tool_ms / 1000:.1f}',
        f'{int(takes_ms) / 1000:.1f}',
        'learns a fact' if verb.learns else kind,
    )
  return table


def _bounds(collective: Collective, task, deadlines_ms: np.ndarray) -> Table:
  """What nobody can do better, on this task."""
  shortest = jnp.array(collective.shortest_turn_ms(), jnp.int32)
  bounds = lambda n, ms: collective.env.bounds(task, n, jnp.int32(ms), shortest)
  one = bounds(1, deadlines_ms[-1])
  table = _table(
      f'bounds: all work {int(one.serial_ms) / 1000:.0f} s, critical path'
      f' {int(one.critical_path_ms) / 1000:.0f} s; most progress by deadline',
      'agents',
      *(f'{ms / 1000:.0f} s' for ms in deadlines_ms),
  )
  for n in _TEAMS:
    cells = (f'{float(bounds(n, ms).progress):.2f}' for ms in deadlines_ms)
    table.add_row(str(n), *cells)
  return table


def _returns(deadlines_ms: np.ndarray, oracle, others) -> Table:
  """Means with 95 % intervals; see `references.returns`."""
  table = _table(
      f'returns by deadline, {_TASKS.value} tasks, 95 % intervals',
      '',
      *(f'{ms / 1000:.0f} s' for ms in deadlines_ms),
  )
  rows = {figures.oracle_label(n): values for n, values in oracle.items()}
  rows |= {figures.style(mode).label: values for mode, values in others.items()}
  for name, values in rows.items():
    cells = []
    for mean, (low, high) in map(statistics.mean_ci95, values):
      cells.append(f'{mean:.2f} ±{(high - low) / 2:.2f}')
    table.add_row(name, *cells)
  return table


def _picture(name: str, collective: Collective, task) -> figures.Chart:
  env = collective.env
  knows = jnp.zeros((env.num_targets,), bool)
  view = jax.device_get(env.view(task, env.reset(task), knows))
  column = lambda wanted: view.features[:, env.feature_names.index(wanted)]
  return figures.task(name, view.relations, column('value'), column('open') > 0)


if __name__ == '__main__':
  cli.run(main)
