"""Every registered environment conforms, and faults of many kinds are found."""

import dataclasses
import functools
import itertools

from envs import base
from envs import conformance
from envs import registry
from envs.software import Software
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize('name', registry.names())
def test_registered_environments_conform(name):
  with jax.numpy_rank_promotion('raise'):
    conformance.check_environment(registry.make(name))


@pytest.mark.parametrize(
    'knobs',
    [
        {'conflicts': False},
        {'coupling': 0.0, 'width': 4},
    ],
)
def test_environments_with_other_knobs_conform(knobs):
  conformance.check_environment(
      Software(**({'num_modules': 4, 'width': 2} | knobs)), jax.random.key(1)
  )


def test_legal_verbs_are_read_from_text():
  verbs = Software().verbs
  text = 'module 0: done, read 0\nmodule 1: new, seen, work 1\nmodule 2: new'
  np.testing.assert_array_equal(
      conformance.parse_legal(text, verbs),
      [[False, True, False], [True, False, False]],
  )
  # The state comes first, whatever it is called.
  assert not conformance.parse_legal('module 0: read 0', verbs).any()


@pytest.mark.parametrize(
    'text', ['module 1: new', 'module 0 new', '0: new', 'module 0: new\n']
)
def test_text_of_another_form_is_an_error(text):
  text = f'{text}\n' if text.endswith('\n') else text
  with pytest.raises(ValueError, match='is not of the form "name [01]: state'):
    conformance.parse_legal(text, Software().verbs)


class Broken(Software):
  """A software project of four modules in two layers, to be broken."""

  def __init__(self):
    super().__init__(num_modules=4, width=2)

  def usual(self, method, *args):
    """What the whole environment does."""
    return getattr(Software, method)(self, *args)


def share(self, task, world, now_ms):
  return self.usual('progress', task, world, now_ms)


def falling(self, *args):
  whole = share(self, *args)
  return jnp.where(whole > 0.5, 1.0 - whole, whole)


def drifting(self, task, world, now_ms):
  return share(self, task, world, now_ms) * jnp.exp(-now_ms / 4000)


def lands_always(self, task, world, turns, knows, key):
  turns = turns._replace(lands=turns.lands | True)
  return self.usual('land', task, world, turns, knows, key)


def lands_foreign_verbs(self, task, world, turns, knows, key):
  turns = turns._replace(verb=turns.verb % 2)
  return self.usual('land', task, world, turns, knows, key)


def heeds_turns_in_flight(self, task, world, turns, knows, key):
  first = jnp.argmax(turns.target[:, None] == turns.target[None, :], axis=1)
  alone = first == jnp.arange(len(first))
  turns = turns._replace(lands=turns.lands & alone)
  return self.usual('land', task, world, turns, knows, key)


def teaches_all(self, *args):
  world, knows, outcome = self.usual('land', *args)
  return world, knows | knows.any(axis=0, keepdims=True), outcome


def always_effective(self, task, world, turns, *args):
  world, knows, _ = self.usual('land', task, world, turns, *args)
  own = (turns.verb >= 0) & (turns.verb < 2)
  return world, knows, base.Outcome(turns.lands & own)


def float_world(self, *args):
  world, knows, outcome = self.usual('land', *args)
  return world._replace(remaining=world.remaining * 1.0), knows, outcome


def rate(self, task, world, knows):
  """Work done per unit that is left: not a number once nothing is."""
  view = self.usual('view', task, world, knows)
  bad = jnp.where(world.remaining == 0, jnp.nan, view.features[:, 2])
  return view._replace(features=view.features.at[:, 2].set(bad))


def half_precision(self, *args):
  view = self.usual('view', *args)
  return view._replace(features=view.features.astype(jnp.float16))


def transposed(self, *args):
  view = self.usual('view', *args)
  return view._replace(legal=view.legal.T)


def permissive(self, *args):
  view = self.usual('view', *args)
  return view._replace(legal=view.legal.at[0].set(view.features[:, 0] > 0))


def half_open(self, *args):
  view = self.usual('view', *args)
  ajar = jnp.maximum(view.features[:, 0], 0.5)
  return view._replace(features=view.features.at[:, 0].set(ajar))


def branches(self, task, world, knows):
  if world.remaining[0] == 0:
    knows = knows | True
  return self.usual('view', task, world, knows)


def peeks_at_tracers(self, task, *args):
  bounds = self.usual('bounds', task, *args)
  traced = isinstance(task.effort, jax.core.Tracer)
  return bounds._replace(progress=bounds.progress + (not traced))


def low_bound(self, *args):
  bounds = self.usual('bounds', *args)
  return bounds._replace(progress=bounds.progress * 0.5)


def float_bounds(self, *args):
  bounds = self.usual('bounds', *args)
  return bounds._replace(serial_ms=bounds.serial_ms * 1.0)


def long_path(self, *args):
  bounds = self.usual('bounds', *args)
  return bounds._replace(
      critical_path_ms=bounds.critical_path_ms + 1_000_000,
      serial_ms=bounds.serial_ms + 1_000_000,
  )


def path_longer_than_all_work(self, *args):
  bounds = self.usual('bounds', *args)
  return bounds._replace(critical_path_ms=bounds.serial_ms + 1)


def key_ignored(self, key):
  del key
  return self.usual('sample_task', jax.random.key(0))


def key_used_twice(self, key):
  task = self.usual('sample_task', key)
  return task._replace(tests=task.effort * jax.random.randint(key, (4,), 1, 4))


@jax.custom_batching.custom_vmap
def mean(x):
  return x


@mean.def_vmap
def _mean_over_the_batch(axis_size, in_batched, x):
  del axis_size
  return jnp.broadcast_to(x.mean(), x.shape), in_batched[0]


def with_verb(**changes):
  """Changes of the second verb."""
  work, read = Software().verbs
  return property(lambda self: (work, read._replace(**changes)))


IDLE = [verb._replace(acts_on_environment=False) for verb in Software().verbs]


def text_without_a_module(self, task):
  return self.usual('describe', task).rsplit('\n', 1)[0]


def view_without_verbs(self, *args):
  return self.usual('describe_view', *args).replace(', read', ', write')


def view_without_a_module(self, *args):
  return self.usual('describe_view', *args).rsplit('\n', 1)[0]


def always_works(self, features, legal):
  return self.usual('reference_verb', features, legal) * 0


def always_reads(self, features, legal):
  return jnp.where(legal[1], 1, self.usual('reference_verb', features, legal))


CALLS = itertools.count()


def changing_text(self, *args):
  return self.usual('describe_view', *args) + f', call {next(CALLS)}'


COLUMNS = Software().feature_names
FAULTS = [
    # What is broken, how, and what the check says.
    ('progress', falling, 'progress: it falls from'),
    ('progress', lambda *a: share(*a) * 2, 'progress: it is 1'),
    ('progress', lambda *a: 0.5 + share(*a) / 2, 'progress: it is 0.5 in an'),
    ('progress', lambda *a: share(*a) > 0.5, "types.*'progress'.* is bool"),
    ('progress', lambda *a: mean(share(*a)), r"under vmap, \['progress'\]"),
    ('land', lands_always, 'do not land.*: when no turn lands at'),
    ('land', lands_foreign_verbs, 'do not land.*not the world.s own land at'),
    ('land', heeds_turns_in_flight, 'do not land.*at other things at'),
    ('land', teaches_all, 'outcomes.* does not land learns'),
    ('land', always_effective, 'outcomes.*effective=.*changed: False'),
    ('land', float_world, "types.*'land'.*remaining is float32.*, not int32"),
    ('view', rate, r"features are finite: \['value'\] at"),
    ('view', half_precision, "types.*'view'.*features is float16"),
    ('view', transposed, r"types.*'view'.*legal is bool\[4, 2\], not bool\[2"),
    ('view', permissive, 'features say.*: a verb that does more than learn'),
    ('view', half_open, 'features say.*: a verb that does more than learn'),
    ('reference_verb', always_works, 'features say.*: reference_verb must be'),
    ('reference_verb', always_reads, 'features say.*: reference_verb must be'),
    ('view', branches, 'types.*Attempted boolean conversion of traced'),
    ('bounds', peeks_at_tracers, r"under jit, \['bounds'\]"),
    ('bounds', low_bound, 'bounds: .* agents have progress .* above the bound'),
    ('bounds', float_bounds, "types.*'bounds'.*serial_ms is float32"),
    ('bounds', long_path, 'bounds: .* agents finish at .* in spite of'),
    ('bounds', path_longer_than_all_work, 'bounds: critical_path_ms='),
    ('sample_task', key_ignored, 'tasks differ by key: eight keys give the'),
    ('sample_task', key_used_twice, 'no key used twice: .*consumed key'),
    ('verbs', with_verb(name='work'), "verbs: names double: .*'work', 'work'"),
    ('verbs', with_verb(name='look, at'), "verbs: look, at: name='look, at'"),
    ('verbs', with_verb(takes_target=False), 'verbs: read: takes_target=False'),
    ('verbs', with_verb(takes_peer=True), 'verbs: read: takes_peer=True'),
    ('verbs', with_verb(takes_symbol=True), 'verbs: read: takes_symbol=True'),
    ('verbs', with_verb(output_tokens=0), 'verbs: read: output_tokens=0'),
    ('verbs', with_verb(tool_ms=1.5), 'verbs: read: tool_ms=1.5'),
    ('verbs', with_verb(learns=1), 'verbs: read: learns=1'),
    ('verbs', property(lambda self: IDLE), 'verbs: none acts on the'),
    ('verbs', property(lambda self: ()), 'verbs: names double'),
    ('feature_names', COLUMNS[::-1], 'static.*: feature_names must begin'),
    ('feature_names', COLUMNS + COLUMNS[-1:], 'static.*: .*without doubles'),
    ('feature_names', COLUMNS[:-1], r'types.*features is float32\[4, 1'),
    ('num_targets', 0, 'static.*: num_targets is 0'),
    ('finished', lambda self, task, world: True, 'finished before anything'),
    ('describe', text_without_a_module, r"text.*no line for \['module 3'\]"),
    ('describe_view', view_without_verbs, 'text.*the legal verbs read from'),
    ('describe_view', view_without_a_module, 'text.*the legal verbs read from'),
    ('describe_view', changing_text, 'text.*two calls with the same'),
    ('describe_view', lambda *a: '', 'text.*must call its targets by one name'),
]


@pytest.mark.parametrize(
    'name, method, message',
    FAULTS,
    ids=[f'{name}-{i}' for i, (name, *_) in enumerate(FAULTS)],
)
def test_a_fault_is_found(name, method, message):
  if name.startswith('describe'):  # Not compiled, so the program is shared.
    env = Broken()
    object.__setattr__(env, name, functools.partial(method, env))
  else:
    env = type('Faulty', (Broken,), {name: method})()
  with pytest.raises(AssertionError, match=f'^software: .*{message}'):
    conformance.check_environment(env)


def test_progress_may_fall_where_that_is_declared_but_not_after_the_end():
  changes = {'progress': drifting, 'monotone': False}
  env = type('Faulty', (Broken,), changes)()
  with pytest.raises(
      AssertionError, match='progress: it becomes .* nothing lands'
  ):
    conformance.check_environment(env)


def test_an_environment_must_be_a_frozen_dataclass():
  @dataclasses.dataclass
  class Thawed(base.Environment):
    name = 'thawed'

  Thawed.__abstractmethods__ = frozenset()
  with pytest.raises(AssertionError, match='thawed: static.*: Thawed must be'):
    conformance.check_environment(Thawed())
