"""Sweeps: named overrides of a configuration, each with several seeds.

A configuration file may have, beside `get_config(variant)`, a function
`get_sweep(variant)` that gives a `Sweep`. Its units are the arms times the
seeds. What they are is said here; how they are run is up to who starts them.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import types
from typing import Any

from envs.base import NotAllowedError
from envs.base import require
import ml_collections
from rlcr_jax import config as config_lib
from rlcr_jax import files
from rlcr_jax import train

Arms = dict[str, dict[str, Any]]  # Overrides of fields, by the arm's name.

# What an arm may give beside fields: a configuration file of its own, as
# `--config` takes it, to which its overrides then apply.
CONFIG = 'config'
COLUMNS = (
    'modes.collective.return_mean',
    'modes.solo.return_mean',
    'modes.oracle.return_mean',
    'modes.collective.team_size_mean',
    'modes.collective.output_tokens_mean',
    'modes.collective.useful_token_share',
)


@dataclasses.dataclass(frozen=True)
class Sweep:
  """What is compared.

  Numbers have the names that `sweep_results.numbers` gives them.
  """

  arms: Arms
  seeds: tuple[int, ...] = (0, 1, 2)
  columns: tuple[str, ...] = COLUMNS  # What is tabulated, the headline first.
  curves: tuple[str, ...] = ('return_mean',)  # Of `metrics.jsonl`; are drawn.

  def __post_init__(self):
    for field in ('arms', 'seeds', 'columns'):
      value = getattr(self, field)
      require(len(value) > 0, field, value, 'one at least')
    once = len(set(self.seeds)) == len(self.seeds)
    require(once, 'seeds', self.seeds, 'different from each other')
    for name in self.arms:  # It becomes that of a folder.
      fits = re.fullmatch(r'\w[\w.,=+-]*', name) is not None
      require(fits, 'arm', name, 'made of letters, digits and any of _.,=+-')

  def only(self, names: Sequence[str]) -> 'Sweep':
    """The same with these arms alone; all of them if none is named."""
    for name in names:
      require(name in self.arms, 'only', name, f'one of {sorted(self.arms)}')
    arms = {n: arm for n, arm in self.arms.items() if n in names or not names}
    return dataclasses.replace(self, arms=arms)


@dataclasses.dataclass(frozen=True)
class Unit:
  """One run of a sweep."""

  arm: str
  seed: int
  path: str  # Of its configuration file, as `--config` takes it.
  overrides: dict[str, Any]  # Of that file's fields; the last is the seed.
  config: ml_collections.ConfigDict  # What the two give.

  @property
  def name(self) -> str:
    """Of its workdir, within that of the sweep."""
    return f'{self.arm}/seed_{self.seed}'

  def flags(self) -> list[str]:
    """What gives `config` on a command line."""
    return [
        f'--config={self.path}',
        *(f'--config.{f}={_text(v)}' for f, v in self.overrides.items()),
    ]


def values(field: str, options: Iterable[Any]) -> Arms:
  """An arm for each value of a field, named as in `ramp=0.5`."""
  leaf = field.split('.')[-1]
  return {f'{leaf}={option}': {field: option} for option in options}


def product(*parts: Arms) -> Arms:
  """All ways to take one arm of each part.

  Names are joined by commas. As for `zipped`, no field may be set twice.
  """
  return _joined(itertools.product(*(part.items() for part in parts)))


def zipped(*parts: Arms) -> Arms:
  """The first arms of all parts together, the second ones, and so on."""
  sizes = [len(part) for part in parts]
  require(len(set(sizes)) <= 1, 'zipped', sizes, 'as many arms in every part')
  return _joined(zip(*(part.items() for part in parts), strict=True))


def chain(*parts: Arms) -> Arms:
  """The arms of all parts, one part after the other."""
  return _unique(itertools.chain(*(part.items() for part in parts)))


def _joined(rows: Iterable[Iterable[tuple[str, dict[str, Any]]]]) -> Arms:
  return _unique(
      (','.join(name for name, _ in row), merged(*(arm for _, arm in row)))
      for row in rows
  )


def _unique(pairs: Iterable[tuple[str, dict[str, Any]]]) -> Arms:
  result: Arms = {}
  for name, arm in pairs:
    require(name not in result, 'arm', name, 'another name: it is taken')
    result[name] = arm
  return result


def merged(*overrides: dict[str, Any]) -> dict[str, Any]:
  """All overrides.

  Raises:
    NotAllowedError: if two set the same field.
  """
  result: dict[str, Any] = {}
  for one in overrides:
    for field, value in one.items():
      if field in result:
        raise NotAllowedError(
            f'{field}={value!r} is not allowed: {field}={result[field]!r} is'
            ' set too.'
        )
      result[field] = value
  return result


def load(path: str) -> tuple[Sweep, str]:
  """The sweep of a configuration file, and what the file says of itself.

  Args:
    path: as `--config` takes it, with its variant.

  Raises:
    NotAllowedError: if the file has no `get_sweep`.
  """
  module, variant = _module(path)
  if not hasattr(module, 'get_sweep'):
    raise NotAllowedError(
        f'config={path!r} is not allowed: the file must have a function'
        ' get_sweep(variant), as experiments/configs/ablation_*.py do.'
    )
  return module.get_sweep(*variant), module.__doc__ or ''


def units(sweep: Sweep, path: str, common: dict[str, Any]) -> list[Unit]:
  """The units of a sweep, each of them checked.

  Args:
    sweep: what is compared.
    path: the configuration file of arms that name no other.
    common: further overrides, which all arms have.

  Raises:
    NotAllowedError: naming the arm, the field, its value and what is allowed.
  """
  result = []
  for (arm, own), seed in itertools.product(sweep.arms.items(), sweep.seeds):
    try:
      overrides = merged(common, own, {'seed': seed})
      file = overrides.pop(CONFIG, path)
      config = train.checked(_configured(file, overrides))
    except (ValueError, FileNotFoundError) as error:
      raise NotAllowedError(f'arm {arm!r}, seed {seed}: {error}') from error
    result.append(Unit(arm, seed, file, overrides, config))
  return result


def _configured(path: str, overrides: dict[str, Any]):
  """The configuration that a unit's flags give."""
  module, variant = _module(path)
  fields = module.get_config(*variant).to_dict()
  known = config_lib.leaves(fields)
  for field, value in overrides.items():
    if field not in known:
      raise NotAllowedError(config_lib.no_such_field(field, value, known))
    *sections, leaf = field.split('.')
    target = fields
    for section in sections:
      target = target[section]
    fraction = type(known[field]) is float and type(value) is int
    target[leaf] = float(value) if fraction else value
  return ml_collections.ConfigDict(fields)


def _module(path: str) -> tuple[types.ModuleType, list[str]]:
  """The module of a configuration file, and the variant if one is given."""
  file, *variant = path.split(':', 1)
  spec = importlib.util.spec_from_file_location('sweep_config', file)
  if spec is None:
    raise NotAllowedError(f'config={path!r} is not allowed: no Python file.')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module, variant


def _text(value: Any) -> str:
  """As a flag takes it."""
  return str(value).lower() if isinstance(value, bool) else str(value)


def check_workdirs(units: list[Unit], workdir: pathlib.Path) -> None:
  """Checks that what was done before is of these very units.

  A finished unit must also have been evaluated as it would be now.

  Raises:
    NotAllowedError: naming the unit and the fields that differ.
  """
  for unit in units:
    path = workdir / unit.name / 'config.json'
    if not path.exists():
      continue
    train.claim_workdir(unit.config, path.parent)
    old = json.loads(path.read_text(encoding='utf-8'))
    changes = config_lib.differences(
        {'evaluation': old.get('evaluation')},
        {'evaluation': unit.config.evaluation.to_dict()},
    )
    if finished(unit, workdir) and changes:
      raise NotAllowedError(
          f'workdir={str(path.parent)!r} is not allowed: its run was evaluated'
          f' otherwise, which differs in {"; ".join(changes)}. Choose another'
          ' --workdir, or give the same to go on.'
      )


def finished(unit: Unit, workdir: pathlib.Path) -> bool:
  """Has the unit nothing left to do?"""
  return (workdir / unit.name / 'DONE').exists()


def total_steps(unit: Unit) -> int:
  """Updates of a unit and of the baselines that are trained beside."""
  return unit.config.steps * len(train.arms(unit.config))


def steps_done(unit: Unit, workdir: pathlib.Path) -> int:
  """How many of `total_steps` are recorded."""
  rows = [
      files.last_line(
          train.Run.arm_directory(workdir / unit.name, arm) / 'metrics.jsonl'
      )
      for arm in train.arms(unit.config)
  ]
  return sum(int(row['step']) + 1 for row in rows if row)
