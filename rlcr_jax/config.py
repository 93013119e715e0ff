"""The configuration of a run: sections of validated, frozen dataclasses.

A run is configured by a `ConfigDict` (see `experiments/configs`), whose fields
are those of the dataclasses below; each field is documented where it is
defined. `resolve` checks all of it before any long work starts.
"""

from collections.abc import Iterable
import dataclasses
import difflib
import json
import math
from typing import Any

from envs import registry
from envs.base import Environment
from envs.base import require
import ml_collections
from rlcr_jax import advantages
from rlcr_jax import clock
from rlcr_jax import collective as collective_lib
from rlcr_jax import deadlines
from rlcr_jax import incentives
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
  first_ms: int = 0  # The shortest of them; 0: `deadline.first_ms`.
  final_ms: int = 0  # The full deadline; 0: `deadline.final_ms`.

  def __post_init__(self):
    _require_seed('evaluation.seed', self.seed)
    require(self.num_tasks >= 2, 'evaluation.num_tasks', self.num_tasks, '>= 2')
    require(self.deadlines >= 2, 'evaluation.deadlines', self.deadlines, '>= 2')
    for field in ('first_ms', 'final_ms'):
      value = getattr(self, field)
      require(value >= 0, f'evaluation.{field}', value, '>= 1 ms, or 0')


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
    'incentive': incentives.IncentiveConfig,
    'rlcr': learner.RlcrConfig,
    'policy': transformer.TransformerConfig,
    'llm': LlmConfig,
    'evaluation': EvaluationConfig,
}
POLICIES = ('transformer', 'llm')
MIXTURE = 'mixture'  # `env.name` where `env` has several environments.


@dataclasses.dataclass(frozen=True)
class Resolved:
  """Everything that a run is made of."""

  envs: dict[str, Environment]
  weights: dict[str, float]  # Of the environments, adding up to 1.
  collective: collective_lib.CollectiveConfig
  latency: clock.LatencyModel
  deadline: deadlines.DeadlineConfig
  incentive: incentives.IncentiveConfig
  rlcr: learner.RlcrConfig
  policy_name: str  # One of POLICIES; a policy ignores the others' sections.
  policy: transformer.TransformerConfig
  llm: LlmConfig
  evaluation: EvaluationConfig
  run: RunConfig

  def make_collectives(self) -> dict[str, collective_lib.Collective]:
    """The collective that the sections describe, in each environment."""
    return {
        name: collective_lib.Collective(env, self.collective, self.latency)
        for name, env in self.envs.items()
    }

  def test_deadlines_ms(self) -> tuple[int, int]:
    """The shortest and the full deadline of the evaluation."""
    return (
        self.evaluation.first_ms or self.deadline.first_ms,
        self.evaluation.final_ms or self.deadline.final_ms,
    )

  def knobs(self, step: int, steps: int) -> learner.Knobs:
    """The scheduled numbers of one update."""
    scheduled = self.incentive.knobs(step, steps)
    return self.rlcr.knobs(step, steps)._replace(incentive=scheduled)

  def warnings(self) -> list[str]:
    """What is allowed but known to do harm."""
    told = []
    if (
        self.incentive.name == 'latency_penalty'
        and self.incentive.penalty > 0
        and self.rlcr.advantage in advantages.STANDARDISED
    ):
      told.append(
          f'rlcr.advantage={self.rlcr.advantage!r} divides by the deviation of'
          ' the returns, in which incentive.name=latency_penalty has put'
          ' latency: where all rollouts of a task have the same progress,'
          ' differences in time count as much as those in progress elsewhere.'
          ' This is known to hurt (ThreadWeaver): use group_mean or rloo.'
      )
    return told

  def tasks(self) -> dict[str, int]:
    """How many tasks of an update each environment has: its share, or one."""
    total = self.rlcr.tasks
    shares = {name: total * weight for name, weight in self.weights.items()}
    tasks = {name: max(int(share), 1) for name, share in shares.items()}
    lacks = lambda name: shares[name] - tasks[name]
    while sum(tasks.values()) < total:
      tasks[max(tasks, key=lacks)] += 1
    while sum(tasks.values()) > total:
      tasks[min((n for n in tasks if tasks[n] > 1), key=lacks)] -= 1
    return tasks


def _fields(cls: type[Any]) -> dict[str, Any]:
  return {field.name: field.default for field in dataclasses.fields(cls)}


def defaults(*env_names: str) -> ml_collections.ConfigDict:
  """All fields of a run, with their defaults.

  Args:
    *env_names: the environment, or several of which a mixture is made, each
      with the same weight. None: `software`.
  """
  config = ml_collections.ConfigDict(_fields(RunConfig))
  envs = {
      name: dataclasses.asdict(registry.make(name))
      for name in env_names or ('software',)
  }
  if len(envs) == 1:
    ((name, knobs),) = envs.items()
    config.env = {'name': name} | knobs
  else:
    config.env = {'name': MIXTURE, 'weights': dict.fromkeys(envs, 1.0)} | envs
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
  envs, weights = _environments(dict(sections.pop('env')))
  policy = dict(sections.pop('policy'))
  policy_name = policy.pop('name', None)
  known = policy_name in POLICIES
  require(known, 'policy.name', policy_name, f'one of {POLICIES}')
  resolved = Resolved(
      envs=envs,
      weights=weights,
      policy_name=policy_name,
      policy=_build('policy', policy),
      run=RunConfig(**_typed(RunConfig, '', fields)),
      **{name: _build(name, section) for name, section in sections.items()},
  )
  _check_together(resolved)
  return resolved


def _environments(
    section: dict[str, Any],
) -> tuple[dict[str, Environment], dict[str, float]]:
  """The environments of the section `env`, and their weights."""
  name = section.pop('name', None)
  if name != MIXTURE:
    return {name: _environment(name, 'env.', section)}, {name: 1.0}
  weights = section.pop('weights', None)
  fits = isinstance(weights, dict) and set(weights) == set(section) != set()
  require(
      fits,
      'env.weights',
      weights,
      f'one number for each environment of the mixture: {sorted(section)}',
  )
  for part, weight in weights.items():
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    fits = number and 0 < weight < math.inf
    require(fits, f'env.weights.{part}', weight, 'a number > 0')
  envs = {
      part: _environment(part, f'env.{part}.', dict(section[part]))
      for part in sorted(weights)
  }
  total = sum(weights.values())
  return envs, {part: weights[part] / total for part in envs}


def _environment(name: str, prefix: str, knobs: dict[str, Any]) -> Environment:
  return registry.make(name, **_typed(type(registry.make(name)), prefix, knobs))


def _check_together(resolved: Resolved) -> None:
  """Checks that concern more than one section."""
  require(
      resolved.rlcr.tasks >= len(resolved.envs),
      'rlcr.tasks',
      resolved.rlcr.tasks,
      f'>= {len(resolved.envs)}, one for each environment',
  )
  hiring = bool(resolved.collective.rules(1).hiring)  # If it exists at all.
  require(
      hiring or resolved.incentive.name != 'parl',
      'incentive.name',
      resolved.incentive.name,
      'another one than parl where nobody can hire, as with'
      f' collective.organisation={resolved.collective.organisation!r}',
  )
  flat = tuple(advantages.ESTIMATORS)
  require(
      resolved.policy_name != 'llm' or resolved.rlcr.advantage in flat,
      'rlcr.advantage',
      resolved.rlcr.advantage,
      f'one of {flat} with policy.name=llm, which has no critic',
  )
  require(
      resolved.policy_name != 'llm' or not resolved.collective.freezes,
      'collective.organisation',
      resolved.collective.organisation,
      'another with policy.name=llm, which serves one set of weights, while'
      ' these sub-agents are played by a frozen one',
  )
  first_ms, final_ms = resolved.test_deadlines_ms()
  require(
      first_ms <= final_ms,
      'evaluation.final_ms',
      resolved.evaluation.final_ms,
      f'such that the full deadline, now {final_ms} ms, is >= the shortest one,'
      f' {first_ms} ms',
  )
  collectives = resolved.make_collectives()
  verbs = {v.name for c in collectives.values() for v in c.verbs}
  require(
      verbs.issuperset(resolved.policy.offsets()),
      'policy.prior',
      resolved.policy.prior,
      f'about verbs of these worlds, which are {sorted(verbs)}',
  )
  for collective in collectives.values():
    _check_first_deadline(resolved, collective)


def _check_first_deadline(resolved: Resolved, collective) -> None:
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
      f'>= {shortest_ms} ms, or no action on {collective.env.name} could ever'
      ' land',
  )


def leaves(fields: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """All leaves of nested sections, by dotted name."""
  result = {}
  for name, value in fields.items():
    if isinstance(value, dict):
      result |= leaves(value, f'{prefix}{name}.')
    else:
      result[prefix + name] = value
  return result


def no_such_field(field: str, value: Any, known: Iterable[str]) -> str:
  """Says that a field is not among those known, and which are near it."""
  near = difflib.get_close_matches(field, sorted(known), n=3, cutoff=0.0)
  return (
      f'{field}={value!r} is not allowed: there is no such field. Near it are'
      f' {", ".join(near)}; config.json lists all.'
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
