"""Environments by name."""

import dataclasses
from typing import Any

from envs import base
from envs import pipeline
from envs import proof
from envs import reasoning
from envs import search
from envs import software
from envs import trading

_ENVIRONMENTS: dict[str, type[base.Environment]] = {
    'pipeline': pipeline.Pipeline,
    'proof': proof.Proof,
    'reasoning': reasoning.Reasoning,
    'search': search.Search,
    'software': software.Software,
    'trading': trading.Trading,
}


def names() -> tuple[str, ...]:
  """The names of all registered environments."""
  return tuple(sorted(_ENVIRONMENTS))


def make(name: str, **knobs: Any) -> base.Environment:
  """Builds an environment.

  Args:
    name: one of `names()`.
    **knobs: fields of the environment's dataclass.

  Raises:
    ValueError: for an unknown name or knob, or a knob out of its range.
  """
  base.require(name in names(), 'env.name', name, f'one of {names()}')
  cls = _ENVIRONMENTS[name]
  known = [field.name for field in dataclasses.fields(cls)]
  for knob, value in knobs.items():
    base.require(
        knob in known, f'env.{knob}', value, f'a knob of {name}: {known}'
    )
  return cls(**knobs)
