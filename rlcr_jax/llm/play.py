"""The host's event loop: collectives whose agents read and write text.

It drives the same `observe`, `act` and `advance` as the compiled loop. At every
iteration all agents that are free, in all collectives, speak as one batch; what
they write is parsed into turns, whose durations come from the tokens that were
read and written.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import rollout
from rlcr_jax.collective import Collective
from rlcr_jax.collective import Turn
from rlcr_jax.llm import prompts
from rlcr_jax.observation import Observation
from rlcr_jax.observation import TELL
from rlcr_jax.observation import WAIT
from rlcr_jax.policies.base import Policy
from rlcr_jax.roster import Rules

_NONE = np.zeros(0, np.int32)


class Utterance(NamedTuple):
  """What an agent wrote, and what reading and writing it cost."""

  text: str
  output_tokens: int
  context_tokens: int  # New in its context, prefilled.
  prompt: Sequence[int] = ()  # Token ids that it read, all of them.
  ids: np.ndarray = _NONE  # [T] int32, as sampled.
  log_probs: np.ndarray = _NONE.astype(np.float32)  # [T], when sampled.


class Free(NamedTuple):
  """An agent that is free to decide, with all that it may read."""

  rollout: int
  agent: int
  turn_index: int
  moment: prompts.Moment
  observation: Observation  # Leaves without a batch axis.
  knows: np.ndarray  # [M] bool.
  unread: int  # Tokens of messages since its last turn.
  last: str  # Its last command and what became of it.
  inbox: list[prompts.Message]


class Scene(NamedTuple):
  """All collectives at one iteration. [B, N] each."""

  observation: Observation
  draw: jax.Array  # Keys of the decisions.
  spend: jax.Array  # Keys of simulated token counts.


class Speaker(Protocol):
  """Who writes for the agents."""

  def __call__(self, free: list[Free], scene: Scene) -> list[Utterance]:
    """One utterance per free agent, in their order."""


@dataclasses.dataclass
class Said:
  """The record of one turn."""

  rollout: int
  agent: int
  start_ms: int
  end_ms: int
  utterance: Utterance
  command: prompts.Command | None  # None: it was not understood.
  legal: bool
  effective: bool = False  # It landed and had its effect.
  cut: bool = True  # It had not landed when its agent left or time was up.

  @property
  def outcome(self) -> str:
    """What became of it, in words."""
    if self.command is None:
      return 'not understood'
    if self.cut:
      return 'cut short'
    return 'done' if self.effective else 'no effect'


class Played(NamedTuple):
  """Finished rollouts and every turn in them."""

  rollouts: rollout.Rollouts  # [B], on the host.
  said: list[Said]

  def shares(self) -> dict[str, float]:
    """Shares of turns: not understood, and understood but not allowed."""
    malformed = sum(turn.command is None for turn in self.said)
    illegal = sum(not turn.legal for turn in self.said) - malformed
    turns = max(len(self.said), 1)
    return {
        'malformed_share': malformed / turns,
        'illegal_share': illegal / turns,
    }


def merge_islands(played: Played, collective: Collective) -> Played:
  """One rollout of several islands, whose agents are numbered through."""
  count, seats = collective.config.islands, collective.num_agents
  if count == 1:
    return played
  said = [
      dataclasses.replace(
          turn,
          rollout=turn.rollout // count,
          agent=turn.rollout % count * seats + turn.agent,
      )
      for turn in played.said
  ]
  return Played(rollout.merge_islands(played.rollouts, count), said)


class _Look(NamedTuple):
  """What the host needs to see of all collectives; [B] or [B, N] first."""

  scene: Scene
  ready: chex.Array
  present: chex.Array
  busy: chex.Array
  knows: chex.Array  # [B, N, M], with what a look at the board teaches.
  unread: chex.Array
  effective: chex.Array
  turn_index: chex.Array
  turn: Turn
  clock_ms: chex.Array
  done: chex.Array
  progress: chex.Array
  world: Any
  issues: Any  # [B, M] each, or None, like the next.
  archive: chex.Array | None


@functools.cache
def _compiled(collective: Collective):
  """The pieces of the loop, compiled once per shape."""
  seats = jnp.arange(collective.num_agents)

  def reset(tasks, rules, keys):
    split = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    return jax.vmap(collective.reset)(tasks, rules, split[1]), split[0]

  def look_at_one(task, rules, state):
    observe = functools.partial(collective.observe, task, rules, state)
    keys = jax.vmap(jax.random.fold_in)(state.agent_keys, state.turn_index)
    draw, spend = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    board_fact = state.mail.board_fact & rules.board
    return _Look(
        scene=Scene(jax.vmap(observe)(seats), draw, spend),
        ready=collective.ready(state),
        present=state.present,
        busy=state.busy,
        knows=state.knows | board_fact[None, :] | rules.free_facts,
        unread=state.mail.unread,
        effective=state.effective,
        turn_index=state.turn_index,
        turn=state.turn,
        clock_ms=state.clock_ms,
        done=state.done,
        progress=collective.env.progress(task, state.world, state.clock_ms),
        world=state.world,
        issues=state.mail.issues,
        archive=state.mail.archive,
    )

  def begin(rules, states, decides, turn, context_tokens, tool_ms):
    start_ms = jnp.broadcast_to(states.clock_ms[:, None], decides.shape)
    took_ms = collective.latency.duration_ms(
        turn.output_tokens, context_tokens, tool_ms
    )
    turn = turn._replace(start_ms=start_ms, end_ms=start_ms + took_ms)
    return jax.vmap(collective.act)(rules, states, decides, turn)

  def advance(tasks, rules, states, world_keys, curve, grid_ms):
    may = jnp.ones_like(states.done)
    return rollout.advance(
        collective, tasks, rules, states, world_keys, may, curve, grid_ms
    )

  def summary(tasks, states, curve, grid_ms, iterations, taken):
    return rollout.summary(
        collective, tasks, states, curve, grid_ms, iterations, taken
    )

  look = jax.vmap(look_at_one)
  return tuple(map(jax.jit, (reset, look, begin, advance, summary)))


class _Mailroom:
  """The text of messages, which the arrays of a collective do not hold."""

  def __init__(self, verbs, batch: int, agents: int):
    self._verbs = verbs
    self.inbox = [[[] for _ in range(agents)] for _ in range(batch)]
    self.board = [{} for _ in range(batch)]
    self.last = [[''] * agents for _ in range(batch)]
    self.open: dict[tuple[int, int], Said] = {}

  def settle(self, before: _Look, now: _Look) -> None:
    """Delivers what has landed since `before`, and drops what never will."""
    for (b, n), said in sorted(self.open.items()):
      landed = said.end_ms <= now.clock_ms[b] and before.present[b, n]
      gone = now.turn.verb[b, n] < 0 or not now.present[b, n] or now.done[b]
      if landed:
        said.cut, said.effective = False, bool(now.effective[b, n])
        self._deliver(said, before.present[b])
      if landed or gone:
        del self.open[b, n]
    hired = now.present & (now.turn.verb < 0)
    hired &= now.turn.start_ms == now.clock_ms[:, None]
    for b, n in np.argwhere(hired).tolist():
      self.inbox[b][n], self.last[b][n] = [], ''

  def _deliver(self, said: Said, present: np.ndarray) -> None:
    b, command = said.rollout, said.command
    line = prompts.write(self._verbs, command) if command else 'your command'
    self.last[b][said.agent] = f'{line}: {said.outcome}'
    if command is None:
      return
    verb = self._verbs[command.verb]
    if said.legal and verb.takes_symbol:
      message = prompts.Message(said.agent, command.target, command.text)
      if verb.name != TELL:
        self.board[b][command.target] = message
      elif present[command.peer]:
        self.inbox[b][command.peer].append(message)


def play(
    collective: Collective,
    speaker: Speaker,
    tasks: base.Task,
    rules: Rules,
    keys: jax.Array,
    grid_ms: np.ndarray | None = None,
    error_ms: int = 0,
) -> Played:
  """Plays B rollouts to their deadlines.

  Args:
    collective: the world, the roster, the channels and the clock.
    speaker: who writes.
    tasks: leaves [B, ...].
    rules: [B] each.
    keys: [B] rollout keys; used as in `rollout.play`.
    grid_ms: [T] int32, times at which progress is recorded.
    error_ms: time that is lost on a command that is not understood.

  Returns:
    The rollouts and their turns. A turn whose command was not understood
    counts as one of `wait` that had no effect.
  """
  reset, look_at, begin, advance, summary = _compiled(collective)
  grid_ms = jnp.asarray(_NONE if grid_ms is None else grid_ms)
  batch = keys.shape[0]
  states, world_keys = reset(tasks, rules, keys)
  curve = jnp.zeros((batch, grid_ms.shape[0]), jnp.float32)
  host = jax.device_get((tasks, rules))
  row = lambda tree, b: jax.tree.map(lambda x: x[b], tree)
  described = [collective.env.describe(row(host[0], b)) for b in range(batch)]
  mail = _Mailroom(collective.verbs, batch, collective.num_agents)
  said: list[Said] = []
  now, seen = _to_host(look_at(tasks, rules, states))
  iterations = 0
  while not now.done.all():
    free = [
        _free(host, described, mail, now, seen, b, n)
        for b, n in np.argwhere(now.ready).tolist()
    ]
    if free:
      spoken = speaker(free, now.scene)
      begun, arrays = _turns(collective, free, spoken, batch, error_ms)
      states = begin(rules, states, *arrays)
      end_ms = np.asarray(states.turn.end_ms)
      for turn in begun:
        turn.end_ms = int(end_ms[turn.rollout, turn.agent])
        mail.open[turn.rollout, turn.agent] = turn
        mail.inbox[turn.rollout][turn.agent] = []
      said += begun
    states, curve = advance(tasks, rules, states, world_keys, curve, grid_ms)
    before = now
    now, seen = _to_host(look_at(tasks, rules, states))
    mail.settle(before, now)
    iterations += 1
  counts = jnp.int32(iterations), jnp.int32(len(said))
  rollouts = summary(tasks, states, curve, grid_ms, *counts)
  return Played(jax.device_get(rollouts), said)


def _to_host(look: _Look) -> tuple[_Look, Observation]:
  """On the host; the scene stays on the device, where policies read it."""
  seen = look.scene.observation  # The only part of it that text is made from.
  host = jax.device_get(look._replace(scene=seen))
  return host._replace(scene=look.scene), host.scene


def _free(host, described, mail, now: _Look, seen, b: int, n: int) -> Free:
  tasks, rules = host
  row = lambda tree: jax.tree.map(lambda x: x[b], tree)
  moment = prompts.Moment(
      task=row(tasks),
      description=described[b],
      world=row(now.world),
      clock_ms=int(now.clock_ms[b]),
      deadline_ms=int(rules.deadline_ms[b]),
      progress=float(now.progress[b]),
      present=now.present[b],
      chief=bool(rules.hiring[b]),
      board=mail.board[b],
      issues=row(now.issues),
      archive=row(now.archive),
      island=int(rules.island[b]),
      islands=int(rules.islands[b]),
  )
  return Free(
      rollout=b,
      agent=n,
      turn_index=int(now.turn_index[b, n]),
      moment=moment,
      observation=jax.tree.map(lambda x: x[b, n], seen),
      knows=now.knows[b, n],
      unread=int(now.unread[b, n]),
      last=mail.last[b][n],
      inbox=mail.inbox[b][n],
  )


def _turns(
    collective: Collective,
    free: list[Free],
    spoken: list[Utterance],
    batch: int,
    error_ms: int,
) -> tuple[list[Said], tuple[Any, ...]]:
  """The records of new turns, and the arguments of `begin` after the states."""
  verbs = collective.verbs
  wait = prompts.Command(collective.verb(WAIT))
  shape = batch, collective.num_agents
  begun, decides = [], np.zeros(shape, bool)
  parts = np.zeros((7, *shape), np.int32)
  for who, utterance in zip(free, spoken, strict=True):
    command = prompts.read(verbs, utterance.text)
    chosen, legal = prompts.action(verbs, who.observation, command or wait)
    legal &= command is not None
    decides[who.rollout, who.agent] = True
    parts[:, who.rollout, who.agent] = (
        chosen.verb,
        chosen.target,
        who.observation.peer_seat[chosen.peer],
        legal,
        utterance.output_tokens,
        utterance.context_tokens,
        verbs[chosen.verb].tool_ms if command else error_ms,
    )
    start_ms = who.moment.clock_ms
    begun.append(
        Said(who.rollout, who.agent, start_ms, 0, utterance, command, legal)
    )
  verb, target, peer, legal, tokens, context, tool_ms = parts
  none = np.zeros(shape, np.int32)
  turn = Turn(verb, target, peer, none, legal > 0, tokens, none, none)
  return begun, (decides, turn, context, tool_ms)


@dataclasses.dataclass(frozen=True)
class ScriptedSpeaker:
  """Writes the commands of a policy over observations.

  It spends what the simulated path spends (tokens drawn for the verb, messages
  read), so that both paths give exactly the same rollouts.
  """

  collective: Collective
  policy: Policy
  params: Any = ()

  def __call__(self, free: list[Free], scene: Scene) -> list[Utterance]:
    decided = _decide(self.collective, self.policy, self.params, scene)
    action, tokens = jax.device_get(decided)
    return [self._utter(who, action, tokens) for who in free]

  def _utter(self, who: Free, action, tokens) -> Utterance:
    at = who.rollout, who.agent
    seat = int(who.observation.peer_seat[action.peer[at]])
    known = who.knows[action.target[at]]
    command = prompts.Command(
        int(action.verb[at]),
        int(action.target[at]),
        seat,
        'finished' if known else 'mine',
    )
    return Utterance(
        text=prompts.write(self.collective.verbs, command),
        output_tokens=int(tokens[at]),
        context_tokens=who.unread,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decide(collective, policy, params, scene: Scene):
  """Actions and token counts of all seats, [B, N], as in `rollout.decide`."""
  shape = scene.draw.shape
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), scene)
  action, _ = policy.sample(params, flat.draw, flat.observation)
  tokens = jax.vmap(collective.sample_tokens)(flat.spend, action.verb)
  return jax.tree.map(lambda x: x.reshape(shape), (action, tokens))
