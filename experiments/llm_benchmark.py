"""Measures how fast a language model is sampled, as ratios within one process.

  python -m experiments.llm_benchmark --model=PATH --json=FILE

For each batch size, tokens drawn per second, prompts included, where the rows
of a batch begin with the same prefix:

  local           of `LocalEngine`, which reads the prefix once for the batch
  local_unshared  the same engine, told of no prefix
  local_reused    the same engine, which has read the prefix before
  transformers    of `generate` of transformers, if it is installed
  speedup         local_unshared / transformers, which do the same work

All draw from the whole distribution, and none stops early. What is compared is
timed by turns, and the median counts.
"""

from collections.abc import Callable
import dataclasses
import importlib
import importlib.util
import pathlib
import platform
import statistics
import tempfile
import time
from typing import Any

from absl import flags
from envs.base import NotAllowedError
from experiments import cli
from experiments.benchmark import JSON
from experiments.benchmark import REPEATS
import jax
import numpy as np
from rich.table import Table
from rlcr_jax import files
from rlcr_jax.llm import engine
from rlcr_jax.llm import sampler
from rlcr_jax.llm import weights

_MODEL = flags.DEFINE_string(
    'model', None, 'A Hugging Face folder or a GGUF file.'
)
_BATCHES = flags.DEFINE_multi_integer('batch', [8, 32], 'Rows sampled at once.')
_PREFIX = flags.DEFINE_integer('prefix_tokens', 96, 'That all rows share.')
_SUFFIX = flags.DEFINE_integer('suffix_tokens', 32, 'Of one row.')
_NEW = flags.DEFINE_integer('new_tokens', 64, 'Drawn per row.')

_HARDWARE = {
    'platform': jax.default_backend,
    'machine': platform.machine,
    'jax': lambda: jax.__version__,
}


@dataclasses.dataclass(frozen=True)
class _Endless:
  """A tokenizer without stop tokens, so that all draw the same number."""

  inner: Any
  stop_ids: tuple[int, ...] = ()

  def __getattr__(self, name: str) -> Any:
    return getattr(self.inner, name)


class Benchmark:
  """One model, sampled by this library and by transformers."""

  def __init__(self, loaded: weights.Loaded, rows: int):
    self._loaded, self._rows = loaded, rows
    self._sampling = engine.Sampling(max_tokens=_NEW.value)
    self._engine = sampler.LocalEngine(
        loaded.config,
        loaded.params,
        _Endless(loaded.tokenizer),
        max_batch=rows,
    )
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(0, loaded.tokenizer.vocab_size, shape)
    self._prefix = draw(_PREFIX.value)
    self._suffixes = draw(rows, _SUFFIX.value)

  def local(self, shared: bool = True) -> None:
    """Samples with weights that are new, or are not known to be the same."""
    self._engine.update(self._loaded.params)
    self.local_reused(shared)

  def local_reused(self, shared: bool = True) -> None:
    """Samples with the weights of the last call."""
    prefix = tuple(self._prefix.tolist())
    requests = []
    for i, suffix in enumerate(self._suffixes):
      parts = prefix, tuple(suffix.tolist())
      parts = parts if shared else ((), sum(parts, ()))
      requests.append(engine.Request(*parts, jax.random.key(i)))
    completions = self._engine.generate(requests, self._sampling)
    assert all(len(c.ids) == _NEW.value for c in completions)

  def transformers(self, model: Any) -> None:
    """Samples with transformers."""
    torch = importlib.import_module('torch')
    prefix = np.broadcast_to(self._prefix, (self._rows, _PREFIX.value))
    tokens = torch.tensor(np.concatenate([prefix, self._suffixes], axis=1))
    with torch.inference_mode():
      ids = model.generate(
          tokens,
          attention_mask=torch.ones_like(tokens),
          max_new_tokens=_NEW.value,
          min_new_tokens=_NEW.value,
          do_sample=True,
          temperature=1.0,
          top_k=0,
          top_p=1.0,
      )
    assert ids.shape[1] == tokens.shape[1] + _NEW.value

  def seconds(self, model: Any) -> dict[str, float]:
    """Median wall clock of each way; `model` is None without transformers."""
    ways: dict[str, Callable[[], None]] = {
        'local': self.local,
        'local_reused': self.local_reused,
        'local_unshared': lambda: self.local(shared=False),
    }
    if model is not None:
      ways['transformers'] = lambda: self.transformers(model)
    times = {name: [] for name in ways}
    for turn in range(1 + REPEATS.value):
      for name, call in ways.items():
        began = time.perf_counter()
        call()
        if turn:  # The first one compiles.
          times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _transformers_model(loaded: weights.Loaded) -> Any:
  """The same weights in transformers, or None if it is not installed."""
  if not all(map(importlib.util.find_spec, ('torch', 'transformers'))):
    return None
  transformers = importlib.import_module('transformers')
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'model'
    weights.save(path, *loaded)
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def measure(loaded: weights.Loaded) -> dict[str, Any]:
  """All figures of one process, by batch size."""
  model, result = _transformers_model(loaded), {}
  for rows in _BATCHES.value:
    seconds = Benchmark(loaded, rows).seconds(model)
    figures = {name: rows * _NEW.value / s for name, s in seconds.items()}
    if model is not None:
      figures['speedup'] = figures['local_unshared'] / figures['transformers']
    result[str(rows)] = figures
  return result


def main() -> None:
  """Measures, prints and writes the figures."""
  if not _MODEL.value:
    raise NotAllowedError('--model is missing: name a folder or a GGUF file.')
  result = measure(weights.load(_MODEL.value))
  table = Table(title='Tokens per second')
  table.add_column('')
  for rows in result:
    table.add_column(f'batch {rows}', justify='right')
  for name in next(iter(result.values())):
    figures = [f'{row[name]:,.2f}' for row in result.values()]
    table.add_row(name.replace('_', ' '), *figures)
  cli.CONSOLE.print(table)
  if JSON.value:
    tokens = {x.name: x.value for x in (_PREFIX, _SUFFIX, _NEW)}
    result = {'tokens_per_s': result, **tokens}
    result['hardware'] = {name: get() for name, get in _HARDWARE.items()}
    files.write_json(pathlib.Path(JSON.value), result)
    cli.CONSOLE.print(f'written: {JSON.value}')


if __name__ == '__main__':
  cli.run(main)
