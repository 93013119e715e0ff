"""Tests of RLCR with text, on a random model whose every word is chance."""

from experiments.configs import llm_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import advantages
from rlcr_jax import checkpoints
from rlcr_jax import incentives
from rlcr_jax import train
from rlcr_jax.llm import play
from rlcr_jax.llm import prompts
from tests import tiny


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Where the runs of this module share one warm start."""
  return tmp_path_factory.mktemp('llm')


def make_config(**llm):
  config = llm_tiny.get_config('smoke')
  config.deadline.first_ms = config.deadline.final_ms = 40_000
  config.llm.update(llm)
  return config


@pytest.fixture(scope='module')
def run(workdir):
  """A run whose model was warm-started for two steps."""
  return train.build(make_config(), workdir)


@pytest.fixture(scope='module')
def start(run):
  """The state before the first update."""
  return run.init()


def knobs(run):
  return run.config.rlcr.knobs(0, 2)


def rules(run):
  limits = jnp.full(run.config.rlcr.tasks, 40_000, jnp.int32)
  return run.rules('collective', limits)


def one(tree):
  return jax.tree.map(lambda x: x[:1], tree)


def few_tokens(config, played, knobs):
  """An incentive that differs between rollouts of a model that babbles."""
  del config, knobs
  return -jnp.asarray(played.output_tokens).sum(2) / 100.0


@pytest.fixture(scope='module')
def stepped(run, start):
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(incentives.INCENTIVES, 'deadline_return', few_tokens)
    return tiny.learn(run.learner, start, rules(run), knobs(run))


def same(left, right):
  pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
  return all(np.array_equal(a, b) for a, b in pairs)


def test_an_update_has_the_fields_of_the_simulated_path(run, stepped):
  state, update = stepped
  assert int(state.step) == 1
  assert update.returns.shape == (2, 2)
  assert update.finite and not update.overflow
  assert update.grad_norm > 0 and update.entropy > 0
  assert update.log_prob_gap < 1e-4  # Recomputed as sampled.
  row = train.metrics.summarise(
      tiny.only(run.collectives).verbs, update, np.array([40_000]), knobs(run)
  )
  assert 0 <= row['malformed_share'] <= 1
  assert row['decisions'] == update.rollouts.decisions > 0
  assert all(isinstance(value, float) for value in row.values())


def test_the_same_seed_gives_the_same_update(run, start, stepped, monkeypatch):
  monkeypatch.setitem(incentives.INCENTIVES, 'deadline_return', few_tokens)
  again, update = tiny.learn(run.learner, start, rules(run), knobs(run))
  assert same(again.params, stepped[0].params)
  assert same(update.rollouts, stepped[1].rollouts)
  assert not same(again.params, start.params)


def test_weights_go_to_the_engine_when_they_have_changed(
    run, start, monkeypatch
):
  served, engine = [], run.learner.engine
  honest = engine.update
  monkeypatch.setattr(
      engine, 'update', lambda params: (served.append(params), honest(params))
  )
  other = jax.tree.map(lambda x: x + 0, start.params)
  for params in (other, other, start.params, other):
    run.learner.play(
        'software',
        params,
        start.key,
        jnp.arange(1),
        one(rules(run)['software']),
    )
  assert [any(p is q for q in served) for p in (other, start.params)] == [1, 1]
  assert len(served) == 3


def test_without_any_signal_nothing_changes(run, start, monkeypatch):
  monkeypatch.setitem(
      incentives.INCENTIVES,
      'deadline_return',
      lambda config, played, knobs: played.time_ms * 0,
  )
  state, update = tiny.learn(run.learner, start, rules(run), knobs(run))
  assert update.informative == 0
  assert same(state.params, start.params)
  assert same(state.opt_state, start.opt_state)
  assert int(state.step) == 1


def test_a_state_survives_its_checkpoint(run, stepped, tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(stepped[0])
  restored = saved.restore(run.init())
  saved.close()
  assert same(restored.params, stepped[0].params)
  assert same(restored.opt_state, stepped[0].opt_state)


def test_adapters_alone_are_the_state(run, start, workdir, monkeypatch):
  monkeypatch.setitem(incentives.INCENTIVES, 'deadline_return', few_tokens)
  small = train.build(make_config(lora_rank=2), workdir)
  state = small.init()
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  assert size(state.params) < size(start.params) / 2
  assert same(small.learner.model.merged(state.params), start.params)
  _, update = tiny.learn(small.learner, state, rules(small), knobs(small))
  assert update.finite and update.grad_norm > 0
  assert update.log_prob_gap < 1e-4


@pytest.mark.parametrize(
    'changes', [{'grammar': True}, {'top_k': 3}, {'top_p': 0.5}]
)
def test_another_sampling_distribution_shows_as_a_gap(
    start, workdir, monkeypatch, changes
):
  monkeypatch.setitem(incentives.INCENTIVES, 'deadline_return', few_tokens)
  other = train.build(make_config(**changes), workdir)
  _, update = tiny.learn(other.learner, start, rules(other), knobs(other))
  assert update.finite and update.log_prob_gap > 0.01
  if 'grammar' in changes:
    assert update.extra['malformed_share'] == update.extra['illegal_share'] == 0


def test_every_token_has_its_weight_and_the_advantage_of_its_rollout(run):
  said = []
  for rollout, agent, written in ((0, 0, 3), (0, 1, 1), (1, 0, 2), (2, 0, 9)):
    utterance = play.Utterance(
        'wait', written, 0, (1, 2), np.arange(written), np.zeros(written)
    )
    said.append(
        play.Said(rollout, agent, 0, 0, utterance, prompts.Command(0), True)
    )
  scored = advantages.estimate(
      'group_mean',
      jnp.array([[1.0, 0.0], [1, 1]]),
      jnp.ones((2, 2, 3), jnp.int32),
  )
  samples = run.learner._samples(said, scored)
  # The second group has no signal; six tokens of the first share the weight.
  assert [len(s.ids) for s in samples] == [3, 1, 2]
  assert [s.advantage for s in samples] == [0.5, 0.5, -0.5]
  assert sum(s.weight * len(s.ids) for s in samples) == pytest.approx(1.0)
  assert len({s.weight for s in samples}) == 1


def said_by(rollout, agent):
  utterance = play.Utterance('wait', 2, 0, (1, 2), np.arange(2), np.zeros(2))
  return play.Said(rollout, agent, 0, 0, utterance, prompts.Command(0), True)


def test_agents_have_advantages_of_their_own(run):
  """Agent 1 speaks in the first rollout only, and is compared with nobody."""
  said = [said_by(0, 0), said_by(0, 1), said_by(0, 1), said_by(1, 0)]
  turns = jnp.array([[[1, 2, 0], [1, 0, 0]], [[0, 0, 0]] * 2])
  scored = advantages.estimate(
      'agent_z_score', jnp.array([[1.0, 0.0], [1, 1]]), turns
  )
  samples = run.learner._samples(said, scored)
  assert [s.advantage for s in samples] == [1, 0, 0, -1]
  assert len({s.weight for s in samples}) == 1


@pytest.mark.parametrize(
    'name', ['latency_penalty', 'toggle', 'parl', 'deadline_return']
)
def test_every_incentive_is_played_with_agent_wise_advantages(
    start, workdir, name
):
  config = make_config()
  config.incentive.name = name
  config.rlcr.advantage = 'agent_z_score'
  other = train.build(config, workdir)
  knobs = other.config.knobs(0, 2)
  _, update = tiny.learn(other.learner, start, rules(other), knobs)
  assert update.finite and update.returns.shape == (2, 2)
  assert np.isfinite(np.asarray(update.returns)).all()


def test_there_is_no_critic(workdir):
  config = make_config()
  config.rlcr.advantage = 'gae'
  with pytest.raises(ValueError, match="rlcr.advantage='gae' is not allowed"):
    train.build(config, workdir)


def test_a_missing_model_is_told(tmp_path):
  with pytest.raises(ValueError, match='llm.model=.*nowhere.* is not allowed'):
    train.build(make_config(model='nowhere', warm_steps=0), tmp_path)


def rows_of(gaps):
  return [{'step': i, 'log_prob_gap': gap} for i, gap in enumerate(gaps)]


def test_a_gap_that_grows_stops_the_run(run):
  steady, grown = [1e-3] * 10, [0.03] * 10
  train._check_gap(rows_of(steady + steady), 'collective', run.config)
  train._check_gap(rows_of(grown + grown), 'collective', run.config)
  with pytest.raises(train.GapError) as told:
    train._check_gap(rows_of(steady + grown), 'collective', run.config)
  text = str(told.value)
  assert '0.001' in text and '0.03' in text and 'max_gap_growth' in text
