"""Reads the BUILD files and the imports of a tree, for `build_test`.

BUILD files are read as Python, of which they are a subset.
"""

import ast
import collections
from collections.abc import Collection, Iterable
import functools
import pathlib
import sys
from typing import NamedTuple

LAYERS = ('envs', 'rlcr_jax', 'experiments', 'tests')  # Imports point left.
RUNNER = 'pytest_main.py'  # Starts the file that a test target is about.
TESTING = ':testing'  # What every test needs, third parties included.

_RULES = ('py_binary', 'py_library', 'py_test')
# Distributions whose name is not that of the package which they install.
_DISTRIBUTIONS = {
    'absl': 'absl_py',
    'orbax': 'orbax_checkpoint',
    'yaml': 'pyyaml',
}


class Target(NamedTuple):
  """One rule of a BUILD file."""

  rule: str
  package: str
  name: str
  srcs: tuple[str, ...]
  deps: tuple[str, ...] = ()  # As written.
  args: tuple[str, ...] = ()

  @property
  def label(self) -> str:
    """The absolute label in full."""
    return f'//{self.package}:{self.name}'

  @property
  def files(self) -> tuple[str, ...]:
    """Sources, relative to the root."""
    return tuple(f'{self.package}/{src}' for src in self.srcs)


class Tree:
  """The packages below a root, their modules and their targets."""

  def __init__(self, root: pathlib.Path):
    self.root = root
    self.packages = [
        init.parent.relative_to(root).as_posix()
        for layer in LAYERS
        for init in sorted((root / layer).rglob('__init__.py'))
    ]

  @functools.cached_property
  def targets(self) -> list[Target]:
    """All Python rules of all BUILD files."""
    paths = [
        (package, self.root / package / 'BUILD') for package in self.packages
    ]
    return [
        target
        for package, path in paths
        if path.exists()
        for target in _read(package, path.read_text(encoding='utf-8'))
    ]

  @functools.cached_property
  def modules(self) -> dict[str, str]:
    """Files by dotted name; a package is the name of its `__init__.py`."""
    found = {}
    for package in self.packages:
      for path in sorted((self.root / package).glob('*.py')):
        file = path.relative_to(self.root)
        name = '.'.join(file.with_suffix('').parts)
        found[name.removesuffix('.__init__')] = file.as_posix()
    return found

  @functools.cached_property
  def owners(self) -> dict[str, list[Target]]:
    """The targets that name each file."""
    owners = collections.defaultdict(list)
    for target in self.targets:
      for file in target.files:
        owners[file].append(target)
    return owners

  def imports(self, file: str) -> set[str]:
    """What a file imports: files of the tree, and names of other packages."""
    if file not in self.modules.values():
      return set()
    names = set()
    text = (self.root / file).read_text(encoding='utf-8')
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        whole = [f'{node.module}.{alias.name}' for alias in node.names]
        names |= {n if n in self.modules else node.module for n in whole}
    return {self.modules.get(name, name.split('.')[0]) for name in names}

  def needs(self, target: Target) -> list[str]:
    """The deps that a target must have, as they are to be written."""
    labels = set()
    for name in set().union(*map(self.imports, target.files)):
      if name in self.owners:
        labels.add(_short(self.owners[name][0].label, target.package))
      elif not name.endswith('.py') and name not in sys.stdlib_module_names:
        labels.add('@pypi//' + _DISTRIBUTIONS.get(name, name).lower())
    if target.rule == 'py_test':
      labels = {x for x in labels if not x.startswith('@')} | {TESTING}
    return in_order(labels - {f':{target.name}'})

  def expected_test(self, name: str) -> str:
    """The whole target of a test file."""
    target = Target('py_test', 'tests', name, (f'{name}.py',))
    return (
        f'py_test(\n    name = "{name}",\n'
        f'    srcs = {written(sorted([f"{name}.py", RUNNER]))},\n'
        f'    args = ["tests/{name}.py"],\n    main = "{RUNNER}",\n'
        f'    deps = {written(self.needs(target))},\n)'
    )


def _read(package: str, text: str) -> Iterable[Target]:
  """The Python rules of one BUILD file."""
  for node in ast.parse(text).body:
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and call.func.id in _RULES:
      fields = {
          keyword.arg: ast.literal_eval(keyword.value)
          for keyword in call.keywords
          if keyword.arg in Target._fields
      }
      lists = {k: tuple(v) for k, v in fields.items() if k != 'name'}
      yield Target(call.func.id, package, fields['name'], **lists)


def _short(label: str, package: str) -> str:
  """`//a:b` as it is written in a BUILD file of `package`."""
  path, name = label.removeprefix('//').split(':')
  if path == package:
    return f':{name}'
  return f'//{path}' if path.split('/')[-1] == name else label


def in_order(labels: Iterable[str]) -> list[str]:
  """Those of this package first, then those of others, then third parties."""
  return sorted(labels, key=lambda label: (':/@'.index(label[0]), label))


def written(strings: Collection[str]) -> str:
  """A list as it is written in a BUILD file."""
  if len(strings) <= 1:
    return '[' + ''.join(f'"{s}"' for s in strings) + ']'
  return '[\n' + ''.join(f'        "{s}",\n' for s in strings) + '    ]'
