"""The end of a run that has stopped moving, with the stage that it is blocked in.

A thread looks at what the main thread is doing. Where nothing has moved for --stall_timeout_s, it
asks each part of a step whether it answers: the input pipeline for a batch, the devices for a copy,
the servers of the other tasks for a connection, the kernel for the files that threads are blocked
in. Nothing is counted or timed for it while a run is well.
"""

from __future__ import annotations  # hpm.EvalStep in a signature would import TensorFlow

from collections.abc import Callable, Iterator, Mapping
import contextlib
import faulthandler
import os
import threading
import time
from typing import Any, NamedTuple

from benchmarks import blocked
from hpm.cluster.watchdog import Stages

__all__ = ['EXIT_CODE', 'Place', 'Run', 'Watchdog', 'watched']

EXIT_CODE = 4  # of a process that has stopped moving
ANSWER_S = 5.0  # for each part to answer
OTHERS_S = 20.0  # for another worker to say that it is the one
# Stages that may take their time, as long as the processor is at work in them. The first step
# traces and compiles.
_LONG = ('start', 'evaluation', 'step 1')
_UNWATCHED = ('service', 'end')  # others are waited for there, who are watched themselves
_IDLE = 0.1  # cores in use, up to which a process is taken for blocked
_POLLS = 20  # looks within a timeout


class Place(NamedTuple):
  """Where a run is blocked.

  Attributes:
    stage: data, staging, collective, parameter server, checkpoint, start, or computing.
    reason: how that is known, and of whom.
    certain: False where another worker is waited for, who may know more.
  """

  stage: str
  reason: str
  certain: bool = True

  def __str__(self) -> str:
    return f'{self.stage}: {self.reason}'


class Run:
  """What of a run can be asked, by its watchdog, when it has stopped moving.

  Args:
    source: its data, in words.
    directory: of its checkpoints.
    servers: other task -> 'host:port' of its server, of those that a step needs.
    doing: gives other task -> what it was doing when last heard of.
  """

  def __init__(
    self,
    source: str,
    directory: str | None = None,
    servers: Mapping[str, str] | None = None,
    doing: Callable[[], Mapping[str, str]] = dict,
  ):
    self._source, self._directory = source, directory
    self._servers, self._doing = dict(servers or {}), doing
    self.steps: list[Any] = []  # what runs, `hpm.TrainStep` or `EvalStep`, the newest last

  def waits_for_others(self) -> bool:
    """Whether another worker is at something that all wait for and that may take long."""
    workers = [what for task, what in self._doing().items() if task in self._servers]
    return any(what.startswith(('evaluation', 'checkpoint', 'start')) for what in workers)

  def place(self, stage: str) -> Place:
    """Where it is blocked. Takes a batch from its data, so the run can't go on afterwards."""
    held = blocked.files()
    home = self._directory and os.path.abspath(self._directory) + os.sep
    written = {
      path: call for path, call in held.items() if home and f'{path}{os.sep}'.startswith(home)
    }
    if written or stage.startswith('checkpoint'):
      return Place('checkpoint', f'{self._directory} takes no more{_listed(written or held)}')
    step = self._asked(stage)
    part = step.blocked(ANSWER_S) if step is not None else ''
    if part == 'data' or (held and step is None):
      return Place('data', f'{self._source} gives no batch{_listed(held)}')
    if part:
      return Place('staging', f'no batch arrives at {", ".join(step.manager.devices)}')
    silent = _unanswering(self._servers, ANSWER_S)
    for kind, job in (('parameter server', 'ps:'), ('collective', 'worker:')):
      tasks = [f'{task} ({self._servers[task]})' for task in silent if task.startswith(job)]
      if tasks:
        verb = 'does' if len(tasks) == 1 else 'do'
        return Place(kind, f'{" and ".join(tasks)} {verb} not answer')
    if self._servers:
      others = ', '.join(f'{task} in {what}' for task, what in sorted(self._doing().items()))
      return Place(
        'collective', f'all tasks answer, and data and devices here; last heard: {others}', False
      )
    if step is None:
      return Place('start', 'nothing is computed, and no file waited for')
    return Place('computing', f'data and devices answer, {", ".join(step.manager.devices)}')

  def _asked(self, stage: str) -> Any:
    """What runs in that stage."""
    if stage.startswith('start') or not self.steps:
      return None
    return self.steps[-1 if stage.startswith('evaluation') else 0]


class Watchdog:
  """Calls `stalled` once nothing has moved for too long.

  A first step, an evaluation and the start may take any time while the processor is at work. A
  process that was stopped itself, with its machine perhaps, counts its time from when it woke.

  Args:
    stages: what the main thread does.
    timeout_s: so long nothing may move.
    stalled: called in this thread with the stage, and for how long nothing has moved.
    patient: whether somebody is waited for who may take long.
    clock, cpu: seconds on the wall, and of this process on all cores.
  """

  def __init__(
    self,
    stages: Stages,
    timeout_s: float,
    stalled: Callable[[str, float], None],
    patient: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
  ):
    self._stages, self._timeout_s = stages, timeout_s
    self._stalled, self._patient = stalled, patient
    self._clock, self._cpu = clock, cpu
    self.interval_s = min(1.0, timeout_s / _POLLS)
    self._reset()
    self._looked_at = clock()

  def run(self, over: threading.Event) -> None:
    """Looks again and again until `over` is set or `stalled` has been called."""
    while not over.wait(self.interval_s):
      if self.look():
        return

  def look(self) -> bool:
    """Looks once; whether that was the end."""
    now, used = self._clock(), self._cpu()
    # Threads are late at times; a pause of the whole process is no standstill of its parts.
    passed = min(now - self._looked_at, 3 * self.interval_s)
    self._looked_at = now
    stage = ' '.join(self._stages.current()[:2]).rstrip()
    moved = self._stages.changes != self._changes or stage.startswith(_UNWATCHED)
    if moved or self._patient():
      self._reset()
      return False
    self._still_s += passed
    if self._still_s < self._timeout_s:
      return False
    long = stage.startswith(_LONG[:2]) or stage == _LONG[2]
    if long and used - self._used > _IDLE * self._still_s:
      self._reset()
      return False
    self._stalled(stage, self._still_s)
    return True

  def _reset(self) -> None:
    self._changes, self._still_s, self._used = self._stages.changes, 0.0, self._cpu()


@contextlib.contextmanager
def watched(
  run: Run,
  stages: Stages,
  timeout_s: float,
  end: Callable[[str], None],
) -> Iterator[None]:
  """Ends the process if the run in it stops moving.

  Args:
    run, stages: whose.
    timeout_s: 0 watches nothing.
    end: ends the process, with its line; called in the watchdog's thread after Python's stacks have
      been written to stderr.
  """
  if not timeout_s:
    yield
    return
  stderr = os.dup(2)

  def stalled(stage: str, seconds: float) -> None:
    os.write(stderr, f'{stage} has not moved for {seconds:.0f} s; what Python does:\n'.encode())
    faulthandler.dump_traceback(stderr)
    place = run.place(stage)
    if not place.certain:
      time.sleep(OTHERS_S)
    end(f'stalled in {stage} (--stall_timeout_s={timeout_s:g}): {place}')

  over = threading.Event()
  dog = Watchdog(stages, timeout_s, stalled, run.waits_for_others)
  thread = threading.Thread(target=dog.run, args=[over], name='watchdog', daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()


def _unanswering(servers: Mapping[str, str], within_s: float) -> list[str]:
  """The tasks whose server says nothing; of a stopped one the kernel still takes connections."""
  import grpc

  channels = {
    task: grpc.insecure_channel(address, [('grpc.enable_http_proxy', 0)])
    for task, address in servers.items()
  }
  ready = {task: grpc.channel_ready_future(channel) for task, channel in channels.items()}
  until = time.monotonic() + within_s
  while time.monotonic() < until and not all(one.done() for one in ready.values()):
    time.sleep(0.05)
  return [task for task, one in ready.items() if not one.done()]


def _listed(held: Mapping[str, str]) -> str:
  return (
    f' ({", ".join(f"{call} of {path} does not end" for path, call in held.items())})'
    if held
    else ''
  )
