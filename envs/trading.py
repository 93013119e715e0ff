"""A trading desk: hidden drifts, noisy signals and one shared risk budget.

Every asset drifts up or down at a steady rate that nobody sees. Research gives
a noisy signal of the asset's own part of its drift; the other part is that of
a partner, so whoever trades must know two signals, and opens a position only on
the side that they speak for. A position, long or short, earns the drift for as
long as it is held, until the market closes. Time spent on research is time in
which nothing is earned.

Parallelism breaks in three places. A signal is of use only together with that
of the partner, which somebody else may have researched. All positions draw on
one risk budget: of more trades than it allows only the first go through, and
the best assets deserve it, which only those can name who know many signals.
And trades in one asset at one instant exclude each other. With `coupling=0` all
signals are public. With `combination=0` and `risk_budget=num_assets` as well
every asset is a matter of its own: the work is then perfectly parallel.
"""

import dataclasses
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

RESEARCH, BUY, SELL = 0, 1, 2

_TINY = 1e-9  # Where no drift is worth a trade, progress is 0.

_FEATURES = (
    *base.PLANNING_FEATURES,
    'known',
    'signal',
    'partner_known',
    'estimate',
    'position',
    'lots_left',
    'desired',
)


class Task(NamedTuple):
  """One market. Drifts, signals and the optimum are hidden."""

  needs: chex.Array  # [M, M] bool: row i names the partner, if it matters.
  place: chex.Array  # [M] int32, along the ring of partners.
  drift: chex.Array  # [M] float32, profit per lot from 0 to the horizon.
  signal: chex.Array  # [M] float32, what research finds.
  private: chex.Array  # [M] bool: is the signal seen by those who know only?
  optimum: chex.Array  # [] float32, the most that the risk budget could earn.


class World(NamedTuple):
  """What was found out, and the book. A position is a lot long, or short."""

  researched: chex.Array  # [M] bool: the signal exists.
  position: chex.Array  # [M] int32: -1, 0 or 1 lots.
  booked: chex.Array  # [M] int32, sum over trades of lots * ms.


class _Outlook(NamedTuple):
  """What one agent makes of the signals that it knows. [M] each."""

  known: chex.Array  # bool.
  partner_known: chex.Array  # bool; True where the partner does not matter.
  judged: chex.Array  # bool: it knows all signals that a trade needs.
  signal: chex.Array  # float32, 0 where not known.
  estimate: chex.Array  # float32, mean of the drift, given what it knows.
  desired: chex.Array  # int32, the position that it would like to see.


@dataclasses.dataclass(frozen=True)
class Trading(base.Environment):
  """Knobs of the market. Progress = profit / profit of the best portfolio.

  The fact of an asset is its signal. The partners form a ring.
  """

  num_assets: int = 12  # M.
  risk_budget: int = 4  # Most lots, long and short, held at once.
  combination: float = 0.5  # Weight of the partner's part in a drift.
  noise: float = 0.5  # Standard deviation of a signal around its part.
  horizon_ms: int = 180_000  # When the market closes.
  coupling: float = 1.0  # Share of assets whose signal is private.
  awareness: bool = False  # Are other agents' turns in flight visible?
  research_tokens: float = 2000.0  # Median output tokens of one research.
  research_tool_ms: int = 10_000
  trade_tokens: float = 300.0  # Likewise, of buying or selling one lot.
  trade_tool_ms: int = 5000

  name = 'trading'
  monotone = False
  accrues = True

  def __post_init__(self):
    need = base.require
    need(self.num_assets >= 2, 'env.num_assets', self.num_assets, '>= 2')
    need(
        1 <= self.risk_budget <= self.num_assets,
        'env.risk_budget',
        self.risk_budget,
        f'from 1 to num_assets={self.num_assets}',
    )
    base.check_knobs(self, ('horizon_ms',), ('combination', 'coupling'))
    need(
        0.0 <= self.noise < np.inf,
        'env.noise',
        self.noise,
        '>= 0 and finite',
    )

  @property
  def num_targets(self) -> int:
    return self.num_assets

  @property
  def verbs(self) -> tuple[base.VerbSpec, ...]:
    trade = self.trade_tokens, self.trade_tool_ms
    return (
        base.own_verb(self, 'research'),
        base.VerbSpec('buy', True, *trade, True),
        base.VerbSpec('sell', True, *trade, True),
    )

  @property
  def feature_names(self) -> tuple[str, ...]:
    return _FEATURES

  def sample_task(self, key: jax.Array) -> Task:
    key_place, key_part, key_noise, key_private = jax.random.split(key, 4)
    m = self.num_assets
    place = jax.random.permutation(key_place, m)
    needs = place[None, :] == (place[:, None] + 1) % m
    needs &= self.combination > 0
    part = jax.random.normal(key_part, (m,))
    drift = self._combine(part, needs)
    best = jax.lax.top_k(jnp.abs(drift), self.risk_budget)[0]
    return Task(
        needs=needs,
        place=place,
        drift=drift,
        signal=part + self.noise * jax.random.normal(key_noise, (m,)),
        private=jax.random.uniform(key_private, (m,)) < self.coupling,
        optimum=jnp.sum(best),
    )

  def _combine(self, part: chex.Array, needs: chex.Array) -> chex.Array:
    """[M] float32: an asset's own part and its partner's."""
    partner = jnp.sum(jnp.where(needs, part[None, :], 0.0), axis=1)
    return (1.0 - self.combination) * part + self.combination * partner

  def reset(self, task: Task) -> World:
    zeros = jnp.zeros_like(task.place)
    return World(researched=zeros > 0, position=zeros, booked=zeros)

  def _outlook(self, task: Task, world: World, knows: chex.Array) -> _Outlook:
    """What follows from the known signals; what is hidden has no part in it.

    The parts are standard normal, so the mean of one, given its signal, is the
    signal shrunk towards 0. Positions that the agent cannot judge stay; the
    rest of the budget goes to the largest estimates.
    """
    known = world.researched & (knows | ~task.private)
    partner_known = jnp.sum(task.needs & ~known[None, :], axis=1) == 0
    judged = known & partner_known
    signal = jnp.where(known, task.signal, 0.0)
    estimate = self._combine(signal, task.needs) / (1.0 + self.noise**2)
    others = jnp.sum(jnp.abs(world.position) * ~judged)
    strength = jnp.where(judged, jnp.abs(estimate), -1.0)
    ids = jnp.arange(self.num_assets)
    ahead = strength[None, :] > strength[:, None]
    ahead |= (strength[None, :] == strength[:, None]) & (
        ids[None, :] < ids[:, None]
    )
    chosen = jnp.sum(ahead, axis=1) < self.risk_budget - others
    wish = jnp.sign(estimate).astype(jnp.int32) * chosen
    return _Outlook(
        known=known,
        partner_known=partner_known,
        judged=judged,
        signal=signal,
        estimate=estimate,
        desired=jnp.where(judged, wish, world.position),
    )

  def view(
      self, task: Task, world: World, knows: chex.Array
  ) -> base.TargetView:
    m = self.num_assets
    chex.assert_shape(knows, (m,))
    seen = self._outlook(task, world, knows)
    position = world.position
    lots_left = self.risk_budget - jnp.sum(jnp.abs(position))
    room = lots_left > 0
    tradable = (position != 0) | room  # Whoever holds a lot may close it.
    opens = (position == 0) & room  # And open one on the side of its estimate.
    missing = seen.known & ~seen.partner_known
    change = jnp.abs(seen.desired - position)  # [M] lots, 0 to 2.
    # Rows: assets that the agent could trade if it knew their partner's signal.
    waits = task.needs & (missing & tradable)[:, None]
    blocks_me = jnp.sum(waits, axis=0)
    follower = jnp.sum(task.needs & seen.known[:, None], axis=0) > 0
    gain = jnp.abs(seen.estimate) * change
    closes = (position != 0) & (change > 0)
    to_trade = 2.0 + closes + gain / (1.0 + gain)
    # Those that complete most pairs; of equals, those that come in a row.
    completes = seen.partner_known * 0.5 + follower * 0.5
    to_research = completes + 0.4 * (1.0 - task.place / m)
    typical = np.hypot(1.0 - self.combination, self.combination)
    worth = jnp.where(seen.judged, gain, np.sqrt(2.0 / np.pi) * typical)
    turns_left = jnp.where(
        seen.judged, change, 1.0 + ~seen.known + ~seen.partner_known
    )
    uses = 1 + jnp.sum(task.needs, axis=0)  # Its own, and as a partner.
    columns = (
        ~seen.known | tradable,
        jnp.where(
            seen.known, to_trade * (seen.judged & (change > 0)), to_research
        ),
        worth * m / (self.risk_budget * typical),
        turns_left,
        missing,
        blocks_me,
        uses * (seen.known & task.private),
        seen.known,
        seen.signal,
        seen.partner_known,
        seen.estimate,
        position,
        jnp.broadcast_to(lots_left / self.risk_budget, (m,)),
        seen.desired,
    )
    return base.TargetView(
        features=base.features(columns),
        legal=base.table(
            [
                ~seen.known,
                seen.judged & ((position < 0) | (opens & (seen.estimate > 0))),
                seen.judged & ((position > 0) | (opens & (seen.estimate < 0))),
            ]
        ),
        relations=task.needs,
    )

  def reference_verb(
      self, features: chex.Array, legal: chex.Array
  ) -> chex.Array:
    """Researches what is not known, and trades towards what is desired."""
    column = {name: features[:, i] for i, name in enumerate(_FEATURES)}
    change = column['desired'] - column['position']
    verb = jnp.where(legal[RESEARCH], RESEARCH, -1)
    verb = jnp.where(legal[BUY] & (change > 0), BUY, verb)
    return jnp.where(legal[SELL] & (change < 0), SELL, verb)

  def land(
      self,
      task: Task,
      world: World,
      turns: base.Turns,
      knows: chex.Array,
      key: jax.Array,
  ) -> tuple[World, chex.Array, base.Outcome]:
    """All learn what they researched; of trades, those that limits allow.

    A trade adds a lot, or takes one away, whatever the position has become
    since it began. Of several in one asset at one instant the first seat's
    counts. Trades that close a position come first, then those that open one,
    in the order of the seats, until the budget is used up.
    """
    del key  # Chance has no part in it, once the task is drawn.
    at = turns.target[:, None] == jnp.arange(self.num_assets)[None, :]  # [N, M]
    position = world.position

    researches = base.landed(turns, RESEARCH, self.num_assets)
    finds = base.first(researches) & ~world.researched[None, :]
    new = jnp.sum(finds, axis=0) > 0  # [M]
    learned = researches & task.private[None, :] & ~knows

    lots = (turns.verb == BUY) * 1 - (turns.verb == SELL)  # [N]
    lots *= turns.lands & (turns.now_ms < self.horizon_ms)
    trades = at & (lots != 0)[:, None]
    trades &= jnp.abs(position[None, :] + lots[:, None]) <= 1
    trades = base.first(trades)
    opens = jnp.sum(trades & (position == 0)[None, :], axis=1)  # [N] 0 or 1.
    closes = jnp.sum(trades & (position != 0)[None, :])
    used = jnp.sum(jnp.abs(position)) - closes
    late = (opens > 0) & (used + jnp.cumsum(opens) > self.risk_budget)
    trades &= ~late[:, None]
    change = jnp.sum(trades * lots[:, None], axis=0, dtype=jnp.int32)  # [M]

    effective = jnp.any(finds | learned | trades, axis=1)
    world = World(
        researched=world.researched | new,
        position=position + change,
        booked=world.booked + change * turns.now_ms,
    )
    return world, knows | learned, base.Outcome(effective=effective)

  def progress(
      self, task: Task, world: World, now_ms: chex.Array
  ) -> chex.Array:
    open_ms = jnp.minimum(now_ms, self.horizon_ms)
    held = world.position * open_ms - world.booked  # [M] lots * ms, exact.
    profit = jnp.sum(task.drift * held) / self.horizon_ms
    share = profit / jnp.maximum(task.optimum, _TINY)
    return jnp.clip(share, 0.0, 1.0).astype(jnp.float32)

  def finished(self, task: Task, world: World) -> chex.Array:
    del task, world  # Profit accrues until the market closes.
    return jnp.asarray(False)

  def bounds(
      self,
      task: Task,
      num_agents: int,
      limit_ms: chex.Array,
      turn_ms: chex.Array,
  ) -> base.Bounds:
    """Luck: the k-th position opens as soon as k positions can be open at all.

    To hold k positions somebody made k trades. As partners form a ring, these
    need k + 1 signals (k, if all assets are held or no partner is needed). By
    then n agents have spent the time of all that work, and before the last of
    the trades began they had done all the research. The best k drifts are the
    most that k positions can earn per unit of time.

    A task has no end; the times are those until the best portfolio is held.
    The serial time is exact. Whoever lacks no agent does all the research at
    once and then all trades, which is the critical path.
    """
    research_ms = turn_ms[RESEARCH]
    trade_ms = jnp.minimum(turn_ms[BUY], turn_ms[SELL])
    count = 1 + jnp.arange(self.risk_budget)
    in_row = count + (self.combination > 0)
    signals = jnp.minimum(in_row, self.num_assets)
    work_ms = signals * research_ms + count * trade_ms
    path_ms = -(-signals // num_agents) * research_ms + trade_ms
    opens_ms = jnp.maximum(-(-work_ms // num_agents), path_ms)
    held_ms = jnp.minimum(limit_ms, self.horizon_ms) - opens_ms
    drifts, which = jax.lax.top_k(jnp.abs(task.drift), self.risk_budget)
    profit = jnp.sum(drifts * jnp.maximum(held_ms, 0)) / self.horizon_ms
    best = which[:, None] == jnp.arange(self.num_assets)[None, :]
    needed = best | task.needs[which]
    needed = jnp.sum(jnp.sum(needed, axis=0) > 0, dtype=jnp.int32)
    share = profit / jnp.maximum(task.optimum, _TINY)
    return base.Bounds(
        progress=jnp.clip(share, 0.0, 1.0).astype(jnp.float32),
        serial_ms=needed * research_ms + self.risk_budget * trade_ms,
        critical_path_ms=research_ms + trade_ms,
    )

  def describe(self, task: Task) -> str:
    task = jax.tree.map(np.asarray, task)
    lines = [
        f'A market of {self.num_assets} assets that closes after'
        f' {self.horizon_ms / 1000:g} s. Hold assets long that rise and short'
        f' that fall: at most one lot of each and {self.risk_budget} in all.'
        ' Research finds a noisy signal of an asset.'
    ]
    if self.combination > 0:
      lines[0] += (
          f' A drift is {1.0 - self.combination:g} times what the signal of the'
          f' asset is about and {self.combination:g} times what that of its'
          ' partner is about; to trade takes both signals.'
      )
    for i in range(self.num_assets):
      partner = [f'its partner is {j}, ' for j in np.flatnonzero(task.needs[i])]
      seen = 'private' if task.private[i] else 'public'
      lines.append(f'asset {i}: {"".join(partner)}its signal is {seen}')
    return '\n'.join(lines)

  def describe_view(
      self, task: Task, world: World, knows: chex.Array, legal: chex.Array
  ) -> str:
    seen = jax.tree.map(np.asarray, self._outlook(task, world, knows))
    position, legal = np.asarray(world.position), np.asarray(legal)
    name = {-1: 'short', 0: 'flat', 1: 'long'}
    lines = []
    for i in range(self.num_assets):
      notes = [name[int(position[i])]]
      if seen.known[i]:
        notes.append(f'signal {seen.signal[i]:+.2f}')
      else:
        notes.append('signal not known')
      if seen.judged[i]:
        notes.append(f'estimate {seen.estimate[i]:+.2f}')
        if seen.desired[i] != position[i]:
          notes.append(f'better {name[int(seen.desired[i])]}')
      notes += base.commands(self.verbs, legal, i)
      lines.append(f'asset {i}: {", ".join(notes)}')
    return '\n'.join(lines)
