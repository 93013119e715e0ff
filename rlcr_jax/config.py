"""The configuration of a run: sections of validated, frozen dataclasses.

A run is configured by a `ConfigDict` (see `experiments/configs`), whose fields
are those of the dataclasses below; each field is documented where it is
defined. `resolve` checks all of it before any long work starts.
"""

import dataclasses
import json
from typing import Any

from envs import registry
from envs.base import Environment
from envs.base import require
import ml_collections
from rlcr_jax import clock
from rlcr_jax import collective as collective_lib
from rlcr_jax import deadlines
from rlcr_jax import learner
from rlcr_jax.llm.config import LlmConfig
from rlcr_jax.policies import transformer

BASELINES = ('solo', 'muted')


def _require_seed(field: str, value: int) -> None:
  """A key is made of 32 bits; larger seeds would repeat smaller ones."""
  require(0 <= value < 2**32, field, value, 'from 0 to 2**32 - 1')


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Held-out tasks: drawn from a seed that training never uses."""

  num_tasks: int = 256
  seed: int = 1_000_003  # Of the held-out tasks.
  deadlines: int = 9  # Points of the return-against-deadline curves.

  def __post_init__(self):
    _require_seed('evaluation.seed', self.seed)
    require(self.num_tasks >= 2, 'evaluation.num_tasks', self.num_tasks, '>= 2')
    require(self.deadlines >= 2, 'evaluation.deadlines', self.deadlines, '>= 2')


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, how often, and which baselines are trained beside."""

  seed: int = 0
  steps: int = 400  # Updates.
  checkpoint_every: int = 25  # Updates between full-state checkpoints.
  num_devices: int = 0  # 0: as many as divide rlcr.tasks.
  train_solo: bool = True  # Baseline: one agent, as many updates.
  train_muted: bool = False  # Baseline: a collective that never had a channel.

  def __post_init__(self):
    for field in ('steps', 'checkpoint_every'):
      value = getattr(self, field)
      require(value >= 1, field, value, '>= 1')
    require(self.num_devices >= 0, 'num_devices', self.num_devices, '>= 0')
    _require_seed('seed', self.seed)


_SECTIONS = {
    'collective': collective_lib.CollectiveConfig,
    'latency': clock.LatencyModel,
    'deadline': deadlines.DeadlineConfig,
    'rlcr': learner.RlcrConfig,
    'policy': transformer.TransformerConfig,
    'llm': LlmConfig,
    'evaluation': EvaluationConfig,
}
POLICIES = ('transformer', 'llm')


@dataclasses.dataclass(frozen=True)
class Resolved:
  """Everything that a run is made of."""

  env: Environment
  collective: collective_lib.CollectiveConfig
  latency: clock.LatencyModel
  deadline: deadlines.DeadlineConfig
  rlcr: learner.RlcrConfig
  policy_name: str  # One of POLICIES; a policy ignores the others' sections.
  policy: transformer.TransformerConfig
  llm: LlmConfig
  evaluation: EvaluationConfig
  run: RunConfig

  def make_collective(self) -> collective_lib.Collective:
    """The collective that the sections describe."""
    return collective_lib.Collective(self.env, self.collective, self.latency)


def _fields(cls: type[Any]) -> dict[str, Any]:
  return {field.name: field.default for field in dataclasses.fields(cls)}


def defaults(env_name: str = 'software') -> ml_collections.ConfigDict:
  """All fields of a run on one environment, with their defaults."""
  config = ml_collections.ConfigDict(_fields(RunConfig))
  env = registry.make(env_name)
  config.env = {'name': env_name} | dataclasses.asdict(env)
  for section, cls in _SECTIONS.items():
    config[section] = _fields(cls)
  config.policy = {'name': 'transformer'} | _fields(
      transformer.TransformerConfig
  )
  return config


def _build(section: str, values: dict[str, Any]) -> Any:
  cls = _SECTIONS[section]
  return cls(**_typed(cls, f'{section}.', values))


def _typed(
    cls: type[Any], prefix: str, values: dict[str, Any]
) -> dict[str, Any]:
  """The same values, if all are fields of a dataclass and of their types.

  A field's type is that of its default; a whole number does for a fraction.
  """
  defaults_of = _fields(cls)
  for name, value in values.items():
    known = name in defaults_of
    field = prefix + name
    require(known, field, value, f'a field: one of {sorted(defaults_of)}')
    wanted = type(defaults_of[name])
    fits = type(value) is wanted or (wanted, type(value)) == (float, int)
    require(fits, field, value, f'of type {wanted.__name__}')
  return values


def resolve(config: ml_collections.ConfigDict) -> Resolved:
  """Validates a configuration.

  Raises:
    ValueError: naming the field, its value and what is allowed.
  """
  fields = config.to_dict()
  own = set(_SECTIONS) | {'env'}
  sections = {name: fields.pop(name, None) for name in own}
  for name, section in sections.items():
    require(isinstance(section, dict), name, section, 'a section of fields')
  env, policy = dict(sections.pop('env')), dict(sections.pop('policy'))
  env_name, policy_name = env.pop('name', None), policy.pop('name', None)
  known = policy_name in POLICIES
  require(known, 'policy.name', policy_name, f'one of {POLICIES}')
  made = registry.make(env_name)
  resolved = Resolved(
      env=registry.make(env_name, **_typed(type(made), 'env.', env)),
      policy_name=policy_name,
      policy=_build('policy', policy),
      run=RunConfig(**_typed(RunConfig, '', fields)),
      **{name: _build(name, section) for name, section in sections.items()},
  )
  _check_together(resolved)
  return resolved


def _check_together(resolved: Resolved) -> None:
  """Checks that concern more than one section."""
  collective = resolved.make_collective()
  resolved.collective.rules(1)  # The organisation exists.
  newcomer_ms = int(
      resolved.latency.duration_ms(0, resolved.collective.task_tokens, 0)
  )
  verbs = collective.verbs
  # The shortest turn that can matter: read the task, then act on it.
  acts = [
      ms
      for verb, ms in zip(verbs, collective.shortest_turn_ms(), strict=True)
      if verb.acts_on_environment
  ]
  shortest_ms = newcomer_ms + min(acts)
  require(
      resolved.deadline.first_ms >= shortest_ms,
      'deadline.first_ms',
      resolved.deadline.first_ms,
      f'>= {shortest_ms} ms, or no action on the environment could ever land',
  )


def to_json(config: ml_collections.ConfigDict) -> str:
  """The whole configuration as stable, readable JSON."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + '\n'


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix=''
) -> list[str]:
  """Lines `field: old → new` for every leaf in which two configs differ."""
  lines = []
  for key in sorted(set(old) | set(new)):
    a, b = old.get(key, '(absent)'), new.get(key, '(absent)')
    if isinstance(a, dict) and isinstance(b, dict):
      lines += differences(a, b, f'{prefix}{key}.')
    elif a != b:
      lines.append(f'{prefix}{key}: {a!r} → {b!r}')
  return lines
