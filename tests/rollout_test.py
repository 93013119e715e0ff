"""Tests of the packed event loop: what the rollouts may not depend on."""

from experiments import benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import rollout
from tests import by_hand
from tests.played import BATCH
from tests.played import COLLECTIVE
from tests.played import GRID_MS
from tests.played import inputs
from tests.played import NETWORK
from tests.played import of_one
from tests.played import play
from tests.played import played
from tests.played import RECORDER
from tests.played import RULES
from tests.played import TRACES


def assert_equal(got, want):
  """Equal; numbers that are not counted may differ by rounding."""

  def check(x, y):
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    else:
      np.testing.assert_array_equal(x, y)

  jax.tree.map(check, got, want)


def of_collectives(rollouts):
  """All but what is of the loop, not of the collectives."""
  return rollouts._replace(iterations=None, decisions=None)


# Reproducibility.


def test_the_sample_is_worth_looking_at():
  for policy in (RECORDER, NETWORK):
    rollouts, table = played(policy)
    assert rollouts.decisions > 800
    assert (rollouts.turns.sum(axis=0) > 0).all()  # Every verb occurs,
    assert (rollouts.effective.sum(axis=0) > 0).all()  # and does something.
    # More agents are free at once than fit into a chunk.
    assert np.unique(table.start_ms, return_counts=True)[1].max() > 32


def test_same_seed_same_rollouts():
  jax.tree.map(np.testing.assert_array_equal, play(), play())


@pytest.mark.parametrize('chunk_size', [128, 1000])
def test_the_chunk_size_changes_nothing(chunk_size):
  small, large = played(NETWORK, 32), played(NETWORK, chunk_size)
  assert large.rollouts.iterations < small.rollouts.iterations
  assert large.rollouts.decisions == small.rollouts.decisions
  assert_equal(large.decisions, small.decisions)
  assert_equal(of_collectives(large.rollouts), of_collectives(small.rollouts))


@pytest.mark.parametrize(
    'policy, rows',
    [
        (RECORDER, [1]),
        (RECORDER, [2] * BATCH),
        (NETWORK, list(reversed(range(BATCH)))),
    ],
)
def test_the_batch_that_a_rollout_is_in_changes_nothing(policy, rows):
  batch, other = played(policy), play(policy, rows=rows)
  pick = jax.tree.map(lambda x: x[rows], of_collectives(batch.rollouts))
  assert_equal(of_collectives(other.rollouts), pick)
  for i, row in enumerate(rows):
    assert_equal(of_one(other.decisions, i), of_one(batch.decisions, row))


def test_the_packed_loop_equals_the_dense_scan():
  tasks, keys = inputs()
  states = jax.jit(
      lambda: benchmark.play_dense(
          COLLECTIVE, RECORDER, (), tasks, RULES, keys, ticks=60
      )
  )()
  packed = played().rollouts
  np.testing.assert_array_equal(states.done, True)
  np.testing.assert_array_equal(states.clock_ms, packed.time_ms)
  np.testing.assert_array_equal(states.progress_ms, packed.progress_ms)
  np.testing.assert_array_equal(states.peak_team, packed.team_size)
  np.testing.assert_array_equal(states.ledger.turns, packed.turns)
  np.testing.assert_array_equal(states.ledger.hired, packed.hired)
  np.testing.assert_array_equal(states.ledger.productive, packed.productive)
  assert 0 < packed.productive.sum() < packed.hired.sum()
  np.testing.assert_array_equal(states.ledger.effective, packed.effective)
  np.testing.assert_array_equal(
      jax.vmap(COLLECTIVE.spent_tokens)(states), packed.output_tokens
  )
  progress = jax.vmap(COLLECTIVE.env.progress)(
      tasks, states.world, states.clock_ms
  )
  np.testing.assert_array_equal(progress, packed.progress)


def test_deadlines_organisations_and_channels_compile_nothing_anew():
  played()
  compiled = len(TRACES)
  for deadline_ms in (1, 7000, 33_333):
    play(rules=RULES._replace(deadline_ms=RULES.deadline_ms * 0 + deadline_ms))
  play(rules=jax.tree.map(lambda x: x[::-1], RULES))
  for organisation in ('solo', 'flat', 'ceo'):
    rules = COLLECTIVE.config.rules(
        9000, organisation=organisation, direct=False, board=False
    )
    play(rules=by_hand.batch_rules([rules] * BATCH))
  assert len(TRACES) == compiled


def test_seeds_differ_in_every_random_outcome():
  # Of the same tasks, and with agents that are all there from the start.
  rules = by_hand.batch_rules(
      [COLLECTIVE.config.rules(20_000, organisation='flat')] * BATCH
  )
  one, two = play(rules=rules).decisions, play(rules=rules, seed=1).decisions
  first = lambda table, part: part(table)[:100].tolist()
  for part in (
      lambda x: x.action.verb,
      lambda x: x.action.target,
      lambda x: x.action.peer,
      lambda x: x.action.symbol,
      lambda x: x.output_tokens,
      lambda x: x.start_ms,
      lambda x: x.log_prob,
  ):
    assert first(one, part) != first(two, part)
  for x, y in zip(inputs(0)[0], inputs(1)[0], strict=True):
    assert (x != y).any()  # Every part of the tasks.


def test_no_key_is_used_twice():
  table = played().decisions
  draws = table.log_prob  # Of the key of every decision.
  assert len(np.unique(draws)) == len(draws)
  # What a turn takes is drawn from another key than what it does.
  medians = np.array([v.output_tokens for v in COLLECTIVE.verbs])
  noise = np.log(table.output_tokens / medians[table.action.verb])
  assert abs(np.corrcoef(noise, draws)[0, 1]) < 0.15


# Groups.


def test_groups_share_a_task_and_no_key():
  rules = jax.tree.map(lambda x: x[:3], RULES)
  index = jnp.array([4, 0, 7])
  make = jax.jit(
      lambda index, rules: rollout.group_inputs(
          COLLECTIVE, jax.random.key(1), index, rules, 2
      )
  )
  tasks, repeated, keys = make(index, rules)
  for x in jax.tree.leaves((tasks, repeated)):
    np.testing.assert_array_equal(x[0::2], x[1::2])
  assert (tasks.effort[0] != tasks.effort[2]).any()
  np.testing.assert_array_equal(repeated.deadline_ms[::2], rules.deadline_ms)
  data = jax.random.key_data(keys)
  assert len({tuple(key) for key in data.tolist()}) == 6
  # A group does not depend on those beside it.
  alone = make(index[1:2], jax.tree.map(lambda x: x[1:2], rules))
  same = np.testing.assert_array_equal
  jax.tree.map(lambda x, y: same(x, y[2:4]), alone[0], tasks)
  same(jax.random.key_data(alone[2]), data[2:4])


# Progress over time.


def test_the_curve_is_what_an_earlier_deadline_would_have_given():
  # Random agents do not look at the deadline, so a rollout under an earlier one
  # is the beginning of the rollout.
  curve = played().rollouts.curve
  for i, time_ms in enumerate(GRID_MS):
    limit_ms = jnp.minimum(RULES.deadline_ms, time_ms)
    earlier = play(rules=RULES._replace(deadline_ms=limit_ms)).rollouts
    np.testing.assert_array_equal(curve[:, i], earlier.progress)


def test_the_curve_rises_to_the_return():
  for policy in (RECORDER, NETWORK):
    rollouts = played(policy).rollouts
    assert (np.diff(rollouts.curve, axis=1) >= 0).all()
    assert (rollouts.curve[:, 0] == 0).all()
    np.testing.assert_array_equal(rollouts.curve[:, -1], rollouts.progress)
    changed = rollouts.curve[:, 1:] != rollouts.curve[:, :-1]
    last = np.where(changed, GRID_MS[1:], 0).max(axis=1)
    assert (rollouts.progress_ms <= last).all()
    assert (rollouts.progress_ms > last - 4000).all()


def test_a_full_buffer_stops_the_loop_and_says_so():
  tasks, keys = inputs()
  rollouts, buffer = jax.jit(
      lambda: rollout.play(
          COLLECTIVE,
          RECORDER,
          (),
          tasks,
          RULES,
          keys,
          chunk_size=32,
          capacity=100,
      )
  )()
  assert buffer.overflow
  assert buffer.count <= 100
  assert rollouts.decisions < played().rollouts.decisions
