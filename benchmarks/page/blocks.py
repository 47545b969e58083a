"""The parts of a page, and the page as Markdown, as HTML and as lines on a terminal."""

from collections.abc import Callable, Sequence
import dataclasses
import html as escaping
import re
from typing import Any, NamedTuple

import rich.console
import rich.table
import rich.text

__all__ = ['Block', 'Figure', 'Heading', 'Panel', 'Table', 'Text', 'console', 'html', 'markdown']


class Heading(NamedTuple):
  """A title of a level from 1."""

  level: int
  text: str


class Text(NamedTuple):
  """A paragraph; `code` and [text](address) as in Markdown."""

  text: str


class Table(NamedTuple):
  """Cells as texts, the first column to the left, the others to the right or as `left` says."""

  caption: str
  columns: Sequence[str]
  rows: Sequence[Sequence[str]]
  left: bool = False


class Panel(NamedTuple):
  """One set of axes: its title, and what draws on them (`matplotlib.axes.Axes`)."""

  title: str
  draw: Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Figure:
  """Panels that belong together.

  Attributes:
    name: of its file.
    caption: what there is to see, and the units.
    panels: side by side where there is room.
    width: of a panel, in inches.
  """

  name: str
  caption: str
  panels: Sequence[Panel]
  width: float = 3.0


Block = Heading | Text | Table | Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; color: #1a1a1a;
  background: #fff; margin: 0 auto; padding: 1rem; max-width: 62rem; overflow-wrap: break-word; }
h1 { font-size: 1.8rem; line-height: 1.2; }
h2 { font-size: 1.4rem; margin-top: 2.5rem; border-bottom: 2px solid #1a1a1a; }
h3 { font-size: 1.15rem; margin-top: 2rem; }
h4 { font-size: 1rem; margin-bottom: .25rem; }
p { max-width: 46rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.caption { font-size: .9rem; font-weight: 600; margin: 1rem 0 -.75rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ccc; text-align: right;
  vertical-align: top; }
th { border-bottom: 2px solid #1a1a1a; }
th:first-child, td:first-child, table.left th, table.left td { text-align: left; }
td { white-space: nowrap; }
table.left td { white-space: normal; }
figure { margin: 1.5rem 0; }
figcaption { font-size: .9rem; max-width: 46rem; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem 1rem; }
.panels svg { flex: 0 1 auto; max-width: 100%; height: auto; }
code { background: #f2f2f2; padding: 0 .2em; }
@media print { body { max-width: none; } figure, tr { break-inside: avoid; } }
"""


def markdown(blocks: Sequence[Block], draw: Callable[[Figure], str | None], note: str) -> str:
  """The page as Markdown.

  Args:
    blocks: of the page.
    draw: makes a figure's image, and gives its address from the page; None leaves it out.
    note: a comment for the top, how the file was written.
  """
  parts = [f'<!-- {note} -->']
  for block in blocks:
    match block:
      case Heading(level, text):
        parts.append(f'{"#" * level} {text}')
      case Text(text):
        parts.append(text)
      case Table():
        parts.append(_markdown_table(block))
      case Figure():
        if address := draw(block):
          parts.append(f'![{block.caption}]({address})\n\n*{block.caption}*')
  return '\n\n'.join(parts) + '\n'


def html(blocks: Sequence[Block], draw: Callable[[Panel, float], str | None]) -> str:
  """The page as one file of HTML, which loads nothing.

  Args:
    blocks: of the page.
    draw: a panel of a width in inches as SVG; None leaves it out.
  """
  titles = [block.text for block in blocks if isinstance(block, Heading)]
  parts = [
    '<!DOCTYPE html>',
    '<html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f'<title>{escaping.escape(titles[0] if titles else "Benchmarks")}</title>',
    f'<style>{_STYLE}</style></head><body>',
  ]
  for block in blocks:
    match block:
      case Heading(level, text):
        parts.append(f'<h{level} id="{anchor(text)}">{_inline(text)}</h{level}>')
      case Text(text):
        parts.append(f'<p>{_inline(text)}</p>')
      case Table():
        parts.append(_html_table(block))
      case Figure(caption=caption, panels=panels, width=width):
        drawn = [svg for panel in panels if (svg := draw(panel, width))]
        if drawn:
          parts.append(
            f'<figure><div class="panels">{"".join(drawn)}</div>'
            f'<figcaption>{_inline(caption)}</figcaption></figure>'
          )
  return '\n'.join([*parts, '</body></html>']) + '\n'


def console(blocks: Sequence[Block], out: rich.console.Console) -> None:
  """The page on a terminal, without its figures."""
  for block in blocks:
    match block:
      case Heading(level, text):
        out.print(f'\n{text}', style='bold underline' if level < 3 else 'bold', markup=False)
      case Text(text):
        out.print(text, markup=False)
      case Table(caption, columns, rows, left):
        table = rich.table.Table(title=caption, title_justify='left')
        for number, column in enumerate(columns):
          table.add_column(column, justify='right' if number and not left else 'left')
        for row in rows:
          table.add_row(*(rich.text.Text(cell) for cell in row))
        out.print(table)


def anchor(text: str) -> str:
  """The id of a heading, as in the addresses that point at it."""
  return re.sub(r'[^\w-]', '', text.lower().replace(' ', '-'))


def _markdown_table(table: Table) -> str:
  sides = [':--' if table.left or not number else '--:' for number in range(len(table.columns))]
  rows = [table.columns, *table.rows]
  lines = ['| ' + ' | '.join(cell.replace('|', '\\|') for cell in row) + ' |' for row in rows]
  lines.insert(1, '|' + '|'.join(sides) + '|')
  return '\n'.join([f'**{table.caption}**', '', *lines] if table.caption else lines)


def _html_table(table: Table) -> str:
  # A caption of the table's own would scroll with it.
  parts = [f'<p class="caption">{_inline(table.caption)}</p>'] if table.caption else []
  parts.append(f'<div class="scroll"><table{" class=left" if table.left else ""}>')
  head = ''.join(f'<th scope="col">{_inline(column)}</th>' for column in table.columns)
  parts.append(f'<thead><tr>{head}</tr></thead><tbody>')
  for row in table.rows:
    parts.append('<tr>' + ''.join(f'<td>{_inline(cell)}</td>' for cell in row) + '</tr>')
  return '\n'.join([*parts, '</tbody></table></div>'])


def _inline(text: str) -> str:
  text = escaping.escape(text, quote=False).replace('"', '&quot;')
  text = re.sub('`([^`]+)`', r'<code>\1</code>', text)
  # Within the page, beside it, or on the web; no other scheme, which could be a script.
  return re.sub(r'\[([^]]+)\]\(((?:https?://)?[^):\s]*)\)', r'<a href="\2">\1</a>', text)
