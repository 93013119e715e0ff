"""A search: hidden finds, and clues that narrow where others may lie.

Places are grouped in regions. A few regions are rich and hold all finds, the
others hold none, and nobody is told which. Whoever probes a place sees what is
there and may come upon a clue, which says of one other region whether it is
rich. So every probe, also a blank one, says something about where to go next.

Parallelism breaks in two places. Two agents that do not know what each other
have probed may search one place twice. And the next probe is only as good as
what is known of the last ones: many probes at once are drawn from less
knowledge than the same number one after the other, and agents that keep their
finds, blanks and clues to themselves search poor regions that others could
have named. With `coupling=0` everybody knows all that was ever found out. With
`region_size=num_places` as well there is one region, in which all open places
are equally likely: the work is then perfectly parallel.
"""

import dataclasses
import math
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

PROBE = 0

_FEATURES = (
    *base.PLANNING_FEATURES,
    'find',
    'blank',
    'clue',
    'region_rich',
    'region_poor',
    'region_finds',
    'region_blanks',
)


class Task(NamedTuple):
  """One search. All but `private` is hidden until it is found out."""

  rich: chex.Array  # [R] bool.
  find: chex.Array  # [M] bool: what a probe of the place finds.
  clue: chex.Array  # [M, R] bool: its clue is about this region, if it has one.
  private: chex.Array  # [M] bool: is it seen by those who know only?


class World(NamedTuple):
  """What was searched."""

  probed: chex.Array  # [M] bool.


class _Map(NamedTuple):
  """What one agent can tell from the facts that it knows."""

  known: chex.Array  # [M] bool: it knows what this place holds.
  rich: chex.Array  # [R] bool: surely rich.
  poor: chex.Array  # [R] bool: surely poor.
  finds: chex.Array  # [R] int32, known ones.
  blanks: chex.Array  # [R] int32, known ones.
  chance: chex.Array  # [M] float32, that an open place holds a find; else 0.


def _share_of_subsets(
    weights: chex.Array, size: chex.Array, most: int
) -> chex.Array:
  """How likely each of R items is in a subset, drawn by its product of weights.

  With e(k) the sum of the products of all subsets of k of the *other* items,
  which one polynomial per item yields, item i is in a subset of k + 1 with a
  chance proportional to weights[i] * e(k).

  Args:
    weights: [R] float32, >= 0.
    size: [] int32, of the subset, at most `most`.
    most: the largest size.

  Returns:
    [R] float32, whose sum is `size`; zeros if that is 0.
  """
  count, degree = len(weights), jnp.arange(most)[None, :]
  sums = jnp.broadcast_to((degree == 0).astype(jnp.float32), (count, most))
  other = weights[None, :] * ~jnp.eye(count, dtype=bool)  # [R, R]
  for j in range(count):
    higher = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
    sums += other[:, j : j + 1] * higher
  at_size = jnp.sum(jnp.where(degree == size - 1, sums, 0.0), axis=1)
  mass = weights * at_size
  return size * mass / jnp.maximum(jnp.sum(mass), jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Search(base.Environment):
  """Knobs of the search. Progress = fraction of the finds that are found.

  The fact of a place is its content and its clue.
  """

  num_places: int = 48  # M.
  region_size: int = 6  # S; place i is in region i // region_size.
  num_rich: int = 2  # Of the R = M / S regions.
  per_region: int = 3  # Finds in each rich region.
  clue_share: float = 0.3  # Of the places, if there is another region.
  coupling: float = 1.0  # Share of places whose fact is private.
  awareness: bool = False  # Are other agents' turns in flight visible?
  probe_tokens: float = 2500.0  # Median output tokens of a probe.
  probe_tool_ms: int = 10_000

  name = 'search'

  def __post_init__(self):
    need = base.require
    base.check_knobs(self, ('num_places',), ('clue_share', 'coupling'))
    need(
        self.region_size >= 1 and self.num_places % self.region_size == 0,
        'env.region_size',
        self.region_size,
        f'a divisor of num_places={self.num_places}',
    )
    need(
        1 <= self.num_rich <= self.num_regions,
        'env.num_rich',
        self.num_rich,
        f'from 1 to num_places // region_size={self.num_regions}',
    )
    need(
        1 <= self.per_region <= self.region_size,
        'env.per_region',
        self.per_region,
        f'from 1 to region_size={self.region_size}',
    )

  @property
  def num_targets(self) -> int:
    return self.num_places

  @property
  def num_regions(self) -> int:
    """R."""
    return self.num_places // self.region_size

  @property
  def num_finds(self) -> int:
    """K."""
    return self.num_rich * self.per_region

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    return (base.own_verb(self, 'probe'),)

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_rich, key_find, key_clue, key_about, key_private = jax.random.split(
        key, 5
    )
    m, s, r = self.num_places, self.region_size, self.num_regions
    rich = jax.random.permutation(key_rich, r) < self.num_rich
    rank = jnp.broadcast_to(jnp.arange(s)[None, :], (r, s))
    rank = jax.random.permutation(key_find, rank, axis=1, independent=True)
    find = rich[:, None] & (rank < self.per_region)
    has_clue = jax.random.uniform(key_clue, (m,)) < self.clue_share
    ahead = jax.random.randint(key_about, (m,), 1, max(r, 2))
    about = (self._regions() + ahead) % r  # Any region but its own.
    clue = about[:, None] == jnp.arange(r)[None, :]
    return Task(
        rich=rich,
        find=find.reshape(m),
        clue=clue & has_clue[:, None] & (r > 1),
        private=jax.random.uniform(key_private, (m,)) < self.coupling,
    )

  def _regions(self) -> chex.Array:
    """[M] int32, the region of each place."""
    return jnp.arange(self.num_places) // self.region_size

  def _per_region(self, places: chex.Array) -> chex.Array:
    """Counts places [M] bool by region, [R] int32."""
    rows = places.reshape(self.num_regions, self.region_size)
    return jnp.sum(rows, axis=1, dtype=jnp.int32)

  def _per_place(self, regions: chex.Array) -> chex.Array:
    """Repeats what holds of a region [R] for all its places, [M]."""
    return jnp.repeat(regions, self.region_size)

  def reset(self, task: Task) -> World:
    return World(probed=jnp.zeros_like(task.find))

  def _map(self, task: Task, world: World, knows: chex.Array) -> _Map:
    """What follows from the known facts; what is hidden has no part in it.

    A region is known to be rich by a find or a clue, to be poor by a clue or by
    more blanks than a rich one has, and either if there are only such regions
    left. Of the others, some number is rich: Bayes' rule gives the chances.
    Within a region all open places are equally likely.
    """
    s, t = self.region_size, self.per_region
    known = world.probed & (knows | ~task.private)
    finds = self._per_region(known & task.find)
    blanks = self._per_region(known & ~task.find)
    told = jnp.sum(task.clue & known[:, None], axis=0) > 0  # [R]
    rich = (finds > 0) | (told & task.rich)
    poor = (told & ~task.rich) | (blanks > s - t)
    left = self.num_rich - jnp.sum(rich)
    others = self.num_regions - jnp.sum(rich | poor)
    # The chance of just these blanks in a rich region; they are sure elsewhere.
    ways = [math.comb(s - blank, t) / math.comb(s, t) for blank in range(s + 1)]
    likely = jnp.array(ways, jnp.float32)[blanks] * ~(rich | poor)
    only_poor, only_rich = ~rich & (left == 0), ~poor & (left == others)
    rich, poor = rich | only_rich, poor | only_poor
    posterior = _share_of_subsets(likely, left, self.num_rich)
    posterior = jnp.where(rich, 1.0, jnp.where(poor, 0.0, posterior))
    chance = posterior * (t - finds) / jnp.maximum(s - finds - blanks, 1)
    return _Map(
        known=known,
        rich=rich,
        poor=poor,
        finds=finds,
        blanks=blanks,
        chance=self._per_place(chance) * ~known,
    )

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    m = self.num_places
    chex.assert_shape(knows, (m,))
    seen = self._map(task, world, knows)
    open_ = ~seen.known
    unknown = self._per_region(open_)  # [R]
    helps = jnp.sum(jnp.where(task.clue, unknown[None, :], 0), axis=1)
    helps += self._per_place(unknown)
    wanted = helps * (seen.known & task.private & ~self.finished(task, world))
    none = jnp.zeros((m,))
    # Of equally likely places, the first of each region, then the second.
    within = jnp.arange(m) % self.region_size / self.region_size
    columns = (
        open_,
        seen.chance - 1e-4 * within,
        seen.chance * m / self.num_finds,
        open_,
        none,
        none,
        wanted,
        seen.known & task.find,
        seen.known & ~task.find,
        seen.known & (jnp.sum(task.clue, axis=1) > 0),
        self._per_place(seen.rich),
        self._per_place(seen.poor),
        self._per_place(seen.finds / self.region_size),
        self._per_place(seen.blanks / self.region_size),
    )
    region = self._regions()
    near = region[:, None] == region[None, :]
    return base.TargetView(
        features=base.features(columns),
        legal=open_[None, :],
        relations=near & ~jnp.eye(m, dtype=bool),
    )

  def reference_verb(
      self, features: chex.Array, legal: chex.Array
  ) -> chex.Array:
    """Probes where there may be a find: no region that is poor or exhausted."""
    hopeful = features[:, _FEATURES.index('value')] > 0
    return jnp.where(legal[PROBE] & hopeful, PROBE, -1)

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    """All learn what they probed; of several at one new place, one is first."""
    del key  # Chance has no part in it, once the task is drawn.
    probes = base.landed(turns, PROBE, self.num_places)
    first = base.first(probes) & ~world.probed[None, :]
    learned = probes & task.private[None, :] & ~knows
    effective = jnp.any(first | learned, axis=1)
    world = World(probed=world.probed | (jnp.sum(first, axis=0) > 0))
    return world, knows | learned, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    del now_ms  # What is found stays found.
    found = jnp.sum(task.find & world.probed)
    return (found / self.num_finds).astype(jnp.float32)

  def finished(self, task: Task, world: World) -> chex.Array:
    return jnp.all(world.probed | ~task.find)

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """Luck: every probe is a find, and no two agents probe one place.

    At most `num_agents * (limit_ms // turn_ms)` probes land, and each finds at
    most one of the K finds. Where to look is known to nobody, but may be
    guessed, so nothing less holds of every search. All finds can be probed at
    once, so the critical path is one probe.
    """
    del task
    probe_ms = turn_ms[PROBE]
    finds = jnp.minimum(num_agents * (limit_ms // probe_ms), self.num_finds)
    return base.Bounds(
        progress=(finds / self.num_finds).astype(jnp.float32),
        serial_ms=self.num_finds * probe_ms,
        critical_path_ms=probe_ms,
    )

  def describe(self, task: Task) -> str:
    private = np.asarray(task.private)
    lines = [
        f'A search of {self.num_places} places in {self.num_regions} regions'
        f' for {self.num_finds} finds. {self.num_rich} of the regions are rich'
        f' and hold {self.per_region} finds each, the others hold none. A probe'
        ' shows what a place holds and may give a clue about another region.'
    ]
    for i in range(self.num_places):
      seen = 'private' if private[i] else 'public'
      lines.append(
          f'place {i}: in region {i // self.region_size}, what it holds is'
          f' {seen}'
      )
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    seen = jax.tree.map(np.asarray, self._map(task, world, knows))
    task, legal = jax.tree.map(np.asarray, (task, legal))
    kind = lambda rich: 'rich' if rich else 'poor'
    lines = []
    for i in range(self.num_places):
      region = i // self.region_size
      if seen.known[i]:
        notes = ['a find' if task.find[i] else 'blank']
        notes += [
            f'its clue: region {j} is {kind(task.rich[j])}'
            for j in np.flatnonzero(task.clue[i])
        ]
      else:
        notes = ['not known', f'{100 * seen.chance[i]:.0f}% likely a find']
      if seen.rich[region] or seen.poor[region]:
        notes.append(f'region {region} is {kind(seen.rich[region])}')
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'place {i}: {", ".join(notes)}')
    return '\n'.join(lines)
