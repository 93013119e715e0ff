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


def gather_rollouts(rollouts: rollout.Rollouts) -> rollout.Rollouts:
  """The rollouts of all devices, on every device; counts are added up."""
  return jax.tree.map(
      lambda x: jax.lax.all_gather(x, DATA, tiled=True)
      if x.ndim
      else jax.lax.psum(x, DATA),
      rollouts,
  )


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
      collective: Collective,
      policy: Policy,
      config: RlcrConfig,
      mesh: Mesh | None = None,
  ):
    self.collective, self.policy, self.config = collective, policy, config
    self.mesh = mesh or default_mesh(config.tasks)
    self._optimizer = config.optimizer()
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
    params = self.policy.init(key_params)
    state = LearnerState(
        params, self._optimizer.init(params), jnp.int32(0), key_run
    )
    replicated = jax.sharding.NamedSharding(self.mesh, PartitionSpec())
    return jax.device_put(state, replicated)

  def step(
      self, state: LearnerState, rules: Rules, knobs: Knobs
  ) -> tuple[LearnerState, Update]:
    """One update of all P tasks.

    Args:
      state: donated.
      rules: [P] each: the conditions of every task.
      knobs: scheduled numbers.

    Returns:
      The next state and what happened. Where `overflow` is set, `finite` is
      not or no group is informative, parameters and optimiser are those of
      before.
    """
    return self.update(state, jnp.arange(self.config.tasks), rules, knobs)

  def _update(self, state: LearnerState, index, rules: Rules, knobs: Knobs):
    """One device's part of an update, and the whole of its result."""
    config, total = self.config, functools.partial(jax.lax.psum, axis_name=DATA)
    key = jax.random.fold_in(state.key, state.step)
    rollouts, buffer = rollout.play_groups(
        self.collective,
        self.policy,
        state.params,
        key,
        index,
        rules,
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
    counts = jnp.zeros((returns.size, self.collective.num_agents), jnp.int32)
    counts = counts.at[rows.rollout, rows.agent].add(used)
    weight = losses.weights(
        config.aggregation,
        counts * in_play[:, None],
        config.constant,
        total,
    )
    weight = jnp.where(in_play[:, None], weight, 0.0)

    def epoch(_, carry):
      params, opt_state, *_ = carry
      sums = self._gradient(
          params, buffer, weight, scored.values.reshape(-1), knobs
      )
      sums = total(sums)
      params, opt_state = descend(
          self._optimizer, params, opt_state, sums.grads, knobs.learning_rate
      )
      return params, opt_state, sums, optax.tree.norm(sums.grads)

    carry = epoch(0, (state.params, state.opt_state))
    gap = carry[2].gap  # Later epochs differ by what was learned.
    if config.epochs > 1:
      carry = jax.lax.fori_loop(1, config.epochs, epoch, carry)
    params, opt_state, sums, norm = carry

    overflow = total(buffer.overflow.astype(jnp.int32)) > 0
    finite = all_finite((params, sums.loss, norm))
    informative = total(jnp.sum(scored.informative))
    keep = overflow | ~finite | (informative == 0)
    choose = lambda old, new: jax.tree.map(
        lambda a, b: jnp.where(keep, a, b), old, new
    )
    trained = jnp.maximum(total(jnp.sum(counts * in_play[:, None])), 1)
    gather = lambda x: jax.lax.all_gather(x, DATA, tiled=True)
    groups = jax.lax.psum(index.shape[0], DATA)
    return LearnerState(
        params=choose(state.params, params),
        opt_state=choose(state.opt_state, opt_state),
        step=state.step + 1,
        key=state.key,
    ), Update(
        rollouts=gather_rollouts(rollouts),
        returns=gather(returns),
        loss=sums.loss,
        entropy=sums.entropy / trained,
        grad_norm=norm,
        log_prob_gap=gap / trained,
        informative=informative / groups,
        nonfinite_groups=total(jnp.sum(~scored.finite)),
        overflow=overflow,
        finite=finite,
    )

  def _gradient(
      self,
      params: Params,
      buffer: decisions.Buffer,
      weight: chex.Array,
      advantage: chex.Array,
      knobs: Knobs,
  ) -> _Sums:
    """Sums over this device's decisions, chunk by chunk.

    Args:
      params: of the policy.
      buffer: of this device.
      weight: [b, N] float32, of each decision of an agent.
      advantage: [b] float32.
      knobs: scheduled numbers.
    """
    config, size = self.config, self.config.chunk_size
    loss_of = losses.LOSSES[config.loss]

    def chunk_loss(params, index):
      rows = decisions.chunk(buffer, index, size)
      w = jnp.where(rows.trainable, weight[rows.rollout, rows.agent], 0.0)
      log_prob, entropy = self.policy.log_prob(
          params, rows.observation, rows.action
      )
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
