"""The benchmark page of this machine: five models, synthetic and real data, all numbers of devices.

  python -m benchmarks.suite --data_dir=imagenet=/data/imagenet --out=results/suite
  python -m benchmarks.suite --quick --data_dir=sample=.data/sample    # under 20 minutes on 2 cores
  python -m benchmarks.suite --platform=dgx1_p100                      # what was published, no run

Each cell (model, number of devices, batch size, data) is run 5 times, each time in a process of its
own: 10 steps of warm-up, then the mean of the next 100. Runs are interleaved, one of each cell
before the second of any. Times are averaged, not rates. The same command goes on where it was
stopped: what is measured stays in --out. A process that takes longer than --cell_timeout_s is
ended, and its cell left empty with the reason.

In --out: benchmarks.md with its charts in benchmarks/, benchmarks.html in one file, suite.json, and
each run's result and lines in cells/. --quick takes batches and steps that fit a small machine, and
as many rounds of runs as fit in --max_minutes; every table says so. --docs=FILE.md writes the
Markdown page there as well.

Exit code: 0 the page is written; 1 not a single cell was measured; 2 flags that can't work; 130
interrupted, and 143 stopped by SIGTERM: the same command goes on.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
from pathlib import Path
import shutil
import sys
import types
from typing import Any

from absl import flags
import rich.console

from benchmarks import command, files, matrix, presets, process, published
from benchmarks.loop import say
from benchmarks.matrix import Cell, Matrix
from benchmarks.page import blocks, charts, content, rates
from hpm import errors, models
from hpm.errors import DataError, UsageError

__all__ = ['limits', 'load', 'main', 'parse', 'remark', 'wanted', 'write']

QUICK_STEPS = {'num_runs': 5, 'num_warmup_batches': 1, 'num_batches': 4}
QUICK_MINUTES = 17.5
QUICK_TIMEOUT_S = 120.0
TIMEOUT_S = 3600.0
_BUSY = 0.1  # share of the cores


@command.line(__doc__, 'interrupted; the same command goes on')
def main(arguments: Sequence[str]) -> int:
  """Measures and writes the page; see the module's docstring for the exit code."""
  options = parse(arguments)
  if options.platform is not None:
    (platform,) = [p for p in rates.published_platforms() if p.name == options.platform]
    blocks.console(content.platform_sections(platform), rich.console.Console())
    return 0
  if options.charts:
    charts.require()
  cells = wanted(options)
  matrix.prepare(options.out, cells)
  with process.terminations() as stop:
    failures = matrix.measure(options.out, cells, options.limit_s, options.timeout_s, stop)
    if stop:
      print('stopped by SIGTERM; the same command goes on', file=sys.stderr)
      return 143
  done = matrix.collect(options.out, cells)
  if not done:
    raise DataError(f'no cell was measured: {next(iter(failures.values()), "time was up")}')
  write(options, cells, done, failures, arguments)
  return 0


def parse(arguments: Sequence[str]) -> Any:
  """The flags' values, with `limit_s` and `timeout_s`.

  Raises:
    UsageError: what can't work.
  """
  values = flags.FlagValues()

  def string(name: str, default: str | None, text: str) -> None:
    flags.DEFINE_string(name, default, text, flag_values=values)

  string('out', 'results/suite', 'Directory of the page and of all results.')
  string('docs', None, 'FILE.md for the Markdown page, charts in the directory FILE beside it.')
  string('platform', None, f'Print a published one: {", ".join(published.platforms())}.')
  string('data_dir', None, 'Real data: NAME=DIR, several with commas between them.')
  string('models', ','.join(published.MODELS), 'Names with commas between them.')
  string('device', None, 'cpu or gpu. Default: gpu where there is one.')
  string('num_gpus', None, 'Numbers of devices, such as 1,2. Default: powers of two up to all.')
  flags.DEFINE_boolean('quick', False, 'Small batches, few steps.', flag_values=values)
  flags.DEFINE_boolean('charts', True, 'Needs matplotlib.', flag_values=values)
  flags.DEFINE_float('max_minutes', None, 'No run starts after this.', 0.0, flag_values=values)
  flags.DEFINE_float('cell_timeout_s', None, 'Of one process.', 0.0, flag_values=values)
  command.parse(values, arguments)
  if values.platform is not None and values.platform not in published.platforms():
    raise errors.unknown('--platform', values.platform, published.platforms())
  if values.device not in (None, 'cpu', 'gpu'):
    raise errors.unknown('--device', values.device, ('cpu', 'gpu'))
  if values.docs is not None and not values.docs.endswith('.md'):
    raise UsageError(f'--docs={values.docs}: a name that ends in .md is needed')
  minutes = values.max_minutes or (QUICK_MINUTES if values.quick else None)
  timeout = values.cell_timeout_s or (QUICK_TIMEOUT_S if values.quick else TIMEOUT_S)

  options = types.SimpleNamespace(**{name: values[name].value for name in values})
  options.limit_s = None if minutes is None else 60.0 * minutes
  options.timeout_s = timeout
  return options


def wanted(options: Any) -> Matrix:
  """The matrix that the flags ask for; a process of its own looks for GPUs.

  Raises:
    UsageError: unknown models, data that is not there, more devices than there are.
  """
  names = options.models.split(',')
  for name in names:
    models.check_name(name, '--models')
  data = {}
  for part in filter(None, (options.data_dir or '').split(',')):
    name, _, directory = part.rpartition('=')
    name = name or os.path.basename(directory.rstrip('/'))
    if not os.path.isdir(directory):
      raise UsageError(f'--data_dir={part}: {directory} is no directory')
    if not name.isidentifier() or name == rates.SYNTHETIC or name in data:
      raise UsageError(f'--data_dir={part}: give each a name of its own, as in corpus={directory}')
    data[name] = os.path.abspath(directory)
  gpus = 0 if options.device == 'cpu' else matrix.count_gpus()
  if options.device == 'gpu' and not gpus:
    raise UsageError('--device=gpu: TensorFlow sees none; leave it out for CPU devices')
  if options.num_gpus is None:
    counts = [n for n in (1, 2, 4, 8, 16) if n <= (gpus or 2)]
  else:
    try:
      counts = sorted({int(text) for text in options.num_gpus.split(',')})
    except ValueError:
      counts = [0]
    if counts[0] < 1 or (gpus and counts[-1] > gpus):
      most = f', at most {gpus}' if gpus else ''
      raise UsageError(f'--num_gpus={options.num_gpus}: numbers of devices{most}, such as 1,2')
  steps = QUICK_STEPS if options.quick else presets.METHOD
  return Matrix(
    'gpu' if gpus else 'cpu',
    tuple(counts),
    {name: matrix.batches(name, options.quick) for name in names},
    data,
    **steps,
    quick=options.quick,
  )


def remark(cells: Matrix, num_runs: int) -> str:
  """What has to stand under each table where the page's method was not followed; else nothing."""
  method = presets.METHOD
  asked = (cells.num_warmup_batches, cells.num_batches)
  if (num_runs, *asked) == tuple(method.values()) and not cells.quick:
    return ''
  quick = "A quick run (`--quick`), not the page's method: " if cells.quick else ''
  return (
    f'{quick}{num_runs} {"run" if num_runs == 1 else "runs"} of {asked[0]} + {asked[1]} steps in '
    f'place of {method["num_runs"]} of {method["num_warmup_batches"]} + {method["num_batches"]}'
    + (', and batches that fit a small machine' if cells.quick else '')
    + '.'
  )


def load(done: Mapping[Cell, Sequence[Mapping[str, Any]]]) -> str:
  """What other work there was, if it was too much for the rates to be trusted."""
  every = [result for several in done.values() for result in several]
  loads = [result['other_load_cores'] for result in every if 'other_load_cores' in result]
  cores = every[0]['machine']['cores']
  mean = sum(loads) / max(len(loads), 1)
  if mean <= _BUSY * cores:
    return ''
  return (
    f'Other work kept {mean:.1f} of {cores} cores busy on average, {max(loads):.1f} at most: rates '
    'by the clock are too low and scatter, images a CPU second do less so.'
  )


def limits(cells: Matrix) -> list[str]:
  """What the measurement can't show."""
  if cells.device == 'gpu':
    return []
  return [
    'Logical CPU devices share the cores, the memory and the threads of one processor. Two of them '
    'compute no faster than one, so scaling over them shows what towers, aggregation and update '
    'cost on top, and can not show what a second processor would give: 50 % of the ideal is what '
    'two devices on the same cores come to where nothing is lost.',
    'Copies between logical CPU devices are no copies: they hand over the same memory. So nothing '
    'here shows NCCL, PCIe, NVLink, what an all-reduce costs, or where parameters are best kept.',
    'Decoding and training take turns on the same cores. On a machine with GPUs the processor is '
    'free for the input, so the share that real data reaches here says nothing of a GPU machine: '
    'there the question is whether the host decodes as many images a second as the GPUs consume.',
    'Batches are far below the published ones, so the fixed cost of a step weighs more, above all '
    'in VGG16 and AlexNet, whose update of 138 and 61 million parameters does not shrink with the '
    'batch.',
  ]


def write(
  options: Any,
  cells: Matrix,
  done: Mapping[Cell, Sequence[Mapping[str, Any]]],
  failures: Mapping[Cell, str],
  arguments: Sequence[str],
) -> None:
  """The page in all its forms, and its figures as JSON."""
  num_runs = max(map(len, done.values()))
  said = ['python', '-m', 'benchmarks.suite', *arguments]
  shown = ' '.join(word for word in said if not word.startswith(('--out', '--docs')))
  found = matrix.rates_of(cells, done, failures)
  this = rates.measured(
    found,
    [result for several in done.values() for result in several],
    matrix.configuration(cells),
    matrix.like(next(iter(cells.batches))).optimizer,
    {name: _describe(directory) for name, directory in cells.data.items()},
    ' '.join(filter(None, [remark(cells, num_runs), load(done)])),
  )
  page = content.page(this, rates.published_platforms(), limits(cells), _public(shown))
  note = f'Written by `{_public(shown)}`.'

  files.write(
    os.path.join(options.out, 'suite.json'),
    json.dumps(
      {
        'matrix': dataclasses.asdict(cells),
        'environment': dict(this.environment),
        'rates': [rate._asdict() for rate in found],
      },
      indent=2,
    )
    + '\n',
  )
  html = blocks.html(page, charts.panel_svg if options.charts else lambda panel, width: None)
  files.write(os.path.join(options.out, 'benchmarks.html'), html)
  targets = [os.path.join(options.out, 'benchmarks.md'), *filter(None, [options.docs])]
  for target in targets:
    directory = target.removesuffix('.md')
    if options.charts and os.path.isdir(directory):
      shutil.rmtree(directory)  # of an earlier page: this one may have other charts

    def draw(figure: blocks.Figure, directory: str = directory) -> str | None:
      if not options.charts:
        return None
      files.write(os.path.join(directory, f'{figure.name}.svg'), charts.figure_svg(figure))
      return f'{os.path.basename(directory)}/{figure.name}.svg'

    files.write(target, blocks.markdown(page, draw, note))
  blocks.console(content.platform_sections(this), rich.console.Console())
  written = [*targets, os.path.join(options.out, 'benchmarks.html')]
  say(f'Written: {", ".join(written)}')


def _describe(directory: str) -> str:
  """What a directory of real data holds, without its place."""
  paths = [path for path in Path(directory).iterdir() if path.name.startswith('train')]
  size = sum(path.stat().st_size for path in paths) / 2**20
  return f'{len(paths)} files, {size:.0f} MiB'


def _public(shown: str) -> str:
  """A command without the places of this machine's disk."""
  words = []
  for word in shown.split(' '):
    if word.startswith('--data_dir='):
      parts = [part.rpartition('=')[0] or 'DIR' for part in word[11:].split(',')]
      word = '--data_dir=' + ','.join(f'{part}=DIR' for part in parts)
    words.append(word)
  return ' '.join(words)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
