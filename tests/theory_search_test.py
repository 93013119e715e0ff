"""The simulator reproduces what is known of parallel search and of rumours.

One find is hidden in one of M equal places; agents probe in lockstep, a round
at a time, and nothing is left to chance but their choices.

Searchers that know nothing of each other go through the places in private
random orders. Each of k has the find at a uniform rank, and the first to reach
it ends the search, so the rounds are the least of k independent ranks (ties are
allowed: several may come upon it in one round). Of that

  P(rounds >= j) = ((M - j + 1) / M) ** k,  so  E = sum_{j=1..M} (j / M) ** k,

which exceeds (M + 1) / (k + 1), the mean of the least of k different ranks, by
less than 1/2 + k / (12 M) rounds: what it costs to act in rounds. Searchers
that divide the places need ceil(rank / k) rounds, on average M / (2 k) + 1/2.
"""

import dataclasses
import itertools

from envs import search
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import rollout
from rlcr_jax.observation import Action
from rlcr_jax.policies import scripted
from tests import exact

M = 24
TEAMS = (1, 2, 4, 8)  # Divisors of M.
REPEATS = 20  # Searches per place and team.
TASK_MS = 6000  # Reading the task: 30,000 tokens at 5000 per second.
ROUND_MS = 2000  # Every turn: 100 tokens at 100 per second, tool, reading.
SIGMAS = 3.0  # Half the width of the intervals, in standard errors: 99.7%.

ENV = search.Search(
    num_places=M,
    region_size=M,
    num_rich=1,
    per_region=1,
    probe_tokens=100,
    probe_tool_ms=500,
)


def make_collective(agents):
  return exact.make_collective(
      ENV,
      agents,
      exact.ROUND | {'quantum_ms': ROUND_MS},
      peer_window=agents,
      task_tokens=30_000,
      tell_tokens=100,
      post_tokens=100,
      message_tool_ms=500,  # The rest of a round is for reading messages.
      wait_tokens=100,
      wait_ms=500,
  )


TEAM = make_collective(max(TEAMS))


def one_find(place, private=True):
  """Tasks with the find at `place` [B]; all places are private, or public."""
  place = jnp.asarray(place)
  alike = place.shape[0]
  return search.Task(
      rich=jnp.ones((alike, 1), bool),
      find=place[:, None] == jnp.arange(M)[None, :],
      clue=jnp.zeros((alike, M, 1), bool),
      private=jnp.full((alike, M), private),
  )


@dataclasses.dataclass(frozen=True)
class OnlyVerb(scripted.RandomPolicy):
  """Draws at random, but always with one verb."""

  verb: str = 'probe'

  def sample(self, params, keys, obs):
    only = jnp.arange(len(self.collective.verbs))[None, :]
    only = only == self.collective.verb(self.verb)
    return super().sample(
        params, keys, obs._replace(legal_verb=obs.legal_verb & only)
    )


def play(policy, tasks, deadline_ms=exact.NEVER_MS, **rules):
  """Plays the same tasks [B] with each team: leaves [team, B, ...]."""
  mute = {'direct': False, 'board': False}
  rules = exact.make_rules(TEAMS, [deadline_ms], **mute, **rules)
  return exact.play(TEAM, policy, tasks, rules)


def rounds(played):
  """Rounds until the find [team, B]; everybody probed once in each."""
  count, rest = np.divmod(played.time_ms - TASK_MS, ROUND_MS)
  np.testing.assert_array_equal(rest, 0)
  np.testing.assert_array_equal(played.progress, 1.0)
  probes = played.turns[..., search.PROBE] / np.array(TEAMS)[:, None]
  np.testing.assert_array_equal(probes, count)
  return count


def test_private_random_orders_need_the_least_of_several_ranks():
  tasks = one_find(np.repeat(np.arange(M), REPEATS))
  count = rounds(play(OnlyVerb(TEAM), tasks))
  rank = np.arange(1, M + 1)
  for agents, times in zip(TEAMS, count, strict=True):
    at_least = ((M - rank + 1) / M) ** agents
    chance = at_least - np.append(at_least[1:], 0.0)
    mean = (rank * chance).sum()
    error = np.sqrt(((rank - mean) ** 2 * chance).sum() / len(times))
    assert abs(times.mean() - mean) <= SIGMAS * error
    assert mean == pytest.approx(((rank / M) ** agents).sum())


def test_the_least_rank_is_near_the_continuous_formula():
  rank = np.arange(1, M + 1)
  for agents in range(1, M + 1):
    excess = ((rank / M) ** agents).sum() - (M + 1) / (agents + 1)
    assert -1e-9 <= excess < 0.5 + agents / (12 * M)


def test_searchers_that_see_each_other_divide_the_places():
  policy = scripted.ListScheduler(TEAM)
  tasks = one_find(np.arange(M))  # All that there are: no chance is left.
  count = rounds(play(policy, tasks, awareness=True, free_facts=True))
  for agents, times in zip(TEAMS, count, strict=True):
    np.testing.assert_array_equal(times, np.arange(M) // agents + 1)
    assert times.mean() == M / (2 * agents) + 0.5


def test_dividing_the_places_nearly_halves_the_time_of_a_large_team():
  """(M + 1) / (k + 1) over M / (2 k): 2 k / (k + 1), up to the rounding."""
  mean = lambda agents: ((np.arange(1, M + 1) / M) ** agents).sum()
  ratio = [mean(agents) / (M / (2 * agents) + 0.5) for agents in TEAMS]
  assert ratio[0] == pytest.approx(1.0)
  assert (np.diff(ratio) > 0).all() and ratio[-1] < 2.0


def test_one_uniform_probe_each_covers_what_chance_lets_it():
  # Where places are public, the first probe of a place is the effective one.
  tasks = one_find(np.repeat(np.arange(M), REPEATS), private=False)
  played = play(OnlyVerb(TEAM), tasks, TASK_MS + ROUND_MS)
  assert (played.turns[..., search.PROBE] == np.array(TEAMS)[:, None]).all()
  covered = np.asarray(played.effective[..., search.PROBE])
  for k, places in zip(TEAMS, covered, strict=True):
    mean = M * (1 - (1 - 1 / M) ** k)
    # Of the pairs of places, (1 - 2/M) ** k are both missed.
    missed, both = M * (1 - 1 / M) ** k, M * (M - 1) * (1 - 2 / M) ** k
    variance = max(both + missed - missed**2, 0.0)
    error = np.sqrt(variance / len(places))
    assert abs(places.mean() - mean) <= SIGMAS * error + 1e-9


CROWD = make_collective(16)


class _Spread(scripted.RandomPolicy):
  """First seat 0 probes place 0; then its fact is spread.

  Its parameters are the number of the round. Whoever has nothing to say waits.
  """

  def sample(self, params, keys, obs):
    seat = (obs.peer_seat[:, 0] - 1) % self.collective.num_agents
    column = self.collective.env.feature_names.index('blank')
    verb, peer = self.speak(params, seat, obs.targets[:, 0, column] > 0, keys)
    verb = jnp.where(params == 0, jnp.where(seat == 0, 0, self._wait), verb)
    action = Action(verb, jnp.zeros_like(verb), peer, jnp.zeros_like(verb))
    return action, jnp.zeros(verb.shape)

  @property
  def _wait(self):
    return self.collective.verb('wait')


@dataclasses.dataclass(frozen=True)
class Doubling(_Spread):
  """In round r every seat below 2 ** (r - 1) tells the one that much above."""

  agents: int = 1

  def speak(self, number, seat, known, keys):
    ahead = 2 ** jnp.maximum(number - 1, 0)
    tells = known & (seat < ahead) & (seat + ahead < self.agents)
    verb = jnp.where(tells, self.collective.verb('tell'), self._wait)
    peer = jnp.minimum(ahead, self.collective.num_peers) - 1
    return verb, jnp.broadcast_to(peer, seat.shape)


@dataclasses.dataclass(frozen=True)
class Rumour(_Spread):
  """Everybody tells somebody at random, whether there is news or not."""

  agents: int = 1

  def speak(self, number, seat, known, keys):
    del number, known
    step = lambda key: jax.random.randint(key, (), 1, max(self.agents, 2))
    other = (seat + jax.vmap(step)(keys)) % self.agents
    peer = (other - seat - 1) % self.collective.num_agents
    return jnp.full(seat.shape, self.collective.verb('tell')), peer


class Board(_Spread):
  """Seat 0 posts the fact in round 1."""

  def speak(self, number, seat, known, keys):
    posts = known & (seat == 0) & (number == 1)
    verb = jnp.where(posts, self.collective.verb('post'), self._wait)
    return verb, jnp.zeros_like(seat)


def spread(policy, agents, count, seed=0):
  """Who knows the fact of place 0 after each of `count` rounds, and turns."""
  task = jax.tree.map(lambda x: x[0], one_find(np.array([M - 1])))
  rules = CROWD.config.rules(3_600_000, num_agents=agents)
  batch = lambda tree: jax.tree.map(lambda x: x[None], tree)
  key = jax.random.key(seed)

  def step(state, number):
    turn, _ = rollout.decide(
        CROWD,
        policy,
        number,
        batch(task),
        batch(rules),
        batch(state),
        jnp.arange(CROWD.num_agents),
    )
    state = CROWD.act(rules, state, CROWD.ready(state), turn)
    state, ready = CROWD.advance(task, rules, state, key)
    lockstep = state.clock_ms == TASK_MS + ROUND_MS * (number + 1)
    lockstep &= jnp.sum(ready) == agents
    return state, (jnp.sum(state.knows[:, 0]), lockstep)

  @jax.jit
  def run():
    start, _ = CROWD.advance(task, rules, CROWD.reset(task, rules, key), key)
    return jax.lax.scan(step, start, jnp.arange(count))

  state, (knowers, lockstep) = run()
  assert lockstep.all()
  names = [verb.name for verb in CROWD.verbs]
  turns = dict(zip(names, state.ledger.turns.tolist(), strict=True))
  return knowers.tolist(), turns


@pytest.mark.parametrize('agents', [2, 5, 8, 16])
def test_messages_spread_a_fact_in_the_least_number_of_rounds(agents):
  least = int(np.ceil(np.log2(agents)))
  knowers, turns = spread(Doubling(CROWD, agents), agents, 1 + least)
  assert knowers == [min(2**r, agents) for r in range(1 + least)]
  assert turns['tell'] == agents - 1  # Nobody is told twice.


@pytest.mark.parametrize('agents, seed', [(5, 0), (16, 1), (16, 2)])
def test_no_messages_spread_a_fact_faster_than_doubling(agents, seed):
  knowers, _ = spread(Rumour(CROWD, agents), agents, 16, seed)
  assert knowers[0] == 1 and knowers[-1] == agents
  for before, after in itertools.pairwise(knowers):
    assert before <= after <= 2 * before
  assert knowers.index(agents) >= np.ceil(np.log2(agents))


@pytest.mark.parametrize('agents', [2, 16])
def test_one_post_is_enough_where_there_is_a_board(agents):
  knowers, turns = spread(Board(CROWD), agents, 3)
  assert knowers == [1, 1, agents]  # A board is read when a turn begins.
  assert (turns['post'], turns['tell']) == (1, 0)
