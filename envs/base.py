"""The contract that every world satisfies.

A world knows tasks, effects and progress. It knows nothing of policies, of
messages or of how long a token takes, and it imports nothing from `rlcr_jax`.
All methods are pure and written for one task; callers `vmap` them.

Axes: `[N]` agents, `[M]` targets, `[V]` verbs of the environment, `[F]`
features per target. Times are int32 milliseconds.
"""

import abc
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

Task = Any  # A pytree of arrays: one problem instance.
World = Any  # A pytree of arrays: what agents have changed so far.

PLANNING_FEATURES = (
    'open',
    'priority',
    'value',
    'turns_left',
    'missing',
    'blocks_me',
    'wanted',
)


class VerbSpec(NamedTuple):
  """A thing that an agent can do, and what doing it costs."""

  name: str
  takes_target: bool
  output_tokens: float  # Median number of tokens that the agent writes.
  tool_ms: int  # Time of the tool itself, after the last token.
  acts_on_environment: bool  # Counts as useful work (signs of life, 1).
  takes_peer: bool = False
  takes_symbol: bool = False
  learns: bool = False  # Only teaches its agent a fact that exists already.
  talks: bool = False  # Counts as communication (signs of life, 2).


class Turns(NamedTuple):
  """The turns of all agents, seen at the instant when some of them end."""

  verb: chex.Array  # [N] int32, index into the environment's verbs.
  target: chex.Array  # [N] int32.
  start_ms: chex.Array  # [N] int32, when the turn began.
  lands: chex.Array  # [N] bool: ends now, and was legal when it began.
  now_ms: chex.Array  # [] int32.


class Outcome(NamedTuple):
  """What became of the turns that ended."""

  effective: chex.Array  # [N] bool: landed and changed something.


class TargetView(NamedTuple):
  """What one agent sees of the targets."""

  features: chex.Array  # [M, F] float32.
  legal: chex.Array  # [V, M] bool, for the environment's own verbs.
  relations: chex.Array  # [M, M] bool; row i names what target i needs.


class Bounds(NamedTuple):
  """Provable limits for one task."""

  progress: chex.Array  # [] float32, upper bound by the time limit.
  serial_ms: chex.Array  # [] int32, T1: one agent that never errs.
  critical_path_ms: chex.Array  # [] int32, T-infinity.


class Environment(abc.ABC):
  """A family of tasks. Subclasses are frozen dataclasses of static knobs."""

  name: str
  num_targets: int  # M
  awareness: bool = False  # Are other agents' turns in flight visible?
  monotone: bool = True  # Does progress never fall?
  accrues: bool = False  # Does it change while nothing lands?

  @property
  @abc.abstractmethod
  def verbs(self) -> tuple[VerbSpec, ...]:
    """The environment's own verbs, in the order of `TargetView.legal`."""

  @property
  @abc.abstractmethod
  def feature_names(self) -> tuple[str, ...]:
    """Names of the F columns of `TargetView.features`.

    The first are `PLANNING_FEATURES`, the same in all environments, by which
    scripted policies plan: `open` (whoever has the facts may act on this target
    now, with a verb that does more than learn), `priority` (list scheduling
    takes the largest first), `value` (what completing it adds to progress,
    times M), `turns_left` (turns until it is complete), `missing` (facts that
    this agent lacks to act on it), `blocks_me` (open targets that this target's
    fact would unlock for this agent) and `wanted` (unfinished targets that need
    its fact).
    """

  @abc.abstractmethod
  def sample_task(self, key: jax.Array) -> Task:
    """Draws one problem instance."""

  @abc.abstractmethod
  def reset(self, task: Task) -> World:
    """The untouched world."""

  @abc.abstractmethod
  def view(self, task: Task, world: World, knows: chex.Array) -> TargetView:
    """What an agent that knows the facts `knows` [M] bool sees and may do."""

  def reference_verb(
      self, features: chex.Array, legal: chex.Array
  ) -> chex.Array:
    """The verb with which a scripted policy acts on each target, [M] int32.

    It is -1 where a sensible agent would do nothing now. Unless an environment
    says otherwise it is the first legal verb that does more than learn.

    Args:
      features: [M, F], as in the `TargetView` of the agent.
      legal: [V, M] bool, likewise.
    """
    del features
    acts = jnp.array([not verb.learns for verb in self.verbs])
    able = legal & acts[:, None]
    return jnp.where(jnp.any(able, axis=0), jnp.argmax(able, axis=0), -1)

  def reference_fact(
      self, features: chex.Array, relations: chex.Array
  ) -> chex.Array:
    """What a scripted policy that has nothing to do learns ahead, [M] float32.

    The largest comes first, and nothing where it is minus infinity. Unless an
    environment says otherwise it is the fact that unlocks most.

    Args:
      features: [M, F], as in the `TargetView` of the agent.
      relations: [M, M] bool, likewise.
    """
    del relations
    return features[:, PLANNING_FEATURES.index('blocks_me')]

  @abc.abstractmethod
  def land(
      self,
      task: Task,
      world: World,
      turns: Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, Outcome]:
    """Applies all turns that end now to the world and to `knows` [N, M]."""

  @abc.abstractmethod
  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    """The anytime return in [0, 1], float32, defined at every instant."""

  @abc.abstractmethod
  def finished(self, task: Task, world: World) -> chex.Array:
    """True where nothing is left to do, so the rollout may stop early."""

  @abc.abstractmethod
  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> Bounds:
    """Provable limits, given the shortest duration `turn_ms` [V] of a verb."""

  @abc.abstractmethod
  def describe(self, task: Task) -> str:
    """The task as text."""

  @abc.abstractmethod
  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    """What an agent sees, as text: one line per target.

    Args:
      task: one problem instance.
      world: its state.
      knows: [M] bool, the facts that the agent knows.
      legal: [V, M] bool, as in its `TargetView`: text is written often, and
        the caller has computed many views at once.
    """


def features(columns: Sequence[chex.Array]) -> chex.Array:
  """Stacks columns [M] of numbers or booleans to features [M, F] float32."""
  return jnp.stack([c.astype(jnp.float32) for c in columns], axis=-1)


def table(rows: Sequence[chex.Array]) -> chex.Array:
  """Stacks rows [M] bool to [V, M] bool.

  By selection: XLA's CPU back end cannot concatenate bytes of every size
  ("LLVM ERROR: Cannot select", jaxlib 0.10.2).
  """
  place = jnp.arange(len(rows))[:, None]
  none = jnp.zeros((len(rows), len(rows[0])), bool)
  add = lambda whole, row: whole | ((place == row[0]) & row[1][None, :])
  return functools.reduce(add, enumerate(rows), none)


def landed(turns: Turns, verb: int, targets: int) -> chex.Array:
  """Who lands a verb now, and where: [N, M] bool for M `targets`."""
  at = turns.target[:, None] == jnp.arange(targets)[None, :]
  return at & (turns.lands & (turns.verb == verb))[:, None]


def first(rows: chex.Array) -> chex.Array:
  """Of the agents of each column of [N, M] bool, the one of the lowest seat.

  A minimum is vectorised on CPUs, an argmax is not.
  """
  agents = len(rows)
  seats = jnp.arange(agents)[:, None]
  lowest = jnp.min(jnp.where(rows, seats, agents), axis=0)
  return rows & (seats == lowest[None, :])


def own_verb(env: Environment, name: str, learns: bool = False) -> VerbSpec:
  """A verb that costs what the knobs `NAME_tokens` and `NAME_tool_ms` say."""
  tokens, tool_ms = (getattr(env, f'{name}_{c}') for c in ('tokens', 'tool_ms'))
  return VerbSpec(name, True, tokens, tool_ms, True, learns=learns)


def commands(
    verbs: Sequence[VerbSpec], legal: chex.Array, target: int
) -> list[str]:
  """What may be done with a target, as text, from `legal` [V, M]."""
  able = zip(verbs, legal[:, target], strict=True)
  return [f'{verb.name} {target}' for verb, ok in able if ok]


def check_knobs(
    env: Environment, counts: Sequence[str] = (), shares: Sequence[str] = ()
) -> None:
  """Checks the usual knobs of a dataclass, and those that say what verbs cost.

  Args:
    env: whose knobs are checked.
    counts: names of those that are at least 1.
    shares: names of those that go from 0 to 1.

  Raises:
    NotAllowedError: naming the knob, its value and what is allowed.
  """
  check = lambda name, ok, allowed: require(
      ok(getattr(env, name)), f'env.{name}', getattr(env, name), allowed
  )
  for name in counts:
    check(name, lambda value: value >= 1, '>= 1')
  for name in shares:
    check(name, lambda value: 0.0 <= value <= 1.0, 'from 0 to 1')
  for field in dataclasses.fields(env):
    if field.name.endswith('_tokens'):
      check(field.name, lambda value: value >= 1, '>= 1 token')
    if field.name.endswith('_tool_ms'):
      check(field.name, lambda value: value >= 0, '>= 0')


class NotAllowedError(ValueError):
  """Something that the user gave is not allowed; the message says what is."""


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
  """Raises an error that names the field, the value and what is allowed."""
  if not condition:
    raise NotAllowedError(
        f'{field}={value!r} is not allowed: it must be {allowed}.'
    )
