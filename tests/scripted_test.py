"""Tests of the scripted policies; see `by_hand` for the project they see."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import observation
from rlcr_jax.observation import Action
from rlcr_jax.policies import scripted
from tests import by_hand
from tests.by_hand import Game

LATE_MS = 60_000
COLLECTIVE = by_hand.make_collective()
RANDOM = scripted.RandomPolicy(COLLECTIVE)
GREEDY = scripted.ListScheduler(COLLECTIVE, hires=0, by_value=True)
ORACLE = scripted.ListScheduler(COLLECTIVE, hires=2)


def rows_of(*observations):
  return jax.tree.map(lambda *x: jnp.stack(x), *observations)


@functools.partial(jax.jit, static_argnums=0)
def sample_jit(policy, keys, obs):
  return policy.sample((), keys, obs)


def choose(policy, game, agent):
  """`(verb, target)` that a list scheduler takes."""
  keys = jax.random.split(jax.random.key(0), 1)
  action, log_prob = sample_jit(policy, keys, rows_of(game.observe(agent)))
  assert log_prob.tolist() == [0]
  assert action.peer == action.symbol == 0
  return COLLECTIVE.verbs[int(action.verb[0])].name, int(action.target[0])


def make_action(verb, target=0, peer=0, symbol=0):
  parts = (COLLECTIVE.verb(verb), target, peer, symbol)
  return Action(*(jnp.array([part], jnp.int32) for part in parts))


def independent(**rules):
  """A project of the same modules, none of which needs another."""
  game = Game(LATE_MS, **rules)
  nothing = jnp.zeros((4, 4), bool)
  game.task = game.task._replace(depends=nothing, coupled=nothing)
  return game.advance()


def test_scripted_policies_have_no_parameters():
  for policy in (RANDOM, GREEDY, ORACLE):
    assert policy.init(jax.random.key(0)) == ()


# Random.


@pytest.mark.parametrize(
    'action, choices',
    [
        # Of work, wait, tell and post; modules 0 and 1 are open.
        (('wait',), 4),
        (('work', 0), 4 * 2),
        (('work', 1), 4 * 2),
        (('post', 1, 0, 1), 4 * 2 * 2),  # Two targets, two symbols.
        (('tell', 0, 1, 0), 4 * 2 * 2 * 2),  # And two peers.
    ],
)
def test_random_log_prob_by_hand(action, choices):
  obs = rows_of(Game(LATE_MS).advance().observe(0))
  log_prob, entropy = RANDOM.log_prob((), obs, make_action(*action))
  assert log_prob.shape == (1,)
  assert log_prob[0] == pytest.approx(-math.log(choices))
  assert entropy[0] == pytest.approx(math.log(choices))


def test_random_with_one_choice_only():
  game = Game(LATE_MS, organisation='solo').advance()
  obs = game.observe(0)
  only_wait = obs._replace(
      legal_verb=jnp.arange(7) == COLLECTIVE.verb('wait'),
      legal_target=obs.legal_target & False,
  )
  keys = jax.random.split(jax.random.key(0), 20)
  action, log_prob = sample_jit(RANDOM, keys, rows_of(*[only_wait] * 20))
  assert set(action.verb.tolist()) == {COLLECTIVE.verb('wait')}
  assert (log_prob == 0).all()


def test_random_draws_every_legal_action_as_often_as_it_says():
  game = Game(LATE_MS, organisation='ceo').advance().act(0, 'hire').advance()
  game.act(0, 'work', 0).advance()
  draws = 4000
  keys = jax.random.split(jax.random.key(1), draws)
  obs = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (draws, *x.shape)), game.observe(0)
  )
  action, log_prob = sample_jit(RANDOM, keys, obs)
  legal = jax.vmap(functools.partial(observation.is_legal, COLLECTIVE.verbs))
  assert legal(obs, action).all()
  drawn = np.stack(action, axis=1)
  kinds, first, counts = np.unique(
      drawn, axis=0, return_index=True, return_counts=True
  )
  # Wait and hire; work on 1 or 2; fire 1; post or tell 1 of 0, 1 or 2, each
  # with two symbols. All others are illegal.
  assert len(kinds) == 2 + 2 + 1 + 6 + 6
  probabilities = np.exp(log_prob[first])
  assert probabilities.sum() == pytest.approx(1)
  deviation = np.sqrt(draws * probabilities * (1 - probabilities))
  assert (abs(counts - draws * probabilities) < 4 * deviation).all()
  # Parts that a verb does not use are 0.
  used = [
      np.asarray(observation.takes(COLLECTIVE.verbs, part))[drawn[:, 0]]
      for part in ('target', 'peer', 'symbol')
  ]
  assert (drawn[:, 1:][~np.stack(used, axis=1)] == 0).all()


def test_random_draws_depend_on_a_row_s_own_key():
  obs = Game(LATE_MS).advance().observe(0)
  keys = jax.random.split(jax.random.key(2), 8)
  sample = lambda keys: np.stack(
      sample_jit(RANDOM, keys, rows_of(*[obs] * len(keys)))[0]
  )
  np.testing.assert_array_equal(sample(keys)[:, 3:5], sample(keys[3:5]))
  assert len({tuple(x) for x in sample(keys).T}) > 1


# List scheduling.


def test_greedy_takes_most_value_per_turn():
  # 0 gives 2 tests per turn, 1 gives 3; 0 heads the longest path (4 units).
  game = Game(LATE_MS, organisation='solo').advance()
  assert choose(GREEDY, game, 0) == ('work', 1)
  assert choose(ORACLE, game, 0) == ('work', 0)
  game.act(0, 'work', 1).advance().act(0, 'work', 1).advance()
  assert choose(GREEDY, game, 0) == ('work', 0)


def test_greedy_solo_completes_a_project_alone():
  game = Game(LATE_MS, organisation='solo').advance()
  while not game.state.done:
    game.act(0, *choose(GREEDY, game, 0)).advance()
  assert game.progress == 1
  assert game.booked('turns') == {'work': 7}


def test_oracle_takes_distinct_targets_in_the_order_of_priority():
  # The heaviest path first, which is 0's; 1 and 2 tie. Seats count from behind.
  game = independent(awareness=True, free_facts=True)
  chosen = [choose(ORACLE, game, agent) for agent in range(3)]
  assert chosen == [('work', 2), ('work', 1), ('work', 0)]


def test_agents_that_see_nobody_collide():
  game = independent(free_facts=True)
  chosen = [choose(ORACLE, game, agent) for agent in range(3)]
  assert chosen == [('work', 0)] * 3


def test_oracle_avoids_what_others_are_at():
  game = independent(awareness=True, free_facts=True)
  game.act(0, 'work', 0).act(1, 'work', 1).act(2, 'wait').advance()
  assert choose(ORACLE, game, 2) == ('work', 2)
  game = independent(free_facts=True)
  game.act(0, 'work', 0).act(1, 'work', 1).act(2, 'wait').advance()
  assert choose(ORACLE, game, 2) == ('work', 0)  # Which it cannot see.


def test_oracle_waits_when_others_are_at_everything():
  game = Game(LATE_MS, awareness=True, free_facts=True).advance()
  assert choose(ORACLE, game, 2) == ('work', 0)
  assert choose(ORACLE, game, 1) == ('work', 1)
  assert choose(ORACLE, game, 0) == ('wait', 0)  # 2 and 3 are not open.


def after_module_0(**rules):
  """Module 0 was written by 0; now all are free."""
  game = Game(LATE_MS, awareness=True, **rules).advance()
  end_ms = 5000
  game.act(0, 'work', 0).act(1, 'wait', end_ms=end_ms)
  return game.act(2, 'wait', end_ms=end_ms).advance()


def test_oracle_needs_to_read_nothing():
  game = after_module_0(free_facts=True)
  assert choose(ORACLE, game, 2) == ('work', 1)  # Its path is as heavy as 2's.
  assert choose(ORACLE, game, 1) == ('work', 2)


def test_muted_oracle_takes_what_it_can_do_and_else_reads_what_it_lacks():
  game = after_module_0()
  assert choose(ORACLE, game, 2) == ('work', 1)
  assert choose(ORACLE, game, 1) == ('read', 0)  # To work on 2.
  game.act(1, 'read', 0).act(2, 'work', 1).act(0, 'wait').advance()
  assert choose(ORACLE, game, 1) == ('work', 2)
  # Only 2 is left, and the later seat of 1 comes first.
  assert choose(ORACLE, game, 0) == ('wait', 0)


def test_muted_oracle_prefers_what_it_can_do_to_what_matters_most():
  game = after_module_0()
  below = jnp.array([4, 3, 9, 1], jnp.int32)
  game.task = game.task._replace(below=below)  # 2 comes first.
  assert choose(ORACLE, game, 2) == ('work', 1)
  game.rules = game.rules._replace(free_facts=jnp.asarray(True))
  assert choose(ORACLE, game, 2) == ('work', 2)


def test_one_with_nothing_to_do_reads_ahead():
  game = after_module_0()
  game.act(0, 'work', 2, end_ms=30_000).act(1, 'work', 1, end_ms=30_000)
  game.act(2, 'wait').advance()
  # 1 and 2 are in flight and 3 is not open, but 3 will want the fact of 0.
  assert choose(ORACLE, game, 2) == ('read', 0)
  game.act(2, 'read', 0).advance()
  assert choose(ORACLE, game, 2) == ('wait', 0)


@pytest.mark.parametrize('hires', [0, 1, 2])
def test_the_chief_hires_up_to_its_number(hires):
  policy = scripted.ListScheduler(COLLECTIVE, hires=hires)
  game = Game(LATE_MS, organisation='ceo').advance()
  hired = 0
  while choose(policy, game, 0)[0] == 'hire':
    game.act(0, 'hire').advance()
    if 0 not in game.ready:
      game.advance()
    hired += 1
  assert hired == hires
  assert game.state.present.sum() == 1 + hires


def test_the_team_s_limit_comes_before_the_number():
  policy = scripted.ListScheduler(COLLECTIVE, hires=8)
  game = Game(LATE_MS, organisation='ceo', max_hires=1).advance()
  assert choose(policy, game, 0) == ('hire', 0)
  game.act(0, 'hire').advance()
  assert choose(policy, game, 0) == ('work', 0)


def test_schedulers_only_do_what_is_legal_and_never_talk():
  verbs = COLLECTIVE.verbs
  for rules, policy in itertools.product(
      ({}, {'awareness': True}, {'awareness': True, 'free_facts': True}),
      (GREEDY, ORACLE),
  ):
    game = Game(LATE_MS, organisation='ceo', **rules).advance()
    while not game.state.done:
      for agent in game.ready:
        obs = game.observe(agent)
        verb, target = choose(policy, game, agent)
        assert verb not in ('tell', 'post', 'fire')
        action = jax.tree.map(lambda x: x[0], make_action(verb, target))
        assert observation.is_legal(verbs, obs, action)
        game.act(agent, verb, target)
      game.advance()
    assert game.progress == 1


def test_a_scheduler_s_log_prob_is_0_for_what_it_does_and_nothing_else():
  obs = rows_of(Game(LATE_MS).advance().observe(0))
  sure, entropy = ORACLE.log_prob((), obs, make_action('work', 0))
  assert sure.tolist() == [0] and entropy.tolist() == [0]
  for other in (('work', 1), ('wait',), ('tell', 0, 1, 1)):
    log_prob, _ = ORACLE.log_prob((), obs, make_action(*other))
    assert log_prob.tolist() == [-math.inf]
