"""A long training with evaluations and checkpoints: does it hold on to anything, does it slow down?

  python -m benchmarks.soak
  python -m benchmarks.soak --num_steps=100000 --every=1000 --variable_update=parameter_server
  python -m benchmarks.soak --data_dir=DIR --model=resnet18 --num_gpus=8 --soak_json=soak.json

Starts benchmarks/run.py, evaluates and saves every --every steps, and looks at that process from
outside midway between two evaluations. Flags that are not its own go to the driver; without
--data_dir it trains lenet on a small set of photographs that it writes first.

The driver is started with MALLOC_ARENA_MAX=2 unless the environment has a number: threads spread
over more arenas of glibc for some 6,000 steps, which a leak could not be told from.

Held to limits, from step 1,000 on (or a tenth of all, if that comes sooner):

  memory       resident, the median of the last ten looks beside that of the first: 3 % more at most
  descriptors  in the last third never more than at some time in the first: how many files are read
               at a look varies, a leak would not stop
  threads      the same
  throughput   CPU time a step, the medians of the last and the first third: 5 % apart at most.
               Wall time is told beside it: neighbours take some of it.

Exit code: 0 all hold; 1 one does not, or the training failed; 2 flags that can't work.
"""

from collections.abc import Sequence
import itertools
import json
import os
from pathlib import Path
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags

from benchmarks import command
from hpm.errors import UsageError

__all__ = ['Limit', 'Look', 'held', 'main', 'settled', 'train']

SETTLED = 1000  # steps after which nothing may grow
MEMORY, DRIFT = 0.03, 0.05
LOOKS = 10  # that a median of memory is taken over
_DEFAULTS = ('--model=lenet', '--device=cpu', '--num_gpus=2', '--batch_size=2')


class Look(NamedTuple):
  """What the process was seen to have.

  Attributes:
    step: that had just ended.
    seconds, cpu_s: on the wall since the first step, and of the process on all cores.
    resident: bytes.
    descriptors, threads: how many.
  """

  step: int
  seconds: float
  cpu_s: float
  resident: int
  descriptors: int
  threads: int


class Limit(NamedTuple):
  """One of the limits.

  Attributes:
    name: what of the process.
    found: what it was, in words.
    holds: whether that is within the limit.
  """

  name: str
  found: str
  holds: bool


def look(pid: int, step: int, begun: float) -> Look:
  """At a process of Linux.

  Raises:
    OSError: it has gone.
  """
  home = Path(f'/proc/{pid}')
  fields = (home / 'stat').read_text().rpartition(')')[2].split()
  ticks = int(fields[11]) + int(fields[12])
  return Look(
    step,
    time.monotonic() - begun,
    ticks / os.sysconf('SC_CLK_TCK'),
    int((home / 'statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE'),
    len(os.listdir(home / 'fd')),
    int(fields[17]),
  )


def train(arguments: Sequence[str], num_steps: int, every: int, directory: str) -> list[Look]:
  """Runs the driver, with a look midway between two evaluations.

  Raises:
    command.Failed: the training did.
  """
  run = [
    *(sys.executable, str(command.ROOT / 'benchmarks' / 'run.py')),
    *(f'--num_batches={num_steps}', '--num_warmup_batches=0', f'--display_every={every // 2}'),
    *(f'--save_model_steps={every}', f'--eval_during_training_every_n_steps={every}'),
    *(f'--train_dir={directory}/train', '--max_ckpts_to_keep=2', *arguments),
  ]
  found: list[Look] = []
  with (
    open(f'{directory}/errors', 'w+') as errors,
    subprocess.Popen(
      run,
      env={'MALLOC_ARENA_MAX': '2', **os.environ},
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
    ) as process,
  ):
    begun = time.monotonic()
    assert process.stdout is not None
    try:
      for line in process.stdout:
        match = re.match(r'(\d+)\timages/sec', line)
        if match and int(match[1]) % every == every // 2:
          found.append(look(process.pid, int(match[1]), begun))
    finally:
      if process.poll() is None and sys.exc_info()[0] is not None:
        process.terminate()
    code = process.wait()
    errors.seek(0)
    if code:
      words = errors.read().strip().splitlines() or [f'ended with {code}']
      raise command.Failed(f'the training: {words[-1].removeprefix("error: ")}')
  return found


def settled(looks: Sequence[Look], num_steps: int) -> list[Look]:
  """Those that the limits are about."""
  start = min(SETTLED, num_steps // 10)
  return [one for one in looks if one.step > start]


def held(looks: Sequence[Look]) -> list[Limit]:
  """The limits, from looks at equal distances of steps."""
  count = min(LOOKS, len(looks) // 2)
  first, last = (
    statistics.median(one.resident for one in part) for part in (looks[:count], looks[-count:])
  )
  grown = last / first - 1
  limits = [
    Limit(
      'memory', f'{first / 2**20:.1f} MiB, then {last / 2**20:.1f}: {grown:+.2%}', grown < MEMORY
    )
  ]
  third = max(1, len(looks) // 3)
  for name in ('descriptors', 'threads'):
    early, late = ([getattr(one, name) for one in part] for part in (looks[:third], looks[-third:]))
    limits.append(Limit(name, f'{_range(early)}, then {_range(late)}', max(late) <= max(early)))
  cpu, wall = [_drift(looks, name) for name in ('cpu_s', 'seconds')]
  steps = looks[-1].step - looks[0].step
  rate = steps / (looks[-1].seconds - looks[0].seconds)
  limits.append(
    Limit(
      'throughput',
      f'{rate:.1f} steps/s with evaluations and checkpoints; from the first to the last third '
      f'{cpu:+.1%} CPU time a step, {wall:+.1%} wall time',
      abs(cpu) <= DRIFT,
    )
  )
  return limits


def _range(values: Sequence[int]) -> str:
  return ' to '.join(map(str, dict.fromkeys((min(values), max(values)))))


def _drift(looks: Sequence[Look], name: str) -> float:
  values = [getattr(one, name) for one in looks]
  parts = [after - before for before, after in itertools.pairwise(values)]
  third = max(1, len(parts) // 3)
  return statistics.median(parts[-third:]) / statistics.median(parts[:third]) - 1


def _with_data(arguments: Sequence[str], directory: str) -> list[str]:
  """The driver's flags, with data and a model where there are none among them."""
  given = {argument.partition('=')[0] for argument in arguments}
  if given & {'--data_dir', '--data_name', '--data_service'}:
    return list(arguments)
  data = f'{directory}/sample'
  command.work('the sample', ['-m', 'hpm.pipelines', 'sample', '--num_images=80', f'--out={data}'])
  defaults = [one for one in _DEFAULTS if one.partition('=')[0] not in given]
  return [*defaults, f'--data_dir={data}', *arguments]


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Trains, looks and prints; the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_integer('num_steps', 20000, 'Steps of the training.', flag_values=values)
  flags.DEFINE_integer('every', 200, 'Steps between evaluations.', flag_values=values)
  flags.DEFINE_string('soak_json', None, 'File for all looks.', flag_values=values)
  own = [one for one in arguments if one.partition('=')[0].lstrip('-') in values]
  command.parse(values, own)
  num_steps, every = values['num_steps'].value, values['every'].value
  if every < 2 or every % 2:
    raise UsageError(f'--every={every}: an even number is needed, for the looks midway')
  if num_steps < 10 * every:
    raise UsageError(f'--num_steps={num_steps}: ten times --every={every} or more is needed')
  if not os.path.isdir('/proc/self/fd'):
    raise UsageError('this looks at processes in /proc, which only Linux has')
  rest = [one for one in arguments if one not in own]
  with tempfile.TemporaryDirectory() as directory:
    rest = _with_data(rest, directory)
    looks = train(rest, num_steps, every, directory)
  limits = held(settled(looks, num_steps))
  if path := values['soak_json'].value:
    Path(path).write_text(json.dumps([one._asdict() for one in looks], indent=1))
  _print(limits, looks, num_steps, every)
  return 0 if all(limit.holds for limit in limits) else 1


def _print(limits: Sequence[Limit], looks: Sequence[Any], num_steps: int, every: int) -> None:
  print(
    f'{num_steps} steps in {looks[-1].seconds:.0f} s, an evaluation and a checkpoint every {every}'
  )
  for name, found, holds in limits:
    print(f'{name:12} {"holds" if holds else "FAILS"}  {found}')


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
