"""Tests of the pipeline, on a job small enough for a hand.

shard      0   1   2   3
records    2   1   3   1      7 records
result     private, but that of 2 is public
merging    0   0, 1   1, 2   2, 3   takes these results
"""

import dataclasses
import itertools

from envs import base
from envs import conformance
from envs import pipeline
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import worlds

MAP, MERGE, FETCH = pipeline.MAP, pipeline.MERGE, pipeline.FETCH
ENV = pipeline.Pipeline(num_shards=4)
LANES = dataclasses.replace(ENV, map_capacity=2)
BARRIER = dataclasses.replace(ENV, barrier=True)
TASK = pipeline.Task(
    records=jnp.array([2, 1, 3, 1], jnp.int32),
    private=jnp.array([True, True, False, True]),
)
ALL = (0, 1, 2, 3)


def shards(which):
  """[M] bool: these."""
  return jnp.zeros((4,), bool).at[jnp.array(which, int)].set(True)


def world(mapped=(), merged=0):
  return pipeline.World(shards(mapped), jnp.int32(merged))


def legal(mapped, merged=0, known=(), env=ENV, task=TASK):
  """Shards that may be mapped, merged and fetched."""
  view = env.view(task, world(mapped, merged), shards(known))
  return tuple(np.flatnonzero(row).tolist() for row in view.legal)


def columns(mapped, merged=0, known=(), env=ENV):
  """The features of a view, by name."""
  view = env.view(TASK, world(mapped, merged), shards(known))
  return dict(zip(env.feature_names, view.features.T.tolist(), strict=True))


def land(before, *rows, knows=(), task=TASK):
  """Lands turns given as (verb, shard, lands); `knows` as (agent, shard)."""
  verb, target, lands = map(jnp.array, zip(*rows, strict=True))
  turns = base.Turns(verb, target, 0 * verb, lands, jnp.int32(9))
  has = np.zeros((len(rows), 4), bool)
  for agent, shard in knows:
    has[agent, shard] = True
  after, has, outcome = ENV.land(task, before, turns, jnp.array(has), None)
  return after, np.argwhere(has).tolist(), outcome.effective.tolist()


def test_every_shard_is_mapped_once_and_in_any_order():
  assert legal([])[MAP] == [0, 1, 2, 3]
  assert legal([1, 3])[MAP] == [0, 2]
  assert legal(ALL)[MAP] == []


def test_a_capacity_makes_each_wait_for_the_one_before_it_in_its_lane():
  assert legal([], env=LANES)[MAP] == [0, 1]
  assert legal([0], env=LANES)[MAP] == [1, 2]
  assert legal([1], env=LANES)[MAP] == [0, 3]
  assert legal([0, 2], env=LANES)[MAP] == [1]  # 3 waits for 1, not for 2.
  one = dataclasses.replace(ENV, map_capacity=1)
  assert legal([0, 1], env=one)[MAP] == [2]
  many = dataclasses.replace(ENV, map_capacity=9)
  assert legal([], env=many)[MAP] == [0, 1, 2, 3]


def test_merging_follows_the_order_of_the_shards():
  assert legal([], known=ALL)[MERGE] == []
  assert legal([1, 2], known=ALL)[MERGE] == []  # 0 is not mapped.
  assert legal([0, 1, 2], known=ALL)[MERGE] == [0]
  assert legal([0, 1, 2], 1, known=ALL)[MERGE] == [1]
  assert legal([0, 1, 2], 3, known=ALL)[MERGE] == []  # 3 is not mapped.
  assert legal(ALL, 4, known=ALL)[MERGE] == []


def test_merging_takes_the_result_and_the_one_before_it():
  assert legal(ALL, 0)[MERGE] == []
  assert legal(ALL, 0, known=[0])[MERGE] == [0]
  assert legal(ALL, 1, known=[1, 3])[MERGE] == []
  assert legal(ALL, 1, known=[0, 3])[MERGE] == []
  assert legal(ALL, 1, known=[0, 1])[MERGE] == [1]
  # The result of 2 is public: everybody has it.
  assert legal(ALL, 2, known=[])[MERGE] == []
  assert legal(ALL, 2, known=[1])[MERGE] == [2]
  assert legal(ALL, 3, known=[])[MERGE] == []
  assert legal(ALL, 3, known=[3])[MERGE] == [3]


def test_with_a_barrier_nothing_is_merged_before_all_are_mapped():
  assert legal([0, 1, 2], known=ALL, env=BARRIER)[MERGE] == []
  assert legal(ALL, known=ALL, env=BARRIER)[MERGE] == [0]
  assert legal(ALL, 2, known=ALL, env=BARRIER)[MERGE] == [2]


def test_private_results_that_exist_and_are_not_known_can_be_fetched():
  assert legal([])[FETCH] == []
  assert legal([0, 2, 3])[FETCH] == [0, 3]
  assert legal([0, 2, 3], known=[0])[FETCH] == [3]
  assert legal(ALL, 4)[FETCH] == [0, 1, 3]


def test_coupling_zero_and_one_need_no_result_and_every_result():
  none = TASK._replace(private=shards(()))
  every = TASK._replace(private=shards(ALL))
  assert legal([0, 1], 1, task=none) == ([2, 3], [1], [])
  assert legal([0, 1], 1, task=every) == ([2, 3], [], [0, 1])
  assert legal(ALL, 3, task=every, known=[3])[MERGE] == []
  assert legal(ALL, 3, task=every, known=[2, 3])[MERGE] == [3]


def test_features_of_a_hand_worked_view():
  column = columns([0, 1, 3], 1, known=[0])
  assert column['open'] == [0, 1, 1, 0]  # Merge 1, map 2.
  assert column['priority'] == [1.0, 0.875, 0.25, 0.625]
  np.testing.assert_allclose(column['value'], [0, 4 / 7, 12 / 7, 4 / 7])
  # Until 2 is complete: merge 1, map and merge 2. Then merge 3.
  assert column['turns_left'] == [0, 1, 3, 4]
  assert column['missing'] == [0, 1, 0, 1]  # 2 is to be mapped, first.
  assert column['blocks_me'] == [0, 1, 0, 0]
  assert column['wanted'] == [1, 2, 0, 1]
  assert column['mapped'] == [1, 1, 0, 1]
  assert column['merged'] == [1, 0, 0, 0]
  assert column['next'] == [0, 1, 0, 0]
  np.testing.assert_allclose(column['records'], [2 / 3, 1 / 3, 1, 1 / 3])
  assert column['known'] == [1, 0, 0, 0]


def test_features_of_an_untouched_and_of_a_finished_job():
  column = columns([])
  assert column['open'] == [1, 1, 1, 1]
  assert column['turns_left'] == [2, 4, 6, 8]
  assert column['missing'] == column['blocks_me'] == [0, 0, 0, 0]
  assert column['wanted'] == [2, 2, 0, 1]
  assert column['next'] == [1, 0, 0, 0]
  column = columns(ALL, 4)
  for name in ('open', 'value', 'turns_left', 'missing', 'wanted', 'next'):
    assert column[name] == [0, 0, 0, 0]


def test_with_a_barrier_all_maps_come_first():
  assert columns([2], env=BARRIER)['turns_left'] == [4, 5, 6, 7]
  assert columns(ALL, 1, env=BARRIER)['turns_left'] == [0, 1, 2, 3]
  assert columns([0, 1, 2], known=ALL, env=BARRIER)['open'] == [0, 0, 0, 1]


def test_both_results_that_a_merge_lacks_block_it():
  every = TASK._replace(private=shards(ALL))
  view = ENV.view(every, world(ALL, 2), shards([0]))
  column = dict(zip(ENV.feature_names, view.features.T.tolist(), strict=True))
  assert column['missing'] == [0, 0, 2, 2]
  assert column['blocks_me'] == [0, 1, 1, 0]
  assert column['wanted'] == [0, 1, 2, 1]


def test_relations_name_the_results_that_a_merge_takes():
  view = ENV.view(TASK, world(), shards(()))
  assert np.argwhere(view.relations).tolist() == [
      [0, 0],
      [1, 0],
      [1, 1],
      [2, 1],
      [2, 2],
      [3, 2],
      [3, 3],
  ]


def test_merging_goes_before_mapping_and_early_shards_before_late_ones():
  priority = columns([0, 1, 3], 1, known=ALL)['priority']
  assert np.argsort(-np.array(priority[1:])).tolist() == [0, 2, 1]


def test_the_reference_acts_and_does_not_fetch():
  view = ENV.view(TASK, world([0, 1, 3], 1), shards([0, 1]))
  verb = ENV.reference_verb(view.features, view.legal)
  assert verb.tolist() == [-1, MERGE, MAP, -1]


def test_mapping_teaches_whoever_mapped():
  after, knows, effective = land(world(), (MAP, 1, True), (MAP, 0, False))
  assert (after.mapped.tolist(), after.merged) == ([0, 1, 0, 0], 0)
  assert knows == [[0, 1]]
  assert effective == [True, False]


def test_a_public_result_is_nothing_to_learn():
  after, knows, effective = land(world(), (MAP, 2, True))
  assert after.mapped.tolist() == [0, 0, 1, 0]
  assert knows == []
  assert effective == [True]


def test_of_two_who_map_a_shard_at_once_the_second_only_learns():
  rows = (MAP, 1, False), (MAP, 1, True), (MAP, 1, True)
  after, knows, effective = land(world(), *rows)
  assert after.mapped.tolist() == [0, 1, 0, 0]
  assert knows == [[1, 1], [2, 1]]
  assert effective == [False, True, True]
  # She was told meanwhile, or it is public: her work was for nothing.
  told = land(world(), *rows, knows=[(2, 1)])
  assert told[2] == [False, True, False]
  public = land(world(), (MAP, 2, True), (MAP, 2, True))
  assert public[1:] == ([], [True, False])


def test_who_maps_what_was_mapped_meanwhile_only_learns():
  after, knows, effective = land(world([1, 2], 1), (MAP, 1, True))
  assert (after.mapped.tolist(), after.merged) == ([0, 1, 1, 0], 1)
  assert (knows, effective) == ([[0, 1]], [True])
  after, knows, effective = land(world([1, 2], 1), (MAP, 2, True))
  assert after.mapped.tolist() == [0, 1, 1, 0]
  assert (knows, effective) == ([], [False])


def test_a_merge_lands():
  after, knows, effective = land(world([0, 1]), (MERGE, 0, True))
  assert (after.mapped.tolist(), after.merged) == ([1, 1, 0, 0], 1)
  assert (knows, effective) == ([], [True])


def test_of_two_who_merge_a_shard_at_once_one_counts():
  rows = (MERGE, 1, False), (MERGE, 1, True), (MERGE, 1, True)
  after, knows, effective = land(world([0, 1], 1), *rows)
  assert after.merged == 2
  assert (knows, effective) == ([], [False, True, False])


def test_a_merge_of_what_was_merged_meanwhile_is_lost():
  after, _, effective = land(world([0, 1, 2], 2), (MERGE, 1, True))
  assert after.merged == 2
  assert effective == [False]


def test_maps_merges_and_fetches_land_together():
  rows = (MERGE, 0, True), (MAP, 3, True), (FETCH, 1, True), (MAP, 2, True)
  after, knows, effective = land(world([0, 1]), *rows)
  assert (after.mapped.tolist(), after.merged) == ([1, 1, 1, 1], 1)
  assert knows == [[1, 3], [2, 1]]
  assert effective == [True] * 4


def test_fetching_teaches_and_changes_nothing():
  rows = (FETCH, 1, True), (FETCH, 0, False), (FETCH, 1, True)
  after, knows, effective = land(world([0, 1]), *rows, knows=[(0, 0), (2, 1)])
  assert (after.mapped.tolist(), after.merged) == ([1, 1, 0, 0], 0)
  assert knows == [[0, 0], [0, 1], [2, 1]]
  assert effective == [True, False, False]  # Agent 2 was told meanwhile.


def test_who_knows_of_what_does_not_exist_yet_sees_nothing_more():
  mapped, merged, existing = [0, 1], 1, [0, 1]
  view = lambda known: ENV.view(TASK, world(mapped, merged), shards(known))
  jax.tree.map(np.testing.assert_array_equal, view(existing), view(ALL))
  text = lambda known: ENV.describe_view(
      TASK, world(mapped, merged), shards(known), view(known).legal
  )
  assert text(existing) == text(ALL)
  # A result is not public before it exists, either.
  assert columns([], known=ALL)['known'] == [0, 0, 0, 0]
  assert columns([2])['known'] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    'merged, records', [(0, 0), (1, 2), (2, 3), (3, 6), (4, 7)]
)
def test_progress_is_the_share_of_records_in_the_log(merged, records):
  for mapped in (ALL[:merged], ALL):  # What is only mapped does not count.
    now = world(mapped, merged)
    progress = ENV.progress(TASK, now, jnp.int32(0))
    assert progress == np.float32(records / 7)
    assert ENV.finished(TASK, now) == (merged == 4)


def test_a_fresh_world_is_untouched():
  fresh = ENV.reset(TASK)
  assert (fresh.mapped.tolist(), fresh.merged) == ([False] * 4, 0)


@pytest.mark.parametrize(
    'knobs, agents, ends_s',
    [
        # Mapping takes 10 s, merging 5 s.
        ({}, 1, [15, 30, 45, 60]),
        # Two maps end after 10 s; before the last merge come 4 maps and 3
        # merges, 27.5 s for two.
        ({}, 2, [15, 20, 25, 32.5]),
        ({}, 4, [15, 20, 25, 30]),
        ({}, 9, [15, 20, 25, 30]),
        ({'map_capacity': 1}, 4, [15, 25, 35, 45]),
        ({'map_capacity': 1}, 1, [15, 30, 45, 60]),
        ({'map_capacity': 2}, 4, [15, 20, 25, 30]),
        ({'barrier': True}, 1, [45, 50, 55, 60]),
        ({'barrier': True}, 2, [25, 30, 35, 40]),
        ({'barrier': True}, 3, [25, 30, 35, 40]),
        ({'barrier': True}, 4, [15, 20, 25, 30]),
        ({'barrier': True, 'map_capacity': 1}, 4, [45, 50, 55, 60]),
    ],
)
def test_the_bound_on_progress(knobs, agents, ends_s):
  env = dataclasses.replace(ENV, **knobs)
  turn_ms = jnp.array([10_000, 5000, 1], jnp.int32)
  records = [0, 2, 3, 6, 7]
  for i, end_s in enumerate(ends_s):
    for late_ms in (-1, 0):
      limit_ms = jnp.int32(1000 * end_s + late_ms)
      bound = env.bounds(TASK, agents, limit_ms, turn_ms)
      assert bound.progress == np.float32(records[i + 1 + late_ms] / 7)


@pytest.mark.parametrize(
    'knobs, path_s',
    [
        ({}, 30),
        ({'map_capacity': 1}, 45),
        ({'barrier': True}, 30),
        ({'barrier': True, 'map_capacity': 2}, 40),
        ({'barrier': True, 'map_capacity': 1}, 60),
    ],
)
def test_serial_and_critical_path_times(knobs, path_s):
  env = dataclasses.replace(ENV, **knobs)
  turn_ms = jnp.array([10_000, 5000, 1], jnp.int32)
  bound = env.bounds(TASK, 3, jnp.int32(0), turn_ms)
  assert (bound.serial_ms, bound.critical_path_ms) == (60_000, 1000 * path_s)


def fastest(env, agents, costs):
  """Earliest end of each merge of any schedule, by breadth-first search."""
  starts = [
      (frozenset(), 0, ())
  ]  # Mapped, merged, jobs as (shard, verb, left).
  ends, now, states = {}, 0, set(starts)
  while env.num_shards not in ends:
    grown = set()
    for mapped, merged, jobs in states:  # Everybody begins anything, or waits.
      busy = {(verb, shard) for shard, verb, _ in jobs}
      lane_free = lambda i, m=mapped: i < env.lanes or i - env.lanes in m
      can = [(MAP, i) for i in ALL if i not in mapped and lane_free(i)]
      if merged in mapped and (len(mapped) == 4 or not env.barrier):
        can.append((MERGE, merged))
      can = [job for job in can if job not in busy]
      for size in range(min(agents - len(jobs), len(can)) + 1):
        for new in itertools.combinations(can, size):
          begun = [(shard, verb, costs[verb]) for verb, shard in new]
          grown.add((mapped, merged, tuple(sorted((*jobs, *begun)))))
    now, states = now + 1, set()
    for mapped, merged, jobs in grown:
      done = [(shard, verb) for shard, verb, left in jobs if left == 1]
      mapped |= {shard for shard, verb in done if verb == MAP}
      merged += sum(verb == MERGE for _, verb in done)
      jobs = tuple((s, v, left - 1) for s, v, left in jobs if left > 1)
      states.add((mapped, merged, jobs))
      ends.setdefault(merged, now)
  return [ends[k] for k in range(1, env.num_shards + 1)]


@pytest.mark.parametrize('capacity', [0, 2])
@pytest.mark.parametrize('barrier', [False, True])
@pytest.mark.parametrize('agents', [1, 2, 3, 5])
@pytest.mark.parametrize('costs', [(2, 1), (1, 2), (3, 1)])
def test_the_fastest_schedules_reach_the_bounds_and_none_is_faster(
    capacity, barrier, agents, costs
):
  env = dataclasses.replace(ENV, map_capacity=capacity, barrier=barrier)
  ends = env._ends_ms(agents, *map(jnp.int32, costs)).tolist()
  assert ends == fastest(env, agents, costs)


@pytest.mark.parametrize('coupling', [0.0, 0.25, 1.0])
def test_coupling_is_the_share_of_private_results(coupling):
  share = worlds.sample(pipeline.Pipeline(coupling=coupling)).private.mean()
  assert share == (pytest.approx(0.25, abs=0.05) if coupling % 1 else coupling)


def test_records_take_all_values_of_their_range():
  records = worlds.sample(pipeline.Pipeline(max_records=4)).records
  assert np.unique(records).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    'share, mapping, merging',
    [
        (0.2, (2000.0, 12_000), (500.0, 3000)),
        (0.0, (2500.0, 15_000), (1.0, 0)),
        (1.0, (1.0, 0), (2500.0, 15_000)),
    ],
)
def test_the_cost_of_a_shard_is_divided(share, mapping, merging):
  verbs = pipeline.Pipeline(serial_fraction=share).verbs
  costs = [(verb.output_tokens, verb.tool_ms) for verb in verbs[:2]]
  assert costs == [mapping, merging]
  assert [verb.learns for verb in verbs] == [False, False, True]


def _can_be_mapped(env):
  return legal([], env=env)[MAP]


def _can_be_merged(env):
  return legal([0], known=[0], env=env)[MERGE]


test_every_knob_changes_something = worlds.each_changes_something(
    ENV,
    num_shards=(5, worlds.sampled),
    serial_fraction=(0.5, worlds.shortest),
    map_capacity=(1, _can_be_mapped),
    barrier=(True, _can_be_merged),
    max_records=(9, worlds.sampled),
)
test_a_bad_knob_is_an_error_that_says_what_is_allowed = (
    worlds.bad_ones_are_refused(
        pipeline.Pipeline,
        ('num_shards', 0, '>= 1'),
        ('max_records', 0, '>= 1'),
        ('serial_fraction', -0.1, 'from 0 to 1'),
        ('serial_fraction', 1.1, 'from 0 to 1'),
        ('map_capacity', -1, '>= 0'),
    )
)


def test_a_task_as_text():
  head, *lines = ENV.describe(TASK).splitlines()
  assert head.startswith('A pipeline of 4 shards, 7 records.')
  assert lines == [
      'shard 0: 2 records, its result is private',
      'shard 1: 1 records, its result is private',
      'shard 2: 3 records, its result is public',
      'shard 3: 1 records, its result is private',
  ]
  assert 'Only' not in head and 'before all' not in head
  assert 'Only 2 can be mapped at once' in LANES.describe(TASK)
  assert 'Nothing is merged before all' in BARRIER.describe(TASK)


def test_a_view_as_text():
  now, knows = world([0, 1, 2], 1), shards([1])
  view = ENV.view(TASK, now, knows)
  assert ENV.describe_view(TASK, now, knows, view.legal).splitlines() == [
      'shard 0: merged, fetch 0',
      'shard 1: mapped, next in the log, result known',
      'shard 2: mapped, result known',
      'shard 3: not mapped, map 3',
  ]
  knows = shards([0, 1])
  view = ENV.view(TASK, now, knows)
  text = ENV.describe_view(TASK, now, knows, view.legal)
  assert text.splitlines()[:2] == [
      'shard 0: merged, result known',
      'shard 1: mapped, next in the log, result known, merge 1',
  ]


@pytest.mark.parametrize(
    'knobs',
    [
        {'num_shards': 4, 'coupling': 0.0},
        {'num_shards': 5, 'coupling': 0.5, 'map_capacity': 2, 'barrier': True},
        {'num_shards': 1, 'serial_fraction': 1.0},
    ],
)
def test_it_conforms_with_other_knobs(knobs):
  conformance.check_environment(pipeline.Pipeline(**knobs))
