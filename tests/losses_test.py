"""Tests of the losses and their weights, with values worked out by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from rlcr_jax import losses

CLIP = 0.2


def gradient(name, log_prob, old_log_prob, advantage):
  """Gradient of the sum with respect to the log-probabilities."""
  loss = lambda x: jnp.sum(
      losses.LOSSES[name](
          x, jnp.array(old_log_prob), jnp.array(advantage), CLIP
      )
  )
  return np.asarray(jax.grad(loss)(jnp.array(log_prob)))


def test_reinforce_by_hand():
  log_prob, advantage = jnp.array([-0.5, -2.0]), jnp.array([2.0, -0.25])
  loss = losses.reinforce(log_prob, jnp.zeros(2), advantage, CLIP)
  assert loss.tolist() == [1.0, -0.5]  # -2 * -0.5 and 0.25 * -2.
  slope = gradient('reinforce', [-0.5, -2.0], [0.0, 0.0], [2.0, -0.25])
  assert slope.tolist() == [-2.0, 0.25]


def test_reinforce_on_logits_is_the_score_function():
  """Of two equally likely actions, the better one taken twice as good."""
  loss = lambda logits: jnp.sum(
      losses.reinforce(
          jax.nn.log_softmax(logits)[jnp.array([0, 1])],
          jnp.zeros(2),
          jnp.array([1.0, -1.0]),
          CLIP,
      )
  )
  # -A (onehot - p): -(0.5, -0.5) + (-0.5, 0.5).
  assert jax.grad(loss)(jnp.zeros(2)).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    'ratio, advantage, loss, slope',
    [
        # Within the clip: -r A, whose slope in log pi is -r A too.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # Better and already likelier by more than 1 + eps: held at 1.2 A.
        (1.5, 2.0, -2.4, 0.0),
        # Worse and already rarer by more than 1 - eps: held at 0.8 A.
        (0.5, -2.0, 1.6, 0.0),
        # On the other side, where there is something to put right: no clip.
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope):
  old = -1.25
  args = [old + math.log(ratio)], [old], [advantage]
  value = losses.clipped_surrogate(*map(jnp.array, args), CLIP)
  np.testing.assert_allclose(value, [loss], rtol=1e-5)
  got = gradient('clipped_surrogate', *args)
  np.testing.assert_allclose(got, [slope], rtol=1e-5)


def test_clipped_surrogate_at_ratio_one_has_the_gradient_of_reinforce():
  log_prob, advantage = [-0.1, -1.0, -3.0], [1.5, -0.5, 0.0]
  np.testing.assert_array_equal(
      gradient('clipped_surrogate', log_prob, log_prob, advantage),
      gradient('reinforce', log_prob, log_prob, advantage),
  )


def test_clipped_surrogate_is_that_of_rlax():
  rng = np.random.default_rng(0)
  old, new = rng.normal(-1.0, 0.3, (2, 64)).astype(np.float32)
  advantage = rng.normal(size=64).astype(np.float32)
  ours = lambda x: jnp.mean(losses.clipped_surrogate(x, old, advantage, CLIP))
  theirs = lambda x: rlax.clipped_surrogate_pg_loss(
      jnp.exp(x - old), jnp.asarray(advantage), CLIP
  )
  np.testing.assert_allclose(ours(new), theirs(new), rtol=1e-5)
  np.testing.assert_allclose(
      jax.grad(ours)(new), jax.grad(theirs)(new), rtol=1e-4, atol=1e-7
  )


def test_reinforce_is_that_of_rlax():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(16, 5)).astype(np.float32)
  action = jnp.array(rng.integers(0, 5, 16))
  advantage = rng.normal(size=16).astype(np.float32)

  def ours(logits):
    log_prob = jax.nn.log_softmax(logits)[jnp.arange(16), action]
    return jnp.mean(losses.reinforce(log_prob, log_prob, advantage, CLIP))

  theirs = lambda logits: rlax.policy_gradient_loss(
      logits, action, jnp.asarray(advantage), jnp.ones(16)
  )
  np.testing.assert_allclose(ours(logits), theirs(logits), rtol=1e-5)
  np.testing.assert_allclose(
      jax.grad(ours)(logits), jax.grad(theirs)(logits), rtol=1e-4, atol=1e-7
  )


# Decisions of 3 agents in 4 rollouts: two agents with 1 and 3, one with 4,
# three with 2 each, and a rollout whose group has no signal.
COUNTS = [[1, 3, 0], [4, 0, 0], [2, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize(
    'aggregation, expected',
    [
        # Each of the 14 decisions weighs the same.
        ('decision_mean', [[1 / 14] * 3] * 3),
        # Each of 3 rollouts weighs 1 / 3, shared by 4, 4 and 6 decisions.
        ('rollout_mean', [[1 / 12] * 3, [1 / 12] * 3, [1 / 18] * 3]),
        # Each rollout's third is shared by its 2, 1 and 3 agents, and then by
        # the decisions of each.
        (
            'agent_mean',
            [[1 / 6, 1 / 18, 0], [1 / 12, 0, 0], [1 / 18, 1 / 18, 1 / 18]],
        ),
        # 50 decisions are expected of each of 4 rollouts, whatever they took.
        ('constant', [[1 / 200] * 3] * 3),
    ],
)
def test_weights_by_hand(aggregation, expected):
  counts = jnp.array(COUNTS)
  weight = np.asarray(losses.weights(aggregation, counts, 50.0))
  assert weight.shape == (4, 3) and weight.dtype == np.float32
  taken = np.array(COUNTS)[:3] > 0  # Others weigh no decision.
  np.testing.assert_allclose(
      weight[:3][taken], np.array(expected)[taken], rtol=1e-6
  )
  total = float((weight * counts).sum())
  assert total == pytest.approx(0.07 if aggregation == 'constant' else 1.0)


@pytest.mark.parametrize(
    'aggregation, equal',
    [
        ('decision_mean', lambda w: w[w > 0]),
        ('rollout_mean', lambda w: (w * COUNTS).sum(1)[:3]),
        ('agent_mean', lambda w: (w * COUNTS)[0][:2]),
        ('agent_mean', lambda w: (w * COUNTS)[2]),
        ('agent_mean', lambda w: (w * COUNTS).sum(1)[:3]),
    ],
)
def test_what_an_aggregation_weighs_equally(aggregation, equal):
  weight = np.asarray(losses.weights(aggregation, jnp.array(COUNTS), 50.0))
  parts = equal(weight * (np.array(COUNTS) > 0))
  np.testing.assert_allclose(parts, parts[0], rtol=1e-6)


def test_only_agent_mean_gives_agents_of_a_rollout_equal_shares():
  shares = {}
  for aggregation in losses.AGGREGATIONS:
    weight = losses.weights(aggregation, jnp.array(COUNTS), 50.0)
    shares[aggregation] = np.asarray(weight * jnp.array(COUNTS))[0, :2]
  equal = {name: share[0] == share[1] for name, share in shares.items()}
  assert equal.pop('agent_mean') and not any(equal.values())
  for name in equal:  # The second agent decided three times as often.
    assert shares[name][1] == pytest.approx(3 * shares[name][0])


def test_a_constant_weighs_a_decision_the_same_in_any_batch():
  """Not only within a batch: longer rollouts do not make it count less."""
  longer = 3 * jnp.array(COUNTS)
  weight = losses.weights('constant', jnp.array(COUNTS), 50.0)
  assert (weight == 1 / 200).all()
  assert (losses.weights('constant', longer, 50.0) == weight).all()
  for name in ('decision_mean', 'rollout_mean', 'agent_mean'):
    before = losses.weights(name, jnp.array(COUNTS), 50.0)[:3]
    after = losses.weights(name, longer, 50.0)[:3]
    taken = np.array(COUNTS)[:3] > 0
    np.testing.assert_allclose(
        after[taken], before[taken] / 3, rtol=1e-6, err_msg=name
    )


@pytest.mark.parametrize(
    'aggregation', ['decision_mean', 'rollout_mean', 'agent_mean']
)
def test_rollouts_without_signal_are_not_in_the_denominators(aggregation):
  weight = losses.weights(aggregation, jnp.array(COUNTS), 50.0)
  without = losses.weights(aggregation, jnp.array(COUNTS[:3]), 50.0)
  np.testing.assert_array_equal(weight[:3], without)


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_weights_are_finite_when_nothing_counts(aggregation):
  weight = losses.weights(aggregation, jnp.zeros((2, 3), jnp.int32), 50.0)
  assert np.isfinite(weight).all()


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
@pytest.mark.parametrize('devices', [2, 4])
def test_weights_do_not_depend_on_the_split_over_devices(aggregation, devices):
  counts = jnp.array(COUNTS)
  whole = losses.weights(aggregation, counts, 50.0)
  total = functools.partial(jax.lax.psum, axis_name='data')
  part = lambda x: losses.weights(aggregation, x, 50.0, total)
  split = jax.vmap(part, axis_name='data')(counts.reshape(devices, -1, 3))
  np.testing.assert_allclose(split.reshape(4, 3), whole, rtol=1e-6)
