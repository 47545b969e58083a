"""What a run will need and move, without running it and without its devices.

  python -m benchmarks.plan --model=vgg16 --num_gpus=8 --batch_size=64
  python benchmarks/run.py --dry_run --num_gpus=4 --variable_update=parameter_server

Takes the driver's flags. Read from the step's graph (`hpm.plan`): memory of each device, bytes
between devices, how long backprop runs before the first gradients are there, and the largest batch
per device for 12, 16 and 80 GB.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Sequence
import sys
from typing import Any

import rich.console
import rich.table

__all__ = ['MEMORIES_GB', 'main', 'show']

MEMORIES_GB = (12, 16, 80)  # K80 (each of its GPUs), P100 and V100, A100 and H100
_SHARES = (0.05, 0.15, 0.5)


def main(arguments: Sequence[str]) -> int:
  """The driver with --dry_run."""
  from benchmarks import run

  return run.main([*arguments, '--dry_run'])


def show(options: Any) -> None:
  """Plans the step that the flags describe, and prints what was found.

  Raises:
    UsageError: flags that can't work, on whatever devices.
  """
  from benchmarks import flags, run

  console = rich.console.Console(highlight=False)
  kind, count = (options.device or 'gpu').upper(), options.num_gpus or 1
  devices = [f'/{kind}:{i}' for i in range(count)]
  flags.complete(options, devices)
  import tensorflow as tf

  import hpm
  from hpm import planning

  def make_step() -> hpm.TrainStep:
    manager = hpm.variable_mgr.create(
      options.variable_update, devices, **flags.variables.manager_options(options)
    )
    model = run.create_model(options)
    return run.create_train_step(options, model, manager, flags.data.SYNTHETIC_EPOCH)

  with tf.Graph().as_default():
    plan = hpm.plan(make_step(), options.batch_size)
  console.print(
    f'{options.model}, {options.batch_size} images on each of {count} {kind} '
    f'device{"s" if count > 1 else ""}, {options.variable_update}'
  )
  for label, text in flags.preset.facts(options):
    console.print(f'{label}: {text}', soft_wrap=True)
  for line in flags.preset.left_out(options):
    console.print(line, soft_wrap=True)
  console.print(_memory(plan))
  console.print(_transfers(plan))
  total = sum(wait.bytes for wait in plan.waits)
  for share in _SHARES:
    ready = sum(wait.bytes for wait in plan.waits if wait.share <= share)
    console.print(
      f"{ready / total:6.1%} of the gradients' bytes need at most {share:.0%} of backprop's "
      'multiply-adds before them'
    )
  for memory in MEMORIES_GB:
    batch = planning.largest_batch(make_step, memory * 10**9)
    console.print(f'largest batch per device in {memory} GB: {batch}')
  console.print(
    "Memory is that of tensors; workspace of kernels, the allocator's losses and the CUDA context "
    'come on top.'
  )


def _memory(plan: Any) -> rich.table.Table:
  table = rich.table.Table(title='Memory, MiB', title_justify='left')
  columns = ('device', 'variables', 'slots', 'batches', 'tower', 'aggregation', 'in all')
  for column in columns:
    table.add_column(column, justify='left' if column == 'device' else 'right')
  for device in plan.devices:
    parts = (device.variables, device.slots, device.batches, device.tower, device.aggregation)
    sizes = (*parts, device.total_bytes)
    table.add_row(device.device.removeprefix('/device:'), *(f'{n / 2**20:.1f}' for n in sizes))
  return table


def _transfers(plan: Any) -> rich.table.Table:
  """By kind of link and pair of kinds; the single pairs where they are few."""
  table = rich.table.Table(title='Transfers a step', title_justify='left')
  for column in ('from', 'to', 'link', 'tensors', 'MiB'):
    table.add_column(column, justify='right' if column in ('tensors', 'MiB') else 'left')
  for t in sorted(plan.transfers, key=lambda t: (t.link, t.source, t.destination)):
    table.add_row(
      t.source.removeprefix('/device:'),
      t.destination.removeprefix('/device:'),
      t.link,
      str(t.tensors),
      '?' if t.bytes is None else f'{t.bytes / 2**20:.2f}',
    )
  return table


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
