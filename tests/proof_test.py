"""Tests of the proof, on a theorem small enough for a hand.

lemma     0     1     2     3            4    5           6, the theorem
layer     0     0     0     1            1    1           2
from                        0 1 or 2     1    2 or 0      3 4 or 5
chance    1/2   1     1/2   1            1/2  1           1
false                 x                       x
public          x                             x
"""

import dataclasses
import functools
import itertools

from envs import base
from envs import conformance
from envs import proof
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

ATTEMPT, STUDY = proof.ATTEMPT, proof.STUDY
ENV = proof.Proof(
    num_lemmas=7, width=3, min_premises=1, max_premises=2, min_chance=0.5
)
ROUTES = {3: [[0, 1], [2]], 4: [[1]], 5: [[2], [0]], 6: [[3, 4], [5]]}
KEY = jax.random.key(0)


def lemmas(*which):
  """[M] bool, these lemmas."""
  return jnp.zeros((7,), bool).at[jnp.array(which, int)].set(True)


def packed(routes):
  """Lists of lemmas, as they are in a task."""
  masks = np.zeros((2, 7, 7), bool)
  for lemma, ways in routes.items():
    for i, way in enumerate(ways):
      masks[i, lemma, way] = True
  return proof.pack(jnp.array(masks))


TASK = proof.Task(
    routes=packed(ROUTES),
    layer=jnp.array([0, 0, 0, 1, 1, 1, 2], jnp.int32),
    chance=jnp.array([0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0]),
    private=~lemmas(1, 5),
    true=~lemmas(2, 5),
    credit=jnp.array([2, 1, 0, 1, 2, 0, 1]) / 7,
)
SURE = TASK._replace(chance=jnp.ones((7,)))


def found(proved=(), refuted=()):
  return proof.World(proved=lemmas(*proved), refuted=lemmas(*refuted))


def look(proved=(), refuted=(), known=(), task=TASK):
  """The columns of a view by name, as lists over the lemmas."""
  view = ENV.view(task, found(proved, refuted), lemmas(*known))
  return dict(zip(ENV.feature_names, view.features.T.tolist(), strict=True))


def legal(proved=(), refuted=(), known=(), task=TASK):
  """Lemmas that may be attempted and studied."""
  view = ENV.view(task, found(proved, refuted), lemmas(*known))
  return tuple(np.flatnonzero(row).tolist() for row in view.legal)


def land(world, *rows, knows=None, task=SURE, key=KEY):
  """Lands turns given as (verb, lemma, lands): proved, refuted, who knows."""
  verb, target, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, verb * 0, lands, jnp.int32(10))
  knows = jnp.zeros((len(rows), 7), bool) if knows is None else knows
  world, knows, outcome = ENV.land(task, world, turns, knows, key)
  return (
      np.flatnonzero(world.proved).tolist(),
      np.flatnonzero(world.refuted).tolist(),
      np.argwhere(knows).tolist(),
      outcome.effective.tolist(),
  )


def test_credit_is_that_of_the_cheapest_sound_proof():
  # 2 and 5 are false, so the theorem takes 3 and 4, and 3 takes 0 and 1: with
  # 2 + 1 + 1 + 2 + 1 attempts. That 1 is used twice does not count.
  credit = ENV._credit(TASK.routes, TASK.layer, TASK.chance, TASK.true)
  np.testing.assert_allclose(credit, TASK.credit, rtol=1e-6)
  # If all were true, 5 and one of 0 and 2 would be enough.
  credit = ENV._credit(TASK.routes, TASK.layer, TASK.chance, ~lemmas())
  np.testing.assert_allclose(credit, np.array([0, 0, 2, 0, 0, 1, 1]) / 4)


@pytest.mark.parametrize(
    'proved, share',
    [
        ([], 0),
        ([0], 2),
        ([0, 1, 3], 4),
        ([0, 1, 3, 4], 6),
        ([0, 1, 3, 4, 6], 7),
        ([0, 6], 7),  # By whatever route.
    ],
)
def test_progress_is_the_credit_of_what_is_proved(proved, share):
  world = found(proved, [2])
  progress = ENV.progress(TASK, world, jnp.int32(0))
  assert progress == pytest.approx(share / 7)
  assert ENV.finished(TASK, world) == (share == 7)
  assert (progress == 1.0) == (share == 7)


def test_features_of_an_untouched_world():
  column = look()
  assert column['open'] == [1, 1, 1, 0, 0, 0, 0]
  assert column['turns_left'] == [2, 1, 2, 1, 2, 1, 1]
  # Two attempts lead to 5 and a third one from there to the theorem; 3 and 4
  # need 3 each. Of 3, one route needs 2 attempts and the other one 3.
  np.testing.assert_allclose(column['priority'], [1, 0.5, 1, 0.5, 0.5, 1, 1])
  value = np.array([2, 0.5, 2, 0.5, 1, 1, 1]) * 7 / 10
  np.testing.assert_allclose(column['value'], value, rtol=1e-6)
  np.testing.assert_allclose(column['chance'], TASK.chance)
  assert column['wanted'] == [2, 0, 2, 1, 1, 0, 0]  # 1 and 5 are public.
  assert column['height'] == [0, 0, 0, 0.5, 0.5, 0.5, 1]
  assert column['theorem'] == [0, 0, 0, 0, 0, 0, 1]
  for name in (
      'missing',
      'blocks_me',
      'proved',
      'refuted',
      'known',
      'routes_open',
  ):
    assert column[name] == [0] * 7, name


def test_features_of_a_hand_worked_view():
  column = look([0, 1])
  assert column['open'] == [0, 0, 1, 1, 1, 1, 0]
  assert column['missing'] == [0, 0, 0, 1, 0, 1, 0]  # The proof of 0.
  assert column['blocks_me'] == [2, 0, 0, 0, 0, 0, 0]
  assert column['wanted'] == [2, 0, 2, 1, 1, 0, 0]
  assert column['turns_left'] == [0, 0, 2, 1, 2, 1, 1]
  # One attempt leads to 5, three to 3 and 4. What can be attempted needs no
  # more routes, so 2 is of no use.
  np.testing.assert_allclose(
      column['priority'], [0, 0, 0, 1 / 3, 1 / 3, 1, 1], rtol=1e-6
  )
  assert column['proved'] == [1, 1, 0, 0, 0, 0, 0]
  assert column['known'] == [0, 1, 0, 0, 0, 0, 0]
  assert column['routes_open'] == [0, 0, 0, 0.5, 0.5, 0.5, 0]
  column = look([0, 1], known=[0])
  assert column['missing'] == column['blocks_me'] == [0] * 7
  assert column['known'] == [1, 1, 0, 0, 0, 0, 0]


def test_the_proofs_of_the_best_known_route_are_missing():
  everything = TASK._replace(true=~lemmas(), private=~lemmas())
  look_ = functools.partial(look, [0, 1, 2], task=everything)
  assert look_()['missing'] == [0, 0, 0, 1, 1, 1, 0]  # 3 needs only that of 2.
  assert look_()['blocks_me'] == [1, 1, 2, 0, 0, 0, 0]
  # With that of 0, either route to 3 lacks one more, and 5 lacks none.
  assert look_(known=[0])['missing'] == [0, 0, 0, 1, 1, 0, 0]
  assert look_(known=[0])['blocks_me'] == [0, 2, 1, 0, 0, 0, 0]
  assert look_(known=[2])['missing'] == [0, 0, 0, 0, 1, 0, 0]
  assert look_(known=[0, 1])['missing'] == [0] * 7


@pytest.mark.parametrize(
    'proved, refuted, useful',
    [
        ([], [], [0, 1, 2, 3, 4, 5, 6]),
        ([0], [], [1, 2, 3, 4, 5, 6]),  # 5 is open, and 2 is left to 3.
        ([0, 1], [], [3, 4, 5, 6]),
        ([3], [], [0, 1, 2, 4, 5, 6]),
        ([5], [], [6]),
        ([], [1], [0, 2, 5, 6]),  # 4 is dead with it, and 3 of no use then.
        ([], [2], [0, 1, 3, 4, 5, 6]),
        ([], [4], [0, 2, 5, 6]),
        ([], [5], [0, 1, 2, 3, 4, 6]),
        ([], [2, 5], [0, 1, 3, 4, 6]),
        ([3], [5], [1, 4, 6]),
        ([], [4, 5], [6]),  # No way leads there.
        ([2, 5, 6], [], []),
    ],
)
def test_what_only_feeds_dead_or_finished_lemmas_is_of_no_use(
    proved, refuted, useful
):
  column = look(proved, refuted, range(7))
  assert np.flatnonzero(column['priority']).tolist() == useful
  assert np.flatnonzero(column['value']).tolist() == useful


def test_a_fact_blocks_the_useful_lemmas_that_it_would_unlock():
  everything = TASK._replace(private=~lemmas())
  blocks = lambda *args: look(*args, task=everything)['blocks_me']
  assert blocks([0, 2]) == [1, 0, 2, 0, 0, 0, 0]  # 5 by either; 3 by 2.
  assert blocks([0, 2], [], [0]) == [0, 0, 1, 0, 0, 0, 0]  # 5 is unlocked.
  assert blocks([0, 2], [], [2]) == [0] * 7
  # 5 is dead, for those who know; so 3 and 4 are needed, and 0 for 3 only.
  assert blocks([0, 1, 2], [5], [5]) == [0, 1, 1, 0, 0, 0, 0]
  assert blocks([0, 1, 2], [5]) == [1, 1, 2, 0, 0, 0, 0]
  # Nothing but the theorem is of use.
  assert blocks([0, 1, 2, 3, 4]) == [0, 0, 0, 1, 1, 0, 0]


def test_proofs_for_lemmas_of_no_use_block_nobody():
  everything = TASK._replace(true=~lemmas(), private=~lemmas())
  column = look([0, 1, 5], task=everything)  # The theorem is open.
  assert column['missing'] == [0, 0, 0, 2, 1, 0, 1]
  assert column['priority'] == [0, 0, 0, 0, 0, 0, 1]
  assert column['blocks_me'] == [0, 0, 0, 0, 0, 1, 0]
  assert column['wanted'] == [0, 0, 0, 1, 1, 1, 0]


def test_what_a_refutation_rules_out_is_of_no_use():
  column = look([], [2], [2])
  assert column['open'] == [1, 1, 0, 0, 0, 0, 0]
  assert column['refuted'] == column['known'] == [0, 0, 1, 0, 0, 0, 0]
  # 5 is left with 0: 2 attempts and one. 3 needs 3 and one, 4 needs 1 and 2.
  np.testing.assert_allclose(
      column['priority'], [1, 3 / 7, 0, 3 / 7, 3 / 7, 1, 1], rtol=1e-6
  )
  assert column['wanted'] == [2, 0, 1, 1, 1, 0, 0]  # 2 concerns the theorem.
  # Without 0 there is no way to 5 either, nor to 3.
  task = TASK._replace(true=~lemmas(0, 2, 5))
  column = look([], [0, 2], [0, 2], task)
  assert column['priority'] == [0, 0, 0, 0, 0, 0, 1]
  assert column['wanted'] == [1, 0, 1, 0, 0, 0, 0]


def test_a_public_refutation_is_seen_by_all_and_told_by_nobody():
  column = look([0, 1], [5])
  assert column['refuted'] == [0, 0, 0, 0, 0, 1, 0]
  assert column['wanted'][5] == 0
  np.testing.assert_array_equal(column['priority'], [0, 0, 0, 1, 1, 0, 1])


def test_when_the_theorem_is_proved_nothing_is_of_use():
  column = look([0, 1, 3, 4, 6], [2], [2])
  assert column['priority'] == column['value'] == column['wanted'] == [0] * 7


def test_relations_are_the_lemmas_of_all_routes():
  view = ENV.view(TASK, ENV.reset(TASK), lemmas())
  rows = [np.flatnonzero(row).tolist() for row in view.relations]
  assert rows == [[], [], [], [0, 1, 2], [1], [0, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    'proved, refuted, known, attempts, studies',
    [
        ([], [], [], [0, 1, 2], []),
        ([], [], range(7), [0, 1, 2], []),  # There are no facts yet.
        ([0], [], [], [1, 2], [0]),
        ([0], [], [0], [1, 2, 5], []),
        ([1], [], [], [0, 2, 4], []),  # Its proof is public.
        ([0, 1], [], [0], [2, 3, 4, 5], []),
        ([], [2], [], [0, 1, 2], []),  # A dead end, for those who do not know.
        ([], [2], [2], [0, 1], []),
        ([0], [5], [0], [1, 2], []),
        ([0, 1, 3, 4], [], [3], [2], [0, 4]),  # 5 needs the proof of 0.
        ([0, 1, 3, 4], [], [3, 4], [2, 6], [0]),
    ],
)
def test_what_is_legal(proved, refuted, known, attempts, studies):
  assert legal(proved, refuted, known) == (attempts, studies)


def test_the_reference_attempts_what_is_of_use():
  def advice(*args):
    view = ENV.view(TASK, found(*args[:2]), lemmas(*args[2]))
    verb = ENV.reference_verb(view.features, view.legal)
    return np.flatnonzero(verb == ATTEMPT).tolist()

  assert advice([], [], []) == [0, 1, 2]
  assert advice([0, 1], [], [0]) == [3, 4, 5]
  assert advice([0], [], [0]) == [1, 2, 5]  # For 3, which is still closed.
  assert advice([0, 1, 3, 4, 6], [], [0, 3, 4]) == []


def test_an_attempt_proves_what_is_true_and_refutes_what_is_not():
  rows = (ATTEMPT, 0, True), (ATTEMPT, 2, True), (ATTEMPT, 1, False)
  assert land(found(), *rows) == (
      [0],
      [2],
      [[0, 0], [1, 2]],
      [True, True, False],
  )
  # What is public is nobody's.
  rows = (ATTEMPT, 1, True), (ATTEMPT, 5, True)
  assert land(found([0]), *rows) == ([0, 1], [5], [], [True, True])


def test_an_attempt_at_what_was_proved_meanwhile_is_in_vain():
  for lemma in (0, 1):
    row = (ATTEMPT, lemma, True)
    assert land(found([lemma]), row) == ([lemma], [], [], [False])


def test_a_second_refutation_teaches_its_agent():
  row = (ATTEMPT, 2, True)
  assert land(found([], [2]), row) == ([], [2], [[0, 2]], [True])
  # Unless the agent was told meanwhile, or all see it.
  told = land(found([], [2]), row, knows=lemmas(2)[None, :])
  assert told == ([], [2], [[0, 2]], [False])
  row = (ATTEMPT, 5, True)
  assert land(found([0], [5]), row) == ([0], [5], [], [False])


@pytest.mark.parametrize('lemma', [0, 2])
def test_all_who_succeed_at_one_instant_learn(lemma):
  rows = [(ATTEMPT, lemma, i > 0) for i in range(3)]
  *_, knows, effective = land(found(), *rows)
  assert knows == [[1, lemma], [2, lemma]]
  assert effective == [False, True, True]


@pytest.mark.parametrize('lemma', [1, 5])
def test_of_public_successes_at_one_instant_one_is_first(lemma):
  rows = [(ATTEMPT, lemma, i > 0) for i in range(3)]
  *_, knows, effective = land(found(), *rows)
  assert (knows, effective) == ([], [False, True, False])


def test_a_proof_is_studied():
  row = (STUDY, 0, True)
  assert land(found([0]), row) == ([0], [], [[0, 0]], [True])
  told = land(found([0]), row, knows=lemmas(0)[None, :])
  assert told == ([0], [], [[0, 0]], [False])


def test_other_verbs_do_nothing():
  rows = (2, 0, True), (-1, 0, True)
  assert land(found(), *rows) == ([], [], [], [False, False])


def test_attempts_succeed_by_independent_chances():
  chance = jnp.array([0.25, 1.0, 0.75, 1.0, 0.5, 1.0, 1.0])
  task = TASK._replace(chance=chance)
  target = jnp.array([0, 0, 2, 4])
  turns = base.Turns(target * 0, target, target * 0, target >= 0, jnp.int32(9))

  def attempt(key):
    knows = jnp.zeros((4, 7), bool)
    world, knows, outcome = ENV.land(task, found([1]), turns, knows, key)
    return world.proved, world.refuted, jnp.any(knows, axis=1), outcome

  proved, refuted, learned, outcome = jax.device_get(
      jax.vmap(attempt)(jax.random.split(KEY, 4000))
  )
  np.testing.assert_array_equal(learned, outcome.effective)
  np.testing.assert_array_equal(learned[:, :2].any(axis=1), proved[:, 0])
  np.testing.assert_array_equal(learned[:, 2], refuted[:, 2])
  p = np.array([1 / 4, 1 / 4, 3 / 4, 1 / 2])
  slack = 4 * 0.5 / 4000**0.5
  np.testing.assert_allclose(learned.mean(axis=0), p, atol=slack)
  for i, j in itertools.combinations(range(4), 2):
    both = (learned[:, i] & learned[:, j]).mean()
    assert both == pytest.approx(p[i] * p[j], abs=slack)


def test_a_chance_does_not_depend_on_who_else_lands():
  task = TASK._replace(chance=jnp.full((7,), 0.5))
  for key in jax.random.split(KEY, 20):
    both = land(
        found(), (ATTEMPT, 0, True), (ATTEMPT, 2, True), task=task, key=key
    )
    one = land(
        found(), (ATTEMPT, 0, False), (ATTEMPT, 2, True), task=task, key=key
    )
    assert both[1] == one[1] and both[3][1] == one[3][1]


@pytest.mark.parametrize(
    'agents, limit_s, share',
    [
        (1, 9, 0),
        (1, 10, 2),  # Lemma 0.
        (2, 10, 3),  # And 1; no higher layer can be reached.
        (9, 19, 3),
        (1, 20, 4),  # 0 and 4.
        (2, 20, 6),
        (9, 20, 6),
        (1, 30, 5),
        (1, 40, 6),  # The theorem needs five lemmas.
        (1, 50, 7),
        (2, 30, 7),
    ],
)
def test_the_bounds(agents, limit_s, share):
  turn_ms = jnp.array([10_000, 1000], jnp.int32)
  bound = ENV.bounds(TASK, agents, jnp.int32(1000 * limit_s), turn_ms)
  assert bound.progress == pytest.approx(share / 7)
  assert (bound.serial_ms, bound.critical_path_ms) == (50_000, 30_000)


def test_a_theorem_out_of_reach_adds_nothing_to_the_bound():
  task = TASK._replace(credit=jnp.array([1, 1, 0, 1, 1, 0, 6]) / 10)
  turn_ms = jnp.array([10_000, 1000], jnp.int32)
  bound = ENV.bounds(task, 1, jnp.int32(40_000), turn_ms)
  assert bound.progress == pytest.approx(0.4)  # Five attempts are needed.


def test_the_bounds_are_reached_by_luck():
  rounds = [[0, 1], [3, 4], [6]]
  world, knows = found(), jnp.zeros((2, 7), bool)
  turn_ms = jnp.array([10, 10], jnp.int32)
  for i, targets in enumerate(rounds):
    rows = jnp.array((targets + [6])[:2])
    turns = base.Turns(rows * 0, rows, rows * 0, rows >= 0, jnp.int32(9))
    world, knows, _ = ENV.land(SURE, world, turns, knows, KEY)
    now_ms = jnp.int32(10 * (i + 1))
    bound = ENV.bounds(SURE, 2, now_ms, turn_ms).progress
    share = [3 / 7, 6 / 7, 1.0][i]
    assert bound == pytest.approx(share)
    assert ENV.progress(SURE, world, now_ms) == pytest.approx(share)


# Only the hidden parts differ.
OTHER = TASK._replace(
    true=~lemmas(0, 3), credit=jnp.array([0, 0, 2, 0, 0, 1, 1]) / 4
)


@pytest.mark.parametrize('known', [[], range(7)])
@pytest.mark.parametrize('proved', [[], [1], [1, 4]])
def test_what_is_hidden_does_not_show(proved, known):
  world, knows = found(proved), lemmas(*known)
  one, other = (ENV.view(task, world, knows) for task in (TASK, OTHER))
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert ENV.describe(TASK) == ENV.describe(OTHER)
  text = lambda task: ENV.describe_view(task, world, knows, one.legal)
  assert text(TASK) == text(OTHER)


def test_a_refutation_does_not_show_to_those_who_do_not_know_it():
  knows = lemmas(0)
  pair = found([0, 1]), found([0, 1], [2])
  views = [ENV.view(TASK, world, knows) for world in pair]
  jax.tree.map(np.testing.assert_array_equal, *views)
  texts = [
      ENV.describe_view(TASK, world, knows, views[0].legal) for world in pair
  ]
  assert texts[0] == texts[1]


def test_without_coupling_it_does_not_matter_what_one_was_told():
  task = TASK._replace(private=lemmas())
  world = found([0, 1, 4], [2, 5])
  views = [ENV.view(task, world, knows) for knows in (lemmas(), ~lemmas())]
  jax.tree.map(np.testing.assert_array_equal, *views)
  assert not views[0].legal[STUDY].any()


@pytest.mark.parametrize('lemmas', [1, 22, 32, 33, 70])
def test_sets_of_lemmas_as_words(lemmas):
  masks = np.random.default_rng(0).random((3, 2, lemmas)) < 0.5
  words = proof.pack(jnp.array(masks))
  assert words.shape == (-(-lemmas // 32), 3, 2) and words.dtype == np.uint32
  number = sum(int(word) << 32 * i for i, word in enumerate(words[:, 2, 1]))
  assert number == sum(1 << i for i in np.flatnonzero(masks[2, 1]).tolist())
  np.testing.assert_array_equal(proof.unpack(words, lemmas), masks)


@functools.cache
def sample(env, count=64):
  """Tasks as numpy arrays, with routes as masks [tasks, M, A, M]."""
  tasks = worlds.sample(env, count)
  masks = jax.vmap(lambda words: proof.unpack(words, env.num_lemmas))
  routes = np.asarray(masks(tasks.routes)).swapaxes(1, 2)
  return tasks._replace(routes=routes)


SAMPLED = (
    proof.Proof(),
    ENV,
    proof.Proof(num_lemmas=12, width=4, alternatives=3, false_share=0.6),
    proof.Proof(num_lemmas=5, width=1, alternatives=2),
    proof.Proof(num_lemmas=6, width=3, false_share=1.0, max_premises=9),
    proof.Proof(num_lemmas=34, width=33),  # Sets of two words.
)


@pytest.mark.parametrize('env', SAMPLED)
def test_layers_are_full_but_for_the_first_and_the_last(env):
  tasks = sample(env)
  below = env.num_lemmas - 1
  first = below - (env.depth - 1) * env.width
  sizes = [first] + [env.width] * (env.depth - 1) + [1]
  for layer in tasks.layer:
    assert np.bincount(layer).tolist() == sizes
  where = np.argmax(tasks.layer, axis=1)  # An index says nothing.
  assert len(set(where.tolist())) > 1


@pytest.mark.parametrize('env', SAMPLED)
def test_routes_lead_one_layer_down_and_one_of_them_is_sound(env):
  tasks = sample(env)
  for layer, routes, true in zip(
      tasks.layer, tasks.routes, tasks.true, strict=True
  ):
    assert true[np.argmax(layer)]
    for level in range(env.depth + 1):
      assert true[layer == level].any()
    for i, ways in enumerate(routes):
      ways = [set(np.flatnonzero(way)) for way in ways if way.any()]
      assert (len(ways) == 0) == (layer[i] == 0)
      below = true[layer == layer[i] - 1].sum()
      least = min(env.min_premises, below)
      most = min(env.max_premises, below)
      for way in ways:
        assert (layer[list(way)] == layer[i] - 1).all()
        assert least <= len(way) <= most
      if layer[i] > 0 and true[i]:
        assert any(true[list(way)].all() for way in ways)
      for a, b in itertools.permutations(ways, 2):
        assert not a <= b  # The larger one would be of no use.


def cheapest(task, i):
  """Attempts that the cheapest sound proof of i takes, as a tree."""
  if not task.true[i]:
    return np.inf
  ways = [way for way in task.routes[i] if way.any()]
  trees = [sum(cheapest(task, j) for j in np.flatnonzero(way)) for way in ways]
  return 1 / task.chance[i] + min(trees, default=0.0)


def proofs(task, i):
  """All sets of lemmas that prove i."""
  if not task.true[i]:
    return set()
  ways = [np.flatnonzero(way) for way in task.routes[i] if way.any()]
  sets = set()
  for way in ways or [[]]:
    for parts in itertools.product(*(proofs(task, j) for j in way)):
      sets.add(frozenset([i]).union(*parts))
  return sets


@pytest.mark.parametrize('env', SAMPLED)
def test_credit_and_the_fewest_attempts_are_those_of_all_proofs(env):
  tasks = sample(env)
  few = jax.tree.map(lambda x: x[:12], worlds.sample(env))
  fewest = jax.device_get(jax.vmap(env._fewest_attempts)(few))
  tight = 0
  for k in range(12):
    task = jax.tree.map(lambda x, k=k: x[k], tasks)
    top = int(np.argmax(task.layer))
    every = proofs(task, top)
    taken = frozenset(np.flatnonzero(task.credit).tolist())
    assert taken in every
    effort = np.where(task.credit > 0, 1 / task.chance, 0)
    np.testing.assert_allclose(task.credit, effort / effort.sum(), rtol=1e-5)
    # As a tree it costs no more than any other.
    only = task._replace(true=np.isin(np.arange(env.num_lemmas), list(taken)))
    assert cheapest(only, top) == pytest.approx(cheapest(task, top))
    smallest = min(map(len, every))
    assert env.depth + 1 <= fewest[k] <= smallest
    tight += fewest[k] == smallest
  assert tight >= 3


def test_false_lemmas_chances_and_private_lemmas_have_their_shares():
  env = proof.Proof(coupling=0.25)
  tasks = sample(env, 512)
  inner = tasks.layer < env.depth
  # A whole layer would be false once in 5000 times.
  assert 1 - tasks.true[inner].mean() == pytest.approx(0.3, abs=0.02)
  assert tasks.private.mean() == pytest.approx(0.25, abs=0.02)
  assert tasks.chance.min() >= 0.6 and tasks.chance.max() <= 1.0
  assert tasks.chance.mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize('coupling', [0.0, 1.0])
def test_all_or_none_are_private(coupling):
  assert (
      sample(dataclasses.replace(ENV, coupling=coupling)).private.mean()
      == coupling
  )


@pytest.mark.parametrize('share', [0.0, 1.0])
def test_at_the_ends_of_false_share(share):
  env = dataclasses.replace(ENV, false_share=share)
  true = sample(env).true.sum(axis=1)
  assert (true == (7 if share == 0.0 else 3)).all()  # One of each layer.


def test_the_place_of_a_route_does_not_tell_that_it_is_sound():
  env = proof.Proof()
  tasks = sample(env, 512)
  sound = tasks.routes & ~tasks.true[:, None, None, :]
  sound = tasks.routes.any(axis=3) & ~sound.any(axis=3)  # [tasks, M, A]
  one = sound.sum(axis=2) == 1
  one &= tasks.routes.any(axis=3).all(axis=2) & tasks.true
  first = sound[..., 0][one]
  assert first.mean() == pytest.approx(0.5, abs=4 * 0.5 / len(first) ** 0.5)


@pytest.mark.parametrize(
    'knobs',
    [
        {'num_lemmas': 1, 'width': 1},
        {
            'num_lemmas': 6,
            'width': 3,
            'alternatives': 3,
            'min_premises': 1,
            'min_chance': 0.2,
            'coupling': 0.5,
        },
    ],
)
def test_it_conforms(knobs):
  conformance.check_environment(proof.Proof(**knobs))


test_every_knob_changes_something = worlds.each_changes_something(
    ENV,
    num_lemmas=(8, worlds.sampled),
    width=(2, worlds.sampled),
    alternatives=(3, worlds.sampled),
    min_premises=(2, worlds.sampled),
    max_premises=(3, worlds.sampled),
    false_share=(0.6, worlds.sampled),
    min_chance=(0.6, worlds.sampled),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        proof.Proof,
        ('num_lemmas', 0, '>= 1'),
        ('width', 0, 'from 1 to num_lemmas=22'),
        ('width', 23, 'from 1 to num_lemmas=22'),
        ('alternatives', 0, '>= 1'),
        ('min_premises', 0, '>= 1'),
        ('max_premises', 1, '>= min_premises=2'),
        ('false_share', 1.1, 'from 0 to 1'),
        ('min_chance', 0.0, 'above 0 and at most 1'),
        ('min_chance', 1.1, 'above 0 and at most 1'),
        ('min_chance', float('nan'), 'above 0 and at most 1'),
    )
)


def test_a_task_as_text():
  first, *lines = ENV.describe(TASK).splitlines()
  assert first.startswith('A theorem, 6, and 6 lemmas, some of which may be')
  assert lines == [
      'lemma 0: from nothing, attempts succeed with chance 0.50, what is found'
      ' out is private',
      'lemma 1: from nothing, attempts succeed with chance 1.00, what is found'
      ' out is public',
      'lemma 2: from nothing, attempts succeed with chance 0.50, what is found'
      ' out is private',
      'lemma 3: from 0 and 1 or from 2, attempts succeed with chance 1.00, what'
      ' is found out is private',
      'lemma 4: from 1, attempts succeed with chance 0.50, what is found out is'
      ' private',
      'lemma 5: from 2 or from 0, attempts succeed with chance 1.00, what is'
      ' found out is public',
      'lemma 6: the theorem, from 3 and 4 or from 5, attempts succeed with'
      ' chance 1.00, what is found out is private',
  ]


def test_a_view_as_text():
  def text(proved, refuted, *known):
    world, knows = found(proved, refuted), lemmas(*known)
    view = ENV.view(TASK, world, knows)
    return ENV.describe_view(TASK, world, knows, view.legal).splitlines()

  assert text([0, 1, 4], [2], 4) == [
      'lemma 0: proved, study 0',
      'lemma 1: proved, proof known',
      'lemma 2: not proved, attempt 2',
      'lemma 3: not proved, 1 proofs to learn',
      'lemma 4: proved, proof known',
      'lemma 5: not proved, 1 proofs to learn',
      'lemma 6: not proved',
  ]
  assert text([0], [2], 0, 2)[2:6] == [
      'lemma 2: refuted',
      'lemma 3: not proved',
      'lemma 4: not proved',
      'lemma 5: not proved, attempt 5',
  ]
