"""A task of a training for the tests of the modes: a real process, which goes through some cases.

  python training.py '{"task": "worker:0", "worker_hosts": [...], "cases": [...], ...}'

A case names a mode, its options, an optimizer and the sizes of the batches that all towers of all
workers get in each step. Each worker writes down what it saw of it, <case>-<worker>.npz; the chief
the values at the end as well.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np

import hpm
from hpm.cluster import heartbeat
from hpm.cluster.spec import Cluster

NUM_DEVICES = 2
QUIET_S = 2.0


def main() -> int:
  settings = json.loads(sys.argv[1])
  job, _, index = settings['task'].partition(':')
  cluster = Cluster(
    job, int(index), tuple(settings['worker_hosts']), tuple(settings.get('ps_hosts', ()))
  )

  def end(death: heartbeat.Death) -> None:
    print(death, flush=True)
    os._exit(3)

  with heartbeat.Watch(cluster, on_death=end, timeout_s=60.0, startup_timeout_s=300.0) as watch:
    watch.wait_for_all()
    if job == 'ps':
      from hpm.cluster import server

      server.start(cluster)
      watch.wait_for_end()
      return 0
    runtime = None
    for number, case in enumerate(settings['cases']):
      # A server for all cases, and in each a graph, a session and variables of its own.
      runtime = hpm.cluster.join(cluster, NUM_DEVICES, container=f'case{number}', after=runtime)
      started = time.monotonic()
      run_case(runtime, case, os.path.join(settings['out'], f'{number}-{index}.npz'))
      print(f'{case["mode"]}: {time.monotonic() - started:.1f} s', flush=True)
      runtime.close()
    print(f'done at {time.monotonic():.1f}', flush=True)
  return 0


def run_case(runtime: Any, case: dict[str, Any], path: str) -> None:
  from tests.cluster import cases

  with runtime.scope():
    manager = hpm.variable_mgr.create(
      case['mode'], runtime.devices, **runtime.options, **case.get('options', {})
    )
    step = cases.create_step(case, manager)
  training = runtime.training(step)
  training.begin()
  steps = training.run(
    cases.dataset(case, runtime.cluster), case.get('num_steps'), case.get('steps_per_call', 1)
  )
  metrics, received, evaluated = [], [], {}
  for step in steps:
    metrics.append(step)
    if case.get('reached') == [runtime.cluster.task_index, len(metrics)]:
      training.reached = True
    if runtime.cluster.is_chief and len(metrics) == case.get('evaluate_after'):
      evaluated = training.eval_step().evaluate(cases.validation())
    if runtime.cluster.is_chief and len(metrics) in case.get('count_bytes_after', ()):
      received.append(settled_bytes())
  if 'count_bytes_after' in case:
    np.savez(path, received=np.array(received))
    return
  saved = {
    'losses': np.array([m.loss for m in metrics]),
    'steps': np.array([int(m.step) for m in metrics]),
    'num_samples': np.array([int(m.num_samples) for m in metrics]),
    'own_samples': np.array([int(m.own_samples) for m in metrics]),
    'consumed': np.array(training.consumed),
    **{f'evaluated/{name}': np.array(value) for name, value in evaluated.items()},
    **{f'copy/{name}': value for name, value in cases.own_copies(runtime, manager).items()},
  }
  if runtime.cluster.is_chief:
    time.sleep(case.get('pause_s', 0.0))
    saved |= {f'values/{name}': value for name, value in training.snapshot().items()}
  np.savez(path, **saved)


def settled_bytes() -> int:
  """`loopback_bytes`, when the others have come as far as they can without this process."""
  before, now = -1, loopback_bytes()
  while now - before > 1 << 16:  # heartbeats go on
    time.sleep(QUIET_S)
    before, now = now, loopback_bytes()
  return now


def loopback_bytes() -> int:
  """What the loopback interface of this network namespace has carried."""
  with open('/proc/net/dev') as table:
    (line,) = (line for line in table if line.strip().startswith('lo:'))
  return int(line.split()[1])


if __name__ == '__main__':
  sys.exit(main())
