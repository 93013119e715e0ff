"""Simulated time: what a turn costs in integer milliseconds."""

import dataclasses
import math

import chex
from envs.base import require
import jax
import jax.numpy as jnp

NEVER = -1  # A time that has not come, in int32 milliseconds.
FOREVER = jnp.iinfo(jnp.int32).max
_CLIP = 2.0  # Output tokens stay within this many standard deviations.


@dataclasses.dataclass(frozen=True)
class LatencyModel:
  """Tokens and tool time to wall clock.

  A turn takes the prefill of what is new in its context, the decoding of its
  output tokens and the time of its tool, rounded up to a quantum. Quanta make
  ties, and ties are handled together, which is what keeps the event loop short.
  """

  prefill_tokens_per_s: float = 5000.0
  decode_tokens_per_s: float = 100.0
  spread: float = 0.1  # Standard deviation of log output tokens.
  quantum_ms: int = 1000

  def __post_init__(self):
    for field in ('prefill_tokens_per_s', 'decode_tokens_per_s'):
      value = getattr(self, field)
      require(value > 0, f'latency.{field}', value, '> 0 tokens/s')
    require(self.spread >= 0, 'latency.spread', self.spread, '>= 0')
    require(self.quantum_ms >= 1, 'latency.quantum_ms', self.quantum_ms, '>= 1')

  def sample_tokens(self, key: jax.Array, median: chex.Array) -> chex.Array:
    """Draws log-normal output tokens, int32, at least 1."""
    noise = jnp.clip(jax.random.normal(key), -_CLIP, _CLIP)
    tokens = jnp.round(median * jnp.exp(self.spread * noise))
    return jnp.maximum(tokens.astype(jnp.int32), 1)

  def duration_ms(
      self,
      output_tokens: chex.Array,
      context_tokens: chex.Array,
      tool_ms: chex.Array,
  ) -> chex.Array:
    """Wall clock of a turn, int32 ms.

    Args:
      output_tokens: int32, decoded one after the other.
      context_tokens: int32, new in the context, prefilled.
      tool_ms: int32.

    Returns:
      A positive multiple of `quantum_ms`, of the arguments' shape.
    """
    ms = (
        output_tokens * (1000.0 / self.decode_tokens_per_s)
        + context_tokens * (1000.0 / self.prefill_tokens_per_s)
        + tool_ms
    )
    # Whole milliseconds first, so that float32 cannot miss an exact quantum.
    quanta = -(-jnp.round(ms).astype(jnp.int32) // self.quantum_ms)
    return jnp.maximum(quanta, 1) * self.quantum_ms

  def shortest_ms(self, median: float, tool_ms: int) -> int:
    """The shortest duration that `sample_tokens` and `duration_ms` can give."""
    # A millionth less, so that rounding at a half cannot exceed float32's.
    fewest = max(round(median * math.exp(-_CLIP * self.spread) * (1 - 1e-6)), 1)
    with jax.ensure_compile_time_eval():
      return int(self.duration_ms(fewest, 0, tool_ms))
