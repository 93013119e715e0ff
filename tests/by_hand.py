"""Small collectives that are played by hand, with every number stated.

The project that `make_task` gives has four modules. 2 needs 0, and 3 needs 0
and 1; whoever writes them must know the facts of what they need:

  module   effort   tests   tests per unit   progress   needs
  0        1        2       2                0.10
  1        2        6       3                0.30
  2        3        9       3                0.45       0
  3        1        3       3                0.15       0, 1

Times are whole seconds, and nothing is left to chance:

  reading the task   3 s        tell   1 s
  work               2 s        post   2 s
  read               1 s        hire   2 s
  wait               1 s        fire   1 s
"""

import functools

from envs import software
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax import clock
from rlcr_jax import collective as collective_lib

WORK, READ = 0, 1
LATENCY = {
    'prefill_tokens_per_s': 1000.0,
    'decode_tokens_per_s': 100.0,
    'spread': 0.0,
    'quantum_ms': 1000,
}
_ENV = {
    'num_modules': 4,
    'width': 2,
    'coupling': 1.0,
    'conflicts': True,
    'work_tokens': 100.0,
    'work_tool_ms': 1000,
    'read_tokens': 50.0,
    'read_tool_ms': 500,
}
_COLLECTIVE = {
    'organisation': 'flat',
    'num_agents': 3,
    'max_hires': 2,
    'direct': True,
    'board': True,
    'num_symbols': 2,
    'peer_window': 8,
    'task_tokens': 3000,
    'tell_tokens': 50.0,
    'post_tokens': 100.0,
    'message_tool_ms': 500,
    'hire_tokens': 100.0,
    'hire_tool_ms': 1000,
    'fire_tokens': 100.0,
    'wait_tokens': 10.0,
    'wait_ms': 900,
}


def make_collective(env=None, latency=None, **changes):
  """A collective of the numbers above, some of them changed."""
  return collective_lib.Collective(
      software.Software(**(_ENV | (env or {}))),
      collective_lib.CollectiveConfig(**(_COLLECTIVE | changes)),
      clock.LatencyModel(**(LATENCY | (latency or {}))),
  )


def make_task(env: software.Software) -> software.Task:
  """The project of the table above."""
  depends = np.zeros((4, 4), bool)
  depends[2, 0] = depends[3, 0] = depends[3, 1] = True
  ints = functools.partial(jnp.array, dtype=jnp.int32)
  return env.sample_task(jax.random.key(0))._replace(
      depends=jnp.array(depends),
      coupled=jnp.array(depends),
      effort=ints([1, 2, 3, 1]),
      tests=ints([2, 6, 9, 3]),
      below=ints([4, 3, 3, 1]),
      above=ints([1, 2, 4, 3]),
  )


def batch_rules(rules_of_each):
  """Rules of several rollouts, [B] each."""
  return jax.tree.map(lambda *x: jnp.stack(x), *rules_of_each)


@functools.cache
def _compiled(collective):
  """The functions of a collective, compiled once per set of shapes."""
  step = lambda task, rules, state: collective.advance(
      task, rules, state, jax.random.key(0)
  )[0]
  return jax.jit(step), jax.jit(collective.act), jax.jit(collective.observe)


class Game:
  """Plays one collective by hand: `act` for some agents, then `advance`."""

  def __init__(self, deadline_ms, collective=None, **rules):
    self.collective = collective or make_collective()
    self.task = make_task(self.collective.env)
    self.rules = self.collective.config.rules(deadline_ms, **rules)
    self.state = self.collective.reset(self.task, self.rules, jax.random.key(0))

  @property
  def now_ms(self) -> int:
    """The clock."""
    return int(self.state.clock_ms)

  @property
  def ready(self) -> list[int]:
    """Who is free to decide."""
    return np.flatnonzero(self.collective.ready(self.state)).tolist()

  @property
  def progress(self) -> float:
    """The anytime return."""
    env, state = self.collective.env, self.state
    return round(float(env.progress(self.task, state.world, state.clock_ms)), 4)

  def booked(self, field: str) -> dict[str, int]:
    """The ledger's entries that are not 0, by verb."""
    return self._by_verb(getattr(self.state.ledger, field))

  def spent(self) -> dict[str, int]:
    """The output tokens so far, by verb."""
    return self._by_verb(self.collective.spent_tokens(self.state))

  def _by_verb(self, values) -> dict[str, int]:
    verbs = self.collective.verbs
    return {
        v.name: int(x) for v, x in zip(verbs, values, strict=True) if int(x)
    }

  def observe(self, agent: int):
    """What an agent sees."""
    observe = _compiled(self.collective)[2]
    return observe(self.task, self.rules, self.state, jnp.int32(agent))

  def act(self, agent: int, verb: str, target=0, *, legal=True, **changes):
    """Begins a turn of the median length; `changes` are fields of `Turn`."""
    index, state = self.collective.verb(verb), self.state
    tokens = int(self.collective.verbs[index].output_tokens)
    duration_ms = self.collective.duration_ms(
        state, agent, index, changes.get('output_tokens', tokens)
    )
    turn = {
        'verb': index,
        'target': target,
        'peer': 0,
        'symbol': 0,
        'legal': legal,
        'output_tokens': tokens,
        'start_ms': self.now_ms,
        'end_ms': self.now_ms + int(duration_ms),
    }
    n = self.collective.num_agents
    turn = collective_lib.Turn(
        **{
            name: jnp.full((n,), value, bool if name == 'legal' else jnp.int32)
            for name, value in (turn | changes).items()
        }
    )
    act = _compiled(self.collective)[1]
    self.state = act(self.rules, state, jnp.arange(n) == agent, turn)
    return self

  def advance(self, times: int = 1):
    """Goes to the next event, or to one after it."""
    for _ in range(times):
      step = _compiled(self.collective)[0]
      self.state = step(self.task, self.rules, self.state)
    return self
