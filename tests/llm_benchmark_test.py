"""Tests of the benchmark of sampling, on a tiny model."""

import importlib.util
import json
import math
import pathlib
import sys

from absl.testing import flagsaver
from experiments import cli
from experiments import llm_benchmark
import pytest
from tests import llm_tiny

LOCAL = {'local', 'local_unshared', 'local_reused'}


def figures(tmp_path, monkeypatch, *arguments):
  """Runs the command, with all that may be asked of it made small."""
  path = tmp_path / 'figures.json'
  model = llm_tiny.write(tmp_path / 'model', llm_tiny.HF_CONFIGS['smollm2'])
  arguments = [f'--model={model}', f'--json={path}', *arguments]
  monkeypatch.setattr(sys, 'argv', ['llm_benchmark', *arguments])
  monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[1])
  small = {'repeats': 1, 'prefix_tokens': 5, 'suffix_tokens': 3}
  with flagsaver.flagsaver(**small, new_tokens=4, batch=[2]):
    with pytest.raises(SystemExit) as end:
      cli.run(llm_benchmark.main)
  assert not end.value.code
  result = json.loads(path.read_text(encoding='utf-8'))
  assert result['hardware']['platform'] == 'cpu'
  assert (result['prefix_tokens'], result['new_tokens']) == (5, 4)
  for value in result['tokens_per_s']['2'].values():
    assert math.isfinite(value) and value > 0
  return result['tokens_per_s']


def test_figures_without_transformers(tmp_path, monkeypatch):
  monkeypatch.setattr(llm_benchmark, '_transformers_model', lambda loaded: None)
  result = figures(tmp_path, monkeypatch)
  assert list(result) == ['2'] and set(result['2']) == LOCAL


@pytest.mark.slow
def test_figures_with_transformers(tmp_path, monkeypatch):
  for package in ('torch', 'transformers'):
    if importlib.util.find_spec(package) is None:
      pytest.skip(f'{package} is not installed')
  result = figures(tmp_path, monkeypatch)['2']
  assert set(result) == LOCAL | {'transformers', 'speedup'}
  ratio = result['local_unshared'] / result['transformers']
  assert result['speedup'] == pytest.approx(ratio)


def test_a_model_must_be_named(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['llm_benchmark'])
  monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[1])
  with flagsaver.flagsaver(model=None), pytest.raises(SystemExit) as end:
    cli.run(llm_benchmark.main)
  assert end.value.code == 1
  assert '--model is missing' in capsys.readouterr().err
