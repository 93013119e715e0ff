"""Tests of chains of thought, on a problem small enough for a hand.

Its difficulty is 2: each thought makes a chain right with chance 1/2.

chain       0   1   2
need        1   3   2      thoughts until it is right
verdicts  priv priv public
"""

import dataclasses
import functools

from envs import base
from envs import conformance
from envs import reasoning
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

THINK, CHECK, ANSWER = reasoning.THINK, reasoning.CHECK, reasoning.ANSWER
ENV = reasoning.Reasoning(num_chains=3, min_difficulty=2.0, check_error=0.0)
PREPARED = dataclasses.replace(ENV, least_thoughts=3)
DOUBTFUL = dataclasses.replace(ENV, check_error=0.2)
KEY = jax.random.key(0)
TASK = reasoning.Task(
    difficulty=jnp.float32(2.0),
    need=jnp.array([1, 3, 2], jnp.int32),
    private=jnp.array([True, True, False]),
)
FRESH = ENV.reset(TASK)


def ints(*values):
  return jnp.array(values, jnp.int32)


def facts(*chains):
  """[M] bool, the facts of these chains."""
  return jnp.zeros((3,), bool).at[jnp.array(chains, int)].set(True)


def thought(*thoughts, **changes):
  """A world of so many thoughts, the k-th at k seconds."""
  thoughts = ints(*thoughts)
  right_ms = jnp.where(thoughts >= TASK.need, 1000 * TASK.need, FRESH.right_ms)
  changed_ms = jnp.where(thoughts > 0, 1000 * thoughts, -1)
  return FRESH._replace(
      thoughts=thoughts, changed_ms=changed_ms, right_ms=right_ms, **changes
  )


def judged(world, checked, verdict, belief):
  """The same world after verdicts; `checked` is 0 for never."""
  return world._replace(
      checked=ints(*checked),
      verdict=jnp.array(verdict) > 0,
      belief=jnp.array(belief, jnp.float32),
  )


def land(before, now_ms, *rows, env=ENV, knows=None, key=KEY):
  """Lands turns given as (verb, chain, start in ms, lands)."""
  verb, target, start_ms, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, start_ms, lands, jnp.int32(now_ms))
  knows = jnp.zeros((len(rows), 3), bool) if knows is None else knows
  after, knows, outcome = env.land(TASK, before, turns, knows, key)
  return after, np.argwhere(knows).tolist(), outcome.effective.tolist()


def columns(world, *known, env=ENV, task=TASK):
  """The features by name, as lists over the chains."""
  view = env.view(task, world, facts(*known))
  return dict(zip(env.feature_names, view.features.T.tolist(), strict=True))


def legal(world, *known, task=TASK):
  """Chains that may be thought in, checked and answered."""
  view = ENV.view(task, world, facts(*known))
  return tuple(np.flatnonzero(row).tolist() for row in view.legal)


def equal(a, b):
  return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_one_may_think_and_answer_at_once_and_check_what_has_thoughts():
  assert legal(FRESH) == ([0, 1, 2], [], [0, 1, 2])
  assert legal(thought(2, 0, 1)) == ([0, 1, 2], [0, 2], [0, 1, 2])


def test_a_chain_is_checked_again_only_after_thoughts_or_unawares():
  world = judged(thought(2, 2, 2), (2, 1, 2), (1, 0, 0), (0.5, 0.5, 0.5))
  assert legal(world)[CHECK] == [0, 1]  # The verdict on 2 is public.
  assert legal(world, 0)[CHECK] == [1]
  assert legal(world, 0, 1)[CHECK] == [1]  # It had one more thought since.
  public = TASK._replace(private=facts())
  assert legal(world, task=public)[CHECK] == [1]


def test_after_an_answer_nothing_is_legal():
  world = thought(2, 0, 1, answered=jnp.int32(1))
  assert legal(world) == ([], [], [])
  column = columns(world)
  assert column['open'] == column['value'] == column['turns_left'] == [0, 0, 0]


def test_features_of_an_untouched_world():
  column = columns(FRESH)
  assert column['open'] == [1, 1, 1]
  assert column['turns_left'] == [4, 4, 4]  # 2 until right, check and answer.
  assert column['priority'] == [0.25] * 3
  assert column['difficulty'] == pytest.approx([2 / 40] * 3)
  for name in set(column) - {'open', 'turns_left', 'priority', 'difficulty'}:
    assert column[name] == [0, 0, 0], name
  assert columns(FRESH, env=PREPARED)['turns_left'] == [6, 6, 6]
  assert not ENV.view(TASK, FRESH, facts()).relations.any()


def test_features_of_a_hand_worked_view():
  # Chain 1 was judged wrong at 1 thought of 3, chain 2 right at 2 of 2.
  world = judged(thought(2, 3, 2), (0, 1, 2), (0, 0, 1), (0, 0.2, 0.75))
  column = columns(world, 1)
  assert column['thoughts'] == pytest.approx(np.log1p([2, 3, 2]))
  assert column['chance_right'] == pytest.approx([3 / 4, 7 / 8, 3 / 4])
  assert column['checked'] == [0, 1, 1]
  assert column['verdict_right'] == [0, 0, 1]
  assert column['verdict_wrong'] == [0, 1, 0]
  assert column['thoughts_since'] == pytest.approx(np.log1p([2, 2, 0]))
  # 0.2, and of the other 0.8 two thoughts make 3/4 right.
  posterior = [0.75, 0.8, 0.75]
  assert column['posterior'] == pytest.approx(posterior)
  assert column['value'] == pytest.approx([3 * p for p in posterior])
  turns_left = np.array([2.5, 2.4, 2.5])
  assert column['turns_left'] == pytest.approx(turns_left)
  assert column['priority'] == pytest.approx(1 / turns_left)
  assert column['wanted'] == [0, 1, 0]  # Known, and not seen by everybody.
  assert column['missing'] == column['blocks_me'] == [0, 0, 0]


def test_a_verdict_is_seen_by_those_who_know_unless_it_is_public():
  world = judged(thought(1, 3, 2), (1, 3, 2), (1, 0, 1), (1.0, 0.0, 1.0))
  assert columns(world)['checked'] == [0, 0, 1]
  assert columns(world, 0)['checked'] == [1, 0, 1]
  assert columns(world)['wanted'] == [0, 0, 0]
  assert columns(world, 0, 1, 2)['wanted'] == [1, 1, 0]
  # There is no fact before there is a verdict.
  unchecked = columns(thought(1, 3, 2), 0, 1, 2)
  assert unchecked['checked'] == unchecked['wanted'] == [0, 0, 0]


def test_with_coupling_zero_nobody_need_know_anything():
  world = judged(thought(1, 3, 2), (1, 2, 2), (1, 0, 1), (1.0, 0.0, 1.0))
  public = TASK._replace(private=facts())
  every = ENV.view(public, world, facts(0, 1, 2))
  assert equal(ENV.view(public, world, facts()), every)
  before = judged(thought(1, 3, 2), (0, 0, 0), (0, 0, 0), (0, 0, 0))
  turns = base.Turns(
      ints(CHECK), ints(0), ints(0), jnp.array([True]), jnp.int32(5000)
  )
  knows = jnp.zeros((1, 3), bool)
  _, knows, outcome = ENV.land(public, before, turns, knows, KEY)
  assert outcome.effective.all() and not knows.any()


@pytest.mark.parametrize('known', [(), (0, 1, 2)])
def test_what_is_hidden_does_not_show(known):
  """Neither the needs, nor when a chain became right, nor private verdicts."""
  world = judged(thought(2, 2, 2), (1, 2, 1), (1, 1, 0), (0.7, 0.6, 0.2))
  other_task = TASK._replace(need=ints(9, 1, 9))
  other = world._replace(right_ms=ints(7, 8, 9))
  if not known:
    other = judged(other, (0, 1, 1), (0, 0, 0), (0.0, 0.1, 0.2))
  knows = facts(*known)
  seen = ENV.view(TASK, world, knows)
  assert equal(seen, ENV.view(other_task, other, knows))
  assert ENV.describe(TASK) == ENV.describe(other_task)
  text = lambda task, world: ENV.describe_view(task, world, knows, seen.legal)
  assert text(TASK, world) == text(other_task, other)


def test_a_thought_lands():
  after, knows, effective = land(FRESH, 10, (THINK, 1, 0, True))
  assert after.thoughts.tolist() == [0, 1, 0]
  assert after.changed_ms.tolist() == [-1, 10, -1]
  assert equal(after.right_ms, FRESH.right_ms)
  assert (knows, effective) == ([], [True])


def test_a_chain_is_right_from_the_thought_that_it_needs():
  after, _, _ = land(thought(0, 2, 1), 5000, (THINK, 1, 4000, True))
  assert after.right_ms.tolist() == [*FRESH.right_ms[:1].tolist(), 5000] + [
      FRESH.right_ms[2].item()
  ]
  later, _, _ = land(after, 6000, (THINK, 1, 5000, True))
  assert later.right_ms[1] == 5000


@pytest.mark.parametrize(
    'start_ms, fits', [(0, False), (9, False), (10, True), (12, True)]
)
def test_a_thought_that_overlaps_with_one_that_landed_is_lost(start_ms, fits):
  between, _, _ = land(
      FRESH, 10, (THINK, 0, 0, True), (THINK, 0, start_ms, False)
  )
  after, _, effective = land(
      between, 20, (THINK, 0, 10, False), (THINK, 0, start_ms, True)
  )
  assert effective == [False, fits]
  assert after.thoughts.tolist() == [2 if fits else 1, 0, 0]
  assert after.changed_ms[0] == (20 if fits else 10)


def test_of_thoughts_at_one_instant_one_lands_in_each_chain():
  after, _, effective = land(
      FRESH,
      10,
      (THINK, 2, 0, False),
      (THINK, 2, 0, True),
      (THINK, 2, 5, True),
      (THINK, 1, 0, True),
  )
  assert effective == [False, True, False, True]
  assert after.thoughts.tolist() == [0, 1, 1]


def test_a_check_tells_its_agent_what_the_chain_is_worth():
  after, knows, effective = land(
      thought(1, 2, 2), 9000, (CHECK, 0, 0, True), (CHECK, 1, 0, True)
  )
  assert after.checked.tolist() == [1, 2, 0]
  assert after.verdict.tolist() == [True, False, False]
  assert after.belief.tolist() == [1, 0, 0]
  assert (knows, effective) == ([[0, 0], [1, 1]], [True, True])
  assert equal(after.thoughts, ints(1, 2, 2))


def test_the_verdict_on_a_public_chain_is_nobodys_own():
  after, knows, effective = land(thought(1, 2, 2), 9, (CHECK, 2, 0, True))
  assert (knows, effective) == ([], [True])
  assert columns(after)['verdict_right'] == [0, 0, 1]


def test_bayes_rule_of_a_verdict_that_may_err():
  # 3 of 4 chains with 2 thoughts are right, and 4 of 5 verdicts.
  after, _, _ = land(thought(2, 2, 2), 9, (CHECK, 1, 0, True), env=DOUBTFUL)
  right, wrong = 0.6 / (0.6 + 0.05), 0.15 / (0.15 + 0.2)
  belief = right if after.verdict[1] else wrong
  assert after.belief[1] == pytest.approx(belief, rel=1e-6)
  # A second verdict starts from there: one more thought makes half right.
  world = judged(after, (0, 2, 0), (0, 1, 0), (0, right, 0))
  world = world._replace(thoughts=ints(2, 3, 2))
  after, _, _ = land(world, 9, (CHECK, 1, 0, True), env=DOUBTFUL)
  prior = 0.5 + right / 2
  if_right = 0.8 if after.verdict[1] else 0.2
  both = prior * if_right
  belief = both / (both + (1 - prior) * (1 - if_right))
  assert after.belief[1] == pytest.approx(belief, rel=1e-6)


def test_a_check_errs_as_often_as_it_should_and_by_seat():
  seats = jnp.arange(3)
  turns = base.Turns(seats * 0 + CHECK, seats, seats * 0, seats >= 0, 9)
  knows = jnp.zeros((3, 3), bool)
  says = lambda key: (
      DOUBTFUL.land(TASK, thought(1, 2, 2), turns, knows, key)[0].verdict
  )
  right = jnp.array([[True, False, True]])
  errs = jax.vmap(says)(jax.random.split(KEY, 400)) != right
  assert errs.mean(axis=0) == pytest.approx([0.2] * 3, abs=0.06)
  both = errs[:, 0] & errs[:, 1]  # Each seat errs by itself.
  assert both.mean() == pytest.approx(0.04, abs=0.03)


def test_a_verdict_stands_until_there_are_new_thoughts():
  before = judged(thought(2, 2, 2), (2, 0, 0), (0, 0, 0), (0.25, 0, 0))
  after, knows, effective = land(before, 9, (CHECK, 0, 0, True))
  assert equal(after, before)  # Though it is a perfect check of a right chain.
  assert (knows, effective) == ([[0, 0]], [True])
  # Who knew it learns nothing: somebody was faster.
  knows = facts(0)[None, :]
  after, _, effective = land(before, 9, (CHECK, 0, 0, True), knows=knows)
  assert equal(after, before) and effective == [False]
  # With one more thought it is judged anew.
  more = before._replace(thoughts=ints(3, 2, 2))
  after, _, effective = land(more, 9, (CHECK, 0, 0, True), knows=knows)
  assert effective == [True]
  assert (after.checked[0], after.verdict[0], after.belief[0]) == (3, True, 1)


def test_of_checks_at_one_instant_one_gives_the_verdict():
  rows = (CHECK, 1, 0, False), (CHECK, 1, 0, True), (CHECK, 1, 5, True)
  after, knows, effective = land(thought(1, 2, 2), 9, *rows)
  assert after.checked.tolist() == [0, 2, 0]
  assert (knows, effective) == ([[1, 1], [2, 1]], [False, True, True])
  rows = (CHECK, 2, 0, True), (CHECK, 2, 5, True)
  assert land(thought(1, 2, 2), 9, *rows)[2] == [True, False]  # Public.


def test_a_check_is_about_the_chain_just_before_it_ended():
  rows = (CHECK, 0, 0, True), (THINK, 0, 0, True)
  after, _, effective = land(thought(0, 0, 1), 9, (CHECK, 2, 0, True), *rows)
  assert after.thoughts.tolist() == [1, 0, 1]
  assert after.checked.tolist() == [0, 0, 1]  # 0 had nothing to check.
  assert effective == [True, True, True]  # It learns where the record is.
  world = thought(0, 2, 1)
  rows = (THINK, 1, 5000, True), (CHECK, 1, 0, True)
  after, _, _ = land(world, 9000, *rows)
  assert (after.thoughts[1], after.checked[1], after.verdict[1]) == (3, 2, 0)
  assert after.right_ms[1] == 9000


@pytest.mark.parametrize(
    'chain, start_ms, right',
    [
        (0, 999, False),  # It became right after 1 s.
        (0, 1000, True),
        (1, 3000, False),
        (2, 3000, True),
    ],
)
def test_an_answer_is_what_the_chain_said_when_it_was_begun(
    chain, start_ms, right
):
  after, knows, effective = land(
      thought(2, 2, 2), 9000, (ANSWER, chain, start_ms, True)
  )
  assert (after.answered, after.solved) == (chain, right)
  assert (knows, effective) == ([], [True])
  assert ENV.progress(TASK, after, jnp.int32(0)) == right
  assert ENV.finished(TASK, after)


def test_an_answer_without_thoughts_is_wrong():
  after, _, _ = land(FRESH, 9, (ANSWER, 0, 0, True))
  assert (after.answered, after.solved) == (0, False)
  assert not ENV.finished(TASK, FRESH)
  assert ENV.progress(TASK, FRESH, jnp.int32(9)) == 0


def test_the_first_answer_is_final():
  rows = (ANSWER, 1, 5000, False), (ANSWER, 1, 5000, True)
  rows += (ANSWER, 0, 5000, True), (THINK, 2, 5000, True)
  after, _, effective = land(thought(2, 2, 2), 9000, *rows)
  assert (after.answered, after.solved) == (1, False)  # The first seat's.
  assert effective == [False, True, False, True]  # Who ends now still counts.
  rows = [(verb, 0, 8000, True) for verb in (THINK, CHECK, ANSWER)]
  later, knows, effective = land(after, 12_000, *rows)
  assert equal(later, after)
  assert (knows, effective) == ([], [False] * 3)


@pytest.mark.parametrize('least', [1, 3])
def test_the_chance_to_be_right_is_known(least):
  env = dataclasses.replace(ENV, least_thoughts=least)
  chance = env.chance_right(TASK, jnp.arange(5))
  prepared = [0, 1 / 2, 3 / 4, 7 / 8, 15 / 16]
  expected = [0] * (least - 1) + prepared[: 5 - least + 1]
  np.testing.assert_allclose(chance, expected, rtol=1e-6)
  # Of the chains not right with 3 thoughts, those right with 4.
  assert env.chance_right(TASK, jnp.int32(4), jnp.int32(3)) == 0.5


def test_the_easiest_problem_takes_one_thought():
  task = TASK._replace(difficulty=jnp.float32(1.0))
  assert ENV.chance_right(task, jnp.arange(3)).tolist() == [0, 1, 1]
  easy = dataclasses.replace(ENV, min_difficulty=1.0, max_difficulty=1.0)
  assert (sample(easy).need == 1).all()
  assert columns(thought(1, 0, 0), task=task)['posterior'] == [1, 0, 0]


def reference(world, *known, env=ENV):
  view = env.view(TASK, world, facts(*known))
  return env.reference_verb(view.features, view.legal).tolist()


def test_the_reference_thinks_checks_and_answers():
  assert reference(FRESH) == [THINK] * 3
  # Chances of 1/2, 3/4 and 7/8.
  assert reference(thought(1, 2, 3)) == [CHECK, CHECK, ANSWER]
  world = judged(thought(1, 1, 4), (1, 1, 4), (1, 0, 0), (0.9, 0.1, 0.1))
  assert reference(world, 0, 1) == [ANSWER, THINK, THINK]
  done = world._replace(answered=jnp.int32(0))
  assert reference(done) == [-1] * 3
  # Where a verdict is worth little, it still checks every third thought.
  env = dataclasses.replace(ENV, check_error=0.5, least_thoughts=2)
  hard = TASK._replace(difficulty=jnp.float32(40.0))
  view = env.view(hard, thought(2, 3, 4), facts())
  advice = env.reference_verb(view.features, view.legal)
  assert advice.tolist() == [THINK, CHECK, CHECK]
  # But not before the chain can be right.
  env = dataclasses.replace(env, least_thoughts=4)
  assert reference(thought(2, 3, 4), env=env) == [THINK, THINK, CHECK]


@pytest.mark.parametrize(
    'limit_s, possible',
    [(0, False), (2, False), (11, False), (12, True), (99, True)],
)
@pytest.mark.parametrize('agents', [1, 9])
def test_the_bound_on_progress(agents, limit_s, possible):
  turn_ms = ints(10_000, 10_000, 2000)
  bound = ENV.bounds(TASK, agents, jnp.int32(1000 * limit_s), turn_ms)
  assert bound.progress == possible  # Chain 0 needs one thought.
  assert (bound.serial_ms, bound.critical_path_ms) == (2000, 2000)


def test_the_bound_is_reached():
  world = FRESH
  task = TASK._replace(need=ints(3, 9, 2))
  turn_ms = ints(10_000, 10_000, 2000)
  rows = ((THINK, 0, 10_000), (THINK, 10_000, 20_000), (ANSWER, 20_000, 22_000))
  for verb, start_ms, now_ms in rows:
    turns = base.Turns(
        ints(verb), ints(2), ints(start_ms), jnp.array([True]), now_ms
    )
    world, _, _ = ENV.land(task, world, turns, facts()[None, :], KEY)
  assert world.solved
  bound = lambda ms: ENV.bounds(task, 1, jnp.int32(ms), turn_ms).progress
  assert (bound(21_999), bound(22_000)) == (0, 1)


sample = functools.partial(worlds.sample, count=512)


def test_difficulties_fill_their_range():
  difficulty = sample(ENV).difficulty  # From 2 to 40.
  assert 2 <= difficulty.min() < 3 and 39 < difficulty.max() <= 40
  assert difficulty.mean() == pytest.approx(21, abs=1.5)


@pytest.mark.parametrize('least', [1, 4])
def test_needs_are_geometric_from_the_least_on(least):
  env = dataclasses.replace(ENV, max_difficulty=2.0, least_thoughts=least)
  need = sample(env).need
  assert need.shape == (512, 3) and need.dtype == np.int32
  share = [(need == least + i).mean() for i in range(3)]
  assert share == pytest.approx([1 / 2, 1 / 4, 1 / 8], abs=0.04)
  assert need.min() == least


@pytest.mark.parametrize('coupling', [0.0, 0.25, 1.0])
def test_coupling_is_the_share_of_private_chains(coupling):
  env = dataclasses.replace(ENV, coupling=coupling)
  share = sample(env).private.mean()
  if coupling == 0.25:
    assert share == pytest.approx(coupling, abs=0.04)
  else:
    assert share == coupling


@pytest.mark.parametrize(
    'knobs',
    [
        {'num_chains': 1, 'check_error': 0.0, 'min_difficulty': 1.0},
        {
            'num_chains': 2,
            'least_thoughts': 2,
            'max_difficulty': 8.0,
            'check_error': 0.5,
            'coupling': 0.5,
        },
    ],
)
def test_it_conforms_with_other_knobs(knobs):
  conformance.check_environment(reasoning.Reasoning(**knobs))


def _belief(env):
  keys = jax.random.split(KEY, 20)
  check = lambda k: land(
      thought(1, 2, 2), 9, (CHECK, 0, 0, True), env=env, key=k
  )
  return [check(k)[0].verdict.tolist() for k in keys]


test_every_knob_changes_something = worlds.each_changes_something(
    ENV,
    num_chains=(5, worlds.sampled),
    least_thoughts=(2, worlds.sampled),
    min_difficulty=(3.0, worlds.sampled),
    max_difficulty=(50.0, worlds.sampled),
    check_error=(0.3, _belief),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        reasoning.Reasoning,
        ('num_chains', 0, '>= 1'),
        ('least_thoughts', 0, '>= 1'),
        ('min_difficulty', 0.5, 'from 1 to max_difficulty=40.0'),
        ('min_difficulty', 41.0, 'from 1 to max_difficulty=40.0'),
        ('max_difficulty', 1001.0, 'at most 1000'),
        ('check_error', 0.6, 'from 0 to 0.5'),
        ('check_error', float('nan'), 'from 0 to 0.5'),
    )
)


def test_the_extreme_knobs_are_allowed():
  env = reasoning.Reasoning(
      num_chains=1,
      least_thoughts=1,
      min_difficulty=1.0,
      max_difficulty=1000.0,
      check_error=0.5,
      coupling=0.0,
      think_tokens=1,
      check_tokens=1,
      answer_tokens=1,
  )
  task = env.sample_task(jax.random.key(0))
  assert task.need.shape == (1,) and (task.need >= 1).all()


def test_a_task_as_text():
  first, *rest = ENV.describe(TASK).splitlines()
  assert 'difficulty 2.0' in first and '3 chains' in first
  assert rest == [
      'chain 0: an attempt of its own, its verdicts are private',
      'chain 1: an attempt of its own, its verdicts are private',
      'chain 2: an attempt of its own, its verdicts are public',
  ]


def test_a_view_as_text():
  world = judged(thought(2, 1, 2), (2, 1, 1), (1, 0, 0), (0.9, 0.1, 0.5))
  text = lambda world, *known: ENV.describe_view(
      TASK, world, facts(*known), ENV.view(TASK, world, facts(*known)).legal
  ).splitlines()
  assert text(world, 0) == [
      'chain 0: 2 thoughts, judged right at 2, 90% likely right, think 0,'
      ' answer 0',
      'chain 1: 1 thoughts, 50% likely right, think 1, check 1, answer 1',
      'chain 2: 2 thoughts, judged wrong at 1, 75% likely right, think 2,'
      ' check 2, answer 2',
  ]
  world = world._replace(answered=jnp.int32(1))
  assert text(world)[:2] == [
      'chain 0: 2 thoughts, 75% likely right',
      'chain 1: 1 thoughts, 50% likely right, answered',
  ]
