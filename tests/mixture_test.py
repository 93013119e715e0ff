"""Tests of several environments that share one policy and one update."""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from rlcr_jax import config as config_lib
from rlcr_jax import evaluate
from rlcr_jax import learner as learner_lib
from rlcr_jax import metrics
from rlcr_jax import report
from rlcr_jax import train
from rlcr_jax.policies import transformer
from tests import tiny

ENVS = 'reasoning', 'software'  # In the order of their names.


def make_config(weights=(1.0, 1.0), **changes):
  """The tiny run, of two environments."""
  one = tiny.config(**changes)
  config = config_lib.defaults(*ENVS)
  mixture = config.env.to_dict()
  mixture['software'] |= {k: v for k, v in one.env.items() if k != 'name'}
  mixture['reasoning'] |= {'num_chains': 3, 'max_difficulty': 8.0}
  mixture['weights'] = dict(zip(ENVS, weights, strict=True))
  return ml_collections.ConfigDict(one.to_dict() | {'env': mixture})


@pytest.fixture(scope='module')
def run():
  return train.build(make_config(weights=(1.0, 3.0)))


def rules(run, deadline_ms=90_000):
  limits = jnp.full(run.config.rlcr.tasks, deadline_ms, jnp.int32)
  return run.rules('collective', limits)


@pytest.fixture(scope='module')
def stepped(run):
  knobs = run.config.rlcr.knobs(0, 2)
  state, updates = run.learner.step(run.init(), rules(run), knobs)
  return jax.device_get((state.params, updates))


# Configuration.


def test_defaults_of_several_environments_are_those_of_each():
  config = config_lib.defaults(*ENVS)
  assert config.env.name == 'mixture'
  assert dict(config.env.weights) == {'reasoning': 1.0, 'software': 1.0}
  for name in ENVS:
    alone = config_lib.defaults(name).env.to_dict()
    assert config.env[name].to_dict() | {'name': name} == alone
  resolved = config_lib.resolve(config)
  assert list(resolved.envs) == list(ENVS)
  assert resolved.weights == {'software': 0.5, 'reasoning': 0.5}
  again = ml_collections.ConfigDict(json.loads(config_lib.to_json(config)))
  assert config_lib.resolve(again).tasks() == resolved.tasks()


@pytest.mark.parametrize(
    'tasks, weights, expected',
    [
        (16, (1, 1), (8, 8)),
        (8, (3, 1), (6, 2)),
        (8, (0.3, 0.1), (6, 2)),  # Only their ratio counts.
        (5, (1, 1), (3, 2)),
        (7, (2, 1), (5, 2)),  # Of 4.67 and 2.33.
        (4, (100, 1), (3, 1)),  # Every environment has a task.
        (2, (1, 100), (1, 1)),
    ],
)
def test_tasks_are_divided_by_weight(tasks, weights, expected):
  config = make_config(weights, rlcr__tasks=tasks)
  assert tuple(config_lib.resolve(config).tasks().values()) == expected


@pytest.mark.parametrize(
    'change, message',
    [
        ({'weights': {'software': 1.0}}, r'env.weights=.*each environment'),
        ({'weights': 1.0}, 'env.weights=1.0'),
        (
            {'weights': {'software': 0.0, 'reasoning': 1.0}},
            'env.weights.software=0.0 is not allowed: it must be a number > 0',
        ),
        (
            {'weights': {'software': True, 'reasoning': 1.0}},
            'env.weights.software=True',
        ),
        ({'software': {'width': 0.5}}, r'env.software.width=0.5'),
        ({'software': {'num_modules': 0}}, r'env.num_modules=0'),
    ],
)
def test_a_mixture_that_cannot_be_is_told(change, message):
  config = make_config()
  env = config.env.to_dict() | change
  config = ml_collections.ConfigDict(config.to_dict() | {'env': env})
  with pytest.raises(ValueError, match=message):
    config_lib.resolve(config)


def test_there_must_be_a_task_for_each():
  with pytest.raises(ValueError, match='rlcr.tasks=1 .* >= 2, one for each'):
    config_lib.resolve(make_config(rlcr__tasks=1))


def test_every_environment_must_have_the_time_to_act():
  config = make_config()
  config.deadline.first_ms = 10_000
  with pytest.raises(ValueError, match='no action on software could ever'):
    config_lib.resolve(config)


# One policy.


def test_policies_share_what_has_the_same_name(run):
  names = transformer.Vocabulary.of(run.collectives.values())
  assert names.envs == ENVS
  verbs = [v.name for v in run.collectives['reasoning'].verbs]
  assert names.verbs == tuple(dict.fromkeys([*verbs, 'work', 'read']))
  policies = [part.policy for part in run.learner.parts.values()]
  params = [policy.init(jax.random.key(0)) for policy in policies]
  for left, right in zip(*map(jax.tree.leaves, params), strict=True):
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize('name', ENVS)
def test_a_policy_reads_its_own_rows_and_no_other(run, name):
  collective = run.collectives[name]
  shared = run.learner.parts[name].policy
  params = shared.init(jax.random.key(0))
  task = collective.env.sample_task(jax.random.key(1))
  rules_of_one = collective.rules(90_000)
  state = collective.reset(task, rules_of_one, jax.random.key(2))
  obs = collective.observe(task, rules_of_one, state, jnp.int32(0))
  obs = jax.tree.map(lambda x: x[None], obs)
  keys = jax.random.split(jax.random.key(3), 1)
  action, log_prob = shared.sample(params, keys, obs)
  # The same as a policy of this environment alone with the rows it takes.
  alone = transformer.TransformerPolicy(collective, shared.config)
  own = shared._own(params)
  shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
  assert shapes(own) == shapes(alone.init(jax.random.key(0)))
  expected, _ = alone.log_prob(own, obs, action)
  np.testing.assert_allclose(log_prob, expected, rtol=1e-6)
  grads = jax.grad(lambda p: shared.log_prob(p, obs, action)[0].sum())(params)
  names = transformer.Vocabulary.of(run.collectives.values())
  own_verbs = [v.name for v in collective.verbs]
  foreign = [i for i, v in enumerate(names.verbs) if v not in own_verbs]
  assert foreign and not np.any(grads['verb']['kernel'][:, foreign])
  assert np.any(grads['verb']['kernel'])
  place = names.envs.index(name)
  constants = np.asarray(grads['embed_me']['kernel'])[: len(names.envs)]
  assert np.any(constants[place]) and not np.any(np.delete(constants, place, 0))


def test_columns_keep_their_meaning_in_the_shared_parameters(run):
  """A parameter of its own for each column of each environment."""
  places = {}
  for name, part in run.learner.parts.items():
    params = part.policy.init(jax.random.key(0))
    for part_of in ('embed_me', 'embed_target'):
      kernel = params[part_of]['kernel']
      marks = jnp.broadcast_to(
          jnp.arange(kernel.shape[0], dtype=kernel.dtype)[:, None], kernel.shape
      )
      params[part_of]['kernel'] = marks
    own = part.policy._own(params)
    rows = [
        np.asarray(own[e]['kernel'])[:, 0] for e in ('embed_me', 'embed_target')
    ]
    assert all(len(set(row.tolist())) == len(row) for row in rows)
    places[name] = rows
  me, targets = zip(*places.values(), strict=True)
  # Beside the constant, the leading columns and the seat are the same; so are
  # the planning columns and those of coordination.
  assert me[0][0] != me[1][0]
  np.testing.assert_array_equal(me[0][1:16], me[1][1:16])
  np.testing.assert_array_equal(me[0][-8:], me[1][-8:])
  np.testing.assert_array_equal(targets[0][:7], targets[1][:7])
  np.testing.assert_array_equal(targets[0][-30:], targets[1][-30:])


# One update.


def test_each_environment_plays_its_own_tasks(run, stepped):
  _, updates = stepped
  assert {n: u.returns.shape for n, u in updates.items()} == {
      'software': (3, 4),
      'reasoning': (1, 4),
  }
  for name, update in updates.items():
    verbs = run.collectives[name].verbs
    assert update.rollouts.turns.shape[1] == len(verbs)
    assert update.rollouts.decisions > 0 and update.finite


def test_no_two_tasks_have_the_same_number():
  index = learner_lib.number_tasks({'a': 3, 'b': 1, 'c': 2})
  assert {k: v.tolist() for k, v in index.items()} == {
      'a': [0, 1, 2],
      'b': [3],
      'c': [4, 5],
  }


def gradient(run, parts):
  """Of the first update of some parts; Adam begins with 1 - b1 times it."""
  config = run.config.rlcr
  learner = learner_lib.Learner(
      parts, config, learner_lib.default_mesh(1, devices=1)
  )
  state = learner.init(jax.random.key(0))
  asked = {name: rules(run)[name] for name in parts}
  index = run.learner.index()
  update = jax.jit(learner.update.__wrapped__)
  after, updates = update(
      state, {n: index[n] for n in parts}, asked, config.knobs(0, 2)
  )
  (moments,) = [s for s in after.opt_state if hasattr(s, 'mu')]
  share = 1 - config.adam_b1
  return jax.tree.map(lambda x: x / share, moments.mu), updates


def test_the_gradient_is_the_weighted_sum_of_each_environments(run):
  def with_signal(config, played, knobs):
    del config, knobs
    return jnp.sum(played.turns, axis=2) / 10.0

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(
        learner_lib.incentives.INCENTIVES, 'deadline_return', with_signal
    )
    whole, updates = gradient(run, run.learner.parts)
    sums = None
    for name, part in run.learner.parts.items():
      alone, update = gradient(run, {name: part._replace(weight=1.0)})
      np.testing.assert_allclose(
          updates[name].loss, update[name].loss, rtol=1e-4
      )
      scaled = jax.tree.map(lambda x, w=part.weight: w * x, alone)
      sums = scaled if sums is None else jax.tree.map(jnp.add, sums, scaled)
  for a, b in zip(*map(jax.tree.leaves, (whole, sums)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_environments_share_one_critic():
  config = make_config(rlcr__advantage='gae', incentive__name='latency_penalty')
  run = train.build(config)
  state, updates = run.learner.step(
      run.init(), rules(run), run.config.knobs(0, 2)
  )
  assert state.critic is not None
  params = [
      jax.eval_shape(part.critic.init, jax.random.key(0))
      for part in run.learner.parts.values()
  ]
  shapes = [[x.shape for x in jax.tree.leaves(p)] for p in params]
  assert shapes[0] == shapes[1]
  assert shapes[0] == [x.shape for x in jax.tree.leaves(state.critic.params)]
  rows = {}
  for name, update in jax.device_get(updates).items():
    assert update.finite and update.informative == 1.0
    assert (update.returns <= update.rollouts.progress.reshape(-1, 4)).all()
    verbs = run.collectives[name].verbs
    deadlines_ms = np.array([90_000])
    knobs = run.config.knobs(0, 2)
    rows[name] = metrics.summarise(verbs, update, deadlines_ms, knobs)
  row = metrics.mixed(rows, run.config.weights)
  assert row['critic_loss'] > 0 and row['software/explained_variance'] <= 1


# Measurements.


def test_a_row_has_the_weighted_means_and_every_environments_own():
  rows = {
      'a': {'return_mean': 0.2, 'decisions': 30.0, 'turns_x': 1.0},
      'b': {'return_mean': 0.6, 'decisions': 10.0, 'turns_y': 2.0},
  }
  assert metrics.mixed(rows, {'a': 0.75, 'b': 0.25}) == {
      'return_mean': pytest.approx(0.3),
      'decisions': 40.0,
      'a/return_mean': 0.2,
      'a/decisions': 30.0,
      'a/turns_x': 1.0,
      'b/return_mean': 0.6,
      'b/decisions': 10.0,
      'b/turns_y': 2.0,
  }
  assert metrics.mixed({'a': rows['a']}, {'a': 1.0}) == rows['a']


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run from beginning to end."""
  directory = tmp_path_factory.mktemp('mixture')
  config = make_config(steps=2)
  train.train(config, directory)
  evaluate.evaluate(config, directory)
  report.write_report(directory)
  return directory


@pytest.fixture(scope='module')
def evaluation(workdir):
  return json.loads((workdir / 'evaluation.json').read_text())


def test_an_evaluation_has_all_environments_and_their_mean(evaluation):
  assert list(evaluation['environments']) == list(ENVS)
  parts = evaluation['environments'].values()
  for mode, entry in evaluation['modes'].items():
    shares = [
        part['modes'][mode]['return_mean']
        / part['modes']['oracle']['return_mean']
        for part in parts
    ]
    assert entry['return_mean'] == pytest.approx(np.mean(shares), rel=1e-5)
    low, high = entry['return_ci95']
    assert low <= entry['return_mean'] <= high
  assert evaluation['modes']['oracle']['return_mean'] == pytest.approx(1.0)
  for part in parts:
    assert part['matched_tokens'] and part['by_deadline'] and part['curves']


def test_the_page_has_a_table_and_figures_for_each(workdir, evaluation):
  page = (workdir / 'report.html').read_text()
  for name in ENVS:
    assert f'<h2>{name}</h2>' in page
    assert (workdir / 'figures' / f'{name}_return_by_deadline.png').exists()
  assert 'All environments' in page
  assert len(report.tables(evaluation)) == 3


def test_a_mixture_goes_on_where_it_stopped(workdir, tmp_path):
  config = make_config(steps=2, checkpoint_every=1)
  run = train.build(config)
  states = {}

  def stop(arm, row):
    if row['step'] == 1:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train.train_arm(run, 'collective', tmp_path, stop)
  states['resumed'] = train.train_arm(run, 'collective', tmp_path)
  states['whole'] = train.train_arm(run, 'collective', tmp_path / 'whole')
  for a, b in zip(
      jax.tree.leaves(states['resumed'].params),
      jax.tree.leaves(states['whole'].params),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
