"""RLCR on a language model: the update of `rlcr_jax.learner`, token by token.

Every output token of an agent is a decision: it gets the advantage of its
collective, or of its agent there, and the aggregations weight tokens.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
from rlcr_jax import advantages
from rlcr_jax import incentives
from rlcr_jax import losses
from rlcr_jax import rollout
from rlcr_jax.collective import Collective
from rlcr_jax.incentives import IncentiveConfig
from rlcr_jax.learner import Knobs
from rlcr_jax.learner import LearnerState
from rlcr_jax.learner import mixed
from rlcr_jax.learner import number_tasks
from rlcr_jax.learner import RlcrConfig
from rlcr_jax.learner import Update
from rlcr_jax.llm import engine as engine_lib
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm import play as play_lib
from rlcr_jax.llm import prompts as prompts_lib
from rlcr_jax.llm import sampler
from rlcr_jax.llm import server
from rlcr_jax.llm import speaker as speaker_lib
from rlcr_jax.llm import trainer as trainer_lib
from rlcr_jax.llm import weights as weights_lib
from rlcr_jax.llm.config import LlmConfig
from rlcr_jax.policies.base import Params
from rlcr_jax.roster import Rules


@dataclasses.dataclass
class Model:
  """A model that was loaded, and what is trained of it."""

  config: model_lib.ModelConfig
  tokenizer: Any
  mesh: Mesh
  params: Params  # Trained: all parameters, or the adapters.
  frozen: Params | None  # The base under adapters.

  def merged(self, params: Params) -> Params:
    """Whole parameters, with the adapters merged into them."""
    if self.frozen is None:
      return params
    return model_lib.lora_merge(self.config, self.frozen, params)


def load_model(
    config: LlmConfig, path: pathlib.Path | str, mesh: Mesh
) -> Model:
  """The model at `path`, prepared for training.

  Raises:
    NotAllowedError: naming the file and what is wrong with it.
  """
  loaded = weights_lib.load(path, dtype=config.dtype, mesh=mesh)
  model_config = dataclasses.replace(loaded.config, remat=config.remat)
  params, frozen = loaded.params, None
  if config.lora_rank:
    frozen = params
    params = model_lib.lora_init(
        model_config, jax.random.key(0), config.lora_rank
    )
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  return Model(model_config, loaded.tokenizer, mesh, params, frozen)


def make_engine(
    config: LlmConfig, model: Model, directory: pathlib.Path
) -> engine_lib.Engine:
  """The engine that the configuration names."""
  if config.server_url:
    return server.ServerEngine(
        config.server_url,
        config.server_model,
        model.tokenizer,
        config=model.config,
        sync_directory=directory.absolute() / 'served_model',
        reload=server.reloader(config.server_url + config.server_reload),
    )
  return sampler.LocalEngine(
      model.config,
      model.merged(model.params),
      model.tokenizer,
      max_batch=config.max_batch,
  )


def make_speaker(
    config: LlmConfig, collective: Collective, model: Model, engine
) -> speaker_lib.EngineSpeaker:
  """The agents' voice."""
  return speaker_lib.EngineSpeaker(
      prompts=prompts_lib.Prompts(collective, config.reasoning, config.rules),
      engine=engine,
      tokenizer=model.tokenizer,
      sampling=engine_lib.Sampling(
          temperature=config.temperature,
          top_k=config.top_k,
          top_p=config.top_p,
          max_tokens=config.max_tokens,
          stop=() if config.reasoning else ('\n',),
      ),
      context=config.context,
      grammar=config.grammar,
  )


class Part(NamedTuple):
  """One environment's part of every update."""

  collective: Collective
  tasks: int  # Groups per update.
  weight: float = 1.0  # Of its loss; those of all parts add up to 1.


class _Batch(NamedTuple):
  """What was played of one part."""

  played: play_lib.Played
  returns: jax.Array  # [P, G] float32.
  scored: advantages.Advantages
  samples: list[trainer_lib.Sample]
  extra: dict[str, float]


class LlmLearner:
  """Plays, scores and learns like `learner.Learner`, with text."""

  def __init__(
      self,
      parts: dict[str, Part],
      config: LlmConfig,
      rlcr: RlcrConfig,
      get_model: Callable[[], Model],
      directory: pathlib.Path,
      incentive: IncentiveConfig | None = None,
  ):
    """Loads nothing yet.

    Args:
      parts: the environments by name; one update plays all of them.
      config: of the model.
      rlcr: of the update.
      get_model: loads the model, or makes one first.
      directory: where an engine may keep files.
      incentive: what is reinforced; None: the return at the deadline.
    """
    self.parts, self.config, self._rlcr = parts, config, rlcr
    self._incentive = incentive or IncentiveConfig()
    self._get_model, self._directory = get_model, directory
    self._served: Params | None = None  # What the engine samples from.

  @functools.cached_property
  def model(self) -> Model:
    """What is trained, and its tokenizer."""
    return self._get_model()

  @functools.cached_property
  def engine(self) -> engine_lib.Engine:
    """Where completions come from."""
    return make_engine(self.config, self.model, self._directory)

  @functools.cached_property
  def _trainer(self) -> trainer_lib.Trainer:
    model = self.model
    return trainer_lib.Trainer(
        model.config, self._rlcr, model.mesh, self.config.temperature
    )

  def init(self, key: jax.Array) -> LearnerState:
    """The state before the first update."""
    _, key_run = jax.random.split(key)
    params, optimizer = self.model.params, self._trainer.optimizer
    whole = NamedSharding(self.model.mesh, PartitionSpec())
    replicate = lambda x: jax.device_put(x, whole)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda x, param: jax.device_put(x, param.sharding),
        optimizer.init(params),
        params,
        transform_non_params=replicate,
    )
    step = replicate(jnp.int32(0))
    return LearnerState(params, opt_state, step, replicate(key_run))

  def play(
      self,
      env: str,
      params: Params,
      key: jax.Array,
      index: jax.Array,
      rules: Rules,
      group_size: int = 1,
      grid_ms: np.ndarray | None = None,
  ) -> tuple[play_lib.Played, speaker_lib.EngineSpeaker]:
    """Plays G rollouts of each task of a part, as `rollout.play_groups` does.

    Returns:
      The rollouts and turns, and the speaker with what it has counted.
    """
    if params is not self._served:
      self.engine.update(self.model.merged(params))
      self._served = params
    collective = self.parts[env].collective
    speaker = make_speaker(self.config, collective, self.model, self.engine)
    given = group_inputs(collective, key, index, rules, group_size)
    played = play_lib.play(
        collective,
        speaker,
        *given,
        grid_ms=grid_ms,
        error_ms=self.config.error_ms,
    )
    return play_lib.merge_islands(played, collective), speaker

  def step(
      self, state: LearnerState, rules: dict[str, Rules], knobs: Knobs
  ) -> tuple[LearnerState, dict[str, Update]]:
    """One update of all tasks; see `learner.Learner.step`."""
    key = jax.random.fold_in(state.key, state.step)
    index = number_tasks({name: p.tasks for name, p in self.parts.items()})
    batches = {
        env: self._batch(env, state.params, key, index[env], rules[env], knobs)
        for env in self.parts
    }
    next_state, sums, norm, finite = self._descend(
        state, {env: batch.samples for env, batch in batches.items()}, knobs
    )
    signal = any(batch.scored.informative.any() for batch in batches.values())
    if not finite or not signal:
      next_state = state
    updates = {}
    for env, (played, returns, scored, samples, extra) in batches.items():
      trained = max(sum(len(s.ids) for s in samples), 1)
      updates[env] = Update(
          rollouts=played.rollouts,
          returns=returns,
          loss=sums[env].loss,
          entropy=sums[env].entropy / trained,
          grad_norm=norm,
          log_prob_gap=sums[env].gap / trained,
          informative=float(jnp.mean(scored.informative)),
          nonfinite_groups=jnp.sum(~scored.finite),
          overflow=False,
          finite=finite,
          extra=extra,
      )
    return next_state._replace(step=state.step + 1), updates

  def _batch(
      self, env: str, params: Params, key, index, rules, knobs: Knobs
  ) -> _Batch:
    """Plays and scores the groups of one part."""
    rlcr, began = self._rlcr, time.monotonic()
    played, speaker = self.play(env, params, key, index, rules, rlcr.group_size)
    seconds = time.monotonic() - began
    returns = incentives.score(
        self._incentive, played.rollouts, rlcr.group_size, knobs.incentive
    )
    agents = self.parts[env].collective.num_seats
    turns = np.zeros((returns.size, agents), np.int32)
    for turn in played.said:
      turns[turn.rollout, turn.agent] += 1
    turns = jnp.array(turns.reshape(*returns.shape, agents))
    scored = advantages.estimate(rlcr.advantage, returns, turns)
    extra = {
        'prompt_tokens_mean': speaker.read / max(len(played.said), 1),
        'reused_token_share': speaker.reused / max(speaker.read, 1),
        'messages_cut': float(speaker.messages_cut),
        'sampling_seconds': seconds,
        'compilations': float(getattr(self.engine, 'compilations', 0)),
    }
    samples = self._samples(played.said, scored)
    return _Batch(played, returns, scored, samples, played.shares() | extra)

  def _samples(
      self,
      said: list[play_lib.Said],
      scored: advantages.Advantages,
  ) -> list[trainer_lib.Sample]:
    """All turns of informative groups, with the weight of their tokens."""
    rlcr = self._rlcr
    in_play = np.repeat(scored.informative, rlcr.group_size)
    advantage = np.asarray(scored.values).reshape(len(in_play), -1)
    counts = np.zeros(advantage.shape, np.int32)
    for turn in said:
      counts[turn.rollout, turn.agent] += len(turn.utterance.ids)
    counts = jnp.array(counts * in_play[:, None])
    weight = np.asarray(losses.weights(rlcr.aggregation, counts, rlcr.constant))
    return [
        trainer_lib.Sample(
            prompt=turn.utterance.prompt,
            ids=turn.utterance.ids,
            log_probs=turn.utterance.log_probs,
            weight=float(weight[turn.rollout, turn.agent]),
            advantage=float(advantage[turn.rollout, turn.agent]),
        )
        for turn in said
        if in_play[turn.rollout]
    ]

  def _descend(self, state: LearnerState, samples, knobs: Knobs):
    """The epochs over one batch; the sums are those of the first."""
    config, trainer, frozen = self.config, self._trainer, self.model.frozen
    batches = {
        env: trainer.pack(own, config.token_budget)
        for env, own in samples.items()
    }
    plain = not (
        config.server_url or config.top_k or config.top_p < 1 or config.grammar
    )
    gaps = {}
    if not plain:  # Sampled from another distribution than is trained.
      for env, own in batches.items():
        batches[env], gaps[env] = trainer.reweigh(
            state.params, frozen, own, config.importance_cap
        )
    params, opt_state, first = state.params, state.opt_state, {}
    for _ in range(self._rlcr.epochs):
      sums = {
          env: trainer.sums(params, frozen, own, knobs.entropy_bonus)
          for env, own in batches.items()
      }
      total = mixed(
          {env: s.grads for env, s in sums.items()},
          {env: part.weight for env, part in self.parts.items()},
      )
      params, opt_state, norm, finite = trainer.descend(
          params, opt_state, total, knobs.learning_rate
      )
      finite = finite and all(jnp.isfinite(s.loss) for s in sums.values())
      first = first or {
          env: s._replace(grads=None, gap=gaps.get(env, s.gap))
          for env, s in sums.items()
      }
    return (
        state._replace(params=params, opt_state=opt_state),
        first,
        norm,
        bool(finite),
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def group_inputs(collective, key, index, rules, group_size):
  """`rollout.group_inputs`, compiled."""
  return rollout.group_inputs(collective, key, index, rules, group_size)
