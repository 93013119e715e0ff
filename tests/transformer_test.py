"""Tests of the set transformer and its pointer heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax.observation import Action
from rlcr_jax.observation import is_legal
from rlcr_jax.observation import takes
from rlcr_jax.policies import transformer
from tests import by_hand
from tests.by_hand import Game

COLLECTIVE = by_hand.make_collective()
CONFIG = transformer.TransformerConfig(width=8, layers=2, heads=2)
POLICY = transformer.TransformerPolicy(COLLECTIVE, CONFIG)
VERBS = [v.name for v in COLLECTIVE.verbs]
PEERS, TARGETS, SYMBOLS = 2, 4, 2


@functools.cache
def get_params():
  """Far from the nearly uniform start, and with attention to relations."""
  params = POLICY.init(jax.random.key(0))
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  moved = [
      x + 0.2 * jax.random.normal(key, x.shape)
      for x, key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(structure, moved)


@functools.partial(jax.jit, static_argnums=0)
def log_prob_jit(policy, params, obs, action):
  return policy.log_prob(params, obs, action)


@functools.partial(jax.jit, static_argnums=0)
def sample_jit(policy, params, keys, obs):
  return policy.sample(params, keys, obs)


def score(obs, action, policy=POLICY):
  log_prob, entropy = log_prob_jit(policy, get_params(), obs, action)
  return np.asarray(log_prob), np.asarray(entropy)


def repeat(obs, count):
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), obs)


@functools.cache
def chief():
  """What a CEO sees who has one of two hires, after some work and talk."""
  game = Game(60_000, organisation='ceo').advance().act(0, 'hire').advance()
  game.act(0, 'work', 0).advance(2).act(0, 'post', 0, symbol=1)
  game.act(1, 'tell', 1, peer=0).advance(2)
  return game.observe(0)


@functools.cache
def worker():
  """What a worker sees who lacks the fact of a finished module."""
  game = Game(60_000).advance().act(0, 'work', 0)
  for agent in (1, 2):
    game.act(agent, 'wait', end_ms=5000)
  return game.advance().observe(1)


def alone():
  return Game(60_000, organisation='solo').advance().observe(0)


SCENES = (chief, worker, alone)


@functools.cache
def all_actions():
  """Every action, legal or not, whose unused parts are 0. [A] each."""
  uses = [takes(COLLECTIVE.verbs, x) for x in ('target', 'peer', 'symbol')]
  sizes = (TARGETS, PEERS, SYMBOLS)
  parts = np.stack(
      np.meshgrid(np.arange(len(VERBS)), *map(np.arange, sizes)), axis=-1
  ).reshape(-1, 4)
  used = np.stack([np.asarray(use)[parts[:, 0]] for use in uses], axis=1)
  parts = parts[~np.any(~used & (parts[:, 1:] > 0), axis=1)]
  return Action(*jnp.array(parts.T, jnp.int32))


def table(obs):
  """`(legal, probability, entropy)` [A] of every action."""
  actions = all_actions()
  rows = repeat(obs, len(actions.verb))
  legal = jax.vmap(functools.partial(is_legal, COLLECTIVE.verbs))(rows, actions)
  log_prob, entropy = score(rows, actions)
  return np.asarray(legal), np.exp(log_prob.astype(float)), entropy


# Probabilities.


def test_all_actions_are_enumerated():
  # Work and read: 4; wait and hire: 1; fire: 2; post: 8; tell: 16.
  counts = np.bincount(all_actions().verb)
  expected = dict(work=4, read=4, wait=1, tell=16, post=8, hire=1, fire=2)
  assert dict(zip(VERBS, counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize('scene', SCENES)
def test_legal_actions_have_all_the_probability(scene):
  legal, probability, _ = table(scene())
  assert 1 < legal.sum() < len(legal)
  assert probability[legal].sum() == pytest.approx(1, abs=1e-5)
  assert (probability[legal] > 0).all()
  assert (probability[~legal] == 0).all()


@pytest.mark.parametrize('scene', SCENES)
def test_draws_are_legal_and_as_frequent_as_they_say(scene):
  draws = 4000
  keys = jax.random.split(jax.random.key(2), draws)
  obs = repeat(scene(), draws)
  action, log_prob = sample_jit(POLICY, get_params(), keys, obs)
  assert action.verb.dtype == jnp.int32
  recomputed, _ = score(obs, action)
  np.testing.assert_allclose(log_prob, recomputed, rtol=1e-5, atol=1e-5)
  legal, probability, _ = table(scene())
  actions = np.stack(all_actions(), axis=1).tolist()
  number = {tuple(parts): i for i, parts in enumerate(actions)}
  drawn = [number[tuple(x)] for x in np.stack(action, axis=1).tolist()]
  counts = np.bincount(drawn, minlength=len(legal))
  assert counts[~legal].sum() == 0
  deviation = np.sqrt(draws * probability * (1 - probability))
  assert (abs(counts - draws * probability) <= 4 * deviation + 2).all()


def test_a_draw_depends_on_its_own_row_only():
  keys = jax.random.split(jax.random.key(3), 8)
  scenes = [scene() for scene in SCENES for _ in range(3)][:8]
  obs = jax.tree.map(lambda *x: jnp.stack(x), *scenes)
  part = lambda tree: jax.tree.map(lambda x: x[4:6], tree)
  action, log_prob = sample_jit(POLICY, get_params(), keys, obs)
  few, few_log_prob = sample_jit(POLICY, get_params(), keys[4:6], part(obs))
  jax.tree.map(np.testing.assert_array_equal, few, part(action))
  np.testing.assert_allclose(few_log_prob, log_prob[4:6], rtol=1e-5, atol=1e-6)


def test_a_fresh_network_is_nearly_uniform_over_verbs():
  params = POLICY.init(jax.random.key(4))
  actions = all_actions()
  obs = repeat(chief(), len(actions.verb))
  log_prob, _ = log_prob_jit(POLICY, params, obs, actions)
  by_verb = np.bincount(actions.verb, np.exp(log_prob), len(VERBS))
  legal = np.asarray(chief().legal_verb)
  np.testing.assert_allclose(by_verb[legal], 1 / legal.sum(), rtol=0.2)


def test_seeds_give_other_parameters():
  leaves = lambda seed: jax.tree.leaves(POLICY.init(jax.random.key(seed)))
  same = [
      np.array_equal(x, y) for x, y in zip(leaves(0), leaves(0), strict=True)
  ]
  assert all(same)
  kernels = [
      (x, y)
      for x, y in zip(leaves(0), leaves(1), strict=True)
      if x.ndim == 2 and x.any()
  ]
  assert len(kernels) > 10
  assert not any(np.array_equal(x, y) for x, y in kernels)


# Entropy, in nats, by enumeration.


def entropy_of(weights):
  p = weights[weights > 0] / weights.sum()
  return -(p * np.log(p)).sum()


@pytest.mark.parametrize('scene', SCENES)
def test_entropy_of_the_verb_alone(scene):
  _, probability, entropy = table(scene())
  verbs = np.asarray(all_actions().verb)
  by_verb = np.bincount(verbs, probability, len(VERBS))
  for name in ('wait', 'hire'):  # They have no other part.
    got = entropy[verbs == VERBS.index(name)]
    np.testing.assert_allclose(got, entropy_of(by_verb), rtol=1e-4)


@pytest.mark.parametrize('scene', [chief, worker])
def test_entropy_of_every_part_given_the_earlier_ones(scene):
  legal, probability, entropy = table(scene())
  parts = np.stack(all_actions(), axis=1)  # [A, 4]
  uses = [takes(COLLECTIVE.verbs, x) for x in ('target', 'peer', 'symbol')]
  for i in np.flatnonzero(legal):
    verb, *rest = parts[i]
    expected = entropy_of(np.bincount(parts[:, 0], probability))
    given = parts[:, 0] == verb
    for j, use in enumerate(uses, start=1):
      if use[verb]:
        expected += entropy_of(np.bincount(parts[given, j], probability[given]))
      given &= parts[:, j] == rest[j - 1]
    assert entropy[i] == pytest.approx(expected, rel=1e-3), (VERBS[verb], rest)


# Symmetries.


@pytest.mark.parametrize('scene', [chief, worker])
def test_permuting_the_targets_permutes_the_answer(scene):
  obs, actions = scene(), all_actions()
  order = np.array([2, 0, 3, 1])  # New target i is the old order[i].
  shuffled = obs._replace(
      targets=obs.targets[order],
      relations=obs.relations[order][:, order],
      legal_target=obs.legal_target[:, order],
  )
  has_target = takes(COLLECTIVE.verbs, 'target')[actions.verb]
  moved = jnp.where(has_target, np.argsort(order)[actions.target], 0)
  count = len(actions.verb)
  old = score(repeat(obs, count), actions)
  new = score(repeat(shuffled, count), actions._replace(target=moved))
  np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
  # It is not that targets do not matter: under their old names it differs.
  wrong = score(repeat(shuffled, count), actions)
  assert abs(np.exp(wrong[0]) - np.exp(old[0])).max() > 0.01


def with_relations(needs, needed_by):
  """Parameters of given attention biases to what one needs and is needed by."""

  def change(path, x):
    if 'relation' not in jax.tree_util.keystr(path):
      return x
    return jnp.array([[needs] * CONFIG.heads, [needed_by] * CONFIG.heads])

  return jax.tree_util.tree_map_with_path(change, get_params())


def test_relations_matter_in_both_directions():
  obs = repeat(worker(), len(all_actions().verb))
  turned = obs._replace(relations=jnp.swapaxes(obs.relations, 1, 2))
  answer = lambda obs, *biases: log_prob_jit(
      POLICY, with_relations(*biases), obs, all_actions()
  )[0]
  distance = lambda x, y: abs(np.exp(x) - np.exp(y)).max()
  forwards, backwards = answer(obs, 3.0, 0.0), answer(obs, 0.0, 3.0)
  nothing = answer(obs, 0.0, 0.0)
  assert distance(forwards, nothing) > 1e-3
  assert distance(backwards, nothing) > 1e-3
  assert distance(forwards, backwards) > 1e-3
  np.testing.assert_allclose(answer(turned, 0.0, 3.0), forwards, rtol=1e-4)
  blank = obs._replace(relations=obs.relations & False)
  np.testing.assert_allclose(answer(blank, 3.0, 3.0), nothing, rtol=1e-4)


def test_padding_peers_do_not_matter():
  obs, actions = chief(), all_actions()
  assert obs.legal_peer.tolist() == [True, False]
  rows = lambda obs: repeat(obs, len(actions.verb))
  reference = score(rows(obs), actions)
  garbage = obs._replace(peers=obs.peers.at[1].set(1e3))
  np.testing.assert_array_equal(score(rows(garbage), actions), reference)
  width = obs.peers.shape[1]
  more = obs._replace(
      peers=jnp.concatenate([obs.peers, jnp.full((3, width), 7.0)]),
      legal_peer=jnp.concatenate([obs.legal_peer, jnp.zeros(3, bool)]),
  )
  np.testing.assert_allclose(
      score(rows(more), actions), reference, rtol=1e-5, atol=1e-5
  )
  # A peer who is there does matter.
  moved = obs._replace(peers=obs.peers.at[0].add(1.0))
  assert abs(score(rows(moved), actions)[0] - reference[0]).max() > 1e-3


@pytest.mark.parametrize('agents, modules', [(1, 4), (9, 4), (5, 12)])
def test_the_same_parameters_serve_any_number_of_agents_and_targets(
    agents, modules
):
  collective = by_hand.make_collective(
      {'num_modules': modules}, num_agents=agents, peer_window=3
  )
  policy = transformer.TransformerPolicy(collective, CONFIG)
  shapes = lambda p: jax.tree.map(lambda x: x.shape, p.init(jax.random.key(0)))
  assert shapes(policy) == shapes(POLICY)
  rules = collective.config.rules(60_000)

  @jax.jit
  def play(params, key):
    task = collective.env.sample_task(key)
    state = collective.reset(task, rules, key)
    obs = collective.observe(task, rules, state, jnp.int32(0))
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (16, *x.shape)), obs)
    keys = jax.random.split(key, 16)
    action, log_prob = policy.sample(params, keys, rows)
    legal = functools.partial(is_legal, collective.verbs)
    again = policy.log_prob(params, rows, action)[0]
    return jax.vmap(legal)(rows, action), log_prob, again, action

  legal, log_prob, again, action = play(get_params(), jax.random.key(0))
  assert legal.all()
  np.testing.assert_allclose(log_prob, again, rtol=1e-5, atol=1e-5)
  assert (log_prob > -20).all()
  assert action.target.max() < modules


# Gradients.


@pytest.mark.parametrize('scene', SCENES)
def test_gradients_are_finite_also_where_a_part_is_fully_masked(scene):
  legal, _, _ = table(scene())
  actions = jax.tree.map(lambda x: x[legal], all_actions())
  obs = repeat(scene(), len(actions.verb))

  def total(params):
    log_prob, entropy = POLICY.log_prob(params, obs, actions)
    return jnp.sum(log_prob) + jnp.sum(entropy)

  grads = jax.jit(jax.grad(total))(get_params())
  leaves = jax.tree.leaves(grads)
  assert all(np.isfinite(x).all() for x in leaves)
  assert sum(bool(x.any()) for x in leaves) > len(leaves) // 2


# Critic.

CRITIC = transformer.TransformerCritic(COLLECTIVE, CONFIG)


def value(params, *scenes):
  obs = jax.tree.map(lambda *x: jnp.stack(x), *(scene() for scene in scenes))
  return np.asarray(jax.jit(CRITIC.value)(params, obs))


def test_a_critic_is_an_encoder_of_the_same_kind_with_another_head():
  shapes = lambda tree: {
      jax.tree_util.keystr(path): x.shape
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }
  critic = shapes(CRITIC.init(jax.random.key(0)))
  policy = shapes(POLICY.init(jax.random.key(0)))
  (head,) = critic.keys() - policy.keys()
  assert critic[head] == (8, 1)
  shared = critic.keys() & policy.keys()
  assert all(critic[name] == policy[name] for name in shared)
  assert len(shared) > len(policy) / 2


def test_values_begin_near_0_and_depend_on_what_is_seen():
  params = CRITIC.init(jax.random.key(0))
  found = value(params, chief, worker)
  assert found.shape == (2,) and found.dtype == np.float32
  assert (0 < abs(found)).all() and (abs(found) < 0.2).all()
  assert found[0] != found[1]


def test_a_value_does_not_depend_on_the_other_rows():
  params = CRITIC.init(jax.random.key(0))
  together = value(params, chief, worker, alone)
  one = [value(params, scene)[0] for scene in (chief, worker, alone)]
  np.testing.assert_allclose(together, one, rtol=1e-5)


def test_the_whole_critic_learns():
  params = CRITIC.init(jax.random.key(0))
  obs = jax.tree.map(lambda *x: jnp.stack(x), chief(), worker())
  grads = jax.grad(lambda p: jnp.sum(CRITIC.value(p, obs)))(params)
  # In the last block only the own token counts, which has no relations.
  del grads['blocks'][CONFIG.layers - 1]['relation']
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(leaf).all() and np.any(leaf), path


# Config.


@pytest.mark.parametrize(
    'fields, named, allowed',
    [
        ({'width': 0}, 'policy.width=0', '>= 1'),
        ({'layers': 0}, 'policy.layers=0', '>= 1'),
        ({'heads': 0}, 'policy.heads=0', '>= 1'),
        ({'width': 8, 'heads': 3}, 'policy.heads=3', 'policy.width=8'),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(fields, named, allowed):
  with pytest.raises(ValueError) as error:
    transformer.TransformerConfig(**fields)
  message = str(error.value)
  assert named in message
  assert allowed in message
  assert '\n' not in message


def test_every_field_of_the_config_changes_the_network():
  def shapes(**changes):
    config = transformer.TransformerConfig(
        **({'width': 8, 'layers': 2, 'heads': 2} | changes)
    )
    policy = transformer.TransformerPolicy(COLLECTIVE, config)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    return [x.shape for x in jax.tree.leaves(params)]

  kinds = [shapes(), shapes(width=16), shapes(layers=1), shapes(heads=4)]
  assert all(kinds.count(kind) == 1 for kind in kinds)


# The prior.


def test_a_prior_multiplies_the_odds_of_its_verb():
  config = dataclasses.replace(CONFIG, prior='wait=2,work=-1')
  with_prior = transformer.TransformerPolicy(COLLECTIVE, config)
  actions, obs = all_actions(), repeat(chief(), len(all_actions().verb))
  before = np.exp(score(obs, actions)[0])
  after = np.exp(score(obs, actions, with_prior)[0])
  verb = np.asarray(actions.verb)
  of = lambda p, name: p[verb == VERBS.index(name)].sum()
  assert of(after, 'wait') / of(after, 'post') == pytest.approx(
      np.exp(2) * of(before, 'wait') / of(before, 'post'), rel=1e-4
  )
  assert of(after, 'work') / of(after, 'post') == pytest.approx(
      np.exp(-1) * of(before, 'work') / of(before, 'post'), rel=1e-4
  )


def test_a_prior_makes_nothing_legal():
  config = dataclasses.replace(CONFIG, prior='hire=50')
  policy = transformer.TransformerPolicy(COLLECTIVE, config)
  keys = jax.random.split(jax.random.key(0), 64)
  action, _ = sample_jit(policy, get_params(), keys, repeat(worker(), 64))
  assert VERBS.index('hire') not in np.asarray(action.verb)


@pytest.mark.parametrize(
    'prior', ['wait', 'wait=', 'wait=many', '=1', 'wait=inf', 'wait=1,wait=2']
)
def test_a_prior_is_written_as_verbs_and_numbers(prior):
  with pytest.raises(ValueError, match='policy.prior') as error:
    transformer.TransformerConfig(prior=prior)
  assert repr(prior) in str(error.value) and 'answer=6' in str(error.value)
