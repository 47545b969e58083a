"""Clusters from the environment that a process was started in: TF_CONFIG, and Slurm's variables.

Both are read here without TensorFlow, so that what can't work is refused before it is imported.
TF_CONFIG means what it means to `tf.distribute.cluster_resolver.TFConfigClusterResolver`. Of Slurm
only the variables are used: TensorFlow's `SlurmClusterResolver` fails without GPUs, sorts the nodes
by name while Slurm counts the tasks in its own order (node10 before node2), and puts several tasks
of a job on the first node before it comes to the second.
"""

from collections.abc import Mapping
import json
import re
from typing import Any

from hpm.cluster import spec
from hpm.cluster.spec import Cluster
from hpm.errors import UsageError

__all__ = ['slurm', 'tf_config']


def tf_config(environment: Mapping[str, str]) -> Cluster | None:
  """The cluster of the variable TF_CONFIG; None if it is not set or names no cluster.

  The chief, if it has a job of its own there, is worker 0, and the workers follow it.

  Raises:
    UsageError: it is no JSON of that form, or names what is no task of a training.
  """
  text = environment.get('TF_CONFIG', '')
  if not text.strip():
    return None
  try:
    config = json.loads(text)
    jobs: dict[str, Any] = dict(config.get('cluster') or {})
    task = dict(config.get('task') or {})
    kind, index = task.get('type'), int(task.get('index', 0))
  except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
    raise UsageError(
      f'TF_CONFIG is no JSON of a cluster and a task ({error}): such as {{"cluster": {{"worker": '
      '["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
    ) from None
  if not jobs:
    return None
  for name in jobs:
    if name not in ('chief', 'evaluator', *spec.JOBS):
      raise UsageError(f'TF_CONFIG names a job {name!r}: chief, worker and ps are known')
  if kind is None:
    raise UsageError('TF_CONFIG has a cluster but no task: add {"type": "worker", "index": 0}')
  if kind == 'evaluator':
    raise UsageError(
      'TF_CONFIG makes this process an evaluator, which is no task of a training here: '
      'evaluate its checkpoints by a command of its own'
    )
  chiefs = _hosts(jobs, 'chief')
  if len(chiefs) > 1:
    raise UsageError(f'TF_CONFIG has {len(chiefs)} chiefs: there can be one')
  if kind == 'worker':
    index += len(chiefs)
  elif kind == 'chief':
    if not chiefs or index != 0:
      raise UsageError(f'TF_CONFIG makes this process chief {index}, and names {len(chiefs)}')
    kind = 'worker'
  return Cluster(str(kind), index, chiefs + _hosts(jobs, 'worker'), _hosts(jobs, 'ps'))


def slurm(environment: Mapping[str, str], *, num_ps: int = 0, port: int = 2222) -> Cluster:
  """The cluster of the Slurm step that this process is a task of.

  All tasks of the step take part. Roles go round the nodes, whatever Slurm's distribution: first
  every node's first task, then every node's second, and so on; workers first, then parameter
  servers. So with two tasks a node, half of them parameter servers, each node has a worker and a
  parameter server.

  Args:
    environment: with SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID, SLURM_LOCALID,
      which `srun` sets (https://slurm.schedmd.com/srun.html, output environment variables).
    num_ps: how many of the tasks are parameter servers.
    port: of the first task on each node; the next has the next.

  Raises:
    UsageError: this is no task of a Slurm step, or it has no more than `num_ps` tasks.
  """
  nodes = spec.parse_hosts(_variable(environment, 'SLURM_STEP_NODELIST'))
  counts = _counts(_variable(environment, 'SLURM_STEP_TASKS_PER_NODE'))
  if len(nodes) != len(counts):
    raise UsageError(
      f'Slurm names {len(nodes)} nodes (SLURM_STEP_NODELIST) and tasks on {len(counts)} '
      '(SLURM_STEP_TASKS_PER_NODE)'
    )
  places = [
    (node, local)
    for local in range(max(counts, default=0))
    for node in range(len(nodes))
    if local < counts[node]
  ]
  own = (_number(environment, 'SLURM_NODEID'), _number(environment, 'SLURM_LOCALID'))
  if own not in places:
    raise UsageError(f'Slurm has no task {own[1]} on node {own[0]}: is this a step of another job?')
  num_workers = len(places) - num_ps
  if num_workers < 1:
    raise UsageError(
      f'{num_ps} parameter servers of {len(places)} tasks in this Slurm step leave no worker: '
      'start more tasks (srun --ntasks), or fewer parameter servers'
    )
  hosts = tuple(f'{nodes[node]}:{port + local}' for node, local in places)
  rank = places.index(own)
  job, index = ('worker', rank) if rank < num_workers else ('ps', rank - num_workers)
  return Cluster(job, index, hosts[:num_workers], hosts[num_workers:])


def _hosts(jobs: Mapping[str, Any], job: str) -> tuple[str, ...]:
  hosts = given = jobs.get(job) or ()
  if isinstance(hosts, dict) and all(i.isdecimal() and len(i) < 10 for i in hosts):
    hosts = [hosts[index] for index in sorted(hosts, key=int)]  # sparse, as TensorFlow allows
  if not isinstance(hosts, (list, tuple)) or not all(isinstance(host, str) for host in hosts):
    raise UsageError(f'TF_CONFIG: the hosts of {job} are {given!r}: a list of host:port is needed')
  return tuple(hosts)


def _variable(environment: Mapping[str, str], name: str) -> str:
  if name not in environment:
    raise UsageError(f'{name} is not set, so this is no task of a Slurm step: start it by srun')
  return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
  text = _variable(environment, name)
  if not text.isdecimal() or len(text) > 9:
    raise UsageError(f'{name}={text}: Slurm sets it to a number')
  return int(text)


def _counts(text: str) -> list[int]:
  """'2(x3),1' -> [2, 2, 2, 1]."""
  counts = []
  for part in text.split(','):
    match = re.fullmatch(r'([0-9]+)(?:\(x([0-9]+)\))?', part)
    if not match:
      raise UsageError(f'SLURM_STEP_TASKS_PER_NODE={text}: such as 2(x3),1 is expected')
    if len(match[1]) > 4 or len(match[2] or '') > 5:
      raise UsageError(f'SLURM_STEP_TASKS_PER_NODE={text}: more tasks than any step has')
    counts += int(match[2] or 1) * [int(match[1])]
  return counts
