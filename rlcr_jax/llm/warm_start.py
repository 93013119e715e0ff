"""Imitation before RL: format and sensible moves, from scripted transcripts.

RL needs a prior that can act. The teacher plays legal moves at random, of which
a share `llm.warm_skill` are those of a list scheduler, and the model is
fine-tuned on what the teacher's agents read and wrote. How good the prior is,
and for how long it is trained, are knobs of the experiment.
"""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import roster
from rlcr_jax.collective import Collective
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
  corpus = [e.head + e.tail + e.answer for e in examples[:_CORPUS]]
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
    collective: Collective,
    config: LlmConfig,
    rlcr: RlcrConfig,
    rules: Rules,
    mesh: jax.sharding.Mesh,
    workdir: pathlib.Path,
    progress: Progress = lambda arm, row: None,
) -> pathlib.Path | str:
  """The model that RL begins with, made now if it is not there yet.

  Args:
    collective: whose agents the teacher plays.
    config: of the model and of the imitation.
    rlcr: clipping and Adam.
    rules: scalars; under which the teacher plays.
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
    model = _imitate(collective, config, rlcr, rules, mesh, progress)
    whole = model.merged(model.params)
    weights.save(directory, model.config, whole, model.tokenizer)
  return directory


def _imitate(collective, config, rlcr, rules, mesh, progress):
  keys = jax.random.split(jax.random.key(config.warm_seed), 3)
  if config.model:
    model = learner_lib.load_model(config, config.model, mesh)
    examples = transcripts(collective, config, model.tokenizer, rules, keys[0])
  else:
    template = Tokenizer.byte_level([''], config.vocab_size)
    examples = transcripts(collective, config, template, rules, keys[0])
    made = new_model(config, examples, keys[1])
    model = learner_lib.Model(made[0], made[2], mesh, made[1], None)
  samples = _samples(model.tokenizer, examples)
  trainer = trainer_lib.Trainer(
      model.config, dataclasses.replace(rlcr, loss='reinforce'), mesh
  )
  params, opt_state = model.params, trainer.optimizer.init(model.params)
  order = np.random.default_rng(config.warm_seed)
  for step in range(config.warm_steps):
    chosen = order.choice(len(samples), config.warm_batch)
    total = sum(len(samples[i].ids) for i in chosen)
    batch = [samples[i]._replace(weight=1.0 / total) for i in chosen]
    sums = trainer.sums(
        params, model.frozen, trainer.pack(batch, config.token_budget)
    )
    left = 1.0 - step / config.warm_steps
    params, opt_state, _, _ = trainer.descend(
        params, opt_state, sums, config.warm_learning_rate * left
    )
    row = {'step': step, 'steps': config.warm_steps, 'loss': float(sums.loss)}
    progress('warm start', row)
  return dataclasses.replace(model, params=params)


def _samples(tokenizer, examples: list[Example]) -> list[trainer_lib.Sample]:
  """Token ids; `REINFORCE` with an advantage of 1 is maximum likelihood."""
  heads: dict[str, list[int]] = {}
  end = tokenizer.encode(tokenizer.eos)
  result = []
  for example in examples:
    if example.head not in heads:
      heads[example.head] = tokenizer.encode(example.head)
    ids = np.array(tokenizer.encode(example.answer) + end, np.int32)
    prompt = heads[example.head] + tokenizer.encode(example.tail)
    none = np.zeros(len(ids), np.float32)
    result.append(trainer_lib.Sample(prompt, ids, none, 1.0, 1.0))
  return result
