"""Scripted policies: references that need no training.

They satisfy the policy protocol, have no parameters, and read the named columns
of an observation. Which privileges they enjoy (turns in flight visible, facts
free) is a matter of the rules they play under, not of their code.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from rlcr_jax.collective import Collective
from rlcr_jax.observation import Action
from rlcr_jax.observation import HIRE
from rlcr_jax.observation import MY_FEATURES
from rlcr_jax.observation import Observation
from rlcr_jax.observation import takes
from rlcr_jax.observation import WAIT


class _Scripted:
  """Shared by policies without parameters."""

  def init(self, key: jax.Array) -> tuple[()]:
    del key
    return ()


@dataclasses.dataclass(frozen=True)
class RandomPolicy(_Scripted):
  """Uniform over legal verbs, then over each part that the verb uses."""

  collective: Collective

  def _parts(self, obs: Observation, verb: chex.Array):
    """Legal masks of target, peer and symbol given the verb, one row."""
    uses = lambda part: takes(self.collective.verbs, part)[verb]
    symbols = jnp.ones((self.collective.config.num_symbols,), bool)
    return (
        obs.legal_target[verb] & uses('target'),
        obs.legal_peer & uses('peer'),
        symbols & uses('symbol'),
    )

  def sample(self, params, keys, obs):
    del params
    draws = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)

    def row(obs, draws):
      verb = _uniform(obs.legal_verb, draws[0])
      parts = map(_uniform, self._parts(obs, verb), draws[1:])
      return Action(verb, *parts)

    action = jax.vmap(row)(obs, draws)
    return action, self.log_prob((), obs, action)[0]

  def log_prob(self, params, obs, action):
    del params

    def row(obs, action):
      masks = (obs.legal_verb, *self._parts(obs, action.verb))
      choices = jnp.stack([jnp.maximum(jnp.sum(m), 1) for m in masks])
      return jnp.sum(jnp.log(choices.astype(jnp.float32)))

    entropy = jax.vmap(row)(obs, action)
    return -entropy, entropy


def _uniform(legal: chex.Array, draw: chex.Array) -> chex.Array:
  """The legal index that a draw from [0, 1) falls on; 0 if there is none."""
  upto = jnp.cumsum(legal, dtype=jnp.int32)
  nth = jnp.floor(draw * upto[-1]).astype(jnp.int32) + 1
  index = jnp.searchsorted(upto, jnp.minimum(nth, upto[-1]))
  return jnp.where(upto[-1] > 0, index, 0).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ListScheduler(_Scripted):
  """Hires, then takes the target of highest priority that nobody is at.

  With one agent this is `greedy_solo`. Under rules that show turns in flight
  and give all facts it is `oracle`; where facts must be read, `oracle_muted`:
  it prefers targets for which it lacks fewer facts, and reads what it lacks.
  Agents that are free at the same instant take their turns at the list in the
  order of their seats. It never talks.
  """

  collective: Collective
  hires: int = 8  # How many it hires, beside the chief.
  by_value: bool = False  # Most progress per turn first, not priority.

  def sample(self, params, keys, obs):
    del params, keys
    action = jax.vmap(self._row)(obs)
    return action, jnp.zeros(action.verb.shape)

  def log_prob(self, params, obs, action):
    chosen = self.sample(params, None, obs)[0]
    same = jnp.stack([a == b for a, b in zip(chosen, action, strict=True)]).all(
        0
    )
    log_prob = jnp.where(same, 0.0, -jnp.inf)
    return log_prob, jnp.zeros_like(log_prob)

  def _row(self, obs: Observation) -> Action:
    names, me = self.collective.env.feature_names, obs.me
    column = {name: obs.targets[:, i] for i, name in enumerate(names)}
    mine = {name: me[i] for i, name in enumerate(MY_FEATURES)}
    in_flight = obs.targets[:, len(names)] > 0
    rank = mine['rank'].astype(jnp.int32)
    verbs = self.collective.env.verbs
    seen = obs.targets[:, : len(names)]
    act = self.collective.env.reference_verb(
        seen, obs.legal_target[: len(verbs)]
    )
    free = (column['open'] > 0) & ~in_flight
    free &= (column['missing'] > 0) | (act >= 0)
    score = column['priority']
    if self.by_value:
      score = column['value'] / jnp.maximum(column['turns_left'], 1.0)
    score -= 10.0 * column['missing']
    target, found = _nth_best(score, free, rank)
    # The verb that learns; where there is none, nothing can be learned.
    learn = max(range(len(verbs)), key=lambda i: verbs[i].learns)
    can_learn = obs.legal_target[learn] & verbs[learn].learns
    need = obs.relations[target] & can_learn & ~in_flight
    blocking = column['blocks_me']
    reads = found & (column['missing'][target] > 0)
    to_read, readable = _nth_best(blocking, need & (blocking > 0), 0)
    later = self.collective.env.reference_fact(seen, obs.relations)
    wanted = (column['wanted'] > 0) & (later > -jnp.inf)
    ahead, useful = _nth_best(later, can_learn & wanted, rank)
    hires = obs.legal_verb[self.collective.verb(HIRE)]
    hires &= jnp.round(jnp.exp(2.0 * mine['log_team'])) < 1 + self.hires
    choices = (  # The first that applies.
        (hires, self.collective.verb(HIRE), 0),
        (found & ~reads, act[target], target),
        (reads & readable, learn, to_read),
        (~found & useful, learn, ahead),
    )
    verb, where = self.collective.verb(WAIT), 0
    for applies, then_verb, then_target in reversed(choices):
      verb = jnp.where(applies, then_verb, verb)
      where = jnp.where(applies, then_target, where)
    zero = jnp.int32(0)
    return Action(verb.astype(jnp.int32), where.astype(jnp.int32), zero, zero)


def _nth_best(score: chex.Array, legal: chex.Array, nth: chex.Array):
  """Index of the nth largest legal score, and whether there are that many."""
  order = jnp.argsort(-jnp.where(legal, score, -jnp.inf))
  return order[jnp.minimum(nth, len(order) - 1)], jnp.sum(legal) > nth
