"""Tests of imitation: what the teacher does, and what is learned from it."""

from experiments.configs import llm_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import config as config_lib
from rlcr_jax import train
from rlcr_jax.llm import build
from rlcr_jax.llm import prompts
from rlcr_jax.llm import tokens
from rlcr_jax.llm import warm_start
from rlcr_jax.policies import scripted
from tests import tiny
from tests.by_hand import Game


def resolved(**llm):
  config = llm_tiny.get_config('smoke')
  config.llm.update(llm)
  return config_lib.resolve(config)


def observations(rows):
  game = Game(60_000, organisation='ceo').advance()
  one = game.observe(0)
  obs = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), one)
  return game.collective, obs, jax.random.split(jax.random.key(3), rows)


def test_a_skilled_teacher_is_the_list_scheduler():
  collective, obs, keys = observations(8)
  taught, _ = warm_start.Teacher(collective, 1.0).sample((), keys, obs)
  expected, _ = scripted.ListScheduler(collective, 2).sample((), keys, obs)
  for ours, theirs in zip(taught, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize('skill', [0.0, 0.25])
def test_the_rest_of_its_moves_are_random(skill):
  collective, obs, keys = observations(4000)
  taught, _ = warm_start.Teacher(collective, skill).sample((), keys, obs)
  # Work (on 0 or 1), wait or hire by chance, or hire, which the scheduler does.
  hires = np.mean(taught.verb == collective.verb('hire'))
  assert hires == pytest.approx(skill + (1 - skill) / 3, abs=0.03)


def run_transcripts(config):
  collective = tiny.only(config.make_collectives())
  template = tokens.Tokenizer.byte_level([''], 300)
  rules = collective.config.rules(60_000)
  return collective, warm_start.transcripts(
      collective, config.llm, template, rules, jax.random.key(0)
  )


def test_transcripts_are_well_formed_and_show_what_was_read():
  config = resolved(warm_rollouts=4)
  collective, examples = run_transcripts(config)
  assert len(examples) > 10
  for example in examples:
    assert prompts.read(collective.verbs, example.answer) is not None
    assert 'software project' in example.head
    assert 'you are agent' in example.tail
    assert example.tail.endswith('<|im_start|>assistant\n')
  assert len({example.head for example in examples}) == 4  # One per task.


def make(tmp_path, **llm):
  losses = []
  config = resolved(**llm)
  learner = build.make_learner(
      config,
      config.make_collectives(),
      tmp_path,
      lambda arm, row: losses.append(row['loss']),
  )
  return learner, losses


def test_imitation_learns_and_is_done_once(tmp_path):
  learner, losses = make(tmp_path, warm_steps=30, warm_rollouts=4)
  model = learner.model
  assert len(losses) == 30
  assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
  again, more = make(tmp_path, warm_steps=30, warm_rollouts=4)
  for a, b in zip(
      jax.tree.leaves(again.model.params),
      jax.tree.leaves(model.params),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  assert not more
  text = '<|im_start|>user\nmodule 3: 1 units left, work'
  assert again.model.tokenizer.encode(text) == model.tokenizer.encode(text)


def test_imitation_that_is_killed_leaves_nothing(tmp_path):
  def killed(arm, row):
    raise KeyboardInterrupt

  config = resolved()
  learner = build.make_learner(
      config, config.make_collectives(), tmp_path, killed
  )
  with pytest.raises(KeyboardInterrupt):
    _ = learner.model
  assert not (tmp_path / 'warm_start').exists()


def test_nothing_is_imitated_where_a_model_is_given(tmp_path):
  first, _ = make(tmp_path / 'first')
  _ = first.model
  folder = tmp_path / 'first' / 'warm_start'
  second, losses = make(tmp_path / 'second', model=str(folder), warm_steps=0)
  for a, b in zip(
      jax.tree.leaves(second.model.params),
      jax.tree.leaves(first.model.params),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  assert not losses and not (tmp_path / 'second').exists()


def test_a_model_that_is_given_can_be_warm_started(tmp_path):
  first, _ = make(tmp_path / 'first')
  _ = first.model
  folder = str(tmp_path / 'first' / 'warm_start')
  second, losses = make(tmp_path / 'second', model=folder, lora_rank=2)
  assert second.model.frozen is not None and len(losses) == 2
  # What was imitated is merged; the adapters of RL begin anew.
  assert not np.any(second.model.params['q']['b'])


EXAMPLES = [
    warm_start.Example('head', 'tail', 'work 3'),
    warm_start.Example('head', 'another tail', 'wait'),
]


def make_samples(**llm):
  tokenizer = tokens.Tokenizer.byte_level(['work 3'], 300)
  config = resolved(warm_batch=1, **llm).llm
  return tokenizer, warm_start._samples(config, tokenizer, EXAMPLES)


def test_samples_are_the_answer_and_the_end_of_the_turn():
  tokenizer, samples = make_samples(warm_prompts=0.0)
  assert tokenizer.decode(samples[0].prompt) == 'headtail'
  assert tokenizer.decode(samples[0].ids) == 'work 3<|im_end|>'
  # A batch has one sample, and half of the weight of both is 1.
  assert sum(s.weight.sum() for s in samples) == pytest.approx(2.0)
  assert all(np.ptp(s.weight) == 0 and s.advantage == 1 for s in samples)


def test_prompts_are_learned_too_with_a_weight_of_their_own():
  tokenizer, samples = make_samples(warm_prompts=0.5)
  for sample, example in zip(samples, EXAMPLES, strict=True):
    assert len(sample.prompt) == 1
    whole = [*sample.prompt, *sample.ids]
    assert tokenizer.decode(whole).startswith(example.head + example.tail)
  _, answers = make_samples(warm_prompts=0.0)
  sizes = [len(answer.ids) for answer in answers]
  ends = [s.weight[-n:] for s, n in zip(samples, sizes, strict=True)]
  for end, answer in zip(ends, answers, strict=True):
    np.testing.assert_array_equal(end, answer.weight)
  begins = [s.weight[:-n] for s, n in zip(samples, sizes, strict=True)]
  # 2 * 0.5 for the tokens of both prompts; nothing predicts the first ones.
  prompts_of = sum(len(b) for b in begins)
  total = sum(b.sum() for b in begins)
  assert total == pytest.approx(prompts_of / (prompts_of + 2))


def test_a_warm_start_that_diverges_is_told_and_not_saved(tmp_path):
  learner, losses = make(tmp_path, warm_steps=9, warm_learning_rate=1e30)
  with pytest.raises(
      train.NonFiniteError, match='step [1-9] of the warm start'
  ):
    _ = learner.model
  assert losses and not (tmp_path / 'warm_start').exists()
