"""Everything that can not be proven without GPUs, in one command with one report.

  make gpu-check                                    # into gpu_check/
  python -m benchmarks.gpu_check --out=DIR --quick  # fewer steps, one batch size

Each check has a process of its own and a time limit; what a machine can't do (a second GPU, DALI)
is skipped with its reason. report.md and report.json hold what came out; logs, traces and results
lie beside them.

Exit code: 0 all that could run has passed; 1 something failed, or there is no GPU.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks import command, files, flags, machine, results
from hpm.errors import DataError, UsageError

__all__ = ['Outcome', 'main', 'overlap', 'report']

NEEDS = (
  'gpu-check needs a machine with at least one NVIDIA GPU, its driver, and TensorFlow with CUDA '
  "(pip install -e '.[gpu]')"
)
TIMEOUT_S = 1800
SEED = 0
TOLERANCE = {'float32': 1e-5, 'float16': 2e-2, 'bfloat16': 1e-1}  # of the largest value
ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Outcome:
  """What came of a check.

  Attributes:
    name: of the check.
    status: 'passed', 'failed' or 'skipped'.
    text: a line: the figures, or the reason.
    figures: numbers by name.
  """

  name: str
  status: str
  text: str
  figures: dict[str, Any] = dataclasses.field(default_factory=dict)


class Failure(Exception):
  """A check that didn't hold: one line."""


# Agreement: functions of the devices, which return a line. They run in a process of their own.


def parity(devices: Sequence[str]) -> str:
  """Every local manager ends with the weights of one CPU device on the same global batch."""
  expected = _trained(('/CPU:0',), 'replicated', {}, len(devices))
  worst = 0.0
  for manager, options in _managers(devices):
    actual = _trained(devices, manager, options, 1)
    worst = max(worst, _difference(actual, expected, f'{manager} {options}'))
  return f'{len(_managers(devices))} managers on {len(devices)} devices; worst {worst:.1e}'


def nccl(devices: Sequence[str]) -> str:
  """NCCL, by either of TensorFlow's ops, and copying sum to the same weights."""
  expected = _trained(devices, 'replicated', {'all_reduce_spec': 'copy'}, 1)
  words = []
  for spec in ('nccl', 'nccl_all_reduce', 'nccl_all_reduce/xring'):
    actual = _trained(devices, 'replicated', {'all_reduce_spec': spec}, 1)
    words.append(f'{spec} {_difference(actual, expected, spec):.1e}')
  return 'worst ' + ', '.join(words)


def half_precision(devices: Sequence[str]) -> str:
  """float16 and bfloat16, and a dynamic loss scale, train like float32."""
  expected = _trained(devices[:1], 'replicated', {}, 1)
  words = []
  for name in ('fp16', 'bf16'):
    import hpm

    dtype = hpm.precision.create(name).compute_dtype
    actual = _trained(devices[:1], 'replicated', {}, 1, precision=name)
    worst = _difference(actual, expected, name, TOLERANCE[dtype])
    words.append(f'{name} {worst:.1e}')
  return 'worst ' + ', '.join(words)


def xla(devices: Sequence[str]) -> str:
  """A compiled tower agrees with the plain one."""
  expected = _trained(devices[:1], 'replicated', {}, 1)
  actual = _trained(devices[:1], 'replicated', {}, 1, xla=True)
  return f'worst {_difference(actual, expected, "xla", 1e-4):.1e}'


def layouts(devices: Sequence[str]) -> str:
  """NCHW and NHWC give the same logits."""
  import numpy as np
  import tensorflow as tf

  import hpm

  logits = {}
  for layout in ('NHWC', 'NCHW'):
    model = hpm.models.create('resnet20', data_format=layout)
    params, state = model.init(SEED)
    images = tf.random.stateless_uniform((8, 32, 32, 3), (SEED, 1)) * 255.0
    images = tf.cast(images, tf.uint8)

    @tf.function
    def forward(model=model, params=params, state=state, layout=layout, images=images):
      with tf.device(devices[0]):
        normal = hpm.pipelines.normalize(images, 'float32', layout)
        return model.apply(params, state, normal, training=False)[0]

    logits[layout] = forward().numpy()
  worst = float(np.abs(logits['NCHW'] - logits['NHWC']).max() / np.abs(logits['NHWC']).max())
  if not worst <= 1e-4:
    raise Failure(f'NCHW and NHWC differ by {worst:.1e} of the largest logit')
  return f'worst {worst:.1e}'


COMPARISONS: dict[str, tuple[int, Callable[[Sequence[str]], str]]] = {
  # Name -> how many GPUs it needs, and what it does.
  'parity': (1, parity),
  'nccl': (2, nccl),
  'half_precision': (1, half_precision),
  'xla': (1, xla),
  'layouts': (1, layouts),
}


def measurements(num_gpus: int, quick: bool) -> dict[str, tuple[int, list[str]]]:
  """Name -> how many GPUs it needs, and the driver's arguments, of every speed to be measured."""
  steps = ['--num_batches=20' if quick else '--num_batches=100']
  resnet = ['--device=gpu', '--model=resnet50', *steps]
  table: dict[str, tuple[int, list[str]]] = {}
  for batch in (64,) if quick else (64, 128, 256):
    for precision in ('fp32', 'fp16', 'bf16'):
      arguments = [*resnet, f'--batch_size={batch}', f'--precision={precision}']
      table[f'resnet50_{precision}_{batch}'] = (1, [*arguments, '--num_gpus=1'])
      if num_gpus > 1:
        table[f'resnet50_{precision}_{batch}_x{num_gpus}'] = (2, arguments)
  one = [*resnet, '--num_gpus=1', '--batch_size=64']
  table['nchw_fp32'] = (1, [*one, '--data_format=NCHW'])
  table['nchw_fp16'] = (1, [*one, '--data_format=NCHW', '--use_fp16'])
  table['xla_fp32'] = (1, [*one, '--xla'])
  table['xla_fp16'] = (1, [*one, '--xla', '--use_fp16'])
  table['dynamic_loss_scale'] = (1, [*one, '--use_fp16', '--fp16_enable_auto_loss_scale'])
  table['ten_steps_per_call'] = (1, [*one, '--steps_per_call=10'])
  table['no_tf32'] = (1, [*one, '--tf32=false'])
  for spec in ('nccl', 'nccl_all_reduce', 'copy', 'collective'):
    arguments = [*resnet, '--batch_size=64', f'--all_reduce_spec={spec}']
    table[f'all_reduce_{spec}'] = (2, arguments)
  for place in ('cpu', 'gpu'):
    arguments = [*resnet, '--batch_size=64', '--variable_update=parameter_server']
    table[f'parameter_server_{place}'] = (2, [*arguments, f'--local_parameter_device={place}'])
  return table


def overlap(trace: dict[str, Any]) -> float:
  """Share of the host-to-device copies' time in which kernels ran on the same device.

  Args:
    trace: from `profiling.chrome_trace`.

  Raises:
    Failure: it holds no such copies.
  """
  events = trace['traceEvents']
  places = {e['pid']: e['args']['name'] for e in events if e['name'] == 'process_name'}
  copies: dict[int, list[tuple[float, float]]] = {}
  kernels: dict[int, list[tuple[float, float]]] = {}
  for event in events:
    if event['ph'] != 'X' or 'GPU' not in places[event['pid']]:
      continue
    span = (event['ts'], event['ts'] + event['dur'])
    if 'memcpyh2d' in event['name'].replace('_', '').lower():
      copies.setdefault(event['pid'], []).append(span)
    elif 'memcpy' not in event['name'].lower() and 'tf_op' in event['args']:
      kernels.setdefault(event['pid'], []).append(span)
  total = sum(end - begin for spans in copies.values() for begin, end in spans)
  if not total:
    raise Failure('no copy from host to device in the trace')
  shared = 0.0
  for device, spans in copies.items():
    busy = _merged(kernels.get(device, []))
    shared += sum(max(0.0, min(end, b) - max(begin, a)) for begin, end in spans for a, b in busy)
  return shared / total


def report(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
  """The report as Markdown."""
  counts = {s: sum(o.status == s for o in outcomes) for s in ('passed', 'failed', 'skipped')}
  lines = [
    '# GPU check',
    '',
    ', '.join(f'{count} {status}' for status, count in counts.items()),
    '',
    *(f'- {name}: {value}' for name, value in facts.items()),
    '',
    '| check | status | outcome |',
    '|---|---|---|',
  ]
  lines += [f'| {o.name} | {o.status} | {o.text.replace("|", "/")} |' for o in outcomes]
  return '\n'.join(lines) + '\n'


@command.line()
def main(arguments: Sequence[str]) -> int:
  """All checks, or with --one a single comparison in this process."""
  parser = command.Parser(prog='python -m benchmarks.gpu_check', description=__doc__)
  parser.add_argument('--out', default='gpu_check', help='directory of the report')
  parser.add_argument('--quick', action='store_true', help='20 steps, batch 64 alone')
  parser.add_argument('--one', choices=COMPARISONS, help=argparse.SUPPRESS)
  options = parser.parse_args(arguments)
  if options.one:
    return _one(options.one)
  if not os.path.exists('/proc/driver/nvidia') and shutil.which('nvidia-smi') is None:
    print(f'error: {NEEDS}: there is no NVIDIA driver here', file=sys.stderr)
    return 1
  num_gpus = _count_gpus()
  if not num_gpus:
    print(f'error: {NEEDS}: TensorFlow sees no GPU here', file=sys.stderr)
    return 1
  outcomes = _all(Path(options.out), num_gpus, options.quick)
  facts = {**machine.describe(), 'gpus': num_gpus, 'gpu_driver': machine.gpu_driver()}
  facts.pop('environment')
  files.write(f'{options.out}/report.md', report(outcomes, facts))
  content = {'machine': facts, 'checks': [dataclasses.asdict(o) for o in outcomes]}
  files.write(f'{options.out}/report.json', json.dumps(content, indent=2) + '\n')
  print(f'Report: {options.out}/report.md')
  return int(any(outcome.status == 'failed' for outcome in outcomes))


def _all(out: Path, num_gpus: int, quick: bool) -> list[Outcome]:
  out.mkdir(parents=True, exist_ok=True)
  outcomes: list[Outcome] = []

  def note(outcome: Outcome) -> None:
    outcomes.append(outcome)
    print(f'{outcome.status:<8} {outcome.name}: {outcome.text}', flush=True)

  for name, (needed, _) in COMPARISONS.items():
    if needed > num_gpus:
      note(Outcome(name, 'skipped', f'needs {needed} GPUs, there is {num_gpus}'))
    else:
      note(_compare(name, out))
  for name, (needed, arguments) in measurements(num_gpus, quick).items():
    if needed > num_gpus:
      note(Outcome(name, 'skipped', f'needs {needed} GPUs, there is {num_gpus}'))
    else:
      note(_measure(name, arguments, out))
  note(_staging(out))
  note(_dali(out))
  return outcomes


def _compare(name: str, out: Path) -> Outcome:
  code, lines = _started(
    [sys.executable, '-m', 'benchmarks.gpu_check', f'--one={name}'], out / f'{name}.log'
  )
  text = lines[-1] if lines else f'ended with code {code}, see {name}.log'
  return Outcome(name, 'failed' if code else 'passed', text)


def _measure(name: str, arguments: Sequence[str], out: Path) -> Outcome:
  path = out / f'{name}.json'
  path.unlink(missing_ok=True)
  command = [sys.executable, '-m', 'benchmarks.run', *arguments, f'--result_json={path}']
  code, _ = _started(command, out / f'{name}.log')
  try:
    result = results.read(str(path))
  except DataError:
    return Outcome(name, 'failed', f'ended with code {code}, see {name}.log')
  if result['status'] != 'ok':
    return Outcome(name, 'failed', result['reason'])
  low, high = result['images_per_second_interval'] or (None, None)
  figures = {
    'images_per_second': result['images_per_second'],
    'interval': [low, high],
    'batch_size_global': result['batch_size_global'],
    'peak_gpu_mib': result.get('peak_gpu_mib'),
    'time_to_first_step_s': result['time_to_first_step_s'],
    'first_loss': result['first_loss'],
    'last_loss': result['last_loss'],
  }
  text = f'{result["images_per_second"]:.1f} images/s, batch {result["batch_size_global"]}'
  for warning in result.get('warnings', []):
    text += f'; {warning}'
  return Outcome(name, 'passed', text, figures)


def _staging(out: Path) -> Outcome:
  """Whether the next batches are copied while kernels run, read from a trace."""
  path = out / 'staging.trace.json'
  arguments = ['--device=gpu', '--num_gpus=1', '--batch_size=64', '--num_batches=5']
  measured = _measure('staging', [*arguments, '--model=resnet50', f'--trace_file={path}'], out)
  if measured.status != 'passed':
    return measured
  try:
    share = overlap(json.loads(path.read_text()))
  except Failure as failure:
    return Outcome('staging', 'failed', str(failure))
  text = f'kernels run during {share:.0%} of the time of copies to the device'
  return Outcome('staging', 'passed' if share > 0.5 else 'failed', text, {'share': share})


def _dali(out: Path) -> Outcome:
  from hpm import pipelines

  if importlib.util.find_spec('nvidia') is None or importlib.util.find_spec('nvidia.dali') is None:
    return Outcome('dali', 'skipped', "not installed (pip install -e '.[dali]')")
  if 'dali' not in pipelines.PIPELINES:
    return Outcome('dali', 'skipped', f'no DALI pipeline among {", ".join(pipelines.PIPELINES)}')
  sample = out / 'sample'
  code, _ = _started(
    [sys.executable, '-m', 'hpm.pipelines', 'sample', f'--out={sample}'], out / 'sample.log'
  )
  if code:
    return Outcome('dali', 'failed', 'the sample data set could not be written, see sample.log')
  arguments = ['--device=gpu', '--model=resnet50', f'--data_dir={sample}', '--pipeline=dali']
  try:
    flags.parse(arguments)
  except UsageError as error:
    return Outcome('dali', 'skipped', f'the driver can not choose it: {error}')
  return _measure('dali', [*arguments, '--batch_size=32', '--num_batches=50'], out)


def _one(name: str) -> int:
  import tensorflow as tf

  tf.config.experimental.enable_tensor_float_32_execution(False)  # agreement is of float32
  devices = tuple(f'/GPU:{i}' for i in range(len(tf.config.list_physical_devices('GPU'))))
  try:
    print(COMPARISONS[name][1](devices))
  except Failure as failure:
    print(failure)
    return 1
  return 0


def _started(command: Sequence[str], log: Path) -> tuple[int, list[str]]:
  """Runs a command from the checkout with its output in a file; exit code, lines of stdout."""
  begun = time.monotonic()
  try:
    done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
  except subprocess.TimeoutExpired:
    log.write_text(f'no end after {TIMEOUT_S} s\n')
    return 124, [f'no end after {TIMEOUT_S} s']
  seconds = time.monotonic() - begun
  log.write_text(f'{done.stdout}\n{done.stderr}\n{seconds:.1f} s, code {done.returncode}\n')
  return done.returncode, done.stdout.splitlines()


def _count_gpus() -> int:
  """In a process of its own, since TensorFlow would take the GPUs' memory."""
  program = 'import tensorflow as tf; print(len(tf.config.list_physical_devices("GPU")))'
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )
  return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def _managers(devices: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
  managers: list[tuple[str, dict[str, str]]] = [
    ('parameter_server', {'local_parameter_device': 'cpu'}),
    ('parameter_server', {'local_parameter_device': 'spread'}),
    ('replicated', {'all_reduce_spec': 'copy'}),
    ('replicated', {'all_reduce_spec': 'collective'}),
  ]
  if len(devices) > 1 and 'GPU' in devices[0]:
    managers += [('replicated', {'all_reduce_spec': s}) for s in ('nccl', 'nccl_all_reduce')]
  return managers


def _trained(
  devices: Sequence[str],
  manager: str,
  options: dict[str, str],
  batches_a_device: int,
  *,
  precision: str = 'fp32',
  xla: bool = False,
) -> dict[str, Any]:
  """Parameters of a small convolutional network after five steps on the same samples.

  Args:
    devices: device strings.
    manager, options: how they share the variables.
    batches_a_device: parts of the global batch that each device takes.
    precision, xla: of the towers.
  """
  import numpy as np
  import tensorflow as tf

  import hpm

  def network(b, images):
    x = tf.tanh(b.conv('conv', images, 8, 3, strides=2))
    return b.dense('logits', b.flatten(x), 10)

  policy = hpm.precision.create(precision)
  model = hpm.models.Model(
    network, name='small', image_shape=(16, 16, 3), num_classes=10, dtype=policy.compute_dtype
  )
  step = hpm.TrainStep(
    model,
    hpm.variable_mgr.create(manager, devices, **options),
    hpm.optimizers.create('momentum', 0.1),
    loss_scale=policy.loss_scale,
    seed=SEED,
    xla=xla,
  )
  rng = np.random.default_rng(SEED)
  parts = len(devices) * batches_a_device
  for _ in range(5):
    images = rng.integers(0, 256, (8 * parts, 16, 16, 3)).astype(np.uint8)
    labels = rng.integers(0, 10, 8 * parts)
    split = zip(np.split(images, len(devices)), np.split(labels, len(devices)), strict=True)
    step([(tf.constant(i), tf.constant(y)) for i, y in split])
  values = step.snapshot()
  return {name: v.numpy() for name, v in values.items() if name.startswith('params/')}


def _difference(
  actual: dict[str, Any], expected: dict[str, Any], what: str, tolerance: float = 1e-5
) -> float:
  """The largest difference, in shares of each tensor's largest value; Failure above tolerance."""
  import numpy as np

  worst = 0.0
  for name, value in expected.items():
    share = float(np.abs(actual[name] - value).max() / np.abs(value).max())
    if not share <= tolerance:
      raise Failure(f'{what}: {name} differs by {share:.1e} of its largest value')
    worst = max(worst, share)
  return worst


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """The union of spans, without overlaps."""
  merged: list[tuple[float, float]] = []
  for begin, end in sorted(spans):
    if merged and begin <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
    else:
      merged.append((begin, end))
  return merged


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
