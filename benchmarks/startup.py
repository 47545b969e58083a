"""What a step costs before it runs, and what it costs the host each time, in one command.

  python -m benchmarks.startup                                       # ResNet-50 and -152
  python -m benchmarks.startup --models=resnet50 --counts=1,8 --traced=64 --repeats=5
  python -m benchmarks.startup --overhead --json=overhead.json       # of each step, on the host
  python -m benchmarks.startup --first_step --batch_size=8           # of the whole command run.py

Start-up: every cell is a process of its own; the cells take turns, so that a minute in which the
machine is slow is slow for all. `variables` is the making of the step and all its variables,
`trace` the building of its graph, `first step` everything from there to the first step's loss:
TensorFlow's own passes over the graph, and the step itself. CPU seconds, because they hardly depend
on what else the machine does; wall time stands beside them in the JSON file. Given are medians, and
half the distance between the extremes. `of one` compares with the same model on one device.

--first_step: from the start of the command `benchmarks/run.py` to the end of its first step, in
wall time, and how much of it was the import of TensorFlow.

--overhead: on four devices with 160 small variables. `graph` is the time of a step inside a loop in
the graph (`steps_per_call`), where the host does nothing for it; `run` that of `TrainStep.run`, a
call for each step whose metrics nobody reads, `bare` that of its traced function called with the
same tensors. The two are taken by turns.

Exit code: 0 done; 2 flags that can't work.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from pathlib import Path
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import flags
import rich.box
import rich.console
import rich.table

from benchmarks import command, files, machine
from hpm import errors, models, variable_mgr
from hpm.errors import UsageError

__all__ = ['main', 'spread']


NUM_DEVICES, NUM_VARIABLES = 4, 160  # of --overhead

console = rich.console.Console()


# The workers' side.


def start_up(model_name: str, count: int, batch_size: int, manager: str, runs: bool) -> Any:
  """One cell: seconds of CPU and wall time by phase."""
  import hpm

  devices = hpm.devices.select('cpu', count)
  model = hpm.models.create(model_name)
  images = {'image_size': model.image_shape[0], 'num_classes': model.num_classes}
  dataset = hpm.pipelines.create('synthetic', batch_size=batch_size, **images).dataset()
  clock = _Clock()
  step = hpm.TrainStep(
    model,
    hpm.variable_mgr.create(manager, devices),
    hpm.optimizers.create('momentum', learning_rate=0.1),
    weight_decay=4e-5,
  )
  clock.lap('variables')
  step.trace(dataset)
  clock.lap('trace')
  if runs:
    float(next(step.run(dataset)).loss)
    clock.lap('first step')
  return {**clock.laps, 'peak_mib': machine.peak_rss_mib()}


def overhead(rounds: int, steps: int) -> dict[str, list[float]]:
  """Seconds a step of each kind of call, one figure a round."""
  import tensorflow as tf

  import hpm

  def network(b, images):
    x = b.dense('in', b.flatten(images), 8)
    for i in range(NUM_VARIABLES // 2 - 2):
      x = x + b.dense(f'layer_{i}', x, 8)
    return b.dense('out', x, 8)

  devices = hpm.devices.select('cpu', NUM_DEVICES)
  model = hpm.models.Model(network, name='small', image_shape=(2, 2, 3), num_classes=8)
  step = hpm.TrainStep(
    model,
    hpm.variable_mgr.create('replicated', devices),
    hpm.optimizers.create('momentum', learning_rate=1e-3),
  )
  batch = (tf.zeros([2, 2, 2, 3], tf.uint8), tf.zeros([2], tf.int64))
  dataset = tf.data.Dataset.from_tensors(batch).repeat()
  one, many = step.run(dataset), step.run(dataset, steps_per_call=steps)
  bare = step.trace(dataset)
  iterator = iter(dataset)
  staged = [tuple(map(tf.identity, batch)) for _ in devices]

  def take(running: Any) -> None:
    for _ in range(steps):
      metrics = next(running)
    float(metrics.loss)

  def call() -> None:
    tensors = staged
    for _ in range(steps):
      metrics, tensors, _ = bare(iterator, tensors)
    float(metrics.loss)

  contenders: dict[str, Callable[[], None]] = {
    'graph': lambda: take(many),
    'run': lambda: take(one),
    'bare': call,
  }
  times: dict[str, list[float]] = {name: [] for name in contenders}
  for i in range(rounds + 1):  # the first one warms up
    names = list(contenders)
    for name in names[i % 3 :] + names[: i % 3]:
      begun = time.perf_counter()
      contenders[name]()
      if i:
        times[name].append((time.perf_counter() - begun) / steps)
  return times


class _Clock:
  """Seconds of CPU and wall time from lap to lap."""

  def __init__(self) -> None:
    self.laps: dict[str, dict[str, float]] = {}
    self._last = time.process_time(), time.perf_counter()

  def lap(self, name: str) -> None:
    now = time.process_time(), time.perf_counter()
    self.laps[name] = {'cpu_s': now[0] - self._last[0], 'wall_s': now[1] - self._last[1]}
    self._last = now


# The parent's side.


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Measures and prints; 2 for flags that can't work."""
  if arguments and arguments[0] == 'worker':
    print(json.dumps(WORKERS[arguments[1]](*map(json.loads, arguments[2:]))))
    return 0
  options = parse(arguments)
  if options.overhead:
    result = measure_overhead(options)
    show_overhead(result)
  elif options.first_step:
    result = measure_first_step(options)
    show_first_step(result)
  else:
    result = measure(options)
    show(result)
  if options.json:
    files.write(options.json, json.dumps({'machine': machine.describe(), **result}, indent=2))
  return 0


def parse(arguments: Sequence[str]) -> Any:
  values = flags.FlagValues()
  flags.DEFINE_list('models', ['resnet50', 'resnet152'], 'Which.', flag_values=values)
  flags.DEFINE_list('counts', ['1', '2', '4', '8'], 'Of devices.', flag_values=values)
  flags.DEFINE_list('traced', ['64'], 'Of devices, without a step.', flag_values=values)
  flags.DEFINE_integer('batch_size', 1, 'Images per device.', 1, flag_values=values)
  flags.DEFINE_string('manager', 'replicated', 'Variable manager.', flag_values=values)
  flags.DEFINE_integer('repeats', 3, 'Processes a cell, or rounds.', 1, flag_values=values)
  flags.DEFINE_integer('steps', 100, 'Of --overhead, a round.', 1, flag_values=values)
  flags.DEFINE_bool('overhead', False, 'The host, step by step.', flag_values=values)
  flags.DEFINE_bool('first_step', False, 'The whole of run.py.', flag_values=values)
  flags.DEFINE_string('json', None, 'Where to write the figures.', flag_values=values)
  command.parse(values, arguments)
  if values.overhead and values.first_step:
    raise UsageError('--overhead and --first_step are two measurements: give one of them')
  if not values.models:
    raise UsageError('--models= is empty: name one, or leave the flag out')
  for name in values.models:
    models.check_name(name, '--models')
  if values.manager not in variable_mgr.VARIABLE_MANAGERS:
    raise errors.unknown('--manager', values.manager, variable_mgr.VARIABLE_MANAGERS)
  for flag in ('counts', 'traced'):
    for count in values[flag].value:
      if not count.isdigit() or not int(count):
        raise UsageError(f'--{flag}={count}: numbers of devices are needed, as in 1,8')
  return values


def measure(options: Any) -> dict[str, Any]:
  """Every cell in a process of its own, `repeats` times, by turns."""
  counts = [(int(count), True) for count in options.counts]
  counts += [(int(count), False) for count in options.traced if count not in options.counts]
  cells = [(model, count, runs) for model in options.models for count, runs in counts]
  found: dict[tuple[str, int], list[Any]] = {}
  for i in range(options.repeats):
    for model, count, runs in cells:
      with console.status(f'round {i + 1} of {options.repeats}: {model} on {count} devices'):
        cell = (model, count, options.batch_size, options.manager, runs)
        one = _work(f'{model} on {count} devices', 'start_up', *cell)
      found.setdefault((model, count), []).append(one)
  return {
    'batch_size': options.batch_size,
    'manager': options.manager,
    'cells': [
      {'model': model, 'devices': count, 'runs': runs} for (model, count), runs in found.items()
    ],
  }


def show(result: Mapping[str, Any]) -> None:
  table = rich.table.Table(
    title=f'{result["manager"]}, batch {result["batch_size"]}, CPU seconds',
    title_justify='left',
    box=rich.box.SIMPLE,
    padding=(0, 1, 0, 0),
  )
  for column in ('model', 'devices', 'variables', 'trace', 'of one', 'first step', 'peak MiB'):
    table.add_column(column, justify='left' if column == 'model' else 'right', no_wrap=True)
  ones: dict[str, float] = {}
  for cell in result['cells']:
    runs = cell['runs']
    trace = statistics.median(run['trace']['cpu_s'] for run in runs)
    if cell['devices'] == 1:
      ones[cell['model']] = trace
    one = ones.get(cell['model'])
    table.add_row(
      cell['model'],
      str(cell['devices']),
      *(_figure(runs, phase) for phase in ('variables', 'trace')),
      '' if one is None else f'{trace / one:.2f}',
      _figure(runs, 'first step'),
      f'{statistics.median(run["peak_mib"] for run in runs):.0f}',
    )
  console.print(table)


def measure_first_step(options: Any) -> dict[str, Any]:
  """Wall seconds of `run.py` until its first step is done, from the start of the command."""
  cells = [(model, int(count)) for model in options.models for count in options.counts]
  found: dict[tuple[str, int], list[Any]] = {}
  for i in range(options.repeats):
    for model, count in cells:
      with (
        console.status(f'round {i + 1} of {options.repeats}: {model} on {count} devices'),
        tempfile.TemporaryDirectory() as folder,
      ):
        path = Path(folder) / 'result.json'
        driver = ['benchmarks/run.py', f'--result_json={path}', '--num_batches=1']
        driver += [f'--model={model}', f'--num_gpus={count}', '--device=cpu']
        driver += [f'--batch_size={options.batch_size}', '--num_warmup_batches=0']
        begun = time.perf_counter()
        command.work(f'{model} on {count} devices', driver)
        whole = time.perf_counter() - begun
        step = json.loads(path.read_text())['time_to_first_step_s']
      found.setdefault((model, count), []).append({'first_step_s': step, 'command_s': whole})
  return {
    'batch_size': options.batch_size,
    'cells': [
      {'model': model, 'devices': count, 'runs': runs} for (model, count), runs in found.items()
    ],
  }


def show_first_step(result: Mapping[str, Any]) -> None:
  table = rich.table.Table(
    title=f'run.py, batch {result["batch_size"]}, seconds', title_justify='left'
  )
  for column in ('model', 'devices', 'first step, by run.py', 'whole command of one step'):
    table.add_column(column, justify='left' if column == 'model' else 'right')
  for cell in result['cells']:
    figures = [spread([run[key] for run in cell['runs']]) for key in ('first_step_s', 'command_s')]
    table.add_row(
      cell['model'],
      str(cell['devices']),
      *(f'{middle:.2f} +/- {half:.2f}' for middle, half in figures),
    )
  console.print(table)


def measure_overhead(options: Any) -> dict[str, Any]:
  with console.status('steps by turns'):
    return {
      'times_s': _work('overhead', 'overhead', options.repeats, options.steps),
      'steps': options.steps,
    }


def show_overhead(result: Mapping[str, Any]) -> None:
  table = rich.table.Table(
    title=f'{NUM_DEVICES} devices, {NUM_VARIABLES} variables, ms a step', title_justify='left'
  )
  for column in ('', 'ms', '+/-', 'over the graph'):
    table.add_column(column, justify='right' if column else 'left')
  times = result['times_s']
  for name, own in times.items():
    middle, half = spread(own)
    over = statistics.median(a - b for a, b in zip(own, times['graph'], strict=True))
    table.add_row(name, f'{middle * 1e3:.2f}', f'{half * 1e3:.2f}', f'{over * 1e3:.2f}')
  console.print(table)


def spread(values: Sequence[float]) -> tuple[float, float]:
  """Median, and half the distance between the extremes."""
  return statistics.median(values), (max(values) - min(values)) / 2


def _figure(runs: Sequence[Mapping[str, Any]], phase: str) -> str:
  if phase not in runs[0]:
    return ''
  middle, half = spread([run[phase]['cpu_s'] for run in runs])
  return f'{middle:.2f} +/- {half:.2f}'


def _work(label: str, worker: str, *arguments: Any) -> Any:
  """A worker's answer, from a process of its own; `label` is what an error calls it."""
  texts = [json.dumps(argument) for argument in arguments]
  return json.loads(command.work(label, ['-m', 'benchmarks.startup', 'worker', worker, *texts]))


WORKERS: dict[str, Callable[..., Any]] = {'start_up': start_up, 'overhead': overhead}


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
