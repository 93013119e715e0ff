"""A software project: modules with dependencies, interfaces and conflicts.

Parallelism breaks in three places. A module can be worked on only when its
dependencies are finished; its author must know the interfaces (facts) of the
modules it is coupled to; and of two agents who change one module at the same
time, the later loses its work (a merge conflict). With `coupling=0` and
`conflicts=False` only the dependencies are left, and with `width` equal to
`num_modules` not even those: the work is then perfectly parallel.
"""

import dataclasses
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

WORK, READ = 0, 1

_FEATURES = (
    *base.PLANNING_FEATURES,
    'effort',
    'finished',
    'dependencies_met',
    'known',
)


class Task(NamedTuple):
  """One project."""

  depends: chex.Array  # [M, M] bool: row i needs column j finished.
  coupled: chex.Array  # [M, M] bool: and whoever writes i must know j.
  effort: chex.Array  # [M] int32, units of work.
  tests: chex.Array  # [M] int32, a multiple of effort: each unit passes some.
  below: chex.Array  # [M] int32, heaviest path from here to a leaf, in units.
  above: chex.Array  # [M] int32, heaviest path that ends here, in units.


class World(NamedTuple):
  """The shared repository."""

  remaining: chex.Array  # [M] int32, units of work left.
  changed_ms: chex.Array  # [M] int32, last change; -1 for never.


def _heaviest_path(adjacent: chex.Array, effort: chex.Array, depth: int):
  """Heaviest path [M] that starts at each node of a layered graph."""
  path = effort
  for _ in range(depth - 1):
    path = effort + jnp.max(jnp.where(adjacent, path[None, :], 0), axis=1)
  return path


@dataclasses.dataclass(frozen=True)
class Software(base.Environment):
  """Knobs of the software project. Progress = fraction of tests passed."""

  num_modules: int = 12  # M.
  width: int = 6  # Modules per layer; M // width layers.
  density: float = 0.3  # Chance of a dependency on a module one layer up.
  coupling: float = 1.0  # Share of dependencies whose fact is needed.
  conflicts: bool = True  # Are simultaneous changes of one module lost?
  awareness: bool = False  # Are other agents' turns in flight visible?
  max_effort: int = 3  # Units of work per module: 1 to max_effort.
  max_tests: int = 3  # Tests that one unit of work makes pass: 1 to this many.
  work_tokens: float = 2000.0  # Median output tokens of one unit of work.
  work_tool_ms: int = 10_000  # Then the build and the tests run.
  read_tokens: float = 1000.0  # Reading a module well enough to build on it.
  read_tool_ms: int = 40_000

  name = 'software'

  def __post_init__(self):
    counts = 'num_modules', 'max_effort', 'max_tests'
    base.check_knobs(self, counts, shares=('density', 'coupling'))
    base.require(
        1 <= self.width <= self.num_modules,
        'env.width',
        self.width,
        f'from 1 to num_modules={self.num_modules}',
    )

  @property
  def num_targets(self) -> int:
    return self.num_modules

  @property
  def depth(self) -> int:
    """Number of layers."""
    return -(-self.num_modules // self.width)

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    return base.own_verb(self, 'work'), base.own_verb(self, 'read', learns=True)

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_order, key_edge, key_coupled, key_effort, key_tests = jax.random.split(
        key, 5
    )
    m = self.num_modules
    # A remainder makes the first layer the small one: a core that many need.
    order = jax.random.permutation(key_order, m)
    layer = (order + self.depth * self.width - m) // self.width  # [M]
    one_up = layer[:, None] == layer[None, :] + 1  # [M, M]
    score = jnp.where(one_up, jax.random.uniform(key_edge, (m, m)), jnp.inf)
    # The best-scoring candidate is always a dependency, so no module of a
    # lower layer hangs in the air even at density 0.
    chosen = (score <= self.density) | (score == score.min(1, keepdims=True))
    depends = one_up & chosen
    couples = jax.random.uniform(key_coupled, (m, m)) < self.coupling
    effort = jax.random.randint(key_effort, (m,), 1, self.max_effort + 1)
    per_unit = jax.random.randint(key_tests, (m,), 1, self.max_tests + 1)
    return Task(
        depends=depends,
        coupled=depends & couples,
        effort=effort,
        tests=effort * per_unit,
        below=_heaviest_path(depends.T, effort, self.depth),
        above=_heaviest_path(depends, effort, self.depth),
    )

  def reset(self, task: Task) -> World:
    return World(
        remaining=task.effort,
        changed_ms=jnp.full_like(task.effort, -1),
    )

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    chex.assert_shape(knows, (self.num_modules,))
    finished = world.remaining == 0
    open_dependencies = jnp.sum(task.depends & ~finished[None, :], axis=1)
    missing = jnp.sum(task.coupled & ~knows[None, :], axis=1)
    startable = ~finished & (open_dependencies == 0)
    waiting = task.coupled & ~finished[:, None]  # [M, M]: i still needs j.
    blocks_me = jnp.sum(waiting & startable[:, None], axis=0) * ~knows
    dependencies = jnp.maximum(jnp.sum(task.depends, axis=1), 1)
    remaining_tests = world.remaining * (task.tests // task.effort)
    columns = (
        startable,
        self._priority(task),
        remaining_tests * self.num_modules / jnp.sum(task.tests),
        world.remaining,
        missing,
        blocks_me,
        jnp.sum(waiting, axis=0),
        task.effort,
        finished,
        1.0 - open_dependencies / dependencies,
        knows,
    )
    return base.TargetView(
        features=base.features(columns),
        legal=base.table([startable & (missing == 0), finished & ~knows]),
        relations=task.depends,
    )

  def _priority(self, task: Task) -> chex.Array:
    """Heaviest path first; more tests per unit of work breaks ties."""
    density = task.tests / task.effort / self.max_tests
    return (task.below + 0.5 * density) / (self.max_effort * self.depth)

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    del task, key  # Legality was checked when the turn began, and never ends.
    works = base.landed(turns, WORK, self.num_modules)
    reads = base.landed(turns, READ, self.num_modules)
    works &= (world.remaining > 0)[None, :]
    if self.conflicts:
      works &= world.changed_ms[None, :] <= turns.start_ms[:, None]
      works = base.first(works)  # Of several at once, one merges.
    else:  # Of more units than are left, only those left are of use.
      before = jnp.cumsum(works, axis=0) - works
      works &= before < world.remaining[None, :]
    units = jnp.sum(works, axis=0, dtype=jnp.int32)
    remaining = jnp.maximum(world.remaining - units, 0)
    changed_ms = jnp.where(units > 0, turns.now_ms, world.changed_ms)
    learned = reads | (works & (remaining == 0)[None, :])
    effective = jnp.any(works | reads, axis=1)
    world = World(remaining=remaining, changed_ms=changed_ms)
    return world, knows | learned, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    del now_ms  # Tests passed do not change by themselves.
    landed = task.effort - world.remaining
    passed = jnp.sum(landed * (task.tests // task.effort))
    return (passed / jnp.sum(task.tests)).astype(jnp.float32)

  def finished(self, task: Task, world: World) -> chex.Array:
    del task
    return jnp.all(world.remaining == 0)

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """Knapsack over the units that the critical path lets land in time.

    At most `num_agents * (limit_ms // turn_ms)` units can land, and of each
    module only those for which time is left after its heaviest path of
    dependencies; one unit per turn, or one per agent where conflicts are off.
    Filling the turns with the units of most tests first can only overestimate.
    """
    unit_ms = turn_ms[WORK]
    turns = limit_ms // unit_ms
    at_once = 1 if self.conflicts else num_agents
    need = -(-task.effort // at_once)  # [M], turns that a module takes.
    path = _heaviest_path(task.depends, need, self.depth)  # [M], its end.
    possible = jnp.clip((turns - path + need) * at_once, 0, task.effort)
    per_unit = task.tests // task.effort
    order = jnp.argsort(-per_unit)
    possible = possible[order]
    left = num_agents * turns - (jnp.cumsum(possible) - possible)
    passed = jnp.sum(jnp.clip(left, 0, possible) * per_unit[order])
    return base.Bounds(
        progress=(passed / jnp.sum(task.tests)).astype(jnp.float32),
        serial_ms=jnp.sum(task.effort) * unit_ms,
        critical_path_ms=jnp.max(path) * unit_ms,
    )

  def describe(self, task: Task) -> str:
    task = jax.tree.map(np.asarray, task)
    lines = [
        f'A software project of {self.num_modules} modules,'
        f' {int(task.tests.sum())} tests. Finish modules to pass their tests.'
    ]
    for i in range(self.num_modules):
      needs = [
          f'{j} (know its interface)' if task.coupled[i, j] else f'{j}'
          for j in np.flatnonzero(task.depends[i])
      ]
      after = f', after {", ".join(needs)}' if needs else ''
      lines.append(
          f'module {i}: {task.effort[i]} units of work,'
          f' {task.tests[i]} tests{after}'
      )
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    del task
    legal = np.asarray(legal)
    remaining, knows = np.asarray(world.remaining), np.asarray(knows)
    lines = []
    for i in range(self.num_modules):
      state = f'{remaining[i]} units left' if remaining[i] else 'finished'
      notes = [state] + ['interface known'] * bool(knows[i])
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'module {i}: {", ".join(notes)}')
    return '\n'.join(lines)
