"""What the Python files of a source tree import, read from their text alone.

Nothing is executed: an import counts wherever it stands, inside a function or under TYPE_CHECKING
too, and so does a registry's string 'package.module:function', which is an import that is made
when the name is used.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
import re

__all__ = ['Import', 'Tree']

_REGISTRY_STRING = re.compile(r'(?P<module>[a-z_]\w*(\.\w+)+)(:(?P<attribute>\w+))?')
_SKIPPED = {'__pycache__', 'build', 'dist', 'results'}


@dataclass(frozen=True)
class Import:
  """One import of a file.

  Attributes:
    module: absolute dotted name; for `from a import b` it is 'a.b' where that is a module of the
      tree, 'a' otherwise.
    line: where it stands.
    attribute: what a registry's string names inside the module; None for a statement.
  """

  module: str
  line: int
  attribute: str | None = None


class Tree:
  """The Python files below `root`, hidden and generated directories left out."""

  def __init__(self, root: Path):
    self.root = root

  @cached_property
  def files(self) -> list[str]:
    """Paths relative to the root, sorted."""

    def wanted(path: Path) -> bool:
      return not any(part in _SKIPPED or part.startswith('.') for part in path.parts)

    found = (path.relative_to(self.root) for path in self.root.rglob('*.py'))
    return sorted(path.as_posix() for path in found if wanted(path))

  @cached_property
  def modules(self) -> dict[str, str]:
    """Dotted module name -> file."""
    return {_module_name(file): file for file in self.files}

  def imports(self, file: str) -> list[Import]:
    """Every import of the file, in the order of its lines; relative names made absolute."""
    tree = self._parse(file)
    return sorted(self._walk(file, tree), key=lambda found: (found.line, found.module))

  def defines(self, module: str, name: str) -> bool:
    """Whether a module of the tree binds the name at its top level."""
    return name in _bound_names(self._parse(self.modules[module]).body)

  def _parse(self, file: str) -> ast.Module:
    return ast.parse((self.root / file).read_text(encoding='utf-8'), filename=file)

  def _walk(self, file: str, tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
      match node:
        case ast.Import():
          for alias in node.names:
            yield Import(alias.name, node.lineno)
        case ast.ImportFrom():
          base = _absolute(file, node)
          for alias in node.names:
            inner = f'{base}.{alias.name}'
            yield Import(inner if inner in self.modules else base, node.lineno)
        case ast.Constant(value=str() as text):
          found = _REGISTRY_STRING.fullmatch(text)
          if found and found['module'] in self.modules:
            yield Import(found['module'], node.lineno, found['attribute'])


def _module_name(file: str) -> str:
  return file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def _absolute(file: str, node: ast.ImportFrom) -> str:
  if not node.level:
    return node.module or ''
  package = Path(file).parts[: -node.level]
  return '.'.join([*package, *([node.module] if node.module else [])])


def _bound_names(body: list[ast.stmt]) -> set[str]:
  names = set()
  for node in body:
    match node:
      case ast.FunctionDef() | ast.ClassDef():
        names.add(node.name)
      case ast.Assign():
        names.update(target.id for target in node.targets if isinstance(target, ast.Name))
      case ast.AnnAssign(target=ast.Name() as target):
        names.add(target.id)
      case ast.Import() | ast.ImportFrom():
        names.update(alias.asname or alias.name for alias in node.names)
      case ast.If() | ast.Try():
        names.update(_bound_names([*node.body, *node.orelse]))
  return names
