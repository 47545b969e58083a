"""docs/flags.md, written from the flags themselves.

python -m benchmarks.flags > docs/flags.md
"""

from absl import flags as absl_flags

from benchmarks.flags import CONCERNS, predecessor

__all__ = ['markdown']


def markdown() -> str:
  """The whole page."""
  defined = absl_flags.FlagValues()
  lines = [
    '# Flags',
    '',
    '<!-- Written by `python -m benchmarks.flags > docs/flags.md`. -->',
    '',
    'The flags of `benchmarks/run.py`, and those of tf_cnn_benchmarks with what became of them.',
    'Booleans may be written `--x`, `--nox` or `--x=true|false`; `--flagfile=FILE` reads flags',
    'from a file, one a line. What can not work together is refused before TensorFlow is imported,',
    "and what the devices can't do right after.",
    '',
  ]
  for concern in CONCERNS:
    values = absl_flags.FlagValues()
    concern.define(values)
    concern.define(defined)
    lines += [f'## {concern.TITLE}', '', '| flag | meaning |', '|---|---|']
    lines += [f'| `--{name}` | {_cell(values[name].help)} |' for name in values]
    lines.append('')
  names = [*predecessor.ACCEPTED, *predecessor.ANSWERS]
  lines += [
    "## tf_cnn_benchmarks' flags",
    '',
    f'Of its {len(names)} flags {len(predecessor.ACCEPTED)} are accepted, with the same meaning '
    'where nothing else is said.',
    'The others are answered in one line, with exit code 2. Flags that it does not have: '
    + ', '.join(f'`--{name}`' for name in defined if name not in predecessor.ACCEPTED)
    + '.',
    '',
    '| flag | accepted | differs |',
    '|---|---|---|',
  ]
  lines += [f'| `--{n}` | yes | {_cell(note)} |' for n, note in predecessor.ACCEPTED.items()]
  lines += ['', '| flag | answer |', '|---|---|']
  lines += [f'| `--{n}` | {_cell(text)} |' for n, text in predecessor.ANSWERS.items()]
  return '\n'.join(lines) + '\n'


def _cell(text: str) -> str:
  return text.replace('|', '\\|')
