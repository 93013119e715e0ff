"""Tests of what is reinforced."""

import numpy as np
from rlcr_jax import incentives
from rlcr_jax import rollout


def make_rollouts(**fields):
  blank = dict.fromkeys(rollout.Rollouts._fields)
  return rollout.Rollouts(**(blank | fields))


def test_deadline_return_is_the_progress_when_the_clock_stopped():
  played = make_rollouts(progress=np.float32([0.0, 0.25, 1.0]))
  returns = incentives.INCENTIVES['deadline_return'](played)
  assert np.asarray(returns).tolist() == [0.0, 0.25, 1.0]


def test_deadline_return_does_not_ask_when_progress_was_made():
  """Two rollouts with the same progress score the same, early or late."""
  played = make_rollouts(
      progress=np.float32([0.5, 0.5]),
      time_ms=np.int32([30_000, 60_000]),
      progress_ms=np.int32([10_000, 59_000]),
      output_tokens=np.int32([[5], [5000]]),
      team_size=np.int32([1, 9]),
  )
  first, second = incentives.INCENTIVES['deadline_return'](played)
  assert first == second
