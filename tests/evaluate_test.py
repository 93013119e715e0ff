"""Tests of the held-out evaluation, of policies that never learned."""

import dataclasses
import json
import types

from experiments.configs import default
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import evaluate
from rlcr_jax import rollout
from rlcr_jax import train
from tests import tiny

FIELDS = {
    'return_mean',
    'return_ci95',
    'team_size_mean',
    'output_tokens_mean',
    'useful_token_share',
    'communication_tokens_per_s',
    'time_ms_mean',
}
MATCHED = {'time_ratio', 'time_ratio_ci95', 'solo_return_mean'}


@pytest.fixture(scope='module')
def run():
  return train.build(default.get_config('smoke'))


@pytest.fixture(scope='module')
def params(run):
  """As training leaves them: on its devices, which are not all there are."""
  keys = {'collective': 0, 'solo': 1, 'muted': 2}
  return {
      a: run.learner.init(jax.random.key(i)).params for a, i in keys.items()
  }


@pytest.fixture(scope='module')
def evaluated(run, params):
  """The evaluator of a whole evaluation, and what it gave."""
  made = []

  class Spy(evaluate.Evaluator):

    def __init__(self, *args):
      super().__init__(*args)
      made.append(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluate, 'Evaluator', Spy)
    result = evaluate.evaluate_params(run, params)
  (evaluator,) = made
  return evaluator, result


@pytest.fixture(scope='module')
def evaluator(evaluated):
  return evaluated[0]


@pytest.fixture(scope='module')
def result(evaluated):
  return evaluated[1]


def test_has_all_fields(run, result):
  assert result['deadline_ms'] == run.config.deadline.final_ms
  assert result['num_tasks'] == run.config.evaluation.num_tasks == 8
  assert set(result['modes']) == {
      'collective',
      'solo',
      'muted',
      'muted_trained',
      'random',
      'oracle',
      'oracle_muted',
      'greedy_solo',
  }
  for entry in result['modes'].values():
    assert FIELDS <= set(entry)
  assert MATCHED <= set(result['matched_tokens'])
  assert MATCHED <= set(result['matched_tokens']['greedy_solo'])
  assert 'solo' not in result['matched_tokens']  # It is on top.


def test_is_plain_json(result):
  assert json.loads(json.dumps(result)) == result


def test_means_lie_in_their_intervals_and_in_range(result):
  for entry in result['modes'].values():
    low, high = entry['return_ci95']
    assert 0 <= low <= entry['return_mean'] <= high <= 1
    assert 0 <= entry['useful_token_share'] <= 1
    assert 0 < entry['time_ms_mean'] <= result['deadline_ms']
    assert entry['output_tokens_mean'] > 0


def test_teams_are_as_the_rules_say(run, result):
  modes = result['modes']
  assert modes['solo']['team_size_mean'] == 1.0
  assert modes['greedy_solo']['team_size_mean'] == 1.0
  most = 1 + run.config.collective.max_hires
  for name in ('collective', 'random', 'oracle'):
    assert 1.0 < modes[name]['team_size_mean'] <= most


def test_who_is_muted_does_not_talk(result):
  talk = {
      name: entry['communication_tokens_per_s']
      for name, entry in result['modes'].items()
  }
  for name in ('muted', 'muted_trained', 'oracle_muted', 'solo', 'greedy_solo'):
    assert talk[name] == 0.0
  assert talk['collective'] > 0.0 and talk['random'] > 0.0


def test_modes_of_one_policy_share_one_compilation(evaluator, result):
  del result  # All modes have been played, at several deadlines.
  sizes = {n: f._cache_size() for n, f in evaluator._compiled.items()}
  assert sizes == dict.fromkeys(('trained', 'random', 'oracle', 'greedy'), 1)


def test_is_deterministic(evaluator):
  for name in ('collective', 'random'):
    first, second = (evaluator.play(name, 60_000) for _ in range(2))
    for a, b in zip(first, second, strict=True):
      np.testing.assert_array_equal(a, b)


def test_modes_play_with_their_own_parameters(evaluator, params):
  for name, arm in (('solo', 'solo'), ('muted', 'collective')):
    assert evaluator.modes[name].params == arm
  played = evaluator.play('muted', 60_000), evaluator.play(
      'muted_trained', 60_000
  )
  assert (played[0].turns != played[1].turns).any()


def test_curves_end_at_the_return(evaluator, result):
  curves = result['curves']
  assert curves['time_ms'][0] == 0
  assert curves['time_ms'][-1] == result['deadline_ms']
  for name, curve in curves['modes'].items():
    assert len(curve) == len(curves['time_ms'])
    assert curve[0] == 0.0 and (np.diff(curve) >= -1e-6).all()
    mean = result['modes'][name]['return_mean']
    assert curve[-1] == pytest.approx(mean, abs=1e-6)
  assert evaluator.grid_ms(1000)[-1] == 1000


def test_deadlines_go_from_first_to_final(run, result):
  by = result['by_deadline']
  deadline = run.config.deadline
  assert by['deadline_ms'] == [deadline.first_ms, deadline.final_ms]
  for name, entry in by['modes'].items():
    assert len(entry['return_mean']) == len(entry['return_ci95']) == 2
    last = result['modes'][name]
    assert entry['return_mean'][-1] == last['return_mean']
    assert entry['return_ci95'][-1] == last['return_ci95']
  crossover = by['crossover_ms']
  assert crossover is None or deadline.first_ms <= crossover
  assert crossover is None or crossover <= deadline.final_ms


def test_the_evaluation_may_have_deadlines_of_its_own(run, params):
  own = dataclasses.replace(
      run.config.evaluation, first_ms=30_000, final_ms=210_000
  )
  config = dataclasses.replace(run.config, evaluation=own)
  other = dataclasses.replace(run, config=config)
  result = evaluate.evaluate_params(other, {'collective': params['collective']})
  assert result['deadline_ms'] == result['curves']['time_ms'][-1] == 210_000
  assert result['by_deadline']['deadline_ms'] == [30_000, 210_000]


def test_modes_without_their_arm_are_left_out(run, params):
  fewer = {'collective': params['collective']}
  assert set(evaluate.Evaluator(run, fewer).modes) == {
      'collective',
      'muted',
      'random',
      'oracle',
      'oracle_muted',
      'greedy_solo',
  }


def tasks_of(run, key, count):
  """[count] tasks as hashable bytes, as `play_groups` draws them."""
  collective = tiny.only(run.collectives)
  rules = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (count,)), run.config.collective.rules(1)
  )
  tasks, *_ = rollout.group_inputs(collective, key, jnp.arange(count), rules, 1)
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tasks)]
  return {b''.join(leaf[i].tobytes() for leaf in leaves) for i in range(count)}


@pytest.mark.parametrize('same_seed', [False, True])
def test_held_out_tasks_are_never_trained_on(run, evaluator, same_seed):
  """Not even if both are drawn from the same seed."""
  asked = []

  def record(params, key, index, rules, grid_ms, frozen):
    assert frozen is None
    asked.append((key, len(index)))
    return jnp.zeros(())

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(evaluator._compiled, 'random', record)
    evaluator.play('random', 60_000)
  ((key, count),) = asked
  held_out = tasks_of(run, key, count)
  assert len(held_out) == run.config.evaluation.num_tasks
  seed = run.config.evaluation.seed if same_seed else run.config.run.seed
  train_key = run.learner.init(jax.random.key(seed)).key
  for step in range(3):
    trained = tasks_of(run, jax.random.fold_in(train_key, step), 16)
    assert len(trained) == 16 and not trained & held_out


# Matched tokens, with rollouts made by hand.


def make_rollouts(**fields):
  blank = dict.fromkeys(rollout.Rollouts._fields)
  arrays = {name: np.asarray(value) for name, value in fields.items()}
  return rollout.Rollouts(**(blank | arrays))


def matched(solo, collective_progress):
  """Of a collective that writes 600 and 1000 tokens on two tasks.

  At the deadline one agent wrote 400 tokens in 40 s, 0.01 per ms. It needs
  80 s for the 800 tokens that the collective writes on average.
  """
  asked = []

  def play(name, deadline_ms):
    asked.append((name, deadline_ms))
    return solo

  evaluator = types.SimpleNamespace(
      play=play, grid_ms=lambda limit_ms: np.linspace(0, limit_ms, 5)
  )
  result = evaluate._matched_tokens(
      evaluator,
      'solo',
      make_rollouts(
          output_tokens=[[500, 100], [300, 700]],
          progress=np.float32(collective_progress),
          progress_ms=[10_000, 20_000],
      ),
      make_rollouts(
          output_tokens=[[100, 0], [200, 100]], time_ms=[10_000, 30_000]
      ),
  )
  assert asked == [('solo', 80_000)]
  assert result['solo_deadline_ms'] == 80_000
  assert result['output_tokens_mean'] == 800.0
  return result


def test_matched_tokens_by_hand():
  solo = make_rollouts(
      # At 0, 20, 40, 60 and 80 s.
      curve=np.float32([[0, 0.25, 0.5, 0.5, 0.75], [0, 0, 0, 0.25, 0.25]]),
      progress=np.float32([0.75, 0.25]),
  )
  result = matched(solo, [0.5, 0.25])
  # 40 s and 60 s, where the collective took 10 s and 20 s.
  assert result['time_ratio'] == pytest.approx(100 / 30)
  low, high = result['time_ratio_ci95']  # Of 40 / 10 and 60 / 20.
  assert low == pytest.approx(3.0) and high == pytest.approx(4.0)
  assert result['solo_return_mean'] == 0.5
  assert result['never_reached_share'] == 0.0


def test_who_never_reaches_it_counts_with_all_the_time_there_was():
  solo = make_rollouts(
      curve=np.float32([[0, 0.25, 0.5, 0.5, 0.75], [0, 0, 0, 0.25, 0.25]]),
      progress=np.float32([0.75, 0.25]),
  )
  result = matched(solo, [0.5, 1.0])
  assert result['time_ratio'] == pytest.approx((40 + 80) / (10 + 20))
  assert result['never_reached_share'] == 0.5


def test_rounding_does_not_keep_a_return_from_being_reached():
  almost = np.nextafter(np.float32(0.3), np.float32(0))
  solo = make_rollouts(
      curve=np.float32([[0, 0, almost, 1, 1]] * 2),
      progress=np.float32([1.0, 1.0]),
  )
  result = matched(solo, [0.3, 0.3])
  assert result['time_ratio'] == pytest.approx((40 + 40) / (10 + 20))


# What is missing.


def test_a_missing_checkpoint_is_told(tmp_path):
  with pytest.raises(FileNotFoundError) as told:
    evaluate.evaluate(tiny.config(), tmp_path)
  text = str(told.value)
  assert str(tmp_path) in text and 'no checkpoint of collective' in text
  assert 'train it first' in text and '\n' not in text
  assert not list(tmp_path.iterdir())


def test_a_missing_baseline_is_told(tmp_path):
  run = train.build(tiny.config())
  saved = train.checkpoints.Checkpoints(tmp_path / 'checkpoints')
  saved.save(run.init())
  saved.close()
  with pytest.raises(FileNotFoundError, match='no checkpoint of solo'):
    evaluate.evaluate(tiny.config(train_solo=True), tmp_path)
