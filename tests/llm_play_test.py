"""Tests of the host's loop: the same clock and the same world as compiled."""

import functools

from envs import software
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlcr_jax import collective as collective_lib
from rlcr_jax import rollout
from rlcr_jax.llm import play
from rlcr_jax.llm import prompts
from rlcr_jax.policies import scripted
from tests import by_hand

COLLECTIVE = collective_lib.Collective(
    software.Software(num_modules=5, width=3),
    collective_lib.CollectiveConfig(num_agents=4, max_hires=3, peer_window=3),
)
GRID_MS = np.linspace(0, 180_000, 19).astype(np.int32)
POLICIES = {
    'random': scripted.RandomPolicy(COLLECTIVE),
    'oracle': scripted.ListScheduler(COLLECTIVE, 3),
}


def inputs(tasks, group_size, **changes):
  rules = COLLECTIVE.config.rules(150_000, **changes)
  rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (tasks,)), rules)
  return rollout.group_inputs(
      COLLECTIVE, jax.random.key(5), jnp.arange(tasks), rules, group_size
  )


@pytest.mark.parametrize('name', POLICIES)
@pytest.mark.parametrize('organisation', ['ceo', 'flat', 'solo'])
def test_a_scripted_speaker_gives_the_rollouts_of_the_compiled_path(
    name, organisation
):
  policy = POLICIES[name]
  given = inputs(3, 2, organisation=organisation, free_facts=name == 'oracle',
                 awareness=name == 'oracle')  # fmt: skip
  speaker = play.ScriptedSpeaker(COLLECTIVE, policy)
  played = play.play(COLLECTIVE, speaker, *given, grid_ms=GRID_MS)
  compiled = jax.jit(
      functools.partial(rollout.play, COLLECTIVE, policy, chunk_size=64)
  )
  expected, _ = compiled({}, *given, grid_ms=GRID_MS)
  ours = played.rollouts._asdict()
  for field, value in expected._asdict().items():
    if field != 'iterations':
      np.testing.assert_array_equal(ours[field], value, err_msg=field)
  assert len(played.said) == expected.decisions


class Script:
  """Says what is written for (agent, turn); else waits. Keeps what it sees."""

  def __init__(self, lines, tokens=100, context=0):
    self.lines, self.tokens, self.context = lines, tokens, context
    self.seen = {}

  def __call__(self, free, scene):
    del scene
    for who in free:
      # A copy, since the loop goes on with the same lists.
      board = dict(who.moment.board)
      self.seen[who.agent, who.turn_index] = who._replace(
          inbox=list(who.inbox), moment=who.moment._replace(board=board)
      )
    return [
        play.Utterance(
            self.lines.get((who.agent, who.turn_index), 'wait'),
            self.tokens,
            self.context,
        )
        for who in free
    ]


def by_hand_play(
    lines, deadline_ms=30_000, organisation='flat', error_ms=0, **costs
):
  """One rollout of the project of `by_hand`; what was seen, and all turns."""
  collective = by_hand.make_collective()
  task = by_hand.make_task(collective.env)
  rules = collective.config.rules(deadline_ms, organisation=organisation)
  one = lambda tree: jax.tree.map(lambda x: x[None], tree)
  script = Script(lines, **costs)
  keys = jax.random.split(jax.random.key(0), 1)
  played = play.play(
      collective, script, one(task), one(rules), keys, error_ms=error_ms
  )
  return script.seen, played


def said(played, agent):
  return [turn for turn in played.said if turn.agent == agent]


def test_a_turn_takes_what_was_read_and_written_and_its_tool():
  # 3 s to read the task; 250 tokens 2.5 s, 300 read 0.3 s, 1 s to work.
  _, played = by_hand_play({(0, 0): 'work 0'}, tokens=250, context=300)
  first = said(played, 0)[0]
  assert (first.start_ms, first.end_ms) == (3000, 7000)
  assert first.legal and first.effective and first.outcome == 'done'
  assert played.rollouts.progress[0] == np.float32(0.1)


def test_what_is_not_understood_costs_its_tokens_and_does_nothing():
  seen, played = by_hand_play({(0, 0): 'work zero'}, tokens=250)
  first = said(played, 0)[0]
  assert first.command is None and not first.legal and not first.effective
  assert (first.start_ms, first.end_ms) == (3000, 6000)  # No tool.
  assert first.outcome == 'not understood'
  assert seen[0, 1].last == 'your command: not understood'
  assert played.rollouts.progress[0] == 0
  spent = sum(turn.end_ms <= 30_000 for turn in played.said) * 250
  open_ = [t for t in played.said if t.end_ms > 30_000]
  written = played.rollouts.output_tokens.sum()
  assert spent <= written <= spent + 250 * len(open_)


def test_an_error_may_cost_time_of_its_own():
  _, played = by_hand_play({(0, 0): 'work zero'}, tokens=250, error_ms=2000)
  first = said(played, 0)[0]
  assert (first.start_ms, first.end_ms) == (3000, 8000)


def test_an_illegal_command_is_no_effect_and_takes_its_time():
  seen, played = by_hand_play({(0, 0): 'work 2'})
  first = said(played, 0)[0]
  assert first.command is not None and not first.legal
  assert first.end_ms == 5000  # 1 s to write, 1 s of the tool.
  assert seen[0, 1].last == 'work 2: no effect'


def test_the_text_of_a_direct_message_reaches_its_reader_alone():
  lines = {(0, 0): 'tell 2 about 1: I take it', (2, 0): 'work 0'}
  seen, _ = by_hand_play(lines)
  message = prompts.Message(0, 1, 'I take it')
  assert seen[2, 0].inbox == [] and seen[2, 1].inbox == [message]
  assert seen[2, 2].inbox == []  # It was read.
  assert all(who.inbox == [] for (n, _), who in seen.items() if n != 2)


def test_a_post_is_seen_by_all_from_when_it_lands():
  lines = {(0, 0): 'post about 1: mine', (1, 0): 'work 1', (2, 0): 'work 0'}
  seen, _ = by_hand_play(lines)
  assert seen[1, 0].moment.board == {}
  later = {key: who.moment.board for key, who in seen.items() if key[1] >= 2}
  assert later
  assert all(b == {1: prompts.Message(0, 1, 'mine')} for b in later.values())


def test_an_illegal_message_is_not_delivered():
  seen, _ = by_hand_play(
      {(0, 0): 'tell 1 about 2: x', (2, 0): 'post about 3: y'}
  )
  assert all(not w.inbox and not w.moment.board for w in seen.values())


def test_a_newcomer_starts_with_an_empty_inbox_and_one_fired_is_silent():
  lines = {
      (0, 0): 'hire',  # 1 comes at 5 s and has read at 8 s.
      (0, 1): 'wait',
      (0, 2): 'tell 1 about 0: welcome',
      (0, 3): 'wait',
      (1, 0): 'wait',
      (1, 1): 'tell 0 about 0: too late',
      (0, 4): 'fire 1',
      (0, 5): 'hire',
  }
  seen, played = by_hand_play(lines, organisation='ceo', deadline_ms=60_000)
  fired = [t for t in said(played, 0) if t.utterance.text == 'fire 1'][0]
  assert fired.outcome == 'done'
  late = [t for t in said(played, 1) if 'too late' in t.utterance.text]
  heard = [m.text for (n, _), w in seen.items() if n == 0 for m in w.inbox]
  assert heard == ['too late'] * (late[0].outcome == 'done')
  welcome = [w for (n, _), w in seen.items() if n == 1 and w.inbox]
  assert len(welcome) <= 1
  newcomers = [w for w in seen.values() if w.agent == 1 and not w.last]
  assert newcomers and all(w.last == '' for w in newcomers)


def test_a_turn_that_is_cut_short_says_so():
  _, played = by_hand_play({(0, 0): 'work 0'}, deadline_ms=4000)
  assert [turn.outcome for turn in played.said] == ['cut short'] * 3


def test_rollouts_do_not_depend_on_their_neighbours():
  policy = POLICIES['random']
  speaker = play.ScriptedSpeaker(COLLECTIVE, policy)
  tasks, rules, keys = inputs(3, 2)
  whole = play.play(COLLECTIVE, speaker, tasks, rules, keys).rollouts
  some = lambda tree: jax.tree.map(lambda x: x[2:5], tree)
  part = play.play(COLLECTIVE, speaker, some(tasks), some(rules), keys[2:5])
  for field in ('progress', 'turns', 'output_tokens', 'time_ms'):
    np.testing.assert_array_equal(
        getattr(part.rollouts, field), getattr(whole, field)[2:5]
    )
