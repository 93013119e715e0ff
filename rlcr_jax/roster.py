"""Who belongs to a collective: organisations, hiring and firing.

An organisation is a set of traced numbers, not a code path: `solo`, `flat` and
`ceo` run the same compiled program.
"""

from typing import NamedTuple

import chex
from envs.base import require
from envs.base import VerbSpec
import jax.numpy as jnp

ORGANISATIONS = ('solo', 'flat', 'ceo')


class Rules(NamedTuple):
  """The conditions of one rollout. All scalars, all traced."""

  deadline_ms: chex.Array  # [] int32.
  team_start: chex.Array  # [] int32, agents present at the start.
  team_limit: chex.Array  # [] int32, most agents present at once.
  hiring: chex.Array  # [] bool, may agent 0 hire and fire?
  direct: chex.Array  # [] bool, are direct messages allowed?
  board: chex.Array  # [] bool, is there a board?
  awareness: chex.Array  # [] bool, are turns in flight visible?
  free_facts: chex.Array  # [] bool, does everybody know every fact?


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
    awareness: bool = False,
    free_facts: bool = False,
) -> Rules:
  """The rules of an organisation of at most `num_agents` agents.

  Args:
    organisation: `solo` (agent 0 alone), `flat` (everyone from the start) or
      `ceo` (agent 0 alone at first; it can hire and fire).
    deadline_ms: the time limit.
    num_agents: N, the seats.
    max_hires: most agents that the CEO may employ at once.
    direct: may agents send direct messages?
    board: is there a public board?
    awareness: are other agents' turns in flight visible?
    free_facts: does everybody know every fact (an oracle's privilege)?

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
  }[organisation]
  talks = organisation != 'solo'
  return Rules(
      deadline_ms=jnp.asarray(deadline_ms, jnp.int32),
      team_start=jnp.int32(start),
      team_limit=jnp.int32(limit),
      hiring=jnp.asarray(organisation == 'ceo'),
      direct=jnp.asarray(direct and talks),
      board=jnp.asarray(board and talks),
      awareness=jnp.asarray(awareness),
      free_facts=jnp.asarray(free_facts),
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
