"""Is B faster or slower than A? From result files, or from runs made by turns.

  python -m benchmarks.compare A.json B.json
  python -m benchmarks.compare --a=a1.json,a2.json,a3.json --b=b1.json,b2.json,b3.json
  python -m benchmarks.compare --rounds=5 --a=--all_reduce_spec=copy \
    --b=--all_reduce_spec=ring --model=lenet --num_gpus=2 --num_batches=50

Files are those of --result_json. With --rounds it makes the runs itself: A, B, B, A, A, B and so
on, each in a process of its own; --a and --b then are flags of the driver that only one side has,
and all other flags go to both. --out keeps the results (default: nowhere).

It prints the rates, the ratio with its 95 % interval, what that rests on, and every setting in
which the sides differ. One file a side tells what its steps tell: two runs of one command can
differ by more, so take several, made by turns.

  --threshold  share of A's rate that B may lose; default 0.02
  --anyway     compare other models, batches or numbers of devices, too

Exit code: 0 B is not slower than that, or it can't be told; 1 it is, with 95 % confidence; 2 flags,
files or runs that can't be compared; 130 interrupted.
"""

from collections.abc import Mapping, Sequence
import os
from pathlib import Path
import shlex
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.markup
import rich.table

from benchmarks import command, difference, results
from hpm.errors import DataError, UsageError

__all__ = ['differing', 'main']

_SAME = ('mode', 'model', 'batch_size_per_device', 'num_devices', 'num_workers')
_HELP = 'See the top of this page.'
# Flags that name places, and what is compared by itself.
_PLACES = ('result_json', 'train_dir', 'curve_file', 'tensorboard_dir', 'profile_dir')


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """One command, from its flags to its exit code."""
  values, rest = _parse(arguments)
  console = rich.console.Console(highlight=False)
  try:
    if values.rounds is None:
      sides = _files(values, rest)
      for path in (every := [*sides[0], *sides[1]]):
        if every.count(path) > 1:
          raise UsageError(f'{path} is given twice')
      a, b = ([results.read(path) for path in side] for side in sides)
    else:
      a, b = _run(values, rest, console)
      sides = (shlex.split(values.a or ''), shlex.split(values.b or ''))
    _check(a, b, values.anyway)
  except DataError as error:
    raise UsageError(str(error)) from None
  found = difference.of(a, b)
  console.print(_table(sides, a, b), soft_wrap=True)
  for line in _lines(found, a, b, values.threshold):
    console.print(rich.markup.escape(line), soft_wrap=True)
  return 1 if found.slower_by(values.threshold) else 0


def differing(
  a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
  """(setting, A's values, B's values) wherever the sides differ, or one differs within itself."""
  found = []
  names = dict.fromkeys(name for result in (*a, *b) for name in _settings(result))
  for name in names:
    texts = [
      ', '.join(dict.fromkeys(str(_settings(result).get(name, 'unknown')) for result in side))
      for side in (a, b)
    ]
    if texts[0] != texts[1] or ', ' in texts[0]:
      found.append((name, *texts))
  return found


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
  chosen = {f'--{name}': v for name, v in result['flags'].items() if name not in _PLACES}
  machine = {name: _short(value) for name, value in result['machine'].items()}
  return {**chosen, **machine, 'devices': len(result.get('devices', []))}


def _short(value: Any) -> str:
  if isinstance(value, dict):
    return ' '.join(f'{k}={v}' for k, v in sorted(value.items())) or 'none'
  if isinstance(value, list):
    return ' '.join(map(str, value)) or 'none'
  return str(value)


def _parse(arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
  values = flags.FlagValues()
  flags.DEFINE_string('a', None, _HELP, flag_values=values)
  flags.DEFINE_string('b', None, _HELP, flag_values=values)
  flags.DEFINE_string('out', None, _HELP, flag_values=values)
  flags.DEFINE_integer('rounds', None, _HELP, flag_values=values)
  flags.DEFINE_float('threshold', 0.02, _HELP, flag_values=values)
  flags.DEFINE_boolean('anyway', False, _HELP, flag_values=values)
  names = {f'--{name}' for name in (*values, 'noanyway')}
  own = [
    a for a in arguments if a.startswith('-') and f'--{a.lstrip("-")}'.partition('=')[0] in names
  ]
  command.parse(values, own)
  if not 0 <= values.threshold < 1:
    raise UsageError(f'--threshold={values.threshold:g}: a share from 0 to below 1 is needed')
  if values.rounds is not None and values.rounds < 1:
    raise UsageError(f'--rounds={values.rounds}: 1 or more is needed')
  rest = [a for a in arguments if a not in own]
  if values.rounds is None:
    for argument in rest:
      if argument.startswith('-'):
        raise UsageError(f'{argument}: flags of the driver go with --rounds, which makes the runs')
    if values.out is not None:
      raise UsageError('--out keeps the results of --rounds: add that')
  return values, rest


def _files(values: flags.FlagValues, paths: Sequence[str]) -> tuple[list[str], list[str]]:
  sides = (
    [p for p in (values.a or '').split(',') if p],
    [p for p in (values.b or '').split(',') if p],
  )
  if not any(sides) and len(paths) == 2:
    return [paths[0]], [paths[1]]
  if paths or not all(sides):
    raise UsageError('two result files are needed, or --a=FILE,... and --b=FILE,..., or --rounds')
  return sides


def _run(
  values: flags.FlagValues, rest: Sequence[str], console: rich.console.Console
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Results of both sides, one a round, A and B first by turns."""
  if (values.a or '') == (values.b or ''):
    raise UsageError('--rounds runs two sides: give --a or --b, flags that only that one has')
  own = {'a': shlex.split(values.a or ''), 'b': shlex.split(values.b or '')}
  found: dict[str, list[dict[str, Any]]] = {'a': [], 'b': []}
  with tempfile.TemporaryDirectory() as scratch:
    out = Path(values.out or scratch)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(values.rounds):
      for side in ('ab', 'ba')[number % 2]:
        path = out / f'{side}{number + 1}.json'
        with console.status(f'round {number + 1} of {values.rounds}, {side.upper()}'):
          done = subprocess.run(
            [
              *(sys.executable, str(Path(__file__).with_name('run.py')), *rest, *own[side]),
              f'--result_json={path}',
            ],
            capture_output=True,
            text=True,
            env=dict(os.environ),
          )
        if done.returncode:
          last = (done.stderr.strip() or done.stdout.strip()).rpartition('\n')[2]
          raise UsageError(
            f'{side.upper()} ended with code {done.returncode} in round {number + 1}: '
            f'{last.removeprefix("error: ")}'
          )
        found[side].append(results.read(str(path)))
  return found['a'], found['b']


def _check(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], anyway: bool) -> None:
  for result in (*a, *b):
    if 'images_per_second' not in result:
      reason = result.get('reason', 'it measured no speed')
      raise DataError(f'a run of status {result["status"]} has no rate: {reason}')
  if anyway:
    return
  for name in _SAME:
    kinds = [
      {len(r['devices']) if name == 'num_devices' else r.get(name, 1) for r in side}
      for side in (a, b)
    ]
    if len(kinds[0] | kinds[1]) > 1:
      first, second = (', '.join(map(str, sorted(kind))) for kind in kinds)
      raise DataError(
        f'{name} is {first} in A and {second} in B: these are no two measurements of one thing '
        '(--anyway compares them all the same)'
      )


def _table(
  sides: Sequence[Sequence[str]],
  a: Sequence[Mapping[str, Any]],
  b: Sequence[Mapping[str, Any]],
) -> rich.table.Table:
  table = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0))
  for column in ('', 'runs', 'images/s', 'lowest', 'highest', 'of'):
    table.add_column(column, justify='left' if column in ('', 'of') else 'right')
  for name, own, side in zip('AB', sides, (a, b), strict=True):
    rates = [r['images_per_second'] for r in side]
    rates = [run['images_per_second'] for r in side for run in r.get('runs', [])] or rates
    mean = 1 / (sum(1 / rate for rate in rates) / len(rates))
    label = own[0] + (' ...' if len(own) > 1 else '') if own else 'the common flags'
    table.add_row(
      *(name, str(len(rates)), f'{mean:.2f}', f'{min(rates):.2f}', f'{max(rates):.2f}'),
      rich.markup.escape(label),
    )
  return table


def _lines(
  found: difference.Difference,
  a: Sequence[Mapping[str, Any]],
  b: Sequence[Mapping[str, Any]],
  threshold: float,
) -> list[str]:
  change = found.ratio - 1
  word = 'faster' if change > 0 else 'slower'
  first = f'B is {abs(change):.2%} {word} than A'
  if found.low is None or found.high is None:
    first += ': of so few values there is no interval'
  else:
    first += f'; 95 % interval of the ratio {found.low:.4f} to {found.high:.4f}'
    first += ', significant' if found.significant else ', which is no difference'
  lines = [first, f'Rests on {_rests(found)}']
  if found.slower_by(threshold):
    lines.append(f'Slower than the threshold of {threshold:g} allows')
  elif found.low is not None and found.low < 1 - threshold:
    lines.append(f'A loss of more than {threshold:g} is not ruled out: make more runs')
  lines += [f'{name}: {one} | {other}' for name, one, other in differing(a, b)]
  return lines


def _rests(found: difference.Difference) -> str:
  a, b = found.count
  if found.how == difference.PAIRED:
    return f'{a} pairs of runs made by turns'
  if found.how == difference.APART:
    return (
      f'{a} and {b} runs that were not made by turns: what changed on the machine in between looks '
      'like a difference'
    )
  return (
    f'one run each, in {a} and {b} blocks of steps: two runs of one command can differ by more '
    '(--rounds makes several)'
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
