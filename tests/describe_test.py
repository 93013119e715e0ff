"""Tests of the command that says what an environment is."""

from envs import registry
from experiments import cli
from experiments import describe
import jax
import numpy as np
import pytest
from rlcr_jax import config as config_lib
from rlcr_jax import figures
from tests.cli_test import call
from tests.cli_test import told

PNG = b'\x89PNG'


@pytest.fixture
def printed(monkeypatch):
  """What goes to the console, wide enough for any table."""
  console = cli.rich_console.Console(stderr=True, width=200)
  monkeypatch.setattr(cli, 'CONSOLE', console)


@pytest.mark.parametrize('given', ['--env=reasoning', None])
def test_it_says_all_and_draws(given, printed, tmp_path, capfd):
  path = '--config=experiments/configs/reasoning.py'
  args = [given or path, '--tasks=2', f'--workdir={tmp_path}']
  if not given:
    args += ['--config.env.num_chains=3']
  assert call(describe, *args) == 0
  text = capfd.readouterr().err
  config = config_lib.defaults('reasoning')
  for knob in config.env:
    assert knob == 'name' or knob in text
  verbs = tiny_collective(config).verbs
  for verb in verbs:
    assert f' {verb.name} ' in text
  chains = 8 if given else 3
  assert f'chain {chains - 1}: an attempt' in text
  assert f'chain {chains}: an attempt' not in text
  for who in ('oracle, 1 agent ', 'oracle, 8 agents', 'random', 'greedy solo'):
    assert who in text
  for name in ('reasoning_task', 'reasoning_scaling'):
    assert (tmp_path / f'{name}.png').read_bytes().startswith(PNG)


def tiny_collective(config):
  ((_, collective),) = config_lib.resolve(config).make_collectives().items()
  return collective


@pytest.mark.parametrize(
    'args, words',
    [
        (['--env=chess'], ["env='chess'", 'software']),
        (['--tasks=1'], ['tasks=1', '>= 2']),
        (['--config=experiments/configs/mixture.py'], ['env=', 'one of']),
    ],
)
def test_bad_input_is_told_in_one_line(args, words, capfd):
  assert call(describe, *args) == 1
  line = told(capfd.readouterr().err)
  assert all(word in line for word in words), line


@pytest.mark.parametrize('name', registry.names())
def test_a_task_of_every_environment_can_be_drawn(name):
  collective = tiny_collective(config_lib.defaults(name))
  task = collective.env.sample_task(jax.random.key(0))
  chart = describe._picture(name, collective, task)
  assert chart.name == f'{name}_task' and chart.png.startswith(PNG)


def test_what_is_needed_stands_left_of_what_needs_it():
  relations = np.zeros((5, 5), bool)
  relations[[2, 3, 3, 4], [0, 0, 2, 1]] = True
  place = figures._layered(relations)
  assert (place[2, 0], place[3, 0], place[4, 0]) == (1, 2, 1)
  assert place[0, 0] == place[1, 0] == 0
  assert len({tuple(at) for at in place.tolist()}) == 5


def test_what_needs_each_other_stands_together():
  groups = np.arange(6) // 2
  relations = (groups[:, None] == groups[None, :]) & ~np.eye(6, dtype=bool)
  place = figures._layered(relations)
  assert (place[::2, 0] == place[1::2, 0]).all()
  assert len(set(place[:, 0])) == 3
  assert len({tuple(at) for at in place.tolist()}) == 6
