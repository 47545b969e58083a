"""Reads BUILD without Bazel and compares it with the source tree.

BUILD files are Starlark, whose syntax is Python's, so `ast` parses them. Understood is what this
project's BUILD is made of: calls of py_library, py_binary and py_test with literal attributes, and
`glob`.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
import graphlib
import importlib.metadata
from pathlib import Path
import sys

from tests.packaging.source import Tree

__all__ = ['Target', 'problems', 'read_targets']

RULES = ('py_library', 'py_binary', 'py_test')

# Packages that a file finds by their names, to read the photographs inside them.
FOUND_BY_NAME = {'hpm/pipelines/sample.py': ('skimage', 'sklearn')}

CONFTEST = ':conftest'  # pytest loads it beside each test file, which doesn't import it

# Imported only where they are installed, and refused with the install command elsewhere: DALI,
# whose plugin is built against an installed TensorFlow, which a lock file can't express; PyTorch,
# safetensors and Grain, which only comparisons and imports of weights use.
OPTIONAL = ('grain', 'nvidia', 'safetensors', 'torch', 'torchvision')


@dataclass(frozen=True)
class Target:
  """One py_* rule: its files relative to the root, and its deps as they are written.

  `main_module` is what it runs, as in `python -m`, where that is none of its files.
  """

  rule: str
  name: str
  srcs: tuple[str, ...]
  deps: tuple[str, ...] = ()
  main_module: str | None = None

  @property
  def label(self) -> str:
    return f':{self.name}'


def read_targets(root: Path) -> list[Target]:
  """The py_* targets of root/BUILD, in order."""
  targets = []
  for statement in ast.parse((root / 'BUILD').read_text(encoding='utf-8')).body:
    match statement:
      case ast.Expr(ast.Call(func=ast.Name(id=rule)) as call) if rule in RULES:
        values = {keyword.arg: _evaluate(root, keyword.value) for keyword in call.keywords}
        known = {name: values[name] for name in ('deps', 'main_module') if name in values}
        targets.append(Target(rule, values['name'], tuple(values['srcs']), **known))
  return targets


def problems(root: Path) -> list[str]:
  """What to change in BUILD, one line each; empty if it fits the source tree."""
  tree, targets = Tree(root), read_targets(root)
  return [
    *_file_problems(tree, targets),
    *_dep_problems(tree, targets),
    *_graph_problems(targets),
  ]


def _file_problems(tree: Tree, targets: list[Target]) -> Iterator[str]:
  holders = defaultdict(list)
  for target in targets:
    for source in target.srcs:
      holders[source].append(target.label)
  for file in tree.files:
    if file not in holders:
      yield f'{file}: in no target'
  for file, labels in holders.items():
    if file not in tree.files:
      yield f'{file}: no such file, but in {", ".join(labels)}'
    elif len(labels) > 1:
      yield f'{file}: in {len(labels)} targets, {", ".join(labels)}; one is right'


def _dep_problems(tree: Tree, targets: list[Target]) -> Iterator[str]:
  holder = {source: target.label for target in targets for source in target.srcs}
  for target in targets:
    needed = {}  # dep -> the first thing that needs it
    for module, reason in _needs(tree, target):
      if dep := _dep(tree, holder, module):
        needed.setdefault(dep, reason)
    if target.main_module == 'pytest':
      needed[CONFTEST] = 'pytest loads it'
    needed.pop(target.label, None)
    for dep, reason in needed.items():
      if dep not in target.deps:
        yield f'{target.label}: add {dep!r} to deps ({reason})'
    for dep in target.deps:
      if dep not in needed:
        yield f'{target.label}: remove {dep!r} from deps (no file of the target imports it)'


def _needs(tree: Tree, target: Target) -> Iterator[tuple[str, str]]:
  """Modules that the target can't do without, each with the reason."""
  if target.main_module:
    yield target.main_module, f'main_module is {target.main_module}'
  for file in sorted(set(target.srcs).intersection(tree.files)):
    for item in tree.imports(file):
      yield item.module, f'{file}:{item.line} imports {item.module}'
    for module in FOUND_BY_NAME.get(file, ()):
      yield module, f'{file} looks for {module}'


def _dep(tree: Tree, holder: dict[str, str], module: str) -> str | None:
  """The label of what is imported; None for the standard library and what is optional."""
  if file := _file_of(tree, module):
    return holder.get(file)  # a file without a target is reported by itself
  top = module.split('.')[0]
  if top in sys.stdlib_module_names or top in OPTIONAL:
    return None
  return f'@pip//{_distribution(module)}'


def _file_of(tree: Tree, module: str) -> str | None:
  """The file of the module, or of the package around it if the last parts are attributes."""
  while module:
    if module in tree.modules:
      return tree.modules[module]
    module = module.rpartition('.')[0]
  return None


def _distribution(module: str) -> str:
  """The name of the package to install, spelt as in a Bazel label."""
  if module.startswith('google.protobuf'):  # `google` is shared by several distributions
    return 'protobuf'
  top = module.split('.')[0]
  names = _distributions().get(top, [top])
  return names[0].lower().replace('-', '_').replace('.', '_')


@cache
def _distributions() -> dict[str, list[str]]:
  return dict(importlib.metadata.packages_distributions())


def _graph_problems(targets: list[Target]) -> Iterator[str]:
  libraries = {target.label for target in targets if target.rule == 'py_library'}
  graph = {t.label: [dep for dep in t.deps if dep.startswith(':')] for t in targets}
  for label, deps in graph.items():
    for dep in deps:
      if dep not in libraries:
        yield f'{label}: {dep!r} in deps is no py_library of this file'
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    yield f'deps form a circle: {" -> ".join(error.args[1])}'


def _evaluate(root: Path, node: ast.expr) -> object:
  """The value of a literal, a glob or a sum of such lists."""
  match node:
    case ast.BinOp(op=ast.Add()):
      return [*_evaluate(root, node.left), *_evaluate(root, node.right)]
    case ast.Call(func=ast.Name(id='glob')):
      exclude = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
      excluded = _glob(root, exclude.get('exclude', []))
      return sorted(_glob(root, ast.literal_eval(node.args[0])) - excluded)
    case _:
      return ast.literal_eval(node)


def _glob(root: Path, patterns: list[str]) -> set[str]:
  return {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}
