"""What a run will need and move, without running it and without its devices.

  python -m benchmarks.plan --model=vgg16 --num_gpus=8 --batch_size=64
  python benchmarks/run.py --dry_run --num_gpus=4 --variable_update=parameter_server
  python -m benchmarks.plan --local_cluster=workers:8,ps:6 --num_gpus=8 --batch_size=64 \
    --variable_update=distributed_replicated

Takes the driver's flags. Read from the step's graph (`hpm.plan`): memory of each device, bytes
between devices, how long backprop runs before the first gradients are there, and the largest batch
per device for 12, 16 and 80 GB. Of several processes it is the chief's graph, in which parameter
servers have their variables and updates.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Sequence
import sys
from typing import Any

import rich.box
import rich.console
import rich.table

from benchmarks import process
import hpm

__all__ = ['MEMORIES_GB', 'main', 'of', 'planned', 'show']

MEMORIES_GB = (12, 16, 80)  # K80 (each of its GPUs), P100 and V100, A100 and H100
_CHIEF = '/job:worker/task:0'
_SHARES = (0.05, 0.15, 0.5)
_MANY = 32  # rows of a table


def main(arguments: Sequence[str]) -> int:
  """The driver with --dry_run."""
  from benchmarks import run

  return run.main([*arguments, '--dry_run'])


def show(options: Any) -> None:
  """Plans the step that the flags describe, and prints what was found.

  Raises:
    UsageError: flags that can't work, on whatever devices.
  """
  from benchmarks import flags

  console = rich.console.Console(highlight=False)
  kind, count = (options.device or 'gpu').upper(), options.num_gpus or 1
  devices = [f'/{kind}:{i}' for i in range(count)]
  flags.complete(options, devices)
  process.import_tensorflow()
  import tensorflow as tf

  from hpm import planning

  there = flags.cluster.tasks(options)
  with tf.Graph().as_default(), tf.device(_CHIEF if there else None):
    step, plan = planned(options, devices)
    batches = planning.largest_batches(step, plan, [memory * 10**9 for memory in MEMORIES_GB])
  console.print(
    f'{options.model}, {options.batch_size} images on each of {count} {kind} '
    f'device{"s" if count > 1 else ""}, {options.variable_update}'
    + (f' over {there.num_workers} workers and {there.num_ps} parameter servers' if there else '')
  )
  for label, text in flags.preset.facts(options):
    console.print(f'{label}: {text}', soft_wrap=True)
  console.print(_memory(plan))
  console.print(_transfers(plan) if plan.transfers else 'Between devices nothing crosses')
  if there:
    console.print(_between_processes(plan, there.num_workers), soft_wrap=True)
  for line in _overlap(plan):
    console.print(line)
  for memory, batch in zip(MEMORIES_GB, batches, strict=True):
    console.print(f'largest batch per device in {memory} GB: {batch}')
  console.print(
    "Backprop is counted in multiply-adds. Memory is that of tensors; kernels' workspace, the "
    "allocator's losses and the CUDA context come on top."
  )


def of(options: Any) -> hpm.planning.Plan:
  """The plan of the step that the flags describe, which are completed.

  Raises:
    UsageError: flags that can't work, on whatever devices.
  """
  from benchmarks import flags

  devices = [f'/{(options.device or "gpu").upper()}:{i}' for i in range(options.num_gpus or 1)]
  flags.complete(options, devices)
  process.import_tensorflow()
  import tensorflow as tf

  with tf.Graph().as_default(), tf.device(_CHIEF if flags.cluster.tasks(options) else None):
    return planned(options, devices)[1]


def planned(
  options: Any, devices: Sequence[str], model: hpm.models.Model | None = None
) -> tuple[hpm.TrainStep, hpm.planning.Plan]:
  """The step that the flags describe, built into the current graph, and what it needs.

  With a model that is there already, or one that is made here.
  """
  from benchmarks import flags, run

  there = flags.cluster.tasks(options)
  manager = hpm.variable_mgr.create(
    options.variable_update,
    devices,
    **flags.variables.manager_options(options),
    **(_of_chief(options, *there) if there else {}),
  )
  model = run.create_model(options) if model is None else model
  step = run.create_train_step(options, model, manager, flags.data.SYNTHETIC_EPOCH)
  return step, hpm.plan(step, options.batch_size)


def _of_chief(options: Any, num_workers: int, num_ps: int) -> dict[str, Any]:
  """What the chief's manager takes beside the flags' options."""
  from hpm.cluster import server

  found: dict[str, Any] = {'worker': 0, 'num_workers': num_workers}
  if num_ps:
    found['ps_devices'] = [server.ps_device(i) for i in range(num_ps)]
  if options.variable_update == 'parameter_server':
    found['cross_replica_sync'] = options.cross_replica_sync
  return found


def _between_processes(plan: Any, num_workers: int) -> str:
  """What crosses between processes, of the chief and in all."""
  sizes = [transfer.bytes for transfer in plan.transfers if transfer.link == 'network']
  if not sizes:
    return 'Between processes nothing crosses: one worker sums alone'
  if None in sizes:
    return 'Between processes: not known, as shapes are not static'
  own, collective = sum(sizes), any(t.destination == 'all workers' for t in plan.transfers)
  each = 'from each worker to the next' if collective else 'from and to each worker'
  return (
    f'Between processes, a step: {own / 2**20:.1f} MiB {each}, '
    f'{own * num_workers / 2**20:.1f} MiB in all'
  )


def _name(device: str) -> str:
  """'GPU:0', 'ps:1 CPU:0'."""
  task, _, name = device.rpartition('/device:')
  task = task.removeprefix('/job:').replace('/task:', ':').replace('/replica:0', '')
  return name if task in ('', 'worker:0') else f'{task} {name}'


def _table(title: str) -> rich.table.Table:
  """As narrow as it gets: all columns of a plan have to stand in 80 characters."""
  return rich.table.Table(title=title, title_justify='left', box=rich.box.SIMPLE, padding=0)


def _memory(plan: Any) -> rich.table.Table:
  """A row a device; where there are many, one for all that need the same."""
  table = _table('Memory, MiB')
  columns = ('device', 'variables', 'slots', 'batches', 'activations', 'gradients', 'aggregation')
  for column in (*columns, 'in all'):
    table.add_column(column, justify='left' if column == 'device' else 'right')
  rows: dict[Any, list[str]] = {}
  for device in plan.devices:
    sizes = (*(getattr(device, column) for column in columns[1:]), device.total_bytes)
    key = sizes if len(plan.devices) > _MANY else device.device
    rows.setdefault((key, sizes), []).append(_name(device.device))
  for (_, sizes), names in rows.items():
    name = names[0] if len(names) == 1 else f'{len(names)}: {names[0]} ... {names[-1]}'
    table.add_row(name, *(f'{n / 2**20:.1f}' for n in sizes))
  return table


def _transfers(plan: Any) -> rich.table.Table:
  """A row a pair of devices; where there are many, one for all pairs of the same kinds."""
  rows: dict[tuple[str, str, str], list[Any]] = {}
  for transfer in plan.transfers:
    ends = [
      ', '.join(map(_name, end.split(', '))) for end in (transfer.source, transfer.destination)
    ]
    if len(plan.transfers) > _MANY and transfer.link != 'collective':
      ends = [end.partition(':')[0] for end in ends]
    rows.setdefault((transfer.link, *ends), []).append(transfer)
  table = _table('Transfers a step')
  for column in ('from', 'to', 'link', 'pairs', 'tensors', 'MiB', 'largest pair'):
    table.add_column(column, justify='left' if column in ('from', 'to', 'link') else 'right')
  for (link, source, destination), found in sorted(rows.items()):
    sizes = [transfer.bytes for transfer in found]
    known = None not in sizes
    table.add_row(
      source,
      destination,
      link,
      str(len(found)),
      str(sum(transfer.tensors for transfer in found)),
      f'{sum(sizes) / 2**20:.2f}' if known else '?',
      f'{max(sizes) / 2**20:.2f}' if known else '?',
    )
  return table


def _overlap(plan: Any) -> list[str]:
  """How much of backprop is done before gradients are there, and before they are on their way."""
  lines = []
  total = sum(wait.bytes for wait in plan.waits)
  for share in _SHARES:
    ready = sum(wait.bytes for wait in plan.waits if wait.share <= share)
    lines.append(
      f"{ready / total:6.1%} of the gradients' bytes need at most {share:.0%} of backprop before "
      'them'
    )
  if plan.buckets:
    first, last = plan.buckets[0], plan.buckets[-1]
    middle = plan.buckets[len(plan.buckets) // 2]
    lines.append(
      f'reduced as {len(plan.buckets)}: the first waits for {first.share:.0%} of backprop, the '
      f'middle one for {middle.share:.0%}, the last for {last.share:.0%}'
    )
  return lines


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
