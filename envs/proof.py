"""A theorem, and lemmas from which it may be proved in more than one way.

Lemmas lie in layers, and the theorem is alone on top. A lemma follows from any
one of its routes; a route needs all of a few lemmas of the layer below. Whoever
attempts a lemma succeeds with a chance that everybody knows, and then has
proved it or, as some lemmas are false, refuted it.

Parallelism breaks in three places. A lemma waits for the proofs that a route of
it needs, so layers come one after the other. Everybody hears that a lemma is
proved, but whoever builds on it must know its proof. And nobody hears that a
lemma was refuted: those who are not told explore the same dead end again, and
build towards routes that lead nowhere. With `coupling=0` everybody knows all
that was ever found out. With `num_lemmas=1` as well there is the theorem only:
as chances are independent, attempts at once are then worth as many one after
the other, and the work is perfectly parallel.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

ATTEMPT, STUDY = 0, 1
_BITS = 32  # Of a word.

_FEATURES = (
    *base.PLANNING_FEATURES,
    'chance',
    'proved',
    'refuted',
    'known',
    'height',
    'routes_open',
    'theorem',
)


class Task(NamedTuple):
  """One theorem. All but `true` and `credit` is public.

  A set of lemmas is W words of 32 bits, by which `view` is several times as
  fast as by masks [M]; see `pack` and `unpack`.
  """

  routes: chex.Array  # [W, A, M] uint32: the lemmas of each; none: no route.
  layer: chex.Array  # [M] int32, from 0 to `depth`, that of the theorem.
  chance: chex.Array  # [M] float32, that an attempt succeeds.
  private: chex.Array  # [M] bool: is its fact known by those who know only?
  true: chex.Array  # [M] bool: an attempt may prove it; else refute it.
  credit: chex.Array  # [M] float32, progress for its proof.


class World(NamedTuple):
  """What is resolved."""

  proved: chex.Array  # [M] bool; public.
  refuted: chex.Array  # [M] bool, by anybody.


class _State(NamedTuple):
  """What one agent can tell from the facts that it knows."""

  known: chex.Array  # [M] bool: it knows the proof or the refutation.
  dead: chex.Array  # [M] bool: it knows that it is refuted.
  open: chex.Array  # [M] bool: unresolved, and a route of it is ready.
  ready: chex.Array  # [A, M] bool: routes whose lemmas are all proved.
  lacks: chex.Array  # [A, M] int32, proofs on each route that it must learn.
  missing: chex.Array  # [M] int32, fewest over the routes that are ready.


def _places(rank: int) -> chex.Array:
  """The numbers of the bits of a word, along the last of `rank` axes."""
  return jnp.arange(_BITS, dtype=jnp.uint32).reshape((1,) * (rank - 1) + (-1,))


def pack(lemmas: chex.Array) -> chex.Array:
  """Sets of lemmas [..., M] bool as words [W, ...] uint32."""
  bits = jnp.uint32(1) << _places(lemmas.ndim)
  words = []
  for start in range(0, lemmas.shape[-1], _BITS):
    part = lemmas[..., start : start + _BITS]
    bit = jnp.where(part, bits[..., : part.shape[-1]], jnp.uint32(0))
    words.append(jnp.sum(bit, axis=-1, dtype=jnp.uint32))
  return jnp.stack(words)


def unpack(words: chex.Array, lemmas: int) -> chex.Array:
  """The sets [..., M] bool of words [W, ...], for M `lemmas`."""
  masks = [(word[..., None] >> _places(words.ndim)) & 1 for word in words]
  return jnp.concatenate(masks, axis=-1)[..., :lemmas] > 0


def _exist(routes: chex.Array) -> chex.Array:
  """[A, M] bool: there is such a route."""
  return jnp.sum(routes, axis=0) > 0


def _count(routes: chex.Array, lemmas: chex.Array) -> chex.Array:
  """[A, M] int32, how many of some lemmas [M] bool are on each route."""
  common = routes & pack(lemmas)[:, None, None]
  return jnp.sum(jax.lax.population_count(common), axis=0, dtype=jnp.int32)


def _total(routes: chex.Array, numbers: chex.Array) -> chex.Array:
  """Sums numbers of lemmas, [M] float32, over each route, [A, M] float32.

  Term by term: CPUs vectorise these, and not a sum over an axis.
  """
  on = lambda j: routes[j // _BITS] & jnp.uint32(1 << j % _BITS) != 0
  terms = (jnp.where(on(j), x, 0.0) for j, x in enumerate(numbers))
  return functools.reduce(jnp.add, terms)


def _union(routes: chex.Array, chosen: chex.Array) -> chex.Array:
  """[M, M] bool: row i names the lemmas on its routes `chosen` [A, M] bool."""
  some = jnp.where(chosen[None, :, :], routes, jnp.uint32(0))
  ways = [some[:, a] for a in range(some.shape[1])]
  return unpack(functools.reduce(jnp.bitwise_or, ways), routes.shape[2])


def _largest(numbers: chex.Array, axis: int) -> chex.Array:
  """The maximum of floats >= 0, which are in the order of their bits.

  CPUs vectorise a maximum of integers, and not of floats: they may be no
  numbers.
  """
  bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
  return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axis), jnp.float32)


def _route_costs(
    routes: chex.Array,
    effort: chex.Array,
    proved: chex.Array,
    dead: chex.Array,
    depth: int,
) -> tuple[chex.Array, chex.Array]:
  """Attempts, on average, that the unproved lemmas of each route need.

  A lemma that two others use is counted twice, so the costs are those of trees.

  Args:
    routes: [W, A, M] uint32.
    effort: [M] float32, attempts that a lemma needs.
    proved: [M] bool, lemmas that cost nothing any more.
    dead: [M] bool, lemmas that cannot be proved.
    depth: layer of the theorem.

  Returns:
    [A, M] float32, and [A, M] bool: does a way lead there? If not, or where
    there is no route, the costs are infinite.
  """
  exist = _exist(routes)
  founded = jnp.sum(exist, axis=0) == 0  # Needs nothing.
  own = jnp.where(dead, jnp.inf, effort)
  cost = jnp.where(proved, 0.0, own)
  for _ in range(max(depth, 1)):
    by_route = jnp.where(exist, _total(routes, cost), jnp.inf)
    # Not by `by_route`, which XLA would compute anew wherever it is of use.
    alive = exist & (_count(routes, jnp.isinf(cost)) == 0)
    best = jnp.where(founded, 0.0, jnp.min(by_route, axis=0))
    cost = jnp.where(proved, 0.0, own + best)
  return by_route, alive


def _pull_down(
    routes: chex.Array, pull: chex.Array, top: chex.Array, depth: int
) -> chex.Array:
  """How strongly each lemma is pulled at from the theorem down, [M] float32.

  Args:
    routes: [W, A, M] uint32.
    pull: [A, M] float32, how much of its own pull a lemma puts on each route.
    top: [M] float32, the pull at the theorem, and 0.
    depth: layer of the theorem.
  """
  on = unpack(routes, routes.shape[2])  # [A, M, M]
  along = _largest(jnp.where(on, pull[:, :, None], 0.0), axis=0)
  pulled = top
  for _ in range(depth):
    pulled = _largest(along * pulled[:, None], axis=0)
    pulled = jnp.maximum(top, pulled)
  return pulled


@dataclasses.dataclass(frozen=True)
class Proof(base.Environment):
  """Knobs of the proof. Progress = share of the cheapest proof that is done.

  The fact of a lemma is its proof or its refutation.
  """

  num_lemmas: int = 22  # M, with the theorem.
  width: int = 7  # Lemmas per layer, below the theorem.
  alternatives: int = 2  # A, most routes to a lemma.
  min_premises: int = 2  # Lemmas that a route needs: from here
  max_premises: int = 3  # to here, if so many are true in the layer below.
  false_share: float = 0.3  # Chance that a lemma is false; never a whole layer.
  min_chance: float = 0.6  # Attempts succeed with a chance from here to 1.
  coupling: float = 1.0  # Share of lemmas whose fact is private.
  awareness: bool = False  # Are other agents' turns in flight visible?
  attempt_tokens: float = 2500.0  # Median output tokens of an attempt.
  attempt_tool_ms: int = 2000
  study_tokens: float = 1000.0  # Reading a proof well enough to build on it.
  study_tool_ms: int = 35_000

  name = 'proof'

  def __post_init__(self):
    counts = 'num_lemmas', 'alternatives', 'min_premises'
    base.check_knobs(self, counts, shares=('false_share', 'coupling'))
    base.require(
        1 <= self.width <= self.num_lemmas,
        'env.width',
        self.width,
        f'from 1 to num_lemmas={self.num_lemmas}',
    )
    base.require(
        self.max_premises >= self.min_premises,
        'env.max_premises',
        self.max_premises,
        f'>= min_premises={self.min_premises}',
    )
    base.require(
        0.0 < self.min_chance <= 1.0,
        'env.min_chance',
        self.min_chance,
        'above 0 and at most 1',
    )

  @property
  def num_targets(self) -> int:
    return self.num_lemmas

  @property
  def depth(self) -> int:
    """Number of layers below the theorem."""
    return -(-(self.num_lemmas - 1) // self.width)

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    return (
        base.own_verb(self, 'attempt'),
        base.own_verb(self, 'study', learns=True),
    )

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_order, key_true, key_routes, key_chance, key_private = jax.random.split(
        key, 5
    )
    m = self.num_lemmas
    order = jax.random.permutation(key_order, m)
    # A remainder makes the first layer the small one. The theorem is the last.
    layer = (order + self.depth * self.width - (m - 1)) // self.width  # [M]
    luck = jax.random.uniform(key_true, (m,))
    same = layer[:, None] == layer[None, :]
    luckiest = luck == jnp.max(jnp.where(same, luck[None, :], 0.0), axis=1)
    true = luckiest | (luck >= self.false_share)
    chance = jax.random.uniform(
        key_chance, (m,), minval=self.min_chance, maxval=1.0
    )
    routes = self._sample_routes(key_routes, layer, true)  # [M, A, M]
    routes = pack(routes.swapaxes(0, 1))
    return Task(
        routes=routes,
        layer=layer,
        chance=chance,
        private=jax.random.uniform(key_private, (m,)) < self.coupling,
        true=true,
        credit=self._credit(routes, layer, chance, true),
    )

  def _sample_routes(
      self, key: jax.Array, layer: chex.Array, true: chex.Array
  ) -> chex.Array:
    """Draws routes [M, A, M] so that every true lemma has one of true lemmas.

    A route that contains another one of its lemma is left out, so there may be
    fewer than `alternatives`.
    """
    key_size, key_draw, key_place = jax.random.split(key, 3)
    m, a = self.num_lemmas, self.alternatives
    one_down = layer[:, None] == layer[None, :] + 1  # [M, M]
    sound = true[:, None] & (jnp.arange(a) == 0)[None, :]  # [M, A]
    may = one_down[:, None, :] & (true[None, None, :] | ~sound[:, :, None])
    draw = jax.random.uniform(key_draw, (m, a, m))
    draw = jnp.where(may, draw, 1.0)
    # Of equal draws the first is less. It is faster than to sort them.
    one, other = draw[:, :, :, None], draw[:, :, None, :]
    less = (other < one) | (
        (other == one) & np.tri(m, k=-1, dtype=bool)[None, None]
    )
    rank = jnp.sum(less, axis=3)
    size = jax.random.randint(
        key_size, (m, a), self.min_premises, self.max_premises + 1
    )
    # For all routes alike: a shorter one must not tell that it is sound.
    size = jnp.minimum(size, jnp.sum(one_down & true[None, :], axis=1)[:, None])
    routes = may & (rank < size[:, :, None])
    # Nor must its place.
    place = jnp.argsort(jax.random.uniform(key_place, (m, a)))
    routes = jnp.take_along_axis(routes, place[:, :, None], axis=1)
    one, other = routes[:, :, None, :], routes[:, None, :, :]
    contains = jnp.all(one | ~other, axis=3)  # [M, A, A]
    # Of equal ones the first stays, and none is compared with itself.
    stays = jnp.triu(contains.mT) | jnp.eye(a, dtype=bool)[None, :, :]
    needless = jnp.any(contains & ~stays, axis=2)
    return routes & ~needless[:, :, None]

  def _credit(
      self,
      routes: chex.Array,
      layer: chex.Array,
      chance: chex.Array,
      true: chex.Array,
  ) -> chex.Array:
    """Shares [M] of the cheapest proof, by attempts that its lemmas need."""
    effort, proved = 1.0 / chance, jnp.zeros_like(true)
    costs, _ = _route_costs(routes, effort, proved, ~true, self.depth)
    cheapest = jnp.argmin(costs, axis=0)[None, :]
    takes = jnp.arange(self.alternatives)[:, None] == cheapest
    top = (layer == self.depth).astype(jnp.float32)
    shares = effort * _pull_down(
        routes, takes.astype(jnp.float32), top, self.depth
    )
    return shares / jnp.sum(shares)

  def reset(self, task: Task) -> World:
    none = jnp.zeros_like(task.true)
    return World(proved=none, refuted=none)

  def _state(self, task: Task, world: World, knows: chex.Array) -> _State:
    """What follows from the known facts; what is hidden has no part in it."""
    resolved = world.proved | world.refuted
    known = resolved & (knows | ~task.private)
    dead = world.refuted & known
    exist = _exist(task.routes)
    ready = exist & (_count(task.routes, ~world.proved) == 0)
    startable = (jnp.sum(ready, axis=0) > 0) | (jnp.sum(exist, axis=0) == 0)
    lacks = _count(task.routes, task.private & ~known)
    most = jnp.iinfo(jnp.int32).max
    fewest = jnp.min(jnp.where(ready, lacks, most), axis=0)
    return _State(
        known=known,
        dead=dead,
        open=~world.proved & ~dead & startable,
        ready=ready,
        lacks=lacks,
        missing=jnp.where(fewest == most, 0, fewest),
    )

  def _need(
      self,
      task: Task,
      world: World,
      state: _State,
      costs: chex.Array,
      alive: chex.Array,
  ) -> chex.Array:
    """How much the theorem needs each unresolved lemma, [M] from 0 to 1.

    It is 1 on the way to the theorem that seems the cheapest, less where
    another route to the same lemma is cheaper, and 0 where no way leads through
    the lemma any more. Of a lemma that can be attempted no more routes are
    needed.
    """
    waits = ~(world.proved | state.dead | state.open)
    alive &= waits[None, :]  # [A, M]
    costs = jnp.where(alive, costs, jnp.inf)
    best = jnp.min(costs, axis=0, keepdims=True)
    share = jnp.where(alive, best, 0.0) / jnp.where(alive, costs, 1.0)
    top = (task.layer == self.depth).astype(jnp.float32)
    need = _pull_down(task.routes, share, top, self.depth)
    return need * ~(world.proved | state.dead)

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    m, routes = self.num_lemmas, task.routes
    chex.assert_shape(knows, (m,))
    state = self._state(task, world, knows)
    effort = 1.0 / task.chance
    costs, alive = _route_costs(
        routes, effort, world.proved, state.dead, self.depth
    )
    need = self._need(task, world, state, costs, alive)
    height = task.layer / max(self.depth, 1)
    unresolved = ~world.proved & ~state.dead
    theorem = task.layer == self.depth
    # Row i: what would make i ready for this agent; what i may be built on.
    fewest = state.ready & (state.lacks == state.missing[None, :])
    fewest &= (state.open & (need > 0))[None, :]
    alive &= (need > 0)[None, :]
    blocks_me = jnp.sum(_union(routes, fewest), axis=0)
    blocks_me *= task.private & ~state.known
    wanted = jnp.sum(_union(routes, alive), axis=0)
    proving = jnp.sum(theorem & ~world.proved)
    wanted = jnp.where(state.dead, proving, wanted) * task.private
    columns = (
        state.open,
        need,
        need * effort * m / jnp.sum(effort),  # The route of credit is hidden.
        effort * unresolved,
        state.missing * state.open,
        blocks_me,
        wanted,
        task.chance,
        world.proved,
        state.dead,
        state.known,
        height,
        jnp.sum(state.ready, axis=0) / self.alternatives,
        theorem,
    )
    attemptable = state.open & (state.missing == 0)
    studiable = world.proved & ~state.known
    return base.TargetView(
        features=base.features(columns),
        legal=base.table([attemptable, studiable]),
        relations=_union(routes, jnp.ones_like(state.ready)),
    )

  def reference_verb(
      self, features: chex.Array, legal: chex.Array
  ) -> chex.Array:
    """Attempts what may still help to prove the theorem."""
    useful = features[:, _FEATURES.index('priority')] > 0
    return jnp.where(legal[ATTEMPT] & useful, ATTEMPT, -1)

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    """Of several who resolve a lemma at once one is first, and all learn.

    Nobody learns from an attempt at what was proved before it ended. A second
    refutation teaches its agent what the first taught another.
    """
    agents, lemmas = knows.shape
    luck = jax.random.uniform(key, (agents,))[:, None]
    attempts = base.landed(turns, ATTEMPT, lemmas)
    solves = attempts & (luck < task.chance[None, :]) & ~world.proved[None, :]
    studies = base.landed(turns, STUDY, lemmas)
    first = base.first(solves) & ~world.refuted[None, :]
    new = jnp.sum(first, axis=0) > 0  # [M]
    learned = (solves | studies) & task.private[None, :] & ~knows
    effective = jnp.any(first | learned, axis=1)
    world = World(
        proved=world.proved | (new & task.true),
        refuted=world.refuted | (new & ~task.true),
    )
    return world, knows | learned, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    del now_ms  # What is proved stays proved.
    share = jnp.sum(task.credit * world.proved)
    return jnp.where(self.finished(task, world), 1.0, jnp.minimum(share, 1.0))

  def finished(self, task: Task, world: World) -> chex.Array:
    return jnp.sum(world.proved & (task.layer == self.depth)) > 0

  def _fewest_attempts(self, task: Task) -> chex.Array:
    """[] int32: no proof of the theorem has fewer lemmas.

    A proof of a lemma has the lemma, all of one route to it and, below them, at
    least what the longest proof among those of the route has there.
    """
    never = 2 * self.num_lemmas  # More than there are.
    exist = _exist(task.routes)
    routes = unpack(task.routes, self.num_lemmas)  # [A, M, M]
    fewest = jnp.where(task.true, 1, never)
    for _ in range(self.depth):
      on = jnp.where(routes, fewest[None, None, :], 0)
      by_route = jnp.sum(routes, axis=2) + jnp.max(on, axis=2)
      best = jnp.min(jnp.where(exist, by_route, never), axis=0)
      best = jnp.where(jnp.sum(exist, axis=0) == 0, 1, best)
      fewest = jnp.where(task.true, best, never)
    return jnp.sum(jnp.where(task.layer == self.depth, fewest, 0))

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """Luck: every attempt succeeds, and at what counts most.

    A lemma of layer l is proved by l + 1 attempts, one after the other, at the
    earliest. At most `num_agents * (limit_ms // turn_ms)` attempts land. If
    these are fewer than any proof of the theorem has lemmas, or than the
    layers, then the theorem is not proved, and progress is at most the credit
    of so many lemmas of the layers that can be reached, largest first. That
    proofs must be known is left out.
    """
    attempt_ms = turn_ms[ATTEMPT]
    rounds = limit_ms // attempt_ms
    attempts = num_agents * rounds
    fewest = self._fewest_attempts(task)
    may_prove = (rounds > self.depth) & (attempts >= fewest)
    reached = task.layer < jnp.minimum(rounds, self.depth)
    credit = -jnp.sort(-task.credit * reached)
    credit = jnp.sum(credit * (jnp.arange(self.num_lemmas) < attempts))
    progress = jnp.where(may_prove, 1.0, jnp.minimum(credit, 1.0))
    return base.Bounds(
        progress=progress.astype(jnp.float32),
        serial_ms=fewest * attempt_ms,
        critical_path_ms=(self.depth + 1) * attempt_ms,
    )

  def describe(self, task: Task) -> str:
    task = jax.tree.map(np.asarray, task)
    ways = np.asarray(unpack(task.routes, self.num_lemmas))
    theorem = int(np.argmax(task.layer))
    lines = [
        f'A theorem, {theorem}, and {self.num_lemmas - 1} lemmas, some of which'
        ' may be false. Prove the theorem. An attempt at a lemma needs the'
        ' proofs of all lemmas of one of its routes. If it succeeds, the lemma'
        ' is proved or, if it is false, refuted.'
    ]
    for i in range(self.num_lemmas):
      routes = [np.flatnonzero(route) for route in ways[:, i]]
      routes = [' and '.join(map(str, route)) for route in routes if len(route)]
      name = 'the theorem, ' if i == theorem else ''
      seen = 'private' if task.private[i] else 'public'
      lines.append(
          f'lemma {i}: {name}from {" or from ".join(routes) or "nothing"},'
          f' attempts succeed with chance {task.chance[i]:.2f}, what is found'
          f' out is {seen}'
      )
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    state = jax.tree.map(np.asarray, self._state(task, world, knows))
    proved, legal = np.asarray(world.proved), np.asarray(legal)
    lines = []
    for i in range(self.num_lemmas):
      notes = ['not proved']
      if proved[i]:
        notes = ['proved'] + ['proof known'] * bool(state.known[i])
      elif state.dead[i]:
        notes = ['refuted']
      elif state.open[i] and state.missing[i]:
        notes.append(f'{state.missing[i]} proofs to learn')
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'lemma {i}: {", ".join(notes)}')
    return '\n'.join(lines)
