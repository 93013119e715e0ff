"""The BUILD files say the truth about the tree.

Each check returns what is wrong, one message per fault, which says what to
write instead.
"""

import pathlib
import re

import pytest
from tests import build_files
from tests.build_files import Tree

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _is_test(file: str) -> bool:
  return file.startswith('tests/') and file.endswith('_test.py')


def _missing_build_files(tree: Tree) -> list[str]:
  return [
      f'{package}/BUILD does not exist: every package has one.'
      for package in tree.packages
      if not (tree.root / package / 'BUILD').exists()
  ]


def _misplaced_modules(tree: Tree) -> list[str]:
  faults = []
  for file in tree.modules.values():
    package, name = file.rsplit('/', 1)
    owners = [target.label for target in tree.owners.get(file, ())]
    if _is_test(file) or name == build_files.RUNNER or len(owners) == 1:
      continue
    faults.append(
        f'{package}/BUILD: "{name}" must be in the srcs of exactly one library'
        f' or binary; it is in {owners or "none"}.'
    )
  return faults


def _absent_files(tree: Tree) -> list[str]:
  return [
      f'{target.label} names {file}, which does not exist.'
      for target in tree.targets
      for file in target.files
      if not (tree.root / file).exists()
  ]


def _tests_without_target(tree: Tree) -> list[str]:
  faults = []
  for file in filter(_is_test, tree.modules.values()):
    name = pathlib.Path(file).stem
    targets = [
        target
        for target in tree.owners.get(file, ())
        if target.rule == 'py_test'
        and target.name == name
        and target.args == (file,)
    ]
    if len(targets) != 1:
      faults.append(
          f'tests/BUILD must have exactly one target that runs {file}; it has'
          f' {len(targets)}. Write:\n{tree.expected_test(name)}'
      )
  return faults


def _wrong_deps(tree: Tree) -> list[str]:
  faults = []
  for target in tree.targets:
    needs, has = tree.needs(target), set(target.deps)
    missing, spare = set(needs) - has, has - set(needs)
    if f':{target.name}' == build_files.TESTING:  # Brings more than it uses.
      spare = {label for label in spare if not label.startswith('@')}
    if missing or spare:
      faults.append(
          f'{target.label}: deps lack {sorted(missing)}, and have'
          f' {sorted(spare)} too many. What is imported are'
          f' {build_files.written(needs)}.'
      )
  return faults


def _unsorted_lists(tree: Tree) -> list[str]:
  return [
      f'{target.label}: {field} in order are {build_files.written(right)}.'
      for target in tree.targets
      for field, given, right in (
          ('srcs', target.srcs, sorted(set(target.srcs))),
          ('deps', target.deps, build_files.in_order(set(target.deps))),
      )
      if list(given) != right
  ]


def _cycles(tree: Tree) -> list[str]:
  """Targets that need each other, which Bazel refuses."""
  needs = {}
  for target in tree.targets:
    files = set().union(*map(tree.imports, target.files))
    owners = [tree.owners[file][0].label for file in files & set(tree.owners)]
    needs[target.label] = set(owners) - {target.label}
  while free := [k for k, labels in needs.items() if not labels & set(needs)]:
    for label in free:
      del needs[label]
  return [
      f'{label} is in a cycle or needs one: {sorted(labels & set(needs))}.'
      for label, labels in needs.items()
  ]


def _upward_imports(tree: Tree) -> list[str]:
  layer = lambda file: build_files.LAYERS.index(file.split('/')[0])
  return [
      f'{file} imports {name}: of {build_files.LAYERS}, each may import only'
      ' itself and those to its left.'
      for file in tree.modules.values()
      for name in sorted(tree.imports(file))
      if name.endswith('.py') and layer(name) > layer(file)
  ]


def _unknown_distributions(tree: Tree) -> list[str]:
  lock = (tree.root / 'requirements.lock').read_text(encoding='utf-8')
  names = [line.split('==')[0] for line in lock.splitlines() if '==' in line]
  known = {f'@pypi//{re.sub("[-_.]+", "_", name).lower()}' for name in names}
  return [
      f'{target.label} needs {dep}, which requirements.lock does not have.'
      for target in tree.targets
      for dep in target.deps
      if dep.startswith('@') and dep not in known
  ]


_CHECKS = (
    _missing_build_files,
    _misplaced_modules,
    _absent_files,
    _tests_without_target,
    _wrong_deps,
    _unsorted_lists,
    _cycles,
    _upward_imports,
    _unknown_distributions,
)


@pytest.mark.parametrize('check', _CHECKS)
def test_build_files_are_true_to_the_tree(check):
  faults = check(Tree(_ROOT))
  assert not faults, '\n\n' + '\n\n'.join(faults)


# A tree on which the checks themselves are tested.
_LIBRARY = 'py_library(name = "{}", srcs = {}, deps = {})\n'
_FILES = {
    'envs/__init__.py': '',
    'envs/base.py': 'import abc\nimport jax.numpy as jnp\n',
    'envs/BUILD': _LIBRARY.format(
        'envs', '["__init__.py", "base.py"]', '["@pypi//jax"]'
    ),
    'rlcr_jax/__init__.py': '',
    'rlcr_jax/clock.py': 'from envs import base\nfrom envs.base import Task\n',
    'rlcr_jax/BUILD': _LIBRARY.format(
        'rlcr_jax', '["__init__.py", "clock.py"]', '["//envs"]'
    ),
    'tests/__init__.py': '',
    'tests/BUILD': _LIBRARY.format(
        'testing', '["__init__.py"]', '["@pypi//jax"]'
    ),
    'requirements.lock': 'jax==1.0\n',
}
_UPWARD = {'envs/base.py': 'from rlcr_jax import clock\n'}


def _faults(root: pathlib.Path, changes: dict[str, str | None]):
  """What each check says of the small tree with some files changed."""
  for file, text in (_FILES | changes).items():
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
      (root / file).write_text(text, encoding='utf-8')
  return {check: ' '.join(check(Tree(root))) for check in _CHECKS}


def test_a_true_tree_has_no_faults(tmp_path):
  assert not any(_faults(tmp_path, {}).values())


@pytest.mark.parametrize(
    'check, changes, named',
    [
        (_missing_build_files, {'envs/BUILD': None}, 'envs/BUILD'),
        (_misplaced_modules, {'envs/new.py': ''}, '"new.py"'),
        (_absent_files, {'envs/base.py': None}, 'envs/base.py'),
        (_tests_without_target, {'tests/a_test.py': ''}, 'name = "a_test"'),
        (_wrong_deps, {'envs/base.py': 'import chex\n'}, "['@pypi//chex']"),
        (_wrong_deps, {'rlcr_jax/clock.py': ''}, "['//envs'] too many"),
        (
            _unsorted_lists,
            {'envs/BUILD': _LIBRARY.format('envs', '["b", "a"]', [])},
            '"a"',
        ),
        (_cycles, _UPWARD, '//rlcr_jax:rlcr_jax'),
        (_upward_imports, _UPWARD, 'envs/base.py imports rlcr_jax/clock.py'),
        (_unknown_distributions, {'requirements.lock': ''}, '@pypi//jax'),
    ],
)
def test_a_fault_is_reported(tmp_path, check, changes, named):
  assert named in _faults(tmp_path, changes)[check]
