"""The protocols that every policy and every critic satisfy.

They are pure: parameters are a pytree that `init` makes. All methods work on a
leading axis of rows, one row per decision.
"""

from typing import Any, Protocol

import chex
import jax
from rlcr_jax.observation import Action
from rlcr_jax.observation import Observation

Params = Any


class Policy(Protocol):
  """What the event loop and the learner call."""

  def init(self, key: jax.Array) -> Params:
    """Fresh parameters."""

  def sample(
      self, params: Params, keys: jax.Array, obs: Observation
  ) -> tuple[Action, chex.Array]:
    """Draws legal actions.

    Args:
      params: from `init`.
      keys: [C] keys, one per row, so that a row's draw does not depend on the
        batch that it is in.
      obs: leaves [C, ...].

    Returns:
      Actions, and log-probabilities [C] float32 over the parts that the verb
      uses (verb, target, peer, symbol).
    """

  def log_prob(
      self, params: Params, obs: Observation, action: Action
  ) -> tuple[chex.Array, chex.Array]:
    """Log-probabilities [C] of given actions, and entropies [C], in nats.

    The entropy of a part after the first is that of its distribution given the
    earlier parts as they are in `action`, which is unbiased for actions drawn
    from the policy.
    """


class Critic(Protocol):
  """What the learner calls to estimate returns."""

  def init(self, key: jax.Array) -> Params:
    """Fresh parameters."""

  def value(self, params: Params, obs: Observation) -> chex.Array:
    """Expected returns [C] float32 from the decisions on, as they are seen."""
