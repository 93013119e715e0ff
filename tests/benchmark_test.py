"""Tests of the benchmark: what it compares is the same work."""

import json
import math
import pathlib
import sys

from absl.testing import flagsaver
from envs import registry
from experiments import benchmark
from experiments import cli
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import rollout
from rlcr_jax import train
from rlcr_jax.observation import HIRE
from rlcr_jax.policies import scripted
from tests import tiny

FIGURES = (
    'decisions_per_s',
    'efficiency',
    'packed_vs_dense',
    'turns_per_s',
    'peak_memory_gib',
)


@pytest.fixture(scope='module')
def run():
  return train.build(tiny.config(latency__quantum_ms=1000))


def test_dense_scan_plays_the_rollouts_of_the_packed_loop(run):
  collective = tiny.only(run.collectives)
  policy, limits_ms = scripted.RandomPolicy(collective), [60_000, 90_000] * 2
  tasks, rules, keys = rollout.group_inputs(
      collective,
      jax.random.key(0),
      jnp.arange(4),
      tiny.only(run.rules('collective', jnp.array(limits_ms, jnp.int32))),
      2,
  )
  packed, _ = jax.jit(
      lambda: rollout.play(
          collective, policy, (), tasks, rules, keys, chunk_size=4
      )
  )()
  states = jax.jit(
      lambda: benchmark.play_dense(
          collective, policy, (), tasks, rules, keys, ticks=90
      )
  )()
  assert states.done.all()
  np.testing.assert_array_equal(states.clock_ms, packed.time_ms)
  np.testing.assert_array_equal(states.ledger.turns, packed.turns)
  np.testing.assert_array_equal(states.ledger.effective, packed.effective)
  np.testing.assert_array_equal(states.peak_team, packed.team_size)
  assert packed.effective.sum() > 0 and packed.team_size.max() > 1


def test_policy_of_the_benchmark_hires_whenever_it_may(run):
  collective, policy = (
      tiny.only(run.collectives),
      tiny.only(run.learner.parts).policy,
  )
  hire_all = benchmark.HireAll(policy)
  params = hire_all.init(jax.random.key(0))

  @jax.jit
  @jax.vmap
  def look(rules):
    task = collective.env.sample_task(jax.random.key(1))
    state = collective.reset(task, rules, jax.random.key(2))
    return collective.observe(task, rules, state, jnp.int32(0))

  rules = (
      run.config.collective.rules(60_000, organisation=name)
      for name in ('ceo', 'flat')
  )
  obs = look(jax.tree.map(lambda *x: jnp.stack(x), *rules))
  keys = jax.random.split(jax.random.key(3), 2)
  action, log_prob = jax.jit(hire_all.sample)(params, keys, obs)
  other, _ = jax.jit(policy.sample)(params, keys, obs)
  assert action.verb[0] == collective.verb(HIRE)
  assert (action.target[0], action.peer[0], action.symbol[0]) == (0, 0, 0)
  for ours, theirs in zip(action, other, strict=True):
    assert ours[1] == theirs[1]  # Nobody may be hired: as the network says.
  assert np.isfinite(log_prob).all()


@pytest.mark.slow
def test_all_figures_are_positive_numbers(run, tmp_path, monkeypatch):
  path = tmp_path / 'figures.json'
  monkeypatch.setattr(benchmark, '_CHUNKS', (16, 32))
  monkeypatch.setattr(benchmark, '_SIMULATED', 8)
  monkeypatch.setattr(train, 'build', lambda config: run)
  monkeypatch.setattr(sys, 'argv', ['benchmark', f'--json={path}'])
  monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[1])
  with flagsaver.flagsaver(repeats=1), pytest.raises(SystemExit) as end:
    cli.run(benchmark.main)
  assert not end.value.code
  result = json.loads(path.read_text(encoding='utf-8'))
  for name in FIGURES:
    assert math.isfinite(result[name]) and result[name] > 0, name
  ratios = result['turns_vs_software']
  assert set(ratios) == set(registry.names()) and ratios['software'] == 1.0
  assert all(math.isfinite(x) and x > 0 for x in ratios.values())
  assert result['decisions_per_update'] > 0
  assert result['rollouts'] == 16 and result['hardware']['devices'] == 1
  bare = result['seconds'].pop('bare_network_by_chunk_size')
  assert set(bare) == {'16', '32'}
  for seconds in (*bare.values(), *result['seconds'].values()):
    assert math.isfinite(seconds) and seconds > 0
