"""Who belongs to a collective: organisations, hiring and firing.

An organisation is a set of traced numbers, not a code path: all of them run the
same compiled program.
"""

from typing import NamedTuple

import chex
from envs.base import require
from envs.base import VerbSpec
import jax.numpy as jnp

ORGANISATIONS = ('solo', 'flat', 'ceo', 'orchestrator')

CHANNELS = ('direct', 'board', 'issues', 'archive')


class Rules(NamedTuple):
  """The conditions of one rollout. All scalars, all traced."""

  deadline_ms: chex.Array  # [] int32.
  team_start: chex.Array  # [] int32, agents present at the start.
  team_limit: chex.Array  # [] int32, most agents present at once.
  hiring: chex.Array  # [] bool, may agent 0 hire and fire?
  hub: chex.Array  # [] bool, do all messages go to or from agent 0?
  assigned: chex.Array  # [] bool, do others act where agent 0 told them only?
  frozen: chex.Array  # [] bool, are the others played by a frozen snapshot?
  direct: chex.Array  # [] bool, are direct messages allowed?
  board: chex.Array  # [] bool, is there a board?
  issues: chex.Array  # [] bool, is there an issue board?
  archive: chex.Array  # [] bool, is there a knowledge archive?
  awareness: chex.Array  # [] bool, are turns in flight visible?
  free_facts: chex.Array  # [] bool, does everybody know every fact?
  islands: chex.Array  # [] int32, teams that play, each in its own world.
  island: chex.Array  # [] int32, which of them this is.


def verbs(hire_tokens: float, hire_tool_ms: int, fire_tokens: float):
  """The two verbs that change the roster."""
  return (
      VerbSpec('hire', False, hire_tokens, hire_tool_ms, False),
      VerbSpec('fire', False, fire_tokens, 0, False, True),
  )


def rules(
    organisation: str,
    deadline_ms: chex.Array | int,
    *,
    num_agents: int,
    max_hires: int,
    direct: bool = True,
    board: bool = True,
    issues: bool = False,
    archive: bool = False,
    awareness: bool = False,
    free_facts: bool = False,
    islands: int = 1,
) -> Rules:
  """The rules of an organisation of at most `num_agents` agents.

  Args:
    organisation: `solo` (agent 0 alone, on one island), `flat` (everyone from
      the start), `ceo` (agent 0 alone at first; it can hire and fire) or
      `orchestrator` (the same, but those whom agent 0 hires talk to it alone,
      act on what it told them of last, and are played by a frozen snapshot of
      the policy: arXiv 2602.02276).
    deadline_ms: the time limit.
    num_agents: N, the seats.
    max_hires: most agents that the CEO may employ at once.
    direct: may agents send direct messages?
    board: is there a public board?
    issues: is there an issue board?
    archive: is there a knowledge archive?
    awareness: are other agents' turns in flight visible?
    free_facts: does everybody know every fact (an oracle's privilege)?
    islands: teams that play the same task, each in its own world.

  Raises:
    ValueError: for an unknown organisation.
  """
  require(
      organisation in ORGANISATIONS,
      'collective.organisation',
      organisation,
      f'one of {ORGANISATIONS}',
  )
  start, limit = {
      'solo': (1, 1),
      'flat': (num_agents, num_agents),
      'ceo': (1, min(1 + max_hires, num_agents)),
      'orchestrator': (1, min(1 + max_hires, num_agents)),
  }[organisation]
  talks = organisation != 'solo'
  orchestrated = organisation == 'orchestrator'
  public = talks and not orchestrated
  return Rules(
      deadline_ms=jnp.asarray(deadline_ms, jnp.int32),
      team_start=jnp.int32(start),
      team_limit=jnp.int32(limit),
      hiring=jnp.asarray(organisation in ('ceo', 'orchestrator')),
      hub=jnp.asarray(orchestrated),
      assigned=jnp.asarray(orchestrated),
      frozen=jnp.asarray(orchestrated),
      direct=jnp.asarray(direct and talks),
      board=jnp.asarray(board and public),
      issues=jnp.asarray(issues and public),
      archive=jnp.asarray(archive and public),
      awareness=jnp.asarray(awareness),
      free_facts=jnp.asarray(free_facts),
      islands=jnp.int32(islands if talks else 1),
      island=jnp.int32(0),
  )


def on_islands(rules: Rules, count: int) -> Rules:
  """The rules of each of `count` islands: [B] each becomes [B * count].

  The islands of one rollout lie side by side; those that do not play are empty.
  """
  rules = Rules(*(jnp.repeat(x, count) for x in rules))
  island = jnp.arange(rules.island.shape[0]) % count
  return rules._replace(
      island=island,
      team_start=jnp.where(island < rules.islands, rules.team_start, 0),
  )


def repeat(rules_of_one: Rules, count: int) -> Rules:
  """The same rules for several rollouts, [count] each."""
  return Rules(*(jnp.broadcast_to(x, (count,)) for x in rules_of_one))


def land(
    present: chex.Array,
    hires: chex.Array,
    fires: chex.Array,
    peer: chex.Array,
    team_limit: chex.Array,
) -> tuple[chex.Array, chex.Array, chex.Array]:
  """Applies the dismissals, then the hires, that land at one instant.

  Args:
    present: [N] bool.
    hires: [N] bool, whose hiring lands now.
    fires: [N] bool, whose firing lands now.
    peer: [N] int32, whom they fire.
    team_limit: [] int32.

  Returns:
    `(present, hired, fired)`, [N] bool each. A hire takes the first empty
    seats; nothing happens where the team is full.
  """
  n = present.shape[0]
  at = peer[:, None] == jnp.arange(n)[None, :]
  fired = present & jnp.any(at & fires[:, None], axis=0)
  present = present & ~fired
  vacancies = jnp.clip(team_limit - jnp.sum(present), 0, jnp.sum(hires))
  # Seats are counted by a triangular sum: a cumsum is slow in a small axis.
  before = jnp.arange(n)[None, :] < jnp.arange(n)[:, None]
  rank = jnp.sum(before & ~present[None, :], axis=1)
  hired = ~present & (rank < vacancies)
  return present | hired, hired, fired
