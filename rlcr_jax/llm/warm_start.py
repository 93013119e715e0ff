"""Imitation before RL: format and sensible moves, from scripted transcripts.

RL needs a prior that can act. The teacher plays legal moves at random, of which
a share `llm.warm_skill` are those of a list scheduler, and the model is
fine-tuned on what the teacher's agents read and wrote. How good the prior is,
and for how long it is trained, are knobs of the experiment.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import roster
from rlcr_jax.collective import Collective
from rlcr_jax.learner import NonFiniteError
from rlcr_jax.learner import RlcrConfig
from rlcr_jax.llm import learner as learner_lib
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm import play
from rlcr_jax.llm import prompts as prompts_lib
from rlcr_jax.llm import speaker as speaker_lib
from rlcr_jax.llm import trainer as trainer_lib
from rlcr_jax.llm import weights
from rlcr_jax.llm.config import LlmConfig
from rlcr_jax.llm.tokens import Tokenizer
from rlcr_jax.observation import Action
from rlcr_jax.policies import scripted
from rlcr_jax.roster import Rules

_CORPUS = 2000  # Turns that the tokenizer of a tiny model is made from.

Progress = Callable[[str, dict[str, float]], None]


class Example(NamedTuple):
  """What an agent of the teacher read and wrote, as text."""

  head: str
  tail: str
  answer: str


@dataclasses.dataclass(frozen=True)
class Teacher:
  """Legal moves at random, a share `skill` of them a list scheduler's."""

  collective: Collective
  skill: float

  def sample(
      self, params: Any, keys: jax.Array, obs: Any
  ) -> tuple[Action, chex.Array]:
    """See `policies.base.Policy`; log-probabilities are not known."""
    hires = self.collective.config.max_hires
    able = scripted.ListScheduler(self.collective, hires)
    able, _ = able.sample(params, keys, obs)
    draw, choose = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    rash = scripted.RandomPolicy(self.collective)
    rash, _ = rash.sample(params, draw, obs)
    takes = jax.vmap(jax.random.uniform)(choose) < self.skill
    mixed = jax.tree.map(lambda a, b: jnp.where(takes, a, b), able, rash)
    return mixed, jnp.zeros_like(takes, jnp.float32)


@dataclasses.dataclass
class _Scribe:
  """Lets the teacher speak, and keeps what its agents read and wrote."""

  prompts: prompts_lib.Prompts
  tokenizer: Any  # Its chat template is used.
  teacher: play.ScriptedSpeaker

  def __post_init__(self):
    self.examples: list[Example] = []

  def __call__(self, free, scene) -> list[play.Utterance]:
    spoken = self.teacher(free, scene)
    for who, utterance in zip(free, spoken, strict=True):
      head, tail = speaker_lib.chat(
          self.prompts, self.tokenizer, who, who.moment, who.inbox
      )
      self.examples.append(Example(head, tail, utterance.text))
    return spoken


def transcripts(
    collective: Collective,
    config: LlmConfig,
    tokenizer: Any,
    rules: Rules,
    key: jax.Array,
) -> list[Example]:
  """Everything that the teacher's agents read and wrote, one task a rollout."""
  policy = Teacher(collective, config.warm_skill)
  scribe = _Scribe(
      prompts_lib.Prompts(collective, config.reasoning, config.rules),
      tokenizer,
      play.ScriptedSpeaker(collective, policy),
  )
  count = config.warm_rollouts
  whole = roster.repeat(rules, count)
  given = learner_lib.group_inputs(collective, key, jnp.arange(count), whole, 1)
  play.play(collective, scribe, *given)
  return scribe.examples


def new_model(
    config: LlmConfig, examples: list[Example], key: jax.Array
) -> tuple[model_lib.ModelConfig, Any, Tokenizer]:
  """A tiny model from random parameters, with a tokenizer of its own."""
  some = examples[:: -(-len(examples) // _CORPUS)]
  corpus = [e.head + e.tail + e.answer for e in some]
  tokenizer = Tokenizer.byte_level(corpus, config.vocab_size)
  model = model_lib.ModelConfig(
      vocab_size=tokenizer.vocab_size,
      hidden_size=config.width,
      intermediate_size=2 * config.width,
      num_layers=config.layers,
      num_heads=config.heads,
      num_kv_heads=config.heads,
      head_dim=config.width // config.heads,
      max_position_embeddings=config.context,
      dtype=config.dtype,
  )
  return model, model_lib.init(model, key), tokenizer


def ensure(
    collectives: tuple[Collective, ...],
    config: LlmConfig,
    rlcr: RlcrConfig,
    deadline_ms: int,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    progress: Progress = lambda arm, row: None,
) -> pathlib.Path | str:
  """The model that RL begins with, made now if it is not there yet.

  Args:
    collectives: whose agents the teacher plays, as many rollouts of each.
    config: of the model and of the imitation.
    rlcr: clipping and Adam.
    deadline_ms: under which the teacher plays.
    mesh: where the model is trained.
    workdir: of the run; the model goes to `workdir/warm_start`.
    progress: called after every step with its loss.

  Returns:
    The folder of the model: `llm.model` itself if nothing is to be imitated.
  """
  if not config.warm_steps and config.model:
    return config.model
  directory = workdir / 'warm_start'
  if not directory.exists():
    model = _imitate(collectives, config, rlcr, deadline_ms, mesh, progress)
    whole = model.merged(model.params)
    weights.save(directory, model.config, whole, model.tokenizer)
  return directory


def _imitate(collectives, config, rlcr, deadline_ms, mesh, progress):
  keys = jax.random.split(jax.random.key(config.warm_seed), 3)
  model = None
  if config.model:
    model = learner_lib.load_model(config, config.model, mesh)
    template = model.tokenizer
  else:
    template = Tokenizer.byte_level([''], config.vocab_size)
  examples = []
  for collective in collectives:
    rules = collective.rules(deadline_ms)
    examples += transcripts(collective, config, template, rules, keys[0])
  if model is None:
    made = new_model(config, examples, keys[1])
    model = learner_lib.Model(made[0], made[2], mesh, made[1], None)
  samples = _samples(config, model.tokenizer, examples)
  trainer = trainer_lib.Trainer(
      model.config, dataclasses.replace(rlcr, loss='reinforce'), mesh
  )
  params, opt_state = model.params, trainer.optimizer.init(model.params)
  order = np.random.default_rng(config.warm_seed)
  for step in range(config.warm_steps):
    chosen = order.choice(len(samples), config.warm_batch)
    batches = trainer.pack([samples[i] for i in chosen], config.token_budget)
    sums = trainer.sums(params, model.frozen, batches)
    left = 1.0 - step / config.warm_steps
    params, opt_state, _, finite = trainer.descend(
        params, opt_state, sums.grads, config.warm_learning_rate * left
    )
    if not (finite and jnp.isfinite(sums.loss)):
      raise NonFiniteError(
          f'loss={float(sums.loss)} at step {step} of the warm start: it and'
          ' the new parameters must be finite. Nothing was saved; a lower'
          f' llm.warm_learning_rate={config.warm_learning_rate} may help.'
      )
    row = {'step': step, 'steps': config.warm_steps, 'loss': float(sums.loss)}
    progress('warm start', row)
  return dataclasses.replace(model, params=params)


def _samples(
    config: LlmConfig, tokenizer: Tokenizer, examples: list[Example]
) -> list[trainer_lib.Sample]:
  """Token ids; `REINFORCE` with an advantage of 1 is maximum likelihood.

  The weights of a batch's answers add up to 1 on average, and those of its
  prompts to `warm_prompts`. Prompts teach a new model to copy, of which answers
  are too short to tell it: it must find "work 3" in the view to write it.
  """
  encode = functools.cache(tokenizer.encode)  # Many prompts begin alike.
  end = encode(tokenizer.eos)
  prompts = [encode(e.head) + encode(e.tail) for e in examples]
  answers = [encode(e.answer) + end for e in examples]
  share = len(examples) / config.warm_batch
  of_prompts = config.warm_prompts * share / sum(map(len, prompts))
  of_answers = share / sum(map(len, answers))
  samples = []
  for prompt, answer in zip(prompts, answers, strict=True):
    read = 1 if of_prompts else len(prompt)  # Not to be predicted.
    ids = np.array(prompt[read:] + answer, np.int32)
    weight = np.full(len(ids), of_answers, np.float32)
    weight[: len(prompt) - read] = of_prompts
    none = np.zeros(len(ids), np.float32)
    samples.append(trainer_lib.Sample(prompt[:read], ids, none, weight, 1.0))
  return samples
