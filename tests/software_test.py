"""Tests of the software project, on a task small enough for a hand.

module      0   1   2   3
effort      2   1   3   1      7 units
tests       4   3   6   2      15 tests
needs       -   0   0   1, 2
must know   -   0   -   1
path below  6   2   4   1      0 - 2 - 3 takes 2 + 3 + 1
path above  2   3   5   6
"""

import dataclasses

from envs import base
from envs import software
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

WORK, READ = software.WORK, software.READ
ENV = software.Software(num_modules=4, width=1)  # Of up to 4 layers.
CHEERFUL = dataclasses.replace(ENV, conflicts=False)
EFFORT = jnp.array([2, 1, 3, 1], jnp.int32)
DEPENDS = jnp.zeros((4, 4), bool).at[[1, 2, 3, 3], [0, 0, 1, 2]].set(True)
TASK = software.Task(
    depends=DEPENDS,
    coupled=jnp.zeros((4, 4), bool).at[[1, 3], [0, 1]].set(True),
    effort=EFFORT,
    tests=jnp.array([4, 3, 6, 2], jnp.int32),
    below=jnp.array([6, 2, 4, 1], jnp.int32),
    above=jnp.array([2, 3, 5, 6], jnp.int32),
)


def world(*remaining, changed_ms=(-1, -1, -1, -1)):
  return software.World(
      jnp.array(remaining, jnp.int32), jnp.array(changed_ms, jnp.int32)
  )


def facts(*modules):
  """[M] bool, the facts of these modules."""
  return jnp.zeros((4,), bool).at[jnp.array(modules, int)].set(True)


def legal(remaining, known=(), task=TASK):
  """Modules that may be worked on, and those that may be read."""
  view = ENV.view(task, world(*remaining), facts(*known))
  return tuple(np.flatnonzero(row).tolist() for row in view.legal)


def land(before, now_ms, *rows, env=ENV, knows=None):
  """Lands turns given as (verb, module, start in ms, lands)."""
  verb, target, start_ms, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, start_ms, lands, jnp.int32(now_ms))
  knows = jnp.zeros((len(rows), 4), bool) if knows is None else knows
  after, knows, outcome = env.land(TASK, before, turns, knows, None)
  return after, np.argwhere(knows).tolist(), outcome.effective.tolist()


def test_work_needs_finished_dependencies():
  assert legal([2, 1, 3, 1])[0] == [0]
  assert legal([1, 1, 3, 1])[0] == [0]
  assert legal([0, 1, 3, 1], known=[0])[0] == [1, 2]
  assert legal([0, 0, 1, 1], known=[0, 1])[0] == [2]
  assert legal([0, 0, 0, 1], known=[0, 1])[0] == [3]
  assert legal([0, 0, 0, 0], known=[0, 1])[0] == []


def test_work_needs_the_facts_that_a_module_is_coupled_to():
  assert legal([0, 1, 3, 1])[0] == [2]  # 2 needs 0 finished but not known.
  assert legal([0, 0, 0, 1])[0] == []
  assert legal([0, 0, 0, 1], known=[0, 2])[0] == []
  assert legal([0, 0, 0, 1], known=[1])[0] == [3]


def test_coupling_zero_and_one_need_no_fact_and_every_fact():
  none = TASK._replace(coupled=DEPENDS & False)
  every = TASK._replace(coupled=DEPENDS)
  assert legal([0, 1, 3, 1], task=none)[0] == [1, 2]
  assert legal([0, 1, 3, 1], task=every)[0] == []
  assert legal([0, 0, 0, 1], known=[1], task=every)[0] == []
  assert legal([0, 0, 0, 1], known=[1, 2], task=every)[0] == [3]


def test_what_is_finished_and_not_yet_known_can_be_read():
  assert legal([2, 1, 3, 1])[1] == []
  assert legal([0, 0, 3, 1])[1] == [0, 1]
  assert legal([0, 0, 3, 1], known=[0])[1] == [1]


def test_features_of_a_hand_worked_view():
  view = ENV.view(TASK, world(0, 1, 2, 1), facts())
  column = dict(zip(ENV.feature_names, view.features.T.tolist(), strict=True))
  assert column['open'] == [0, 1, 1, 0]
  assert column['turns_left'] == [0, 1, 2, 1]
  assert column['missing'] == [0, 1, 0, 1]
  assert column['blocks_me'] == [1, 0, 0, 0]  # 0 would unlock 1 for me.
  assert column['wanted'] == [1, 1, 0, 0]
  assert column['effort'] == [2, 1, 3, 1]
  assert column['finished'] == [1, 0, 0, 0]
  assert column['dependencies_met'] == [1, 1, 1, 0]
  assert column['known'] == [0, 0, 0, 0]
  np.testing.assert_allclose(
      column['value'], [0, 12 / 15, 16 / 15, 8 / 15], rtol=1e-6
  )
  np.testing.assert_array_equal(view.relations, DEPENDS)


def test_a_known_fact_is_shown_and_blocks_no_more():
  view = ENV.view(TASK, world(0, 1, 2, 1), facts(0))
  column = dict(zip(ENV.feature_names, view.features.T.tolist(), strict=True))
  assert column['known'] == [1, 0, 0, 0]
  assert column['missing'] == [0, 0, 0, 1]
  assert column['blocks_me'] == [0, 0, 0, 0]


def test_the_fact_of_a_module_is_wanted_until_what_needs_it_is_finished():
  view = ENV.view(TASK, world(0, 0, 2, 1), facts())
  column = dict(zip(ENV.feature_names, view.features.T.tolist(), strict=True))
  assert column['wanted'] == [0, 1, 0, 0]
  assert column['blocks_me'] == [0, 0, 0, 0]  # 2 is unfinished, so 3 is shut.


def test_priority_is_the_heaviest_path_below_then_tests_per_unit():
  def order(task):
    view = ENV.view(task, world(2, 1, 3, 1), facts())
    priority = view.features[:, ENV.feature_names.index('priority')]
    return np.argsort(-priority).tolist()

  assert order(TASK) == [0, 2, 1, 3]
  level = TASK._replace(below=jnp.full((4,), 2, jnp.int32))
  assert order(level) == [1, 0, 2, 3]  # 3 tests per unit; then 2 each.


def test_a_unit_of_work_lands():
  after, knows, effective = land(world(2, 1, 3, 1), 10, (WORK, 0, 0, True))
  assert after.remaining.tolist() == [1, 1, 3, 1]
  assert after.changed_ms.tolist() == [10, -1, -1, -1]
  assert knows == []  # Not finished, so nothing to know yet.
  assert effective == [True]


def test_finishing_a_module_teaches_its_author_only():
  after, knows, _ = land(
      world(1, 1, 3, 1), 10, (WORK, 2, 5, False), (WORK, 0, 0, True)
  )
  assert after.remaining.tolist() == [0, 1, 3, 1]
  assert knows == [[1, 0]]


def test_reading_teaches_and_changes_nothing():
  before = world(0, 0, 3, 1, changed_ms=(10, 20, -1, -1))
  after, knows, effective = land(
      before, 60, (READ, 1, 30, True), (READ, 0, 30, False), (READ, 0, 30, True)
  )
  assert knows == [[0, 1], [2, 0]]
  assert effective == [True, False, True]
  np.testing.assert_array_equal(after.remaining, before.remaining)
  np.testing.assert_array_equal(after.changed_ms, before.changed_ms)


def test_what_was_known_stays_known():
  knows = jnp.zeros((1, 4), bool).at[0, 0].set(True)
  before = world(0, 0, 3, 1)
  assert land(before, 60, (READ, 1, 30, True), knows=knows)[1] == [
      [0, 0],
      [0, 1],
  ]


@pytest.mark.parametrize(
    'start_ms, merges',
    [
        (0, False),  # Both began with the untouched module: the later loses.
        (9, False),
        (10, True),  # Began when the change had landed, and knows of it.
        (12, True),
    ],
)
def test_a_change_since_the_turn_began_is_a_conflict(start_ms, merges):
  before = world(2, 1, 3, 1)
  between, _, _ = land(
      before, 10, (WORK, 0, 0, True), (WORK, 0, start_ms, False)
  )
  after, knows, effective = land(
      between, 20, (WORK, 0, 10, False), (WORK, 0, start_ms, True)
  )
  assert effective == [False, merges]
  assert after.remaining[0] == (0 if merges else 1)
  assert after.changed_ms[0] == (20 if merges else 10)
  assert knows == ([[1, 0]] if merges else [])


def test_of_changes_at_one_instant_one_merges():
  after, knows, effective = land(
      world(0, 1, 3, 1),
      10,
      (WORK, 2, 0, False),
      (WORK, 2, 0, True),
      (WORK, 2, 5, True),
      (WORK, 1, 0, True),  # Another module is no conflict.
  )
  assert effective == [False, True, False, True]
  assert after.remaining.tolist() == [0, 0, 2, 1]
  assert knows == [[3, 1]]


def test_without_conflicts_all_units_land():
  rows = (WORK, 2, 0, True), (WORK, 2, 5, True), (WORK, 2, 0, False)
  after, knows, effective = land(world(0, 1, 3, 1), 10, *rows, env=CHEERFUL)
  assert effective == [True, True, False]
  assert after.remaining.tolist() == [0, 1, 1, 1]
  assert knows == []
  # Also where the module was changed since, and then both are its authors.
  before = world(0, 1, 2, 1, changed_ms=(-1, -1, 7, -1))
  after, knows, effective = land(before, 10, *rows, env=CHEERFUL)
  assert effective == [True, True, False]
  assert after.remaining.tolist() == [0, 1, 0, 1]
  assert knows == [[0, 2], [1, 2]]


@pytest.mark.parametrize('env', [ENV, CHEERFUL])
def test_work_on_what_was_finished_meanwhile_is_lost(env):
  before = world(0, 1, 3, 1, changed_ms=(5, -1, -1, -1))
  after, knows, effective = land(before, 10, (WORK, 0, 5, True), env=env)
  assert after.remaining.tolist() == [0, 1, 3, 1]
  assert after.changed_ms.tolist() == [5, -1, -1, -1]
  assert knows == []
  assert effective == [False]


def test_of_more_units_than_are_left_only_those_left_are_effective():
  rows = (WORK, 2, 0, True), (WORK, 2, 0, True), (WORK, 2, 0, True)
  after, _, effective = land(world(0, 1, 2, 1), 10, *rows, env=CHEERFUL)
  assert after.remaining.tolist() == [0, 1, 0, 1]
  assert sum(effective) == 2


@pytest.mark.parametrize(
    'remaining, passed',
    [
        ([2, 1, 3, 1], 0),
        ([1, 1, 3, 1], 2),  # Each unit passes its share of the tests.
        ([0, 1, 3, 1], 4),
        ([0, 1, 1, 1], 8),
        ([0, 0, 3, 1], 7),
        ([0, 1, 0, 1], 10),
        ([0, 0, 0, 0], 15),
    ],
)
def test_progress_is_the_share_of_tests_that_pass(remaining, passed):
  progress = ENV.progress(TASK, world(*remaining), jnp.int32(0))
  assert progress == np.float32(passed / 15)
  assert ENV.finished(TASK, world(*remaining)) == (passed == 15)


def test_a_fresh_world_is_untouched():
  fresh = ENV.reset(TASK)
  assert fresh.remaining.tolist() == [2, 1, 3, 1]
  assert fresh.changed_ms.tolist() == [-1] * 4


def test_heaviest_paths():
  path = software._heaviest_path  # Also through sampled tasks, below.
  assert path(DEPENDS.T, EFFORT, 3).tolist() == TASK.below.tolist()
  assert path(DEPENDS, EFFORT, 3).tolist() == TASK.above.tolist()


@pytest.mark.parametrize(
    'agents, limit_s, tests',
    [
        (1, 9, 0),  # Not one unit of 10 s.
        (1, 20, 4),  # Module 0 in 2 units.
        (1, 25, 4),
        (1, 30, 7),  # 0 and 1 in 3 units.
        (2, 30, 9),  # And the first unit of 2; 3 is too deep.
        (1, 50, 11),  # 1, then 4 units of 2 tests each on 0 and 2.
        (2, 50, 13),  # All that is within reach: 0, 1 and 2.
        (1, 60, 13),
        (2, 60, 15),
        (1, 70, 15),
        (9, 999, 15),
    ],
)
def test_the_bound_on_progress(agents, limit_s, tests):
  turn_ms = jnp.array([10_000, 1], jnp.int32)
  bound = ENV.bounds(TASK, agents, jnp.int32(1000 * limit_s), turn_ms)
  assert bound.progress == pytest.approx(tests / 15, abs=1e-6)


def test_serial_and_critical_path_times():
  turn_ms = jnp.array([10_000, 1], jnp.int32)
  bound = ENV.bounds(TASK, 3, jnp.int32(0), turn_ms)
  assert (bound.serial_ms, bound.critical_path_ms) == (70_000, 60_000)


def test_without_conflicts_agents_share_a_module_and_bounds_know_it():
  turn_ms = jnp.array([10_000, 1], jnp.int32)
  before = world(2, 1, 3, 1)
  rows = (WORK, 0, 0, True), (WORK, 0, 0, True)
  after, _, _ = land(before, 10_000, *rows, env=CHEERFUL)
  progress = CHEERFUL.progress(TASK, after, jnp.int32(10_000))
  assert progress == np.float32(4 / 15)
  bound = CHEERFUL.bounds(TASK, 2, jnp.int32(10_000), turn_ms)
  assert bound.progress >= progress - 1e-6
  # Two agents take 1 + 2 + 1 turns for the path 0 - 2 - 3, and 7 units in all.
  assert bound.critical_path_ms <= 40_000
  assert bound.serial_ms == 70_000
  assert (
      CHEERFUL.bounds(TASK, 1, jnp.int32(0), turn_ms).critical_path_ms <= 60_000
  )


@pytest.mark.parametrize(
    'modules, width, sizes',
    [
        (12, 6, [6, 6]),
        (12, 5, [2, 5, 5]),  # The first layer is the small one.
        (12, 12, [12]),
        (4, 3, [1, 3]),
        (4, 1, [1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize('density', [0.0, 0.4, 1.0])
def test_sampled_graphs_are_layered(modules, width, sizes, density):
  env = software.Software(num_modules=modules, width=width, density=density)
  for depends in worlds.sample(env).depends:
    layer = np.zeros(modules, int)  # The longest chain below each module.
    for _ in sizes:
      layer = np.max(depends * (layer + 1), axis=1, initial=0)
    assert np.bincount(layer, minlength=len(sizes)).tolist() == sizes
    row, column = np.nonzero(depends)
    assert (layer[row] == layer[column] + 1).all()
    count = depends.sum(axis=1)
    assert (count[layer > 0] >= 1).all()
    if density == 0.0:
      assert (count[layer > 0] == 1).all()
    if density == 1.0:
      assert (count[layer > 0] == np.array(sizes)[layer[layer > 0] - 1]).all()


def test_paths_of_sampled_tasks_are_those_of_a_plain_recursion():
  tasks = worlds.sample(software.Software(width=5))
  for depends, effort, below, above in zip(
      tasks.depends, tasks.effort, tasks.below, tasks.above, strict=True
  ):

    def heaviest(i, edges, effort=effort):
      ahead = (heaviest(j, edges) for j in np.flatnonzero(edges[i]))
      return effort[i] + max(ahead, default=0)

    assert below.tolist() == [heaviest(i, depends.T) for i in range(12)]
    assert above.tolist() == [heaviest(i, depends) for i in range(12)]


def test_density_is_the_chance_of_a_dependency():
  tasks = worlds.sample(software.Software(num_modules=12, width=6, density=0.3))
  share = tasks.depends.sum() / (64 * 36)
  # Of the 6 candidates one is taken even if chance takes none.
  assert share == pytest.approx(0.3 + 0.7**6 / 6, abs=0.03)


@pytest.mark.parametrize('coupling', [0.0, 0.25, 1.0])
def test_coupling_is_the_share_of_dependencies_to_know(coupling):
  tasks = worlds.sample(software.Software(coupling=coupling))
  assert not (tasks.coupled & ~tasks.depends).any()
  share = tasks.coupled.sum() / tasks.depends.sum()
  if coupling == 0.25:
    assert share == pytest.approx(coupling, abs=0.04)
  else:
    assert share == coupling


def test_efforts_and_tests_take_all_values_of_their_ranges():
  tasks = worlds.sample(software.Software(max_effort=3, max_tests=4))
  assert np.unique(tasks.effort).tolist() == [1, 2, 3]
  assert np.unique(tasks.tests / tasks.effort).tolist() == [1, 2, 3, 4]


def test_every_module_may_be_in_any_layer():
  tasks = worlds.sample(software.Software(num_modules=4, width=2))
  first = ~tasks.depends.any(axis=2)  # [tasks, modules]
  assert (0 < first.mean(axis=0)).all() and (first.mean(axis=0) < 1).all()


def _second_unit_lands(env):
  rows = (WORK, 0, 0, True), (WORK, 0, 0, True)
  return land(world(2, 1, 3, 1), 10, *rows, env=env)[2]


test_every_knob_changes_something = worlds.each_changes_something(
    software.Software(num_modules=4, width=2),
    num_modules=(5, worlds.sampled),
    width=(1, worlds.sampled),
    density=(1.0, worlds.sampled),
    conflicts=(False, _second_unit_lands),
    max_effort=(4, worlds.sampled),
    max_tests=(9, worlds.sampled),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        software.Software,
        ('num_modules', 0, '>= 1'),
        ('width', 0, 'from 1 to num_modules=12'),
        ('width', 13, 'from 1 to num_modules=12'),
        ('density', -0.1, 'from 0 to 1'),
        ('max_effort', 0, '>= 1'),
        ('max_tests', 0, '>= 1'),
    )
)


def test_the_smallest_knobs_are_allowed():
  env = software.Software(
      num_modules=1,
      width=1,
      density=0.0,
      coupling=0.0,
      max_effort=1,
      max_tests=1,
      work_tokens=1,
      work_tool_ms=0,
      read_tokens=1,
      read_tool_ms=0,
  )
  task = env.sample_task(jax.random.key(0))
  assert (task.effort.tolist(), task.tests.tolist()) == ([1], [1])


def test_a_task_as_text():
  assert ENV.describe(TASK).splitlines()[1:] == [
      'module 0: 2 units of work, 4 tests',
      'module 1: 1 units of work, 3 tests, after 0 (know its interface)',
      'module 2: 3 units of work, 6 tests, after 0',
      'module 3: 1 units of work, 2 tests, after 1 (know its interface), 2',
  ]
  assert '4 modules, 15 tests' in ENV.describe(TASK).splitlines()[0]


def test_a_view_as_text():
  seen = ENV.view(TASK, world(0, 0, 2, 1), facts(0))
  text = ENV.describe_view(TASK, world(0, 0, 2, 1), facts(0), seen.legal)
  assert text.splitlines() == [
      'module 0: finished, interface known',
      'module 1: finished, read 1',
      'module 2: 2 units left, work 2',
      'module 3: 1 units left',
  ]
