"""Every configuration that ships can be run."""

import importlib
import pathlib

from envs import registry
from experiments.configs import mixture
import jax
import jax.numpy as jnp
import pytest
from rlcr_jax import config as config_lib
from rlcr_jax import train

FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'experiments/configs'
NAMES = sorted(p.stem for p in FOLDER.glob('*.py') if p.stem != '__init__')


@pytest.mark.parametrize('name', NAMES)
def test_it_is_allowed_and_says_how_to_run_it(name):
  module = importlib.import_module(f'experiments.configs.{name}')
  config_lib.resolve(module.get_config())
  assert f'--config=experiments/configs/{name}.py' in module.__doc__
  assert '--workdir=DIR' in module.__doc__


@pytest.mark.parametrize('name', registry.names())
def test_every_environment_has_its_own(name):
  name = 'default' if name == 'software' else name
  module = importlib.import_module(f'experiments.configs.{name}')
  envs = config_lib.resolve(module.get_config()).envs
  assert list(envs) == ['software' if name == 'default' else name]
  with pytest.raises(ValueError, match="variant 'large' is not allowed"):
    module.get_config('large')


def test_one_update_of_all_environments():
  config = mixture.get_config('smoke')
  config.num_devices = 1
  run = train.build(config)
  assert list(run.collectives) == list(registry.names())
  limits = jnp.full(config.rlcr.tasks, config.deadline.final_ms, jnp.int32)
  knobs = run.config.rlcr.knobs(0, 2)
  _, updates = run.learner.step(
      run.init(), run.rules('collective', limits), knobs
  )
  for name, update in jax.device_get(updates).items():
    assert update.finite and not update.overflow, name
    assert update.rollouts.decisions > 0, name
    effective = update.rollouts.effective.sum(0)
    verbs = run.collectives[name].verbs
    acts = [
        e
        for v, e in zip(verbs, effective, strict=False)
        if v.acts_on_environment
    ]
    assert sum(acts) > 0, name
