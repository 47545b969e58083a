"""Every mode beside one device with the whole batch, on this machine's devices.

  python -m benchmarks.parity                              # all GPUs, or two logical CPU devices
  python -m benchmarks.parity --device=cpu --num_gpus=8 --model=resnet20 --batch_size=4
  python -m benchmarks.parity --only=xring --json=parity.json

N devices with b images each have to end with the weights of one device with N * b. Each mode trains
a few steps on random images, and the largest difference of a parameter is given as a share of the
parameter's largest value. Modes that apply or read older values are held to one device that does
the same; `independent` to one device with the first device's images. A model with batch norm is
synchronised (cross_replica) in every mode: otherwise each device normalises by its own images.
TensorFlow's TF32 is off.

Where two activations are nearly equal, another rounding chooses another maximum (ReLU, max
pooling), and one pixel's gradient goes another way. Offsets that start at zero show it: 6e-7 in
LeNet, 2e-2 in ResNet-20, 1.5 in DenseNet-121 after five steps. So the same is done on one device
with the images of each batch in four other orders, which changes nothing but rounding: column
`order`. A mode passes if it is within 1e-5, or within four times what another order does, by its
largest difference and by the median over all parameters. --tolerance=T holds the largest to T
instead.

Exit code: 0 every mode agrees; 1 one doesn't; 2 flags that can't work.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import statistics
import sys
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.table

from benchmarks import command, files, machine, process
from hpm import models, optimizers
from hpm.errors import UsageError

__all__ = ['MODES', 'Mode', 'compare', 'main']

SEED = 0


@dataclasses.dataclass(frozen=True)
class Mode:
  """One row of the matrix.

  Attributes:
    manager, options: as for `hpm.variable_mgr.create`.
    reference: what one device has to do to end with the same: 'plain', 'staged', 'relaxed', or
      'alone' for the first device's images only.
    half: whether gradients cross in half precision, which costs its rounding.
  """

  manager: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reference: str = 'plain'
  half: bool = False

  @property
  def name(self) -> str:
    return ' '.join([self.manager, *(f'{k}={v}' for k, v in self.options.items())])

  @property
  def needs_gpus(self) -> bool:
    return 'nccl' in str(self.options.get('all_reduce_spec', ''))


_SPECS = (
  *('copy', 'psgpu', 'pscpu#2', 'xring', 'xring#2', 'rechd', 'hierarchical_copy', 'collective'),
  *('copy/xring', 'collective/collective', 'pscpu:32k:xring', 'nccl', 'nccl_all_reduce'),
  *('nccl/xring', 'nccl/pscpu'),
)
_RELAXED = {'variable_consistency': 'relaxed'}
MODES = (
  Mode('parameter_server', {'local_parameter_device': 'cpu'}),
  Mode('parameter_server', {'local_parameter_device': 'spread'}),
  Mode('parameter_server', {'staged_vars': True}, 'staged'),
  Mode('parameter_server', _RELAXED, 'relaxed'),
  *(Mode('replicated', {'all_reduce_spec': spec}) for spec in _SPECS),
  Mode('replicated', {'local_parameter_device': 'cpu'}),
  Mode('replicated', {'gradient_repacking': 8}),
  Mode('replicated', {'all_reduce_spec': 'collective', 'gradient_repacking': 4}),
  Mode('replicated', {'agg_small_grads_max_bytes': 65536}),
  Mode('replicated', {'all_reduce_spec': 'xring', **_RELAXED}, 'relaxed'),
  Mode('replicated', {'transfer_dtype': 'bfloat16'}, half=True),
  Mode('independent', {}, 'alone'),
)
_REFERENCES = {
  'plain': Mode('replicated'),
  'staged': Mode('parameter_server', {'staged_vars': True}),
  'relaxed': Mode('replicated', _RELAXED),
  'alone': Mode('replicated'),
}
# Float32 sums in another order; bfloat16 rounds by 1 in 256 what a step adds to a parameter.
TOLERANCE = 1e-5
TOLERANCE_HALF = 1e-2
# Times what another order of the images does, at most, in so many orders.
ROUNDING, ORDERS = 4.0, 4


def compare(
  model: Any,
  devices: Sequence[str],
  batch_size: int,
  num_steps: int,
  optimizer: Any,
  modes: Sequence[Mode],
  tolerance: float | None = None,
) -> list[dict[str, Any]]:
  """One dictionary a mode: name, difference, order, median, tolerance, passed, reason.

  Args:
    model: without dropout, whose masks differ between towers.
    devices: device strings.
    batch_size: images a device.
    num_steps: of each mode.
    optimizer: the update rule.
    modes: which.
    tolerance: of float32 modes; None goes by what another order of the images does.
  """
  import numpy as np

  rng = np.random.default_rng(SEED)
  shape = (num_steps, len(devices), batch_size)
  images = rng.integers(0, 256, (*shape, *model.image_shape)).astype(np.uint8)
  labels = rng.integers(0, model.num_classes, shape)
  synchronised = {'batch_norm_statistics': 'cross_replica'} if model.state_specs else {}
  whole = [[(i.reshape(-1, *i.shape[2:]), y.reshape(-1))] for i, y in zip(images, labels)]
  first = [[(i[0], y[0])] for i, y in zip(images, labels)]
  dealt = [list(zip(i, y)) for i, y in zip(images, labels)]

  def reference(name: str) -> tuple[dict[str, Any], float, float]:
    """One device's parameters, and how far, at most and in the median, another order moves them."""
    steps = first if name == 'alone' else whole
    ended, *others = (
      _trained(_REFERENCES[name], model, devices[:1], optimizer, _in_order(steps, seed), {})
      for seed in (None, *range(ORDERS))
    )
    moved = [_differences(other, ended).values() for other in others]
    return ended, max(map(max, moved)), max(map(statistics.median, moved))

  references: dict[str, Any] = {}
  rows: list[dict[str, Any]] = []
  for mode in modes:
    row = {
      'mode': mode.name,
      'tolerance': tolerance,
      'difference': None,
      'order': None,
      'median': None,
      'passed': None,
      'reason': '',
    }
    rows.append(row)
    if mode.needs_gpus and 'GPU' not in devices[0]:
      row['reason'] = 'needs GPUs'
      continue
    if mode.reference not in references:
      references[mode.reference] = reference(mode.reference)
    expected, order, median = references[mode.reference]
    options = {} if mode.manager == 'independent' else synchronised
    try:
      actual = _trained(mode, model, devices, optimizer, dealt, options)
    except Exception as error:  # a mode that breaks is a result too, and others go on
      row |= {'passed': False, 'reason': f'{type(error).__name__}: {str(error).splitlines()[0]}'}
      continue
    differences = _differences(actual, expected)
    worst = max(differences, key=differences.__getitem__)
    row |= {
      'difference': differences[worst],
      'order': order,
      'median': statistics.median(differences.values()),
      'reason': worst,
    }
    least = TOLERANCE_HALF if mode.half else TOLERANCE
    if tolerance is None:
      row['tolerance'] = max(least, ROUNDING * order)
      by_median = row['median'] <= max(least, ROUNDING * median)
    else:
      row['tolerance'] = max(least, tolerance) if mode.half else tolerance
      by_median = True
    row['passed'] = row['difference'] <= row['tolerance'] and by_median
  return rows


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Prints the matrix; see the module's docstring for the exit code."""
  options = parse(arguments)
  modes = [mode for mode in MODES if options.only in mode.name]
  if not modes:
    raise UsageError(
      f'--only={options.only}: no mode has that in its name, such as {MODES[4].name}'
    )
  devices = process.devices(options.device, options.num_gpus)
  rows = run(options, devices, modes)
  console = rich.console.Console(highlight=False)
  console.print(table(options, devices, rows))
  if options.json:
    record = {'machine': machine.describe(), 'devices': list(devices), 'modes': rows}
    record |= {name: getattr(options, name) for name in ('model', 'batch_size', 'num_steps')}
    files.write(options.json, json.dumps(record, indent=2) + '\n')
  failed = [row['mode'] for row in rows if row['passed'] is False]
  if failed:
    console.print(f'{len(failed)} of {len(rows)} modes differ from one device')
  return 1 if failed else 0


def run(options: Any, devices: Sequence[str], modes: Sequence[Mode]) -> list[dict[str, Any]]:
  """`compare` as the flags ask for it."""
  import tensorflow as tf

  import hpm

  tf.config.experimental.enable_tensor_float_32_execution(False)
  sizes = {} if options.image_size is None else {'image_size': options.image_size}
  model = hpm.models.create(options.model, **sizes)
  _refuse_dropout(model)
  rule = hpm.optimizers.create(options.optimizer, options.learning_rate)
  return compare(
    model, devices, options.batch_size, options.num_steps, rule, modes, options.tolerance
  )


def table(options: Any, devices: Sequence[str], rows: Sequence[dict[str, Any]]) -> Any:
  shown = rich.table.Table(
    title=f'{options.model}, {len(devices)} x {options.batch_size} images on {devices[0]} ... '
    f'beside 1 x {len(devices) * options.batch_size}, {options.num_steps} steps of '
    f'{options.optimizer}',
    box=rich.box.SIMPLE,
    padding=(0, 1, 0, 0),
  )
  shown.add_column('mode', overflow='fold', min_width=32)
  for column in ('largest', 'order', 'median'):
    shown.add_column(column, justify='right', no_wrap=True)
  shown.add_column('', no_wrap=True)
  shown.add_column('where', overflow='fold')
  for row in rows:
    keys = ('difference', 'order', 'median')
    figures = ['' if row[k] is None else f'{row[k]:.1e}' for k in keys]
    verdict = {None: '-', True: '[green]pass[/]', False: '[red]FAIL[/]'}[row['passed']]
    shown.add_row(row['mode'], *figures, verdict, row['reason'].removeprefix('params/'))
  return shown


def parse(arguments: Sequence[str]) -> Any:
  """The flags' values."""
  values = flags.FlagValues()
  flags.DEFINE_string('model', 'lenet', 'Any without dropout.', flag_values=values)
  flags.DEFINE_integer('image_size', None, "Default: the model's.", 1, flag_values=values)
  flags.DEFINE_integer('batch_size', 4, 'Images a device.', 1, flag_values=values)
  flags.DEFINE_integer('num_steps', 5, 'Steps of each mode.', 1, flag_values=values)
  flags.DEFINE_string('optimizer', 'momentum', 'The update rule.', flag_values=values)
  flags.DEFINE_float('learning_rate', 0.001, 'Its rate.', flag_values=values)
  flags.DEFINE_float('tolerance', None, 'Of float32 modes.', 0.0, flag_values=values)
  flags.DEFINE_enum('device', None, ['cpu', 'gpu'], 'Default: gpu, if any.', flag_values=values)
  flags.DEFINE_integer('num_gpus', None, 'Devices of that kind.', 1, flag_values=values)
  flags.DEFINE_string('only', '', 'Modes with this in their name.', flag_values=values)
  flags.DEFINE_string('json', None, 'Where to write the matrix.', flag_values=values)
  command.parse(values, arguments)
  models.check_name(values.model)
  if values.optimizer not in optimizers.OPTIMIZERS:
    raise UsageError(f'--optimizer={values.optimizer}: use {", ".join(optimizers.OPTIMIZERS)}')
  return values


def _in_order(steps: Sequence[Any], seed: int | None) -> Sequence[Any]:
  """The same batches of one device, the images of each in another order; None: as they are."""
  import numpy as np

  if seed is None:
    return steps
  order = np.random.default_rng(seed).permutation(len(steps[0][0][1]))
  return [[(images[order], labels[order])] for ((images, labels),) in steps]


def _trained(
  mode: Mode,
  model: Any,
  devices: Sequence[str],
  optimizer: Any,
  steps: Sequence[Sequence[tuple[Any, Any]]],
  options: Mapping[str, Any],
) -> dict[str, Any]:
  """The parameters after the steps."""
  import hpm

  manager = hpm.variable_mgr.create(mode.manager, devices, **mode.options, **options)
  step = hpm.TrainStep(model, manager, optimizer, seed=SEED)
  for batches in steps:
    step(batches)
  values = step.snapshot()
  return {name: v.numpy() for name, v in values.items() if name.startswith('params/')}


def _differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
  """Of each parameter, as a share of its largest value; inf where there is a NaN."""
  import numpy as np

  differences = {}
  for name, value in expected.items():
    largest = np.max(np.abs(value), initial=np.finfo(np.float32).tiny)
    difference = float(np.max(np.abs(actual[name] - value), initial=0.0) / largest)
    differences[name] = difference if np.isfinite(difference) else float('inf')
  return differences


def _refuse_dropout(model: Any) -> None:
  import tensorflow as tf

  with tf.Graph().as_default() as graph:
    params, state = model.init(SEED)
    nhwc = model.data_format == 'NHWC'
    height, width, channels = model.image_shape
    shape = (height, width, channels) if nhwc else (channels, height, width)
    started = len(graph.get_operations())
    images = tf.zeros((2, *shape), model.dtype)
    rng = tf.compat.v1.placeholder(tf.int32, [2])
    model.forward(params, state, images, training=True, rng=rng)
    drops = any('StatelessRandom' in op.type for op in graph.get_operations()[started:])
  if drops:
    raise UsageError(
      f'--model={model.name} has dropout, whose masks differ between towers, so that N devices are '
      'not one: choose another, such as lenet or resnet20'
    )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
