"""Tests of what policies that learn nothing return."""

import numpy as np
import pytest
from rlcr_jax import evaluate
from rlcr_jax import references
from rlcr_jax import train
from tests import tiny

DEADLINES_MS = np.array([60_000, 180_000])


@pytest.fixture(scope='module')
def run():
  return train.build(tiny.config())


@pytest.fixture(scope='module')
def collective(run):
  return tiny.only(run.collectives)


@pytest.fixture(scope='module')
def oracle(collective):
  return references.returns(
      collective, 'oracle', DEADLINES_MS, hires=(0, 1, 2), num_tasks=8
  )


def test_there_is_a_return_for_every_team_deadline_and_task(oracle):
  assert oracle.shape == (3, 2, 8)
  assert (oracle >= 0).all() and (oracle <= 1).all()
  # More time never harms a scheduler that works without pause, and at the long
  # deadline a team gets further than one agent.
  assert (oracle[:, 1] >= oracle[:, 0]).all()
  assert oracle[1, 1].mean() > oracle[0, 1].mean()


@pytest.mark.parametrize('mode', references.MODES)
def test_they_are_those_of_the_evaluation(run, collective, mode):
  evaluator = evaluate.Evaluator(run, {})
  seed = run.config.evaluation.seed
  ours = references.returns(
      collective, mode, DEADLINES_MS, num_tasks=8, seed=seed
  )
  assert ours.shape == (1, 2, 8)
  for deadline_ms, played in zip(DEADLINES_MS, ours[0], strict=True):
    expected = evaluator.play(mode, int(deadline_ms)).progress
    np.testing.assert_allclose(played, expected, rtol=1e-6)


def test_the_limit_of_hiring_is_that_of_the_configuration(collective, oracle):
  own = references.returns(collective, 'oracle', DEADLINES_MS, num_tasks=8)
  np.testing.assert_allclose(own[0], oracle[2], rtol=1e-6)
