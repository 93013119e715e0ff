"""Tests of the report, on hand-made measurements."""

import base64
import html
import io
import json
import re
import types

from envs import base
import jax.numpy as jnp
import numpy as np
import pytest
from rich import console
from rlcr_jax import evaluate
from rlcr_jax import figures
from rlcr_jax import files
from rlcr_jax import metrics
from rlcr_jax import report
from rlcr_jax import rollout

NAN = float('nan')
PNG = b'\x89PNG\r\n\x1a\n'
CONFIG = {
    'env': {'name': 'software', 'note': '</pre><script>alert(1)</script>'},
    'seed': 7,
    'steps': 4,
}
TRAINING = {
    'learning_curve',
    'deadline',
    'team_size',
    'communication',
    'useful_tokens',
    'effective_turns',
    'useful_by_team',
    'decisions',
    'seconds',
}
EVALUATION = {'return_over_time', 'return_by_deadline'}


def make_rows(count=4, **changes):
  row = {
      'deadline_ms': 60_000.0,
      'return_mean': 0.25,
      'team_size_mean': 3.0,
      'output_tokens_mean': 12_345.0,
      'useful_token_share_mean': 0.75,
      'effective_share_mean': 0.5,
      'communication_tokens_per_s_mean': 1.5,
      'useful_work_team_1': 0.5,
      'useful_work_team_2_5': 1.25,
      'useful_work_team_6_9': NAN,
      'useful_work_team_10_1000000000': NAN,
      'decisions': 640.0,
      'seconds': 2.0,
  }
  return [{'step': step} | row | changes for step in range(count)]


def make_evaluation():
  returns = {
      'collective': 0.6,
      'solo': 0.4,
      'muted': 0.5,
      'muted_trained': 0.55,
      'random': 0.1,
      'oracle': 0.8,
      'oracle_muted': 0.7,
      'greedy_solo': 0.3,
  }
  entry = {
      'team_size_mean': 4.0,
      'output_tokens_mean': 54_321.0,
      'useful_token_share': 0.7,
      'effective_share': 0.6,
      'communication_tokens_per_s': 2.5,
      'time_ms_mean': 118_000.0,
  }
  limits = [60_000, 90_000, 120_000]
  ramp = lambda mean: [0.0, mean / 2, mean]
  matched = {
      'time_ratio': 2.5,
      'time_ratio_ci95': [2.25, 2.75],
      'solo_return_mean': 0.58,
      'solo_deadline_ms': 480_000,
      'output_tokens_mean': 54_321.0,
      'never_reached_share': 0.125,
  }
  return {
      'deadline_ms': 120_000,
      'num_tasks': 32,
      'seed': 7,
      'modes': {
          name: {'return_mean': r, 'return_ci95': [r - 0.05, r + 0.06]} | entry
          for name, r in returns.items()
      },
      'matched_tokens': matched
      | {'greedy_solo': matched | {'time_ratio': 3.0}},
      'by_deadline': {
          'deadline_ms': limits,
          'modes': {
              name: {
                  'return_mean': ramp(r),
                  'return_ci95': [[v - 0.05, v + 0.05] for v in ramp(r)],
              }
              for name, r in returns.items()
          },
          'crossover_ms': 75_000.0,
      },
      'curves': {
          'time_ms': [0, 60_000, 120_000],
          'modes': {name: ramp(r) for name, r in returns.items()},
      },
  }


def fill(workdir, runs, evaluation=None):
  files.write_json(workdir / 'config.json', CONFIG)
  for folder, rows in runs.items():
    text = ''.join(files.dumps(row) + '\n' for row in rows)
    files.write_text(workdir / folder / 'metrics.jsonl', text)
  if evaluation is not None:
    files.write_json(workdir / 'evaluation.json', evaluation)


def words(page):
  """The text of a page as read: no tags, entities or line breaks."""
  return ' '.join(html.unescape(re.sub(r'<[^>]*>', ' ', page)).split())


def printed(table):
  screen = console.Console(width=80, record=True, file=io.StringIO())
  screen.print(table)
  return screen.export_text()


def nullified(value):
  """The same structure with every measured number missing."""
  if isinstance(value, dict):
    keep = ('deadline_ms', 'num_tasks', 'time_ms', 'step')
    return {k: v if k in keep else nullified(v) for k, v in value.items()}
  if isinstance(value, list):
    return [nullified(item) for item in value]
  return None


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A workdir with everything, and its page."""
  workdir = tmp_path_factory.mktemp('whole')
  runs = {
      '.': make_rows(),
      'baselines/solo': make_rows(team_size_mean=1.0),
      'baselines/muted': make_rows(),
  }
  fill(workdir, runs, make_evaluation())
  path = report.write_report(workdir)
  assert path == workdir / 'report.html'
  return workdir, path.read_text(encoding='utf-8')


def test_figures_are_the_images_of_the_page(whole):
  workdir, page = whole
  saved = {p.stem: p.read_bytes() for p in workdir.glob('figures/*.png')}
  assert set(saved) == TRAINING | EVALUATION
  for data in saved.values():
    assert data.startswith(PNG) and len(data) > 5000
  embedded = re.findall(r'data:image/png;base64,([A-Za-z0-9+/=]+)"', page)
  decoded = [base64.b64decode(text, validate=True) for text in embedded]
  assert sorted(decoded) == sorted(saved.values())
  drafts = [p.name for p in workdir.rglob('.*')]
  assert not drafts


def test_page_loads_nothing(whole):
  _, page = whole
  sources = re.findall(r'(?:src|href)\s*=\s*"([^"]{0,22})', page)
  assert sources and all(s == 'data:image/png;base64,' for s in sources)
  assert not re.search(r'https?://|@import|url\(|<script|<link', page)


def test_page_states_the_results(whole):
  workdir, page = whole
  text = words(page)
  # 0.6 / 0.4 and 0.6 / 0.8.
  assert (
      'Within 120 s, the collective returns 0.600 [0.550, 0.660]: 1.50 times'
      ' the 0.400 [0.350, 0.460] of one trained agent and 75 % of the 0.800 of'
      ' the oracle. With its channels cut it returns 0.500.'
  ) in text
  assert 'takes 2.50 [2.25, 2.75] times as long' in text
  assert 'The collective overtakes solo at a deadline of 75 s.' in text
  assert 'never gets there counts as if it did at the very end' in text
  assert 'One greedy agent may work for 480 s' in text
  run = f'Run {workdir.name} · 4 of 4 updates · seed 7 · 32 held-out tasks'
  assert run in text


def test_page_shows_the_whole_configuration(whole):
  block = re.search(r'<details.*?<pre>(.*?)</pre>', whole[1], re.DOTALL)
  assert json.loads(html.unescape(block.group(1))) == CONFIG


def test_without_evaluation_and_baselines_says_so(tmp_path):
  fill(tmp_path, {'.': make_rows()})
  page = report.write_report(tmp_path).read_text(encoding='utf-8')
  text = words(page)
  assert 'report of the training only' in text
  assert 'After 4 updates the collective returns 0.250 in training' in text
  assert 'output tokens 12,345' in text
  assert 'Matched tokens' not in text
  assert {p.stem for p in tmp_path.glob('figures/*.png')} == TRAINING


@pytest.mark.parametrize('rows', [[], nullified(make_rows())])
def test_nulls_and_missing_rows_are_gaps(tmp_path, rows):
  fill(tmp_path, {'.': rows}, nullified(make_evaluation()))
  text = words(report.write_report(tmp_path).read_text(encoding='utf-8'))
  assert 'the collective returns – [–, –]: – times' in text
  assert 'nan' not in text.lower().split() and 'None' not in text.split()
  drawn = {p.stem for p in tmp_path.glob('figures/*.png')}
  assert drawn - {'deadline'} == EVALUATION  # Nothing else has a value.


def test_reads_every_arm_from_its_own_folder(tmp_path, monkeypatch):
  runs = {
      '.': make_rows(return_mean=0.5),
      'baselines/solo': make_rows(return_mean=0.25),
      'baselines/muted': make_rows(return_mean=0.125),
  }
  fill(tmp_path, runs)
  read = {}
  monkeypatch.setattr(
      figures, 'training_charts', lambda r: read.update(r) or []
  )
  report.write_report(tmp_path)
  assert {arm: rows[0]['return_mean'] for arm, rows in read.items()} == {
      'collective': 0.5,
      'solo': 0.25,
      'muted': 0.125,
  }


def test_needs_a_config(tmp_path):
  with pytest.raises(FileNotFoundError, match='config.json'):
    report.write_report(tmp_path)
  assert not list(tmp_path.iterdir())


def test_table_has_a_row_per_mode():
  evaluation = make_evaluation()
  table = report.table(evaluation)
  assert table.row_count == len(evaluation['modes']) == 8
  text = printed(table).replace('\N{NO-BREAK SPACE}', ' ')
  lines = {line[:14].strip(): line[14:].split() for line in text.splitlines()}
  rest = ['4.0', '54,321', '70', '%', '2.5', '118']
  # Shares of the oracle: 0.6 / 0.8, 0.1 / 0.8 (12.5, to even), 0.8 / 0.8.
  assert lines['collective'] == ['0.600', '[0.550,', '0.660]', '75', '%', *rest]
  assert lines['random'] == ['0.100', '[0.050,', '0.160]', '12', '%', *rest]
  assert lines['oracle'] == ['0.800', '[0.750,', '0.860]', '100', '%', *rest]
  assert lines['oracle, muted'][3:5] == ['87', '%']  # 0.7 / 0.8 = 87.49...
  flat = ' '.join(text.split())
  assert 'one trained agent takes 2.50 [2.25, 2.75] times as long' in flat
  assert 'overtakes solo at a deadline of 75 s.' in flat
  assert 'Deadline 120 s, 32 held-out tasks.' in flat


def test_table_without_trained_solo_and_oracle():
  evaluation = make_evaluation()
  greedy = evaluation['matched_tokens']['greedy_solo']
  evaluation['matched_tokens'] = {'greedy_solo': greedy}
  for part in (evaluation, evaluation['by_deadline']):
    for name in ('solo', 'oracle', 'muted_trained'):
      del part['modes'][name]
  evaluation['by_deadline']['crossover_ms'] = None
  table = report.table(evaluation)
  assert table.row_count == 5
  flat = ' '.join(printed(table).split())
  assert 'collective 0.600 [0.550, 0.660] – 4.0' in flat
  assert 'one greedy agent takes 3.00' in flat
  assert 'is not ahead of greedy solo at the longest deadline' in flat
  sentence = report.headline(evaluation)
  assert 'one greedy agent' in sentence and 'oracle' not in sentence


def test_crossover_at_the_first_deadline_may_lie_before_it():
  evaluation = make_evaluation()
  evaluation['by_deadline']['crossover_ms'] = 60_000.0
  assert 'overtakes solo at 60 s or sooner' in report.caption(evaluation)


def test_training_table_is_of_the_last_row():
  rows = make_rows(3) + make_rows(4, return_mean=0.5, team_size_mean=None)[3:]
  text = printed(report.training_table(rows))
  assert re.search(r'return \(0 to 1\) +0\.500', text)
  assert re.search(r'last update +3\b', text)
  assert re.search(r'team size \(agents\) +–', text)
  assert report.training_table([]).row_count == 0


def test_reads_the_columns_that_are_measured():
  """Names agree with `metrics.summarise` and with the evaluator's."""
  verbs = (
      base.VerbSpec('work', True, 10.0, 0, True),
      base.VerbSpec('tell', True, 10.0, 0, False, True, True, talks=True),
  )
  ints = np.array([[3, 1], [1, 1]])  # [B, V].
  scalar = np.array([1, 2])
  played = rollout.Rollouts(
      progress=np.array([0.5, 0.7]),
      time_ms=scalar * 1000,
      progress_ms=scalar,
      turns=ints,
      effective=ints,
      output_tokens=ints,
      team_size=scalar,
      critical_steps=scalar,
      hired=scalar,
      productive=scalar,
      curve=np.zeros((2, 3)),
      iterations=np.array(1),
      decisions=np.array(6),
  )
  numbers = ('loss', 'entropy', 'grad_norm', 'log_prob_gap', 'informative')
  update = types.SimpleNamespace(
      rollouts=played,
      returns=np.array([[0.5, 0.7]]),
      nonfinite_groups=0,
      extra={},
      **dict.fromkeys(numbers, 0.0),
  )
  knobs = metrics.learner.Knobs(jnp.float32(0), jnp.float32(0))
  row = metrics.summarise(verbs, update, np.array([1000]), knobs)
  row |= {'step': 0, 'seconds': 1.0}
  assert '–' not in [value for _, value in report.headlines([row])]
  drawn = {c.name for c in figures.training_charts({'collective': [row]})}
  assert drawn == TRAINING
  collective = types.SimpleNamespace(verbs=verbs)
  evaluator = types.SimpleNamespace(collective=collective)
  entry = evaluate.Evaluator.summary(evaluator, played)
  cells = report.summary({'modes': {'oracle': entry}})['oracle']
  assert not any('–' in cell for cell in cells)
  assert set(figures.STYLES) == set(evaluate.MODES)
