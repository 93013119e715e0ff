"""Tests of the engine that samples here, against `model.apply`."""

import dataclasses
import functools
import math
import os

from envs.base import NotAllowedError
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
import numpy as np
import pytest
from rlcr_jax.llm import decode
from rlcr_jax.llm import model
from rlcr_jax.llm import sampler
from rlcr_jax.llm import weights
from rlcr_jax.llm.engine import Request
from rlcr_jax.llm.engine import Sampling
from tests import llm_tiny

PREFIXES = (13, 17, 40, 41), (19, 18, 17, 16, 15, 14), ()
LOG = lambda *probs: jnp.log(jnp.array([probs]))
INF = float('inf')


@functools.cache
def tiny(name='shallow'):
  """A tiny model; most tests take one layer, which compiles faster."""
  if name != 'shallow':
    return llm_tiny.loaded(name)
  loaded = llm_tiny.loaded('llama3')
  first = lambda path, x: x[:1] if 'layers' in model.names_of(path) else x
  params = jax.tree.map_with_path(first, loaded.params)
  config = dataclasses.replace(loaded.config, num_layers=1)
  return loaded._replace(config=config, params=params)


@functools.cache
def engine(name='shallow', **kwargs):
  loaded = tiny(name)
  return sampler.LocalEngine(
      loaded.config, loaded.params, loaded.tokenizer, **kwargs
  )


def request(seed=0, prefix=(), size=5, commands=None):
  suffix = np.random.default_rng(seed).integers(10, llm_tiny.VOCAB, size)
  return Request(prefix, tuple(suffix.tolist()), jax.random.key(seed), commands)


@functools.cache
def requests(count=5):
  """Requests with and without prefixes, of several lengths."""
  sizes = 5, 1, 13, 3, 9
  return [
      request(i, PREFIXES[i % 3], sizes[i % len(sizes)]) for i in range(count)
  ]


def scores(name, request, completion, temperature=1.0):
  """Log-probabilities [T, V] of all tokens, reading the whole text at once."""
  loaded = tiny(name)
  prompt = request.prefix + request.suffix
  text = [*prompt, *completion.ids]
  valid = np.arange(80)[None] < len(text)
  tokens = np.zeros(valid.shape, np.int32)
  tokens[valid] = text
  logits, _ = llm_tiny.apply(loaded.config, loaded.params, tokens, valid)
  logits = logits[0, len(prompt) - 1 : len(text) - 1]
  return jax.nn.log_softmax(logits / temperature)


def assert_same(left, right):
  for one, other in zip(left, right, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    assert one.text == other.text and one.finish == other.finish


@pytest.mark.parametrize(
    'sampling, expected',
    [
        ({}, LOG(0.5, 0.1, 0.3, 0.1)),
        ({'temperature': 0.5}, LOG(0.25, 0.01, 0.09, 0.01)),
        ({'top_k': 1}, LOG(0.5, 0, 0, 0)),
        ({'top_k': 2}, LOG(0.5, 0, 0.3, 0)),
        ({'top_k': 9}, LOG(0.5, 0.1, 0.3, 0.1)),
        ({'top_p': 0.4}, LOG(0.5, 0, 0, 0)),
        ({'top_p': 0.6}, LOG(0.5, 0, 0.3, 0)),
        ({'top_p': 0.79}, LOG(0.5, 0, 0.3, 0)),
        ({'top_p': 0.81}, LOG(0.5, 0.1, 0.3, 0.1)),  # The two are as likely.
        ({'top_k': 2, 'top_p': 0.6}, LOG(0.5, 0, 0, 0)),  # 0.625 of the two.
        ({'temperature': 0.5, 'top_p': 0.6}, LOG(0.25, 0, 0, 0)),
    ],
)
def test_logits_are_restricted(sampling, expected):
  logits = decode.restrict(LOG(0.5, 0.1, 0.3, 0.1), Sampling(**sampling))
  np.testing.assert_allclose(
      jax.nn.log_softmax(logits), jax.nn.log_softmax(expected), atol=1e-5
  )


def test_draws_have_the_right_frequencies():
  count, shares = 40_000, {0: 0.1, 3: 0.2, 255: 0.05, 256: 0.25, 600: 0.4}
  logits = np.full(601, -INF)
  logits[list(shares)] = np.log(list(shares.values()))
  keys = jax.random.split(jax.random.key(0), count)
  logits = jnp.broadcast_to(logits[None], (count, 601))
  drawn = np.bincount(jax.jit(decode.draw)(keys, logits), minlength=601)
  assert drawn.sum() == sum(drawn[i] for i in shares)
  for i, share in shares.items():
    deviation = math.sqrt(share * (1 - share) / count)
    assert abs(drawn[i] / count - share) < 4 * deviation, i


@pytest.mark.parametrize('uniform', [0.0, 0.5, 1 - 2**-24])
def test_a_weight_of_zero_is_never_drawn(uniform):
  weights = np.random.default_rng(0).uniform(size=(64, 256)).astype(np.float32)
  weights *= np.random.default_rng(1).uniform(size=weights.shape) < 0.1
  weights[:, 0] = weights[:, -1] = 0
  index = decode._invert(jnp.array(weights), jnp.full(64, uniform))
  assert (weights[np.arange(64), index] > 0).all()


@pytest.mark.parametrize('name', llm_tiny.HF_CONFIGS)
def test_the_likeliest_tokens_are_those_of_the_model(name):
  sampling = Sampling(temperature=0, max_tokens=10)
  many = [r._replace(prefix=()) for r in requests()]
  drawn = engine(name).generate(many, sampling)
  for asked, completion in zip(many, drawn, strict=True):
    likeliest = np.argmax(scores(name, asked, completion), axis=-1)
    np.testing.assert_array_equal(completion.ids, likeliest)
    assert not completion.log_probs.any()  # Nothing else could be drawn.


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_log_probs_are_those_of_the_model(temperature):
  sampling = Sampling(temperature=temperature, max_tokens=10)
  drawn = engine().generate(requests(), sampling)
  for asked, completion in zip(requests(), drawn, strict=True):
    expected = scores('shallow', asked, completion, temperature)
    np.testing.assert_allclose(
        completion.log_probs,
        expected[np.arange(len(completion.ids)), completion.ids],
        atol=1e-4,
    )


def test_a_row_does_not_depend_on_the_others():
  sampling = Sampling(max_tokens=10)
  expected = engine().generate(requests(), sampling)
  assert len({tuple(c.ids) for c in expected}) == 5
  assert_same(engine().generate(requests()[::-1], sampling), expected[::-1])
  assert_same(engine(max_batch=1).generate(requests(), sampling), expected)


def test_a_row_does_not_depend_on_what_was_read_before():
  sampling = Sampling(max_tokens=10)
  expected = engine().generate(requests(), sampling)
  whole = [
      r._replace(prefix=(), suffix=r.prefix + r.suffix) for r in requests()
  ]
  assert_same(engine().generate(whole, sampling), expected)
  shifted = [
      r._replace(prefix=r.prefix + r.suffix, suffix=()) for r in requests()
  ]
  assert_same(engine().generate(shifted, sampling), expected)


def test_long_prompts_and_short_ones_are_drawn_together():
  sampling = Sampling(max_tokens=10)
  asked = [*requests()[:4], request(7, (20,) * 20, size=40)]
  drawn = engine().generate(asked, sampling)
  assert_same(drawn[:4], engine().generate(requests(), sampling)[:4])
  likely = scores('shallow', asked[4], drawn[4])
  likely = likely[np.arange(len(drawn[4].ids)), drawn[4].ids]
  np.testing.assert_allclose(drawn[4].log_probs, likely, atol=1e-4)


def test_longer_completions_begin_as_shorter_ones():
  long = engine().generate(requests(), Sampling(max_tokens=16))
  short = engine().generate(requests(), Sampling(max_tokens=7))
  for one, other in zip(long, short, strict=True):
    np.testing.assert_array_equal(one.ids[:7], other.ids)


def test_a_prefix_is_read_once():
  fresh = engine(slots_limit=500)
  cached = lambda requests: [
      c.cached_tokens for c in fresh.generate(requests, Sampling(max_tokens=2))
  ]
  a, b = PREFIXES[:2]
  assert cached([request(0, a), request(1, b), request(2, a)]) == [0, 0, 4]
  assert cached([request(0), request(1, b), request(2, a)]) == [0, 6, 4]
  fresh.update(tiny().params)
  assert cached([request(0, a)]) == [0]


def test_the_prefixes_used_last_are_kept():
  small = engine(prefix_slots=40)  # Two prefixes of 16 slots.
  prefixes = [(i, i + 1, i + 2) for i in range(10, 40, 10)]
  ask = lambda *which: [
      c.cached_tokens
      for c in small.generate(
          [request(i, prefixes[i]) for i in which], Sampling(max_tokens=2)
      )
  ]
  assert ask(0, 1) == [0, 0]
  assert ask(0) == [3]
  assert ask(2) == [0]  # 1 was used longest ago.
  assert ask(0) == [3]
  assert ask(1) == [0]
  assert ask(0, 1, 2) == [3, 3, 0]  # More than is kept can be asked for.


def test_new_weights_are_used():
  loaded = tiny()
  fresh = engine(max_batch=8)
  sampling = Sampling(max_tokens=6)
  before = fresh.generate(requests(), sampling)
  lora = model.lora_init(loaded.config, jax.random.key(0), rank=2)
  fresh.update(loaded.params, lora)  # Which changes nothing yet.
  assert_same(fresh.generate(requests(), sampling), before)
  lora = jax.tree.map(lambda x: x + 0.1, lora)
  fresh.update(loaded.params, lora)
  after = fresh.generate(requests(), sampling)
  assert any(
      (a.ids[:1] != b.ids[:1]).any() for a, b in zip(after, before, strict=True)
  )
  merged = model.lora_merge(loaded.config, loaded.params, lora)
  fresh.update(merged)
  assert_same(fresh.generate(requests(), sampling), after)


def test_a_stop_token_ends_a_completion_and_belongs_to_it():
  sampling, many = Sampling(temperature=10.0, max_tokens=40), [
      request(i) for i in range(16)
  ]
  stops = set(llm_tiny.tokenizer().stop_ids)
  finished = 0
  for completion in engine().generate(many, sampling):
    ended = int(completion.ids[-1]) in stops
    assert completion.finish == ('stop' if ended else 'length')
    assert len(completion.ids) == 40 or ended
    assert not stops & set(completion.ids[:-1].tolist())
    ids = completion.ids[:-1] if ended else completion.ids
    assert completion.text == llm_tiny.tokenizer().decode(ids)
    finished += ended
  assert 0 < finished < 16


@pytest.mark.parametrize('length', [1, 2, 3])
def test_a_stop_string_ends_a_completion(length):
  several = [r for r in requests() if r.prefix]
  plain = engine().generate(several, Sampling(max_tokens=40))
  for asked, whole in zip(several, plain, strict=True):
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + length]
    cut = engine().generate([asked], Sampling(max_tokens=40, stop=(stop,)))[0]
    assert cut.finish == 'stop'
    assert cut.text == whole.text[: whole.text.index(stop)]
    size = len(cut.ids)
    np.testing.assert_array_equal(cut.ids, whole.ids[:size])
    np.testing.assert_allclose(cut.log_probs, whole.log_probs[:size], atol=1e-4)
    assert stop in llm_tiny.tokenizer().decode(cut.ids)
    assert stop not in llm_tiny.tokenizer().decode(cut.ids[:-1])


@pytest.mark.parametrize('length', [1, 3])
def test_a_stop_string_saves_the_rest(length, monkeypatch):
  fresh, finish, steps = engine(max_batch=1), engine()._finish, []

  def spy(*args):
    state = finish(*args)
    steps.append(int(state.step))
    return state

  monkeypatch.setattr(fresh, '_finish', spy)
  asked = requests()[:1]
  whole = fresh.generate(asked, Sampling(max_tokens=40))[0]
  stop = whole.text[2 : 2 + length]
  cut = fresh.generate(asked, Sampling(max_tokens=40, stop=(stop,)))[0]
  assert steps[0] == 40
  late = steps[1] - len(cut.ids)  # Longer ones are searched for every 8 tokens.
  assert late == 0 if length == 1 else late < 8


COMMANDS = ('work 1', 'work 12', 'wait', 'tell 2 about 3')
HOT = Sampling(temperature=5.0, max_tokens=16)


def test_a_grammar_permits_its_commands_only():
  shares = {}
  for key in jax.random.split(jax.random.key(0), (8, 8)):
    asked = [request(3, PREFIXES[0], 5, COMMANDS)._replace(key=k) for k in key]
    for completion in engine().generate(asked, HOT):
      assert completion.text in COMMANDS and completion.finish == 'stop'
      encoded = llm_tiny.tokenizer().encode(completion.text)
      np.testing.assert_array_equal(completion.ids[:-1], encoded)
      said = tuple(completion.ids.tolist())
      shares[said] = math.exp(completion.log_probs.sum())
  # Whatever may be said was said, so the shares are all that there is.
  assert len(shares) == len(COMMANDS) * len(llm_tiny.tokenizer().stop_ids)
  assert sum(shares.values()) == pytest.approx(1, abs=1e-4)


def test_every_row_has_its_own_grammar():
  commands = COMMANDS[:2], None, COMMANDS[2:], ('tell 1:',), None
  asked = [
      r._replace(commands=c) for r, c in zip(requests(), commands, strict=True)
  ]
  drawn = engine().generate(asked, HOT)
  assert drawn[0].text in COMMANDS[:2] and drawn[2].text in COMMANDS[2:]
  assert drawn[3].text.startswith('tell 1:') and len(drawn[3].text) > 10
  assert_same(engine(max_batch=1).generate(asked, HOT), drawn)
  free = engine().generate(requests(), HOT)
  assert_same([drawn[1], drawn[4]], [free[1], free[4]])


def test_a_grammar_renormalises_the_model():
  commands = COMMANDS[::2]
  first = [llm_tiny.tokenizer().encode(command)[0] for command in commands]
  assert first[0] != first[1]
  asked = requests()[0]._replace(commands=commands)
  drawn = engine(max_batch=1).generate([asked], HOT)[0]
  of_all = scores('shallow', asked, drawn, HOT.temperature)[0]
  expected = of_all[drawn.ids[0]] - jax.nn.logsumexp(of_all[np.array(first)])
  assert drawn.log_probs[0] == pytest.approx(float(expected), abs=1e-4)


def test_few_programs_are_compiled():
  fresh = engine(prefix_slots=10_000)
  sampling = Sampling(max_tokens=5)
  asked = [request(i, PREFIXES[0], size=i + 1) for i in range(16)]
  fresh.generate(asked[:7], sampling)
  before = fresh.compilations
  for count in (5, 6, 7, 8):
    fresh.generate(asked[-count:], sampling)
  fresh.generate(asked[:7], Sampling(max_tokens=16))
  assert fresh.compilations == before
  assert [sampler._rounded(n) for n in (1, 16, 17, 24, 25, 33, 49, 65)] == [
      16, 16, 24, 24, 32, 48, 64, 96
  ]  # fmt: skip


def test_a_prompt_that_does_not_fit_is_named():
  small = engine(slots_limit=30)
  fits, long = request(0, (1,) * 10, size=10), request(0, (1,) * 10, size=11)
  sampling = Sampling(max_tokens=10)
  assert len(small.generate([fits], sampling)) == 1
  with pytest.raises(NotAllowedError, match=r'requests\[1\].*=21 .*<= 20.* 30'):
    small.generate([fits, long], sampling)
  with pytest.raises(NotAllowedError, match=r'requests\[0\].*=0 '):
    small.generate([request(size=0)], sampling)


def test_rows_are_divided_over_a_mesh():
  loaded = tiny()
  mesh = jax.make_mesh(
      (2, 1, 2), ('data', 'fsdp', 'tp'), axis_types=(AxisType.Auto,) * 3
  )
  params = jax.tree.map(
      lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
      loaded.params,
      model.partition_specs(loaded.config),
  )
  spread = sampler.LocalEngine(loaded.config, params, loaded.tokenizer)
  sampling = Sampling(max_tokens=6)
  expected = engine().generate(requests(), sampling)
  assert_same(spread.generate(requests(), sampling), expected)


def test_bfloat16_is_close():
  loaded = tiny()
  config = dataclasses.replace(loaded.config, dtype='bfloat16')
  half = sampler.LocalEngine(config, loaded.params, loaded.tokenizer)
  many = [r._replace(prefix=()) for r in requests()]
  drawn = half.generate(many, Sampling(max_tokens=4))
  for asked, completion in zip(many, drawn, strict=True):
    expected = scores('shallow', asked, completion)
    expected = expected[np.arange(len(completion.ids)), completion.ids]
    np.testing.assert_allclose(completion.log_probs, expected, atol=0.2)


def test_nothing_is_asked_of_a_closed_engine():
  fresh = engine(slots_limit=100)
  fresh.close()
  assert fresh.generate([], Sampling()) == []


QUESTIONS = (
    'What is the capital of France?',
    'Name a colour.',
    'Write one sentence about the sea, the wind and the rain in autumn.',
    'What is 2 + 3?',
    'Hi',
)


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes_in_a_padded_batch(tmp_path):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  if 'RLCR_JAX_SMOLLM2' not in os.environ:
    pytest.skip('RLCR_JAX_SMOLLM2 names no .gguf file.')
  loaded = weights.load(os.environ['RLCR_JAX_SMOLLM2'])
  weights.save(tmp_path / 'model', *loaded)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
  tokenizer, prompts = loaded.tokenizer, []
  for question in QUESTIONS:
    text = tokenizer.chat([{'role': 'user', 'content': question}])
    prompts.append(tokenizer.encode(text))
  length = max(map(len, prompts))
  pads = [length - len(prompt) for prompt in prompts]
  assert len(set(pads)) > 3
  rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
  mask = [[0] * pad + [1] * (length - pad) for pad in pads]
  written = theirs.eval().generate(
      torch.tensor(rows),
      attention_mask=torch.tensor(mask),
      do_sample=False,
      max_new_tokens=24,
  )
  ours = sampler.LocalEngine(*loaded).generate(
      [Request((), tuple(prompt), jax.random.key(0)) for prompt in prompts],
      Sampling(temperature=0, max_tokens=24),
  )
  for completion, row in zip(ours, written.numpy(), strict=True):
    expected = row[length : length + len(completion.ids)]
    np.testing.assert_array_equal(completion.ids, expected)
  assert 'Paris' in ours[0].text and ours[0].finish == 'stop'
