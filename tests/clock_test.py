"""Tests of simulated time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import clock
from rlcr_jax.clock import LatencyModel


def make_model(**changes):
  fields = {
      'prefill_tokens_per_s': 5000.0,  # 0.2 ms per token.
      'decode_tokens_per_s': 100.0,  # 10 ms per token.
      'spread': 0.2,
      'quantum_ms': 1000,
  }
  return LatencyModel(**(fields | changes))


def lowest_key():
  """A key whose draw lies beyond the clip of the spread, on the low side."""
  keys = jax.random.split(jax.random.key(0), 200)
  noise = jax.vmap(jax.random.normal)(keys)
  assert noise.min() < -2
  return keys[jnp.argmin(noise)]


@pytest.mark.parametrize(
    'output, context, tool_ms, quantum_ms, expected',
    [
        (1, 0, 0, 1, 10),
        (100, 0, 0, 1, 1000),
        (0, 5000, 0, 1, 1000),
        (0, 0, 7, 1, 7),
        (150, 500, 250, 1, 1850),  # 1500 + 100 + 250.
        (150, 500, 250, 500, 2000),
        (150, 500, 250, 1000, 2000),
        (2000, 0, 10_000, 1000, 30_000),
        (100, 0, 0, 1000, 1000),  # Exactly a quantum is not rounded up,
        (99, 50, 0, 1000, 1000),  # 990 + 10,
        (100, 50, 0, 1000, 2000),  # and anything above one is.
        (100, 0, 1, 1000, 2000),
        (900, 0, 1, 1000, 10_000),
        (0, 0, 0, 1, 1),  # Nothing is done in no time.
        (0, 0, 0, 1000, 1000),
    ],
)
def test_duration_by_hand(output, context, tool_ms, quantum_ms, expected):
  model = make_model(quantum_ms=quantum_ms)
  arguments = map(jnp.int32, (output, context, tool_ms))
  assert model.duration_ms(*arguments) == expected


def test_duration_of_arrays_is_int32():
  duration_ms = make_model().duration_ms(
      jnp.array([100, 150]), jnp.array([0, 500]), jnp.array([0, 250])
  )
  assert duration_ms.dtype == jnp.int32
  np.testing.assert_array_equal(duration_ms, [1000, 2000])


@pytest.mark.parametrize('rate', [3.0, 7.0, 30.0, 70.0, 110.0])
@pytest.mark.parametrize('part', ['output', 'context'])
def test_rounding_error_does_not_cost_a_quantum(rate, part):
  # `rate` tokens take a second, though a token takes no whole number of ms.
  model = make_model(decode_tokens_per_s=rate, prefill_tokens_per_s=rate)
  seconds = jnp.arange(1, 1001)
  tokens = (seconds * rate).astype(jnp.int32)
  none = jnp.zeros_like(tokens)
  spent = (tokens, none) if part == 'output' else (none, tokens)
  duration_ms = jax.jit(model.duration_ms)(*spent, none)
  np.testing.assert_array_equal(duration_ms, 1000 * np.arange(1, 1001))


@pytest.mark.parametrize('level', [0, 3])
def test_duration_does_not_depend_on_how_it_is_compiled(level):
  # 0.2 ms per token of context: every fifth one gives a whole number of ms,
  # of which some lie 1 ms beyond a quantum.
  model = make_model()
  options = {'xla_backend_optimization_level': level}
  compiled = jax.jit(model.duration_ms, compiler_options=options)
  output = jnp.arange(1, 1001)[:, None]
  context = jnp.array([[0, 1, 2, 3, 4, 5, 10, 100, 555, 995, 1000, 1234]])
  duration_ms = compiled(output, context, jnp.int32(1))
  eager_ms = model.duration_ms(output, context, jnp.int32(1))
  np.testing.assert_array_equal(duration_ms, eager_ms)
  whole = np.asarray(context[0]) % 5 == 0
  exact = 10 * np.asarray(output) + np.asarray(context) // 5 + 1
  np.testing.assert_array_equal(
      duration_ms[:, whole], -(-exact[:, whole] // 1000) * 1000
  )


def test_hours_are_as_exact_as_seconds():
  # Exactly 4 hours by tokens, prefill or tool: no quantum more, none less.
  model = make_model()
  for seconds in (2571, 3600, 10_000, 14_400):
    for spent in (
        (100 * seconds, 0, 0), (0, 5000 * seconds, 0), (0, 0, 1000 * seconds)
    ):  # fmt: skip
      assert model.duration_ms(*map(jnp.int32, spent)) == 1000 * seconds
      more = spent[:2] + (spent[2] + 1,)
      assert model.duration_ms(*map(jnp.int32, more)) == 1000 * (seconds + 1)


def test_tokens_without_spread_are_the_median():
  model = make_model(spread=0.0)
  for median, expected in ((100.0, 100), (7.0, 7), (0.2, 1)):
    tokens = model.sample_tokens(jax.random.key(1), median)
    assert tokens == expected  # At least one.
    assert tokens.dtype == jnp.int32


def test_tokens_are_log_normal_within_two_standard_deviations():
  model = make_model(spread=0.5)
  keys = jax.random.split(jax.random.key(2), 20_000)
  tokens = jax.vmap(lambda key: model.sample_tokens(key, 10_000.0))(keys)
  assert tokens.min() == 3679  # 10000 exp(-1); 2 % of draws are clipped there.
  assert tokens.max() == 27_183  # 10000 exp(1).
  logs = np.log(np.asarray(tokens) / 10_000)
  assert abs(logs.mean()) < 0.01
  # A standard normal clipped at 2 has a standard deviation of 0.959.
  assert logs.std() == pytest.approx(0.5 * 0.959, rel=0.02)


def test_tokens_differ_between_keys():
  model = make_model(spread=0.5)
  draw = lambda seed: int(model.sample_tokens(jax.random.key(seed), 1e6))
  assert len({draw(seed) for seed in range(10)}) == 10
  assert draw(3) == draw(3)


@pytest.mark.parametrize(
    'spread, median, tool_ms, expected',
    [
        (0.0, 100.0, 0, 1000),
        (0.0, 100.0, 5, 1005),
        (0.5, 10_000.0, 0, 36_790),
        (5.0, 100.0, 0, 10),  # One token.
    ],
)
def test_shortest_by_hand(spread, median, tool_ms, expected):
  model = make_model(spread=spread, quantum_ms=1)
  shortest_ms = model.shortest_ms(median, tool_ms)
  assert isinstance(shortest_ms, int)
  assert shortest_ms == expected


@pytest.mark.parametrize('spread', [0.0, 0.1, 0.2, 0.4, 0.5, 1.0])
def test_shortest_is_a_tight_lower_bound(spread):
  # 3651 exp(-0.8) and 4223 exp(-0.2) are halves up to float32 precision.
  model = make_model(spread=spread, quantum_ms=1)
  medians = jnp.array([1.0, 2.5, 10, 100, 1500, 2000, 3651, 4223])
  tokens = jax.vmap(model.sample_tokens, (None, 0))(lowest_key(), medians)
  for median, fewest in zip(medians.tolist(), tokens, strict=True):
    drawn_ms = int(model.duration_ms(fewest, 0, 250))
    shortest_ms = model.shortest_ms(median, 250)
    assert shortest_ms <= drawn_ms, (spread, median)
    assert drawn_ms - shortest_ms <= 10, (spread, median)  # Up to one token.


def test_shortest_is_a_number_while_tracing():
  model = make_model()
  trace = jax.jit(lambda: jnp.zeros(model.shortest_ms(2.0, 0) // 1000))
  assert trace().shape == (1,)


def test_never_and_forever():
  assert clock.NEVER < 0
  assert clock.FOREVER == 2**31 - 1  # Of int32.


@pytest.mark.parametrize(
    'field, value, allowed',
    [
        ('prefill_tokens_per_s', 0.0, '> 0'),
        ('decode_tokens_per_s', -1.0, '> 0'),
        ('spread', -0.1, '>= 0'),
        ('quantum_ms', 0, '>= 1'),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(field, value, allowed):
  with pytest.raises(ValueError) as error:
    make_model(**{field: value})
  message = str(error.value)
  assert f'latency.{field}={value}' in message
  assert allowed in message
  assert '\n' not in message
