"""Tests of the estimators, with values worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from rlcr_jax import advantages

NAN, INF = float('nan'), float('inf')


def estimate_all(name, returns, counts):
  returns = jnp.asarray(returns, jnp.float32)
  result = advantages.estimate(name, returns, jnp.asarray(counts, jnp.int32))
  return advantages.Advantages(*map(np.asarray, result))


def estimate(name, returns):
  """Of collectives of three, of which all have decided: one of the three."""
  result = estimate_all(name, returns, np.ones((*np.shape(returns), 3)))
  assert (result.values == result.values[:, :, :1]).all()
  return result._replace(values=result.values[:, :, 0])


@pytest.mark.parametrize(
    'name, expected',
    [
        # Means are 0.5 and 0.25.
        ('group_mean', [[-0.5, 0.5, 0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]),
        # 4 / 3 as much.
        ('rloo', [[-2 / 3, 2 / 3, 2 / 3, -2 / 3], [1, -1 / 3, -1 / 3, -1 / 3]]),
        # Standard deviations are 0.5 and sqrt(0.75 / 4) = sqrt(3) / 4.
        (
            'z_score',
            [[-1, 1, 1, -1], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]],
        ),
        # The same for an agent that decides as often in every rollout.
        (
            'agent_z_score',
            [[-1, 1, 1, -1], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]],
        ),
    ],
)
def test_by_hand(name, expected):
  result = estimate(name, [[0, 1, 1, 0], [1, 0, 0, 0]])
  np.testing.assert_allclose(result.values, expected, rtol=1e-6)
  assert result.values.dtype == np.float32
  assert result.informative.tolist() == [True, True]
  assert result.finite.tolist() == [True, True]


def test_rloo_is_the_return_less_the_mean_of_the_others():
  returns = np.array([[0.1, 0.7, 0.4], [0.2, 0.2, 0.9]])
  others = [[np.delete(row, i).mean() for i in range(3)] for row in returns]
  result = estimate('rloo', returns)
  np.testing.assert_allclose(result.values, returns - others, atol=1e-6)
  group_mean = estimate('group_mean', returns).values
  np.testing.assert_allclose(result.values, group_mean * 1.5, atol=1e-6)


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_equal_returns_are_exactly_zero_and_not_informative(name):
  # In float32 the mean of eight times 0.35 need not be 0.35.
  result = estimate(name, [[0.35] * 8, [0.1] * 8, [0.0] * 8, [1.0] * 8])
  assert not result.values.any()
  assert not result.informative.any()
  assert result.finite.all()


@pytest.mark.parametrize(
    'name, rest, one',
    [
        ('group_mean', -0.00125, 0.00875),  # The mean is 0.35125.
        ('rloo', -0.01 / 7, 0.01),
        ('z_score', -(7**-0.5), 7**0.5),  # std = 0.00125 * sqrt(7).
        ('agent_z_score', -(7**-0.5), 7**0.5),
    ],
)
def test_one_of_eight_differs_by_a_hundredth(name, rest, one):
  result = estimate(name, [[0.35] * 7 + [0.36]])
  assert result.informative.tolist() == [True]
  expected = [[rest] * 7 + [one]]
  np.testing.assert_allclose(result.values, expected, rtol=2e-4)


def test_rounding_noise_is_no_signal():
  just_above = np.nextafter(np.float32(0.35), np.float32(1))
  result = estimate('z_score', [[0.35] * 7 + [just_above]])
  assert not result.values.any() and not result.informative.any()


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
@pytest.mark.parametrize('bad', [NAN, INF, -INF])
def test_a_nonfinite_return_silences_its_own_group_only(name, bad):
  good = [[0.0, 1.0, 0.25], [0.5, 0.75, 0.5]]
  expected = estimate(name, good).values
  result = estimate(name, [good[0], [0.0, bad, 1.0], good[1]])
  np.testing.assert_array_equal(result.values[[0, 2]], expected)
  assert not result.values[1].any()
  assert result.finite.tolist() == [True, False, True]
  assert result.informative.tolist() == [True, False, True]


def test_groups_are_tasks_whatever_the_number_of_agents():
  # Two rollouts of one task: a group of two, for collectives of any size.
  result = estimate('group_mean', [[0.0, 1.0]])
  assert result.values.tolist() == [[-0.5, 0.5]]
  for shape in [(2,), (1, 2, 2)]:  # No tasks; an axis of agents.
    with pytest.raises(AssertionError):
      estimate_all('group_mean', np.zeros(shape), np.ones((1, 2, 2)))
  with pytest.raises(AssertionError):  # Counts of another group size.
    estimate_all('group_mean', np.zeros((1, 2)), np.ones((1, 3, 2)))


def test_groups_do_not_mix():
  returns = np.array([[0.0, 1.0], [10.0, 14.0]])
  result = estimate('group_mean', returns)
  assert result.values.tolist() == [[-0.5, 0.5], [-2.0, 2.0]]


# Agents.


def test_agents_are_compared_with_themselves_weighed_by_decisions():
  """Four rollouts with returns 0, 1, 1, 0; teams and turns are unequal.

  Agent 0 decides once in each: mean and deviation 1/2. Agent 1 decides in the
  first two, three times and once: mean 1/4, deviation sqrt(3)/4. Agent 2 has
  been in the second and the third only, with return 1 both times; agent 3 in
  one, and agent 4 in none.
  """
  counts = [[1, 3, 0, 0, 0], [1, 1, 2, 0, 0], [1, 0, 5, 7, 0], [1, 0, 0, 0, 0]]
  result = estimate_all('agent_z_score', [[0, 1, 1, 0]], [counts])
  root = 3**0.5
  expected = [
      [-1, -1 / root, 0, 0, 0],
      [1, root, 0, 0, 0],
      [1, 0, 0, 0, 0],
      [-1, 0, 0, 0, 0],
  ]
  np.testing.assert_allclose(result.values[0], expected, rtol=1e-6, atol=1e-7)
  assert result.values.dtype == np.float32 and result.informative.all()
  assert not result.values[0][:, 2:].any()  # Exactly.


def test_an_agents_own_advantages_have_mean_0_and_deviation_1():
  rng = np.random.default_rng(0)
  returns, counts = rng.random((6, 5)), rng.integers(0, 4, (6, 5, 3))
  counts[:, :2] += 1  # In two rollouts at least.
  values = estimate_all('agent_z_score', returns, counts).values
  weight = counts / counts.sum(1, keepdims=True)
  np.testing.assert_allclose((weight * values).sum(1), 0.0, atol=1e-5)
  np.testing.assert_allclose((weight * values**2).sum(1), 1.0, rtol=1e-4)


# A critic.


def gae(values, returns, start_ms, end_ms, sequence, **changes):
  fields = {'gamma': 1.0, 'lambda_': 1.0, 'discount_per': 'turn'} | changes
  floats = (jnp.asarray(x, jnp.float32) for x in (values, returns))
  ints = (jnp.asarray(x, jnp.int32) for x in (start_ms, end_ms, sequence))
  call = jax.jit(functools.partial(advantages.gae, **fields))
  return np.asarray(call(*floats, *ints))


def reference(values, returns, start_ms, end_ms, sequence, **fields):
  """The definition, one agent after the other and from its end."""
  gamma, lambda_ = fields['gamma'], fields['lambda_']
  result = np.zeros(len(values))
  for agent in set(sequence) - {-1}:
    rows = [i for i, s in enumerate(sequence) if s == agent]
    ahead = returns[rows[-1]]
    until_ms, discount, advantage = end_ms[rows[-1]], 1.0, 0.0
    for i in reversed(rows):
      if fields['discount_per'] == 'second':
        discount = gamma ** ((until_ms - start_ms[i]) / 1000)
      delta = discount * ahead - values[i]
      advantage = delta + discount * lambda_ * advantage
      result[i] = advantage
      ahead, until_ms, discount = values[i], start_ms[i], gamma
  return result


def irregular(size=60, seed=0):
  """Decisions of 7 agents in 3 rollouts, in order of time, and of nobody."""
  rng = np.random.default_rng(seed)
  sequence = rng.choice([-1, 0, 2, 3, 5, 8, 9, 10], size)
  rollout = np.maximum(sequence, 0) // 4
  return {
      'values': rng.normal(size=size),
      'returns': np.array([0.25, -1.0, 0.75])[rollout],
      'start_ms': np.sort(rng.integers(0, 60_000, size)),
      'end_ms': np.array([60_000, 75_500, 90_000])[rollout],
      'sequence': sequence,
  }


@pytest.mark.parametrize('discount_per', advantages.DISCOUNTS)
@pytest.mark.parametrize('gamma, lambda_', [(1, 1), (0.9, 0.5), (0.97, 0.95)])
def test_gae_of_irregular_agents_that_lie_between_each_other(
    discount_per, gamma, lambda_
):
  fields = {'gamma': gamma, 'lambda_': lambda_, 'discount_per': discount_per}
  played = irregular()
  found = gae(**played, **fields)
  expected = reference(*played.values(), **fields)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert not found[played['sequence'] < 0].any()


@pytest.mark.parametrize('discount_per', advantages.DISCOUNTS)
def test_gae_is_that_of_rlax(discount_per):
  """A time step is a decision; after the last one follows a value of 0."""
  fields = {'gamma': 0.9, 'lambda_': 0.7, 'discount_per': discount_per}
  played = irregular(seed=1)
  found = gae(**played, **fields)
  for agent in set(played['sequence']) - {-1}:
    rows = np.flatnonzero(played['sequence'] == agent)
    start_ms, end_ms = played['start_ms'][rows], played['end_ms'][rows[-1]]
    if discount_per == 'second':
      discount = 0.9 ** (np.diff(start_ms, append=end_ms) / 1000)
    else:
      discount = np.where(rows == rows[-1], 1.0, 0.9)
    final = discount[-1] * played['returns'][rows[-1]]
    expected = rlax.truncated_generalized_advantage_estimation(
        jnp.zeros(len(rows)).at[-1].set(final),
        jnp.asarray(discount, jnp.float32),
        0.7,
        jnp.asarray(np.append(played['values'][rows], 0.0), jnp.float32),
    )
    np.testing.assert_allclose(found[rows], expected, rtol=1e-4, atol=1e-5)


def test_gae_by_hand():
  """Two agents by turns; the second decides once more, and gamma is 1/2.

  The first: deltas 1/2 * 4 - 2 = 0 and 8 - 4 = 4; with lambda 1/2 its
  advantages are 0 + 1/4 * 4 = 1, and 4. The second: 1/2 * 2 - 4 = -3,
  1/2 * 6 - 2 = 1 and 8 - 6 = 2; so 2, 1 + 1/2 = 3/2 and -3 + 3/8 = -21/8.
  """
  found = gae(
      values=[2, 4, 4, 2, 6],
      returns=[8] * 5,
      start_ms=[0] * 5,
      end_ms=[0] * 5,
      sequence=[0, 1, 0, 1, 1],
      gamma=0.5,
      lambda_=0.5,
  )
  assert found.tolist() == [1, -2.625, 4, 1.5, 2]


def test_gae_per_second_by_hand():
  """Decisions at 0, 1 and 3 s of a rollout of 6 s; gamma is 1/2.

  Discounts are 1/2, 1/4 and 1/8. Deltas: 1/2 * 4 - 1 = 1, 1/4 * 8 - 4 = -2 and
  1/8 * 16 - 8 = -6. With lambda 1/2, A is -6; -2 - 6/8 = -11/4; and
  1 - 11/16 = 5/16.
  """
  found = gae(
      values=[1, 4, 8],
      returns=[16] * 3,
      start_ms=[0, 1000, 3000],
      end_ms=[6000] * 3,
      sequence=[5] * 3,
      gamma=0.5,
      lambda_=0.5,
      discount_per='second',
  )
  np.testing.assert_allclose(found, [0.3125, -2.75, -6], rtol=1e-6)


def test_the_discount_per_second_does_not_ask_how_many_turns_it_took():
  """With lambda = 1 a first decision is worth the same, R and V alike."""
  times = {'returns': [1.0] * 4, 'end_ms': [8000] * 4}
  found = gae(
      values=[0.25] * 4,
      start_ms=[0, 0, 1500, 4000],
      sequence=[0, 1, 1, 1],
      gamma=0.9,
      discount_per='second',
      **times,
  )
  expected = 0.9**8 - 0.25
  np.testing.assert_allclose(found[:2], expected, rtol=1e-5)
  np.testing.assert_allclose(found[2:], 0.9 ** np.array([6.5, 4]) - 0.25, 1e-5)


@pytest.mark.parametrize('discount_per', advantages.DISCOUNTS)
def test_without_discount_and_with_lambda_1_it_is_return_less_value(
    discount_per,
):
  played = irregular()
  found = gae(**played, discount_per=discount_per)
  used = played['sequence'] >= 0
  expected = (played['returns'] - played['values'])[used]
  np.testing.assert_allclose(found[used], expected, rtol=1e-5, atol=1e-6)


def test_with_lambda_0_it_is_the_error_of_one_step():
  found = gae(
      values=[0.5, 0.25, 1.0],
      returns=[2.0] * 3,
      start_ms=[0, 1, 2],
      end_ms=[3] * 3,
      sequence=[0] * 3,
      gamma=0.5,
      lambda_=0.0,
  )
  assert found.tolist() == [0.5 * 0.25 - 0.5, 0.5 * 1.0 - 0.25, 2.0 - 1.0]


def test_what_belongs_to_nobody_may_hold_anything():
  played = irregular()
  clean = gae(**played, gamma=0.9, discount_per='second')
  nobody = played['sequence'] < 0
  for field, garbage in (
      ('values', NAN),
      ('returns', INF),
      ('start_ms', 2**31 - 1),
      ('end_ms', -(2**31)),
  ):
    played[field] = np.where(nobody, garbage, played[field])
  dirty = gae(**played, gamma=0.9, discount_per='second')
  np.testing.assert_array_equal(dirty, clean)
  assert not gae(**(played | {'sequence': np.full(60, -1)})).any()
