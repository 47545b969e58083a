"""How fast each all-reduce is, beside tf.distribute's of the same kind, in one run and by turns.

  python -m benchmarks.allreduce --num_gpus=4                       # all specs, all sets
  python -m benchmarks.allreduce --device=cpu --num_gpus=8 --sets=resnet50 --specs=copy,xring
  python -m benchmarks.allreduce --sets=sizes --max_bytes=64M --rounds=15 --json=allreduce.json

Sets of tensors: the gradients of resnet50 and vgg16, the last layer's first, and `sizes`, single
tensors of 1 KB to 512 MB. A round runs each contender once, in an order that turns; given are the
median of all rounds and half the distance between the quartiles.

  bus GB/s   bytes of the set over the time ("algorithm bandwidth", in the --json file), times
             2 (n - 1) / n: what crosses each device's links in the best of algorithms, so that
             numbers of devices compare (the convention of nccl-tests)
  of memcpy  bus GB/s as a share of what one copy in memory reaches in the same run
  moved      bytes between devices, counted in the graph; for collectives, which move them inside an
             op, those of a ring
  peak       memory that a contender needed beyond its tensors: of the first GPU; on CPU devices by
             how much the process grew, less what it had freed before and kept
  of twin    time over that of tf.distribute's operation of the same kind

On logical CPU devices a copy between devices is an alias and costs nothing. There these figures
show what sums and packing cost, and that nothing is done twice; they say nothing about links, and
an algorithm that makes fewer, larger sums always wins. Which one is best is for GPUs to say.

Exit code: 0 done; 2 flags that can't work.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import json
import math
import statistics
import sys
import time
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.table

from benchmarks import command, files, machine, process
from hpm import variable_mgr
from hpm.errors import UsageError
from hpm.variable_mgr import spec as specs

__all__ = ['TWINS', 'contenders', 'main', 'measure', 'shapes_of', 'strategy']

SPECS = (
  *('copy', 'psgpu', 'pscpu', 'xring', 'xring#2', 'rechd', 'hierarchical_copy', 'copy/xring'),
  *('collective', 'nccl', 'nccl_all_reduce', 'nccl/xring'),
)
# Spec -> tf.distribute's operation of the same kind.
TWINS = {
  'copy': 'ReductionToOneDevice',
  'hierarchical_copy': 'HierarchicalCopyAllReduce',
  'collective': 'CollectiveAllReduce',
  'nccl': 'CollectiveAllReduce',
  'nccl_all_reduce': 'NcclAllReduce',
}
SETS = ('resnet50', 'vgg16', 'sizes')
MEMCPY_BYTES = 64 << 20
# Tensors, sums and results of a device; contenders hold theirs one after the other.
_COPIES_A_DEVICE = 4

Shapes = Sequence[tuple[int, ...]]
Reduce = Callable[[], Any]


def shapes_of(name: str) -> list[tuple[int, ...]]:
  """The gradients of a model of `hpm`, in the order in which `replicated` reduces them."""
  import hpm

  parameters = hpm.models.create(name).param_specs.values()
  return [tuple(spec.shape) for spec in reversed(list(parameters))]


def sizes(smallest: int, largest: int) -> list[int]:
  """Powers of 8 times the smallest number of bytes, and the largest."""
  found = []
  while smallest < largest:
    found.append(smallest)
    smallest *= 8
  return [*found, largest]


def contenders(
  names: Sequence[str], devices: Sequence[str], shapes: Shapes, buckets: int | None = None
) -> dict[str, Reduce]:
  """Contender -> a function that reduces once and waits for the end.

  Args:
    names: specs; those of `TWINS` bring tf.distribute's operation with them.
    devices: device strings.
    shapes: of the float32 tensors.
    buckets: repacks them, for hpm's contenders; None as `replicated` does by default.
  """
  import tensorflow as tf

  tensors = []
  for i, device in enumerate(devices):
    with tf.device(device):
      tensors.append([tf.fill(shape, i + 1.0) for shape in shapes])
  built: dict[str, Reduce] = {}
  for name in names:
    built[name] = _ours(name, devices, tensors, buckets)
    twin = f'tf.distribute {TWINS[name]}' if name in TWINS else None
    if twin and twin not in built:
      built[twin] = _twin(TWINS[name], devices, tensors)
  return built


def measure(
  reduces: Mapping[str, Reduce], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, Any]]:
  """Contender -> 'times_s' of every round, and 'peak_bytes' (None where nothing tells it).

  The first call of each traces, and is not counted.
  """
  peaks = {}
  for name, reduce in reduces.items():
    reduce()
    peaks[name] = _peak_of(reduce)
  times: dict[str, list[float]] = {name: [] for name in reduces}
  names = list(reduces)
  for turn in range(rounds):
    start = turn % len(names)
    for name in (*names[start:], *names[:start]):
      began = clock()
      reduces[name]()
      times[name].append(clock() - began)
  return {name: {'times_s': times[name], 'peak_bytes': peaks[name]} for name in names}


def moved_bytes(spec: str, num_devices: int, shapes: Shapes, buckets: int | None = None) -> int:
  """Bytes between devices, from the graph; of collectives those of a ring."""
  import tensorflow as tf

  from hpm import placement

  devices = [f'/GPU:{i}' for i in range(num_devices)]  # none of them is the host
  with tf.Graph().as_default() as graph:
    lists = []
    for device in devices:
      with tf.device(device):
        lists.append([tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes])
    results = _all_reduce(spec, devices, buckets)(lists)
    copied = sum(copy.bytes or 0 for copy in placement.copies(graph, results))
    parts = placement.collectives(graph, results)
  sizes_of: dict[Any, list[int]] = {}
  for part in parts:
    sizes_of.setdefault(part.instance, []).append(part.bytes or 0)
  return copied + sum(2 * (len(parts) - 1) * parts[0] for parts in sizes_of.values())


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Measures and prints; see the module's docstring for the exit code."""
  options = parse(arguments)
  devices = process.devices(options.device, options.num_gpus)
  if len(devices) < 2:
    raise UsageError(f'{len(devices)} device: at least 2 are needed to sum over')
  names = options.specs or [s for s in SPECS if 'nccl' not in s or 'GPU' in devices[0]]
  for name in names:
    parsed = specs.parse(name, variable_mgr.ALL_REDUCES)
    specs.check_devices(name, parsed, devices)
  console = rich.console.Console(highlight=False)
  memcpy = memcpy_rate(devices)
  record: dict[str, Any] = {
    'machine': machine.describe(),
    'devices': list(devices),
    'memcpy_bytes_per_s': memcpy,
    'rounds': options.rounds,
    'gradient_repacking': options.gradient_repacking,
    'sets': [],
  }
  console.print(f'{len(devices)} devices from {devices[0]}, memory copies {memcpy / 1e9:.1f} GB/s')
  for label, shapes in _sets(options):
    size = 4 * sum(math.prod(shape) for shape in shapes)
    needed, available = _COPIES_A_DEVICE * size * len(devices), _available()
    if available is not None and 'CPU' in devices[0] and needed > available:
      console.print(
        f'{label}: left out, needs {needed >> 20} MiB of memory, {available >> 20} are free'
      )
      continue
    buckets = options.gradient_repacking if len(shapes) > 1 else 0  # one tensor is packed already
    with console.status(label):
      figures = measure(contenders(names, devices, shapes, buckets), options.rounds)
    rows = [
      _row(name, figure, size, len(devices), memcpy, shapes, buckets)
      for name, figure in figures.items()
    ]
    record['sets'].append({'set': label, 'bytes': size, 'tensors': len(shapes), 'rows': rows})
    console.print(_table(label, size, len(shapes), rows))
  if options.json:
    files.write(options.json, json.dumps(record, indent=2) + '\n')
  return 0


def parse(arguments: Sequence[str]) -> Any:
  """The flags' values."""
  values = flags.FlagValues()
  flags.DEFINE_enum('device', None, ['cpu', 'gpu'], 'Default: gpu, if any.', flag_values=values)
  flags.DEFINE_integer('num_gpus', None, 'Devices of that kind.', 1, flag_values=values)
  flags.DEFINE_list('sets', list(SETS), f'Of {", ".join(SETS)}.', flag_values=values)
  flags.DEFINE_list('specs', [], 'Default: every kind.', flag_values=values)
  flags.DEFINE_string('min_bytes', '1k', 'Of sizes.', flag_values=values)
  flags.DEFINE_string('max_bytes', '512M', 'Of sizes.', flag_values=values)
  flags.DEFINE_integer(
    'gradient_repacking',
    None,
    'Buckets; 0 for none. Default: as `replicated` has it with each all-reduce.',
    0,
    flag_values=values,
  )
  flags.DEFINE_integer('rounds', 11, 'Of all contenders.', 1, flag_values=values)
  flags.DEFINE_string('json', None, 'Where to write the figures.', flag_values=values)
  command.parse(values, arguments)
  for name in values.sets:
    if name not in SETS:
      raise UsageError(f'--sets={name}: use {", ".join(SETS)}')
  if specs.parse_size(values.min_bytes) > specs.parse_size(values.max_bytes):
    raise UsageError(f'--min_bytes={values.min_bytes} is more than --max_bytes={values.max_bytes}')
  return values


def memcpy_rate(devices: Sequence[str]) -> float:
  """Bytes a second of one copy: in memory, or from the first GPU to the second."""
  import numpy as np
  import tensorflow as tf

  if 'CPU' in devices[0]:
    source = np.ones(MEMCPY_BYTES, np.uint8)
    target = np.empty_like(source)
    copy: Reduce = lambda: np.copyto(target, source)  # noqa: E731
  else:
    with tf.device(devices[0]):
      value = tf.ones(MEMCPY_BYTES // 4)

    def copy() -> None:
      with tf.device(devices[1]):
        tf.identity(value)
      tf.test.experimental.sync_devices()

  copy()
  times = []
  for _ in range(11):
    began = time.perf_counter()
    copy()
    times.append(time.perf_counter() - began)
  return MEMCPY_BYTES / statistics.median(times)


def _all_reduce(spec: str, devices: Sequence[str], buckets: int | None) -> Any:
  from hpm.variable_mgr import packing

  all_reduce = variable_mgr.all_reduce(spec, devices)
  own = getattr(all_reduce, 'buckets', 0)
  if buckets is None and own:
    return packing.Buckets(all_reduce, devices, own)
  return packing.Repacked(all_reduce, devices, buckets) if buckets else all_reduce


def _ours(
  spec: str, devices: Sequence[str], tensors: Sequence[Sequence[Any]], buckets: int | None
) -> Reduce:
  import tensorflow as tf

  all_reduce = _all_reduce(spec, devices, buckets)
  # As in a step: no automatic control dependencies. Captured, as the twins' tensors are.
  function = tf.function(
    lambda: all_reduce(tensors),
    autograph=False,
    experimental_attributes={'_disable_acd': True},
  ).get_concrete_function()
  return lambda: _finished(function())


def _twin(kind: str, devices: Sequence[str], tensors: Sequence[Sequence[Any]]) -> Reduce:
  """tf.distribute's all-reduce of all tensors, in the replicas of a MirroredStrategy."""
  import tensorflow as tf

  mirrored = strategy(kind, tuple(devices))
  values = mirrored.experimental_distribute_values_from_function(
    lambda context: list(tensors[context.replica_id_in_sync_group])
  )

  def replica(own_tensors):
    return tf.distribute.get_replica_context().all_reduce('sum', own_tensors)

  function = tf.function(
    lambda: mirrored.run(replica, args=(values,)), autograph=False
  ).get_concrete_function()
  return lambda: _finished(function())


def _finished(results: Any) -> Any:
  import tensorflow as tf

  tf.test.experimental.sync_devices()
  return results


def _sets(options: Any) -> list[tuple[str, Shapes]]:
  found: list[tuple[str, Shapes]] = []
  for name in options.sets:
    if name == 'sizes':
      smallest, largest = map(specs.parse_size, (options.min_bytes, options.max_bytes))
      found += [(f'{size:,} bytes', [(max(1, size // 4),)]) for size in sizes(smallest, largest)]
    else:
      found.append((name, shapes_of(name)))
  return found


def _row(
  name: str,
  figure: Mapping[str, Any],
  size: int,
  num_devices: int,
  memcpy: float,
  shapes: Shapes,
  buckets: int | None,
) -> dict[str, Any]:
  times = figure['times_s']
  median = statistics.median(times)
  quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
  bus = size / median * 2 * (num_devices - 1) / num_devices
  ours = not name.startswith('tf.distribute')
  return {
    'contender': name,
    'time_s': median,
    'spread_s': (quartiles[2] - quartiles[0]) / 2,
    'times_s': times,
    'algorithm_bytes_per_s': size / median,
    'bus_bytes_per_s': bus,
    'share_of_memcpy': bus / memcpy,
    'moved_bytes': moved_bytes(name, num_devices, shapes, buckets) if ours else None,
    'peak_bytes': figure['peak_bytes'],
  }


def _table(label: str, size: int, count: int, rows: Sequence[Mapping[str, Any]]) -> Any:
  shown = rich.table.Table(
    title=f'{label}: {count} tensors, {size / 1e6:,.3f} MB',
    box=rich.box.SIMPLE,
    padding=(0, 1, 0, 0),
  )
  shown.add_column('all-reduce', no_wrap=True)
  for column in ('ms', '+/-', 'bus\nGB/s', 'of\nmemcpy', 'moved\nMB', 'peak\nMB', 'of\ntwin'):
    shown.add_column(column, justify='right', no_wrap=True)
  times = {row['contender']: row['time_s'] for row in rows}
  for row in rows:
    twin = times.get(f'tf.distribute {TWINS.get(row["contender"])}')
    moved, peak = row['moved_bytes'], row['peak_bytes']
    shown.add_row(
      row['contender'].replace('tf.distribute', 'tf'),
      _short(row['time_s'] * 1e3),
      _short(row['spread_s'] * 1e3),
      f'{row["bus_bytes_per_s"] / 1e9:.2f}',
      f'{row["share_of_memcpy"]:.0%}',
      '' if moved is None else _short(moved / 1e6),
      '' if peak is None else _short(peak / 1e6),
      '' if twin is None else f'{row["time_s"] / twin:.2f}',
    )
  return shown


def _short(value: float) -> str:
  return f'{value:.2f}' if value < 100 else f'{value:.0f}'


def _peak_of(reduce: Reduce) -> int | None:
  """Bytes that a call needs on the first GPU, or of this process, beyond what is held."""
  import tensorflow as tf

  if not tf.config.list_logical_devices('GPU'):
    try:
      with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the high-water mark starts anew
    except OSError:
      return None
    before = _resident('VmRSS')
    reduce()
    return max(0, _resident('VmHWM') - before)
  tf.config.experimental.reset_memory_stats('GPU:0')
  before = tf.config.experimental.get_memory_info('GPU:0')['current']
  reduce()
  return tf.config.experimental.get_memory_info('GPU:0')['peak'] - before


def _resident(field: str) -> int:
  """Bytes of this process's resident memory: now (VmRSS), or the most so far (VmHWM)."""
  with open('/proc/self/status') as file:
    return next(1024 * int(line.split()[1]) for line in file if line.startswith(field + ':'))


@functools.cache
def strategy(kind: str, devices: tuple[str, ...]) -> Any:
  """One a process: each strategy would count the keys of its collectives from the start again."""
  import tensorflow as tf

  operations = {
    'ReductionToOneDevice': tf.distribute.ReductionToOneDevice,
    'HierarchicalCopyAllReduce': tf.distribute.HierarchicalCopyAllReduce,
    'NcclAllReduce': tf.distribute.NcclAllReduce,
  }
  # A strategy's own choice on several devices is its collective operation.
  own = operations[kind]() if kind in operations else None
  return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=own)


def _available() -> int | None:
  try:
    with open('/proc/meminfo') as file:
      for line in file:
        if line.startswith('MemAvailable'):
          return int(line.split()[1]) * 1024
  except OSError:
    pass
  return None


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
