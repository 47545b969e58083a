"""How long a step takes over processes, mode by mode, beside TensorFlow's own ways to do the same.

  python -m benchmarks.cluster                                  # 2 workers x 2 devices, 1 ps
  python -m benchmarks.cluster --contenders=distributed_replicated --contenders=parameter_server

The variables of a model (`--model`) are trained by a gradient that costs next to nothing, so a step
is what the mode costs: transfers, sums, updates. All processes share this machine and its loopback
interface. Contenders run one after the other, `--rounds` times; given are the median of all steps
and half the distance between the quartiles.

  MB         that a step moves between processes, by the formula that tests hold to counted bytes
  first step seconds from the start of a process to the end of its first step
  overlapped share of the step that is hidden behind gradients that take `--backprop_ms` to come,
             one after the other, without a processor: 1 - (step with them - backprop_ms) / step
  of twin    time over that of TensorFlow's own

Exit code: 0 done; 1 a contender failed; 2 flags that can't work.
"""

from collections.abc import Sequence
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
from typing import Any

from absl import flags
import rich.console
import rich.table

from benchmarks import command, files, machine
from benchmarks.cluster_worker import CONTENDERS, MIRRORED, STRATEGY, SYNC_REPLICAS, Cheap
from hpm import errors, models
from hpm.cluster import listening

__all__ = ['TWINS', 'main', 'measure', 'shared_bytes']

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 150.0
_WAITING = 4  # threads beside the cores', for the towers that wait
TWINS = {
  'parameter_server, 1 device': SYNC_REPLICAS,
  'distributed_replicated, 1 device': SYNC_REPLICAS,
  'parameter_server, asynchronous, 1 device': STRATEGY,
  'collective_all_reduce, 1 device': MIRRORED,
}


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """The command line."""
  values = _define()
  command.parse(values, arguments)
  models.check_name(values.model, '--model')
  chosen = values.contenders or list(CONTENDERS)
  for name in chosen:
    if name not in CONTENDERS:
      raise errors.unknown('--contenders', name, CONTENDERS)
  figures: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
  for _ in range(values.rounds):
    for name in chosen:
      figures[name].append(_figures(name, values))
  result = _summary(figures, values)
  _show(result, values)
  if values.json:
    files.write(values.json, json.dumps({'machine': machine.describe(), 'steps': result}, indent=2))
  return 0


def _figures(contender: str, values: Any) -> dict[str, Any]:
  """What `measure` finds, and `behind_s`: of the steps behind a backprop that takes its time."""
  size = (values.model, values.num_workers, values.num_ps, values.steps)
  found = measure(contender, *size)
  if values.backprop_ms and contender != STRATEGY:  # whose workers run no Python
    found['behind_s'] = measure(contender, *size, backprop_ms=values.backprop_ms)['seconds']
  return found


def measure(
  contender: str,
  model: str,
  num_workers: int,
  num_ps: int,
  steps: int,
  warmup: int = 2,
  backprop_ms: float = 0.0,
) -> dict[str, Any]:
  """`seconds` of the chief's steps and `first_s`, of one group of processes.

  Raises:
    command.Failed: one of them has ended with an error, or not in time.
  """
  servers = 0 if _collective(contender) else num_ps
  num_workers += contender == STRATEGY  # whose chief computes nothing
  ports = listening.free_ports(num_workers + servers)
  hosts = [f'127.0.0.1:{port}' for port in ports]
  settings = {
    **{'contender': contender, 'model': model, 'steps': steps, 'warmup': warmup},
    **{'worker_hosts': hosts[:num_workers], 'ps_hosts': hosts[num_workers:]},
    'num_devices': 1 if contender.endswith('1 device') else 2,
    'backprop_ms': backprop_ms,
  }
  tasks = [f'worker:{i}' for i in range(num_workers)] + [f'ps:{i}' for i in range(servers)]
  environment = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '2'}
  if backprop_ms:  # what waits keeps a thread of TensorFlow's, and a machine of two cores has two
    environment.setdefault('TF_NUM_INTEROP_THREADS', str(_WAITING + (os.cpu_count() or 1)))
  started = {
    task: subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.cluster_worker', json.dumps({'task': task, **settings})],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for task in tasks
  }
  try:
    out, err = started['worker:0'].communicate(timeout=TIMEOUT_S)
  except subprocess.TimeoutExpired:
    raise command.Failed(f'{contender}: not done after {TIMEOUT_S:g} s') from None
  finally:
    for process in started.values():
      process.kill()
      process.wait()
  if started['worker:0'].returncode:
    lines = [line for line in err.splitlines() if 'Error' in line] or ['no message']
    raise command.Failed(f'{contender}: {lines[-1]}')
  return json.loads(out.splitlines()[-1])


def shared_bytes(contender: str, num_workers: int) -> float:
  """Bytes that a step moves between processes, over those of the variables."""
  return 2.0 * (num_workers - 1) if _collective(contender) else 2.0 * num_workers


def _collective(contender: str) -> bool:
  return 'collective' in contender or contender == MIRRORED


def _summary(figures: dict[str, list[dict[str, Any]]], values: Any) -> dict[str, dict[str, float]]:
  import hpm

  shapes = Cheap(hpm.models.create(values.model)).shapes
  size = 4 * sum(_product(shape) for shape in shapes.values())
  result: dict[str, dict[str, float]] = {}
  for name, runs in figures.items():
    seconds = sorted(s for run in runs for s in run['seconds'])
    quartiles = statistics.quantiles(seconds, n=4)
    result[name] = {
      'step_ms': 1e3 * statistics.median(seconds),
      'spread_ms': 1e3 * (quartiles[2] - quartiles[0]) / 2,
      'moved_mb': shared_bytes(name, values.num_workers) * size / 1e6,
      'first_step_s': statistics.median(run['first_s'] for run in runs),
    }
    behind = [1e3 * s for run in runs for s in run.get('behind_s', ())]
    if behind:
      exposed = statistics.median(behind) - values.backprop_ms
      result[name]['overlapped'] = 1.0 - exposed / result[name]['step_ms']
  for name, twin in TWINS.items():
    if name in result and twin in result:
      result[name]['of_twin'] = result[name]['step_ms'] / result[twin]['step_ms']
  return result


def _product(shape: Sequence[int]) -> int:
  product = 1
  for length in shape:
    product *= length
  return product


def _show(result: dict[str, dict[str, float]], values: Any) -> None:
  table = rich.table.Table(
    title=f'{values.num_workers} workers, {values.num_ps} ps, the variables of {values.model}, '
    f'{values.rounds} x {values.steps} steps'
  )
  table.add_column('contender')
  for column in ('ms a step', '+/-', 'MB', 'first step s', 'overlapped', 'of twin'):
    table.add_column(column, justify='right')
  for name, row in result.items():
    twin = f'{row["of_twin"]:.2f}' if 'of_twin' in row else ''
    overlapped = f'{row["overlapped"]:.0%}' if 'overlapped' in row else ''
    table.add_row(
      name,
      f'{row["step_ms"]:.0f}',
      f'{row["spread_ms"]:.0f}',
      f'{row["moved_mb"]:.0f}',
      f'{row["first_step_s"]:.1f}',
      overlapped,
      twin,
    )
  rich.console.Console().print(table)


def _define() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string('model', 'resnet50', 'Whose variables.', flag_values=values)
  flags.DEFINE_integer('num_workers', 2, 'Workers.', lower_bound=2, flag_values=values)
  flags.DEFINE_integer('num_ps', 1, 'Parameter servers.', lower_bound=1, flag_values=values)
  flags.DEFINE_integer('steps', 8, 'Timed steps of a run.', lower_bound=2, flag_values=values)
  flags.DEFINE_integer('rounds', 2, 'Runs of each contender.', lower_bound=1, flag_values=values)
  flags.DEFINE_float(
    'backprop_ms', 0.0, 'See overlapped; 0 leaves it out.', lower_bound=0.0, flag_values=values
  )
  flags.DEFINE_multi_string('contenders', None, 'Default: all.', flag_values=values)
  flags.DEFINE_string('json', None, 'A file for the figures.', flag_values=values)
  return values


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
