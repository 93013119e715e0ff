"""Files of a workdir, written whole or not at all."""

import json
import math
import os
import pathlib
from typing import Any


def write_bytes(path: pathlib.Path, data: bytes) -> None:
  """Replaces a file atomically: readers see the old or the new, never half."""
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_name(f'.{path.name}.{os.getpid()}')
  with draft.open('wb') as stream:
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())
  os.replace(draft, path)


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a text file atomically, in UTF-8."""
  write_bytes(path, text.encode('utf-8'))


def _plain(value: Any) -> Any:
  """Numbers that JSON has: non-finite floats become null."""
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def dumps(value: Any, **kwargs: Any) -> str:
  """Strict JSON, with null for numbers that it cannot express."""
  return json.dumps(_plain(value), allow_nan=False, **kwargs)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes readable JSON atomically."""
  write_text(path, dumps(value, indent=2) + '\n')


def last_line(path: pathlib.Path) -> dict[str, Any] | None:
  """The last whole one of JSON lines of at most 32 KiB each, if any."""
  if not path.exists():
    return None
  with path.open('rb') as stream:
    stream.seek(max(path.stat().st_size - 2**16, 0))
    whole = stream.read().split(b'\n')[:-1]  # What follows is being written.
  return json.loads(whole[-1]) if whole else None


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads JSON lines; a line that a kill cut short ends the file."""
  records: list[dict[str, Any]] = []
  if not path.exists():
    return records
  for line in path.read_text(encoding='utf-8').splitlines():
    try:
      records.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return records
