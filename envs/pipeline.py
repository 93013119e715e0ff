"""A data pipeline: shards to map, results to hand over, and a serial reduce.

Mapping the shards is the parallel part of the work. Their results are merged
into one ordered log, shard after shard, which is the serial part. To stitch a
result to the one before it, whoever merges must know both results. Whoever
mapped a shard knows its result; others must be told or fetch it, and fetching
takes longer than the mapping did.

Parallelism breaks in three places. Only one shard can be merged at a time
(Amdahl's serial share, `serial_fraction`); with `map_capacity` only so many
can be mapped at a time, and with `barrier` nothing is merged before all are
mapped; and results have to reach those who merge. With `coupling=0` results
are public. With `serial_fraction=0` as well merging costs next to nothing: as
long as neither a capacity nor a barrier is set, the work is then perfectly
parallel.
"""

import dataclasses
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

MAP, MERGE, FETCH = 0, 1, 2

_FEATURES = (
    *base.PLANNING_FEATURES,
    'mapped',
    'merged',
    'next',
    'records',
    'known',
)


class Task(NamedTuple):
  """One job."""

  records: chex.Array  # [M] int32, what merging each shard is worth.
  private: chex.Array  # [M] bool: is its result known by those who know only?


class World(NamedTuple):
  """The shared state of the job."""

  mapped: chex.Array  # [M] bool: the result exists.
  merged: chex.Array  # [] int32: the log holds shards 0 to `merged` - 1.


@dataclasses.dataclass(frozen=True)
class Pipeline(base.Environment):
  """Knobs of the pipeline. Progress = fraction of the records in the log.

  The fact of a shard is its result.
  """

  num_shards: int = 12  # M.
  serial_fraction: float = 0.2  # Of a shard's cost: merging; the rest: mapping.
  map_capacity: int = 0  # Shards that can be mapped at once; 0: all.
  barrier: bool = False  # Must all be mapped before the first is merged?
  coupling: float = 1.0  # Share of shards whose result is private.
  awareness: bool = False  # Are other agents' turns in flight visible?
  max_records: int = 3  # Records per shard: 1 to max_records.
  shard_tokens: float = 2500.0  # Median tokens of mapping and merging a shard.
  shard_tool_ms: int = 15_000  # Likewise.
  fetch_tokens: float = 1000.0  # Reading a result well enough to build on it.
  fetch_tool_ms: int = 35_000

  name = 'pipeline'

  def __post_init__(self):
    counts = 'num_shards', 'max_records'
    base.check_knobs(self, counts, shares=('serial_fraction', 'coupling'))
    lanes = self.map_capacity
    base.require(lanes >= 0, 'env.map_capacity', lanes, '>= 0')

  @property
  def num_targets(self) -> int:
    return self.num_shards

  @property
  def lanes(self) -> int:
    """C, how many shards can be mapped at once; shard i is in lane i mod C."""
    return min(self.map_capacity or self.num_shards, self.num_shards)

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    cost = lambda share: (
        max(share * self.shard_tokens, 1.0),
        round(share * self.shard_tool_ms),
    )
    return (
        base.VerbSpec('map', True, *cost(1.0 - self.serial_fraction), True),
        base.VerbSpec('merge', True, *cost(self.serial_fraction), True),
        base.own_verb(self, 'fetch', learns=True),
    )

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_records, key_private = jax.random.split(key)
    m = self.num_shards
    return Task(
        records=jax.random.randint(key_records, (m,), 1, self.max_records + 1),
        private=jax.random.uniform(key_private, (m,)) < self.coupling,
    )

  def reset(self, task: Task) -> World:
    return World(
        mapped=jnp.zeros_like(task.private),
        merged=jnp.zeros((), jnp.int32),
    )

  def _mappable(self, world: World) -> chex.Array:
    """[M] bool: not mapped, and first in its lane."""
    ids = np.arange(self.num_shards)
    ahead = np.maximum(ids - self.lanes, 0)
    return ~world.mapped & (world.mapped[ahead] | (ids < self.lanes))

  def _mergeable(self, world: World) -> chex.Array:
    """[M] bool: mapped, and the next in the log. At most one is."""
    can = world.mapped & (jnp.arange(self.num_shards) == world.merged)
    return can & jnp.all(world.mapped) if self.barrier else can

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    m = self.num_shards
    chex.assert_shape(knows, (m,))
    ids, mapped = jnp.arange(m), world.mapped
    merged = ids < world.merged
    known = mapped & (knows | ~task.private)
    lacks = task.private & ~known
    mappable, mergeable = self._mappable(world), self._mergeable(world)
    # Row i: the results that are stitched together when i is merged.
    needs = np.eye(m, dtype=bool) | np.eye(m, k=-1, dtype=bool)
    missing = jnp.sum(needs & lacks[None, :], axis=1) * (mapped & ~merged)
    waiting = needs & ~merged[:, None]  # [M, M]: i still needs j.
    if self.barrier:
      maps_left = jnp.sum(~mapped)
    else:
      upto = np.tri(m, dtype=bool)
      maps_left = jnp.sum(upto & ~mapped[None, :], axis=1)
    turns_left = (maps_left + ids + 1 - world.merged) * ~merged
    columns = (
        mappable | mergeable,
        (1.0 + mapped - ids / m) / 2.0,  # Merge before mapping; early first.
        task.records * ~merged * m / jnp.sum(task.records),
        turns_left,  # With those of the shards that must be merged before.
        missing,
        jnp.sum(needs & mergeable[:, None], axis=0) * lacks,
        jnp.sum(waiting, axis=0) * task.private,
        mapped,
        merged,
        ids == world.merged,
        task.records / self.max_records,
        known,
    )
    fetchable = mapped & task.private & ~knows
    return base.TargetView(
        features=base.features(columns),
        legal=base.table([mappable, mergeable & (missing == 0), fetchable]),
        relations=jnp.asarray(needs),
    )

  def reference_fact(
      self, features: chex.Array, relations: chex.Array
  ) -> chex.Array:
    """What makes a pair with a result that the agent knows.

    So each of the merges, which follow one another, finds an agent who is ready
    for it; and whoever has a pair already keeps free until its turn comes.
    """
    columns = features.T
    at = lambda name: columns[_FEATURES.index(name)]
    waits = (at('mapped') > 0) & (at('merged') == 0)
    pairs = waits & (at('missing') == 1)
    completes = jnp.sum(relations & pairs[:, None], axis=0)
    ready = jnp.sum(waits & (at('missing') == 0)) > 0
    return jnp.where(ready, -jnp.inf, completes.astype(jnp.float32))

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    """Of several at one shard, one is first; all who mapped it learn."""
    del key  # Chance has no part in it, once the task is drawn.
    agents, shards = knows.shape
    seats = jnp.arange(agents)
    maps = base.landed(turns, MAP, shards)
    fetches = base.landed(turns, FETCH, shards)
    first = base.first(maps) & ~world.mapped[None, :]
    new = jnp.sum(first, axis=0) > 0  # [M]
    # Legal when it began, so the shard is still the next, or merged meanwhile.
    merges = turns.lands & (turns.verb == MERGE)
    merges &= turns.target == world.merged
    merger = jnp.min(jnp.where(merges, seats, agents))
    learned = (maps | fetches) & task.private[None, :] & ~knows
    effective = jnp.any(first | learned, axis=1) | (seats == merger)
    world = World(
        mapped=world.mapped | new,
        merged=world.merged + (merger < agents),
    )
    return world, knows | learned, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    del now_ms  # What is in the log stays there.
    merged = jnp.arange(self.num_shards) < world.merged
    records = jnp.sum(task.records * merged)
    return (records / jnp.sum(task.records)).astype(jnp.float32)

  def finished(self, task: Task, world: World) -> chex.Array:
    del task
    return world.merged == self.num_shards

  def _ends_ms(self, agents: int, map_ms, merge_ms) -> chex.Array:
    """[M] int32: no schedule of so many agents merges shard i any earlier."""
    before = jnp.arange(self.num_shards)  # Shards, and merges, before i.
    at_once = min(agents, self.lanes)
    maps = self.num_shards if self.barrier else before + 1
    maps_ms = -(-maps // at_once) * map_ms
    work_ms = -(-((before + 1) * map_ms + before * merge_ms) // agents)
    begins_ms = jnp.maximum(maps_ms, work_ms)
    slack_ms = jax.lax.cummax(begins_ms - before * merge_ms)
    return slack_ms + (before + 1) * merge_ms

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """The log holds the shards whose earliest possible ends are in time.

    Before the merge of shard i begins, i + 1 maps (with a barrier all M) are
    done, of which `min(num_agents, lanes)` run at once; all agents together
    have done these i + 1 maps and i merges; and from there on merges follow
    one after the other. So the merge of shard k ends no earlier than the merge
    of any i <= k can begin, plus k - i + 1 merges. That results must be known
    is left out. The critical path is the same with no lack of agents.
    """
    costs = turn_ms[MAP], turn_ms[MERGE]
    in_time = self._ends_ms(num_agents, *costs) <= limit_ms
    records = jnp.sum(task.records * in_time)
    m = self.num_shards
    return base.Bounds(
        progress=(records / jnp.sum(task.records)).astype(jnp.float32),
        serial_ms=m * sum(costs),
        critical_path_ms=self._ends_ms(2 * m, *costs)[-1],
    )

  def describe(self, task: Task) -> str:
    task = jax.tree.map(np.asarray, task)
    m = self.num_shards
    lines = [
        f'A pipeline of {m} shards, {int(task.records.sum())} records. Map'
        ' every shard, in parallel; merge them into one log, in the order of'
        ' their numbers. Merging a shard takes its result and the one before'
        ' it.'
    ]
    if self.lanes < m:
      lines[0] += (
          f' Only {self.lanes} can be mapped at once: each waits for the one'
          f' {self.lanes} before it.'
      )
    if self.barrier:
      lines[0] += ' Nothing is merged before all are mapped.'
    for i in range(m):
      seen = 'private' if task.private[i] else 'public'
      lines.append(
          f'shard {i}: {task.records[i]} records, its result is {seen}'
      )
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    mapped, private = np.asarray(world.mapped), np.asarray(task.private)
    known, legal = mapped & (np.asarray(knows) | ~private), np.asarray(legal)
    merged = int(world.merged)
    lines = []
    for i in range(self.num_shards):
      state = 'mapped' if mapped[i] else 'not mapped'
      notes = ['merged' if i < merged else state]
      notes += ['next in the log'] * (i == merged)
      notes += ['result known'] * bool(known[i])
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'shard {i}: {", ".join(notes)}')
    return '\n'.join(lines)
