"""Policy gradients of token sequences, in micro-batches.

Sequences are trained on as they were sampled, in batches of similar length. The
weight of every token is computed for the whole batch before, so the gradient is
a sum that does not depend on the split.
"""

from collections.abc import Iterator, Sequence
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
import numpy as np
import optax
from rlcr_jax import losses
from rlcr_jax.learner import all_finite
from rlcr_jax.learner import descend
from rlcr_jax.learner import RlcrConfig
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm.config import LlmConfig
from rlcr_jax.policies.base import Params

_AXES = ('data', 'fsdp', 'tp')
_LENGTHS = 64  # Sequences are padded to multiples of it,
_OUTPUTS = 8  # and their scored ends to multiples of this.


class Sample(NamedTuple):
  """What one agent read and wrote in one turn."""

  prompt: Sequence[int]
  ids: np.ndarray  # [T] int32.
  log_probs: np.ndarray  # [T] float32, when sampled.
  weight: float | np.ndarray  # Of its tokens in the loss, or [T], of each.
  advantage: float


class Batch(NamedTuple):
  """Sequences that end in the last column. [R, ...] each."""

  tokens: chex.Array  # [R, L] int32.
  valid: chex.Array  # [R, L] bool.
  scored: chex.Array  # [R, K] bool: the last K columns that were written.
  log_probs: chex.Array  # [R, K] float32.
  importance: chex.Array  # [R, K] float32.
  weight: chex.Array  # [R, K] float32, 0 where nothing was written.
  advantage: chex.Array  # [R] float32.


class Sums(NamedTuple):
  """Added up over micro-batches."""

  grads: Params
  loss: chex.Array
  entropy: chex.Array
  gap: chex.Array


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def micro_batches(
    sequences: Sequence[Sample], token_budget: int, multiple: int = 1
) -> Iterator[Batch]:
  """Packs sequences of similar length, the longest first.

  Args:
    sequences: of any lengths.
    token_budget: most tokens of a batch, padding included; longer sequences
      have a batch of `multiple` rows.
    multiple: of which the number of rows is one, to be split over devices.

  Yields:
    Batches on the host. Shapes are few, because lengths are rounded up and the
    number of rows follows from the length.
  """
  sizes = [len(s.prompt) + len(s.ids) for s in sequences]
  order = sorted(range(len(sequences)), key=lambda i: -sizes[i])
  ends = max((len(s.ids) for s in sequences), default=1)
  ends = _up(ends, _OUTPUTS if ends <= _LENGTHS else _LENGTHS)
  while order:
    length = _up(sizes[order[0]], _LENGTHS)
    rows = max(token_budget // length // multiple, 1) * multiple
    taken, order = order[:rows], order[rows:]
    # The first column is never written, so nothing has to predict it.
    scored = min(ends, length - 1)
    yield _pack([sequences[i] for i in taken], rows, length, scored)


def _pack(sequences, rows: int, length: int, ends: int) -> Batch:
  batch = Batch(
      tokens=np.zeros((rows, length), np.int32),
      valid=np.zeros((rows, length), bool),
      scored=np.zeros((rows, ends), bool),
      log_probs=np.zeros((rows, ends), np.float32),
      importance=np.ones((rows, ends), np.float32),
      weight=np.zeros((rows, ends), np.float32),
      advantage=np.zeros(rows, np.float32),
  )
  for row, sequence in enumerate(sequences):
    written = len(sequence.ids)
    size = len(sequence.prompt) + written
    batch.tokens[row, length - size :] = [*sequence.prompt, *sequence.ids]
    batch.valid[row, length - size :] = True
    batch.scored[row, ends - written :] = True
    batch.log_probs[row, ends - written :] = sequence.log_probs
    batch.weight[row, ends - written :] = sequence.weight
    batch.advantage[row] = sequence.advantage
  return batch


def make_mesh(config: LlmConfig, devices: int) -> Mesh:
  """A mesh over data, fsdp and tp; `devices` 0 takes as few as possible."""
  least = config.fsdp * config.tp
  shape = (max(devices // least, 1), config.fsdp, config.tp)
  count = math.prod(shape)
  return jax.make_mesh(
      shape,
      _AXES,
      devices=jax.devices()[:count],
      axis_types=(AxisType.Auto,) * len(_AXES),
  )


class Trainer:
  """Gradients of token sequences. Holds compiled functions and no state."""

  def __init__(
      self,
      config: model_lib.ModelConfig,
      rlcr: RlcrConfig,
      mesh: Mesh,
      temperature: float = 1.0,
  ):
    self._config, self._rlcr, self._temperature = config, rlcr, temperature
    self._mesh = mesh
    self.optimizer = rlcr.optimizer()
    self.score = jax.jit(lambda *args: self._score(*args)[0])
    self.gradient = jax.jit(self._gradient, donate_argnums=3)
    self.descend = jax.jit(self._descend)

  def pack(self, samples: Sequence[Sample], token_budget: int) -> list[Batch]:
    """Micro-batches on the mesh, their rows split over data and fsdp."""
    split, multiple = model_lib.row_sharding(self._mesh)
    batches = micro_batches(samples, token_budget, multiple)
    return [jax.device_put(batch, split) for batch in batches]

  def _score(self, params: Params, frozen: Params, batch: Batch):
    """Log-probabilities and entropies [R, K] of the scored columns."""
    ends = batch.scored.shape[1]
    base, lora = (params, None) if frozen is None else (frozen, params)
    logits, _ = model_lib.apply(
        self._config,
        base,
        batch.tokens,
        batch.valid,
        lora=lora,
        last=ends + 1,
    )
    log_p = jax.nn.log_softmax(logits[:, :-1] / self._temperature)
    taken = jnp.take_along_axis(log_p, batch.tokens[:, -ends:, None], 2)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=2)
    return taken[:, :, 0], entropy

  def _gradient(self, params, frozen, batch: Batch, sums: Sums, bonus) -> Sums:
    """Adds one micro-batch to the sums; `frozen` is the base under adapters."""
    rlcr = self._rlcr
    count = lambda x: jnp.sum(jnp.where(batch.weight > 0, x, 0.0))

    def loss_of(params):
      log_prob, entropy = self._score(params, frozen, batch)
      term = batch.importance * losses.LOSSES[rlcr.loss](
          log_prob, batch.log_probs, batch.advantage[:, None], rlcr.clip
      )
      weigh = lambda x: jnp.sum(jnp.where(batch.scored, batch.weight * x, 0.0))
      loss = weigh(term) - bonus * weigh(entropy)
      return loss, (count(entropy), count(jnp.abs(log_prob - batch.log_probs)))

    (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return jax.tree.map(jnp.add, sums, Sums(grads, loss, *aux))

  def zeros(self, params: Params) -> Sums:
    """Sums over nothing."""
    zero = jnp.float32(0)
    return Sums(jax.tree.map(jnp.zeros_like, params), zero, zero + 0, zero + 0)

  def reweigh(
      self, params, frozen, batches: Sequence[Batch], cap: float
  ) -> tuple[list[Batch], float]:
    """Corrects for tokens that were sampled from another distribution.

    Truncated importance weights `min(pi / mu, cap)` (Yao et al., 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"), and
    from there on the trainer's own log-probabilities.

    Returns:
      The batches, and the summed gap |log pi - log mu| of all tokens.
    """
    own = [np.asarray(self.score(params, frozen, b)) for b in batches]
    gap = sum(
        float(np.abs(o - b.log_probs)[b.scored].sum())
        for o, b in zip(own, batches, strict=True)
    )
    corrected = [
        b._replace(
            importance=np.minimum(np.exp(o - b.log_probs), cap), log_probs=o
        )
        for o, b in zip(own, batches, strict=True)
    ]
    return corrected, gap

  def sums(self, params, frozen, batches: Sequence[Batch], bonus=0.0) -> Sums:
    """Gradient, loss, entropy and gap of a whole batch."""
    sums = self.zeros(params)
    for batch in batches:
      sums = self.gradient(params, frozen, batch, sums, jnp.float32(bonus))
    return sums

  def _descend(self, params, opt_state, grads: Params, learning_rate):
    """The next parameters and optimiser, the gradient's norm, is all finite?"""
    norm = optax.tree.norm(grads)
    new, opt_state = descend(
        self.optimizer, params, opt_state, grads, learning_rate
    )
    return new, opt_state, norm, all_finite((new, norm))
