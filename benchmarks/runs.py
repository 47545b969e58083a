"""Several runs of one command, each in a process of its own, and what they say together.

Times are averaged, not rates: the images of all timed steps over their seconds. A mean of rates
would weigh a fast run too much.
"""

from collections.abc import Mapping, Sequence
import os
from pathlib import Path
import signal
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import loop, results, speed
from benchmarks.loop import say
from benchmarks.saving import Stopped
from hpm.errors import DataError, UsageError

__all__ = ['Refused', 'combined', 'repeated']

# Of the last run, which stand for all; the rest is combined.
_COMMON = (
  'machine',
  'flags',
  'model',
  'num_parameters',
  'devices',
  'batch_size_per_device',
  'batch_size_global',
  'num_warmup_steps',
  'peak_gpu_mib',
  'image_bytes',
  'skipped_records',
)


class Refused(UsageError):
  """A run found that its flags can't work on these devices, and has said so itself."""


def repeated(
  arguments: Sequence[str], num_runs: int, record: dict[str, Any], stop: Sequence[int] = ()
) -> None:
  """Runs the command so often, passes its lines on, and puts the combined result into `record`.

  Args:
    arguments: of the command.
    num_runs: how often.
    record: see above.
    stop: not empty as soon as no further run may start (see `process.terminations`).

  Raises:
    Refused: these devices can't do what the flags ask for.
    loop.RunError: a run failed; those before it are measurements of nothing.
    Stopped: a run was told to stop, or this process between two of them.
  """
  done = []
  with tempfile.TemporaryDirectory() as directory:
    for number in range(1, num_runs + 1):
      if stop:
        raise Stopped(f'stopped by SIGTERM before run {number} of {num_runs}')
      say(f'Run {number} of {num_runs}')
      path = os.path.join(directory, f'{number}.json')
      code = _run([*arguments, '--num_runs=1', f'--result_json={path}'])
      try:
        result = results.read(path)
      except DataError as error:
        raise loop.RunError(f'run {number} of {num_runs} ended with code {code}') from error
      if result['status'] == 'stopped':
        raise Stopped(f'run {number} of {num_runs}: {result["reason"]}')
      if code == 2:
        raise Refused(result['reason'].removeprefix('UsageError: '))
      if result['status'] != 'ok':
        raise loop.RunError(f'run {number} of {num_runs}: {result["reason"]}')
      done.append(result)
  record |= combined(done)
  rates = ', '.join(f'{run["images_per_second"]:.2f}' for run in record['runs'])
  spread = record['runs_spread']
  say(f'Runs: {rates} images/sec; standard deviation {spread["standard_deviation"]:.2f}')
  say(speed.summary(record['images_per_second']))


def combined(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """One result of several runs: the steps of all, and the rate of each beside them.

  Args:
    done: results of status 'ok'.
  """
  timed = speed.Speed()
  for result in done:
    for seconds, images in zip(result['step_seconds'], result['step_images'], strict=True):
      timed.add(seconds, images)
  rates = [result['images_per_second'] for result in done]
  # A run is one observation: steps within it have the same memory, threads and neighbours.
  times = [1.0 / rate for rate in rates]
  warnings = [
    f'run {number}: {warning}'
    for number, result in enumerate(done, 1)
    for warning in result.get('warnings', [])
  ]
  total_images = sum(sum(result['step_images']) for result in done)
  wall = sum(result['loop_wall_s'] for result in done)
  record = {
    **{name: done[-1][name] for name in _COMMON if name in done[-1]},
    **loop.throughput(timed),
    'images_per_second_total': total_images / wall,
    'images_per_second_interval': speed.interval(times, 1.0),
    'loop_wall_s': wall,
    'losses': [loss for result in done for loss in result.get('losses', [])],
    'warnings': warnings,
    'runs': [
      {
        'images_per_second': result['images_per_second'],
        'images_per_second_total': result['images_per_second_total'],
        'num_steps': len(result['step_seconds']),
        'time_to_first_step_s': result['time_to_first_step_s'],
      }
      for result in done
    ],
    'runs_spread': {
      'lowest': min(rates),
      'highest': max(rates),
      'standard_deviation': statistics.stdev(rates) if len(rates) > 1 else 0.0,
    },
  }
  for name, combine in (('cpu_s', sum), ('peak_rss_mib', max), ('time_to_first_step_s', max)):
    record[name] = combine(result[name] for result in done)
  return record


def _run(arguments: Sequence[str]) -> int:
  """One run, whose lines are passed on but for the last; it ends with this process.

  Returns:
    Its exit code.
  """
  program = str(Path(__file__).with_name('run.py'))
  command = [sys.executable, program, *arguments]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
      for line in child.stdout or ():
        if not line.startswith(('Result: ', 'Published: ')):  # the one of a file that won't stay
          say(line.rstrip('\n'))
      return child.wait()
    except BaseException:  # an interrupt: on a terminal the child has got it too
      child.send_signal(signal.SIGINT)
      child.wait()
      raise
    finally:
      signal.signal(signal.SIGTERM, before)
