"""What an agent reads and writes: the collective as text, commands as actions.

A command is one line: the verb, the peer, the target, the text of a message, as
far as the verb takes them:

  work 3      wait      tell 4 about 3: it is finished      fire 2

The command is the last line that is not empty; lines before it are reasoning,
which costs its tokens and its time like any other output.
"""

from collections.abc import Iterator
import dataclasses
import re
from typing import Any, NamedTuple

from envs import base
import numpy as np
from rlcr_jax import channels
from rlcr_jax.collective import Collective
from rlcr_jax.observation import Action
from rlcr_jax.observation import Observation


class Message(NamedTuple):
  """A delivered message, as its reader sees it."""

  sender: int  # A seat.
  target: int
  text: str


class Command(NamedTuple):
  """A command that was understood; parts that the verb does not take are 0."""

  verb: int
  target: int = 0
  peer: int = 0  # A seat.
  text: str = ''


class Moment(NamedTuple):
  """One collective at one instant, on the host, as text is made from it."""

  task: base.Task  # Leaves without a batch axis, like those of the world.
  description: str  # Of the task, as text.
  world: base.World
  clock_ms: int
  deadline_ms: int
  progress: float
  present: np.ndarray  # [N] bool.
  chief: bool  # Does agent 0 hire and fire?
  board: dict[int, Message]  # The latest post about each target.
  issues: channels.Issues | None = None  # The issue board, if there is one.
  archive: np.ndarray | None = None  # [M] bool, likewise.
  island: int = 0  # Which team this is
  islands: int = 1  # of how many, each in a world of its own.


def write(verbs: tuple[base.VerbSpec, ...], command: Command) -> str:
  """The line that `read` understands as this command."""
  verb = verbs[command.verb]
  line = _form(verb, str(command.peer), str(command.target))
  return f'{line}: {command.text}'.rstrip() if verb.takes_symbol else line


def _form(verb: base.VerbSpec, peer: str, target: str) -> str:
  """A command without the text of its message."""
  words = [verb.name]
  words += [peer] * verb.takes_peer
  words += ['about'] * (verb.takes_target and verb.takes_symbol)
  words += [target] * verb.takes_target
  return ' '.join(words)


def read(verbs: tuple[base.VerbSpec, ...], text: str) -> Command | None:
  """The command of a completion; None where it is not well formed.

  Args:
    verbs: those of a collective.
    text: reasoning, if any, and then one line that is the command.
  """
  lines = [' '.join(line.split()) for line in text.split('\n')]
  lines = [line for line in lines if line]
  line = lines[-1] if lines else ''
  for index, verb in enumerate(verbs):
    pattern = verb.name
    pattern += r' (?P<peer>\d+)' * verb.takes_peer
    if verb.takes_target:
      pattern += r' about' * verb.takes_symbol + r' (?P<target>\d+)'
    pattern += r':\s*(?P<text>.*)' * verb.takes_symbol
    match = re.fullmatch(pattern, line)
    if match:
      found = match.groupdict()
      number = lambda part, found=found: min(int(found.get(part, 0)), 2**31 - 1)
      return Command(
          index, number('target'), number('peer'), found.get('text', '')
      )
  return None


def action(verbs, obs: Observation, command: Command) -> tuple[Action, bool]:
  """The action of a command, and whether it may have an effect.

  Args:
    verbs: those of a collective.
    obs: what the agent sees; leaves without a batch axis.
    command: what it wrote.
  """
  verb = verbs[command.verb]
  legal = bool(obs.legal_verb[command.verb])
  target = peer = 0
  if verb.takes_target:
    targets = obs.legal_target[command.verb]
    inside = command.target < len(targets)
    target = command.target if inside else 0
    legal &= inside and bool(targets[target])
  if verb.takes_peer:
    at = np.flatnonzero(obs.legal_peer & (obs.peer_seat == command.peer))
    peer = int(at[0]) if at.size else 0
    legal &= at.size > 0
  return Action(command.verb, target, peer, 0), legal


def permitted(verbs, obs: Observation) -> tuple[str, ...]:
  """All commands that are legal now; one that ends in ':' needs a text."""
  lines = []
  peers = obs.peer_seat[obs.legal_peer].tolist()
  for index in np.flatnonzero(obs.legal_verb).tolist():
    verb = verbs[index]
    targets = np.flatnonzero(obs.legal_target[index]).tolist()
    for peer in peers if verb.takes_peer else [0]:
      for target in targets if verb.takes_target else [0]:
        lines.append(write(verbs, Command(index, target, peer)))
  return tuple(lines)


@dataclasses.dataclass(frozen=True)
class Prompts:
  """Renders what an agent reads as chat messages."""

  collective: Collective
  reasoning: bool = False  # Invite reasoning before the command?
  rules: bool = True  # Say them? A model that was warm-started knows them.

  def system(self, moment: Moment) -> str:
    """The rules and the task: the same for all of a team, and at all times."""
    task = moment.description
    if moment.islands > 1:
      task += (
          f'\nYours is team {moment.island} of {moment.islands}. The teams'
          ' cannot talk to each other, and the best result counts: go a way of'
          ' your own.'
      )
    if not self.rules:
      return task
    forms = [
        _form(verb, 'A', 'M') + ': TEXT' * verb.takes_symbol
        for verb in self.collective.verbs
    ]
    ask = (
        'Think briefly if it helps; the last line is your command.'
        if self.reasoning
        else 'Answer with one command.'
    )
    return (
        'You are an agent of a team with one task. What counts is the'
        ' progress when time is up; thinking, writing and reading take'
        f' time.\n{ask}\nCommands: {"; ".join(forms)}\n{task}'
    )

  def user(
      self,
      moment: Moment,
      agent: int,
      obs: Observation,
      knows: np.ndarray,
      last: str,
      inbox: list[Message],
  ) -> str:
    """What has become of the task, and what others said.

    Args:
      moment: the collective.
      agent: a seat.
      obs: what the agent sees; leaves without a batch axis.
      knows: [M] bool, the facts that it knows.
      last: its last command and what became of it; '' for none.
      inbox: direct messages since its last turn.
    """
    env = self.collective.env
    team = ', '.join(str(seat) for seat in np.flatnonzero(moment.present))
    role = ' (chief)' if moment.chief and agent == 0 else ''
    seconds = lambda ms: f'{ms / 1000:.0f}'
    lines = [
        f'time {seconds(moment.clock_ms)} of {seconds(moment.deadline_ms)} s,'
        f' progress {moment.progress:.2f}',
        f'you are agent {agent}{role} of {team}',
    ]
    lines += [f'last: {last}'] * bool(last)
    lines += [
        f'from {m.sender} about {m.target}: {m.text}'.rstrip() for m in inbox
    ]
    lines += [
        f'board {target} by {m.sender}: {m.text}'.rstrip()
        for target, m in sorted(moment.board.items())
    ]
    lines += self._shared(moment)
    legal = obs.legal_target[: len(env.verbs)]
    lines.append(env.describe_view(moment.task, moment.world, knows, legal))
    lines.append('also: ' + ', '.join(self._others(obs)))
    return '\n'.join(lines)

  def _shared(self, moment: Moment) -> Iterator[str]:
    """What is on the issue board and in the archive."""
    if moment.issues is not None:
      words = {
          channels.OPEN: 'open',
          channels.CLAIMED: 'claimed by {}',
          channels.CLOSED: 'closed',
      }
      listed = [
          f'{target} ' + words[int(status)].format(owner)
          for target, (status, owner) in enumerate(
              zip(moment.issues.status, moment.issues.owner, strict=True)
          )
          if status != channels.UNLISTED
      ]
      yield 'issues: ' + (', '.join(listed) or 'none')
    if moment.archive is not None:
      kept = map(str, np.flatnonzero(moment.archive))
      yield 'archive: ' + (', '.join(kept) or 'empty')

  def _others(self, obs: Observation) -> Iterator[str]:
    """What else is legal, alternatives together: `tell 1|2 about 3`."""
    peers = '|'.join(map(str, obs.peer_seat[obs.legal_peer]))
    for index in np.flatnonzero(obs.legal_verb):
      verb = self.collective.verbs[index]
      targets = '|'.join(map(str, np.flatnonzero(obs.legal_target[index])))
      if index >= len(self.collective.env.verbs) or not verb.takes_target:
        yield _form(verb, peers, targets)

  def messages(self, moment: Moment, user: str) -> list[dict[str, Any]]:
    """The chat: the rules and the task, then the agent's view."""
    return [
        {'role': 'system', 'content': self.system(moment)},
        {'role': 'user', 'content': user},
    ]
