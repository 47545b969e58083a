"""Several processes that train one model: which of them this one is, and how they are started."""

import os
import re
from typing import NamedTuple

from absl import flags

from benchmarks.flags import evaluation, profile
from hpm import errors
from hpm.cluster import resolve, spec
from hpm.cluster.spec import Cluster
from hpm.errors import UsageError

TITLE = 'Cluster (several processes, docs/cluster.md)'

# --variable_update -> whether it keeps variables on parameter servers.
MODES = {
  'parameter_server': True,
  'distributed_replicated': True,
  'collective_all_reduce': False,
}
RESOLVERS = ('tf_config', 'slurm')
HOST = 'host'  # of --job_name
_EXPLICIT = ('job_name', 'task_index', 'worker_hosts', 'ps_hosts')
_SLURM = ('num_ps', 'cluster_port')
_TUNING = ('heartbeat_port', 'heartbeat_timeout_s', 'cluster_timeout_s')
# What one process alone does -> why, and what to do instead.
_ALONE = {
  'eval': 'evaluates a checkpoint, which one process does: drop the flags of the cluster, or '
  f'evaluate on the way by --{evaluation.WHEN[1]}=1',
  'forward_only': 'moves nothing between processes: measure it in one',
  'num_runs': 'starts processes of its own, and those of a cluster wait for one another: repeat '
  'the command instead',
  **dict.fromkeys(
    (*profile.FILES, 'profile_dir'),
    'is of the steps of one process: drop it, or profile one worker by itself, without a cluster',
  ),
}


class Local(NamedTuple):
  """Tasks to start on this machine.

  Attributes:
    num_workers: at least 1.
    num_ps: 0 or more.
  """

  num_workers: int
  num_ps: int


def define(values: flags.FlagValues) -> None:
  def string(name: str, text: str) -> None:
    flags.DEFINE_string(name, None, text, flag_values=values)

  string(
    'job_name',
    'worker or ps: what this process is. host: it starts all tasks on the host of worker '
    '--task_index, each in a process of its own. Default: worker, if --task_index is set.',
  )
  flags.DEFINE_integer(
    'task_index',
    None,
    'Which of the hosts of its job this process is, from 0. Worker 0 is the chief.',
    flag_values=values,
  )
  string(
    'worker_hosts',
    'host:port of each worker, by commas, the same for all processes; ranges as in '
    'node[0-7]:2222 are expanded. Default: no cluster.',
  )
  string('ps_hosts', 'The same of each parameter server. Default: none.')
  flags.DEFINE_boolean(
    'cross_replica_sync',
    True,
    'parameter_server across processes: all workers make a step together. false: each applies its '
    'gradients when it has them. Default: true.',
    flag_values=values,
  )
  string(
    'cluster_resolver',
    f'{", ".join(RESOLVERS)}: the cluster stands in the environment, in TF_CONFIG or in the '
    'variables of a Slurm step. Default: tf_config if TF_CONFIG is set, otherwise the flags above.',
  )
  flags.DEFINE_integer(
    'num_ps',
    0,
    'Of --cluster_resolver=slurm: how many of its tasks are parameter servers. Default: 0.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'cluster_port',
    2222,
    "Of --cluster_resolver=slurm: the port of each node's first task; the next has the next. "
    'Default: 2222.',
    flag_values=values,
  )
  string(
    'local_cluster',
    'As in workers:2,ps:1: start that many processes on this machine with the flags of this '
    'command, each with devices of its own (--device=cpu unless it is given; --device=gpu needs '
    '--num_gpus, of each worker).',
  )
  flags.DEFINE_integer(
    'heartbeat_port',
    None,
    'Where worker 0 hears whether all others live. Default: its own port + 1000.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'heartbeat_timeout_s',
    10.0,
    'A task of which nothing has been heard for so long counts as dead, a process of the '
    '--data_service too. Default: 10.',
    flag_values=values,
  )
  flags.DEFINE_float(
    'cluster_timeout_s',
    120.0,
    'All tasks must have come this long after the start of the first. Default: 120.',
    flag_values=values,
  )


def check(options) -> None:
  for name in ('heartbeat_timeout_s', 'cluster_timeout_s'):
    if not getattr(options, name) > 0:
      raise UsageError(f'{options.spelled(name)}: seconds above 0 are needed')
  if options.heartbeat_port is not None and not 1 <= options.heartbeat_port <= 65535:
    raise UsageError(f'{options.spelled("heartbeat_port")}: a port lies in 1 .. 65535')
  if options.cluster_resolver != 'slurm':
    options.refuse_given(_SLURM, 'is about --cluster_resolver=slurm: add that, or drop this')
  elif options.num_ps < 0:
    raise UsageError(f'{options.spelled("num_ps")}: 0 or more is needed')
  there = local_tasks(options) or cluster(options)
  if there is None:
    _check_alone(options)
    return
  if starts_host(options) and options.device != 'cpu' and options.num_gpus is None:
    workers = [task for task in of_host(options) if task.startswith('worker:')]
    if len(workers) > 1:
      raise UsageError(
        f'{options.spelled("job_name")} starts {" and ".join(workers)}, which share its GPUs: add '
        '--num_gpus, of each, or --device=cpu'
      )
  _check_mode(options, there)


def complete(options) -> None:
  del options


def cluster(options, environment: dict[str, str] | None = None) -> Cluster | None:
  """The cluster that this process is a task of; None for a process that trains alone.

  Args:
    options: the flags.
    environment: by default this process's.

  Raises:
    UsageError: flags or environment name no cluster that can work, or contradict each other.
  """
  environment = dict(os.environ) if environment is None else environment
  by_flags = _by_flags(options)
  resolver = options.cluster_resolver
  if resolver is not None and resolver not in RESOLVERS:
    raise errors.unknown('--cluster_resolver', resolver, RESOLVERS)
  named = 'TF_CONFIG'
  if resolver == 'slurm':
    named = 'the Slurm step'
    found = resolve.slurm(environment, num_ps=options.num_ps, port=options.cluster_port)
  else:
    found = resolve.tf_config(environment)
    if found is None and resolver is not None:
      raise UsageError(
        f'--cluster_resolver={resolver}: TF_CONFIG is not set, or names no cluster: set it, or '
        'give --worker_hosts, --job_name and --task_index'
      )
  if by_flags is not None and found is not None and by_flags != found:
    raise UsageError(
      f'the flags make this {by_flags.task} of {_described(by_flags)}, but {named} makes it '
      f'{found.task} of {_described(found)}: drop one of them'
    )
  chosen = by_flags or found
  if chosen is None:
    return None
  if by_flags is None and resolver is None and len(chosen.tasks) == 1:
    return None  # some platforms set TF_CONFIG for every process, a lone one too
  port = options.heartbeat_port or 0
  try:
    return Cluster(chosen.job_name, chosen.task_index, chosen.worker_hosts, chosen.ps_hosts, port)
  except UsageError as error:
    raise UsageError(f'--heartbeat_port={port}: {error}') from None


def local_tasks(options) -> Local | None:
  """What --local_cluster asks for; None without it."""
  return _local_tasks(options) if options.local_cluster else None


def tasks(options) -> Local | None:
  """How many tasks the cluster of the flags has; None for a process that trains alone."""
  there = local_tasks(options) or cluster(options)
  return None if there is None else Local(there.num_workers, there.num_ps)


def starts_host(options) -> bool:
  """Whether this command starts all tasks of a host."""
  return options.job_name == HOST


def of_host(options) -> list[str]:
  """The tasks that a command for a host starts."""
  there = cluster(options)
  host = spec.parse_address(there.address, there.task).host
  return [
    task for task in there.tasks if spec.parse_address(there.address_of(task), task).host == host
  ]


def num_together(options) -> int:
  """Workers whose batches make one step."""
  there = tasks(options)
  return there.num_workers if there is not None and options.cross_replica_sync else 1


def num_apart(options) -> int:
  """Workers that make steps of their own, all of which one counter counts."""
  there = tasks(options)
  return 1 if there is None or options.cross_replica_sync else there.num_workers


def shared(options) -> dict[str, str]:
  """Flag -> value of what all processes must have been started with alike."""
  differing = {
    *_EXPLICIT,
    *('local_cluster', 'cluster_resolver', 'result_json', 'data_dir', 'train_dir'),
    *('heartbeat_port', 'device', 'num_gpus', 'display_every', 'data_service'),
  }
  return {
    f'--{name}': str(value)
    for name, value in sorted(options.given.items())
    if name not in differing
  }


def _by_flags(options) -> Cluster | None:
  given = [name for name in _EXPLICIT if getattr(options, name) is not None]
  if not given:
    return None
  if options.worker_hosts is None:
    raise UsageError(
      f'{options.spelled(given[0])} is about a cluster: give --worker_hosts, the host:port of each '
      'worker, as well'
    )
  if options.task_index is None:
    raise UsageError(
      f'{options.spelled("worker_hosts")}: which of them is this process? Give --task_index (and '
      '--job_name=ps for a parameter server), or start all here by --local_cluster=workers:2'
    )
  if options.job_name not in (None, HOST, *spec.JOBS):
    raise errors.unknown('--job_name', options.job_name, (*spec.JOBS, HOST))
  workers = spec.parse_hosts(options.worker_hosts)
  servers = spec.parse_hosts(options.ps_hosts or '')
  try:
    job = 'worker' if starts_host(options) else options.job_name or 'worker'
    return Cluster(job, options.task_index, workers, servers)
  except UsageError as error:
    raise UsageError(f'--job_name, --task_index, --worker_hosts, --ps_hosts: {error}') from None


def _local_tasks(options) -> Local:
  text = options.local_cluster
  options.refuse_given(
    (*_EXPLICIT, 'cluster_resolver', *_SLURM, 'heartbeat_port'),
    f'has no effect with --local_cluster={text}, which chooses hosts and ports: drop one',
  )
  if resolve.tf_config(dict(os.environ)) is not None:
    raise UsageError(
      f'--local_cluster={text} starts a cluster of its own, but TF_CONFIG makes this process a '
      'task of one: unset TF_CONFIG, or drop the flag'
    )
  match = re.fullmatch(r'workers?:([0-9]+)(?:,ps:([0-9]+))?', text)
  if not match or int(match[1]) < 1:
    raise UsageError(
      f'--local_cluster={text}: workers:N or workers:N,ps:M is needed, such as workers:2,ps:1'
    )
  if options.device == 'gpu' and options.num_gpus is None:
    raise UsageError(
      f'--local_cluster={text} --device=gpu: add --num_gpus, the GPUs of each worker'
    )
  return Local(int(match[1]), int(match[2] or 0))


def _check_alone(options) -> None:
  mode = options.variable_update
  served = {'heartbeat_timeout_s'} if options.data_service is not None else set()
  options.refuse_given(
    [name for name in _TUNING if name not in served],
    'is about a cluster, and this process trains alone: drop it, or add --worker_hosts',
  )
  options.refuse_given(
    ['cross_replica_sync'],
    'is about parameter_server across processes, and this one trains alone: drop it, or add '
    '--local_cluster=workers:2,ps:1 or --worker_hosts',
  )
  if mode in MODES and mode != 'parameter_server':
    ps = ',ps:1' if MODES[mode] else ''
    raise UsageError(
      f'--variable_update={mode} needs several processes: --local_cluster=workers:2{ps} starts '
      'them here, --worker_hosts, --job_name and --task_index make this process one of them'
    )


def _check_mode(options, there: Cluster | Local) -> None:
  mode = options.variable_update
  if mode not in MODES:
    raise UsageError(
      f'--variable_update={mode} trains in one process, and this is a cluster: use '
      f'--variable_update={" or ".join(MODES)}'
    )
  servers = there.num_ps
  flag = f'--variable_update={mode}'
  if isinstance(there, Cluster):
    if MODES[mode]:
      there.require_ps(flag)
    else:
      there.refuse_ps(flag)
  elif MODES[mode] != bool(servers):
    raise UsageError(
      f'--local_cluster={options.local_cluster}: {flag} '
      + (
        'keeps its variables on parameter servers: such as workers:2,ps:1'
        if MODES[mode]
        else 'has no use for parameter servers: such as workers:2'
      )
    )
  if not options.cross_replica_sync and options.fp16_enable_auto_loss_scale:
    raise UsageError(
      '--cross_replica_sync=false --fp16_enable_auto_loss_scale: asynchronous workers have no '
      'common gradient to decide on: use --fp16_loss_scale'
    )
  if mode != 'parameter_server':
    options.refuse_given(
      ['cross_replica_sync'],
      f'has no effect with {flag}, which is always synchronous: drop it',
    )
  for name, why in _ALONE.items():
    options.refuse_given([name], f'does not go with a cluster: it {why}')
  if not options.cross_replica_sync:
    options.refuse_given(
      ['stop_at_top_1_accuracy'],
      'needs a step that all workers end with, and asynchronous ones have none: drop it, or '
      '--cross_replica_sync=false',
    )
  if MODES[mode]:
    options.refuse_given(
      ['steps_per_call'],
      f'does not go with {flag} over parameter servers: each step is one run of a session there, '
      'which has no loop in the graph: drop it, or use --variable_update=collective_all_reduce',
    )


def _described(cluster: Cluster) -> str:
  servers = f' and ps {",".join(cluster.ps_hosts)}' if cluster.ps_hosts else ''
  return f'workers {",".join(cluster.worker_hosts)}{servers}'
