"""Tests of the search, on a task small enough for a hand.

region    0            1            2            3
          poor         rich         poor         rich
place     0   1   2    3   4   5    6   7   8    9   10  11
find                   x   x                         x   x
clue      1                     2       0                    about this region
public                              x       x
"""

import dataclasses
import itertools

from envs import base
from envs import conformance
from envs import search
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

PROBE = search.PROBE
ENV = search.Search(num_places=12, region_size=3, num_rich=2, per_region=2)


def places(*which):
  """[M] bool, these places."""
  return jnp.zeros((12,), bool).at[jnp.array(which, int)].set(True)


def clues(**about):
  """[M, R] bool, from p<place>=<region>."""
  rows = jnp.zeros((12, 4), bool)
  for place, region in about.items():
    rows = rows.at[int(place[1:]), region].set(True)
  return rows


TASK = search.Task(
    rich=jnp.array([False, True, False, True]),
    find=places(3, 4, 10, 11),
    clue=clues(p0=1, p5=2, p7=0),
    private=~places(6, 8),
)


def look(probed, known=None, task=TASK):
  """The columns of a view by name; all that was probed is known by default."""
  known = probed if known is None else known
  world = search.World(places(*probed))
  view = ENV.view(task, world, places(*known))
  return dict(zip(ENV.feature_names, np.array(view.features).T, strict=True))


def chances(probed, known=None):
  """The chance of a find of every place, from its value."""
  return look(probed, known)['value'] * ENV.num_finds / 12


def land(probed, *rows, knows=None, now_ms=10):
  """Lands turns given as (verb, place, lands)."""
  verb, target, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, verb * 0, lands, jnp.int32(now_ms))
  knows = jnp.zeros((len(rows), 12), bool) if knows is None else knows
  world, knows, outcome = ENV.land(
      TASK, search.World(places(*probed)), turns, knows, None
  )
  found = np.flatnonzero(world.probed).tolist()
  return found, np.argwhere(knows).tolist(), outcome.effective.tolist()


ANY = 1 / 3  # Half of the regions are rich, two thirds of whose places find.


@pytest.mark.parametrize(
    'probed, expected',
    [
        ([], [ANY] * 12),
        # A blank makes its region a third as likely as the others: of six pairs
        # of rich regions three weigh 1/3, so it is rich with chance 1/4, and
        # then both other places hold finds; others with (1/3 + 2) / 4.
        ([2], [1 / 4, 1 / 4, 0] + [7 / 18] * 9),
        # A clue: region 1 is rich. Of the others one is: 0, with its blank, is
        # a third as likely as 2 and 3, so 1/7, 3/7 and 3/7.
        ([0], [0, 1 / 7, 1 / 7] + [2 / 3] * 3 + [2 / 7] * 6),
        # A find says as much of its own region; one more is among two places.
        ([3], [2 / 9] * 3 + [0, 1 / 2, 1 / 2] + [2 / 9] * 6),
        ([3, 4], [2 / 9] * 3 + [0, 0, 0] + [2 / 9] * 6),  # Exhausted.
        # Two blanks are more than a rich region has.
        ([6, 8], [4 / 9] * 6 + [0, 0, 0] + [4 / 9] * 3),
        # Both rich regions are known, so the others are poor.
        ([3, 10], [0] * 3 + [0, 1 / 2, 1 / 2] + [0] * 3 + [1 / 2, 0, 1 / 2]),
        # Clues: 0 and 2 are poor, so the others are rich; 5 was a blank.
        ([5, 7], [0] * 3 + [1, 1, 0] + [0] * 3 + [2 / 3] * 3),
    ],
)
def test_chances_worked_by_hand(probed, expected):
  np.testing.assert_allclose(chances(probed), expected, rtol=1e-6, atol=1e-7)


def exact_chances(known):
  """By enumeration of all finds that agree with what is known, and clues."""
  total, weight = np.zeros(12), 0
  clue, find = np.asarray(TASK.clue), np.asarray(TASK.find)
  for rich in itertools.combinations(range(4), 2):
    told = clue[known].any(axis=0)
    if (told & (np.isin(range(4), rich) != np.asarray(TASK.rich))).any():
      continue
    for blanks in itertools.product(range(3), repeat=2):
      other = np.zeros(12, bool)
      for region, blank in zip(rich, blanks, strict=True):
        other[3 * region : 3 * region + 3] = np.arange(3) != blank
      if (other == find)[known].all():
        total += other
        weight += 1
  return np.where(known, 0.0, total / weight)


def test_chances_are_those_of_all_tasks_that_agree_with_what_is_known():
  view = jax.jit(jax.vmap(ENV.view, (None, 0, None)))
  rng = np.random.default_rng(0)
  known = rng.random((200, 12)) < rng.random((200, 1)) * 0.6
  seen = view(TASK, search.World(jnp.asarray(known)), places(*range(12)))
  columns = dict(
      zip(ENV.feature_names, np.moveaxis(seen.features, -1, 0), strict=True)
  )
  chance = columns['value'] * ENV.num_finds / 12
  exact = np.stack([exact_chances(row) for row in known])
  # What is sure is sure.
  np.testing.assert_array_equal(chance == 0, exact == 0)
  np.testing.assert_array_equal(chance == 1, exact == 1)
  np.testing.assert_allclose(chance, exact, atol=1e-6)


@pytest.mark.parametrize('size', range(5))
def test_shares_of_subsets_are_those_of_all_subsets(size):
  weights = np.array([0.5, 0.0, 1.0, 0.25, 0.125, 1.0], np.float32)
  expected, total = np.zeros(6), 0.0
  for subset in itertools.combinations(range(6), size):
    weight = weights[list(subset)].prod()
    expected[list(subset)] += weight
    total += weight
  shares = search._share_of_subsets(jnp.array(weights), jnp.int32(size), 4)
  np.testing.assert_allclose(shares, expected / total, rtol=1e-6)


def test_features_of_a_hand_worked_view():
  column = look([0, 3, 6], known=[0, 3])  # And 6 is public.
  assert column['open'].tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1]
  np.testing.assert_array_equal(column['turns_left'], column['open'])
  assert column['find'].tolist() == places(3).tolist()
  assert column['blank'].tolist() == places(0, 6).tolist()
  assert column['clue'].tolist() == places(0).tolist()
  assert column['region_rich'].tolist() == places(3, 4, 5).tolist()
  assert not column['region_poor'].any()
  by_region = lambda *x: np.repeat(np.float32(x), 3)
  finds, blanks = column['region_finds'], column['region_blanks']
  np.testing.assert_allclose(finds, by_region(0, 1 / 3, 0, 0))
  np.testing.assert_allclose(blanks, by_region(1 / 3, 0, 1 / 3, 0))
  assert not column['missing'].any() and not column['blocks_me'].any()


def test_regions_are_known_to_be_poor_by_clues_blanks_and_elimination():
  poor = lambda *probed: look(probed)['region_poor'][::3].tolist()
  rich = lambda *probed: look(probed)['region_rich'][::3].tolist()
  assert (rich(), poor()) == ([0, 0, 0, 0], [0, 0, 0, 0])
  assert (rich(7), poor(7)) == ([0, 0, 0, 0], [1, 0, 0, 0])
  assert (rich(6, 8), poor(6, 8)) == ([0, 0, 0, 0], [0, 0, 1, 0])
  assert (rich(0, 11), poor(0, 11)) == ([0, 1, 0, 1], [1, 0, 1, 0])
  assert (rich(5, 7), poor(5, 7)) == ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_fact_is_wanted_by_how_many_places_it_is_about():
  wanted = look([0, 2, 3, 6])['wanted']
  assert wanted[0] == 1 + 2  # Open in its region, and in 1, which it names.
  assert wanted[2] == 1
  assert wanted[3] == 2
  assert wanted[6] == 0  # Public.
  assert not np.delete(wanted, [0, 2, 3]).any()  # Not known yet.
  assert not look([0, 2, 3], known=[])['wanted'].any()
  assert not look([0, 3, 4, 10, 11])['wanted'].any()  # All is found.


def test_likely_places_come_first_then_the_first_of_each_region():
  order = lambda *probed: np.argsort(-look(probed)['priority'], kind='stable')
  assert order()[:8].tolist() == [0, 3, 6, 9, 1, 4, 7, 10]
  assert order(0)[:6].tolist() == [3, 4, 5, 6, 9, 7]
  assert order(3)[:6].tolist() == [4, 5, 0, 6, 9, 1]


def test_relations_are_the_other_places_of_the_region():
  view = ENV.view(TASK, ENV.reset(TASK), places())
  rows = [np.flatnonzero(row).tolist() for row in view.relations]
  assert rows[:4] == [[1, 2], [0, 2], [0, 1], [4, 5]]
  assert rows[11] == [9, 10]


def legal(probed, known):
  view = ENV.view(TASK, search.World(places(*probed)), places(*known))
  (row,) = view.legal.tolist()
  return [i for i, ok in enumerate(row) if not ok]


def test_what_one_knows_to_be_probed_cannot_be_probed():
  assert legal([], []) == []
  assert legal([0, 3, 6], []) == [6]  # Public: 0 and 3 may be probed again.
  assert legal([0, 3, 6], [3]) == [3, 6]
  # What does not exist yet is not known, whoever has all facts.
  assert legal([0, 3], range(12)) == [0, 3]


def test_the_reference_probes_where_there_may_be_a_find():
  def advice(*probed):
    world = search.World(places(*probed))
    view = ENV.view(TASK, world, places(*probed))
    verb = ENV.reference_verb(view.features, view.legal)
    return np.flatnonzero(verb == PROBE).tolist()

  assert advice() == list(range(12))
  assert advice(0, 3) == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
  assert advice(7) == [3, 4, 5, 6, 8, 9, 10, 11]  # Region 0 is poor.
  assert advice(3, 4, 10) == [9, 11]  # Region 1 is exhausted, 0 and 2 poor.
  assert advice(3, 4, 10, 11) == []


def test_a_probe_lands():
  probed, knows, effective = land(
      [0], (PROBE, 3, True), (PROBE, 4, False), (PROBE, 5, True)
  )
  assert probed == [0, 3, 5]
  assert knows == [[0, 3], [2, 5]]
  assert effective == [True, False, True]


def test_a_second_probe_finds_nothing_new_and_teaches_its_agent():
  assert land([3], (PROBE, 3, True)) == ([3], [[0, 3]], [True])
  # Unless the agent was told meanwhile.
  knows = places(3)[None, :]
  assert land([3], (PROBE, 3, True), knows=knows) == ([3], [[0, 3]], [False])


def test_a_second_probe_of_a_public_place_is_in_vain():
  assert land([], (PROBE, 6, True)) == ([6], [], [True])  # All know it now.
  assert land([6], (PROBE, 6, True)) == ([6], [], [False])


def test_of_probes_at_one_instant_all_teach_and_one_is_first():
  rows = (PROBE, 3, False), (PROBE, 3, True), (PROBE, 3, True)
  assert land([], *rows) == ([3], [[1, 3], [2, 3]], [False, True, True])
  rows = (PROBE, 8, False), (PROBE, 8, True), (PROBE, 8, True)
  assert land([], *rows) == ([8], [], [False, True, False])


def test_other_verbs_do_nothing():
  assert land([], (1, 3, True), (-1, 3, True)) == ([], [], [False, False])


@pytest.mark.parametrize(
    'probed, found',
    [
        ([], 0),
        ([0, 1, 9], 0),
        ([0, 3], 1),
        ([3, 4, 10], 3),
        ([3, 4, 10, 11], 4),
    ],
)
def test_progress_is_the_share_of_finds(probed, found):
  world = search.World(places(*probed))
  assert ENV.progress(TASK, world, jnp.int32(0)) == np.float32(found / 4)
  assert ENV.finished(TASK, world) == (found == 4)


@pytest.mark.parametrize(
    'agents, limit_s, finds',
    [(1, 9, 0), (1, 10, 1), (1, 29, 2), (2, 10, 2), (2, 20, 4), (9, 10, 4)],
)
def test_the_bounds(agents, limit_s, finds):
  turn_ms = jnp.array([10_000], jnp.int32)
  bound = ENV.bounds(TASK, agents, jnp.int32(1000 * limit_s), turn_ms)
  assert bound.progress == np.float32(finds / 4)
  assert (bound.serial_ms, bound.critical_path_ms) == (40_000, 10_000)


def test_the_bound_is_reached_by_luck():
  rows = [(PROBE, place, True) for place in (3, 10)]
  probed, _, _ = land([], *rows)
  assert set(probed) == {3, 10}
  turn_ms = jnp.array([10], jnp.int32)
  bound = ENV.bounds(TASK, 2, jnp.int32(10), turn_ms).progress
  world = search.World(places(*probed))
  assert ENV.progress(TASK, world, jnp.int32(10)) == bound


# The same private places, and the same contents of 0, 6 and 9; no more.
OTHER = search.Task(
    rich=jnp.array([False, True, True, False]),
    find=places(4, 5, 7, 8),
    clue=clues(p0=1, p3=0, p7=3, p11=2),
    private=TASK.private,
)


@pytest.mark.parametrize('probed', [[], [0], [0, 6, 9]])
def test_what_is_hidden_does_not_show(probed):
  knows, world = places(*range(12)), search.World(places(*probed))
  one, other = (ENV.view(task, world, knows) for task in (TASK, OTHER))
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert ENV.describe(TASK) == ENV.describe(OTHER)
  text = lambda task: ENV.describe_view(task, world, knows, one.legal)
  assert text(TASK) == text(OTHER)


def test_what_others_probed_in_private_does_not_show():
  knows = places(0, 9)
  views = [
      ENV.view(TASK, search.World(places(*probed)), knows)
      for probed in ([0, 9], [0, 9, 3, 5, 7, 10])
  ]
  jax.tree.map(np.testing.assert_array_equal, *views)


@pytest.mark.parametrize(
    'knobs',
    [
        {},
        {'num_places': 12, 'region_size': 4, 'num_rich': 3, 'per_region': 1},
        {'num_places': 5, 'region_size': 1, 'num_rich': 4, 'per_region': 1},
        {'num_places': 6, 'region_size': 6, 'num_rich': 1, 'per_region': 6},
    ],
)
def test_finds_are_where_they_belong(knobs):
  env = search.Search(**knobs)
  tasks = worlds.sample(env)
  finds = tasks.find.reshape(64, env.num_regions, env.region_size).sum(axis=2)
  assert (tasks.rich.sum(axis=1) == env.num_rich).all()
  np.testing.assert_array_equal(finds, tasks.rich * env.per_region)


def test_every_place_may_hold_a_find():
  tasks = worlds.sample(ENV, 512)
  share = tasks.find.mean(axis=0)  # A third each, give or take 3 deviations.
  np.testing.assert_allclose(share, 1 / 3, atol=3 * (2 / 9 / 512) ** 0.5)


@pytest.mark.parametrize('share', [0.0, 0.3, 1.0])
def test_clues_are_about_one_other_region(share):
  env = dataclasses.replace(ENV, clue_share=share)
  clue = worlds.sample(env).clue  # [tasks, M, R]
  count = clue.sum(axis=2)
  assert count.max(initial=0) <= 1
  own = np.arange(12) // 3
  assert not clue[:, np.arange(12), own].any()
  assert count.mean() == pytest.approx(share, abs=0.06 * (0 < share < 1))
  if share == 1.0:  # Any other region is as likely.
    assert clue.mean(axis=0)[own == 0, 1:] == pytest.approx(1 / 3, abs=0.2)


def test_one_region_leaves_nothing_for_clues():
  env = search.Search(
      num_places=4, region_size=4, num_rich=1, per_region=1, clue_share=1.0
  )
  assert not worlds.sample(env).clue.any()


@pytest.mark.parametrize('coupling', [0.0, 0.25, 1.0])
def test_coupling_is_the_share_of_private_places(coupling):
  private = worlds.sample(dataclasses.replace(ENV, coupling=coupling)).private
  slack = 0.05 * (0 < coupling < 1)
  assert private.mean() == pytest.approx(coupling, abs=slack)


def test_without_coupling_it_does_not_matter_what_one_was_told():
  task = TASK._replace(private=places())
  world = search.World(places(0, 3, 5, 9))
  views = [ENV.view(task, world, knows) for knows in (places(), ~places())]
  jax.tree.map(np.testing.assert_array_equal, *views)


test_every_knob_changes_something = worlds.each_changes_something(
    ENV,
    num_places=(15, worlds.sampled),
    region_size=(6, worlds.sampled),
    num_rich=(1, worlds.sampled),
    per_region=(1, worlds.sampled),
    clue_share=(1.0, worlds.sampled),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        search.Search,
        ('num_places', 0, '>= 1'),
        ('region_size', 0, 'a divisor of num_places=48'),
        ('region_size', 7, 'a divisor of num_places=48'),
        ('num_rich', 0, 'from 1 to num_places // region_size=8'),
        ('num_rich', 9, 'from 1 to num_places // region_size=8'),
        ('per_region', 0, 'from 1 to region_size=6'),
        ('per_region', 7, 'from 1 to region_size=6'),
        ('clue_share', -0.1, 'from 0 to 1'),
    )
)


def test_the_smallest_knobs_are_allowed():
  env = search.Search(
      num_places=1,
      region_size=1,
      num_rich=1,
      per_region=1,
      clue_share=0.0,
      coupling=0.0,
      probe_tokens=1,
      probe_tool_ms=0,
  )
  task = env.sample_task(jax.random.key(0))
  assert (task.rich.tolist(), task.find.tolist()) == ([True], [True])
  view = env.view(task, env.reset(task), jnp.zeros((1,), bool))
  assert view.features[0, env.feature_names.index('value')] == 1.0


def test_a_task_as_text():
  first, *lines = ENV.describe(TASK).splitlines()
  assert '12 places in 4 regions for 4 finds' in first
  assert '2 of the regions are rich and hold 2 finds each' in first
  assert lines[5:7] == [
      'place 5: in region 1, what it holds is private',
      'place 6: in region 2, what it holds is public',
  ]
  assert len(lines) == 12


def test_a_view_as_text():
  world, knows = search.World(places(0, 3, 6, 7, 9)), places(0, 3, 7)
  view = ENV.view(TASK, world, knows)
  lines = ENV.describe_view(TASK, world, knows, view.legal).splitlines()
  assert lines[0] == (
      'place 0: blank, its clue: region 1 is rich, region 0 is poor'
  )
  assert lines[1] == (
      'place 1: not known, 0% likely a find, region 0 is poor, probe 1'
  )
  assert lines[3] == 'place 3: a find, region 1 is rich'
  assert lines[4] == (
      'place 4: not known, 50% likely a find, region 1 is rich, probe 4'
  )
  assert lines[9] == (
      'place 9: not known, 67% likely a find, region 3 is rich, probe 9'
  )


@pytest.mark.parametrize(
    'knobs',
    [
        {'num_places': 12, 'coupling': 0.5, 'clue_share': 1.0},
        {'num_places': 12, 'region_size': 12, 'num_rich': 1, 'coupling': 0.0},
        {'num_places': 6, 'region_size': 3, 'per_region': 3, 'num_rich': 1},
    ],
)
def test_it_conforms_with_other_knobs(knobs):
  conformance.check_environment(search.Search(**knobs), jax.random.key(1))
