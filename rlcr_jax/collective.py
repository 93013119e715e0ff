"""A collective: several agents, one task, one clock.

`advance` moves a collective to its next event and lands the turns that end
there; `observe` says what a free agent sees; `act` starts turns. The same three
drive the compiled event loop and a host loop. Everything here is written for
one collective and is `vmap`ped over many.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
from rlcr_jax import channels
from rlcr_jax import clock
from rlcr_jax import observation
from rlcr_jax import roster
from rlcr_jax.observation import ARCHIVE
from rlcr_jax.observation import CLAIM
from rlcr_jax.observation import CLOSE
from rlcr_jax.observation import FIRE
from rlcr_jax.observation import HIRE
from rlcr_jax.observation import LOOK_UP
from rlcr_jax.observation import OPEN
from rlcr_jax.observation import POST
from rlcr_jax.observation import TELL
from rlcr_jax.observation import WAIT
from rlcr_jax.roster import Rules


@dataclasses.dataclass(frozen=True)
class CollectiveConfig:
  """Organisation, channels and what the verbs of coordination cost."""

  organisation: str = 'ceo'  # solo, flat, ceo or orchestrator.
  num_agents: int = 9  # N, seats: the CEO and 8 hires.
  max_hires: int = 8  # Most agents that the CEO may employ at once.
  islands: int = 1  # Teams, each in a world of its own; the best return counts.
  island_size: int = 0  # Seats on each island; 0: num_agents.
  refresh_every: int = 0  # orchestrator: updates between snapshots; 0: never.
  max_critical_steps: int = 0  # Ends a rollout; 0: no limit.
  direct: bool = True  # Direct messages.
  board: bool = True  # A public board.
  issues: bool = False  # An issue board: items are opened, claimed, closed.
  archive: bool = False  # A knowledge archive: facts are kept and looked up.
  num_symbols: int = 4  # Vocabulary of a message, beside its subject.
  peer_window: int = 8  # K, peers that an agent sees at once.
  task_tokens: int = 25_000  # What a newcomer reads first: 5 s of prefill.
  tell_tokens: float = 100.0
  post_tokens: float = 100.0
  message_tool_ms: int = 1000
  issue_tokens: float = 30.0
  archive_tokens: float = 100.0
  look_up_tokens: float = 30.0
  look_up_tool_ms: int = 4000
  hire_tokens: float = 100.0
  hire_tool_ms: int = 2000
  fire_tokens: float = 100.0
  wait_tokens: float = 10.0
  wait_ms: int = 9000

  def __post_init__(self):
    need = base.require
    for field in ('num_agents', 'num_symbols', 'peer_window', 'islands'):
      value = getattr(self, field)
      need(value >= 1, f'collective.{field}', value, '>= 1')
    for field in ('island_size', 'refresh_every', 'max_critical_steps'):
      value = getattr(self, field)
      need(value >= 0, f'collective.{field}', value, '>= 0')
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name.endswith('_tokens'):
        need(value >= 1, f'collective.{field.name}', value, '>= 1 token')
      if field.name.endswith('_ms') or field.name == 'max_hires':
        need(value >= 0, f'collective.{field.name}', value, '>= 0')

  @property
  def seats(self) -> int:
    """N, on each island."""
    return self.island_size or self.num_agents

  @property
  def freezes(self) -> bool:
    """Are some agents played by a frozen snapshot of the policy?"""
    return self.organisation == 'orchestrator'

  def rules(self, deadline_ms, **changes) -> Rules:
    """The rules of this organisation; `changes` as in `roster.rules`."""
    fields = ('organisation', 'max_hires', 'islands', *roster.CHANNELS)
    own = {field: getattr(self, field) for field in fields}
    own |= {'num_agents': self.seats, 'deadline_ms': deadline_ms}
    return roster.rules(**(own | changes))


class Turn(NamedTuple):
  """The current turn of every agent, or its last one. [N] each."""

  verb: chex.Array  # int32.
  target: chex.Array  # int32.
  peer: chex.Array  # int32, a seat.
  symbol: chex.Array  # int32.
  legal: chex.Array  # bool: was it legal when it began?
  output_tokens: chex.Array  # int32.
  start_ms: chex.Array  # int32.
  end_ms: chex.Array  # int32.


class Ledger(NamedTuple):
  """What a collective has spent and achieved. [V] int32 unless stated."""

  turns: chex.Array  # Turns begun.
  effective: chex.Array  # Turns that landed and had their effect.
  output_tokens: chex.Array  # Written until now; see `spent_tokens`.
  hired: chex.Array  # [] int32, agents that hirings have brought.
  productive: chex.Array  # [] int32, of those: with an effect on the world.


class CollectiveState(NamedTuple):
  """One collective at one instant."""

  clock_ms: chex.Array  # [] int32.
  done: chex.Array  # [] bool: the deadline, or nothing is left to do.
  world: base.World
  knows: chex.Array  # [N, M] bool.
  present: chex.Array  # [N] bool.
  busy: chex.Array  # [N] bool: a turn is in flight.
  turn: Turn
  turn_index: chex.Array  # [N] int32, turns begun by each agent.
  effective: chex.Array  # [N] bool: the last turn had its effect.
  acted: chex.Array  # [N] bool: was here first, or had an effect on the world.
  agent_keys: jax.Array  # [N] keys.
  mail: channels.Mail
  stage_steps: chex.Array  # [N] int32, turns since the last one of agent 0.
  critical_steps: chex.Array  # [] int32, up to that turn.
  peak_team: chex.Array  # [] int32, most agents present at once.
  progress_ms: chex.Array  # [] int32, when progress last changed.
  ledger: Ledger


@dataclasses.dataclass(frozen=True)
class Collective:
  """Joins an environment, a roster, channels and a clock."""

  env: base.Environment
  config: CollectiveConfig = CollectiveConfig()
  latency: clock.LatencyModel = clock.LatencyModel()

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    """[V]: the environment's verbs first, then those of coordination."""
    c = self.config
    issue = (c.issue_tokens, c.message_tool_ms)
    costs = {
        TELL: (c.tell_tokens, c.message_tool_ms),
        POST: (c.post_tokens, c.message_tool_ms),
        OPEN: issue,
        CLAIM: issue,
        CLOSE: issue,
        ARCHIVE: (c.archive_tokens, c.message_tool_ms),
        LOOK_UP: (c.look_up_tokens, c.look_up_tool_ms),
    }
    return (
        *self.env.verbs,
        base.VerbSpec(WAIT, False, c.wait_tokens, c.wait_ms, False),
        *channels.verbs(costs, c.issues, c.archive),
        *roster.verbs(c.hire_tokens, c.hire_tool_ms, c.fire_tokens),
    )

  @property
  def num_agents(self) -> int:
    """N, seats of one island."""
    return self.config.seats

  @property
  def num_seats(self) -> int:
    """Seats of all islands."""
    return self.config.islands * self.config.seats

  def rules(self, deadline_ms, **changes) -> Rules:
    """The rules of this organisation in this world; see `roster.rules`."""
    seen = {'awareness': self.env.awareness}
    return self.config.rules(deadline_ms, **(seen | changes))

  @property
  def num_peers(self) -> int:
    """K, the size of the peer window; a padded seat when alone."""
    return max(min(self.config.peer_window, self.num_agents - 1), 1)

  def verb(self, name: str) -> int:
    """The index of a verb."""
    return [v.name for v in self.verbs].index(name)

  def shortest_turn_ms(self) -> tuple[int, ...]:
    """[V]: the shortest duration of each verb."""
    return tuple(
        self.latency.shortest_ms(v.output_tokens, v.tool_ms) for v in self.verbs
    )

  def reset(
      self, task: base.Task, rules: Rules, key: jax.Array
  ) -> CollectiveState:
    """A collective at time 0; those present begin to read the task.

    Args:
      task: one problem instance.
      rules: scalars.
      key: the rollout's key; decisions fold the agent and the turn into it.
    """
    n, m, v = self.num_agents, self.env.num_targets, len(self.verbs)
    seats = jnp.arange(n)
    zeros = jnp.zeros((n,), jnp.int32)
    none = jnp.zeros((n,), bool)
    spent = jnp.zeros((v,), jnp.int32)
    present = seats < rules.team_start
    return CollectiveState(
        clock_ms=jnp.int32(0),
        done=(rules.deadline_ms <= 0) | (rules.team_start == 0),
        world=self.env.reset(task),
        knows=jnp.zeros((n, m), bool),
        present=present,
        busy=present,
        turn=self._onboarding(zeros, zeros),
        turn_index=zeros,
        effective=none,
        acted=present,
        agent_keys=jax.vmap(jax.random.fold_in, (None, 0))(key, seats),
        mail=channels.reset(n, m, self.config.issues, self.config.archive),
        stage_steps=zeros,
        critical_steps=jnp.int32(0),
        peak_team=rules.team_start,
        progress_ms=jnp.int32(0),
        ledger=Ledger(spent, spent, spent, jnp.int32(0), jnp.int32(0)),
    )

  def _onboarding(self, start_ms: chex.Array, board_tokens: chex.Array) -> Turn:
    """Newcomers read the task and the board, [N] each; it is no decision."""
    zeros = jnp.zeros_like(start_ms)
    reading_ms = self.latency.duration_ms(
        zeros, self.config.task_tokens + board_tokens, zeros
    )
    return Turn(
        verb=zeros - 1,
        target=zeros,
        peer=zeros,
        symbol=zeros,
        legal=zeros > 0,
        output_tokens=zeros,
        start_ms=start_ms,
        end_ms=start_ms + reading_ms,
    )

  def ready(self, state: CollectiveState) -> chex.Array:
    """[N] bool: who is free to decide now."""
    ready = state.present & ~state.busy & ~state.done
    return ready & self._within_limit(state)

  def steps(self, state: CollectiveState) -> chex.Array:
    """[] int32: critical steps until now (Kimi K2.5, arXiv 2602.02276).

    A stage is a turn of agent 0 and what the others begin until its next one.
    It counts 1, and the most turns that one of the others begins in it.
    """
    return state.critical_steps + jnp.max(state.stage_steps)

  def _within_limit(self, state: CollectiveState) -> chex.Array:
    """[N] bool: whose next turn stays within the limit of critical steps."""
    limit, steps = self.config.max_critical_steps, self.steps(state)
    if not limit:
      return jnp.ones_like(state.present)
    begins = (state.turn.start_ms == state.clock_ms) & (state.turn.verb >= 0)
    opens_stage = state.present[0] & (~state.busy[0] | begins[0])
    opens_stage &= steps + 1 <= limit
    later = jnp.maximum(jnp.max(state.stage_steps), state.stage_steps + 1)
    others = jnp.where(opens_stage, steps + 2, state.critical_steps + later)
    chief = jnp.arange(self.num_agents) == 0
    return jnp.where(chief, steps + 1, others) <= limit

  def _count_steps(self, state: CollectiveState, may) -> CollectiveState:
    """Books the turns that began at this instant."""
    begun = state.busy & (state.turn.start_ms == state.clock_ms)
    begun &= (state.turn.verb >= 0) & may
    stage = jnp.where(begun[0], 0, state.stage_steps)
    chief = jnp.arange(self.num_agents) == 0
    return state._replace(
        stage_steps=stage + (begun & ~chief),
        critical_steps=jnp.where(
            begun[0], self.steps(state) + 1, state.critical_steps
        ),
    )

  def advance(
      self,
      task: base.Task,
      rules: Rules,
      state: CollectiveState,
      key: jax.Array,
      may: chex.Array | bool = True,
  ) -> tuple[CollectiveState, chex.Array]:
    """Moves the clock to the next event and lands the turns that end there.

    Args:
      task: one problem instance.
      rules: scalars.
      state: a collective in which nobody is waiting for a decision.
      key: for chance in the environment; folded with the clock here.
      may: [] bool; False leaves the state as it is.

    Returns:
      The state, and `ready` [N]. At the deadline, or when the environment says
      that nothing is left to do, `done` is set and nobody is ready. A turn that
      ends at the deadline lands; one that ends later never does.
    """
    may = may & ~state.done
    state = self._count_steps(state, may)
    ends = jnp.where(state.busy, state.turn.end_ms, clock.FOREVER)
    next_ms = jnp.min(ends)
    over = next_ms > rules.deadline_ms
    now_ms = jnp.minimum(next_ms, rules.deadline_ms)
    if self.config.max_critical_steps:  # Where nobody may go on, it is over.
      now_ms = jnp.where(jnp.any(state.busy), now_ms, state.clock_ms)
    lands = state.busy & (ends == now_ms) & may & ~over  # [N]
    before = self.env.progress(task, state.world, state.clock_ms)
    state = self._land(task, rules, state, lands, now_ms, key)
    after = self.env.progress(task, state.world, now_ms)
    finished = self.env.finished(task, state.world)
    stops = over | finished | (now_ms >= rules.deadline_ms)
    state = state._replace(
        clock_ms=jnp.where(may, now_ms, state.clock_ms),
        done=state.done | (may & stops),
        progress_ms=jnp.where(
            may & (after != before), now_ms, state.progress_ms
        ),
    )
    return state, self.ready(state)

  def _land(
      self, task, rules: Rules, state: CollectiveState, lands, now_ms, key
  ) -> CollectiveState:
    """The effects of the turns `lands` [N] on the world and on the team.

    At one instant, work comes first, then messages, dismissals and hires, and
    last what is listed.
    """
    turn = state.turn
    acts = lands & turn.legal
    is_verb = lambda name: acts & (turn.verb == self.verb(name))
    turns = base.Turns(turn.verb, turn.target, turn.start_ms, acts, now_ms)
    world, knows, outcome = self.env.land(
        task,
        state.world,
        turns,
        state.knows,
        jax.random.fold_in(key, now_ms),
    )
    lists = jnp.zeros_like(acts)
    if self.config.issues:
      lists = functools.reduce(
          jnp.logical_or, map(is_verb, (OPEN, CLAIM, CLOSE))
      )
    mail, knows = channels.land(
        state.mail,
        channels.Letters(
            direct=is_verb(TELL),
            post=is_verb(POST),
            lists=lists,
            target=turn.target,
            peer=turn.peer,
            symbol=turn.symbol,
            tokens=turn.output_tokens,
        ),
        knows,
        state.present,
        self.config.num_symbols,
        now_ms,
    )
    hires = is_verb(HIRE)
    present, hired, fired = roster.land(
        state.present, hires, is_verb(FIRE), turn.peer, rules.team_limit
    )
    in_world = turn.verb < len(self.env.verbs)
    effective = acts & jnp.where(in_world, outcome.effective, True)
    effective &= ~hires | jnp.any(hired)
    effective &= ~is_verb(TELL) | state.present[turn.peer]
    at = lambda name: base.landed(turns, self.verb(name), self.env.num_targets)
    if self.config.issues:
      issues, changed = channels.land_issues(
          mail.issues, *map(at, (OPEN, CLAIM, CLOSE)), present, now_ms
      )
      mail = mail._replace(issues=issues)
      effective &= ~lists | changed
    if self.config.archive:
      archive, knows, served = channels.land_archive(
          mail.archive, at(ARCHIVE), at(LOOK_UP), knows
      )
      mail = mail._replace(archive=archive)
      effective &= ~(is_verb(ARCHIVE) | is_verb(LOOK_UP)) | served
    works = effective & in_world
    ledger = self._settle(state, lands, effective, fired, now_ms)
    arrival = self._onboarding(
        jnp.full_like(turn.start_ms, now_ms), mail.board_tokens
    )
    return state._replace(
        world=world,
        knows=knows & ~hired[:, None],
        present=present,
        busy=(state.busy & ~lands & ~fired) | hired,
        turn=jax.tree.map(
            lambda new, old: jnp.where(hired, new, old), arrival, turn
        ),
        effective=jnp.where(lands, effective, state.effective) & ~hired,
        acted=(state.acted | works) & ~hired,
        mail=channels.forget(mail, hired),
        peak_team=jnp.maximum(state.peak_team, jnp.sum(present)),
        ledger=ledger._replace(
            hired=ledger.hired + jnp.sum(hired),
            productive=ledger.productive + jnp.sum(works & ~state.acted),
        ),
    )

  def _settle(self, state, lands, effective, fired, now_ms) -> Ledger:
    """Books the turns that landed, and those that a dismissal cut short."""
    cut = fired & state.busy & ~lands
    tokens = jnp.where(lands, state.turn.output_tokens, 0)
    tokens += jnp.where(cut, self._written(state.turn, now_ms), 0)
    per_verb = observation.one_hot(state.turn.verb, len(self.verbs))  # [N, V]
    ledger = state.ledger
    return ledger._replace(
        effective=ledger.effective
        + jnp.sum(per_verb & effective[:, None], axis=0),
        output_tokens=ledger.output_tokens
        + jnp.sum(jnp.where(per_verb, tokens[:, None], 0), axis=0),
    )

  def _written(self, turn: Turn, now_ms: chex.Array) -> chex.Array:
    """[N] int32: tokens of an unfinished turn that exist by `now_ms`."""
    span = jnp.maximum(turn.end_ms - turn.start_ms, 1)
    share = jnp.clip((now_ms - turn.start_ms) / span, 0.0, 1.0)
    return jnp.floor(turn.output_tokens * share).astype(jnp.int32)

  def spent_tokens(self, state: CollectiveState) -> chex.Array:
    """[V] int32: output tokens so far, with the written part of open turns."""
    written = self._written(state.turn, state.clock_ms)
    open_turns = jnp.where(state.busy, written, 0)
    per_verb = jnp.where(
        observation.one_hot(state.turn.verb, len(self.verbs)),
        open_turns[:, None],
        0,
    )
    return state.ledger.output_tokens + jnp.sum(per_verb, axis=0)

  def observe(
      self,
      task: base.Task,
      rules: Rules,
      state: CollectiveState,
      agent: chex.Array,
  ) -> observation.Observation:
    """What `agent` ([] int32) sees; see `observation.observe`."""
    return observation.observe(self, task, rules, state, agent)

  def sample_tokens(self, key: jax.Array, verb: chex.Array) -> chex.Array:
    """[] int32: output tokens of a turn, drawn around the verb's median."""
    medians = jnp.array([v.output_tokens for v in self.verbs])
    return self.latency.sample_tokens(key, medians[verb])

  def duration_ms(
      self,
      state: CollectiveState,
      agent: chex.Array,
      verb: chex.Array,
      output_tokens: chex.Array,
  ) -> chex.Array:
    """[] int32: how long a turn of `agent` that begins now will take."""
    tool_ms = jnp.array([v.tool_ms for v in self.verbs], jnp.int32)
    return self.latency.duration_ms(
        output_tokens, state.mail.unread[agent], tool_ms[verb]
    )

  def act(
      self,
      rules: Rules,
      state: CollectiveState,
      decides: chex.Array,
      turn: Turn,
  ) -> CollectiveState:
    """Begins the turns of the agents that decide now.

    Args:
      rules: scalars.
      state: a collective.
      decides: [N] bool, who begins a turn; each must be ready.
      turn: [N] each; only rows of `decides` are read. An illegal turn
        (`legal=False`) takes its time and has no effect.
    """
    keep = lambda new, old: jnp.where(decides, new, old)
    begun = observation.one_hot(turn.verb, len(self.verbs)) & decides[:, None]
    board_fact = state.mail.board_fact & rules.board
    ledger = state.ledger
    return state._replace(
        busy=state.busy | decides,
        turn=jax.tree.map(keep, turn, state.turn),
        turn_index=state.turn_index + decides,
        knows=state.knows | (decides[:, None] & board_fact[None, :]),
        mail=state.mail._replace(unread=keep(0, state.mail.unread)),
        ledger=ledger._replace(
            turns=ledger.turns + jnp.sum(begun, axis=0, dtype=jnp.int32)
        ),
    )
