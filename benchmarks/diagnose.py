"""What limits a run: each of its parts alone, by turns, and one sentence.

  python -m benchmarks.diagnose --model=resnet50 --num_gpus=8 --batch_size=64 --data_dir=DIR
  python benchmarks/run.py --diagnose ...                          # the same

It takes the flags of a run, of one process. For each part and for the whole a few steps are timed,
in rounds in which all have their turn; medians are shown.

  storage        the records read from the files, out of the page cache as far as the system lets go
                 of them, and not decoded
  decode         the processor time of the input pipeline alone, on all cores
  transfer       a batch copied to each device
  compute        the step on one batch that is there, in a loop in the graph, with no aggregation
                 (`independent`)
  communication  what it takes longer with the manager that was asked for
  host           what it takes longer called step by step than in the loop
  matrix product the largest rate, 4096 x 4096 in the precision of the run; what share of it the
                 step reaches

How these make a step, and the verdict: see `benchmarks.diagnosis`. `predicted` beside `measured`
says how well that describes this run.

Exit code: 0 done; 1 data that can't be read; 2 flags that can't work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import time
from typing import Any

import rich.box
import rich.console
import rich.table

from benchmarks import diagnosis, process

__all__ = ['Probe', 'main', 'measure', 'show', 'times_of']

ROUNDS = 3
ROUND_S = 1.0  # of each part
MOST_STEPS = 1000
LOOP = 5  # steps in the graph
MATRIX = 4096
_READ = 16  # records at a time

Measured = Mapping[str, list[float]]


class Probe:
  """One part: `run(n)` does it for n steps, some multiple of `chunk`; so many as a round takes."""

  def __init__(self, run: Callable[[int], object], chunk: int = 1):
    self._run = run
    self._chunk = self.steps = chunk

  def start(self) -> None:
    """The first steps: those that trace and fill, and those that say how long one takes."""
    self._run(self._chunk)
    begun = time.perf_counter()
    self._run(self._chunk)
    one = max(1e-9, time.perf_counter() - begun) / self._chunk
    self.steps = self._whole(min(MOST_STEPS, ROUND_S / one))

  def _whole(self, steps: float) -> int:
    return max(1, int(steps / self._chunk)) * self._chunk

  def measure(self) -> tuple[float, float]:
    """Wall and processor seconds a step."""
    self._run(self._whole(self.steps / 2))  # takes what was made ready in others' turns
    wall, cpu = time.perf_counter(), time.process_time()
    self._run(self.steps)
    return (
      (time.perf_counter() - wall) / self.steps,
      (time.process_time() - cpu) / self.steps,
    )


def main(arguments: Sequence[str]) -> int:
  """The driver with --diagnose."""
  from benchmarks import run

  return run.main([*arguments, '--diagnose'])


def show(options: Any) -> dict[str, Any]:
  """Measures what the flags describe, and prints the table and the verdict.

  Returns:
    What a result says of it (`results.FIELDS`): `diagnosis`, and what was diagnosed.

  Raises:
    UsageError: flags that can't work here.
    DataError: from the data.
  """
  from benchmarks import flags

  devices = process.devices(options.device, options.num_gpus)
  flags.complete(options, devices)
  console = rich.console.Console(highlight=False)
  with console.status('measuring the parts by turns'):
    found, facts = measure(options, devices)
  times = times_of(found, facts)
  result = diagnosis.verdict(times)
  console.print(_table(found, facts, times))
  console.print(result.sentence, soft_wrap=True)
  said = {
    **{name: _finite(value) for name, value in dataclasses.asdict(result).items()},
    'alike': list(result.alike),
    'advice': diagnosis.ADVICE['decode' if result.limit == 'contention' else result.limit],
    'parts': dict(times.parts),
    'gains': {name: _finite(gain) for name, gain in times.gains().items()},
    'predicted_s': times.step(),
    'measured_s': measured_step(found),
    'images': facts['images'],
    'matrix_product_flops': facts['product_flops'] / statistics.median(found['product']),
  }
  return {
    'model': options.model,
    'devices': list(devices),
    'batch_size_per_device': options.batch_size,
    'diagnosis': said,
  }


def measured_step(found: Measured) -> float:
  """Seconds a step of the whole run."""
  return statistics.median(found.get('run', found['step']))


def _finite(value: Any) -> Any:
  return None if value == float('inf') else value


def measure(
  options: Any, devices: Sequence[str], rounds: int = ROUNDS
) -> tuple[dict[str, list[float]], dict[str, Any]]:
  """Part -> seconds a step of every round, and the facts that go with them.

  Args:
    options: complete, of a run in one process.
    devices: device strings.
    rounds: in which each part has its turn.
  """
  import tensorflow as tf

  from benchmarks import flags, memory, run
  import hpm

  model = run.create_model(options)
  memory.check(options, model, devices)
  pipeline = run.create_pipeline(options, model)
  real = not flags.data.synthetic(options)
  images = options.batch_size * len(devices)

  def step_of(name: str, **given: Any) -> Any:
    manager = hpm.variable_mgr.create(name, devices, **given)
    return run.create_train_step(options, model, manager, flags.data.SYNTHETIC_EPOCH)

  whole = step_of(options.variable_update, **flags.variables.manager_options(options))
  batch = next(iter(pipeline.dataset().take(1)))
  ready = tf.data.Dataset.from_tensors(tuple(map(tf.identity, batch))).repeat()
  probes = {
    'step': Probe(_stepping(whole.run(ready))),
    'loop': Probe(_stepping(whole.run(ready, steps_per_call=LOOP)), LOOP),
    'transfer': Probe(_copying(batch, devices)),
    'product': Probe(_multiplying(devices, options.precision)),
  }
  if options.variable_update != 'independent' and len(devices) > 1:
    alone = step_of('independent')
    probes['alone'] = Probe(_stepping(alone.run(ready, steps_per_call=LOOP)), LOOP)
  if real:
    probes['run'] = Probe(_stepping(whole.run(pipeline.dataset().repeat())))
    probes['input'] = Probe(_taking(pipeline.dataset().repeat(), len(devices)))
    reading = _reading(pipeline, images)
    if reading is not None:
      probes['storage'] = Probe(reading)
  for probe in probes.values():
    probe.start()
  found: dict[str, list[float]] = {name: [] for name in probes}
  found['input_cpu'] = []
  names = list(probes)
  for turn in range(rounds):
    start = turn % len(names)
    for name in (*names[start:], *names[:start]):
      wall, cpu = probes[name].measure()
      found[name].append(wall)
      if name == 'input':
        found['input_cpu'].append(cpu)
  facts = {
    'images': images,
    'cores': len(os.sched_getaffinity(0)),
    'shared': 'CPU' in devices[0],
    'num_devices': len(devices),
    'flops': 3 * 2 * model.num_macs * images,
    'product_flops': 2 * MATRIX**3,
  }
  return {name: values for name, values in found.items() if values}, facts


def times_of(found: Measured, facts: Mapping[str, Any]) -> diagnosis.Times:
  """The parts, of what was measured."""
  took = {name: statistics.median(values) for name, values in found.items()}
  parts = {
    'transfer': took['transfer'],
    'compute': min(took.get('alone', took['loop']), took['loop']),
    'host': max(0.0, took['step'] - took['loop']),
  }
  if 'alone' in took:
    parts['communication'] = took['loop'] - parts['compute']
  if 'input' in took:
    parts['decode'] = min(took['input'], took['input_cpu'] / facts['cores'])
    # Records that can't be read alone: where the pipeline waits, it waits for them.
    waits = took['input'] if took['input'] > 2 * parts['decode'] else 0.0
    parts['storage'] = took.get('storage', waits)
  return diagnosis.Times(parts, facts['shared'])


def _stepping(steps: Iterator[Any]) -> Callable[[int], object]:
  def run(count: int) -> float:
    *_, last = itertools.islice(steps, count)
    return float(last.loss)  # waits for it

  return run


def _taking(dataset: Any, batches_a_step: int) -> Callable[[int], object]:
  iterator = iter(dataset)

  def run(count: int) -> None:
    for _ in range(count * batches_a_step):
      next(iterator)

  return run


def _copying(batch: Sequence[Any], devices: Sequence[str]) -> Callable[[int], object]:
  import tensorflow as tf

  def run(count: int) -> None:
    for _ in range(count):
      for device in devices:
        with tf.device(device):
          for tensor in batch:
            tf.identity(tensor)
    tf.test.experimental.sync_devices()

  return run


def _multiplying(devices: Sequence[str], precision: str) -> Callable[[int], object]:
  import tensorflow as tf

  dtype = {'fp16': tf.float16, 'bf16': tf.bfloat16}.get(precision, tf.float32)
  with tf.device(devices[0]):
    matrix = tf.ones([MATRIX, MATRIX], dtype)

  def run(count: int) -> None:
    with tf.device(devices[0]):
      for _ in range(count):
        product = tf.matmul(matrix, matrix)
    product[0, 0].numpy()

  return run


def _reading(pipeline: Any, images: int) -> Callable[[int], object] | None:
  """Reads as many undecoded records as a step has images, in the way of the pipeline's source."""
  import tensorflow as tf

  from hpm.pipelines import order, sources

  source = getattr(pipeline, 'source', None)
  if not isinstance(source, sources.Stream):
    return None
  count = len(source.files)
  read = tf.data.Dataset.range(count).repeat()
  read = read.interleave(
    source.read,
    cycle_length=min(count, source.cycle_length),
    num_parallel_calls=min(count, source.cycle_length, order.MAX_READERS),
    deterministic=True,
  )
  batches = iter(read.batch(_READ).prefetch(2))

  def run(count: int) -> None:
    for path in source.files:
      with contextlib.suppress(OSError), open(path, 'rb') as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(-(-count * images // _READ)):
      next(batches)

  return run


def _table(found: Measured, facts: Mapping[str, Any], times: diagnosis.Times) -> Any:
  images = facts['images']
  table = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0))
  table.add_column('part')
  for column in ('ms a step', 'images/s', 'gain without it'):
    table.add_column(column, justify='right', no_wrap=True)
  gains = times.gains()
  for name in diagnosis.PARTS:
    took = times.parts.get(name)
    if took is None:
      continue
    rate = f'{images / took:,.0f}' if took > 1e-6 else ''
    gain = gains.get(name)
    shown = '' if gain is None else f'{gain:.0%}' if gain < 10 else f'{gain:,.0f} times'
    table.add_row(name, f'{took * 1e3:.2f}', rate, shown)
  table.add_section()
  predicted = times.step()
  measured = measured_step(found)
  table.add_row('a step, predicted', f'{predicted * 1e3:.2f}', f'{images / predicted:,.0f}', '')
  table.add_row('a step, measured', f'{measured * 1e3:.2f}', f'{images / measured:,.0f}', '')
  product = facts['product_flops'] / statistics.median(found['product'])
  step = facts['flops'] / statistics.median(found['step'])
  many = 1 if facts['shared'] else facts['num_devices']
  table.caption = (
    f'matrix product {product / 1e9:,.0f} GFLOP/s on a device; the step reaches '
    f'{step / product / many:.0%} of it'
  )
  return table


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
