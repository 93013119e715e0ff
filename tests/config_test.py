"""Tests of how a configuration is made, checked and compared."""

import dataclasses
import json

import ml_collections
import pytest
from rlcr_jax import config as config_lib

# A leaf that takes one of few names, and another name that is allowed.
OTHER = {
    'collective.organisation': 'flat',
    'deadline.schedule': 'staged',
    'incentive.name': 'latency_penalty',
    'rlcr.advantage': 'rloo',
    'rlcr.discount_per': 'second',
    'rlcr.loss': 'clipped_surrogate',
    'rlcr.aggregation': 'agent_mean',
    'policy.name': 'llm',
    'policy.prior': 'work=2',
    'llm.dtype': 'bfloat16',
    'evaluation.final_ms': 900_000,  # At least the first deadline.
}
# Leaves of which there is one value only; anything else must be refused.
SINGLE = ('env.name',)


def changed(**changes):
  """The defaults, with ample time and other changes; `__` is a dot."""
  tree = config_lib.defaults().to_dict()
  ample = {'deadline__first_ms': 200_000, 'deadline__final_ms': 800_000}
  for name, value in (ample | changes).items():
    *sections, field = name.split('__')
    target = tree
    for section in sections:
      target = target.setdefault(section, {})
    target[field] = value
  return ml_collections.ConfigDict(tree)


def resolved_leaves(config):
  tree = dataclasses.asdict(config_lib.resolve(config))
  run = tree.pop('run')
  ((name, knobs),) = tree.pop('envs').items()
  assert tree.pop('weights') == {name: 1.0}
  tree['env'] = knobs
  leaves = config_lib.leaves(tree | run)
  return leaves | {'policy.name': leaves['policy_name']}


LEAVES = config_lib.leaves(changed().to_dict())


def another(name, value):
  """A value of the same type that is allowed too."""
  if name in OTHER:
    return OTHER[name]
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value * 2 if value else 1
  if isinstance(value, str):
    return '/other'
  return value / 2 if value else 0.5


def test_defaults_resolve_and_hold_every_field():
  config_lib.resolve(config_lib.defaults())
  leaves = resolved_leaves(changed())
  assert leaves.pop('policy_name') == leaves['policy.name']
  assert leaves == {k: v for k, v in LEAVES.items() if k != 'env.name'}


@pytest.mark.parametrize('name', [n for n in LEAVES if n not in SINGLE])
def test_every_leaf_changes_the_resolved_run(name):
  value = another(name, LEAVES[name])
  changes = {name.replace('.', '__'): value}
  if name == 'rlcr.epochs':
    changes['rlcr__loss'] = 'clipped_surrogate'
  if name == 'llm.server_url':
    changes['llm__server_reload'] = '/reload'
  before, after = map(resolved_leaves, (changed(), changed(**changes)))
  differs = {k for k in before if before[k] != after[k]} - {'policy_name'}
  assert differs == {k.replace('__', '.') for k in changes}
  assert after[name] == value


@pytest.mark.parametrize('name', SINGLE)
def test_the_only_value_is_the_only_one_allowed(name):
  with pytest.raises(ValueError) as told:
    config_lib.resolve(changed(**{name.replace('.', '__'): 'other'}))
  assert f"{name}='other' is not allowed" in str(told.value)
  assert LEAVES[name] in str(told.value)


@pytest.mark.parametrize(
    'name, value, allowed',
    [
        ('steps', 0, '>= 1'),
        ('checkpoint_every', 0, '>= 1'),
        ('seed', -1, 'from 0 to 2**32 - 1'),
        ('num_devices', -1, '>= 0'),
        ('env.name', 'chess', 'software'),
        ('env.num_modules', 0, '>= 1'),
        ('env.width', 99, 'from 1 to num_modules='),
        ('env.coupling', 1.5, 'from 0 to 1'),
        ('env.density', -0.5, 'from 0 to 1'),
        ('collective.num_agents', 0, '>= 1'),
        ('collective.organisation', 'anarchy', 'ceo'),
        ('collective.max_hires', -1, '>= 0'),
        ('collective.tell_tokens', 0.0, '>= 1 token'),
        ('latency.decode_tokens_per_s', 0.0, '> 0'),
        ('latency.spread', -0.1, '>= 0'),
        ('latency.quantum_ms', 0, '>= 1'),
        ('deadline.schedule', 'sometimes', 'linear'),
        ('deadline.final_ms', 1, '>= deadline.first_ms='),
        ('deadline.ramp', 1.5, 'from 0 to 1'),
        ('incentive.name', 'fame', 'deadline_return'),
        ('incentive.anneal', 0.0, 'above 0, at most 1'),
        ('rlcr.group_size', 1, '>= 2'),
        ('rlcr.clip', float('nan'), '> 0'),
        ('policy.name', 'mlp', 'transformer'),
        ('llm.temperature', 0.0, '> 0, since decisions must be drawn'),
        ('llm.top_p', 1.5, 'above 0, at most 1'),
        ('llm.width', 30, 'a multiple of 2 * llm.heads=8'),
        ('llm.max_tokens', 1024, 'below llm.context=1024'),
        ('llm.dtype', 'int8', 'bfloat16'),
        ('llm.warm_skill', 1.5, '0 to 1'),
        ('llm.vocab_size', 256, '>= 300'),
        ('policy.heads', 3, 'a divisor of policy.width='),
        ('policy.prior', 'rest=1', 'about verbs of these worlds, which are ['),
        ('evaluation.num_tasks', 1, '>= 2'),
        ('evaluation.deadlines', 1, '>= 2'),
        ('evaluation.first_ms', -1, '>= 1 ms, or 0'),
        ('evaluation.final_ms', 199_999, '>= the shortest one, 200000 ms'),
    ],
)
def test_a_bad_value_is_told_with_field_value_and_what_is_allowed(
    name, value, allowed
):
  with pytest.raises(ValueError) as told:
    config_lib.resolve(changed(**{name.replace('.', '__'): value}))
  text = str(told.value)
  assert f'{name}={value!r} is not allowed: it must be ' in text
  assert allowed in text and '\n' not in text


def test_a_deadline_shorter_than_any_action_is_told():
  # 5 s to read 25,000 tokens of task; then at least 0.5 s of decoding at
  # exp(-2 * 0.2) of the median, 1 s of tool, up to the next full second.
  quick = {
      'latency__prefill_tokens_per_s': 5000.0,
      'latency__decode_tokens_per_s': 100.0,
      'latency__spread': 0.2,
      'latency__quantum_ms': 1000,
      'collective__task_tokens': 25_000,
      'env__work_tokens': 74.6,  # Times exp(-0.4): 50 tokens.
      'env__work_tool_ms': 1000,
      'env__read_tokens': 1000.0,
      'env__read_tool_ms': 30_000,
      'deadline__final_ms': 60_000,
  }
  config_lib.resolve(changed(**quick, deadline__first_ms=7000))
  with pytest.raises(ValueError) as told:
    config_lib.resolve(changed(**quick, deadline__first_ms=6999))
  assert 'deadline.first_ms=6999 is not allowed' in str(told.value)
  assert '>= 7000 ms' in str(told.value)


def test_a_language_model_has_no_critic():
  with pytest.raises(ValueError) as told:
    config_lib.resolve(changed(policy__name='llm', rlcr__advantage='gae'))
  text = str(told.value)
  assert "rlcr.advantage='gae' is not allowed" in text
  assert 'agent_z_score' in text and 'policy.name=llm' in text
  config_lib.resolve(
      changed(policy__name='llm', rlcr__advantage='agent_z_score')
  )


@pytest.mark.parametrize('organisation', ['solo', 'flat'])
def test_hiring_is_not_rewarded_where_nobody_can_hire(organisation):
  parl = {'incentive__name': 'parl'}
  config_lib.resolve(changed(**parl))
  with pytest.raises(ValueError, match="incentive.name='parl' is not allowed"):
    config_lib.resolve(changed(collective__organisation=organisation, **parl))


@pytest.mark.parametrize(
    'changes, warned',
    [
        ({}, False),
        ({'rlcr__advantage': 'z_score'}, True),
        ({'rlcr__advantage': 'agent_z_score'}, True),
        ({'rlcr__advantage': 'rloo'}, False),
        ({'rlcr__advantage': 'z_score', 'incentive__penalty': 0.0}, False),
        (
            {'rlcr__advantage': 'z_score', 'incentive__name': 'toggle'},
            False,
        ),
    ],
)
def test_latency_divided_by_a_deviation_is_warned_of(changes, warned):
  changes = {'incentive__name': 'latency_penalty'} | changes
  told = config_lib.resolve(changed(**changes)).warnings()
  assert len(told) == warned
  if warned:
    assert changes['rlcr__advantage'] in told[0] and '\n' not in told[0]
    assert 'latency_penalty' in told[0] and 'group_mean' in told[0]


def test_knobs_are_those_of_the_update_and_of_the_incentive():
  resolved = config_lib.resolve(changed(incentive__name='parl'))
  knobs = resolved.knobs(0, 10)
  assert knobs._replace(incentive={}) == resolved.rlcr.knobs(0, 10)
  assert set(knobs.incentive) == {'parallel', 'finish'}
  assert config_lib.resolve(changed()).knobs(0, 10).incentive == {}


@pytest.mark.parametrize(
    'name, told',
    [
        ('stps', 'stps=1'),
        ('rlcr.tsks', 'rlcr.tsks=1'),
        ('env.modules', 'env.modules=1'),
        ('policy.depth', 'policy.depth=1'),
        ('nothing.x', 'nothing='),
    ],
)
def test_an_unknown_field_is_told(name, told):
  with pytest.raises(ValueError, match=told.replace('.', r'\.')):
    config_lib.resolve(changed(**{name.replace('.', '__'): 1}))


@pytest.mark.parametrize(
    'name, value',
    [
        ('steps', 'many'),
        ('steps', 2.5),
        ('rlcr.tasks', None),
        ('rlcr.learning_rate', 'high'),
        ('collective.board', 'yes'),
        ('env.num_modules', 4.5),
        ('policy.width', '32'),
        ('rlcr', 3),
    ],
)
def test_a_value_of_another_type_is_told(name, value):
  with pytest.raises(ValueError, match=name.replace('.', r'\.')):
    config_lib.resolve(changed(**{name.replace('.', '__'): value}))


def test_whole_numbers_do_where_fractions_are_expected():
  config = changed(latency__spread=0, rlcr__learning_rate=1)
  assert config_lib.resolve(config).latency.spread == 0


def test_the_evaluation_has_the_deadlines_of_training_or_its_own():
  resolve = lambda **c: config_lib.resolve(changed(**c))
  evaluated_ms = lambda **c: resolve(**c).test_deadlines_ms()
  assert evaluated_ms() == (200_000, 800_000)
  assert evaluated_ms(evaluation__first_ms=5) == (5, 800_000)
  assert evaluated_ms(evaluation__final_ms=900_000) == (200_000, 900_000)


def test_leaves_by_hand():
  assert config_lib.leaves({'a': 1, 'b': {'c': {'d': 2}, 'e': 'f'}}) == {
      'a': 1,
      'b.c.d': 2,
      'b.e': 'f',
  }


def test_json_round_trip():
  config = changed(seed=7, rlcr__learning_rate=0.1 + 0.2)
  again = ml_collections.ConfigDict(json.loads(config_lib.to_json(config)))
  assert again.to_dict() == config.to_dict()
  assert config_lib.resolve(again) == config_lib.resolve(config)
  assert config_lib.to_json(again) == config_lib.to_json(config)


def test_differences_by_hand():
  old = {'a': 1, 'b': {'c': 2.0, 'd': 'x'}, 'gone': True, 'e': {'f': 1}}
  new = {'a': 1, 'b': {'c': 2.5, 'd': 'y'}, 'new': None, 'e': 5}
  assert config_lib.differences(old, new) == [
      'b.c: 2.0 → 2.5',
      "b.d: 'x' → 'y'",
      "e: {'f': 1} → 5",
      "gone: True → '(absent)'",
      "new: '(absent)' → None",
  ]
  assert config_lib.differences(old, old) == []


@pytest.mark.parametrize('name', ['seed', 'evaluation.seed'])
@pytest.mark.parametrize('value', [-1, 2**32])
def test_a_seed_that_a_key_cannot_hold_is_told(name, value):
  with pytest.raises(ValueError, match=f'{name}={value} '):
    config_lib.resolve(changed(**{name.replace('.', '__'): value}))
