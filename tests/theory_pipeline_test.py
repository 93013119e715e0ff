"""The pipeline reproduces the laws of capacity-limited parallel work.

With a barrier, free tokens and public results its time is known exactly:
mapping takes M / min(N, C) rounds and merging M turns. So the speed-up of N
agents is Amdahl's, and with a capacity it is 1 / sum_i f_i / min(N, C_i), of
work fractions f_i with capacities C_i.
"""

import dataclasses
import functools

from envs import pipeline
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import rollout
from rlcr_jax.policies import scripted
from tests import exact

SHARDS = 64
SHARD_MS = 100_000
TASK_MS = 5000  # Reading the task: 25,000 tokens at 5000 per second.
TEAMS = np.array([1, 2, 4, 8, 16, 32, 64])
GRID_MS = TASK_MS + 100_000 * np.arange(66)

# Amdahl's law: mapping is parallel, merging serial, one after the other.
AMDAHL = pipeline.Pipeline(
    num_shards=SHARDS,
    serial_fraction=0.2,
    barrier=True,
    coupling=0.0,
    shard_tokens=1,
    shard_tool_ms=SHARD_MS,
)
SHARES = [0.1, 0.2, 0.5]
LANES = [8, 16]
STREAM = dataclasses.replace(AMDAHL, barrier=False)


def with_share(share):
  return dataclasses.replace(AMDAHL, serial_fraction=share)


def with_lanes(lanes):
  return dataclasses.replace(AMDAHL, map_capacity=lanes)


def collective(env):
  """A token takes 0.01 ms, which the clock does not resolve: they are free.

  Nobody who waits acts again. Under these rules nobody needs to: whoever ends
  a turn when another becomes possible takes it.
  """
  return exact.make_collective(
      env,
      SHARDS,
      exact.ROUND | {'decode_tokens_per_s': 100_000},
      task_tokens=25_000,
      wait_ms=1_000_000_000,
  )


@functools.cache
def sample(env):
  """One task per team, and one more for a lone agent, all results private."""
  keys = jax.random.split(jax.random.key(3), len(TEAMS) + 1)
  tasks = jax.device_get(jax.vmap(env.sample_task)(keys))
  private = np.zeros_like(tasks.private)
  private[-1] = True
  return tasks._replace(private=private)


@functools.cache
def play(env):
  """Those tasks, played by agents that see each other's turns and are mute."""
  joint = collective(env)
  rules = exact.make_rules(
      (*TEAMS, 1), [20_000_000], direct=False, board=False, awareness=True
  )
  keys = jax.random.split(jax.random.key(0), len(TEAMS) + 1)

  @jax.jit
  def run(tasks, rules, keys):
    return rollout.play(
        joint,
        scripted.ListScheduler(joint),
        (),
        tasks,
        rules,
        keys,
        chunk_size=64,
        grid_ms=jnp.asarray(GRID_MS, jnp.int32),
    )[0]

  return jax.device_get(run(sample(env), rules, keys))


def times_ms(env):
  """[teams]: from having read the task to the last merge."""
  return play(env).time_ms[:-1] - TASK_MS


def bounds(env, agents, limits_ms):
  """The bounds [tasks, limits] of all tasks for some limits."""
  turn_ms = collective(env).shortest_turn_ms()
  return exact.bounds(env, sample(env), agents, limits_ms, turn_ms)


@pytest.mark.parametrize('share', SHARES)
def test_the_speed_up_is_amdahls(share):
  times = times_ms(with_share(share))
  assert times[0] == SHARDS * SHARD_MS
  # Exactly: times are whole seconds, and no team has a broken last round.
  speed_up = 1 / (share + (1 - share) / TEAMS)
  np.testing.assert_allclose(times[0] / times, speed_up, rtol=1e-12)


@pytest.mark.parametrize('lanes', LANES)
def test_the_speed_up_of_work_with_capacities(lanes):
  times = times_ms(with_lanes(lanes))
  merging, mapping = 0.2, 0.8
  parts = merging / np.minimum(TEAMS, 1) + mapping / np.minimum(TEAMS, lanes)
  np.testing.assert_allclose(times[0] / times, 1 / parts, rtol=1e-12)
  assert (times[TEAMS >= lanes] == times[-1]).all()  # More are of no use.


def test_without_a_barrier_merging_overlaps_with_mapping():
  amdahl, stream = times_ms(AMDAHL), times_ms(STREAM)
  assert stream[0] == amdahl[0]  # One agent has nothing to overlap.
  assert (stream <= amdahl).all()
  # With an agent per shard nothing is left but one map and all the merges.
  assert stream[-1] == 80_000 + SHARDS * 20_000


def test_one_agent_knows_all_results_that_it_needs():
  for env in (AMDAHL, STREAM):
    played = play(env)
    assert played.time_ms[-1] == played.time_ms[0]
    assert played.turns[-1, pipeline.FETCH] == 0


@pytest.mark.parametrize('env', [AMDAHL, STREAM, with_lanes(8)])
def test_everything_is_done_once(env):
  played = play(env)
  np.testing.assert_array_equal(played.progress, 1.0)
  for count in (played.turns, played.effective):
    assert (count[:, :3] == [[SHARDS, SHARDS, 0]]).all()


@pytest.mark.parametrize('env', [AMDAHL, STREAM, with_lanes(8)])
def test_progress_never_exceeds_its_bound(env):
  curve = play(env).curve
  for i, agents in enumerate(TEAMS):
    bound = bounds(env, agents, GRID_MS - TASK_MS)
    assert (curve[i] <= bound.progress[i] + 1e-6).all()


@pytest.mark.parametrize('env', [AMDAHL, with_lanes(8), with_share(0.5)])
def test_with_a_barrier_the_bounds_are_reached(env):
  for i, (agents, ms) in enumerate(zip(TEAMS, times_ms(env), strict=True)):
    reached = bounds(env, agents, [ms - 1, ms])
    sooner, in_time = reached.progress[i]
    assert sooner < 0.999 and in_time == pytest.approx(1.0, abs=1e-6)
  assert times_ms(env)[0] == reached.serial_ms[0, 0]
  assert times_ms(env)[-1] == reached.critical_path_ms[0, 0]


def test_without_a_barrier_the_fewest_and_the_most_agents_reach_the_bounds():
  times = times_ms(STREAM)
  bound = bounds(STREAM, 1, [0])
  assert times[0] == bound.serial_ms[0, 0]
  assert times[-1] == bound.critical_path_ms[-1, 0]
