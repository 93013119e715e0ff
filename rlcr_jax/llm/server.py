"""The engine that asks an OpenAI-compatible server, such as vLLM.

What is learned from must be what was sampled: the server must say the ids of
the tokens that it drew and their log-probabilities, as vLLM does. Those are of
the model unless it is told to take them after temperature, top-k and top-p
(`--logprobs-mode processed_logprobs`).
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import http.client
import json
import pathlib
import time
from typing import Any
import urllib.error
import urllib.request

from envs.base import require
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from rlcr_jax.llm import model as model_lib
from rlcr_jax.llm import weights
from rlcr_jax.llm.engine import Completion
from rlcr_jax.llm.engine import EngineError
from rlcr_jax.llm.engine import Request
from rlcr_jax.llm.engine import Sampling
from rlcr_jax.llm.tokens import Tokenizer

_FIRST_WAIT_S = 0.5  # Before the second attempt; then twice as long each time.
_BUSY = 429  # Too many requests: worth another attempt, as all from 500 are.
# A time-out is an OSError, and an answer that is not JSON a ValueError.
_LOST = (OSError, http.client.HTTPException, ValueError)


def _post(url: str, content: Any, timeout_s: float) -> Any:
  """Sends JSON; the answer is still to be read and closed."""
  data = json.dumps(content).encode()
  headers = {'Content-Type': 'application/json'}
  request = urllib.request.Request(url, data, headers)
  return urllib.request.urlopen(request, timeout=timeout_s)


def reloader(url: str, timeout_s: float = 600.0) -> Callable[[Any], None]:
  """A hook that tells a server by POST to read the weights of a directory."""

  def reload(directory: pathlib.Path) -> None:
    try:
      _post(url, {'model_path': str(directory)}, timeout_s).close()
    except OSError as error:  # Also what HTTP says in errors of its own.
      raise EngineError(f'{url} does not read new weights: {error}') from error

  return reload


class ServerEngine:
  """Samples on a server; see `engine.Engine`."""

  def __init__(
      self,
      url: str,
      model: str,
      tokenizer: Tokenizer,
      *,
      timeout_s: float = 60.0,
      retries: int = 3,
      concurrency: int = 8,
      exact: bool = True,
      config: model_lib.ModelConfig | None = None,
      sync_directory: pathlib.Path | str | None = None,
      reload: Callable[[pathlib.Path], None] | None = None,
  ):
    """Asks nothing yet.

    Args:
      url: of the server, up to and without `/v1`.
      model: the server's name for the model.
      tokenizer: of the model.
      timeout_s: longest wait for an answer, s.
      retries: further attempts when the server cannot be reached, is too slow
        or fails.
      concurrency: requests at once.
      exact: send ids, and require ids and log-probabilities. Otherwise text is
        exchanged, ids are those of the text, and log-probabilities are NaN:
        enough to evaluate, not to learn.
      config: of the model, to write new weights.
      sync_directory: where new weights are written.
      reload: called with that directory to make the server read it.
    """
    http = url.startswith(('http://', 'https://'))
    require(http, 'engine.url', url, 'like http://host:port')
    require(timeout_s > 0, 'engine.timeout_s', timeout_s, '> 0')
    require(retries >= 0, 'engine.retries', retries, '>= 0')
    require(concurrency >= 1, 'engine.concurrency', concurrency, '>= 1')
    self._url = url.rstrip('/') + '/v1/completions'
    self._model, self._tokenizer, self._exact = model, tokenizer, exact
    self._timeout_s, self._retries = timeout_s, retries
    self._config, self._directory = config, sync_directory
    self._reload = reload
    self._pool = futures.ThreadPoolExecutor(concurrency)

  def generate(
      self, requests: Sequence[Request], sampling: Sampling
  ) -> list[Completion]:
    """See `engine.Engine`."""
    if not requests:
      return []
    keys = jnp.stack([request.key for request in requests])
    seeds = jax.vmap(jax.random.bits)(keys) >> 1  # Some servers take int32.
    bodies = [
        self._body(i, request, seed, sampling)
        for i, (request, seed) in enumerate(
            zip(requests, seeds.tolist(), strict=True)
        )
    ]
    answers = [self._pool.submit(self._ask, body) for body in bodies]
    try:
      return [self._completion(answer.result(), sampling) for answer in answers]
    finally:
      for answer in answers:
        answer.cancel()  # Those that have not begun, if one has failed.

  def update(self, params: nnx.State, lora: Any = None) -> None:
    """See `engine.Engine`; writes the weights to `sync_directory`."""
    for field in ('config', 'directory'):
      given = getattr(self, f'_{field}') is not None
      require(given, f'engine.{field}', None, 'given, to hand over weights')
    if lora is not None:
      params = model_lib.lora_merge(self._config, params, lora)
    directory = pathlib.Path(self._directory)
    weights.save(directory, self._config, params, self._tokenizer)
    if self._reload is not None:
      self._reload(directory)

  def close(self) -> None:
    """See `engine.Engine`."""
    self._pool.shutdown(cancel_futures=True)

  def _body(
      self, index: int, request: Request, seed: int, sampling: Sampling
  ) -> dict[str, Any]:
    """What is sent for a request."""
    require(
        request.commands is None,
        f'requests[{index}].commands',
        request.commands,
        'None: a grammar needs the engine that samples here',
    )
    prompt = [*request.prefix, *request.suffix]
    require(bool(prompt), f'requests[{index}] prompt tokens', 0, '>= 1')
    body = {
        'model': self._model,
        'prompt': prompt if self._exact else self._tokenizer.decode(prompt),
        'max_tokens': sampling.max_tokens,
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'seed': seed,
    }
    if sampling.stop:
      body['stop'] = list(sampling.stop)
    if self._exact:
      body |= {
          'logprobs': 1,
          'return_token_ids': True,
          'stop_token_ids': list(self._tokenizer.stop_ids),
      }
      if sampling.top_k:
        body['top_k'] = sampling.top_k
    else:
      allowed = '0 with a server that exchanges text'
      require(not sampling.top_k, 'sampling.top_k', sampling.top_k, allowed)
    return body

  def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer.

    Raises:
      EngineError: if there is none, or the request is refused.
    """
    wait_s = _FIRST_WAIT_S
    for attempt in range(self._retries + 1):
      if attempt:
        time.sleep(wait_s)
        wait_s *= 2
      try:
        with _post(self._url, body, self._timeout_s) as answer:
          return json.load(answer)
      except urllib.error.HTTPError as error:
        said = error.read().decode(errors='replace')
        reason = f'status {error.code}: {" ".join(said.split())[:500]}'
        if error.code < 500 and error.code != _BUSY:
          raise EngineError(f'{self._url} refuses: {reason}') from error
      except _LOST as error:
        reason = f'{type(error).__name__}: {error}'
    raise EngineError(
        f'{self._url} does not answer. Tried {self._retries + 1} times, each'
        f' for at most {self._timeout_s:g} s; last {reason}'
    )

  def _completion(
      self, answer: dict[str, Any], sampling: Sampling
  ) -> Completion:
    """Reads the server's answer."""
    try:
      choice, usage = answer['choices'][0], answer.get('usage') or {}
      text, finish = choice['text'], choice['finish_reason']
      if finish not in ('stop', 'length'):
        raise ValueError(f'finish_reason is {finish!r}')
      ids, log_probs = self._tokens(choice, text, sampling.stop)
      details = usage.get('prompt_tokens_details') or {}
      cached = int(details.get('cached_tokens') or 0)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
      raise EngineError(
          f'{self._url} answers {json.dumps(answer)[:500]}, in which there is'
          f' {type(error).__name__}: {error}'
      ) from error
    for stop in sampling.stop:
      text = text.split(stop, 1)[0]  # Some servers leave it there.
    return Completion(ids, log_probs, text, finish, cached)

  def _tokens(
      self, choice: dict[str, Any], text: str, stop: tuple[str, ...]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T] and log-probabilities [T] of what was drawn."""
    if self._exact:
      log_probs = choice['logprobs']['token_logprobs']
      ids = choice.get('token_ids') or [
          self._id(token) for token in choice['logprobs']['tokens']
      ]
    else:
      ids = self._tokenizer.encode(text)
      string = any(string in text for string in stop)
      if choice['finish_reason'] == 'stop' and not string:
        ids = [*ids, self._tokenizer.stop_ids[0]]
      log_probs = [np.nan] * len(ids)
    if len(ids) != len(log_probs):
      raise ValueError(f'{len(log_probs)} log-probabilities of {len(ids)} ids')
    if self._exact and None in log_probs:
      raise ValueError('a log-probability that is null')
    return np.array(ids, np.int32), np.array(log_probs, np.float32)

  def _id(self, token: str) -> int:
    """The id of a token from its text, or from vLLM's 'token_id:ID'."""
    if token.startswith('token_id:'):
      return int(token.removeprefix('token_id:'))
    ids = self._tokenizer.encode(token)
    if len(ids) != 1:
      raise ValueError(f'{token!r} is the text of no single token')
    return ids[0]
