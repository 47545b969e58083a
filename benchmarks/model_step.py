"""One step of a model beside Keras's and torch's own, in one run, by turns.

  python -m benchmarks.model_step                              # ResNet-50, batch 16, 224 pixels
  python -m benchmarks.model_step --model=vgg16 --batch_size=8 --forward_only
  python -m benchmarks.model_step --model=resnet50_v1.5 --torch_python=PYTHON
  python -m benchmarks.model_step --contenders=hpm,keras --pairs=3 --json=step.json   # and again

Each contender lives in a process of its own, since oneDNN is chosen before TensorFlow is imported,
and waits while another runs. A round gives each contender the same number of steps; rounds are
repeated, the order turns, and what is compared are the ratios within a round: a machine that is
slow for a minute is slow for all. Warm-up is left out. CPU seconds stand beside wall time, because
a neighbour's load takes wall time and hardly any CPU time.

  hpm              this library, with oneDNN as the driver sets it
  keras            the same network of keras.applications in a custom loop, as TensorFlow comes
                   (GradientTape in one tf.function); where oneDNN is on by default, it is on here
  keras, oneDNN    the same with oneDNN on, and
  keras, no oneDNN the same with oneDNN off
  keras fit        the same by `fit` (`predict`), as TensorFlow comes
  torch eager      torchvision's network with channels last, where torch is installed; its ResNet-50
  torch.compile    is --model=resnet50_v1.5 here
  hpm, ...         on request: no oneDNN, NCHW, and the rewrites of the stem

With --json rounds are added to those in the file, which must be of the same comparison: a long
measurement can be made in parts.

Exit code: 0 done; 1 a contender failed; 2 flags that can't work.
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
import os
from pathlib import Path
import random
import statistics
import subprocess
import sys
from typing import Any

from absl import flags
import rich.console
import rich.table

from benchmarks import command, files, machine
from benchmarks.step_workers import NAMESAKES, OPTIONS
from hpm import json_file, models
from hpm.errors import UsageError, unknown

__all__ = ['CONTENDERS', 'main', 'ratio_interval']

ROOT = Path(__file__).resolve().parent.parent

# Contender -> (worker, oneDNN: '1' on, '0' off, None as TensorFlow comes).
CONTENDERS = {
  'hpm': ('hpm', '1'),
  'keras': ('keras_loop', None),
  'keras, oneDNN': ('keras_loop', '1'),
  'keras, no oneDNN': ('keras_loop', '0'),
  'keras fit': ('keras_fit', None),
  'torch eager': ('torch_eager', None),
  'torch.compile': ('torch_compile', None),
  'hpm, no oneDNN': ('hpm', '0'),
  'hpm, NCHW': ('hpm_nchw', '1'),
  'hpm, pad_channels': ('hpm_pad_channels', '1'),
  'hpm, space_to_depth': ('hpm_space_to_depth', '1'),
}
DEFAULT = [label for label in CONTENDERS if not label.startswith('hpm,')]
MATMUL = 'matrix product'
MATMULS = 3  # a round

WIDTH = 128  # where the output is no terminal

console = rich.console.Console(width=None if sys.stdout.isatty() else WIDTH)


class Contender:
  """A worker process; `run(n)` makes it take n steps and returns its seconds."""

  def __init__(self, label: str, worker: str, onednn: str | None, python: str, *args: Any):
    self.label = label
    env = {k: v for k, v in os.environ.items() if k != machine.ONEDNN}
    env |= {'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': str(ROOT)}
    if onednn is not None:
      env[machine.ONEDNN] = onednn
    command = [python, '-m', 'benchmarks.step_workers', worker, *map(str, args)]
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env,
      cwd=ROOT,
    )
    try:
      self._answer()
    except BaseException:
      self.close()
      raise

  def run(self, steps: int) -> dict[str, float]:
    assert self._process.stdin is not None
    print(steps, file=self._process.stdin, flush=True)
    return self._answer()

  def close(self) -> None:
    self._process.kill()
    self._process.communicate()

  def _answer(self) -> dict[str, float]:
    assert self._process.stdout is not None and self._process.stderr is not None
    line = self._process.stdout.readline()
    if not line:
      reason = self._process.stderr.read().strip().splitlines() or ['no message']
      raise command.Failed(f'{self.label}: {reason[-1]}')
    return json.loads(line)


def ratio_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
  """Median of ratios and its 95 % interval, by 10,000 bootstrap samples (Efron 1979)."""
  rng = random.Random(seed)
  medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(10_000))
  return statistics.median(ratios), medians[250], medians[9749]


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Runs the comparison and prints it."""
  options = parse(arguments)
  result = described(options)
  result['rounds'] = earlier_rounds(options.json, result)
  measure(options, result['rounds'])
  if options.json:
    files.write(options.json, json.dumps(result, indent=2))
  show(result)
  return 0


def parse(arguments: Sequence[str]) -> Any:
  """The flags."""
  values = flags.FlagValues()
  flags.DEFINE_string('model', 'resnet50', 'A model with a namesake.', flag_values=values)
  flags.DEFINE_integer('batch_size', 16, 'Images a step.', 1, flag_values=values)
  flags.DEFINE_integer('image_size', None, "Pixels; the model's own.", 1, flag_values=values)
  flags.DEFINE_boolean('forward_only', False, 'Inference, not training.', flag_values=values)
  flags.DEFINE_integer('pairs', 7, 'Rounds.', 1, flag_values=values)
  flags.DEFINE_integer('steps', 2, 'Steps of each contender a round.', 1, flag_values=values)
  flags.DEFINE_string('json', None, 'The figures; rounds are added.', flag_values=values)
  flags.DEFINE_string('torch_python', sys.executable, 'A Python with torch.', flag_values=values)
  flags.DEFINE_string(
    'contenders', ';'.join(DEFAULT), 'Which, with ; between them.', flag_values=values
  )
  command.parse(values, arguments)
  if values.model not in NAMESAKES:
    models.check_name(values.model)
    raise UsageError(f'--model={values.model}: has no namesake; use {", ".join(NAMESAKES)}')
  values.contenders = ';'.join(label.strip() for label in values.contenders.split(';'))
  for label in values.contenders.split(';'):
    if label not in CONTENDERS:
      raise unknown('contender', label, CONTENDERS)
  if 'hpm' not in values.contenders.split(';'):
    raise UsageError(f'--contenders={values.contenders}: hpm, which they are compared with, lacks')
  if values.image_size is None:
    sizes = {row.name: row.image_size for row in models.table()}
    values.image_size = sizes[values.model]
  return values


def described(options: Any) -> dict[str, Any]:
  """What makes rounds comparable, and what was measured on."""
  size, extra = options.image_size, OPTIONS.get(options.model, {})
  return {
    'comparison': {
      'model': options.model,
      'kind': 'forward' if options.forward_only else 'training',
      'batch_size': options.batch_size,
      'image_size': size,
      'steps': options.steps,
    },
    'macs': models.create(options.model, image_size=size, **extra).num_macs,
    'machine': machine.describe(),
  }


def earlier_rounds(path: str | None, result: dict[str, Any]) -> list[dict[str, Any]]:
  """The rounds in a file of the same comparison; none if it isn't there."""
  if path is None or not Path(path).exists():
    return []
  try:
    earlier = dict(json_file.read(path))
    list(earlier['rounds'])
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise UsageError(
      f'--json={path}: holds no rounds of a comparison ({error}): name another file'
    ) from None
  if earlier.get('comparison') != result['comparison']:
    raise UsageError(
      f'--json={path}: holds another comparison ({earlier.get("comparison")}): name another file'
    )
  return earlier['rounds']


def measure(options: Any, rounds: list[dict[str, Any]]) -> None:
  """Appends rounds: contender -> its seconds and peak memory."""
  keras, torch = NAMESAKES[options.model]
  labels = [
    label
    for label in options.contenders.split(';')
    if not ('keras' in label and keras is None) and not ('torch' in label and torch is None)
  ]
  with started(labels, options) as contenders:
    for contender in contenders:
      contender.run(1)  # the second step is the first without any start-up
    for i in range(options.pairs):
      turn = len(rounds) % len(contenders)
      with console.status(f'round {i + 1} of {options.pairs}'):
        rounds.append(
          {
            contender.label: contender.run(MATMULS if contender.label == MATMUL else options.steps)
            for contender in contenders[turn:] + contenders[:turn]
          }
        )


@contextlib.contextmanager
def started(labels: Sequence[str], options: Any) -> Iterator[list[Contender]]:
  """The contenders that can be had here, and the matrix product, each built and warmed up once."""
  contenders: list[Contender] = []
  arguments = [options.model, options.batch_size, options.image_size]
  arguments.append('forward' if options.forward_only else 'training')
  try:
    for label in [*labels, MATMUL]:
      worker, onednn = CONTENDERS.get(label, ('matmul', '1'))
      python = options.torch_python if worker.startswith('torch') else sys.executable
      with console.status(f'starting {label}'):
        try:
          contenders.append(Contender(label, worker, onednn, python, *arguments))
        except (command.Failed, OSError) as error:
          if not worker.startswith('torch'):
            raise
          console.print(f'left out: {error}')
    yield contenders
  finally:
    for contender in contenders:
      contender.close()


def show(result: dict[str, Any]) -> None:
  """The table, with medians and the ratios' 95 % intervals; the share of the matrix product."""
  of, rounds = result['comparison'], result['rounds']
  table = rich.table.Table(
    title=f'{of["model"]}, {of["kind"]}, batch {of["batch_size"]}, {of["image_size"]} pixels'
  )
  columns = ('', 'images/s', 's a step', 'CPU s', 'peak MiB', 'rounds', 'wall / hpm', 'CPU / hpm')
  for column in columns:
    table.add_column(column, justify='left' if not column else 'right', no_wrap=True)
  labels = [label for label in CONTENDERS if any(label in r for r in rounds)]
  for label in labels:
    both = [(r[label], r['hpm']) for r in rounds if label in r]
    wall, cpu = (
      statistics.median(theirs[key] / of['steps'] for theirs, _ in both)
      for key in ('wall_s', 'cpu_s')
    )
    cells = [
      f'{of["batch_size"] / wall:.2f}',
      f'{wall:.3f}',
      f'{cpu:.3f}',
      f'{max(theirs["peak_mib"] for theirs, _ in both):.0f}',
      f'{len(both)}',
    ]
    for key in ('wall_s', 'cpu_s'):
      middle, low, high = ratio_interval([theirs[key] / ours[key] for theirs, ours in both])
      cells.append(f'{middle:.3f} ({low:.3f} to {high:.3f})')
    table.add_row(label, *cells)
  console.print(table)
  show_share(result)


def show_share(result: dict[str, Any]) -> None:
  """hpm's arithmetic beside the matrix product's, round by round."""
  of = result['comparison']
  # Training takes three products for each of the forward pass: it, and two gradients.
  flops = (3 if of['kind'] == 'training' else 1) * 2 * result['macs']
  product = [2 * 4096**3 * MATMULS / r[MATMUL]['wall_s'] for r in result['rounds']]
  ours = [flops * of['batch_size'] * of['steps'] / r['hpm']['wall_s'] for r in result['rounds']]
  shares = [a / b for a, b in zip(ours, product, strict=True)]
  console.print(
    f'hpm computes {statistics.median(ours) / 1e9:.0f} GFLOP/s in convolutions and dense layers, '
    f'{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%}) of the '
    f'{statistics.median(product) / 1e9:.0f} GFLOP/s ({min(product) / 1e9:.0f} to '
    f'{max(product) / 1e9:.0f}) of a 4096 x 4096 matrix product'
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
