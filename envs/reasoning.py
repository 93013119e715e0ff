"""One problem, several chains of thought, and one answer.

Each chain is an attempt of its own. It is right once it has had as many
thoughts as it needs, which nobody sees; it may need few or many, the more the
more difficult the problem is. A check gives a verdict on a chain, which may
err. The first answer is final, and it is all that counts: so one agent may
think for long in one chain, or several in a chain each, and then the checks
select among them.

Parallelism breaks in three places. A chain is sequential: of two agents whose
thoughts on it overlap in time, the later loses its work. An attempt that
succeeds is of no use until somebody has checked it, and until whoever answers
knows the verdict. And with `least_thoughts` above 1 every chain begins with
preparation, so that many short attempts are worth less than one long one. With
`least_thoughts=1` and `check_error=0` all thoughts in all chains are worth the
same: but for the checks, the work is then perfectly parallel for up to one
agent per chain. With `coupling=0` everybody sees all verdicts.
"""

import dataclasses
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

THINK, CHECK, ANSWER = 0, 1, 2

_NEVER = np.iinfo(np.int32).max  # A time that has not come.
_HARDEST = 1000.0  # Beyond, float32 no longer tells the chances apart.
_SURE = 0.85  # The chance of being right at which the reference answers.
_CHECK_EVERY = 3  # Thoughts after which the reference checks a chain.
_TINY = 1e-12  # Where a verdict is impossible, the belief does not matter.

_FEATURES = (
    *base.PLANNING_FEATURES,
    'difficulty',
    'thoughts',  # As log(1 + n), like those since the verdict.
    'chance_right',
    'checked',
    'verdict_right',
    'verdict_wrong',
    'thoughts_since',
    'posterior',
)


class Task(NamedTuple):
  """One problem."""

  difficulty: chex.Array  # [] float32, see `Reasoning`. Public.
  need: chex.Array  # [M] int32, thoughts that make a chain right. Hidden.
  private: chex.Array  # [M] bool: are verdicts seen by those who know only?


class World(NamedTuple):
  """The chains, and what was found out about them."""

  thoughts: chex.Array  # [M] int32.
  changed_ms: chex.Array  # [M] int32, the last thought; -1 for never.
  right_ms: chex.Array  # [M] int32, when it became right; hidden.
  checked: chex.Array  # [M] int32, thoughts at the last verdict; 0 for never.
  verdict: chex.Array  # [M] bool: was that verdict "right"?
  belief: chex.Array  # [M] float32, chance of having been right by then.
  answered: chex.Array  # [] int32, the chain that was answered; -1 for none.
  solved: chex.Array  # [] bool: was the answer right?


@dataclasses.dataclass(frozen=True)
class Reasoning(base.Environment):
  """Knobs of the problem. Progress = 1 once the right answer is given.

  No chain is right before its thought number `least_thoughts`. That one and
  every later one makes it right with chance `1 / difficulty`, if it was not yet
  right. The fact of a chain is the record of its verdicts: whoever was told of
  it reads the later ones, too.
  """

  num_chains: int = 8  # M.
  least_thoughts: int = 1
  min_difficulty: float = 8.0  # Drawn evenly from here
  max_difficulty: float = 40.0  # to here.
  check_error: float = 0.1  # Chance that a verdict is wrong.
  coupling: float = 1.0  # Share of chains whose verdicts are private.
  awareness: bool = False  # Are other agents' turns in flight visible?
  think_tokens: float = 1000.0  # Median output tokens of one thought.
  think_tool_ms: int = 0
  check_tokens: float = 1000.0
  check_tool_ms: int = 0
  answer_tokens: float = 200.0
  answer_tool_ms: int = 0

  name = 'reasoning'

  def __post_init__(self):
    need = base.require
    base.check_knobs(self, ('num_chains', 'least_thoughts'), ('coupling',))
    need(
        1.0 <= self.min_difficulty <= self.max_difficulty,
        'env.min_difficulty',
        self.min_difficulty,
        f'from 1 to max_difficulty={self.max_difficulty}',
    )
    need(
        self.max_difficulty <= _HARDEST,
        'env.max_difficulty',
        self.max_difficulty,
        f'at most {_HARDEST:g}',
    )
    need(
        0.0 <= self.check_error <= 0.5,
        'env.check_error',
        self.check_error,
        'from 0 to 0.5',
    )

  @property
  def num_targets(self) -> int:
    return self.num_chains

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    names = 'think', 'check', 'answer'
    return tuple(base.own_verb(self, name) for name in names)

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_difficulty, key_need, key_private = jax.random.split(key, 3)
    m = self.num_chains
    difficulty = jax.random.uniform(
        key_difficulty,
        minval=self.min_difficulty,
        maxval=self.max_difficulty,
    )
    tries = jax.random.geometric(key_need, 1.0 / difficulty, (m,), jnp.int32)
    return Task(
        difficulty=difficulty,
        need=self.least_thoughts - 1 + tries,
        private=jax.random.uniform(key_private, (m,)) < self.coupling,
    )

  def reset(self, task: Task) -> World:
    zeros = jnp.zeros_like(task.need)
    return World(
        thoughts=zeros,
        changed_ms=zeros - 1,
        right_ms=zeros + _NEVER,
        checked=zeros,
        verdict=zeros > 0,
        belief=jnp.zeros(zeros.shape, jnp.float32),
        answered=jnp.int32(-1),
        solved=jnp.asarray(False),
    )

  def chance_right(
      self, task: Task, thoughts: chex.Array, since: chex.Array | int = 0
  ) -> chex.Array:
    """P(right with `thoughts` | not right with `since` thoughts), float32."""
    tries = lambda n: jnp.maximum(n - self.least_thoughts + 1, 0)
    count = (tries(thoughts) - tries(since)).astype(jnp.float32)
    return 1.0 - (1.0 - 1.0 / task.difficulty) ** count

  def _posterior(
      self, task: Task, world: World, known: chex.Array
  ) -> chex.Array:
    """Chance that each chain is right now, [M], given the `known` verdicts."""
    believed = jnp.where(known, world.belief, 0.0)
    checked = jnp.where(known, world.checked, 0)
    later = self.chance_right(task, world.thoughts, checked)
    return believed + (1.0 - believed) * later

  def _after(self, belief: chex.Array, verdict: chex.Array) -> chex.Array:
    """Bayes' rule: the belief after a verdict."""
    if_right = jnp.where(verdict, 1.0 - self.check_error, self.check_error)
    both = belief * if_right
    return both / jnp.maximum(both + (1.0 - belief) * (1.0 - if_right), _TINY)

  def _known(self, task: Task, world: World, knows: chex.Array) -> chex.Array:
    """[M] bool: chains with a verdict that an agent sees."""
    return (world.checked > 0) & (knows | ~task.private)

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    m = self.num_chains
    chex.assert_shape(knows, (m,))
    known = self._known(task, world, knows)
    since = world.thoughts - jnp.where(known, world.checked, 0)
    posterior = self._posterior(task, world, known)
    open_ = jnp.broadcast_to(world.answered < 0, (m,))
    # On average: to prepare, to become right, to be checked and answered.
    prepare = jnp.maximum(self.least_thoughts - 1 - world.thoughts, 0)
    turns_left = 2.0 + (1.0 - posterior) * (prepare + task.difficulty)
    none = jnp.zeros((m,))
    columns = (
        open_,
        1.0 / turns_left,
        posterior * m * open_,
        turns_left * open_,
        none,
        none,
        known & task.private & open_,
        jnp.broadcast_to(task.difficulty / self.max_difficulty, (m,)),
        jnp.log1p(world.thoughts),
        self.chance_right(task, world.thoughts),
        known,
        known & world.verdict,
        known & ~world.verdict,
        jnp.log1p(since),
        posterior,
    )
    return base.TargetView(
        features=base.features(columns),
        legal=base.table([open_, open_ & (since > 0), open_]),
        relations=jnp.zeros((m, m), bool),
    )

  def reference_verb(
      self, features: chex.Array, legal: chex.Array
  ) -> chex.Array:
    """Answers when sure, checks now and then or to become sure, else thinks."""
    column = {name: features[:, i] for i, name in enumerate(_FEATURES)}
    posterior = column['posterior']
    due = column['thoughts_since'] >= np.log1p(_CHECK_EVERY) - 1e-3
    due &= posterior > 0
    due |= self._after(posterior, True) >= _SURE
    verb = jnp.where(legal[CHECK] & due, CHECK, THINK)
    verb = jnp.where(posterior >= _SURE, ANSWER, verb)
    return jnp.where(legal[ANSWER], verb, -1)

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    """All turns that end now act on the chains as they were just before.

    A verdict is about the chain as it was when the check ended, an answer is
    what the chain said when the agent began to write it. Who checks a chain
    without new thoughts finds the verdict that was given already.
    """
    agents, chains = knows.shape
    seats = jnp.arange(agents)
    lands = turns.lands & (world.answered < 0)  # [N]
    at = turns.target[:, None] == jnp.arange(chains)[None, :]  # [N, M]
    does = lambda verb: at & (lands & (turns.verb == verb))[:, None]
    thinks, checks, answers = map(does, (THINK, CHECK, ANSWER))

    thinks &= world.changed_ms[None, :] <= turns.start_ms[:, None]
    thinks = base.first(thinks)  # Of several at once, one.
    grows = jnp.sum(thinks, axis=0, dtype=jnp.int32)
    thoughts = world.thoughts + grows
    becomes_right = (grows > 0) & (thoughts == task.need)

    learns = checks & task.private[None, :] & ~knows
    judges = base.first(checks & (world.thoughts > world.checked)[None, :])
    errs = jax.random.bernoulli(key, self.check_error, (agents,))
    judged = jnp.sum(judges, axis=0) > 0
    wrongly = jnp.sum(judges & errs[:, None], axis=0) > 0
    verdict = (world.thoughts >= task.need) ^ wrongly
    belief = self._posterior(task, world, world.checked > 0)

    author = jnp.min(jnp.where(jnp.any(answers, axis=1), seats, agents))
    answers &= (seats == author)[:, None]
    right = world.right_ms[None, :] <= turns.start_ms[:, None]
    answered = jnp.max(jnp.where(answers, jnp.arange(chains)[None, :], -1))

    effective = jnp.any(thinks | learns | judges | answers, axis=1)
    world = World(
        thoughts=thoughts,
        changed_ms=jnp.where(grows > 0, turns.now_ms, world.changed_ms),
        right_ms=jnp.where(becomes_right, turns.now_ms, world.right_ms),
        checked=jnp.where(judged, world.thoughts, world.checked),
        verdict=jnp.where(judged, verdict, world.verdict),
        belief=jnp.where(judged, self._after(belief, verdict), world.belief),
        answered=jnp.maximum(world.answered, answered),
        solved=world.solved | (jnp.sum(answers & right) > 0),
    )
    return world, knows | learns, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    del task, now_ms  # An answer is final.
    return world.solved.astype(jnp.float32)

  def finished(self, task: Task, world: World) -> chex.Array:
    del task
    return world.answered >= 0

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """The luckiest chain, thought through without a break, then answered.

    The thoughts that land on one chain do not overlap, however many agents
    there are; a right answer begins when the last that is needed has landed.
    Whoever answers at once is finished, so the times are those of one answer.
    """
    del num_agents
    answer_ms = turn_ms[ANSWER]
    # Divided, as the product of a large need could overflow.
    turns = jnp.maximum(limit_ms - answer_ms, 0) // turn_ms[THINK]
    return base.Bounds(
        progress=(turns >= jnp.min(task.need)).astype(jnp.float32),
        serial_ms=answer_ms,
        critical_path_ms=answer_ms,
    )

  def describe(self, task: Task) -> str:
    task = jax.tree.map(np.asarray, task)
    lines = [
        f'A problem of difficulty {task.difficulty:.1f}, with'
        f' {self.num_chains} chains of thought. Give one right answer: the'
        f' first is final. From its thought number {self.least_thoughts} on,'
        ' each makes a chain right with chance 1 / difficulty. A check errs'
        f' with chance {self.check_error:g}.'
    ]
    for i in range(self.num_chains):
      seen = 'private' if task.private[i] else 'public'
      lines.append(f'chain {i}: an attempt of its own, its verdicts are {seen}')
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    known = self._known(task, world, knows)
    posterior = np.asarray(self._posterior(task, world, known))
    world, known, legal = jax.tree.map(np.asarray, (world, known, legal))
    lines = []
    for i in range(self.num_chains):
      notes = [f'{world.thoughts[i]} thoughts']
      if known[i]:
        verdict = 'right' if world.verdict[i] else 'wrong'
        notes.append(f'judged {verdict} at {world.checked[i]}')
      notes.append(f'{100 * posterior[i]:.0f}% likely right')
      notes += ['answered'] * bool(world.answered == i)
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'chain {i}: {", ".join(notes)}')
    return '\n'.join(lines)
