"""Tests of the update.

Most run on a toy: decisions of a linear policy, fixed as if they had been
played, whose gradients can be worked out. The rest play.
"""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import advantages
from rlcr_jax import collective as collective_lib
from rlcr_jax import decisions
from rlcr_jax import incentives
from rlcr_jax import learner as learner_lib
from rlcr_jax import losses
from rlcr_jax import rollout
from rlcr_jax import train
from rlcr_jax.incentives import IncentiveConfig
from rlcr_jax.learner import Knobs
from rlcr_jax.learner import RlcrConfig
from rlcr_jax.observation import Action
from rlcr_jax.observation import Observation
from tests import tiny

NAN, INF = float('nan'), float('inf')

# Toy.


class Linear:
  """Three verbs, whose logits are linear in two features."""

  def init(self, key):
    return {'w': 0.3 * jax.random.normal(key, (2, 3))}

  def log_prob(self, params, obs, action):
    log_p = jax.nn.log_softmax(obs.me @ params['w'])
    taken = jnp.take_along_axis(log_p, action.verb[:, None], 1)[:, 0]
    return taken, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


class Value:
  """Linear in the two features."""

  def init(self, key):
    return {'v': 0.3 * jax.random.normal(key, (2,))}

  def value(self, params, obs):
    return obs.me @ params['v']


class Played(NamedTuple):
  """What was decided in P groups of G rollouts, D decisions in each group.

  It is handed to a learner in place of rules, which are split in the same way.
  """

  progress: np.ndarray  # [P, G] float32.
  time_ms: np.ndarray  # [P, G] int32.
  start_ms: np.ndarray  # [P, D] int32.
  rollout: np.ndarray  # [P, D] int32, within the group.
  agent: np.ndarray  # [P, D] int32.
  me: np.ndarray  # [P, D, 2] float32.
  verb: np.ndarray  # [P, D] int32.
  trainable: np.ndarray  # [P, D] bool.
  overflow: np.ndarray  # [P] bool.
  padding: np.ndarray  # [P] float32: all numbers behind the last decision.


def make_played(tasks=4, group_size=2, size=7, **changes):
  """Decisions drawn at random; agents and rollouts take unequally many."""
  rng = np.random.default_rng(0)
  played = Played(
      progress=rng.random((tasks, group_size), np.float32),
      time_ms=np.full((tasks, group_size), 1000 * size, np.int32),
      start_ms=np.tile(np.arange(size, dtype=np.int32) * 1000, (tasks, 1)),
      rollout=rng.integers(0, group_size, (tasks, size), np.int32),
      agent=rng.integers(0, 2, (tasks, size), np.int32),
      me=rng.normal(size=(tasks, size, 2)).astype(np.float32),
      verb=rng.integers(0, 3, (tasks, size), np.int32),
      trainable=np.ones((tasks, size), bool),
      overflow=np.zeros(tasks, bool),
      padding=np.zeros(tasks, np.float32),
  )
  return played._replace(**changes)


ASKED = {}  # What was last asked to be played.


def play_groups(collective, policy, params, key, index, played, **asked):
  """Stands in for `rollout.play_groups`."""
  del collective, key
  ASKED.update(asked, tasks=index.shape[0])
  groups, group_size = played.progress.shape
  place = jnp.arange(groups)[:, None] * group_size

  def pack(x):
    rows = x.reshape(-1, *x.shape[2:])
    blank = jnp.full((asked['chunk_size'], *rows.shape[1:]), played.padding[0])
    return jnp.concatenate([rows, blank.astype(x.dtype)])

  verb = pack(played.verb)
  zeros = jnp.zeros_like(verb)
  obs = Observation(pack(played.me), *[zeros] * (len(Observation._fields) - 1))
  action = Action(verb, zeros, zeros, zeros)
  rows = decisions.Decision(
      rollout=pack(played.rollout + place),
      agent=pack(played.agent),
      start_ms=pack(played.start_ms),
      observation=obs,
      action=action,
      log_prob=policy.log_prob(params, obs, action)[0],
      output_tokens=zeros,
      trainable=pack(played.trainable),
  )
  count = jnp.int32(played.verb.size)
  progress = played.progress.reshape(-1)
  blank = dict.fromkeys(rollout.Rollouts._fields, jnp.zeros_like(progress))
  blank |= {'iterations': jnp.int32(0), 'decisions': count}
  rollouts = rollout.Rollouts(**blank)._replace(
      progress=progress, time_ms=played.time_ms.reshape(-1)
  )
  return rollouts, decisions.Buffer(rows, count, jnp.any(played.overflow))


def toy_part(tasks, **changes):
  config = collective_lib.CollectiveConfig(num_agents=2)
  collective = types.SimpleNamespace(num_agents=2, num_seats=2, config=config)
  changes = {'critic': Value()} | changes
  return learner_lib.Part(collective, Linear(), tasks, **changes)


def new_learner(devices=1, incentive=None, **config):
  config = {
      'tasks': 4,
      'group_size': 2,
      'chunk_size': 4,
      'max_grad_norm': 1e6,
      'adam_b1': 0.9,
  } | config
  return learner_lib.Learner(
      {'toy': toy_part(config['tasks'])},
      RlcrConfig(**config),
      learner_lib.default_mesh(config['tasks'], devices),
      incentive,
  )


shared_learner = functools.cache(new_learner)


@pytest.fixture
def toy(monkeypatch):
  """Makes learners, each compiled once, that find what is given played."""
  monkeypatch.setattr(rollout, 'play_groups', play_groups)
  return shared_learner


def knobs(learning_rate=0.1, entropy_bonus=0.0):
  return Knobs(jnp.float32(learning_rate), jnp.float32(entropy_bonus))


def host(state):
  """Without the key, which never changes and is not a number."""
  return jax.device_get(state._replace(key=None))


def step(learner, rules, scheduled=None, state=None):
  """States before and after an update, on the host, and the update."""
  state = learner.init(jax.random.key(0)) if state is None else state
  before = host(state)
  after, update = tiny.learn(learner, state, rules, scheduled or knobs())
  return before, host(after), jax.device_get(update)


def adam(state):
  (moments,) = [s for s in state.opt_state if hasattr(s, 'mu')]
  return moments


def gradient(learner, state):
  """The gradient of the first update: Adam starts with (1 - b1) times it."""
  share = 1.0 - learner.config.adam_b1
  return jax.tree.map(lambda mu: mu / share, adam(state).mu)


def assert_close(left, right, rtol=1e-5):
  """Trees of arrays are equal, to a tolerance relative to the largest."""
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    size = np.abs(b).max(initial=0.0)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * size)


def assert_equal(left, right):
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_array_equal(a, b)


def expected_gradient(played, w, weight):
  """`sum_d weight_d * -A_d * me_d (onehot_d - p_d)`, in NumPy."""
  advantage = played.progress - played.progress.mean(1, keepdims=True)
  result = np.zeros((2, 3))
  for p, d in np.ndindex(played.verb.shape):
    me, verb = played.me[p, d].astype(np.float64), played.verb[p, d]
    prob = np.exp(me @ w) / np.exp(me @ w).sum()
    score = np.outer(me, np.eye(3)[verb] - prob)
    result -= weight[p, d] * advantage[p, played.rollout[p, d]] * score
  return result


def test_gradient_by_hand(toy):
  """Two agents, two rollouts of one task: a group of two, of three turns.

  All verbs are equally likely at first, so the score of verb v is onehot - 1/3.
  Advantages are -0.25 and 0.25; the first agent decides verb 0 in the first
  rollout, and both verb 1 in the second. With -A / 3 for each:
  1/12 (2/3, -1/3, -1/3) - 2/12 (-1/3, 2/3, -1/3) = (1/9, -5/36, 1/36).
  """
  played = make_played(
      tasks=1,
      size=3,
      progress=np.float32([[0.25, 0.75]]),
      rollout=np.int32([[0, 1, 1]]),
      agent=np.int32([[0, 0, 1]]),
      me=np.float32([[[1, 0]] * 3]),
      verb=np.int32([[0, 1, 1]]),
  )
  learner = toy(tasks=1)
  state = learner.init(jax.random.key(0))
  state = state._replace(params={'w': jnp.zeros((2, 3))})
  _, after, update = step(learner, played, state=state)
  expected = [[1 / 9, -5 / 36, 1 / 36], [0, 0, 0]]
  np.testing.assert_allclose(gradient(learner, after)['w'], expected, atol=1e-6)
  np.testing.assert_allclose(
      update.grad_norm, np.linalg.norm(expected), rtol=1e-5
  )
  # sum -A log(1/3) / 3 = (-0.25 + 0.25 + 0.25) * log(3) / 3.
  assert update.loss == pytest.approx(np.log(3) / 12, rel=1e-5)
  assert update.entropy == pytest.approx(np.log(3), rel=1e-5)
  assert update.returns.tolist() == [[0.25, 0.75]]
  # Adam's first step is as long as the learning rate, against the gradient.
  np.testing.assert_allclose(
      after.params['w'], [[-0.1, 0.1, -0.1], [0, 0, 0]], atol=1e-4
  )
  assert after.step == 1


@pytest.mark.parametrize('loss', losses.LOSSES)
def test_gradient_is_the_score_function(toy, loss):
  learner, played = toy(loss=loss), make_played()
  before, after, _ = step(learner, played)
  weight = np.full(played.verb.shape, 1 / played.verb.size)
  expected = expected_gradient(played, before.params['w'], weight)
  assert_close(gradient(learner, after)['w'], expected)


def expected_weights(played, aggregation, constant):
  """[P, D], from counts [P, G, N] of decisions."""
  at = (np.arange(len(played.verb))[:, None], played.rollout, played.agent)
  counts = np.zeros((*played.progress.shape, 2))
  np.add.at(counts, at, 1)
  taken = counts.sum(2, keepdims=True)
  busy = (taken > 0).sum()
  divisor = {
      'decision_mean': counts.sum(),
      'rollout_mean': busy * taken,
      'agent_mean': busy * (counts > 0).sum(2, keepdims=True) * counts,
      'constant': constant * played.progress.size,
  }[aggregation]
  return 1 / np.broadcast_to(divisor, counts.shape)[at]


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
@pytest.mark.parametrize('devices', [1, 4])
def test_aggregations_end_to_end(toy, aggregation, devices):
  learner = toy(devices, aggregation=aggregation, constant=5.0)
  played = make_played()
  before, after, _ = step(learner, played)
  weight = expected_weights(played, aggregation, 5.0)
  expected = expected_gradient(played, before.params['w'], weight)
  assert_close(gradient(learner, after)['w'], expected)


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS)
def test_relabelled_agents_change_nothing(toy, aggregation):
  learner = toy(1, aggregation=aggregation, constant=5.0)
  played = make_played()
  swapped = played._replace(agent=1 - played.agent)
  assert_close(
      *(gradient(learner, step(learner, p)[1]) for p in (swapped, played))
  )


def test_mask_is_aligned_with_decisions(toy):
  """Of four decisions only the third is trained: it has all the weight."""
  mask = np.array([[False, False, True, False]])
  played = make_played(tasks=1, size=4, trainable=mask)
  learner = toy(tasks=1)
  before, after, update = step(learner, played)
  expected = expected_gradient(played, before.params['w'], mask)
  assert_close(gradient(learner, after)['w'], expected)
  logits = played.me[0, 2] @ before.params['w']
  prob = np.exp(logits) / np.exp(logits).sum()
  entropy = -(prob * np.log(prob)).sum()  # Of that decision alone.
  assert update.entropy == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize('advantage', ['group_mean', 'gae'])
@pytest.mark.parametrize('loss', losses.LOSSES)
def test_frozen_decisions_have_no_gradient_at_all(toy, loss, advantage):
  """Whatever they were, the update is the same to the bit."""
  mask = np.arange(28).reshape(4, 7) % 3 > 0
  learner = toy(loss=loss, advantage=advantage)
  played = make_played(trainable=mask)
  clean = step(learner, played)[1:]
  assert clean[1].grad_norm > 0
  other = played._replace(
      verb=np.where(mask, played.verb, 2 - played.verb),
      me=np.where(mask[..., None], played.me, 50.0 - played.me),
      start_ms=np.where(mask, played.start_ms, 0),
  )
  assert_equal(step(learner, other)[1:], clean)


@pytest.mark.parametrize('advantage', ['group_mean', 'gae'])
def test_chunks_and_updates_of_frozen_decisions_are_harmless(toy, advantage):
  """Of seven chunks of four decisions the first three are not trained."""
  mask = np.arange(28).reshape(4, 7) >= 12
  learner = toy(advantage=advantage)
  before, after, update = step(learner, make_played(trainable=mask))
  assert update.finite and update.grad_norm > 0
  assert (after.params['w'] != before.params['w']).any()
  nothing = make_played(trainable=np.zeros((4, 7), bool))
  moving, _ = tiny.learn(
      learner, learner.init(jax.random.key(0)), make_played(), knobs()
  )  # Adam has momentum.
  before, after, update = step(
      learner, nothing, knobs(entropy_bonus=0.5), state=moving
  )
  assert update.finite and update.grad_norm == 0 and update.loss == 0
  assert after.step == before.step + 1
  assert_equal(after._replace(step=0), before._replace(step=0))


@pytest.mark.parametrize('chunk_size', [1, 5, 28, 1000])
def test_update_does_not_depend_on_the_chunks(toy, chunk_size):
  whole, split = toy(), toy(chunk_size=chunk_size)
  _, expected, told = step(whole, make_played())
  _, after, update = step(split, make_played())
  assert_close(gradient(split, after), gradient(whole, expected))
  assert_close(after.params, expected.params)
  for name in ('loss', 'entropy', 'grad_norm'):
    assert_close(getattr(update, name), getattr(told, name))


@pytest.mark.parametrize('padding', [NAN, INF, -1e30, 3.0])
def test_garbage_in_padded_slots_changes_nothing(toy, padding):
  learner = toy(chunk_size=5)  # Of 28 decisions the last chunk has 3.
  clean = step(learner, make_played())[1:]
  dirty = make_played(padding=np.full(4, padding, np.float32))
  dirty = step(learner, dirty)[1:]
  assert dirty[1].finite and dirty[1].grad_norm > 0
  assert_equal(dirty, clean)


def without(played, group):
  """As if a group had never been played."""
  return Played(*(np.delete(x, group, axis=0) for x in played))


@pytest.mark.parametrize('bad', [NAN, INF, -INF])
@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS[:3])
def test_a_nonfinite_return_costs_its_own_group_only(toy, bad, aggregation):
  played = make_played()
  played.progress[2, 1] = bad
  learner = toy(1, aggregation=aggregation, constant=5.0)
  _, after, update = step(learner, played)
  assert update.nonfinite_groups == 1 and update.informative == 0.75
  rest = toy(tasks=3, aggregation=aggregation)
  _, expected, told = step(rest, without(played, 2))
  assert update.finite and told.nonfinite_groups == 0
  assert_close(gradient(learner, after), gradient(rest, expected))
  assert_close(update.loss, told.loss)
  assert_close(update.entropy, told.entropy)


def test_an_incentive_that_fails_on_one_group_costs_that_group(
    toy, monkeypatch
):
  groups = jnp.arange(4)[:, None]
  monkeypatch.setitem(
      incentives.INCENTIVES,
      'broken',
      lambda config, played, knobs: jnp.where(
          groups == 2, NAN, played.progress
      ),
  )
  learner = toy(incentive=IncentiveConfig('broken'))
  rest = toy(tasks=3, aggregation='decision_mean')
  _, after, update = step(learner, make_played())
  _, expected, _ = step(rest, without(make_played(), 2))
  assert update.nonfinite_groups == 1 and update.finite
  assert_close(gradient(learner, after), gradient(rest, expected))


@pytest.mark.parametrize('aggregation', losses.AGGREGATIONS[:3])
def test_a_group_without_signal_is_not_in_the_denominators(toy, aggregation):
  played = make_played()
  played.progress[1] = 0.35
  learner = toy(1, aggregation=aggregation, constant=5.0)
  _, after, update = step(learner, played)
  assert update.informative == 0.75 and update.nonfinite_groups == 0
  rest = toy(tasks=3, aggregation=aggregation)
  _, expected, _ = step(rest, without(played, 1))
  assert_close(gradient(learner, after), gradient(rest, expected))


@pytest.mark.parametrize('advantage', advantages.ESTIMATORS)
def test_without_any_signal_nothing_changes(toy, advantage):
  played = make_played(progress=np.full((4, 2), 0.35, np.float32))
  learner = toy(advantage=advantage)
  fresh = learner.init(jax.random.key(0))
  moving, _ = tiny.learn(
      learner, fresh, make_played(), knobs()
  )  # Adam has momentum.
  before, after, update = step(
      learner, played, knobs(entropy_bonus=0.5), state=moving
  )
  assert_equal(after.params, before.params)
  assert_equal(after.opt_state, before.opt_state)
  assert update.finite and update.informative == 0.0
  scalars = (update.loss, update.entropy, update.grad_norm, update.log_prob_gap)
  assert scalars == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize('devices', [1, 4])
def test_overflow_anywhere_leaves_parameters_and_optimiser(toy, devices):
  learner = toy(devices, aggregation='decision_mean', constant=5.0)
  overflow = np.array([False, False, True, False])
  before, after, update = step(learner, make_played(overflow=overflow))
  assert update.overflow
  assert_equal(after.params, before.params)
  assert_equal(after.opt_state, before.opt_state)


def test_a_nonfinite_loss_leaves_parameters_and_optimiser(toy):
  played = make_played()
  played.me[3, 0] = NAN
  before, after, update = step(toy(), played)
  assert not update.finite and not update.overflow
  assert_equal(after.params, before.params)
  assert_equal(after.opt_state, before.opt_state)


def test_nonfinite_parameters_are_not_kept(toy):
  learner = toy()
  before, after, update = step(learner, make_played(), knobs(np.inf))
  assert np.isfinite(update.loss) and np.isfinite(update.grad_norm)
  assert not update.finite
  assert_equal(after.params, before.params)


def test_several_epochs_move_further(toy):
  """With a small step the ratios stay within the clip: four times as far."""
  moved = {}
  for epochs in (1, 4):
    learner = toy(loss='clipped_surrogate', epochs=epochs)
    before, after, update = step(learner, make_played(), knobs(1e-3))
    assert update.finite
    moved[epochs] = after.params['w'] - before.params['w']
    assert adam(after).count == epochs
  np.testing.assert_allclose(moved[4], 4 * moved[1], rtol=0.1)


def test_the_clip_stops_what_has_gone_far_enough(toy):
  """After one huge step all that gained is clipped, and nothing is left."""
  played = make_played(
      tasks=1,
      size=2,
      progress=np.float32([[0.0, 1.0]]),
      rollout=np.int32([[0, 1]]),
      me=np.float32([[[1, 0], [1, 0]]]),
      verb=np.int32([[0, 1]]),
  )
  learner = toy(tasks=1, loss='clipped_surrogate', epochs=2, clip=0.2)
  _, _, update = step(learner, played, knobs(1.0))
  assert update.grad_norm == 0.0  # Of the second epoch.
  # A = 0.5 held at ratio 1.2, and A = -0.5 held at ratio 0.8.
  assert update.loss == pytest.approx((-0.6 + 0.4) / 2, rel=1e-5)


def test_recomputed_log_probabilities_are_the_sampled_ones(toy):
  update = step(toy(), make_played())[2]
  assert update.log_prob_gap == pytest.approx(0.0, abs=1e-6)


# Agents of one rollout with advantages of their own.


def test_agents_are_given_their_own_advantages(toy):
  """Returns 0, 0 and 1; agent 1 decides in the last two, agent 0 in all.

  Agent 0, once in each: mean 1/3, deviation sqrt(2)/3. Agent 1, twice and then
  once: the same mean and deviation, of three decisions. Each has 1/6 of the
  weight.
  """
  played = make_played(
      tasks=1,
      group_size=3,
      size=6,
      progress=np.float32([[0, 0, 1]]),
      rollout=np.int32([[0, 1, 1, 1, 2, 2]]),
      agent=np.int32([[0, 0, 1, 1, 0, 1]]),
  )
  learner = toy(tasks=1, group_size=3, advantage='agent_z_score')
  before, after, _ = step(learner, played)
  advantage = np.array([-1, -1, -1, -1, 2, 2]) / 2**0.5
  w, expected = before.params['w'], np.zeros((2, 3))
  for me, verb, a in zip(played.me[0], played.verb[0], advantage, strict=True):
    prob = np.exp(me @ w) / np.exp(me @ w).sum()
    expected -= a / 6 * np.outer(me, np.eye(3)[verb] - prob)
  assert_close(gradient(learner, after)['w'], expected)


# A critic.


def gae_by_loop(played, v, gamma, lambda_):
  """Advantages and values [P, D] per turn, agent by agent from its end."""
  values = played.me.astype(np.float64) @ v
  advantage = np.zeros(values.shape)
  for p, g, n in np.ndindex(*played.progress.shape, 2):
    rows = (played.rollout[p] == g) & (played.agent[p] == n)
    ahead, discount, total = played.progress[p, g], 1.0, 0.0
    for d in np.flatnonzero(rows & played.trainable[p])[::-1]:
      total = discount * ahead - values[p, d] + discount * lambda_ * total
      advantage[p, d], ahead, discount = total, values[p, d], gamma
  return advantage, values


@pytest.mark.parametrize('devices', [1, 4])
@pytest.mark.parametrize('chunk_size', [4, 5, 1000])
def test_gradients_of_policy_and_critic_by_gae(toy, devices, chunk_size):
  learner = toy(
      devices,
      advantage='gae',
      gamma=0.9,
      gae_lambda=0.7,
      chunk_size=chunk_size,
  )
  mask = np.arange(28).reshape(4, 7) % 5 > 0
  played = make_played(trainable=mask)
  before, after, update = step(learner, played)
  w, v = before.params['w'], before.critic.params['v']
  advantage, values = gae_by_loop(played, v, 0.9, 0.7)
  of_policy, of_critic = np.zeros((2, 3)), np.zeros(2)
  for p, d in zip(*np.nonzero(mask), strict=True):
    me, verb = played.me[p, d].astype(np.float64), played.verb[p, d]
    prob = np.exp(me @ w) / np.exp(me @ w).sum()
    score = np.outer(me, np.eye(3)[verb] - prob)
    of_policy -= advantage[p, d] * score / mask.sum()
    of_critic -= 2 * advantage[p, d] * me / mask.sum()
  assert_close(gradient(learner, after)['w'], of_policy)
  assert_close(gradient(learner, after.critic)['v'], of_critic)
  error, target = advantage[mask], (advantage + values)[mask]
  np.testing.assert_allclose(
      update.extra['critic_loss'], np.mean(error**2), rtol=1e-5
  )
  explained = 1 - np.var(error) / np.var(target)
  np.testing.assert_allclose(
      update.extra['explained_variance'], explained, rtol=1e-4, atol=1e-5
  )
  # Adam's first step is as long as the critic's own learning rate.
  moved = after.critic.params['v'] - v
  np.testing.assert_allclose(np.abs(moved), 4e-3, rtol=1e-3)


def test_gae_learns_from_every_finite_group(toy):
  """Also from those whose returns are equal, and from groups of one."""
  played = make_played()
  played.progress[1] = 0.35
  played.progress[2, 1] = NAN
  learner = toy(1, advantage='gae')
  _, after, update = step(learner, played)
  assert update.informative == 0.75 and update.nonfinite_groups == 1
  rest = toy(tasks=3, advantage='gae')
  _, expected, told = step(rest, without(played, 2))
  assert update.finite and told.informative == 1.0
  assert_close(gradient(learner, after), gradient(rest, expected))
  assert_close(after.critic.params, expected.critic.params)
  alone = toy(tasks=4, group_size=1, advantage='gae')
  update = step(alone, make_played(group_size=1))[2]
  assert update.informative == 1.0 and update.grad_norm > 0


def test_overflow_leaves_the_critic_too(toy):
  overflow = np.array([False, False, True, False])
  before, after, update = step(
      toy(advantage='gae'), make_played(overflow=overflow)
  )
  assert update.overflow
  assert_equal(after._replace(step=0), before._replace(step=0))


def test_a_critic_that_is_no_number_stops_the_update(toy):
  learner = toy(advantage='gae')
  state = learner.init(jax.random.key(0))
  broken = state.critic._replace(params={'v': jnp.array([NAN, 0.0])})
  state = state._replace(critic=broken)
  before, after, update = step(learner, make_played(), state=state)
  assert not update.finite
  assert_equal(after.params, before.params)


def test_several_epochs_move_the_critic_further(toy):
  moved = {}
  for epochs in (1, 3):
    learner = toy(advantage='gae', loss='clipped_surrogate', epochs=epochs)
    before, after, _ = step(learner, make_played())
    moved[epochs] = after.critic.params['v'] - before.critic.params['v']
    assert adam(after.critic).count == epochs
  np.testing.assert_allclose(moved[3], 3 * moved[1], rtol=0.2)


def learn_values(toy, played, updates=300):
  learner = toy(advantage='gae', critic_learning_rate=0.02)
  state = learner.init(jax.random.key(0))
  explained = []
  for _ in range(updates):
    state, update = tiny.learn(learner, state, played, knobs(1e-3))
    explained.append(float(update.extra['explained_variance']))
  return np.asarray(state.critic.params['v']), explained, update


def test_the_critic_learns_the_mean_return(toy):
  """Every decision looks the same; the last feature is 0."""
  played = make_played(me=np.float32([[[1, 0]] * 7] * 4))
  value, explained, _ = learn_values(toy, played)
  at = np.arange(4)[:, None], played.rollout
  expected = played.progress[at].mean()  # Of the decisions' returns.
  assert value[0] == pytest.approx(expected, abs=0.01)
  assert explained[-1] == pytest.approx(0.0, abs=1e-4)


def test_the_critic_learns_to_explain_what_can_be_seen(toy):
  """A feature says what the return will be."""
  played = make_played()
  seen = played.progress[np.arange(4)[:, None], played.rollout]
  played.me[..., 0], played.me[..., 1] = 1.0, seen
  value, explained, update = learn_values(toy, played)
  assert explained[0] < 0.9 < 0.99 < explained[-1] <= 1.0
  np.testing.assert_allclose(value, [0, 1], atol=0.05)
  # What is foreseen is no advantage.
  assert update.grad_norm < 0.01


def test_without_gae_there_is_no_critic(toy):
  before, after, update = step(toy(), make_played())
  assert before.critic is None and after.critic is None and not update.extra
  learner = toy()
  parts = {'toy': toy_part(4, critic=None)}
  learner_lib.Learner(parts, learner.config, learner.mesh)
  config = dataclasses.replace(learner.config, advantage='gae')
  with pytest.raises(ValueError, match="rlcr.advantage='gae'.*lack a critic"):
    learner_lib.Learner(parts, config, learner.mesh)


@pytest.mark.parametrize(
    'incentive, scheduled',
    [
        (IncentiveConfig('latency_penalty', penalty=0.0), {}),
        (IncentiveConfig('toggle'), {'budgeted': 0.0}),
        (IncentiveConfig('parl'), {'parallel': 0.0, 'finish': 0.0}),
    ],
)
def test_incentives_that_are_switched_off_change_nothing(
    toy, incentive, scheduled
):
  """Neither do the fields of gae, where there is no critic; to the bit."""
  expected = step(toy(), make_played())[1:]
  learner = toy(
      incentive=incentive, gamma=0.5, gae_lambda=0.5, discount_per='second'
  )
  off = {name: jnp.float32(value) for name, value in scheduled.items()}
  after = step(learner, make_played(), knobs()._replace(incentive=off))[1:]
  assert_equal(after, expected)


def test_a_scheduled_incentive_compiles_once(toy):
  incentive = IncentiveConfig('toggle', toggle_every=1, toggle_accuracy=0.5)
  learner = toy(incentive=incentive)
  played = make_played(time_ms=np.int32([[1, 2]] * 4))
  played.progress[:] = 1.0
  state, seen = learner.init(jax.random.key(0)), []
  for index in range(4):
    scheduled = knobs()._replace(incentive=incentive.knobs(index, 4))
    state, update = tiny.learn(learner, state, played, scheduled)
    seen.append(update.returns.tolist()[0])
  assert seen == [[1.0, 0.0], [1.0, 1.0]] * 2  # The budget is 1.5 ms.
  assert learner.update._cache_size() == 1


# Configuration.

# Everything matters here: ratios leave the clip, gradients are clipped.
BUSY = {
    'loss': 'clipped_surrogate',
    'epochs': 3,
    'clip': 0.1,
    'aggregation': 'constant',
    'constant': 10.0,
    'advantage': 'group_mean',
    'learning_rate': 0.3,
    'learning_rate_final': 0.1,
    'entropy_bonus': 0.02,
    'entropy_bonus_final': 0.01,
    'max_grad_norm': 0.01,
    'adam_b1': 0.9,
    'adam_b2': 0.95,
    'chunk_size': 4,
    'max_decisions': 10,
}
CHANGES = {
    'tasks': 2,
    'group_size': 4,
    'advantage': 'z_score',
    'gamma': 0.9,
    'gae_lambda': 0.5,
    'discount_per': 'second',
    'critic_learning_rate': 0.1,
    'loss': 'reinforce',
    'clip': 0.3,
    'epochs': 2,
    'aggregation': 'agent_mean',
    'constant': 20.0,
    'learning_rate': 0.2,
    'learning_rate_final': 0.2,
    'adam_b1': 0.8,
    'adam_b2': 0.9,
    'max_grad_norm': 0.02,
    'entropy_bonus': 0.04,
    'entropy_bonus_final': 0.02,
    'chunk_size': 8,
    'max_decisions': 20,
}


# What these fields change is the critic's.
OF_GAE = ('gamma', 'gae_lambda', 'discount_per', 'critic_learning_rate')


def observed(config):
  """Everything that can be told from two updates."""
  learner = new_learner(**config)
  played = make_played(learner.config.tasks, learner.config.group_size)
  state, seen = learner.init(jax.random.key(0)), []
  for index in range(2):
    state, update = tiny.learn(
        learner, state, played, learner.config.knobs(index, 2)
    )
    seen += [host(state), jax.device_get(update)]
  seen = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(seen)]
  return repr((seen, sorted(ASKED.items())))


@functools.cache
def observed_once(**base):
  return observed(BUSY | base)


def test_the_test_below_knows_every_field():
  assert set(CHANGES) == {f.name for f in dataclasses.fields(RlcrConfig)}


@pytest.mark.parametrize('field', CHANGES)
def test_every_field_changes_something(toy, field):
  del toy  # Used for its effect.
  base = {'epochs': 1} if field == 'loss' else {}
  if field in OF_GAE:
    base = {'advantage': 'gae'}
  if field == 'discount_per':
    base['gamma'] = 0.8
  changed = observed(BUSY | base | {field: CHANGES[field]})
  assert changed != observed_once(**base)


@pytest.mark.parametrize(
    'field, value, allowed',
    [
        ('tasks', 0, '>= 1'),
        ('group_size', 1, '>= 2, since an advantage is relative'),
        ('advantage', 'fame', 'agent_z_score'),
        ('gamma', 0.0, 'above 0, at most 1'),
        ('gamma', 1.1, 'above 0, at most 1'),
        ('gae_lambda', -0.1, 'from 0 to 1'),
        ('discount_per', 'hour', 'second'),
        ('critic_learning_rate', 0.0, '> 0'),
        ('loss', 'mse', 'reinforce'),
        ('clip', 0.0, '> 0'),
        ('epochs', 0, '>= 1'),
        ('epochs', 2, '1 unless rlcr.loss=clipped_surrogate'),
        ('aggregation', 'sum', 'decision_mean'),
        ('constant', 0.0, '> 0'),
        ('learning_rate', 0.0, '> 0'),
        ('learning_rate', NAN, '> 0'),
        ('learning_rate', INF, '> 0 and finite'),
        ('entropy_bonus', INF, '>= 0 and finite'),
        ('learning_rate_final', -1.0, '>= 0'),
        ('adam_b1', 1.0, 'from 0 to below 1'),
        ('adam_b2', -0.1, 'from 0 to below 1'),
        ('max_grad_norm', -1.0, '> 0'),
        ('entropy_bonus', -1.0, '>= 0'),
        ('entropy_bonus_final', -1.0, '>= 0'),
        ('chunk_size', 0, '>= 1'),
        ('max_decisions', 0, '>= 1'),
    ],
)
def test_bad_values_are_told(field, value, allowed):
  with pytest.raises(ValueError) as told:
    RlcrConfig(**{field: value})
  text = str(told.value)
  assert f'rlcr.{field}={value!r} is not allowed' in text and allowed in text


@pytest.mark.parametrize(
    'index, steps, rate, bonus',
    [
        (0, 5, 0.5, 0.25),
        (2, 5, 0.375, 0.125),
        (4, 5, 0.25, 0.0),
        (0, 1, 0.5, 0.25),
    ],
)
def test_knobs_go_along_a_line_to_the_last_step(index, steps, rate, bonus):
  config = RlcrConfig(
      learning_rate=0.5,
      learning_rate_final=0.25,
      entropy_bonus=0.25,
      entropy_bonus_final=0.0,
  )
  assert config.knobs(index, steps) == (rate, bonus, {})


def test_entropy_bonus_flattens_the_policy(toy):
  learner, played = toy(), make_played()
  _, _, plain = step(learner, played)
  _, _, update = step(learner, played, knobs(entropy_bonus=0.5))
  assert update.loss == pytest.approx(plain.loss - 0.5 * plain.entropy)
  state = learner.init(jax.random.key(0))
  for _ in range(20):
    state, update = tiny.learn(learner, state, played, knobs(0.1, 100.0))
  assert plain.entropy < update.entropy <= np.log(3) + 1e-6


@pytest.mark.parametrize(
    'tasks, devices, expected', [(4, 0, 4), (6, 0, 3), (5, 0, 1), (4, 2, 2)]
)
def test_mesh_has_the_most_devices_that_divide_the_tasks(
    tasks, devices, expected
):
  assert learner_lib.default_mesh(tasks, devices).size == expected


@pytest.mark.parametrize('tasks, devices', [(4, 3), (1000, 500)])
def test_mesh_that_cannot_be_is_told(tasks, devices):
  with pytest.raises(ValueError, match=f'num_devices={devices} is not allowed'):
    learner_lib.default_mesh(tasks, devices)


# Played.


@pytest.fixture(scope='module')
def run():
  return train.build(tiny.config())


def make_rules(run, arm='collective', deadline_ms=120_000):
  deadlines_ms = jnp.full(run.config.rlcr.tasks, deadline_ms, jnp.int32)
  return run.rules(arm, deadlines_ms)


@pytest.fixture(scope='module')
def first(run):
  """The first update of the run as it is: state before, after, and update."""
  return step(run.learner, make_rules(run), knobs(0.01, 0.02), run.init())


def assert_same_rollouts(left, right):
  for name, a, b in zip(left._fields, left, right, strict=True):
    if name == 'iterations':  # Of the loop, which serves other chunks.
      continue
    if np.issubdtype(a.dtype, np.integer):
      np.testing.assert_array_equal(a, b)
    else:  # Another program may round a fraction of tests in another way.
      np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize('chunk_size, devices', [(128, 2), (1000, 4)])
def test_same_rollouts_and_gradient_for_any_chunks_and_devices(
    run, first, chunk_size, devices
):
  config = dataclasses.replace(run.config.rlcr, chunk_size=chunk_size)
  other = learner_lib.Learner(
      run.learner.parts,
      config,
      learner_lib.default_mesh(config.tasks, devices),
  )
  state = other.init(jax.random.key(run.config.run.seed))
  before, after, update = step(other, make_rules(run), knobs(0.01, 0.02), state)
  assert_equal(before.params, first[0].params)
  assert_same_rollouts(update.rollouts, first[2].rollouts)
  assert_close(gradient(other, after), gradient(run.learner, first[1]), 1e-4)
  for name in ('loss', 'entropy', 'grad_norm', 'informative'):
    assert_close(getattr(update, name), getattr(first[2], name), 1e-4)


def test_the_same_by_gae_for_any_chunks_and_devices(run):
  seen = []
  for chunk_size, devices in ((32, 1), (128, 2), (1000, 4)):
    config = dataclasses.replace(
        run.config.rlcr,
        advantage='gae',
        gae_lambda=0.9,
        discount_per='second',
        gamma=0.99,
        chunk_size=chunk_size,
    )
    mesh = learner_lib.default_mesh(config.tasks, devices)
    learner = learner_lib.Learner(run.learner.parts, config, mesh)
    _, after, update = step(learner, make_rules(run))
    assert update.finite and update.informative == 1.0
    seen.append(
        (
            gradient(learner, after),
            gradient(learner, after.critic),
            (update.loss, update.grad_norm, update.extra),
        )
    )
  for other in seen[1:]:
    assert_close(other, seen[0], 1e-3)


@pytest.fixture(scope='module')
def record(run, first):
  """The decisions of the first update, played once more."""
  config, part = run.config.rlcr, tiny.only(run.learner.parts)
  play = functools.partial(
      rollout.play_groups,
      part.collective,
      part.policy,
      group_size=config.group_size,
      chunk_size=config.chunk_size,
      capacity=config.max_decisions * config.tasks * config.group_size,
  )
  key = jax.random.fold_in(run.init().key, 0)
  rollouts, buffer = jax.jit(play)(
      first[0].params, key, jnp.arange(config.tasks), tiny.only(make_rules(run))
  )
  assert_same_rollouts(rollouts, first[2].rollouts)
  return jax.tree.map(lambda x: x[: int(buffer.count)], buffer.rows)


def test_update_is_informative(first):
  """Else the tests around it would show nothing."""
  update = first[2]
  assert update.informative >= 0.5 and update.rollouts.team_size.max() > 1
  assert update.grad_norm > 1e-3 and update.finite and not update.overflow


def test_gradient_is_that_of_one_plain_loss(run, first, record):
  """All decisions at once, `mean(-A log pi - bonus * entropy)`."""
  returns = first[2].returns
  centred = returns - returns.mean(1, keepdims=True)
  used = np.ptp(returns, axis=1) > 0
  advantage = (centred * used[:, None]).reshape(-1)[record.rollout]
  used = np.repeat(used, returns.shape[1])[record.rollout]

  def loss(params):
    log_prob, entropy = tiny.only(run.learner.parts).policy.log_prob(
        params, record.observation, record.action
    )
    terms = -advantage * log_prob - 0.02 * entropy
    return jnp.sum(jnp.where(used, terms, 0.0)) / used.sum()

  value, expected = jax.jit(jax.value_and_grad(loss))(first[0].params)
  assert_close(first[2].loss, value, 1e-4)
  norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(expected)))
  assert norm < run.config.rlcr.max_grad_norm  # Nothing was clipped.
  assert_close(first[2].grad_norm, norm, 1e-4)
  assert_close(gradient(run.learner, first[1]), expected, 1e-4)


def test_log_probabilities_can_be_recomputed(run, first, record):
  log_prob, _ = jax.jit(tiny.only(run.learner.parts).policy.log_prob)(
      first[0].params, record.observation, record.action
  )
  np.testing.assert_allclose(log_prob, record.log_prob, atol=1e-5)
  assert record.log_prob.min() < -1.0  # They are no constant.
  assert first[2].log_prob_gap < 1e-5


def test_nothing_compiles_anew(run, first):
  """Not for a deadline, a schedule, an arm or a learning rate."""
  del first  # Has compiled.
  assert run.learner.update._cache_size() == 1
  state = run.init()
  cases = [
      ('collective', 60_000, 0.01),
      ('collective', 240_000, 0.02),
      ('solo', 90_000, 0.03),
      ('muted', 90_000, 0.04),
  ]
  for arm, deadline_ms, rate in cases:
    state, update = tiny.learn(
        run.learner, state, make_rules(run, arm, deadline_ms), knobs(rate, rate)
    )
    assert (update.rollouts.time_ms <= deadline_ms).all()
  mixed = tiny.only(make_rules(run))._replace(
      deadline_ms=jnp.array([60_000, 70_000, 80_000, 90_000])
  )
  tiny.learn(run.learner, state, mixed, knobs())
  assert run.learner.update._cache_size() == 1


def test_every_seed_and_every_step_plays_something_else(run, first):
  rules, returns = make_rules(run), [first[2].returns]
  for seed, index in ((0, 1), (1, 0)):
    state = run.learner.init(jax.random.key(seed))
    state = state._replace(step=state.step + index)
    returns.append(step(run.learner, rules, state=state)[2].returns)
  for i, j in ((0, 1), (0, 2), (1, 2)):
    assert (returns[i] != returns[j]).any()


def test_an_agent_alone_learns(run):
  """On the same tasks, before and after fifteen updates on others."""
  rules = make_rules(run, 'solo', 180_000)

  def score(state):
    returns = []
    for index in range(1000, 1004):
      copy = jax.tree.map(jnp.copy, state)._replace(step=jnp.int32(index))
      returns.append(tiny.learn(run.learner, copy, rules, knobs())[1].returns)
    return float(np.mean(returns))

  state = run.init()
  before = score(state)
  for _ in range(15):
    state, _ = tiny.learn(run.learner, state, rules, knobs(0.03))
  after = score(state)
  assert after > before + 0.08, (before, after)
