"""From parameters to better parameters: one jitted update.

An update plays P groups of G rollouts, turns their returns into one flat
advantage per collective, and follows the policy gradient over the packed
decisions. It is one `shard_map` over a `data` axis: each device plays whole
groups in an event loop of its own, and devices meet once per gradient, to add
up gradients and counts.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
from envs.base import require
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import optax
from rlcr_jax import advantages
from rlcr_jax import decisions
from rlcr_jax import incentives
from rlcr_jax import losses
from rlcr_jax import rollout
from rlcr_jax.collective import Collective
from rlcr_jax.policies.base import Params
from rlcr_jax.policies.base import Policy
from rlcr_jax.roster import Rules

DATA = 'data'  # Name of the mesh axis.


@dataclasses.dataclass(frozen=True)
class RlcrConfig:
  """How returns become an update."""

  tasks: int = 16  # P, groups per update.
  group_size: int = 16  # G, rollouts per task.
  incentive: str = 'deadline_return'
  advantage: str = 'group_mean'  # group_mean, rloo or z_score.
  loss: str = 'reinforce'  # reinforce or clipped_surrogate.
  clip: float = 0.2  # clipped_surrogate: epsilon.
  epochs: int = 1  # Gradient steps per batch; more needs clipped_surrogate.
  aggregation: str = 'decision_mean'  # See losses.AGGREGATIONS.
  constant: float = 100.0  # aggregation=constant: divisor, in decisions.
  learning_rate: float = 4e-3
  learning_rate_final: float = 1e-3  # Reached linearly at the last step.
  adam_b1: float = 0.9
  # Short memory of squared gradients: they shrink when teams grow, and with the
  # usual 0.999 the large ones of small teams would hold the step size down.
  adam_b2: float = 0.95
  max_grad_norm: float = 1.0
  entropy_bonus: float = 1e-4
  entropy_bonus_final: float = 0.0  # Reached linearly at the last step.
  chunk_size: int = 64  # C, decisions evaluated at once.
  max_decisions: int = 300  # Buffer size, in decisions per rollout.

  def __post_init__(self):
    tables = {
        'incentive': tuple(incentives.INCENTIVES),
        'advantage': tuple(advantages.ESTIMATORS),
        'loss': tuple(losses.LOSSES),
        'aggregation': losses.AGGREGATIONS,
    }
    for field, allowed in tables.items():
      value = getattr(self, field)
      require(value in allowed, f'rlcr.{field}', value, f'one of {allowed}')
    for field in ('tasks', 'epochs', 'chunk_size', 'max_decisions'):
      value = getattr(self, field)
      require(value >= 1, f'rlcr.{field}', value, '>= 1')
    require(
        self.group_size >= 2,
        'rlcr.group_size',
        self.group_size,
        '>= 2, since an advantage is relative to the other rollouts of a task',
    )
    for field in ('learning_rate', 'max_grad_norm', 'clip', 'constant'):
      value = getattr(self, field)
      require(0 < value < math.inf, f'rlcr.{field}', value, '> 0 and finite')
    for field in (
        'learning_rate_final',
        'entropy_bonus',
        'entropy_bonus_final',
    ):
      value = getattr(self, field)
      require(0 <= value < math.inf, f'rlcr.{field}', value, '>= 0 and finite')
    for field in ('adam_b1', 'adam_b2'):
      value = getattr(self, field)
      require(0 <= value < 1, f'rlcr.{field}', value, 'from 0 to below 1')
    require(
        self.epochs == 1 or self.loss == 'clipped_surrogate',
        'rlcr.epochs',
        self.epochs,
        '1 unless rlcr.loss=clipped_surrogate: a second step on the same batch'
        ' is off-policy',
    )

  def optimizer(self) -> optax.GradientTransformation:
    """Clipping, then Adam; updates are still to be scaled by `-rate`."""
    return optax.chain(
        optax.clip_by_global_norm(self.max_grad_norm),
        optax.scale_by_adam(b1=self.adam_b1, b2=self.adam_b2),
    )

  def knobs(self, step: int, steps: int) -> 'Knobs':
    """The scheduled numbers of one update."""
    fraction = step / max(steps - 1, 1)
    line = lambda first, final: jnp.float32(first + (final - first) * fraction)
    return Knobs(
        learning_rate=line(self.learning_rate, self.learning_rate_final),
        entropy_bonus=line(self.entropy_bonus, self.entropy_bonus_final),
    )


class Knobs(NamedTuple):
  """Numbers that change over training, traced."""

  learning_rate: chex.Array  # [] float32.
  entropy_bonus: chex.Array  # [] float32.


class LearnerState(NamedTuple):
  """Everything that an update reads and writes."""

  params: Params
  opt_state: optax.OptState
  step: chex.Array  # [] int32, updates done.
  key: jax.Array  # Never changes; steps and tasks are folded into it.
  frozen: Params | None = None  # Of agents that do not learn, where there are.


class Update(NamedTuple):
  """What happened in one update. Scalars unless stated."""

  rollouts: rollout.Rollouts  # [B] each, in the order of tasks and rollouts.
  returns: chex.Array  # [P, G] float32, after the incentive.
  loss: chex.Array
  entropy: chex.Array  # Mean per trained decision, nats.
  grad_norm: chex.Array  # Before clipping.
  log_prob_gap: chex.Array  # Mean |sampled - recomputed| log-probability.
  informative: chex.Array  # Share of groups with a signal.
  nonfinite_groups: chex.Array  # Groups dropped for a non-finite return.
  overflow: chex.Array  # bool: the buffer was full; nothing was learned.
  finite: chex.Array  # bool: loss, gradient and new parameters are finite.
  extra: dict[str, float] = {}  # What only one kind of policy measures.


class Part(NamedTuple):
  """One environment's part of every update."""

  collective: Collective
  policy: Policy  # The parts' policies share their parameters.
  tasks: int  # Groups per update.
  weight: float = 1.0  # Of its loss; those of all parts add up to 1.


class _Batch(NamedTuple):
  """What one device has played of one part."""

  rollouts: rollout.Rollouts  # [b].
  buffer: decisions.Buffer
  returns: chex.Array  # [p, G] float32.
  scored: advantages.Advantages
  weight: chex.Array  # [b, N] float32, of each decision of an agent.
  trained: chex.Array  # [] int32, decisions that are learned from.


class _Sums(NamedTuple):
  """Accumulated over chunks."""

  grads: Params
  loss: chex.Array
  entropy: chex.Array
  gap: chex.Array


def default_mesh(tasks: int, devices: int = 0) -> Mesh:
  """A mesh of the most devices that divide P, or of exactly `devices`.

  Raises:
    ValueError: if `devices` is not available or does not divide `tasks`.
  """
  available = jax.device_count()
  count = devices or max(d for d in range(1, available + 1) if tasks % d == 0)
  require(
      count <= available and tasks % count == 0,
      'num_devices',
      count,
      f'at most {available} and a divisor of rlcr.tasks={tasks}',
  )
  return Mesh(jax.devices()[:count], (DATA,))


def number_tasks(tasks: dict[str, int]) -> dict[str, chex.Array]:
  """Indexes [P] of the tasks of every part; no two share one."""
  index, first = {}, 0
  for name, count in tasks.items():
    index[name] = jnp.arange(first, first + count)
    first += count
  return index


def gather_rollouts(rollouts: rollout.Rollouts) -> rollout.Rollouts:
  """The rollouts of all devices, on every device; counts are added up."""
  return jax.tree.map(
      lambda x: jax.lax.all_gather(x, DATA, tiled=True)
      if x.ndim
      else jax.lax.psum(x, DATA),
      rollouts,
  )


def mixed(grads: dict[str, Params], weights: dict[str, float]) -> Params:
  """The weighted sum of the gradients of several environments."""
  weighted = [optax.tree.scale(weights[env], g) for env, g in grads.items()]
  return functools.reduce(optax.tree.add, weighted)


def descend(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    grads: Params,
    learning_rate: chex.Array,
) -> tuple[Params, optax.OptState]:
  """One step against a gradient."""
  updates, opt_state = optimizer.update(grads, opt_state)
  updates = jax.tree.map(lambda u: -learning_rate * u, updates)
  return optax.apply_updates(params, updates), opt_state


def all_finite(tree: Params) -> chex.Array:
  """[] bool: no leaf holds a NaN or an infinity."""
  leaves = jax.tree.leaves(tree)
  return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()


class NonFiniteError(RuntimeError):
  """Loss or gradient became NaN or infinite."""


class Learner:
  """Plays, scores and learns. Holds no state."""

  def __init__(
      self,
      parts: dict[str, Part],
      config: RlcrConfig,
      mesh: Mesh | None = None,
  ):
    """Compiles nothing yet.

    Args:
      parts: the environments by name. One update plays all of them and follows
        the weighted sum of their gradients.
      config: of the update.
      mesh: whose `data` axis divides the tasks of every part.
    """
    self.parts, self.config = parts, config
    self.mesh = mesh or default_mesh(
        math.gcd(*(p.tasks for p in parts.values()))
    )
    self._optimizer = config.optimizer()
    self._organisation = next(iter(parts.values())).collective.config
    whole, split = PartitionSpec(), PartitionSpec(DATA)
    self.update = jax.jit(
        jax.shard_map(
            self._update,
            mesh=self.mesh,
            in_specs=(whole, split, split, whole),
            out_specs=whole,
            check_vma=False,
        ),
        donate_argnums=0,
    )

  def init(self, key: jax.Array) -> LearnerState:
    """The state before the first update, on all devices of the mesh."""
    key_params, key_run = jax.random.split(key)
    policy = next(iter(self.parts.values())).policy
    params = policy.init(key_params)
    state = LearnerState(
        params, self._optimizer.init(params), jnp.int32(0), key_run
    )
    if self._organisation.freezes:
      state = state._replace(frozen=jax.tree.map(jnp.copy, params))
    replicated = jax.sharding.NamedSharding(self.mesh, PartitionSpec())
    return jax.device_put(state, replicated)

  def index(self) -> dict[str, chex.Array]:
    """The tasks of every part, numbered through."""
    return number_tasks({name: p.tasks for name, p in self.parts.items()})

  def step(
      self, state: LearnerState, rules: dict[str, Rules], knobs: Knobs
  ) -> tuple[LearnerState, dict[str, Update]]:
    """One update of all tasks.

    Args:
      state: donated.
      rules: the conditions of every task, [P] each for each part.
      knobs: scheduled numbers.

    Returns:
      The next state and what happened, part by part. Where `overflow` is set,
      `finite` is not or no group is informative, parameters and optimiser are
      those of before.
    """
    return self.update(state, self.index(), rules, knobs)

  def _play(
      self, part: Part, state: LearnerState, key, index, rules: Rules
  ) -> _Batch:
    """Plays and scores this device's groups of one part."""
    config, total = self.config, functools.partial(jax.lax.psum, axis_name=DATA)
    rollouts, buffer = rollout.play_groups(
        part.collective,
        part.policy,
        state.params,
        key,
        index,
        rules,
        frozen=state.frozen,
        group_size=config.group_size,
        chunk_size=config.chunk_size,
        capacity=config.max_decisions * config.group_size * index.shape[0],
    )
    returns = incentives.INCENTIVES[config.incentive](rollouts)
    returns = returns.reshape(-1, config.group_size)  # [p, G]
    scored = advantages.estimate(config.advantage, returns)

    in_play = jnp.repeat(scored.informative, config.group_size)  # [b]
    rows = buffer.rows
    used = rows.trainable & (jnp.arange(rows.agent.shape[0]) < buffer.count)
    agents = part.collective.num_agents * part.collective.config.islands
    counts = jnp.zeros((returns.size, agents), jnp.int32)
    counts = counts.at[rows.rollout, rows.agent].add(used)
    weight = losses.weights(
        config.aggregation,
        counts * in_play[:, None],
        config.constant,
        total,
    )
    return _Batch(
        rollouts=rollouts,
        buffer=buffer,
        returns=returns,
        scored=scored,
        weight=jnp.where(in_play[:, None], weight, 0.0),
        trained=jnp.sum(counts * in_play[:, None]),
    )

  def _update(self, state: LearnerState, index, rules, knobs: Knobs):
    """One device's part of an update, and the whole of its result."""
    config, total = self.config, functools.partial(jax.lax.psum, axis_name=DATA)
    key = jax.random.fold_in(state.key, state.step)
    state = state._replace(frozen=self._snapshot(state))
    batches = {
        name: self._play(part, state, key, index[name], rules[name])
        for name, part in self.parts.items()
    }

    def epoch(_, carry):
      params, opt_state, *_ = carry
      sums = {
          name: self._gradient(self.parts[name].policy, params, batch, knobs)
          for name, batch in batches.items()
      }
      sums = total(sums)
      grads = mixed(
          {name: s.grads for name, s in sums.items()},
          {name: part.weight for name, part in self.parts.items()},
      )
      params, opt_state = descend(
          self._optimizer, params, opt_state, grads, knobs.learning_rate
      )
      return params, opt_state, sums, optax.tree.norm(grads)

    first = carry = epoch(0, (state.params, state.opt_state))
    if config.epochs > 1:
      carry = jax.lax.fori_loop(1, config.epochs, epoch, carry)
    params, opt_state, sums, norm = carry

    overflow = jnp.stack([b.buffer.overflow for b in batches.values()])
    overflow = total(jnp.sum(overflow, dtype=jnp.int32)) > 0
    finite = all_finite((params, [s.loss for s in sums.values()], norm))
    informative = {
        name: total(jnp.sum(b.scored.informative))
        for name, b in batches.items()
    }
    keep = overflow | ~finite | (sum(informative.values()) == 0)
    choose = lambda old, new: jax.tree.map(
        lambda a, b: jnp.where(keep, a, b), old, new
    )
    gather = lambda x: jax.lax.all_gather(x, DATA, tiled=True)
    updates = {}
    for name, batch in batches.items():
      trained = jnp.maximum(total(batch.trained), 1)
      updates[name] = Update(
          rollouts=gather_rollouts(batch.rollouts),
          returns=gather(batch.returns),
          loss=sums[name].loss,
          entropy=sums[name].entropy / trained,
          grad_norm=norm,
          # Later epochs differ by what was learned.
          log_prob_gap=first[2][name].gap / trained,
          informative=informative[name] / self.parts[name].tasks,
          nonfinite_groups=total(jnp.sum(~batch.scored.finite)),
          overflow=overflow,
          finite=finite,
      )
    return (
        LearnerState(
            params=choose(state.params, params),
            opt_state=choose(state.opt_state, opt_state),
            step=state.step + 1,
            key=state.key,
            frozen=state.frozen,
        ),
        updates,
    )

  def _snapshot(self, state: LearnerState) -> Params | None:
    """The frozen parameters of this step: now and then, those of today."""
    every = self._organisation.refresh_every
    if state.frozen is None or not every:
      return state.frozen
    fresh = state.step % every == 0
    return jax.tree.map(
        lambda new, old: jnp.where(fresh, new, old), state.params, state.frozen
    )

  def _gradient(
      self, policy: Policy, params: Params, batch: _Batch, knobs: Knobs
  ) -> _Sums:
    """Sums over this device's decisions of one part, chunk by chunk."""
    config, size = self.config, self.config.chunk_size
    loss_of = losses.LOSSES[config.loss]
    buffer, weight = batch.buffer, batch.weight
    advantage = batch.scored.values.reshape(-1)

    def chunk_loss(params, index):
      rows = decisions.chunk(buffer, index, size)
      w = jnp.where(rows.trainable, weight[rows.rollout, rows.agent], 0.0)
      log_prob, entropy = policy.log_prob(params, rows.observation, rows.action)
      term = loss_of(
          log_prob, rows.log_prob, advantage[rows.rollout], config.clip
      )
      loss = jnp.sum(w * (term - knobs.entropy_bonus * entropy))
      trained = w > 0
      gap = jnp.sum(jnp.where(trained, jnp.abs(log_prob - rows.log_prob), 0.0))
      return loss, (jnp.sum(jnp.where(trained, entropy, 0.0)), gap)

    gradient = jax.value_and_grad(chunk_loss, has_aux=True)

    def body(index, sums: _Sums) -> _Sums:
      (loss, (entropy, gap)), grads = gradient(params, index)
      return jax.tree.map(jnp.add, sums, _Sums(grads, loss, entropy, gap))

    zero = jnp.float32(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    chunks = (buffer.count + size - 1) // size
    return jax.lax.fori_loop(0, chunks, body, _Sums(zeros, zero, zero, zero))
