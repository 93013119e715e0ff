"""Tests of the engine that asks a server: real, or told what to say."""

from collections.abc import Callable
import contextlib
import dataclasses
import http.server
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from typing import Any
import urllib.request

from envs.base import NotAllowedError
import jax
import numpy as np
import pytest
from rlcr_jax.llm import sampler
from rlcr_jax.llm import server
from rlcr_jax.llm import weights
from rlcr_jax.llm.engine import EngineError
from rlcr_jax.llm.engine import Request
from rlcr_jax.llm.engine import Sampling
from tests import llm_tiny

SAMPLING = Sampling(max_tokens=5)


@dataclasses.dataclass
class Served:
  """A server, and what it was asked."""

  url: str
  paths: set[str] = dataclasses.field(default_factory=set)
  bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  most_at_once: int = 0


def answer(ids=(20, 21), text='ab', finish='stop', **told):
  """As vLLM answers."""
  log_probs = [-0.5 * (i + 1) for i in range(len(ids))]
  told = {'logprobs': {'token_logprobs': log_probs}, 'token_ids': ids} | told
  choice = {'text': text, 'finish_reason': finish} | told
  usage = {'prompt_tokens_details': {'cached_tokens': 3}}
  return {'choices': [choice], 'usage': usage}


@contextlib.contextmanager
def serve(reply: Callable[[int, dict[str, Any]], Any]):
  """Serves `reply(how many came before, body)`: JSON, bytes, or a status."""
  lock, busy = threading.Lock(), 0

  class Handler(http.server.BaseHTTPRequestHandler):

    def do_POST(self):
      nonlocal busy
      served.paths.add(self.path)
      size = int(self.headers['Content-Length'])
      body = json.loads(self.rfile.read(size))
      with lock:
        busy += 1
        served.most_at_once = max(served.most_at_once, busy)
        served.bodies.append(body)
        count = len(served.bodies) - 1
      said = reply(count, body)
      with lock:
        busy -= 1
      status = said if isinstance(said, int) else 200
      said = {'error': f'no\n {status}'} if isinstance(said, int) else said
      data = said if isinstance(said, bytes) else json.dumps(said).encode()
      self.send_response(status)
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      with contextlib.suppress(OSError):  # Nobody waits any longer.
        self.wfile.write(data)

    def log_message(self, *unused):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as listening:
    served = Served(f'http://127.0.0.1:{listening.server_address[1]}')
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
      yield served
    finally:
      listening.shutdown()
      thread.join()


def engine(url, **kwargs):
  return server.ServerEngine(url, 'm', llm_tiny.tokenizer(), **kwargs)


def request(seed=0, suffix=(12, 13), commands=None):
  return Request((10, 11), tuple(suffix), jax.random.key(seed), commands)


@pytest.fixture
def waits(monkeypatch):
  """Seconds that were waited between attempts, without waiting."""
  waited = []
  clock = types.SimpleNamespace(sleep=waited.append)
  monkeypatch.setattr(server, 'time', clock)
  return waited


def test_what_is_asked():
  with serve(lambda count, body: answer()) as served:
    asked = [request(0), request(0), request(1, (14,))]
    engine(served.url + '/', concurrency=1).generate(asked, SAMPLING)
    assert served.paths == {'/v1/completions'}
    one, same, other = served.bodies
    assert one == same and one['seed'] != other['seed']
    assert 0 <= one.pop('seed') < 2**31
    assert one == {
        'model': 'm',
        'prompt': [10, 11, 12, 13],
        'max_tokens': 5,
        'temperature': 1.0,
        'top_p': 1.0,
        'logprobs': 1,
        'return_token_ids': True,
        'stop_token_ids': list(llm_tiny.tokenizer().stop_ids),
    }
    sampling = Sampling(
        temperature=0.5, top_k=7, top_p=0.9, max_tokens=5, stop=('.',)
    )
    engine(served.url).generate([request()], sampling)
    given = {'temperature': 0.5, 'top_k': 7, 'top_p': 0.9, 'stop': ['.']}
    assert given.items() <= served.bodies[-1].items()


def test_what_is_answered():
  with serve(lambda count, body: answer()) as served:
    (got,) = engine(served.url).generate([request()], SAMPLING)
  np.testing.assert_array_equal(got.ids, [20, 21])
  np.testing.assert_array_equal(got.log_probs, np.float32([-0.5, -1.0]))
  assert got.ids.dtype == np.int32 and got.log_probs.dtype == np.float32
  assert (got.text, got.finish, got.cached_tokens) == ('ab', 'stop', 3)


@pytest.mark.parametrize('tokens', [['token_id:20', 'token_id:21'], None])
def test_ids_may_be_told_as_text(tokens):
  tokens = tokens or [llm_tiny.tokenizer().decode([i]) for i in (20, 21)]
  told = {'tokens': tokens, 'token_logprobs': [-0.5, -1.0]}
  reply = answer(token_ids=None, logprobs=told)
  with serve(lambda count, body: reply) as served:
    (got,) = engine(served.url).generate([request()], SAMPLING)
  np.testing.assert_array_equal(got.ids, [20, 21])


def test_a_stop_string_is_cut_from_the_text():
  with serve(lambda count, body: answer(text='ab. c')) as served:
    sampling = Sampling(max_tokens=5, stop=('x', '.'))
    assert engine(served.url).generate([request()], sampling)[0].text == 'ab'


def test_answers_are_in_the_order_of_requests():

  def reply(count, body):
    time.sleep(0.02 * (8 - body['prompt'][-1] % 8))  # The first is slowest.
    return answer(ids=[body['prompt'][-1]])

  with serve(reply) as served:
    asked = [request(i, (i,)) for i in range(16, 24)]
    some = engine(served.url, concurrency=4)
    got = some.generate(asked, SAMPLING)
    assert [int(c.ids[0]) for c in got] == list(range(16, 24))
    assert 1 < served.most_at_once <= 4
    assert some.generate([], SAMPLING) == []


@pytest.mark.parametrize('failure', [500, 503, 429, b'{"choices": ['])
def test_a_failure_is_tried_again(failure, waits):
  with serve(lambda n, body: answer() if n == 2 else failure) as served:
    got = engine(served.url).generate([request()], SAMPLING)
    assert len(got) == 1 and len(served.bodies) == 3
    assert served.bodies[0] == served.bodies[2]
  assert waits == [0.5, 1.0]


def test_it_is_not_tried_for_ever(waits):
  with serve(lambda count, body: 503) as served:
    with pytest.raises(EngineError, match='Tried 4 times.* 503: .*no'):
      engine(served.url).generate([request()], SAMPLING)
    assert len(served.bodies) == 4
  assert waits == [0.5, 1.0, 2.0]


def test_a_refusal_is_told_at_once(waits):
  with serve(lambda count, body: 400) as served:
    with pytest.raises(EngineError, match='refuses: status 400: .*no') as error:
      engine(served.url).generate([request()], SAMPLING)
    assert len(served.bodies) == 1 and not waits
    assert served.url in str(error.value) and '\n' not in str(error.value)


def test_a_slow_server_is_told(waits):
  with serve(lambda count, body: time.sleep(0.5) or answer()) as served:
    slow = engine(served.url, timeout_s=0.1, retries=1)
    with pytest.raises(EngineError, match='2 times, each for at most 0.1 s'):
      slow.generate([request()], SAMPLING)


def test_a_dead_server_is_told(waits):
  with serve(lambda count, body: answer()) as served:
    pass
  with pytest.raises(EngineError, match=served.url + '.*refused'):
    engine(served.url).generate([request(i) for i in range(20)], SAMPLING)


@pytest.mark.parametrize(
    'reply, missing',
    [
        ({'choices': []}, 'IndexError'),
        ({'error': 'what'}, "'choices'"),
        ([1], 'TypeError'),
        (answer(logprobs=None), 'TypeError'),
        (answer(token_ids=None), "'tokens'"),
        (answer(token_ids=[1]), '2 log-probabilities of 1 ids'),
        (answer(finish='abort'), "'abort'"),
        (answer(logprobs={'token_logprobs': [-0.5, None]}), 'null'),
        (
            answer(
                token_ids=None,
                logprobs={'tokens': ['a', '<?>'], 'token_logprobs': [-1, -1]},
            ),
            "'<\\?>' is the text of no single token",
        ),
    ],
)
def test_an_answer_that_lacks_something_is_told(reply, missing):
  with serve(lambda count, body: reply) as served:
    with pytest.raises(EngineError, match=missing):
      engine(served.url).generate([request()], SAMPLING)


@pytest.mark.parametrize(
    'text, finish, ids_of, stops',
    [
        ('work 1', 'stop', 'work 1', True),
        ('work 1', 'length', 'work 1', False),
        ('work 1. 2', 'stop', 'work 1. 2', False),  # Stopped by the string.
    ],
)
def test_text_alone_is_enough_to_evaluate(text, finish, ids_of, stops):
  tokenizer = llm_tiny.tokenizer()
  reply = {'choices': [{'text': text, 'finish_reason': finish}]}
  with serve(lambda count, body: reply) as served:
    sampling = Sampling(max_tokens=5, stop=('.',))
    plain = engine(served.url, exact=False)
    (got,) = plain.generate([request()], sampling)
    assert served.bodies[0]['prompt'] == tokenizer.decode([10, 11, 12, 13])
    assert not {'top_k', 'logprobs'} & set(served.bodies[0])
    with pytest.raises(NotAllowedError, match='sampling.top_k=3'):
      plain.generate([request()], Sampling(top_k=3))
  expected = tokenizer.encode(ids_of) + [tokenizer.stop_ids[0]] * stops
  np.testing.assert_array_equal(got.ids, expected)
  assert np.isnan(got.log_probs).all() and len(got.log_probs) == len(expected)
  assert (got.text, got.finish, got.cached_tokens) == ('work 1', finish, 0)


def test_what_cannot_be_asked_is_refused():
  never = engine('http://127.0.0.1:1')
  bad = request(commands=('wait',))
  with pytest.raises(NotAllowedError, match=r'requests\[1\]\.commands'):
    never.generate([request(), bad], SAMPLING)
  with pytest.raises(NotAllowedError, match=r'requests\[0\] prompt tokens=0'):
    never.generate([Request((), (), jax.random.key(0))], SAMPLING)


@pytest.mark.parametrize(
    'field, value',
    [('timeout_s', 0), ('retries', -1), ('concurrency', 0), ('url', 'here')],
)
def test_a_field_that_is_not_allowed_is_named(field, value):
  fields = {'url': 'http://a', field: value}
  with pytest.raises(NotAllowedError, match=f'engine.{field}='):
    engine(**fields)


def test_new_weights_are_written_and_told(tmp_path):
  loaded, told = llm_tiny.loaded('llama3'), []
  directory = tmp_path / 'served'
  synced = engine(
      'http://127.0.0.1:1',
      config=loaded.config,
      sync_directory=directory,
      reload=told.append,
  )
  params = jax.tree.map(lambda x: 2 * x, loaded.params)
  synced.update(params)
  assert told == [directory]
  written = weights.load(directory)
  assert written.config == loaded.config
  jax.tree.map(np.testing.assert_array_equal, written.params, params)
  assert written.tokenizer.encode('work 1') == llm_tiny.tokenizer().encode(
      'work 1'
  )
  synced.close()


def test_a_server_is_told_to_read_new_weights(tmp_path):
  with serve(lambda count, body: {} if count == 0 else 500) as served:
    reload = server.reloader(f'{served.url}/reload')
    reload(tmp_path)
    assert served.paths == {'/reload'}
    assert served.bodies == [{'model_path': str(tmp_path)}]
    with pytest.raises(EngineError, match='/reload does not read new weights'):
      reload(tmp_path)


def test_weights_need_somewhere_to_go(tmp_path):
  params, url = llm_tiny.loaded('llama3').params, 'http://127.0.0.1:1'
  with pytest.raises(NotAllowedError, match='engine.config=None'):
    engine(url, sync_directory=tmp_path).update(params)
  config = llm_tiny.loaded('llama3').config
  with pytest.raises(NotAllowedError, match='engine.directory=None'):
    engine(url, config=config).update(params)


@contextlib.contextmanager
def transformers_server(model):
  """The server that transformers brings."""
  for package in ('transformers', 'torch', 'fastapi', 'uvicorn', 'openai'):
    if importlib.util.find_spec(package) is None:
      pytest.skip(f'{package} is not installed')
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  command = 'from transformers.cli.transformers import main; main()'
  arguments = ['serve', '--host=127.0.0.1', f'--port={port}', '--device=cpu']
  process = subprocess.Popen(
      [sys.executable, '-c', command, *arguments],
      env=os.environ | {'HF_HUB_OFFLINE': '1'},
  )
  url = f'http://127.0.0.1:{port}'
  try:
    for _ in range(240):
      assert process.poll() is None, 'The server has ended.'
      with contextlib.suppress(OSError):
        urllib.request.urlopen(f'{url}/health', timeout=5).close()
        break
      time.sleep(0.5)
    yield url
  finally:
    process.terminate()
    process.wait()


@pytest.mark.slow
def test_a_real_server_says_what_this_library_says(tmp_path):
  loaded, directory = llm_tiny.loaded('llama3'), tmp_path / 'model'
  local = sampler.LocalEngine(*loaded)
  greedy = Sampling(temperature=0, max_tokens=12)
  prompts = 'work 3', 'then tell 4 about 3', 'work 17, then tell'
  asked = [
      Request((), tuple(loaded.tokenizer.encode(text)), jax.random.key(i))
      for i, text in enumerate(prompts)
  ]
  with transformers_server(directory) as url:

    def reload(_):
      urllib.request.urlopen(
          urllib.request.Request(f'{url}/reset', b''), timeout=60
      ).close()

    served = server.ServerEngine(
        url,
        str(directory),
        loaded.tokenizer,
        exact=False,
        concurrency=1,
        config=loaded.config,
        sync_directory=directory,
        reload=reload,
    )
    answers = []
    for params in (loaded.params, jax.tree.map(lambda x: x / 2, loaded.params)):
      local.update(params)
      served.update(params)
      answers.append([c.text for c in local.generate(asked, greedy)])
      got = [c.text for c in served.generate(asked, greedy)]
      assert got == answers[-1]
    assert answers[0] != answers[1]  # The server has read the new weights.
    served.close()
  with pytest.raises(EngineError, match='does not answer'):
    engine(url, retries=0).generate(asked, greedy)
