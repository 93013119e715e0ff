"""Tests of organisations, hiring and firing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import roster

SEATS = 5


def make_rules(organisation, **changes):
  known = {'deadline_ms': 60_000, 'num_agents': 9, 'max_hires': 4}
  return roster.rules(organisation, **(known | changes))


@jax.jit
def land_jit(present, hires, fires, peer, team_limit):
  return roster.land(present, hires, fires, peer, team_limit)


def land(present, hires=(), fires=None, team_limit=SEATS):
  """Lands hires of the agents `hires` and dismissals {who: whom}.

  Returns:
    Who is present, hired and fired, as lists of seats.
  """
  seats, fires = np.arange(SEATS), fires or {}
  peer = np.array([fires.get(i, 0) for i in range(SEATS)], np.int32)
  result = land_jit(
      np.isin(seats, present),
      np.isin(seats, hires),
      np.isin(seats, list(fires)),
      peer,
      jnp.int32(team_limit),
  )
  return tuple(np.flatnonzero(who).tolist() for who in result)


@pytest.mark.parametrize(
    'organisation, start, limit, hiring, talks',
    [
        ('solo', 1, 1, False, False),
        ('flat', 9, 9, False, True),
        ('ceo', 1, 5, True, True),
    ],
)
def test_organisations(organisation, start, limit, hiring, talks):
  rules = make_rules(organisation)
  assert rules.deadline_ms == 60_000
  assert rules.team_start == start
  assert rules.team_limit == limit
  assert rules.hiring == hiring
  assert rules.direct == talks
  assert rules.board == talks
  assert not rules.awareness
  assert not rules.free_facts


@pytest.mark.parametrize(
    'num_agents, max_hires, limit', [(9, 8, 9), (4, 8, 4), (9, 0, 1)]
)
def test_a_ceo_employs_no_more_than_there_are_seats(
    num_agents, max_hires, limit
):
  rules = make_rules('ceo', num_agents=num_agents, max_hires=max_hires)
  assert rules.team_limit == limit


@pytest.mark.parametrize('field', ['direct', 'board'])
def test_channels_can_be_cut(field):
  rules = make_rules('flat', **{field: False})
  assert not getattr(rules, field)
  assert sum(map(int, (rules.direct, rules.board))) == 1


@pytest.mark.parametrize('field', ['awareness', 'free_facts'])
def test_privileges_can_be_given(field):
  assert getattr(make_rules('flat', **{field: True}), field)


def test_all_organisations_run_the_same_program():
  shapes = [
      jax.tree.map(lambda x: (x.shape, x.dtype), make_rules(name))
      for name in roster.ORGANISATIONS
  ]
  assert shapes[0] == shapes[1] == shapes[2]
  assert all(x.shape == () for x in make_rules('ceo'))
  assert make_rules('ceo').deadline_ms.dtype == jnp.int32


def test_unknown_organisation():
  with pytest.raises(ValueError) as error:
    make_rules('anarchy')
  message = str(error.value)
  assert "collective.organisation='anarchy'" in message
  assert "('solo', 'flat', 'ceo', 'orchestrator')" in message
  assert '\n' not in message


def test_nothing_lands():
  assert land([0, 2]) == ([0, 2], [], [])


def test_a_hire_takes_the_first_empty_seat():
  assert land([0], hires=[0]) == ([0, 1], [1], [])
  assert land([0, 1, 3], hires=[0]) == ([0, 1, 2, 3], [2], [])


def test_several_hires_take_several_seats():
  assert land([0, 2], hires=[0, 2]) == ([0, 1, 2, 3], [1, 3], [])


@pytest.mark.parametrize('limit, hired', [(2, []), (3, [1]), (4, [1, 3])])
def test_the_team_is_limited(limit, hired):
  present, newcomers, _ = land([0, 2], hires=[0, 2], team_limit=limit)
  assert newcomers == hired
  assert present == sorted([0, 2] + hired)


def test_nobody_is_hired_when_every_seat_is_taken():
  everyone = list(range(SEATS))
  assert land(everyone, hires=[0], team_limit=99) == (everyone, [], [])


def test_dismissal():
  assert land([0, 1, 2], fires={0: 1}) == ([0, 2], [], [1])
  assert land([0, 1, 2], fires={0: 1, 1: 2}) == ([0], [], [1, 2])
  assert land([0, 1, 2], fires={0: 1, 2: 1}) == ([0, 2], [], [1])


def test_one_who_is_absent_cannot_be_dismissed():
  assert land([0, 2], fires={0: 1}) == ([0, 2], [], [])


def test_dismissals_come_before_hires():
  # The team is full, so the newcomer needs the seat of the one who leaves.
  full = [0, 1, 2]
  assert land(full, hires=[0], fires={1: 2}, team_limit=3) == (full, [2], [2])


def test_verbs_say_what_they_take_and_cost():
  hire, fire = roster.verbs(70.0, 900, 40.0)
  assert (hire.name, hire.output_tokens, hire.tool_ms) == ('hire', 70.0, 900)
  assert (fire.name, fire.output_tokens, fire.tool_ms) == ('fire', 40.0, 0)
  assert not hire.takes_target and not hire.takes_peer
  assert fire.takes_peer and not fire.takes_target
  assert not hire.acts_on_environment and not fire.acts_on_environment
