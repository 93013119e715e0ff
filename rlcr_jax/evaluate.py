"""Held-out evaluation: the trained collective beside its references.

All modes play the same tasks with the same keys. They differ in who decides
and under which rules; a mode's rules are traced, so modes that share a policy
share one compiled program.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import ml_collections
import numpy as np
from rlcr_jax import checkpoints
from rlcr_jax import files
from rlcr_jax import learner
from rlcr_jax import metrics
from rlcr_jax import references
from rlcr_jax import rollout
from rlcr_jax import roster
from rlcr_jax import statistics
from rlcr_jax import train
from rlcr_jax.policies.base import Policy

_GRID = 513  # Times at which progress is recorded in a rollout.


@dataclasses.dataclass(frozen=True)
class Mode:
  """Who plays, with which parameters, under which rules."""

  policy: str  # A key of `Evaluator.policies`.
  params: str | None  # The arm whose parameters are used.
  rules: dict[str, Any]  # Changes to the run's own rules.


MODES: dict[str, Mode] = {
    'collective': Mode('trained', 'collective', {}),
    'solo': Mode('trained', 'solo', {'organisation': 'solo'}),
    'muted': Mode('trained', 'collective', references.MUTED),
    'muted_trained': Mode('trained', 'muted', references.MUTED),
    'warm_start': Mode('trained', 'warm_start', {}),  # Before RL.
} | {
    name: Mode(policy, None, rules)
    for name, (policy, rules) in references.MODES.items()
}


class Evaluator:
  """Plays modes on the held-out tasks of one environment of a run."""

  def __init__(
      self,
      run: train.Run,
      params: dict[str, Any],
      env: str | None = None,
      frozen: dict[str, Any] | None = None,
  ):
    """Compiles the modes, lazily.

    Args:
      run: the run.
      params: trained parameters by arm; modes without theirs are left out.
      env: which environment; None: the first.
      frozen: by arm, the parameters of agents that do not learn.
    """
    self.run, self.params = run, {None: ()} | params
    self.frozen = jax.device_get(frozen or {})
    self.env = env or next(iter(run.collectives))
    # What agents wrote and what became of it, by mode, where they write; at
    # the first deadline that was played, the full one.
    self.spoken: dict[str, Any] = {}
    collective = self.collective = run.collectives[self.env]
    self.policies: dict[str, Policy] = references.policies(collective)
    if run.config.policy_name != 'llm':
      # On the host: evaluation may use more devices than training did.
      self.params = {None: ()} | jax.device_get(params)
      self.policies['trained'] = run.learner.parts[self.env].policy
    self.tasks = run.config.evaluation.num_tasks
    self.modes = {n: m for n, m in MODES.items() if m.params in self.params}
    self._mesh = learner.default_mesh(self.tasks)
    self._compiled = {
        name: self._compile(p) for name, p in self.policies.items()
    }

  def _compile(self, policy: Policy):
    whole, split = PartitionSpec(), PartitionSpec(learner.DATA)
    config = self.run.config.rlcr

    def play(params, key, index, rules, grid_ms, frozen):
      rollouts, _ = rollout.play_groups(
          self.collective,
          policy,
          params,
          key,
          index,
          rules,
          group_size=1,
          chunk_size=config.chunk_size,
          grid_ms=grid_ms,
          frozen=frozen,
      )
      return learner.gather_rollouts(rollouts)

    return jax.jit(
        jax.shard_map(
            play,
            mesh=self._mesh,
            in_specs=(whole, whole, split, split, whole, whole),
            out_specs=whole,
            check_vma=False,
        )
    )

  def grid_ms(self, deadline_ms: int) -> np.ndarray:
    """[T] int32 times from 0 to the deadline."""
    return np.linspace(0, deadline_ms, _GRID).astype(np.int32)

  def play(self, name: str, deadline_ms: int) -> rollout.Rollouts:
    """One rollout of every held-out task, [P] each."""
    mode = self.modes[name]
    config = self.run.config
    rules = self.collective.rules(deadline_ms, **mode.rules)
    inputs = (
        self.params[mode.params],
        jax.random.key(config.evaluation.seed),
        jnp.arange(self.tasks),
        roster.repeat(rules, self.tasks),
    )
    grid_ms = self.grid_ms(deadline_ms)
    if mode.policy in self._compiled:
      play = self._compiled[mode.policy]
      frozen = self.frozen.get(mode.params)
      return jax.device_get(play(*inputs, grid_ms, frozen))
    played, _ = self.run.learner.play(self.env, *inputs, grid_ms=grid_ms)
    self.spoken.setdefault(name, played)
    return played.rollouts

  def summary(self, played: rollout.Rollouts) -> dict[str, Any]:
    """The entry of a mode in `evaluation.json`."""
    signs = metrics.signs_of_life(self.collective.verbs, played)
    mean, ci95 = statistics.mean_ci95(played.progress)
    entry = {'return_mean': mean, 'return_ci95': ci95}
    return entry | {
        name
        if name.endswith('_s') or name.endswith('_share')
        else f'{name}_mean': float(value.mean())
        for name, value in signs.items()
        if name != 'useful_tokens'
    }


def evaluate(
    config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, Any]:
  """Evaluates a finished run and writes `evaluation.json`.

  Args:
    config: the run's.
    workdir: a folder that `train.train` has filled.

  Returns:
    What is written; see `docs/evaluation.md` for every field.

  Raises:
    FileNotFoundError: if an arm has no checkpoint.
    CheckpointError: if one cannot be restored.
  """
  run = train.build(config, workdir)
  states = {arm: _load(run, arm, workdir) for arm in run.arms}
  params = {arm: state.params for arm, state in states.items()}
  frozen = {arm: state.frozen for arm, state in states.items()}
  if run.config.policy_name == 'llm':
    params['warm_start'] = run.init().params
  evaluators = [Evaluator(run, params, env, frozen) for env in run.collectives]
  result = _evaluate_all(evaluators)
  spoken = evaluators[0].spoken
  if 'collective' in spoken:
    _write_transcript(spoken['collective'].said, workdir)
  files.write_json(workdir / 'evaluation.json', result)
  return result


def _write_transcript(said: list[Any], workdir: pathlib.Path) -> None:
  """Every turn of the first held-out task, in the order of their beginnings."""
  rows = [
      {
          'start_ms': turn.start_ms,
          'end_ms': turn.end_ms,
          'agent': turn.agent,
          'text': turn.utterance.text,
          'prompt_tokens': len(turn.utterance.prompt),
          'output_tokens': turn.utterance.output_tokens,
          'outcome': turn.outcome,
      }
      for turn in said
      if turn.rollout == 0
  ]
  text = ''.join(files.dumps(row) + '\n' for row in rows)
  files.write_text(workdir / 'transcript.jsonl', text)


def _load(
    run: train.Run, arm: str, workdir: pathlib.Path
) -> learner.LearnerState:
  folder = run.arm_directory(workdir, arm) / 'checkpoints'
  saved = checkpoints.Checkpoints(folder) if folder.is_dir() else None
  if saved is None or saved.latest_step() is None:
    raise FileNotFoundError(
        f'workdir={str(workdir)!r} has no checkpoint of {arm}: train it first,'
        ' with python -m experiments.train.'
    )
  state = saved.restore(run.init())
  saved.close()
  return state


def evaluate_params(run: train.Run, params: dict[str, Any]) -> dict[str, Any]:
  """The evaluation of given parameters, one set per arm."""
  return _evaluate_all([Evaluator(run, params, env) for env in run.collectives])


def _evaluate_all(evaluators: list[Evaluator]) -> dict[str, Any]:
  """The only environment's evaluation, or that of a mixture.

  Of a mixture, `environments` has them all and `modes` their weighted mean.
  What a mode returns is first divided by the mean return of the oracle there,
  so that environments of which much or little can be had count alike.
  """
  played = [_evaluate(evaluator) for evaluator in evaluators]
  if len(played) == 1:
    return played[0][0]
  run = evaluators[0].run
  modes = {}
  for mode in evaluators[0].modes:
    shares = [
        weight * rollouts[mode].progress / rollouts['oracle'].progress.mean()
        for weight, (_, rollouts) in zip(
            run.config.weights.values(), played, strict=True
        )
    ]
    mean, ci95 = statistics.mean_ci95(np.sum(shares, axis=0))
    modes[mode] = {'return_mean': mean, 'return_ci95': ci95}
  first = played[0][0]
  return {
      name: first[name] for name in ('deadline_ms', 'num_tasks', 'seed')
  } | {
      'modes': modes,
      'environments': {
          evaluator.env: result
          for evaluator, (result, _) in zip(evaluators, played, strict=True)
      },
  }


def _evaluate(
    evaluator: Evaluator,
) -> tuple[dict[str, Any], dict[str, rollout.Rollouts]]:
  """The evaluation, and the rollouts of every mode at the full deadline."""
  run = evaluator.run
  _, deadline_ms = run.config.test_deadlines_ms()
  play = functools.lru_cache(maxsize=None)(evaluator.play)
  played = {name: play(name, deadline_ms) for name in evaluator.modes}
  result = {
      'deadline_ms': deadline_ms,
      'num_tasks': evaluator.tasks,
      'seed': run.config.run.seed,
      'modes': {n: evaluator.summary(r) for n, r in played.items()},
  }
  for name, spoken in evaluator.spoken.items():
    result['modes'][name] |= spoken.shares()
  references = [n for n in ('solo', 'greedy_solo') if n in evaluator.modes]
  result['matched_tokens'] = {
      n: _matched_tokens(evaluator, n, played['collective'], played[n])
      for n in references
  }
  if 'solo' in references:
    result['matched_tokens'] |= result['matched_tokens'].pop('solo')
  result['by_deadline'] = _by_deadline(run, evaluator, play)
  keep = slice(0, None, 4)  # Enough for a figure.
  result['curves'] = {
      'time_ms': evaluator.grid_ms(deadline_ms)[keep].tolist(),
      'modes': {n: r.curve.mean(0)[keep].tolist() for n, r in played.items()},
  }
  return result, played


def _matched_tokens(
    evaluator: Evaluator,
    name: str,
    collective: rollout.Rollouts,
    at_deadline: rollout.Rollouts,
) -> dict[str, Any]:
  """Gives one agent as many output tokens as the collective had.

  Its deadline is the collective's mean output tokens divided by its own tokens
  per millisecond. On every task, its time to reach the return that the
  collective had there is compared with the time at which the collective
  reached it. A rollout that never does counts with the whole of its time, which
  can only understate the ratio.
  """
  tokens = float(collective.output_tokens.sum(1).mean())
  rate = at_deadline.output_tokens.sum() / at_deadline.time_ms.sum()
  deadline_ms = int(tokens / rate)
  solo = evaluator.play(name, deadline_ms)
  grid_ms = evaluator.grid_ms(deadline_ms)
  reached = solo.curve >= collective.progress[:, None] - 1e-6  # [P, T]
  ever = reached.any(1)
  solo_ms = np.where(ever, grid_ms[reached.argmax(1)], deadline_ms)
  ratio, ci95 = statistics.ratio_ci95(solo_ms, collective.progress_ms)
  return {
      'time_ratio': ratio,
      'time_ratio_ci95': ci95,
      'solo_return_mean': float(solo.progress.mean()),
      'solo_deadline_ms': deadline_ms,
      'output_tokens_mean': tokens,
      'never_reached_share': float(1.0 - ever.mean()),
  }


def _by_deadline(run: train.Run, evaluator: Evaluator, play) -> dict[str, Any]:
  """Return against deadline, and where the collective overtakes one agent."""
  config = run.config
  deadlines_ms = np.linspace(
      *config.test_deadlines_ms(), config.evaluation.deadlines
  ).astype(int)
  modes: dict[str, Any] = {}
  for name in evaluator.modes:
    points = [
        statistics.mean_ci95(play(name, int(d)).progress) for d in deadlines_ms
    ]
    modes[name] = {
        'return_mean': [mean for mean, _ in points],
        'return_ci95': [ci95 for _, ci95 in points],
    }
  result = {'deadline_ms': deadlines_ms.tolist(), 'modes': modes}
  lower = 'solo' if 'solo' in modes else 'greedy_solo'
  result['crossover_ms'] = statistics.first_crossing(
      deadlines_ms,
      np.array(modes['collective']['return_mean']),
      np.array(modes[lower]['return_mean']),
  )
  return result
