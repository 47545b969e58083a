"""All processes of a cluster on this machine: started, heard, told to stop, and never left behind.

Each is the same command with --job_name, --task_index, --worker_hosts and --ps_hosts in place of
--local_cluster, on loopback ports that are free; or with its own --job_name and --task_index in
place of --job_name=host. Their lines come out with the task in front.
"""

from collections.abc import Mapping, Sequence
import ctypes
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time
from typing import IO

from benchmarks import flags, machine, watching
from benchmarks.loop import say
from hpm.cluster import listening

__all__ = ['ALONE_S', 'Group', 'STOPPING_S', 'TOLD_S', 'commands', 'run']

# A process that hears of a death ends within 15 s; then it is told to, and then it is ended.
ALONE_S = 20.0
TOLD_S = 10.0
STOPPING_S = 60.0  # after a signal: for a checkpoint
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl  # looked up here: little is safe between fork and exec


def run(arguments: Sequence[str], options: flags.Options) -> int:
  """Starts all tasks and waits for them.

  Args:
    arguments: of the command.
    options: the same, parsed, with `local_cluster`.

  Returns:
    The worst exit code of all; a process that a signal ended counts as 128 plus its number. One
    that failed by itself is worse than one that another's death has ended.
  """
  program = str(Path(__file__).with_name('run.py'))
  group = Group(lasting=not options.cross_replica_sync)
  with group:
    for task, (command, environment) in commands(arguments, options, dict(os.environ)).items():
      own = {**environment, machine.STARTED_BY: str(os.getpid())}
      group.start(task, [sys.executable, program, *command], own)
    return group.wait()


def commands(
  arguments: Sequence[str], options: flags.Options, environment: Mapping[str, str]
) -> dict[str, tuple[list[str], dict[str, str]]]:
  """Task -> its arguments and its environment; a GPU belongs to one worker alone."""
  local = flags.cluster.local_tasks(options)
  common, kind = [*arguments], options.device
  if local is None:
    tasks = flags.cluster.of_host(options)
  else:
    kind = kind or 'cpu'
    ports = listening.free_ports(local.num_workers + local.num_ps + 1)
    hosts = [f'127.0.0.1:{port}' for port in ports]
    servers = ','.join(hosts[local.num_workers : -1])
    common += [
      *('--local_cluster=', f'--device={kind}', f'--heartbeat_port={ports[-1]}'),
      f'--worker_hosts={",".join(hosts[: local.num_workers])}',
      *([f'--ps_hosts={servers}'] if servers else []),
    ]
    tasks = [f'worker:{i}' for i in range(local.num_workers)]
    tasks += [f'ps:{i}' for i in range(local.num_ps)]
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  gpus = [str(i) for i in range(1024)] if visible is None else visible.split(',')
  found: dict[str, tuple[list[str], dict[str, str]]] = {}
  for number, task in enumerate(tasks):  # workers come first
    job, _, index = task.partition(':')
    own, each = dict(environment), options.num_gpus
    if job == 'ps' and kind != 'cpu':
      own['CUDA_VISIBLE_DEVICES'] = ''
    elif kind != 'cpu' and each is not None:
      own['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[number * each : (number + 1) * each])
    found[task] = ([*common, f'--job_name={job}', f'--task_index={index}'], own)
  return found


class Group:
  """The processes; none of them outlives the context.

  Args:
    lasting: whether a worker other than the chief may die without the others having to end.
  """

  def __init__(self, lasting: bool):
    self._lasting = lasting
    self._processes: dict[str, subprocess.Popen] = {}
    self._readers: list[threading.Thread] = []
    self._signals: list[int] = []
    self._before: dict[int, object] = {}
    self._writing = threading.Lock()

  def __enter__(self) -> 'Group':
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._before[number] = signal.signal(number, lambda n, _: self._signals.append(n))
    return self

  def __exit__(self, *_: object) -> None:
    for process in self._processes.values():
      if process.poll() is None:
        process.kill()
    for process in self._processes.values():
      process.wait()
    for reader in self._readers:
      reader.join(5)
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def start(self, task: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    process = subprocess.Popen(
      command,
      env=dict(environment),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors='replace',
      process_group=0,  # a terminal's Ctrl-C comes to this process alone, which passes it on
      preexec_fn=_die_with_parent,
    )
    self._processes[task] = process

  def wait(self) -> int:
    """Waits for all, passing lines and signals on; ends those that stay when others are gone."""
    for task, process in self._processes.items():
      for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        reader = threading.Thread(target=self._pass_on, args=[task, stream, out], daemon=True)
        reader.start()
        self._readers.append(reader)
    told: float | None = None  # when the rest was told to end
    until: float | None = None  # when it is
    while running := [task for task, one in self._processes.items() if one.poll() is None]:
      while self._signals:
        number = self._signals.pop(0)
        self._send(running, number)
        until = min(until or float('inf'), time.monotonic() + STOPPING_S)
      if until is None and self._must_end():
        until = time.monotonic() + ALONE_S
      if until is not None and time.monotonic() > until:
        if told is None:
          say(f'Notice: {", ".join(running)} did not end by itself: told to')
          self._send(running, signal.SIGTERM)
          told, until = time.monotonic(), time.monotonic() + TOLD_S
        else:
          say(f'Notice: {", ".join(running)} did not end when told to: killed')
          self._send(running, signal.SIGKILL)
          until = None
      time.sleep(0.05)
    codes = {task: _exit_code(process) for task, process in self._processes.items()}
    worst = max(codes.values(), key=_severity)
    if worst:
      ends = ', '.join(f'{task} {_ended(process)}' for task, process in self._processes.items())
      print(f'local cluster: {ends}', file=sys.stderr, flush=True)
    return worst

  def _must_end(self) -> bool:
    """Whether some process is gone without which the others have nothing left to do."""
    for task, process in self._processes.items():
      code = process.poll()
      if code is None:
        continue
      if task == 'worker:0':
        return True
      if code != 0 and not (self._lasting and task.startswith('worker')):
        return True
    return False

  def _send(self, tasks: Sequence[str], number: int) -> None:
    for task in tasks:
      self._processes[task].send_signal(number)

  def _pass_on(self, task: str, stream: IO[str], out: IO[str]) -> None:
    for line in stream:
      with self._writing:
        try:
          print(f'[{task}] {line.rstrip()}', file=out, flush=True)
        except BrokenPipeError:  # nobody reads on; the process may still write
          continue


def _die_with_parent() -> None:
  """In the child: the kernel kills it when this process is gone, however that came."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code(process: subprocess.Popen) -> int:
  code = process.returncode
  return code if code >= 0 else 128 - code


def _severity(code: int) -> tuple[int, int]:
  """Told to end, then ended for another's sake, then failed by itself, then killed or crashed."""
  if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
    return 1, code
  if code == watching.EXIT_CODE:
    return 2, code
  return (3 if code < 128 else 4) if code else 0, code


def _ended(process: subprocess.Popen) -> str:
  code = process.returncode
  return f'ended with code {code}' if code >= 0 else f'killed by {signal.Signals(-code).name}'
