"""What the entry points share: flags, errors in one line, the progress bar."""

from collections.abc import Callable, Sequence
import os
import pathlib
import sys
from typing import Any

from absl import app
from absl import flags
from absl import logging
from envs import registry
from envs.base import NotAllowedError
import jax
import ml_collections
from ml_collections import config_flags
from rich import console as rich_console
from rich import progress as rich_progress
from rlcr_jax import checkpoints
from rlcr_jax import config as config_lib
from rlcr_jax import decisions
from rlcr_jax import train
from rlcr_jax.llm import engine

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')

_DEFAULT_CONFIG = 'experiments/configs/default.py'

CONSOLE = rich_console.Console(stderr=True)

# Errors of the user's making, or of the run's: told in one line, no traceback.
_TOLD = (
    NotAllowedError,
    FileNotFoundError,
    train.NonFiniteError,
    train.GapError,
    decisions.BufferFullError,
    engine.EngineError,
)


def run(main: Callable[[], int | None]) -> None:
  """Parses flags, prepares JAX, and calls `main`.

  An error is printed in one line and ends the process with status 1; a flag
  that cannot be parsed ends it with 2.
  """

  def guarded(argv: Sequence[str]) -> int | None:
    if len(argv) > 1:
      return _fail(f'argument {argv[1]!r} is not allowed: all are flags.', 2)
    _prepare_jax()
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)  # Orbax tells much at INFO.
    try:
      return main()
    except checkpoints.CheckpointError as error:
      status = _fail(str(error), 1)
      _silence()  # Orbax's threads would now print their own troubles.
      return status
    except _TOLD as error:
      return _fail(str(error), 1)

  app.run(guarded, flags_parser=_parse)


def config() -> ml_collections.ConfigDict:
  """The value of --config with its overrides.

  Raises:
    NotAllowedError: if the file cannot be loaded.
  """
  try:
    flags.FLAGS.config.keys()
  except OSError as error:
    raise NotAllowedError(_one_line(error)) from error
  return flags.FLAGS.config


def config_path() -> tuple[str, dict[str, Any]]:
  """The file of --config with its variant, and the overrides by field.

  Raises:
    NotAllowedError: if the file cannot be loaded.
  """
  config()
  flag = flags.FLAGS['config']
  return (
      config_flags.get_config_filename(flag),
      dict(config_flags.get_override_values(flag)),
  )


def _parse(argv: Sequence[str]) -> list[str]:
  """Flags, with a config's unknown fields and wrong types in one line."""
  try:
    # Defined here and not at import, because it reads the command line.
    config_flags.DEFINE_config_file(
        'config',
        _DEFAULT_CONFIG,
        'Configuration file; override fields with --config.FIELD=VALUE.',
        lock_config=True,
    )
    return flags.FLAGS(list(argv))
  except (AttributeError, KeyError) as error:
    sys.exit(_fail(_unknown_field(argv) or _one_line(error), 2))
  except (flags.Error, TypeError, ValueError, FileNotFoundError) as error:
    sys.exit(_fail(f'{_one_line(error)} (see --helpfull)', 2))


def _one_line(error: Exception) -> str:
  text = str(error).strip()
  if 'Traceback' in text:  # Of a configuration file; the last line says why.
    text = text.splitlines()[-1]
  return ' '.join(text.split())


def _unknown_field(argv: Sequence[str]) -> str | None:
  """Which override names no field of a configuration, and what is near it."""
  names = registry.names()
  configs = [config_lib.defaults(name) for name in names]
  configs.append(config_lib.defaults(*names))  # A mixture.
  known = {path for c in configs for path in config_lib.leaves(c.to_dict())}
  for arg in argv:
    name, _, value = arg.lstrip('-').partition('=')
    path = name.removeprefix('config.')
    if path != name and path not in known:
      return 'config.' + config_lib.no_such_field(path, value, known)
  return None


def _silence() -> None:
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())


def _fail(text: str, status: int) -> int:
  print(f'error: {text}', file=sys.stderr, flush=True)
  return status


def _prepare_jax() -> None:
  """One device per CPU core, and a compilation cache that outlives us."""
  if not os.environ.get('JAX_NUM_CPU_DEVICES'):
    jax.config.update('jax_num_cpu_devices', os.cpu_count() or 1)
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    cache = pathlib.Path.home() / '.cache' / 'rlcr_jax' / 'xla'
    jax.config.update('jax_compilation_cache_dir', str(cache))


def require_workdir() -> pathlib.Path:
  """The value of --workdir.

  Raises:
    NotAllowedError: if it is missing.
  """
  if not WORKDIR.value:
    raise NotAllowedError('--workdir is missing: name the folder of the run.')
  return pathlib.Path(WORKDIR.value)


class Bar:
  """A progress bar per arm: steps, time left, return, deadline, team size."""

  def __init__(self, steps: int):
    self._steps = steps
    self._tasks: dict[str, rich_progress.TaskID] = {}
    self._bar = rich_progress.Progress(
        rich_progress.TextColumn('[bold]{task.description:>10}'),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn('{task.fields[news]}'),
        console=CONSOLE,
    )

  def __enter__(self) -> 'Bar':
    self._bar.start()
    return self

  def __exit__(self, *unused) -> None:
    self._bar.stop()

  def __call__(self, arm: str, row: dict[str, float]) -> None:
    """Shows the metrics of one update, or of one step of imitation."""
    if 'return_mean' in row:
      news = (
          f'return {row["return_mean"]:.3f}'
          f'  deadline {row["deadline_ms"] / 1000:.0f} s'
          f'  team {row["team_size_mean"]:.1f}'
      )
    else:
      news = f'loss {row["loss"]:.3f}'
    steps = int(row.get('steps', self._steps))
    if arm not in self._tasks:
      self._tasks[arm] = self._bar.add_task(arm, total=steps, news='')
    self._bar.update(self._tasks[arm], completed=row['step'] + 1, news=news)
    if not CONSOLE.is_terminal and (row['step'] + 1) % 25 == 0:
      CONSOLE.print(f'{arm} step {int(row["step"]) + 1}/{steps}  {news}')
