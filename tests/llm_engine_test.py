"""Tests of what all engines share: the sampling fields and the grammar."""

from envs.base import NotAllowedError
import numpy as np
import pytest
from rlcr_jax.llm import engine
from rlcr_jax.llm.engine import FREE
from rlcr_jax.llm.engine import NO_EDGE

STOP = 0


def encode(text):
  """One token per letter: a is 1."""
  return [1 if c == ':' else ord(c) - ord('a') + 2 for c in text]


def grammar(*commands):
  return engine.grammar(commands, encode, (STOP,))


def permitted(table, ids, node=0):
  """What may follow the ids: tokens, FREE, or None if they may not be."""
  for token in ids:
    if node == FREE:
      return FREE
    found = np.flatnonzero(table.token[node] == token)
    if not len(found):
      return None
    node = table.target[node, found[0]]
  if node == FREE:
    return FREE
  return sorted(table.token[node][table.token[node] != NO_EDGE].tolist())


@pytest.mark.parametrize(
    'field, value',
    [
        ('temperature', -0.1),
        ('temperature', float('inf')),
        ('top_k', -1),
        ('top_p', 0.0),
        ('top_p', 1.1),
        ('max_tokens', 0),
        ('stop', ('.', '')),
    ],
)
def test_a_field_of_sampling_that_is_not_allowed_is_named(field, value):
  with pytest.raises(NotAllowedError, match=rf'sampling\.{field}='):
    engine.Sampling(**{field: value})


def test_only_commands_are_permitted_and_they_end_with_a_stop():
  table = grammar('ab', 'ac', 'd')
  a, b, c, d = encode('abcd')
  assert permitted(table, []) == [a, d]
  assert permitted(table, [a]) == [b, c]
  assert permitted(table, [a, b]) == permitted(table, [d]) == [STOP]
  assert permitted(table, [b]) is None
  assert permitted(table, [a, d]) is None


def test_a_command_may_begin_with_another():
  for table in (grammar('a', 'ab'), grammar('ab', 'a')):
    a, b = encode('ab')
    assert permitted(table, [a]) == [STOP, b]
    assert permitted(table, [a, b]) == [STOP]


def test_any_text_may_follow_a_colon():
  commands = 'a:', 'ab', 'a:c', 'a:c:'
  for table in (grammar(*commands), grammar(*commands[::-1])):
    a, b, colon = encode('ab:')
    assert permitted(table, [a]) == [colon, b]
    assert permitted(table, [a, colon]) == FREE
    assert permitted(table, [a, b]) == [STOP]


@pytest.mark.parametrize('commands', [(), ('a', '')])
def test_a_grammar_without_words_is_refused(commands):
  with pytest.raises(NotAllowedError, match='request.commands='):
    grammar(*commands)


def test_joined_grammars_stay_apart():
  parts = grammar('ab', 'cd'), grammar('b:', 'a', 'c')
  table, roots = engine.join(parts)
  assert table.token.shape == table.target.shape == (256, 16)
  prompts = [[], *([t] for t in encode('abcd:')), encode('ab'), encode('b:')]
  for part, root in zip(parts, roots, strict=True):
    for ids in prompts:
      assert permitted(table, ids, root) == permitted(part, ids), ids


@pytest.mark.parametrize('count, nodes', [(255, 256), (256, 1024)])
def test_joined_grammars_have_few_sizes(count, nodes):
  table, _ = engine.join([grammar('b' * count)])  # The root, too.
  assert table.token.shape == (nodes, 16)
