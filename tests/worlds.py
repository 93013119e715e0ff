"""What the tests of all environments share: tasks, and tests of the knobs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib


@functools.cache
def sample(env, count=64):
  """Tasks as numpy arrays. Without `jit`: the knobs compile nothing anew."""
  keys = jax.random.split(jax.random.key(5), count)
  return jax.device_get(jax.vmap(env.sample_task)(keys))


def sampled(env):
  """The tasks of `sample`, to be compared."""
  return jax.tree.map(np.ndarray.tolist, sample(env))


def shortest(env):
  """The shortest duration of every verb."""
  return collective_lib.Collective(env).shortest_turn_ms()


def in_flight_is_visible(env):
  """As the rules of a collective say."""
  return collective_lib.Collective(env).rules(60_000).awareness.tolist()


def _names(env):
  return [field.name for field in dataclasses.fields(env)]


def _usual_change(env, knob):
  """Another value of a knob that many have, and what it changes."""
  if knob.endswith('_tokens'):
    return getattr(env, knob) + 4000.0, shortest
  if knob.endswith('_tool_ms'):
    return getattr(env, knob) + 20_000, shortest
  return {
      'coupling': (0.0, sampled),
      'awareness': (True, in_flight_is_visible),
  }[knob]


def each_changes_something(env, **changes):
  """A test of every knob of an environment.

  Args:
    env: the environment.
    **changes: by knob, another value, and a function of an environment that
      returns something else then. The usual knobs may be left out.

  Returns:
    The test.
  """

  @pytest.mark.parametrize('knob', dict.fromkeys([*_names(env), *changes]))
  def test(knob):
    value, observe = changes.get(knob) or _usual_change(env, knob)
    other = dataclasses.replace(env, **{knob: value})
    assert observe(other) != observe(env)

  return test


def _usual_bad_values(knob):
  """What no knob of such a name may be, and what is allowed."""
  if knob.endswith('_tokens'):
    return [(0.5, '>= 1 token'), (0, '>= 1 token')]
  if knob.endswith('_tool_ms'):
    return [(-1, '>= 0')]
  if knob == 'coupling':
    return [(x, 'from 0 to 1') for x in (-0.1, 1.5, float('nan'))]
  return []


def bad_ones_are_refused(make, *cases):
  """A test of the errors that say what is allowed.

  Args:
    make: makes an environment of knobs; a class.
    *cases: knob, a bad value, what is allowed. The usual knobs are left out.

  Returns:
    The test.
  """
  usual = [
      (knob, *row) for knob in _names(make) for row in _usual_bad_values(knob)
  ]

  @pytest.mark.parametrize('knob, value, allowed', [*cases, *usual])
  def test(knob, value, allowed):
    with pytest.raises(ValueError) as error:
      make(**{knob: value})
    message = f'env.{knob}={value!r} is not allowed: it must be {allowed}.'
    assert str(error.value) == message

  return test
