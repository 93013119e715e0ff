"""Tests of what agents read and write, on the project of `by_hand`."""

import jax
import numpy as np
import pytest
from rlcr_jax.llm import prompts
from rlcr_jax.llm.prompts import Command
from rlcr_jax.llm.prompts import Message
from tests.by_hand import Game
from tests.by_hand import make_collective

LATE_MS = 60_000
VERBS = make_collective().verbs
NAMES = [verb.name for verb in VERBS]


def command(name, *parts):
  return Command(NAMES.index(name), *parts)


LINES = {
    'work 3': command('work', 3),
    'read 0': command('read', 0),
    'wait': command('wait'),
    'hire': command('hire'),
    'fire 2': command('fire', 0, 2),
    'tell 4 about 3: it is finished': command('tell', 3, 4, 'it is finished'),
    'post about 1: mine': command('post', 1, 0, 'mine'),
    'post about 1:': command('post', 1),
}


@pytest.mark.parametrize('line', LINES)
def test_commands_are_read_as_they_are_written(line):
  assert prompts.read(VERBS, line) == LINES[line]
  assert prompts.write(VERBS, LINES[line]) == line


@pytest.mark.parametrize(
    'text',
    [
        '',
        '\n \n',
        'works 3',
        'work',
        'work three',
        'work -1',
        'work 3 now',
        'Work 3',
        'work 3\nand then read 1',
        'tell 4 about 3',
        'tell about 3: x',
        'post 3: x',
        'fire',
        'hire 2',
        'I say: wait',
    ],
)
def test_what_is_not_well_formed_is_no_command(text):
  assert prompts.read(VERBS, text) is None


def test_the_last_line_counts_and_reasoning_may_come_before():
  text = 'Module 3 is free.\nwork 1 is taken.\n\n  work 3  \n\n'
  assert prompts.read(VERBS, text) == command('work', 3)


def test_white_space_of_any_kind_does_not_break_a_line():
  read = prompts.read(VERBS, 'post about 1:\ra\x0bb\x85 c\u2028')
  assert read == command('post', 1, 0, 'a b c')


def test_numbers_of_any_length_are_read():
  read = prompts.read(VERBS, 'work 99999999999999999999')
  assert read.target == 2**31 - 1


def see(game, agent=0):
  return jax.device_get(game.observe(agent))


@pytest.mark.parametrize(
    'line, legal',
    [
        ('work 0', True),
        ('work 2', False),  # It needs 0.
        ('work 4', False),  # There is none.
        ('read 0', False),  # It is not finished.
        ('wait', True),
        ('tell 2 about 1: mine', True),
        ('tell 0 about 1: mine', False),  # To oneself.
        ('tell 9 about 1: mine', False),
        ('post about 1: mine', True),
        ('post about 2: mine', False),  # Neither known nor open.
        ('hire', False),
        ('fire 1', False),
    ],
)
def test_what_is_legal(line, legal):
  obs = see(Game(LATE_MS).advance())
  action, ok = prompts.action(VERBS, obs, prompts.read(VERBS, line))
  assert ok == legal
  assert action.verb == NAMES.index(line.split()[0])
  if legal and 'tell' in line:
    assert obs.peer_seat[action.peer] == 2


@pytest.mark.parametrize('organisation', ['flat', 'ceo', 'solo'])
def test_all_that_is_permitted_is_legal_and_nothing_else_is(organisation):
  game = Game(LATE_MS, organisation=organisation).advance()
  obs = see(game)
  permitted = prompts.permitted(VERBS, obs)
  assert len(set(permitted)) == len(permitted)
  every = [
      prompts.write(VERBS, Command(v, t, p))
      for v in range(len(VERBS))
      for t in range(4)
      for p in range(3)
  ]
  legal = {
      line
      for line in every
      if prompts.action(VERBS, obs, prompts.read(VERBS, line))[1]
  }
  assert set(permitted) == legal


def moment(game, **changes):
  state = jax.device_get(game.state)
  values = {
      'task': jax.device_get(game.task),
      'description': game.collective.env.describe(game.task),
      'world': state.world,
      'clock_ms': game.now_ms,
      'deadline_ms': LATE_MS,
      'progress': float(game.progress),
      'present': state.present,
      'chief': bool(game.rules.hiring),
      'board': {},
  }
  return prompts.Moment(**(values | changes))


def test_a_prompt_by_hand():
  game = Game(LATE_MS).advance().act(0, 'work', 0).advance()
  collective = game.collective
  text = prompts.Prompts(collective).user(
      moment(game, board={1: Message(2, 1, 'mine'), 0: Message(1, 0, '')}),
      0,
      see(game),
      np.asarray(game.state.knows[0]),
      'work 0: done',
      [Message(1, 3, 'hello')],
  )
  assert text.splitlines() == [
      'time 5 of 60 s, progress 0.10',
      'you are agent 0 of 0, 1, 2',
      'last: work 0: done',
      'from 1 about 3: hello',
      'board 0 by 1:',
      'board 1 by 2: mine',
      'module 0: finished, interface known',
      'module 1: 2 units left, work 1',
      'module 2: 3 units left, work 2',
      'module 3: 1 units left',
      'also: wait, tell 1|2 about 0|1|2, post about 0|1|2',
  ]


def test_the_chief_is_told_that_it_may_hire():
  game = Game(LATE_MS, organisation='ceo').advance()
  text = prompts.Prompts(game.collective).user(
      moment(game), 0, see(game), np.asarray(game.state.knows[0]), '', []
  )
  assert 'you are agent 0 (chief) of 0' in text
  assert text.splitlines()[-1] == 'also: wait, hire'
  assert 'last' not in text


@pytest.mark.parametrize('reasoning', [False, True])
def test_the_rules_name_every_command_and_the_task(reasoning):
  game = Game(LATE_MS).advance()
  written = prompts.Prompts(game.collective, reasoning)
  chat = written.messages(moment(game), 'hello')
  assert [m['role'] for m in chat] == ['system', 'user']
  assert chat[1]['content'] == 'hello'
  system = chat[0]['content']
  assert (
      'Commands: work M; read M; wait; tell A about M: TEXT;'
      ' post about M: TEXT; hire; fire A\n'
  ) in system
  assert system.endswith(game.collective.env.describe(game.task))
  assert ('Think' in system) == reasoning
