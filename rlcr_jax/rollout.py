"""The packed event loop: collectives play, and only decisions are paid for.

Every collective has its own clock. One iteration takes up to C agents that are
free, from whichever collectives, evaluates the policy on them as one chunk, and
then moves every collective in which nobody waits any more to its own next
event. A chunk is therefore full as long as there is work for it, whatever the
teams' sizes, and a collective with more free agents than fit simply waits: its
clock stands still, and all who are free at one instant see the same state.
"""

import functools
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
from rlcr_jax import clock
from rlcr_jax import decisions
from rlcr_jax import observation
from rlcr_jax import roster
from rlcr_jax.collective import Collective
from rlcr_jax.collective import CollectiveState
from rlcr_jax.collective import Turn
from rlcr_jax.policies.base import Params
from rlcr_jax.policies.base import Policy
from rlcr_jax.roster import Rules


class Rollouts(NamedTuple):
  """B finished rollouts. Leading axis [B] unless stated."""

  progress: chex.Array  # float32: the anytime return at the deadline.
  time_ms: chex.Array  # int32, when the clock stopped.
  progress_ms: chex.Array  # int32, when progress last changed.
  turns: chex.Array  # [B, V] int32, turns begun.
  effective: chex.Array  # [B, V] int32, turns that had their effect.
  output_tokens: chex.Array  # [B, V] int32.
  team_size: chex.Array  # int32, most agents present at once.
  critical_steps: chex.Array  # int32, see `Collective.steps`.
  hired: chex.Array  # int32, agents that hirings have brought.
  productive: chex.Array  # int32, of those: with an effect on the world.
  curve: chex.Array  # [B, T] float32, progress at the times of `grid_ms`.
  iterations: chex.Array  # [] int32, of the event loop.
  decisions: chex.Array  # [] int32, taken in all B rollouts.


class _Carry(NamedTuple):
  states: CollectiveState  # [B].
  buffer: decisions.Buffer | None
  cursor: chex.Array  # [] int32, the flat seat that is served next.
  curve: chex.Array  # [B, T].
  iterations: chex.Array
  decisions: chex.Array


def _pick(
    waits: chex.Array, cursor: chex.Array, size: int
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Takes up to `size` waiting seats, round-robin from `cursor`.

  Serving in turns keeps all collectives about equally far, so that the chunks
  stay full until the end.

  Args:
    waits: [B * N] bool.
    cursor: [] int32.
    size: C.

  Returns:
    Flat seats [C] (valid in the first `count`), `count` [], and the rank of
    each waiting seat in the chunk, [B * N].
  """
  total = waits.shape[0]
  upto = jnp.cumsum(waits, dtype=jnp.int32)
  before_cursor = jnp.where(cursor > 0, upto[cursor - 1], 0)
  rank = (upto - 1 - before_cursor) % jnp.maximum(upto[-1], 1)
  wanted = (jnp.arange(size) + before_cursor) % jnp.maximum(upto[-1], 1) + 1
  seats = jnp.searchsorted(upto, wanted)
  count = jnp.minimum(upto[-1], size)
  return jnp.minimum(seats, total - 1), count, rank


def decide(
    collective: Collective,
    policy: Policy,
    params: Params,
    tasks: base.Task,
    rules: Rules,
    states: CollectiveState,
    seats: chex.Array,
    frozen: Params | None = None,
) -> tuple[Turn, decisions.Decision]:
  """The policy's decisions for some seats, and the turns that they begin.

  Args:
    collective: the world, the roster, the channels and the clock.
    policy: who decides.
    params: its parameters.
    tasks: leaves [B, ...].
    rules: [B] each.
    states: [B] collectives.
    seats: [C] int32, flat: rollout * N + agent.
    frozen: the parameters of those whom the rules freeze; None: the same.
  """
  b, agent = jnp.divmod(seats, collective.num_agents)
  row = lambda tree: jax.tree.map(lambda x: x[b], tree)
  mine = row(states)
  obs = jax.vmap(collective.observe)(row(tasks), row(rules), mine, agent)
  fold = jax.vmap(jax.random.fold_in)
  key = fold(states.agent_keys[b, agent], states.turn_index[b, agent])
  draw, spend = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
  trainable = ~rules.frozen[b] | (agent == 0)
  action, log_prob = policy.sample(params, draw, obs)
  if frozen is not None:
    other = policy.sample(frozen, draw, obs)
    action, log_prob = jax.tree.map(
        lambda x, y: jnp.where(trainable, x, y), (action, log_prob), other
    )
  tokens = jax.vmap(collective.sample_tokens)(spend, action.verb)
  duration_ms = jax.vmap(collective.duration_ms)(
      mine, agent, action.verb, tokens
  )
  legal = jax.vmap(functools.partial(observation.is_legal, collective.verbs))
  start_ms = states.clock_ms[b]
  turn = Turn(
      verb=action.verb,
      target=action.target,
      peer=jnp.take_along_axis(obs.peer_seat, action.peer[:, None], 1)[:, 0],
      symbol=action.symbol,
      legal=legal(obs, action),
      output_tokens=tokens,
      start_ms=start_ms,
      end_ms=start_ms + duration_ms,
  )
  decision = decisions.Decision(
      rollout=b,
      agent=agent,
      start_ms=start_ms,
      observation=obs,
      action=action,
      log_prob=log_prob,
      output_tokens=tokens,
      trainable=trainable,
  )
  return turn, decision


def play(
    collective: Collective,
    policy: Policy,
    params: Params,
    tasks: base.Task,
    rules: Rules,
    keys: jax.Array,
    *,
    chunk_size: int,
    capacity: int = 0,
    grid_ms: chex.Array | None = None,
    frozen: Params | None = None,
) -> tuple[Rollouts, decisions.Buffer | None]:
  """Plays B rollouts to their deadlines.

  A rollout's key is split into one for chance in its world and one for its
  agents; the key of a decision is `fold_in(fold_in(agents_key, agent),
  turn_index)`, so the rollouts do not depend on `chunk_size`, on B or on the
  devices.

  Args:
    collective: the world, the roster, the channels and the clock.
    policy: who decides.
    params: its parameters.
    tasks: leaves [B, ...].
    rules: [B] each.
    keys: [B] rollout keys.
    chunk_size: C, policy rows evaluated at once.
    capacity: decisions that the buffer holds; 0 records none.
    grid_ms: [T] int32, times at which progress is recorded.
    frozen: the parameters of those whom the rules freeze; None: the same.

  Returns:
    The rollouts, and the buffer of their decisions (None if `capacity` is 0).
    Where `buffer.overflow` is set, the loop stopped and nothing is usable.
  """
  grid_ms = jnp.zeros((0,), jnp.int32) if grid_ms is None else grid_ms
  batch, n = keys.shape[0], collective.num_agents
  chex.assert_equal(rules.deadline_ms.shape, (batch,))
  world_keys, agent_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
  states = jax.vmap(collective.reset)(tasks, rules, agent_keys)

  choose = lambda states, seats: decide(
      collective, policy, params, tasks, rules, states, seats, frozen
  )

  def body(carry: _Carry) -> _Carry:
    states = carry.states
    waits = jax.vmap(collective.ready)(states)  # [B, N]
    seats, count, rank = _pick(waits.reshape(-1), carry.cursor, chunk_size)
    turn, decision = choose(states, seats)
    rank = rank.reshape(batch, n)
    decides = waits & (rank < count)
    spread = lambda x: x[jnp.minimum(rank, chunk_size - 1)]
    states = jax.vmap(collective.act)(
        rules, states, decides, jax.tree.map(spread, turn)
    )
    may = ~jnp.any(waits & ~decides, axis=1)
    states, curve = advance(
        collective, tasks, rules, states, world_keys, may, carry.curve, grid_ms
    )
    buffer = carry.buffer
    if buffer is not None:
      buffer = decisions.append(buffer, decision, count)
    return _Carry(
        states=states,
        buffer=buffer,
        cursor=jnp.where(count > 0, (seats[count - 1] + 1) % (batch * n), 0),
        curve=curve,
        iterations=carry.iterations + 1,
        decisions=carry.decisions + count,
    )

  def unfinished(carry: _Carry) -> chex.Array:
    open_ = jnp.any(~carry.states.done)
    return open_ if carry.buffer is None else open_ & ~carry.buffer.overflow

  buffer = None
  if capacity:
    shapes = jax.eval_shape(
        choose, states, jax.ShapeDtypeStruct((chunk_size,), jnp.int32)
    )
    buffer = decisions.empty(shapes[1], capacity, chunk_size)
  zero = jnp.int32(0)
  curve = jnp.zeros((batch, grid_ms.shape[0]), jnp.float32)
  carry = _Carry(states, buffer, zero, curve, zero, zero)
  carry = jax.lax.while_loop(unfinished, body, carry)
  rollouts = summary(
      collective,
      tasks,
      carry.states,
      carry.curve,
      grid_ms,
      carry.iterations,
      carry.decisions,
  )
  return rollouts, carry.buffer


def advance(
    collective: Collective,
    tasks: base.Task,
    rules: Rules,
    states: CollectiveState,
    world_keys: jax.Array,
    may: chex.Array,
    curve: chex.Array,
    grid_ms: chex.Array,
) -> tuple[CollectiveState, chex.Array]:
  """Moves every collective that `may` [B] to its next event.

  Returns:
    The states, and the curve [B, T] of progress at the times `grid_ms` [T],
    filled in up to the new clocks.
  """
  then_ms, progress = states.clock_ms, collective.env.progress
  if collective.env.accrues:
    of_one = jax.vmap(progress, (None, None, 0))
    before = jax.vmap(of_one, (0, 0, None))(tasks, states.world, grid_ms)
  else:  # It held its value from the last event up to this one.
    before = jax.vmap(progress)(tasks, states.world, then_ms)[:, None]
  states, _ = jax.vmap(collective.advance)(
      tasks, rules, states, world_keys, may
  )
  held = grid_ms[None, :] >= then_ms[:, None]
  held &= grid_ms[None, :] < states.clock_ms[:, None]
  return states, jnp.where(held, before, curve)


def play_groups(
    collective: Collective,
    policy: Policy,
    params: Params,
    key: jax.Array,
    index: chex.Array,
    rules: Rules,
    *,
    group_size: int,
    **kwargs,
) -> tuple[Rollouts, decisions.Buffer | None]:
  """Plays G rollouts of each task, on as many islands as are configured.

  Args:
    collective: the world, the roster, the channels and the clock.
    policy: who decides.
    params: its parameters.
    key: a task's key is `fold_in(key, index)`, whichever others are played.
    index: [P] int32, the tasks.
    rules: [P] each.
    group_size: G.
    **kwargs: as in `play`.

  Returns:
    As `play`, with B = P * G rollouts; those of one task lie side by side. The
    agents of all islands of a rollout are numbered through.
  """
  tasks, rules, keys = group_inputs(collective, key, index, rules, group_size)
  rollouts, buffer = play(
      collective, policy, params, tasks, rules, keys, **kwargs
  )
  count = collective.config.islands
  if buffer is not None and count > 1:
    rows = buffer.rows
    which, island = jnp.divmod(rows.rollout, count)
    agent = island * collective.num_agents + rows.agent
    buffer = buffer._replace(rows=rows._replace(rollout=which, agent=agent))
  return merge_islands(rollouts, count), buffer


def merge_islands(rollouts: Rollouts, count: int) -> Rollouts:
  """One rollout of `count` islands, [B * count] to [B].

  The best island's progress counts, also before the end: one may take the best
  at any time. Turns, tokens and agents add up.
  """
  if count == 1:
    return rollouts
  apart = jax.tree.map(
      lambda x: x.reshape(len(x) // count, count, *x.shape[1:])
      if x.ndim
      else x,
      rollouts,
  )
  best = jnp.max(apart.progress, axis=1)
  late = jnp.where(
      apart.progress == best[:, None], apart.progress_ms, clock.FOREVER
  )
  total = lambda x: jnp.sum(x, axis=1)
  return apart._replace(
      progress=best,
      time_ms=jnp.max(apart.time_ms, axis=1),
      progress_ms=jnp.min(late, axis=1),
      turns=total(apart.turns),
      effective=total(apart.effective),
      output_tokens=total(apart.output_tokens),
      team_size=total(apart.team_size),
      critical_steps=jnp.max(apart.critical_steps, axis=1),
      hired=total(apart.hired),
      productive=total(apart.productive),
      curve=jnp.max(apart.curve, axis=1),
  )


def group_inputs(
    collective: Collective,
    key: jax.Array,
    index: chex.Array,
    rules: Rules,
    group_size: int,
) -> tuple[base.Task, Rules, jax.Array]:
  """Tasks, rules and keys of P groups, [P * G * islands] each; see above."""
  keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i)))(index)
  tasks = jax.vmap(collective.env.sample_task)(keys[:, 0])
  rollout_keys = jax.vmap(lambda k: jax.random.split(k, group_size))(keys[:, 1])
  repeat = lambda tree: jax.tree.map(
      lambda x: jnp.repeat(x, group_size, axis=0), tree
  )
  tasks, rules, keys = repeat(tasks), repeat(rules), rollout_keys.reshape(-1)
  count = collective.config.islands
  if count > 1:
    tasks = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), tasks)
    rules = roster.on_islands(rules, count)
    keys = jax.vmap(jax.random.fold_in)(jnp.repeat(keys, count), rules.island)
  return tasks, rules, keys


def summary(
    collective: Collective,
    tasks: base.Task,
    states: CollectiveState,
    curve: chex.Array,
    grid_ms: chex.Array,
    iterations: chex.Array,
    taken: chex.Array,
) -> Rollouts:
  """What B collectives that are done have to show; `taken` counts decisions."""
  progress = jax.vmap(collective.env.progress)(
      tasks, states.world, states.clock_ms
  )
  ended = grid_ms[None, :] >= states.clock_ms[:, None]
  return Rollouts(
      progress=progress,
      time_ms=states.clock_ms,
      progress_ms=states.progress_ms,
      turns=states.ledger.turns,
      effective=states.ledger.effective,
      output_tokens=jax.vmap(collective.spent_tokens)(states),
      team_size=states.peak_team,
      critical_steps=jax.vmap(collective.steps)(states),
      hired=states.ledger.hired,
      productive=states.ledger.productive,
      curve=jnp.where(ended, progress[:, None], curve),
      iterations=iterations,
      decisions=taken,
  )
