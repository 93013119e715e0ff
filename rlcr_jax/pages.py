"""What reports share: numbers as text, tables of a terminal, and pages."""

import base64
import math
from typing import Any

import jinja2
from rich import box
from rich import table as table_lib


def number(value: Any) -> float:
  """A number of a JSON file, NaN where it is null or missing."""
  return math.nan if value is None else float(value)


def text(value: Any, spec: str) -> str:
  """A number as text, a dash where there is none."""
  value = number(value)
  if not math.isfinite(value):
    return '–'
  return format(value, spec).replace('%', '\N{NO-BREAK SPACE}%')


def seconds(ms: Any) -> str:
  """A time as text, such as `120 s`."""
  return f'{text(number(ms) / 1000, ".0f")} s'


def interval(ends: Any, spec: str, scale: float = 1.0) -> str:
  """`[0.790, 0.834]`.

  Args:
    ends: a pair of numbers, each null where there is none, or None.
    spec: the format of a number.
    scale: what numbers are multiplied by.
  """
  low, high = (text(number(x) * scale, spec) for x in ends or (None, None))
  return f'[{low}, {high}]'


def empty_table(*columns: str, **kwargs: Any) -> table_lib.Table:
  """Names on the left, numbers on the right, narrow enough for 80 columns."""
  result = table_lib.Table(
      box=box.SIMPLE_HEAD,
      collapse_padding=True,
      pad_edge=False,
      caption_justify='left',
      **kwargs,
  )
  for i, name in enumerate(columns):
    result.add_column(
        name,
        justify='right' if i else 'left',
        overflow='fold',  # A number that is cut off would read as another.
        no_wrap=i != 1,
    )
  return result


def render(template: str, **values: Any) -> str:
  """A page of `templates/`, which needs no other file."""
  environment = jinja2.Environment(
      autoescape=True,
      loader=jinja2.PackageLoader('rlcr_jax'),
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
  )
  environment.filters['text'] = text
  environment.filters['seconds'] = seconds
  environment.filters['base64'] = lambda b: base64.b64encode(b).decode('ascii')
  return environment.get_template(template).render(**values)
