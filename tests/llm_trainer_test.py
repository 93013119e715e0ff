"""Tests of token-level gradients: values by a plain formula, any split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax.learner import RlcrConfig
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm import trainer as trainer_lib
from rlcr_jax.llm.config import LlmConfig

CONFIG = model_lib.ModelConfig(
    vocab_size=17,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


@functools.cache
def params():
  return model_lib.init(CONFIG, jax.random.key(0))


@functools.cache
def samples(count=7, log_prob=-2.0):
  rng = np.random.default_rng(0)
  made = []
  for i in range(count):
    prompt, written = rng.integers(1, 40), rng.integers(1, 6)
    made.append(
        trainer_lib.Sample(
            prompt=rng.integers(0, 17, prompt).tolist(),
            ids=rng.integers(0, 17, written).astype(np.int32),
            log_probs=np.full(written, log_prob, np.float32),
            weight=0.1 * (i + 1),
            advantage=(-1) ** i * 0.5,
        )
    )
  return made


def make_trainer(temperature=1.0, fsdp=1, tp=1, data=1, **changes):
  config = LlmConfig(fsdp=fsdp, tp=tp)
  mesh = trainer_lib.make_mesh(config, data * fsdp * tp)
  return trainer_lib.Trainer(CONFIG, RlcrConfig(**changes), mesh, temperature)


def total(trainer, made, token_budget=4096, bonus=0.0, start=None):
  start = params() if start is None else start
  return trainer.sums(start, None, trainer.pack(made, token_budget), bonus)


def score(start, sample, temperature):
  """Log-probabilities and entropies of what was written, one row alone."""
  tokens = jnp.array([[*sample.prompt, *sample.ids.tolist()]])
  logits, _ = model_lib.apply(CONFIG, start, tokens, jnp.ones_like(tokens) > 0)
  log_p = jax.nn.log_softmax(logits[0] / temperature)
  before = len(sample.prompt) - 1
  at = jnp.arange(before, before + len(sample.ids))
  entropy = -jnp.sum(jnp.exp(log_p[at]) * log_p[at], axis=1)
  return log_p[at, sample.ids], entropy


def plain_loss(start, made, temperature, bonus):
  loss = 0.0
  for sample in made:
    log_prob, entropy = score(start, sample, temperature)
    term = -sample.advantage * log_prob - bonus * entropy
    loss += sample.weight * jnp.sum(term)
  return loss


def assert_close(left, right, rtol=2e-4):
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    size = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(size, 1e-3))


@pytest.mark.parametrize('temperature, bonus', [(1.0, 0.0), (0.7, 0.3)])
def test_gradient_is_that_of_one_plain_loss(temperature, bonus):
  made = samples()
  sums = total(make_trainer(temperature), made, bonus=bonus)
  loss, grads = jax.value_and_grad(plain_loss)(
      params(), made, temperature, bonus
  )
  assert sums.loss == pytest.approx(float(loss), rel=1e-4)
  assert_close(sums.grads, grads)
  scores = [score(params(), sample, temperature) for sample in made]
  entropy = sum(float(jnp.sum(e)) for _, e in scores)
  gap = sum(float(jnp.sum(jnp.abs(p + 2.0))) for p, _ in scores)
  assert sums.entropy == pytest.approx(entropy, rel=1e-4)
  assert sums.gap == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize('token_budget', [1, 100, 256])
def test_gradient_does_not_depend_on_the_split(token_budget):
  trainer, made = make_trainer(), samples()
  few, many = (len(trainer.pack(made, b)) for b in (4096, token_budget))
  assert few < many
  assert_close(total(trainer, made, token_budget), total(trainer, made))


def test_gradient_does_not_depend_on_the_order():
  trainer, made = make_trainer(), samples()
  assert_close(total(trainer, made[::-1]), total(trainer, made))


@pytest.mark.parametrize('data, fsdp', [(2, 1), (1, 2), (2, 2)])
def test_gradient_does_not_depend_on_the_devices(data, fsdp):
  trainer = make_trainer(data=data, fsdp=fsdp)
  assert_close(total(trainer, samples()), total(make_trainer(), samples()))


def test_packing_keeps_every_sample_and_its_numbers():
  made = samples()
  batches = list(trainer_lib.micro_batches(made, token_budget=128))
  row = lambda b, r: (
      float(b.weight[r].max()),
      float(b.advantage[r]),
      b.tokens[r][b.valid[r]].tolist(),
  )
  used = lambda b: np.flatnonzero(b.valid.any(axis=1))
  rows = sorted(row(b, r) for b in batches for r in used(b))
  assert rows == sorted(
      (float(np.float32(s.weight)), s.advantage, [*s.prompt, *s.ids.tolist()])
      for s in made
  )
  for batch in batches:
    written = batch.tokens[:, -batch.scored.shape[1] :][batch.scored]
    assert batch.scored.sum() == len(written)
    assert batch.tokens.size <= 128 or len(batch.tokens) == 1
  assert sum(b.scored.sum() for b in batches) == sum(len(s.ids) for s in made)


def test_rows_are_a_multiple_of_the_devices():
  batches = list(trainer_lib.micro_batches(samples(), 100, multiple=4))
  assert all(len(batch.tokens) % 4 == 0 for batch in batches)


def test_no_sample_gives_no_gradient():
  trainer = make_trainer()
  sums = total(trainer, [])
  assert float(sums.loss) == 0.0
  assert not any(np.any(g) for g in jax.tree.leaves(sums.grads))


def test_importance_is_the_truncated_ratio_and_scales_the_gradient():
  made = samples(2, log_prob=-2.5)
  trainer = make_trainer()
  batches = trainer.pack(made, 4096)
  corrected, gap = trainer.reweigh(params(), None, batches, cap=1.1)
  own = [np.asarray(score(params(), sample, 1.0)[0]) for sample in made]
  expected = np.concatenate([np.minimum(np.exp(o + 2.5), 1.1) for o in own])
  found = np.asarray(corrected[0].importance)[np.asarray(batches[0].scored)]
  np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-4)
  assert gap == pytest.approx(sum(np.abs(o + 2.5).sum() for o in own), rel=1e-4)
  again = trainer.sums(params(), None, corrected)
  assert again.gap == pytest.approx(0.0, abs=1e-4)
  loss = -sum(
      s.weight * s.advantage * np.sum(np.minimum(np.exp(o + 2.5), 1.1) * o)
      for s, o in zip(made, own, strict=True)
  )
  assert again.loss == pytest.approx(loss, rel=1e-3)


def test_adapters_alone_are_trained():
  trainer, made = make_trainer(), samples()
  lora = model_lib.lora_init(CONFIG, jax.random.key(1), rank=2)
  batches = trainer.pack(made, 4096)
  sums = trainer.sums(lora, params(), batches)
  assert jax.tree.structure(sums.grads) == jax.tree.structure(lora)
  whole = trainer.sums(params(), None, batches)
  assert sums.loss == pytest.approx(float(whole.loss), rel=1e-5)
  # b is zero at first, so only it has a gradient.
  for name, grads in sums.grads.items():
    assert not np.any(grads['a']) and np.any(grads['b']), name


def test_a_step_goes_down():
  trainer, made = make_trainer(), samples()
  before = total(trainer, made)
  state = trainer.optimizer.init(params())
  new, _, norm, finite = trainer.descend(params(), state, before.grads, 1e-2)
  assert finite and norm > 0
  assert float(total(trainer, made, start=new).loss) < float(before.loss)
  bad = jax.tree.map(lambda x: x * jnp.nan, before.grads)
  assert not trainer.descend(params(), state, bad, 1e-2)[3]
