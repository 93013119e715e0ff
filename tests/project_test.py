"""What the project files say of each other, and of the tree, is true."""

import ast
import pathlib
import re

from packaging import requirements
from packaging import utils
import pytest
from rlcr_jax import config as config_lib
from rlcr_jax import evaluate

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GUIDES = (
    'README.md',
    'CONTRIBUTING.md',
    'docs/environments.md',
    'docs/evaluation.md',
    'docs/llm.md',
)


def _read(file: str) -> str:
  return (_ROOT / file).read_text(encoding='utf-8')


def _setup() -> dict[str, object]:
  """The literal arguments of `setup`."""
  calls = [
      node.value
      for node in ast.parse(_read('setup.py')).body
      if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
  ]
  arguments = {}
  for keyword in calls[-1].keywords:
    try:
      arguments[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError:  # Computed, such as the long description.
      continue
  return arguments


def _floors(*extras: str) -> list[requirements.Requirement]:
  setup = _setup()
  lines = list(setup['install_requires'])
  for extra in extras:
    lines += setup['extras_require'][extra]
  return [requirements.Requirement(line) for line in lines]


def _lock() -> dict[str, str]:
  """Version by name; every line is a comment or `name==version`."""
  pinned = {}
  for line in _read('requirements.lock').splitlines():
    if line.startswith('#'):
      continue
    match = re.fullmatch(r'([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)', line)
    assert match, f'requirements.lock: {line!r} is not `name==version`.'
    pinned[utils.canonicalize_name(match[1])] = match[2]
  return pinned


def test_the_lock_satisfies_the_floors():
  lock = _lock()
  for floor in _floors('test'):
    name = utils.canonicalize_name(floor.name)
    assert name in lock, f'requirements.lock lacks {name}: run `make lock`.'
    assert floor.specifier.contains(
        lock[name], prereleases=True
    ), f'requirements.lock has {name}=={lock[name]}, setup.py wants {floor}.'


def test_the_lock_says_how_it_is_made():
  assert '`make lock`' in _read('requirements.lock').splitlines()[1]


def test_setup_gives_floors_only():
  for floor in _floors(*_setup()['extras_require']):
    operators = [specifier.operator for specifier in floor.specifier]
    assert operators == ['>='], f'setup.py: {floor} must be a single floor.'


def test_the_version_is_the_same_everywhere():
  version = _setup()['version']
  assert f'version = "{version}"' in _read('MODULE.bazel')
  newest = re.search(r'^## \[([\d.]+)\]', _read('CHANGELOG.md'), re.MULTILINE)
  assert newest and newest[1] == version
  cited = re.search(r'^version: (\S+)$', _read('CITATION.cff'), re.MULTILINE)
  assert cited and cited[1] == version


def test_the_citation_can_be_read():
  yaml = pytest.importorskip('yaml')
  citation = yaml.safe_load(_read('CITATION.cff'))
  assert citation['cff-version'] == '1.2.0'
  assert {'title', 'message', 'authors'} <= set(citation)
  report = citation['preferred-citation']
  assert report['title'].startswith('Avalon-M1')
  assert len(report['authors']) == 8


@pytest.mark.parametrize('guide', _GUIDES)
def test_guides_name_what_exists(guide):
  text = _read(guide)
  named = {
      module.replace('.', '/') + '.py'
      for module in re.findall(r'python -m (experiments\.[\w.]+)', text)
  }
  named |= set(re.findall(r'--config=([\w/.]+)', text))
  named |= set(
      re.findall(r'\b(?:docs|envs|experiments|rlcr_jax|tests)/[\w/.]+\w', text)
  )
  links = re.findall(r'\]\(([^)#]+)\)', text)
  named |= {link for link in links if '://' not in link}
  folder = (_ROOT / guide).parent
  absent = sorted(
      name
      for name in named
      if not (_ROOT / name).exists() and not (folder / name).exists()
  )
  assert not absent, f'{guide} names {absent}, which do not exist.'


@pytest.mark.parametrize('guide', _GUIDES)
def test_guides_name_goals_of_the_makefile(guide):
  goals = re.findall(r'^([a-z -]+):', _read('Makefile'), re.MULTILINE)
  known = {goal for line in goals for goal in line.split()}
  named = set(re.findall(r'`?\bmake ([a-z-]+)`', _read(guide)))
  named |= set(re.findall(r'^ *make ([a-z-]+)', _read(guide), re.MULTILINE))
  assert named <= known, f'{guide} names make {sorted(named - known)}.'


def _overrides() -> list[tuple[str, str]]:
  return re.findall(r'--config\.([\w.]+)=([\w.,=-]+)', _read('README.md'))


@pytest.mark.parametrize('field, text', _overrides())
def test_overrides_in_the_readme_are_allowed(field, text):
  config = config_lib.defaults()
  *sections, leaf = field.split('.')
  section = config
  for name in sections:
    section = section[name]
  assert leaf in section, f'README.md: there is no field {field}.'
  old = section[leaf]
  section[leaf] = text == 'true' if isinstance(old, bool) else type(old)(text)
  assert section[leaf] != old, f'README.md: {field}={text} is the default.'
  if field == 'rlcr.epochs':  # Off-policy epochs need this loss as well.
    config.rlcr.loss = 'clipped_surrogate'
  config_lib.resolve(config)


def test_every_mode_of_the_evaluation_is_explained():
  text = _read('docs/evaluation.md')
  assert not [mode for mode in evaluate.MODES if f'`{mode}`' not in text]


def test_the_results_of_the_readme_are_filled_in():
  assert '@@' not in _read('README.md')
