"""The smallest run that still has everything: seconds to compile, none to play.

Tests that share it share its compiled programs.
"""

import ml_collections
from rlcr_jax import config as config_lib


def config(**changes) -> ml_collections.ConfigDict:
  """A locked config: 4 x 4 rollouts of up to 3 agents on 4 modules.

  Args:
    **changes: fields by name, with `__` for the dot of a section's field.
  """
  small = config_lib.defaults('software')
  small.env.num_modules = 4
  small.env.width = 2
  small.collective.num_agents = 3
  small.collective.max_hires = 2
  small.collective.peer_window = 2
  small.deadline.schedule = 'linear'
  small.deadline.first_ms = 60_000
  small.deadline.final_ms = 180_000
  small.deadline.ramp = 0.5
  small.rlcr.tasks = 4
  small.rlcr.group_size = 4
  small.rlcr.chunk_size = 32
  small.rlcr.max_decisions = 60
  small.rlcr.max_grad_norm = 1.0
  small.rlcr.adam_b1 = 0.9
  small.policy.width = 8
  small.policy.layers = 1
  small.policy.heads = 2
  small.evaluation.num_tasks = 8
  small.evaluation.deadlines = 2
  small.num_devices = 1
  small.steps = 4
  small.checkpoint_every = 2
  small.train_solo = False
  small.train_muted = False
  small.lock()
  for name, value in changes.items():
    *sections, field = name.split('__')
    target = small
    for section in sections:
      target = target[section]
    target[field] = value
  return small


def only(parts):
  """The value of the only part."""
  (value,) = parts.values()
  return value


def learn(learner, state, rules, knobs):
  """One update of a learner that has one part."""
  (env,) = learner.parts
  rules = rules if isinstance(rules, dict) else {env: rules}
  state, updates = learner.step(state, rules, knobs)
  return state, updates[env]
