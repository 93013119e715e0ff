"""The training loop: resumable, measured, and the same for every baseline."""

from collections.abc import Callable
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import time
from typing import Any

from absl import logging
from envs.base import NotAllowedError
import jax
import ml_collections
import numpy as np
from rlcr_jax import checkpoints
from rlcr_jax import config as config_lib
from rlcr_jax import deadlines
from rlcr_jax import files
from rlcr_jax import learner as learner_lib
from rlcr_jax import metrics
from rlcr_jax import references
from rlcr_jax import roster
from rlcr_jax.collective import Collective
from rlcr_jax.decisions import BufferFullError
from rlcr_jax.learner import NonFiniteError
from rlcr_jax.policies import transformer

# Fields that change how a run is carried out but not what it computes.
_OPERATIONAL = ('checkpoint_every', 'num_devices', 'evaluation')

# What each arm of a run changes in the rules of the collective.
ARMS: dict[str, dict[str, Any]] = {
    'collective': {},
    'solo': {'organisation': 'solo'},
    'muted': references.MUTED,
}

# The mean log-probability gap of so many updates is compared with that of the
# first ones; one below the floor (nats) is rounding.
_GAP_WINDOW, _GAP_FLOOR = 10, 0.02

Progress = Callable[[str, dict[str, float]], None]


class GapError(RuntimeError):
  """What is trained is no longer what was sampled."""


class WorkdirError(NotAllowedError):
  """A workdir that belongs to another run."""


@dataclasses.dataclass
class Run:
  """A configuration made concrete. Arms share one compiled update."""

  config: config_lib.Resolved
  learner: Any  # A `learner.Learner`, or an `LlmLearner`, which acts like one.

  @property
  def arms(self) -> tuple[str, ...]:
    """What is trained, in this order."""
    return arms(self.config.run)

  @property
  def collectives(self) -> dict[str, Collective]:
    """By the name of their environment."""
    return {name: p.collective for name, p in self.learner.parts.items()}

  @staticmethod
  def arm_directory(workdir: pathlib.Path, arm: str) -> pathlib.Path:
    """Where an arm keeps its checkpoints and metrics."""
    return workdir if arm == 'collective' else workdir / 'baselines' / arm

  def rules(self, arm: str, deadlines_ms: jax.Array) -> dict[str, roster.Rules]:
    """The rules of every task, [P] each for each environment."""
    rules = {}
    for name, index in learner_lib.number_tasks(self.config.tasks()).items():
      one = self.collectives[name].rules(0, **ARMS[arm])
      limits = deadlines_ms[index]
      rules[name] = roster.repeat(one, len(limits))._replace(deadline_ms=limits)
    return rules

  def init(self) -> learner_lib.LearnerState:
    """The state before the first update."""
    return self.learner.init(jax.random.key(self.config.run.seed))


def arms(
    run: config_lib.RunConfig | ml_collections.ConfigDict,
) -> tuple[str, ...]:
  """The arms that a run trains, in this order."""
  wanted = {
      'collective': True,
      'solo': run.train_solo,
      'muted': run.train_muted,
  }
  return tuple(arm for arm, wants in wanted.items() if wants)


def build(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path = pathlib.Path(),
    progress: Progress = lambda arm, row: None,
) -> Run:
  """Validates a configuration and builds the learner.

  Args:
    config: see `config.defaults`.
    workdir: where a language model that is made for this run goes.
    progress: called after every step of making it.

  Raises:
    ValueError: naming the field, its value and what is allowed.
  """
  resolved = config_lib.resolve(config)
  for text in resolved.warnings():
    _warn(text)
  collectives = resolved.make_collectives()
  if resolved.policy_name == 'llm':
    learner = _llm_learner(resolved, collectives, workdir, progress)
  else:
    learner = _learner(resolved, collectives)
  return Run(config=resolved, learner=learner)


@functools.cache
def _warn(text: str) -> None:
  """Once in a process, though a run is built to be checked and to be used."""
  logging.warning('%s', text)


def _learner(
    resolved: config_lib.Resolved, collectives: dict[str, Collective]
) -> learner_lib.Learner:
  """One transformer for all environments, and one critic of its size."""
  vocabulary = None
  if len(collectives) > 1:
    vocabulary = transformer.Vocabulary.of(collectives.values())
  tasks = resolved.tasks()
  parts = {}
  for name, collective in collectives.items():
    shared = collective, resolved.policy, vocabulary
    parts[name] = learner_lib.Part(
        collective,
        transformer.TransformerPolicy(*shared),
        tasks[name],
        resolved.weights[name],
        transformer.TransformerCritic(*shared),
    )
  mesh = learner_lib.default_mesh(
      math.gcd(*tasks.values()), resolved.run.num_devices
  )
  return learner_lib.Learner(parts, resolved.rlcr, mesh, resolved.incentive)


def _llm_learner(resolved, collectives, workdir, progress):
  """What it needs is an extra, and imported only here."""
  try:
    llm = importlib.import_module('rlcr_jax.llm.build')
  except ModuleNotFoundError as error:
    raise NotAllowedError(
        f"policy.name='llm' is not allowed: {error.name} is missing. Install"
        " the extra, as in pip install -e '.[llm]'."
    ) from error
  return llm.make_learner(resolved, collectives, workdir, progress)


def checked(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The same configuration, if it is allowed.

  Raises:
    ValueError: naming the field, its value and what is allowed.
  """
  build(config)
  return config


def claim_workdir(
    config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> None:
  """Writes `config.json`, or checks that the workdir is of this very run.

  Raises:
    WorkdirError: naming the fields that differ. Nothing is overwritten.
  """
  path = workdir / 'config.json'
  if workdir.exists() and not workdir.is_dir():
    raise WorkdirError(
        f'workdir={str(workdir)!r} is not allowed: it must be a folder.'
    )
  if not path.exists():
    # A kill while a file is written leaves its draft, a hidden file.
    other = [p.name for p in workdir.glob('[!.]*')]
    if other:
      raise WorkdirError(
          f'workdir={str(workdir)!r} is not allowed: it must be empty or hold a'
          f' run, but there is no config.json beside {sorted(other)[:3]}.'
      )
    files.write_text(path, config_lib.to_json(config))
    return
  try:
    old = json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as error:
    raise WorkdirError(f'{path} is not valid JSON: {error}.') from error
  changes = config_lib.differences(old, config.to_dict())
  changes = [c for c in changes if not c.startswith(_OPERATIONAL)]
  if changes:
    raise WorkdirError(
        f'workdir={str(workdir)!r} is not allowed: it holds a run of another'
        f' config, which differs in {"; ".join(changes)}. Choose another'
        ' --workdir, or give the same config to go on.'
    )


def train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    progress: Progress = lambda arm, row: None,
) -> Run:
  """Trains the collective and the baselines that the config asks for.

  Goes on from the newest checkpoint in `workdir`, if there is one.

  Args:
    config: see `config.defaults`.
    workdir: a new folder, or one of the same run.
    progress: called after every update with the arm and its metrics.

  Raises:
    ValueError: for a configuration or workdir that is not allowed.
    NonFiniteError, BufferFullError, CheckpointError: as they say.
  """
  run = build(config, workdir, progress)
  claim_workdir(config, workdir)
  # How the run is carried out and evaluated may have changed.
  files.write_text(workdir / 'config.json', config_lib.to_json(config))
  for arm in run.arms:
    train_arm(run, arm, run.arm_directory(workdir, arm), progress)
  return run


def train_arm(
    run: Run,
    arm: str,
    directory: pathlib.Path,
    progress: Progress = lambda arm, row: None,
) -> learner_lib.LearnerState:
  """Trains one arm from its newest checkpoint, or from scratch, to the end."""
  config = run.config
  steps = config.run.steps
  saved = checkpoints.Checkpoints(directory / 'checkpoints')
  state = run.init()
  if saved.latest_step() is not None:
    state = saved.restore(state)
    logging.info('%s: resuming after step %d', arm, saved.latest_step())
  first = int(state.step)
  writer = metrics.MetricsWriter(directory, first)
  schedule_key = jax.random.fold_in(jax.random.key(config.run.seed), 1)
  for step in range(first, steps):
    began = time.monotonic()
    limits = deadlines.deadlines_ms(
        config.deadline,
        step,
        steps,
        jax.random.fold_in(schedule_key, step),
        config.rlcr.tasks,
    )
    knobs = config.knobs(step, steps)
    rules = run.rules(arm, limits)
    state, updates = run.learner.step(state, rules, knobs)
    updates = jax.device_get(updates)
    rows = {}
    for name, update in updates.items():
      _check(update, arm, step, config.rlcr)
      rows[name] = metrics.summarise(
          run.collectives[name].verbs,
          update,
          np.asarray(rules[name].deadline_ms),
          knobs,
      )
    row = {'step': step} | metrics.mixed(rows, config.weights)
    row['seconds'] = time.monotonic() - began
    writer.write(row)
    progress(arm, row)
    _check_gap(writer.rows, arm, config)
    if (step + 1) % config.run.checkpoint_every == 0 or step + 1 == steps:
      saved.save(state)
      writer.flush()
  writer.close()
  saved.close()
  return state


def _check_gap(
    rows: list[dict[str, Any]], arm: str, config: config_lib.Resolved
) -> None:
  """Stops when sampled and recomputed log-probabilities drift apart."""
  if config.policy_name != 'llm' or len(rows) < 2 * _GAP_WINDOW:
    return
  gaps = [row['log_prob_gap'] for row in rows]
  first = float(np.mean(gaps[:_GAP_WINDOW]))
  last = float(np.mean(gaps[-_GAP_WINDOW:]))
  growth = config.llm.max_gap_growth
  if last > max(growth * first, _GAP_FLOOR):
    raise GapError(
        f'log_prob_gap of {arm} has grown from {first:.2g} to {last:.2g} at'
        f' step {rows[-1]["step"]:.0f}: it must stay within'
        f' llm.max_gap_growth={growth} times what it was. What is trained is no'
        ' longer what was sampled.'
    )


def _check(update, arm: str, step: int, rlcr: learner_lib.RlcrConfig) -> None:
  """Stops a run that cannot go on, before anything bad is saved."""
  if update.overflow:
    raise BufferFullError(
        f'rlcr.max_decisions={rlcr.max_decisions} is too small: at step {step}'
        f' of {arm} the rollouts took more decisions than'
        f' {rlcr.max_decisions} each on average. Raise it; the run goes on from'
        ' its last checkpoint.'
    )
  if not update.finite:
    raise NonFiniteError(
        f'loss={float(update.loss)} and grad_norm={float(update.grad_norm)} at'
        f' step {step} of {arm}: both, and the new parameters, must be finite.'
        ' Nothing was saved after'
        ' the last good checkpoint.'
    )
  if update.nonfinite_groups:
    logging.warning(
        '%s, step %d: %d groups dropped for a non-finite return',
        arm,
        step,
        int(update.nonfinite_groups),
    )
