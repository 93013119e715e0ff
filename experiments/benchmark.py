"""Measures the simulator and the update, as ratios within one process.

  python -m experiments.benchmark --json=FILE [--config.FIELD=VALUE ...]

On the default configuration, with policies that hire all they may and otherwise
act as a fresh network does, or at random:

  decisions_per_s   decisions of a full update (play, score, learn) per second
  efficiency        time of the bare network on the same decisions (forward, and
                    forward + backward, at its best chunk size) / full update
  packed_vs_dense   time of a dense scan over ticks, in which every agent of
                    every collective is evaluated at every tick / packed loop
  turns_per_s       turns per second of the simulator alone: hire all, otherwise
                    uniformly random, no network
  turns_vs_software the same in every environment / in `software`
  peak_memory_gib   of the process (resident set)
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import platform
import resource
import statistics
import time
from typing import Any

from absl import flags
from envs import base
from envs import registry
from experiments import cli
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from rich.table import Table
from rlcr_jax import files
from rlcr_jax import learner as learner_lib
from rlcr_jax import rollout
from rlcr_jax import train
from rlcr_jax.observation import HIRE
from rlcr_jax.policies import scripted
from rlcr_jax.policies import transformer

JSON = flags.DEFINE_string('json', None, 'File that the figures go to.')
REPEATS = flags.DEFINE_integer(
    'repeats', 5, 'Timed repeats; the median counts.'
)
_CHUNKS = (64, 128, 256, 512)  # Chunk sizes tried for the bare network.
_SIMULATED = 256  # Collectives per device in the simulator's benchmark.


@dataclasses.dataclass(frozen=True)
class HireAll:
  """Another policy, except that it hires whenever it may."""

  inner: transformer.TransformerPolicy | scripted.RandomPolicy

  def init(self, key):
    """Of the other policy."""
    return self.inner.init(key)

  def sample(self, params, keys, obs):
    """Draws from the other policy, then overrides the verb."""
    action, log_prob = self.inner.sample(params, keys, obs)
    hire = self.inner.collective.verb(HIRE)
    hires = obs.legal_verb[:, hire]
    keep = lambda part: jnp.where(hires, 0, part)
    action = jax.tree.map(keep, action)
    return action._replace(verb=jnp.where(hires, hire, action.verb)), log_prob

  def log_prob(self, params, obs, action):
    """Of the other policy."""
    return self.inner.log_prob(params, obs, action)


def play_dense(collective, policy, params, tasks, rules, keys, ticks: int):
  """The straightforward reference: every agent is evaluated at every tick.

  Args:
    collective: all durations are multiples of its time quantum, one tick.
    policy: who decides.
    params: its parameters.
    tasks: leaves [B, ...].
    rules: [B] each.
    keys: [B] rollout keys.
    ticks: number of time quanta until the last deadline.

  Returns:
    Final states [B]; the rollouts are those of `rollout.play`.
  """
  batch, n = keys.shape[0], collective.num_agents
  seats = jnp.arange(batch * n)
  world_keys, agent_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
  states = jax.vmap(collective.reset)(tasks, rules, agent_keys)

  def tick(states, index):
    turn, _ = rollout.decide(
        collective, policy, params, tasks, rules, states, seats
    )
    turn = jax.tree.map(lambda x: x.reshape(batch, n), turn)
    now = index * collective.latency.quantum_ms
    current = (states.clock_ms == now)[:, None]
    waits = jax.vmap(collective.ready)(states) & current
    states = jax.vmap(collective.act)(rules, states, waits, turn)
    due = jnp.where(states.busy, states.turn.end_ms, jnp.iinfo(jnp.int32).max)
    next_ms = jnp.minimum(due.min(1), rules.deadline_ms)
    may = next_ms <= now + collective.latency.quantum_ms
    states, _ = jax.vmap(collective.advance)(
        tasks, rules, states, world_keys, may
    )
    return states, None

  return jax.lax.scan(tick, states, jnp.arange(ticks))[0]


def _seconds(call: Callable[[], Any]) -> float:
  """Wall clock of a call."""
  began = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - began


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
  """Median wall clock of a call, after one that compiles."""
  jax.block_until_ready(call())
  return statistics.median(_seconds(call) for _ in range(repeats))


class Benchmark:
  """The pieces that are timed, all on the same mesh."""

  def __init__(self, run: train.Run, repeats: int):
    self.run, self.repeats = run, repeats
    self.config = run.config.rlcr
    ((self.env, part),) = run.learner.parts.items()
    self.collective = part.collective
    self.mesh = run.learner.mesh
    self.policy = HireAll(part.policy)
    self.learner = learner_lib.Learner(
        {self.env: part._replace(policy=self.policy)},
        self.config,
        self.mesh,
        run.config.incentive,
    )
    self.params = self.learner.init(jax.random.key(0)).params
    limits = jnp.full(self.config.tasks, run.config.deadline.final_ms)
    self.rules = run.rules('collective', limits.astype(jnp.int32))[self.env]
    self.index = jnp.arange(self.config.tasks)

  def _sharded(self, function):
    """Compiles `function(params, *split)` and binds the parameters."""
    split = PartitionSpec(learner_lib.DATA)
    call = jax.jit(
        lambda params, *args: jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(PartitionSpec(),) + (split,) * len(args),
            out_specs=split,
            check_vma=False,
        )(params, *args)
    )
    return functools.partial(call, self.params)

  def full_update(self) -> tuple[float, int]:
    """Seconds of an update, and its decisions."""
    knobs = self.run.config.knobs(0, 2)
    update = jax.jit(self.learner.update)  # Without donation, to repeat it.
    state = self.learner.init(jax.random.key(0))
    given = {self.env: self.index}, {self.env: self.rules}
    call = lambda: update(state, *given, knobs)[1][self.env]
    seconds = _median_seconds(call, self.repeats)
    return seconds, int(call().rollouts.decisions)

  def _play(self, params, policy, chunk_size, capacity, index, rules):
    return rollout.play_groups(
        self.collective,
        policy,
        params,
        jax.random.key(1),
        index,
        rules,
        group_size=self.config.group_size,
        chunk_size=chunk_size,
        capacity=capacity,
    )

  def packed(self) -> float:
    """Seconds to play a batch with the packed loop."""

    def play(params, index, rules):
      return self._play(
          params, self.policy, self.config.chunk_size, 0, index, rules
      )[0].progress

    call = self._sharded(play)
    return _median_seconds(lambda: call(self.index, self.rules), self.repeats)

  def dense(self) -> float:
    """Seconds to play the same batch with the dense scan."""
    quantum_ms = self.collective.latency.quantum_ms
    ticks = -(-self.run.config.deadline.final_ms // quantum_ms)

    def play(params, index, rules):
      tasks, rules, keys = rollout.group_inputs(
          self.collective,
          jax.random.key(1),
          index,
          rules,
          self.config.group_size,
      )
      states = play_dense(
          self.collective, self.policy, params, tasks, rules, keys, ticks
      )
      return states.clock_ms

    call = self._sharded(play)
    return _median_seconds(lambda: call(self.index, self.rules), 1)

  def bare_network(self) -> dict[int, float]:
    """Seconds of the network alone on an update's decisions, by chunk size."""
    local = self.config.tasks // self.mesh.size * self.config.group_size

    def record(params, index, rules):
      buffer = self._play(
          params,
          self.policy,
          self.config.chunk_size,
          self.config.max_decisions * local,
          index,
          rules,
      )[1]
      return buffer.rows, buffer.count[None]

    rows, count = self._sharded(record)(self.index, self.rules)
    return {size: self._bare_seconds(rows, count, size) for size in _CHUNKS}

  def _bare_seconds(self, rows, count, size: int) -> float:
    """Forward, then forward and backward, over all recorded decisions."""
    score = lambda params, rows: jnp.sum(
        self.policy.log_prob(params, rows.observation, rows.action)[0]
    )

    def sweep(function, zero, params, rows, count):
      def body(index, total):
        chunk = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size), rows
        )
        return jax.tree.map(jnp.add, total, function(params, chunk))

      return jax.lax.fori_loop(0, -(-count[0] // size), body, zero)

    def both(params, rows, count):
      forward = sweep(score, jnp.float32(0), params, rows, count)
      zeros = jax.tree.map(jnp.zeros_like, params)
      grads = sweep(jax.grad(score), zeros, params, rows, count)
      return forward[None], jax.tree.map(lambda x: x[None], grads)

    call = self._sharded(both)
    return _median_seconds(lambda: call(rows, count), self.repeats)

  def _simulator(self, env: base.Environment) -> Callable[[], Any]:
    """Plays random agents in full teams, without a network."""
    tasks = _SIMULATED * self.mesh.size  # One rollout each.
    collective = dataclasses.replace(self.collective, env=env)
    policy = HireAll(scripted.RandomPolicy(collective))
    rules = jax.tree.map(lambda x: jnp.resize(x, (tasks,)), self.rules)

    def play(params, index, rules):
      played = rollout.play_groups(
          collective,
          policy,
          params,
          jax.random.key(1),
          index,
          rules,
          group_size=1,
          chunk_size=_SIMULATED,
      )[0]
      return played.progress, played.decisions[None]

    call = self._sharded(play)
    return lambda: call(jnp.arange(tasks), rules)[1]

  def simulators(self) -> dict[str, float]:
    """Turns per second in every environment.

    They are timed in alternation: other load on the machine meets them all.
    """
    envs = {name: registry.make(name) for name in registry.names()}
    envs[self.env] = self.collective.env
    calls = {name: self._simulator(env) for name, env in envs.items()}
    turns = {name: int(call().sum()) for name, call in calls.items()}
    times = [
        {name: _seconds(call) for name, call in calls.items()}
        for _ in range(self.repeats)
    ]
    return {
        name: count / statistics.median(row[name] for row in times)
        for name, count in turns.items()
    }


def measure(run: train.Run, repeats: int) -> dict[str, Any]:
  """All figures of one process."""
  bench = Benchmark(run, repeats)
  update_s, decided = bench.full_update()
  bare_s = bench.bare_network()
  packed_s, dense_s = bench.packed(), bench.dense()
  turns = bench.simulators()
  peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return {
      'decisions_per_s': decided / update_s,
      'efficiency': min(bare_s.values()) / update_s,
      'packed_vs_dense': dense_s / packed_s,
      'turns_per_s': turns[bench.env],
      'turns_vs_software': {
          name: speed / turns['software'] for name, speed in turns.items()
      },
      'peak_memory_gib': peak_kib / 2**20,
      'decisions_per_update': decided,
      'seconds': {
          'full_update': update_s,
          'packed_loop': packed_s,
          'dense_scan': dense_s,
          'bare_network_by_chunk_size': bare_s,
      },
      'chunk_size': run.config.rlcr.chunk_size,
      'rollouts': run.config.rlcr.tasks * run.config.rlcr.group_size,
      'hardware': {
          'platform': jax.default_backend(),
          'devices': bench.mesh.size,
          'device_kind': jax.devices()[0].device_kind,
          'machine': platform.machine(),
          'jax': jax.__version__,
      },
  }


def main() -> None:
  """Measures, prints and writes the figures."""
  result = measure(train.build(cli.config()), REPEATS.value)
  table = Table(title='Benchmark')
  table.add_column('figure')
  table.add_column('value', justify='right')
  ratios = result['turns_vs_software']
  ratios = {f'turns_vs_software, {name}': x for name, x in ratios.items()}
  for name, value in (result | ratios).items():
    if isinstance(value, (int, float)):
      table.add_row(name, f'{value:,.2f}')
  cli.CONSOLE.print(table)
  if JSON.value:
    files.write_json(pathlib.Path(JSON.value), result)
    cli.CONSOLE.print(f'written: {JSON.value}')


if __name__ == '__main__':
  cli.run(main)
