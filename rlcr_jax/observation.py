"""What a free agent sees and what it may decide.

An observation is a set of tokens (me, the targets, a window of peers) with
masks of what is legal. Identities enter as sinusoids of an index, which break
the symmetry between equal agents without fixing how many there are.
"""

import functools
from typing import Any, NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
from rlcr_jax import channels
from rlcr_jax import clock
from rlcr_jax.roster import Rules

WAIT, TELL, POST, HIRE, FIRE = 'wait', 'tell', 'post', 'hire', 'fire'
OPEN, CLAIM, CLOSE = 'open', 'claim', 'close'  # On the issue board.
ARCHIVE, LOOK_UP = 'archive', 'look_up'

# Leading columns of `Observation.me`; verbs and the seat follow.
MY_FEATURES = (
    'one',
    'time_left_share',
    'time_left',
    'deadline',
    'log_team',
    'solitude',
    'chief',
    'progress',
    'unread',
    'experience',
    'effective',
    'rank',
    'open',
    'workable',
    'readable',
    'news',
)


class Observation(NamedTuple):
  """Tokens of features, and what is legal."""

  me: chex.Array  # [S] float32.
  targets: chex.Array  # [M, F] float32.
  peers: chex.Array  # [K, E] float32.
  relations: chex.Array  # [M, M] bool.
  legal_verb: chex.Array  # [V] bool.
  legal_target: chex.Array  # [V, M] bool.
  legal_peer: chex.Array  # [K] bool.
  peer_seat: chex.Array  # [K] int32.


class Action(NamedTuple):
  """One decision. Parts that the verb does not use are 0."""

  verb: chex.Array  # [] int32.
  target: chex.Array  # [] int32.
  peer: chex.Array  # [] int32, index into the peer window.
  symbol: chex.Array  # [] int32.


def is_legal(verbs, obs: Observation, action: Action) -> chex.Array:
  """[] bool: may this action have an effect?"""
  verb = action.verb
  uses_target, uses_peer = takes(verbs, 'target'), takes(verbs, 'peer')
  return (
      obs.legal_verb[verb]
      & (~uses_target[verb] | obs.legal_target[verb, action.target])
      & (~uses_peer[verb] | obs.legal_peer[action.peer])
  )


def takes(verbs: tuple[base.VerbSpec, ...], part: str) -> chex.Array:
  """[V] bool: which verbs use this part of an action."""
  return jnp.array([getattr(v, f'takes_{part}') for v in verbs])


def one_hot(index: chex.Array, size: int) -> chex.Array:
  """[..., size] bool; all False for an index out of range."""
  return jax.nn.one_hot(index, size, dtype=bool)


def observe(
    collective: Any,
    task: base.Task,
    rules: Rules,
    state: Any,
    agent: chex.Array,
) -> Observation:
  """What `agent` sees when its next turn begins.

  It does not depend on what others decided at the same instant, so it does not
  matter in which order free agents are served.

  Args:
    collective: a `Collective`.
    task: one problem instance.
    rules: scalars.
    state: a `CollectiveState`.
    agent: [] int32, a seat.
  """
  env, verbs = collective.env, collective.verbs
  board_fact = state.mail.board_fact & rules.board
  knows = state.knows[agent] | board_fact | rules.free_facts
  view = env.view(task, state.world, knows)
  chex.assert_shape(view.features, (env.num_targets, len(env.feature_names)))
  view = view._replace(legal=view.legal & _may_act(env, rules, state, agent))
  seats = _peer_window(collective, state, agent)
  legal_peer = state.present[seats] & (seats != agent)
  legal_peer &= ~rules.hub | (agent == 0) | (seats == 0)
  is_open = column(env, view, 'open') > 0
  subjects = (knows | is_open) & jnp.any(legal_peer)
  speaks_of = {TELL: subjects & rules.direct, POST: subjects & rules.board}
  speaks_of |= _shared(collective, rules, state, agent, knows, is_open)
  legal_target = _legal_targets(verbs, view.legal, speaks_of)
  legal_verb = _legal_verbs(verbs, legal_target, rules, state, agent)
  news = _news(env, view, rules, state.mail, knows, agent)
  counts = (
      is_open,
      _legal_for(env, view, learns=False),
      _legal_for(env, view, learns=True),
      news,
  )
  return Observation(
      me=_my_features(collective, task, rules, state, agent, counts),
      targets=_target_features(collective, view, rules, state, agent, news),
      peers=_peer_features(state, agent, seats, legal_peer),
      relations=view.relations,
      legal_verb=legal_verb,
      legal_target=legal_target & legal_verb[:, None],
      legal_peer=legal_peer,
      peer_seat=seats,
  )


def column(
    env: base.Environment, view: base.TargetView, name: str
) -> chex.Array:
  """One column of the environment's features, [M] float32."""
  return view.features[:, env.feature_names.index(name)]


def _legal_for(env, view: base.TargetView, learns: bool) -> chex.Array:
  """[M] bool: targets of the verbs that only learn, or of the others."""
  rows = [
      row
      for verb, row in zip(env.verbs, view.legal, strict=True)
      if verb.learns == learns
  ]
  none = jnp.zeros((env.num_targets,), bool)
  return functools.reduce(jnp.logical_or, rows, none)


def _news(
    env, view: base.TargetView, rules: Rules, mail, knows, agent
) -> chex.Array:
  """[M] bool: facts that I know, somebody wants and not everybody was told.

  A direct message reaches one reader, so where there is a board, only a post
  makes a fact old; elsewhere, my own telling does.
  """
  untold = ~mail.board_fact
  if mail.archive is not None:
    untold &= ~mail.archive
  untold &= rules.board | (mail.said_ms[agent] == clock.NEVER)
  return knows & untold & (column(env, view, 'wanted') > 0)


def _waves(index: chex.Array, size: int = 8) -> chex.Array:
  """Sinusoids of an index, [..., size]: an identity for any number of them."""
  rates = 2.0 ** -jnp.arange(size // 2)  # Wavelengths from 4 upwards.
  phase = jnp.multiply.outer(index, rates) * (jnp.pi / 2)
  return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], axis=-1)


def _recency(now_ms: chex.Array, then_ms: chex.Array) -> chex.Array:
  """1 for this instant, falling with age, 0 for never."""
  age_s = (now_ms - then_ms) / 1000.0
  return jnp.where(then_ms == clock.NEVER, 0.0, 1.0 / (1.0 + age_s / 30.0))


def _scale_ms(ms: chex.Array) -> chex.Array:
  """A time of any length as a number near 1."""
  return jnp.log1p(jnp.maximum(ms, 0) / 30_000.0)


def _columns(*columns: chex.Array) -> chex.Array:
  """Stacks and concatenates [...] and [..., k] columns to float32 [..., F]."""
  rank = min(jnp.ndim(c) for c in columns)
  wide = [c if jnp.ndim(c) > rank else c[..., None] for c in columns]
  return jnp.concatenate([c.astype(jnp.float32) for c in wide], axis=-1)


def _peer_window(collective, state, agent) -> chex.Array:
  """[K] seats: all others, or those last in contact, nearest first."""
  n, k = collective.num_agents, collective.num_peers
  ring = (agent + 1 + jnp.arange(max(n - 1, 1))) % n
  if n - 1 <= k:
    return ring.astype(jnp.int32)
  contact_ms = state.mail.contact_ms
  contact = jnp.maximum(contact_ms[agent], contact_ms[:, agent])[ring]
  contact = jnp.where(state.present[ring], contact, clock.NEVER - 1)
  _, order = jax.lax.top_k(contact, k)  # Ties keep the order of the ring.
  return ring[order].astype(jnp.int32)


def _may_act(env, rules: Rules, state, agent) -> chex.Array:
  """[V, M] bool: where the organisation lets an agent use the own verbs.

  One that is assigned its work acts on what it was told of last, and may read
  what it likes.
  """
  told_ms = state.mail.direct.ms[agent]
  assignment = (told_ms == jnp.max(told_ms)) & (told_ms != clock.NEVER)
  free = ~rules.assigned | (agent == 0) | assignment
  return free[None, :] | jnp.array([[v.learns] for v in env.verbs])


def _shared(
    collective, rules: Rules, state, agent, knows, is_open
) -> dict[str, chex.Array]:
  """[M] bool for each verb of the issue board and of the archive."""
  mail, rows = state.mail, {}
  if collective.config.issues:
    status, owner = mail.issues.status, mail.issues.owner
    rows = {
        OPEN: channels.can_open(status) & is_open,
        CLAIM: channels.can_claim(status),
        CLOSE: channels.can_close(status, owner, agent),
    }
    rows = {name: row & rules.issues for name, row in rows.items()}
  if collective.config.archive:
    rows[ARCHIVE] = knows & ~mail.archive & rules.archive
    rows[LOOK_UP] = ~knows & mail.archive & rules.archive
  return rows


def _legal_targets(verbs, env_legal, speaks_of) -> chex.Array:
  """[V, M] bool: the environment's rows, then those of coordination.

  One can speak of what one knows and of what there is to do now.
  """
  nothing = jnp.zeros_like(env_legal[0])
  rows = [speaks_of.get(v.name, nothing) for v in verbs[len(env_legal) :]]
  return base.table([*env_legal, *rows])


def _legal_verbs(verbs, legal_target, rules: Rules, state, agent) -> chex.Array:
  """[V] bool."""
  chief = rules.hiring & (agent == 0)
  team = jnp.sum(state.present)
  others = {
      WAIT: jnp.asarray(True),
      HIRE: chief & (team < rules.team_limit),
      FIRE: chief & (team > 1),
  }
  return jnp.stack(
      [
          jnp.any(legal_target[i]) if v.takes_target else others[v.name]
          for i, v in enumerate(verbs)
      ]
  )


def _my_features(
    collective, task, rules: Rules, state, agent, counts
) -> chex.Array:
  """[S] float32: `MY_FEATURES`, the last verb, the seat, the island."""
  now_ms, deadline_ms = state.clock_ms, rules.deadline_ms
  team = jnp.sum(state.present)
  # Who else is free at this instant, in a later seat: with awareness only.
  begins = (state.turn.start_ms == now_ms) & (state.turn.verb >= 0)
  free = state.present & (~state.busy | begins)
  rank = jnp.sum(free & (jnp.arange(collective.num_agents) > agent))
  return _columns(
      jnp.ones(()),
      (deadline_ms - now_ms) / deadline_ms,
      _scale_ms(deadline_ms - now_ms),
      _scale_ms(deadline_ms),
      jnp.log(team) / 2.0,
      1.0 / team,
      rules.hiring & (agent == 0),
      collective.env.progress(task, state.world, now_ms),
      jnp.log1p(state.mail.unread[agent] / 100.0) / 3.0,
      jnp.log1p(state.turn_index[agent]) / 3.0,
      state.effective[agent],
      rank * rules.awareness,
      *(jnp.log1p(jnp.sum(targets)) for targets in counts),
      one_hot(state.turn.verb[agent], len(collective.verbs)),
      _waves(agent),
      *([_waves(rules.island)] if collective.config.islands > 1 else []),
  )


def _target_features(
    collective, view: base.TargetView, rules: Rules, state, agent, news
) -> chex.Array:
  """[M, F] float32: the environment's columns, `in_flight`, then the rest."""
  ids = jnp.arange(collective.env.num_targets)
  now_ms, mail, turn = state.clock_ms, state.mail, state.turn
  others = state.busy & (turn.start_ms < now_ms)
  others &= jnp.arange(collective.num_agents) != agent
  others &= (turn.verb >= 0) & (turn.verb < len(collective.env.verbs))
  at = one_hot(turn.target, len(ids)) & others[:, None]  # [N, M]
  mine = (turn.target[agent] == ids) & (turn.verb[agent] >= 0)
  posted = mail.board.ms != clock.NEVER
  told = mail.direct.ms[agent] != clock.NEVER
  voice = lambda said, symbol, sender: said[:, None] * _columns(
      jnp.ones_like(said),
      one_hot(symbol, collective.config.num_symbols),
      _waves(sender),
  )
  return _columns(
      view.features,
      jnp.sum(at, axis=0) * rules.awareness,
      mine,
      mine & state.effective[agent],
      posted & (mail.board.sender == agent),
      mail.board_fact,
      news,
      _recency(now_ms, mail.board.ms),
      _recency(now_ms, mail.direct.ms[agent]),
      _recency(now_ms, mail.said_ms[agent]),
      voice(posted, mail.board.symbol, mail.board.sender),
      voice(told, mail.direct.symbol[agent], mail.direct.sender[agent]),
      _waves(ids),
      _backlog(collective.env, view),
      *_listed(collective.config, state, agent),
  )


def _listed(config, state, agent) -> list[chex.Array]:
  """Columns of the issue board and of the archive, where there are any."""
  columns = []
  if config.issues:
    status, owner, ms = state.mail.issues
    columns += [
        one_hot(status, 4)[:, 1:],  # Open, claimed, closed.
        owner == agent,
        _waves(owner) * (owner >= 0)[:, None],
        _recency(state.clock_ms, ms),
    ]
  if config.archive:
    columns.append(state.mail.archive)
  return columns


def _backlog(env: base.Environment, view: base.TargetView) -> chex.Array:
  """[M, 8] float32: each open target's place in the order of priority.

  Everybody sees the same backlog, so a convention such as "seat k takes place
  k" can be learned for any number of agents and targets.
  """
  is_open = column(env, view, 'open') > 0
  priority = column(env, view, 'priority')
  ids = jnp.arange(env.num_targets)
  ahead = priority[None, :] > priority[:, None]
  ahead |= (priority[None, :] == priority[:, None]) & (
      ids[None, :] < ids[:, None]
  )
  place = jnp.sum(ahead & is_open[None, :], axis=1)
  return _waves(place) * is_open[:, None]


def _peer_features(state, agent, seats, legal_peer) -> chex.Array:
  """[K, E] float32, zero for absent peers."""
  now_ms, contact_ms = state.clock_ms, state.mail.contact_ms
  features = _columns(
      jnp.ones_like(seats),
      seats == 0,
      _recency(now_ms, contact_ms[agent, seats]),
      _recency(now_ms, contact_ms[seats, agent]),
      _waves(seats),
  )
  return features * legal_peer[:, None]
