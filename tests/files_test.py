"""Tests of files that are written whole or not at all."""

import json
import os

import pytest
from rlcr_jax import files

NAN, INF = float('nan'), float('inf')


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_writes_what_it_is_given(tmp_path):
  files.write_bytes(tmp_path / 'a', b'\x00\xff')
  files.write_text(tmp_path / 'b', 'π\n')
  files.write_json(tmp_path / 'c', {'x': [1, 2.5]})
  assert (tmp_path / 'a').read_bytes() == b'\x00\xff'
  assert (tmp_path / 'b').read_bytes() == b'\xcf\x80\n'
  assert json.loads((tmp_path / 'c').read_text()) == {'x': [1, 2.5]}
  assert names(tmp_path) == ['a', 'b', 'c']  # No drafts.


def test_makes_folders_and_replaces(tmp_path):
  path = tmp_path / 'new' / 'folder' / 'a'
  files.write_text(path, 'a long first text')
  files.write_text(path, 'short')
  assert path.read_text() == 'short'
  assert names(path.parent) == ['a']


@pytest.mark.parametrize('moment', ['fsync', 'replace'])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path, monkeypatch, moment
):
  path = tmp_path / 'a'
  files.write_text(path, 'old')

  def interrupt(*unused):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, moment, interrupt)
  with pytest.raises(KeyboardInterrupt):
    files.write_text(path, 'new')
  assert path.read_text() == 'old'


def test_numbers_that_json_lacks_become_null(tmp_path):
  value = {'a': NAN, 'b': [INF, -INF, 1.5], 'c': {'d': (NAN, 0)}}
  text = files.dumps(value)
  assert text == '{"a": null, "b": [null, null, 1.5], "c": {"d": [null, 0]}}'
  files.write_json(tmp_path / 'a', value)
  assert json.loads((tmp_path / 'a').read_text()) == json.loads(text)


def test_lines_are_read_until_one_was_cut_short(tmp_path):
  path = tmp_path / 'a'
  rows = [{'step': 0, 'x': None}, {'step': 1, 'x': 2.5}]
  text = ''.join(files.dumps(row) + '\n' for row in rows)
  for cut in ['', '{', '{"step": 2, "x": 0.1', '\x00\x00\x00']:
    path.write_text(text + cut)
    assert files.read_lines(path) == rows


def test_the_last_whole_line_is_found(tmp_path):
  path = tmp_path / 'a'
  assert files.last_line(path) is None
  path.write_text('{"step": 0')
  assert files.last_line(path) is None
  long = {'x': 'y' * 30_000}
  path.write_text(''.join(f'{json.dumps(long)}\n' for _ in range(9)))
  assert files.last_line(path) == long
  with path.open('a') as stream:
    stream.write('{"step": 1}\n{"step": 2, ')
  assert files.last_line(path) == {'step': 1}


def test_no_file_has_no_lines(tmp_path):
  assert files.read_lines(tmp_path / 'none') == []
