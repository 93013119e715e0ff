"""A language model that speaks for the agents of a collective."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from envs.base import NotAllowedError
from rlcr_jax.llm import engine as engine_lib
from rlcr_jax.llm import play
from rlcr_jax.llm import prompts as prompts_lib
from rlcr_jax.llm import tokens


@dataclasses.dataclass
class EngineSpeaker:
  """Renders what the free agents read, samples, and counts tokens.

  An agent's first prompt is new to it in full; after that only its view is, for
  the rules and the task stay in its context.
  """

  prompts: prompts_lib.Prompts
  engine: engine_lib.Engine
  tokenizer: tokens.Tokenizer
  sampling: engine_lib.Sampling
  context: int  # Most tokens of a prompt and its completion.
  grammar: bool = False
  messages_cut: int = 0  # Left out of prompts that were too long.
  reused: int = 0  # Prompt tokens that the engine had read before,
  read: int = 0  # of so many.

  def __post_init__(self):
    self._prefixes: dict[str, tuple[int, ...]] = {}

  def __call__(
      self, free: list[play.Free], scene: play.Scene
  ) -> list[play.Utterance]:
    """See `play.Speaker`."""
    at = [who.rollout for who in free], [who.agent for who in free]
    verbs = self.prompts.collective.verbs
    requests = []
    for who, key in zip(free, scene.draw[at], strict=True):
      commands = None
      if self.grammar:
        commands = prompts_lib.permitted(verbs, who.observation)
      prefix, suffix = self.prompt(who)
      requests.append(engine_lib.Request(prefix, suffix, key, commands))
    completions = self.engine.generate(requests, self.sampling)
    spoken = zip(free, requests, completions, strict=True)
    return [self._utterance(*row) for row in spoken]

  def _utterance(self, who, request, completion) -> play.Utterance:
    prompt = request.prefix + request.suffix
    self.reused += completion.cached_tokens
    self.read += len(prompt)
    new = request.suffix if who.turn_index else prompt
    return play.Utterance(
        text=self.tokenizer.plain(completion.text),
        output_tokens=len(completion.ids),
        context_tokens=len(new),
        prompt=prompt,
        ids=completion.ids,
        log_probs=completion.log_probs,
    )

  def prompt(self, who: play.Free) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids: what all agents of a task share, and this agent's view.

    The oldest messages are left out of a prompt that is too long.

    Raises:
      NotAllowedError: if it is too long without any message.
    """
    inbox, board = list(who.inbox), dict(who.moment.board)
    while True:
      prefix, suffix = self._encode(who, inbox, board)
      size = len(prefix) + len(suffix) + self.sampling.max_tokens
      if size <= self.context:
        return prefix, suffix
      self.messages_cut += 1
      if inbox:
        inbox.pop(0)
      elif board:
        del board[next(iter(board))]
      else:
        raise NotAllowedError(
            f'llm.context={self.context} is not allowed: the prompt of agent'
            f' {who.agent} at {who.moment.clock_ms} ms has'
            f' {size - self.sampling.max_tokens} tokens without any message and'
            f' its completion may have {self.sampling.max_tokens} more; it must'
            f' be >= {size}.'
        )

  def _encode(self, who: play.Free, inbox, board):
    moment = who.moment._replace(board=board)
    head, tail = chat(self.prompts, self.tokenizer, who, moment, inbox)
    if head not in self._prefixes:
      self._prefixes[head] = tuple(self.tokenizer.encode(head))
    return self._prefixes[head], tuple(self.tokenizer.encode(tail))


def chat(
    prompts: prompts_lib.Prompts,
    tokenizer: Any,
    who: play.Free,
    moment: prompts_lib.Moment,
    inbox: Sequence[prompts_lib.Message],
) -> tuple[str, str]:
  """The prompt as text: the part that all agents of a task share, and the rest.

  The first part is empty where the template does not write messages one after
  the other.
  """
  user = prompts.user(
      moment, who.agent, who.observation, who.knows, who.last, list(inbox)
  )
  messages = prompts.messages(moment, user)
  whole = tokenizer.chat(messages, generate=True)
  head = tokenizer.chat(messages[:1], generate=False)
  head = head if whole.startswith(head) else ''
  return head, whole[len(head) :]
