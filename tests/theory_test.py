"""The simulator reproduces what is known of parallel work.

Agents that see each other's turns, pay nothing for coordination and need no
facts are a greedy list schedule of the task graph. Its makespan is known
exactly, and lies between max(T1 / N, Tinf) and Tinf + (T1 - Tinf) / N.
"""

import dataclasses

from envs import software
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax.policies import scripted
from tests import exact

UNIT_MS = 30_000  # Of work: 100 tokens at 100 per second, then 29 s of tool.
TASK_MS = 5000  # Reading the task: 25,000 tokens at 5000 per second.
TEAMS = (1, 2, 3, 4, 6, 12)
GRID_MS = TASK_MS + UNIT_MS * np.arange(40)

# Perfectly parallel: neither facts, nor conflicts, nor dependencies.
PARALLEL = software.Software(
    num_modules=12,
    width=12,
    coupling=0.0,
    conflicts=False,
    max_tests=1,
    work_tokens=100,
    work_tool_ms=29_000,
)
LAYERED = dataclasses.replace(PARALLEL, width=5, density=0.5)
COLLECTIVE = exact.make_collective(
    LAYERED,  # `width` shapes tasks, and not what happens on them.
    max(TEAMS),
    exact.ROUND,
    task_tokens=25_000,
    wait_tokens=100,
    wait_ms=9000,  # Waits of 10 s: some end whenever a unit does.
)


def heaviest_paths(effort, edges):
  """Heaviest path from each node, in units."""

  def heaviest(i):
    return effort[i] + max(map(heaviest, np.flatnonzero(edges[i])), default=0)

  return np.array([heaviest(i) for i in range(len(effort))], np.int32)


def make_task(effort, needs=()):
  """A task from efforts [12] and pairs (module, what it needs)."""
  effort = np.array(effort, np.int32)
  depends = np.zeros((12, 12), bool)
  for module, needed in needs:
    depends[module, needed] = True
  return software.Task(
      depends=depends,
      coupled=depends & False,
      effort=effort,
      tests=effort,
      below=heaviest_paths(effort, depends.T),
      above=heaviest_paths(effort, depends),
  )


# Tasks, and by number of agents the units of time until all is finished.
HAND = {
    # 3 agents: 0 5 2, 0 5 2, 0 5 3, 3 6 7, 6 7 1, 4 8 9 and 10 11.
    # 6 agents: 0 5 2 3 6 7, the same, 0 5 1 4 8 9 and 10 11.
    'free': (
        make_task([3, 1, 2, 2, 1, 3, 2, 2, 1, 1, 1, 1]),
        {1: 20, 2: 10, 3: 7, 4: 5, 6: 4, 12: 3},
    ),
    'even': (make_task([1] * 12), {1: 12, 2: 6, 3: 4, 4: 3, 6: 2, 12: 1}),
    'chain': (
        make_task([1] * 12, [(i + 1, i) for i in range(11)]),
        {1: 12, 2: 12, 3: 12, 4: 12, 6: 12, 12: 12},
    ),
    # A serial half: a chain of 3 before and one of 3 behind 6 equal modules.
    'fork': (
        make_task(
            [1] * 12,
            [(1, 0), (2, 1), (10, 9), (11, 10)]
            + [(i, 2) for i in range(3, 9)]
            + [(9, i) for i in range(3, 9)],
        ),
        {1: 12, 2: 9, 3: 8, 4: 8, 6: 7, 12: 7},
    ),
    # Two chains, 0 - 1 - 2 and 3 - 4, and seven modules that need nothing.
    # 2 agents: 0 7, 0 7, 1 7, 2 3, 2 6, 6 4, 5 8, 9 10 and 11.
    # 3 agents: 0 7 3, 0 7 6, 1 7 6, 2 4 5, 2 8 9 and 10 11.
    # 4 agents: 0 7 3 6, 0 7 6 4, 1 7 5 8, 2 9 10 11 and 2.
    'chains': (
        make_task(
            [2, 1, 2, 1, 1, 1, 2, 3, 1, 1, 1, 1], [(1, 0), (2, 1), (4, 3)]
        ),
        {1: 17, 2: 9, 3: 6, 4: 5, 6: 5, 12: 5},
    ),
}


def schedule(task, agents):
  """Units of time of a list schedule: heaviest path first, then by index."""
  left = np.array(task.effort)
  time = 0
  while left.any():
    waits = (task.depends & (left > 0)).any(axis=1)
    order = np.argsort(-task.below, kind='stable')
    for i in [i for i in order if left[i] and not waits[i]][:agents]:
      left[i] -= 1
    time += 1
  return time


@pytest.fixture(scope='module')
def tasks():
  """Random tasks, those of `HAND` behind them, as one batch."""
  sample = lambda env, n: jax.vmap(env.sample_task)(
      jax.random.split(jax.random.key(n), n)
  )
  hand = [task for task, _ in HAND.values()]
  hand = jax.tree.map(lambda *x: np.stack(x), *hand)
  parts = sample(LAYERED, 32), sample(PARALLEL, 8), hand
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@pytest.fixture(scope='module')
def played(tasks):
  """All tasks played by every team: leaves [task, team, ...]."""
  played = exact.play(
      COLLECTIVE,
      scripted.ListScheduler(COLLECTIVE),
      tasks,
      exact.make_rules(TEAMS, awareness=True),
      grid_ms=GRID_MS,
  )
  swap = lambda x: x.swapaxes(0, 1) if x.ndim else x
  return jax.tree.map(swap, played)


def units(played, name=None):
  """Makespans [task, team] in units, once the task is read; or those of one."""
  time, rest = np.divmod(played.time_ms - TASK_MS, UNIT_MS)
  np.testing.assert_array_equal(rest, 0)
  return time if name is None else time[list(HAND).index(name) - len(HAND)]


@pytest.mark.parametrize('name', HAND)
def test_makespans_worked_by_hand(played, name):
  expected = HAND[name][1]
  assert dict(zip(TEAMS, units(played, name), strict=True)) == expected


def test_makespans_are_those_of_a_greedy_list_schedule(tasks, played):
  rows = [
      [schedule(jax.tree.map(lambda x, i=i: x[i], tasks), n) for n in TEAMS]
      for i in range(len(tasks.effort))
  ]
  np.testing.assert_array_equal(units(played), rows)


def test_makespans_lie_within_the_bounds_of_greedy_schedules(tasks, played):
  work = tasks.effort.sum(axis=1)[:, None]  # T1.
  path = tasks.below.max(axis=1)[:, None]  # Tinf.
  teams, time = np.array(TEAMS), units(played)
  least = np.maximum(work / teams, path)
  assert (least <= time).all()
  assert (time <= path + (work - path) / teams).all()
  assert (time == least).any(axis=0).all()  # It can be reached.


def test_even_work_is_sped_up_by_the_number_of_agents(played):
  time = dict(zip(TEAMS, units(played, 'even'), strict=True))
  assert [time[1] / time[n] for n in TEAMS] == list(TEAMS)


def test_a_serial_share_limits_the_speed_up_as_amdahl_says(played):
  time = dict(zip(TEAMS, units(played, 'fork'), strict=True))
  for agents in (1, 2, 3, 6):  # They divide the parallel share evenly.
    speed_up = 1 / (0.5 + 0.5 / agents)
    assert time[1] / time[agents] == pytest.approx(speed_up)


def test_everything_is_finished_and_nothing_is_done_twice(tasks, played):
  np.testing.assert_array_equal(played.progress, 1.0)
  assert (played.team_size == TEAMS).all()
  for count in (played.turns, played.effective):
    work = count[..., software.WORK]
    assert (work == tasks.effort.sum(axis=1)[:, None]).all()
  idle = {software.WORK, COLLECTIVE.verb('wait')}
  others = set(range(len(COLLECTIVE.verbs))) - idle
  assert not played.turns[..., list(others)].any()


def test_one_agent_takes_the_serial_time_of_the_bounds(tasks, played):
  turn_ms = jnp.array(COLLECTIVE.shortest_turn_ms(), jnp.int32)
  bounds = lambda task: LAYERED.bounds(task, 1, jnp.int32(0), turn_ms)
  np.testing.assert_array_equal(
      played.time_ms[:, 0] - TASK_MS, jax.vmap(bounds)(tasks).serial_ms
  )


def test_progress_never_exceeds_its_bound(tasks, played):
  turn_ms = COLLECTIVE.shortest_turn_ms()
  for i, agents in enumerate(TEAMS):
    bounds = exact.bounds(LAYERED, tasks, agents, GRID_MS - TASK_MS, turn_ms)
    assert (played.curve[:, i] <= bounds.progress + 1e-6).all()
