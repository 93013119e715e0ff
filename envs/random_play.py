"""A small player that drives an environment directly, for `conformance`.

It gives every verb a fixed duration (now and then half as much again, so that
turns both tie and overlap), lets a few agents draw legal turns, lands them, and
keeps every landing. Policies, channels and latencies are not needed.
"""

import functools
from typing import NamedTuple

import chex
from envs import base
import jax
import jax.numpy as jnp
import numpy as np

_MOST_LANDINGS = 150  # Of one play, if it does not finish before.
_WAIT_SHARE = 0.1  # Of turns in which an agent acts on nothing.
_WAIT_MS = 1000


class Instant(NamedTuple):
  """A world at one instant, and all that can be seen of it."""

  world: base.World
  knows: chex.Array  # [N, M] bool.
  now_ms: chex.Array  # [] int32.
  views: base.TargetView  # [N, ...] each.
  progress: chex.Array  # [] float32.
  finished: chex.Array  # [] bool.
  bounds: base.Bounds  # For N agents and a limit of `now_ms`.


class Landing(NamedTuple):
  """One landing of a play."""

  task: base.Task
  before: Instant
  turns: base.Turns
  key: jax.Array
  after: Instant
  effective: chex.Array  # [N] bool.


def turn_ms(env: base.Environment) -> np.ndarray:
  """[V] int32: the shortest duration of each verb."""
  return _WAIT_MS * (2 + np.arange(len(env.verbs), dtype=np.int32))


def play(
    env: base.Environment, key: jax.Array, agents: int, crowd: bool
) -> list[Landing]:
  """Plays one task until it is finished or there were many landings.

  Args:
    env: the environment.
    key: of the task, of its chances and of the player.
    agents: N.
    crowd: all take the first legal turn, at once; else each draws its own.

  Returns:
    All landings, in order.
  """
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  task_key, land_key = jax.random.split(key)
  task = env.sample_task(task_key)
  nothing = jnp.zeros((agents, env.num_targets), bool)
  now = _look(env, task, env.reset(task), nothing, jnp.int32(0))
  verb, target, start, end = np.zeros((4, agents), np.int32)
  landings = []
  while len(landings) < _MOST_LANDINGS and not now.finished:
    legal = np.asarray(now.views.legal)
    for i in np.flatnonzero(end == now.now_ms):
      verb[i], target[i], took = _choose(env, legal[i], rng, crowd)
      start[i], end[i] = now.now_ms, now.now_ms + took
    turns = base.Turns(
        *map(jnp.array, (verb, target, start, end == end.min())),
        now_ms=jnp.int32(end.min()),
    )
    chance = jax.random.fold_in(land_key, turns.now_ms)
    after, effective = _step(env, task, now, turns, chance)
    landings.append(Landing(task, now, turns, chance, after, effective))
    now = after
  return landings


def _choose(env, legal, rng, crowd: bool) -> tuple[int, int, int]:
  """A turn from `legal` [V, M]: verb (V waits), target and duration."""
  options = np.argwhere(legal)
  if len(options) == 0 or (not crowd and rng.random() < _WAIT_SHARE):
    return len(env.verbs), 0, _WAIT_MS
  verb, target = options[0] if crowd else rng.choice(options)
  halves = 2 if crowd else rng.choice((2, 2, 3))
  return verb, target, turn_ms(env)[verb] * halves // 2


@functools.partial(jax.jit, static_argnums=0)
def _step(env, task, now: Instant, turns, key) -> tuple[Instant, chex.Array]:
  world, knows, outcome = env.land(task, now.world, turns, now.knows, key)
  after = _look(env, task, world, knows, turns.now_ms)
  return after, outcome.effective


def _look(env, task, world, knows, now_ms) -> Instant:
  shortest = jnp.asarray(turn_ms(env))
  return Instant(
      world=world,
      knows=knows,
      now_ms=now_ms,
      views=jax.vmap(env.view, (None, None, 0))(task, world, knows),
      progress=env.progress(task, world, now_ms),
      finished=env.finished(task, world),
      bounds=env.bounds(task, len(knows), now_ms, shortest),
  )
