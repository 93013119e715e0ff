"""Tests of the registry of environments."""

import dataclasses

from envs import registry
from envs import software
import pytest
from rlcr_jax import collective


def test_names_are_sorted_and_hold_the_software_project():
  assert 'software' in registry.names()
  assert registry.names() == tuple(sorted(registry.names()))


def test_make_passes_the_knobs_on():
  env = registry.make('software', num_modules=5, width=2)
  assert env == software.Software(num_modules=5, width=2)
  assert registry.make('software') == software.Software()


@pytest.mark.parametrize('name', registry.names())
def test_an_environment_is_registered_under_its_own_name(name):
  assert registry.make(name).name == name


@pytest.mark.parametrize('name', registry.names())
def test_no_verb_has_the_name_of_a_verb_of_coordination(name):
  verbs = collective.Collective(registry.make(name)).verbs
  names = [verb.name for verb in verbs]
  assert len(set(names)) == len(names)


def test_an_unknown_name_is_an_error_that_says_what_there_is():
  with pytest.raises(ValueError) as error:
    registry.make('chess')
  assert str(error.value) == (
      "env.name='chess' is not allowed: it must be one of"
      f' {registry.names()}.'
  )


def test_an_unknown_knob_is_an_error_that_says_what_there_is():
  knobs = [field.name for field in dataclasses.fields(software.Software)]
  with pytest.raises(ValueError) as error:
    registry.make('software', widht=3)
  assert str(error.value) == (
      f'env.widht=3 is not allowed: it must be a knob of software: {knobs}.'
  )


def test_a_knob_out_of_its_range_is_an_error():
  with pytest.raises(ValueError, match=r'^env\.width=13 is not allowed: '):
    registry.make('software', width=13)
