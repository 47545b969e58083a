"""Who of a cluster is still alive: found out beside TensorFlow, in seconds, in every process.

Every task keeps one TCP connection to the chief (worker 0, `Cluster.heartbeat_address`), and both
ends say each second that they are there. The chief tells everybody who has joined, left or died, so
each knows of all, at one connection a task; without the chief no training goes on, so a chief that
is gone is the end of it in any case.

- A process that is killed loses its connection at once: its death is known within a second.
- One that is stopped or hung, a machine that is off or a cut wire, sends nothing: known after
  `timeout_s`.
- One that never comes, or can't reach the chief: known after `startup_timeout_s`.
- One that fails says so, with its reason, before it ends.
- One that has finished says so as well (`Watch.leave`), and is missed by nobody.

The thread that does this runs whatever the main thread is blocked in, and TensorFlow may still be
loading. What is sent is one JSON object a line. There is no authentication, as in TensorFlow's own
runtime: whoever reaches the port can end the training. It belongs in a private network.
"""

from __future__ import annotations  # a context manager that returns itself

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import Any
import uuid

from hpm.cluster import listening
from hpm.cluster.spec import Cluster, parse_address
from hpm.cluster.wire import Line, Pacer
from hpm.errors import UsageError

__all__ = ['Death', 'PeerError', 'Watch']

_PROTOCOL = 1
_FRESH_S = 5.0  # age up to which what a task says of itself holds
_GOODBYE_S = 3.0  # for the last words of both ends
_BROKEN = 'has died: its connection broke'
_OTHERWISE = 'was started otherwise than worker:0'


@dataclasses.dataclass(frozen=True)
class Death:
  """A task that is gone, or can't take part.

  Attributes:
    task: such as 'worker:1'.
    kind: 'lost', its connection broke; 'silent', it doesn't answer; 'failed', it has ended with an
      error; 'absent', it never came; 'refused', it was started otherwise than the chief.
    reason: in words, as what follows the task's name.
    doing: what it was doing when last heard of; '' if unknown.
  """

  task: str
  kind: str
  reason: str
  doing: str = ''

  def __str__(self) -> str:
    last = f' (last seen in {self.doing})' if self.doing else ''
    return f'{self.task} {self.reason}{last}'


class PeerError(RuntimeError):
  """The cluster can't go on: another task is dead. `death` says which, and how it is known."""

  def __init__(self, death: Death):
    super().__init__(str(death))
    self.death = death


class Watch:
  """Watches all tasks of a cluster while the context lasts, and is watched by them.

    with heartbeat.Watch(cluster, on_death=report, what=stages.what) as watch:
      watch.wait_for_all()
      ...                     # start TensorFlow's server
      watch.wait_for_servers()
      ...                     # train; a parameter server: watch.wait_for_end()

  Leaving the context without an exception is an orderly end (`leave`); with one, all others are
  told its message (`fail`). What a death means is for `on_death` to decide: here nothing is printed
  and no process ended.

  Args:
    cluster: the cluster as this process knows it.
    on_death: called once for each dead task, in the watch's own thread.
    what: says in a few words what this process is doing; called in the watch's thread.
    shared: name -> value of what all tasks must have been started with alike, such as the model.
    timeout_s: from the last sign of a task to its death.
    startup_timeout_s: from the start of this process until all have joined.

  Attributes:
    deaths: task -> its death, in the order in which they became known.
    reports: of the chief: task -> what it gave to `leave`.
    left_at: of the chief: task -> when it called `leave`, by this process's `time.monotonic`.
    run_id: a name for this run, the same in all tasks as soon as they have joined; '' before.

  Raises:
    UsageError: the chief can't listen at its address.
  """

  def __init__(
    self,
    cluster: Cluster,
    *,
    on_death: Callable[[Death], None],
    what: Callable[[], str] = str,
    shared: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    startup_timeout_s: float = 120.0,
  ):
    for name, value in (('timeout_s', timeout_s), ('startup_timeout_s', startup_timeout_s)):
      if value <= 0:
        raise UsageError(f'{name}={value:g}: above 0 is needed')
    self.cluster = cluster
    self.deaths: dict[str, Death] = {}
    self.reports: dict[str, Any] = {}
    self.left_at: dict[str, float] = {}
    self._heard: dict[str, tuple[str, float]] = {}
    self.run_id = uuid.uuid4().hex if cluster.is_chief else ''
    self._on_death, self._what, self._shared = on_death, what, dict(shared or {})
    self._timeout_s, self._startup_timeout_s = timeout_s, startup_timeout_s
    self._interval_s = min(1.0, timeout_s / 5)
    self._started = time.monotonic()
    self._changed = threading.Condition()
    self._joined = {cluster.task}
    self._left: set[str] = set()
    self._sightings: list[Death] = []  # made by other threads of this process
    self._refusal: UsageError | None = None
    self._closing = self._over = False
    self._farewell: str | None = None  # why this task ends, if it does so with an error
    self._report: Any = None
    self._closed_at = 0.0
    self._facts: dict[str, str] | None = None

  def __enter__(self) -> Watch:
    loop = _Chief(self) if self.cluster.is_chief else _Member(self)  # a chief listens from now on
    self._thread = threading.Thread(
      target=self._run, args=[loop.run], name='heartbeat', daemon=True
    )
    self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    if error is None:
      self.leave()
    else:
      self.fail(str(error).partition('\n')[0] or type(error).__name__)

  def doing(self) -> dict[str, str]:
    """Other task -> what it is doing, of those that have been heard of in the last seconds."""
    now = time.monotonic()
    return {task: what for task, (what, at) in self._heard.items() if now - at < _FRESH_S}

  def wait_for_all(self) -> None:
    """Blocks until every task has joined.

    Raises:
      UsageError: this process was started otherwise than the chief, or twice.
      PeerError: a task did not come in time, was refused, or the chief has died.
    """
    everyone = set(self.cluster.tasks)
    self._wait(lambda: self._joined | set(self.deaths) >= everyone)

  def missing(self) -> tuple[str, ...]:
    """The tasks that have not come yet; for who has not met the chief, that one alone."""
    chief = self.cluster.tasks[0]
    return tuple(self._missing()) if chief in self._joined else (chief,)

  def agree(self, facts: Mapping[str, str]) -> None:
    """Says what this worker has found out since it joined, such as how many devices it has.

    Who has found something else than the chief is 'refused' then: a death of that task, in all
    processes, its own too.

    Args:
      facts: name -> value, the same for all workers.
    """
    self._facts = dict(facts)

  def wait_for_servers(self, tasks: Iterable[str] | None = None) -> None:
    """Blocks until TensorFlow's servers of these other tasks, by default of all, can be reached.

    Raises:
      PeerError: one can't within `startup_timeout_s`, or as for `wait_for_all`.
    """
    waited_from = time.monotonic()
    for task in self.cluster.tasks if tasks is None else tasks:
      if task == self.cluster.task:  # alone in its cluster it may have no server
        continue
      address = parse_address(self.cluster.address_of(task), task)
      while not listening.answers(address):
        self._check()
        if task in self.deaths or task in self._left:
          break
        if time.monotonic() - waited_from > self._startup_timeout_s:
          death = Death(
            task,
            'absent',
            f'({address}) can not be reached from {self.cluster.task} within '
            f'{self._startup_timeout_s:g} s: is the address right, and the port open?',
          )
          self._sightings.append(death)
          self._wait(lambda: bool(self.deaths))  # until the watch's thread has told it
          raise PeerError(death)
        time.sleep(0.1)

  def wait_until_left(self, tasks: Iterable[str]) -> None:
    """Blocks until all these tasks have left, or died."""
    awaited = set(tasks) - {self.cluster.task}
    self._wait(lambda: self._left | set(self.deaths) >= awaited)

  def wait_for_end(self) -> None:
    """Blocks until the chief has left, which it does after all workers: for parameter servers.

    Raises:
      PeerError: the chief has died, or ended with an error.
    """
    self._wait(lambda: self.cluster.tasks[0] in self._left)

  def death(self, wait_s: float = 0.0) -> Death | None:
    """The first death there was.

    Args:
      wait_s: how long to wait for one. TensorFlow may see a connection break before we do.
    """
    with self._changed:
      self._changed.wait_for(lambda: self.deaths or self._over, wait_s)
      return next(iter(self.deaths.values()), None)

  def leave(self, report: Any = None) -> None:
    """Ends this task's part in order: its silence from now on is no death.

    The chief first waits for all other workers to leave (or die).

    Args:
      report: what the chief is to find in `reports`; anything that JSON can carry.
    """
    if self._closing:
      return
    if self.cluster.is_chief:
      self.wait_until_left(task for task in self.cluster.tasks if task.startswith('worker:'))
    self._report = report
    self._close()

  def fail(self, reason: str) -> None:
    """Ends this task's part with an error, of which all others are told.

    Args:
      reason: one line, without this task's name.
    """
    if not self._closing:
      self._farewell = reason
      self._close()

  def _close(self) -> None:
    self._closed_at = time.monotonic()
    self._closing = True
    self._thread.join(2 * _GOODBYE_S)

  def _wait(self, condition: Callable[[], bool]) -> None:
    with self._changed:
      self._changed.wait_for(lambda: self._obstacle() or self._over or condition())
      self._check()

  def _check(self) -> None:
    if (obstacle := self._obstacle()) is not None:
      raise obstacle

  def _obstacle(self) -> Exception | None:
    """What no training survives, whatever its mode: no chief, or a start that can't be complete."""
    if self._refusal is not None:
      return self._refusal
    for death in self.deaths.values():
      if death.task in (self.cluster.tasks[0], self.cluster.task) or death.kind in (
        'absent',
        'refused',
      ):
        return PeerError(death)
    return None

  # For the thread.

  def _run(self, loop: Callable[[], None]) -> None:
    try:
      loop()
    except Exception as error:  # or the others would only see that this task has fallen silent
      reason = f'has ended with an error of its heartbeat: {type(error).__name__}: {error}'
      self._note_death(Death(self.cluster.task, 'failed', reason))
      raise
    finally:
      with self._changed:
        self._over = True
        self._changed.notify_all()

  def _hello(self) -> dict[str, Any]:
    return {
      'protocol': _PROTOCOL,
      'task': self.cluster.task,
      'worker_hosts': list(self.cluster.worker_hosts),
      'ps_hosts': list(self.cluster.ps_hosts),
      'shared': self._shared,
    }

  def _missing(self) -> list[str]:
    return [t for t in self.cluster.tasks if t not in self._joined and t not in self.deaths]

  def _take_sightings(self) -> list[Death]:
    taken, self._sightings = self._sightings, []
    return taken

  def _note_joined(self, tasks: Iterable[str]) -> None:
    with self._changed:
      self._joined |= set(tasks)
      self._changed.notify_all()

  def _note_doing(self, doing: Mapping[str, str]) -> None:
    now = time.monotonic()
    heard = {task: (what, now) for task, what in doing.items()}
    self._heard = {**self._heard, **heard}  # replaced as a whole: other threads read it

  def _note_left(self, task: str) -> None:
    with self._changed:
      self._left.add(task)
      self._changed.notify_all()

  def _note_refusal(self, reason: str) -> None:
    with self._changed:
      self._refusal = UsageError(reason)
      self._changed.notify_all()

  def _note_death(self, death: Death) -> None:
    with self._changed:
      if death.task in self.deaths or death.task in self._left or self._closing:
        return
      self.deaths[death.task] = death
      self._changed.notify_all()
    self._on_death(death)


class _Chief:
  """The hub: it hears all and tells all."""

  def __init__(self, watch: Watch):
    self._watch = watch
    self._lines: dict[str, Line] = {}
    self._strangers: list[Line] = []
    self._selector = selectors.DefaultSelector()
    self._listeners = listening.listen(watch.cluster.heartbeat_address, 'the heartbeat of worker:0')
    for listener in self._listeners:
      self._selector.register(listener, selectors.EVENT_READ, self._accept)

  def run(self) -> None:
    watch = self._watch
    pacer = Pacer(watch._interval_s, watch._timeout_s)
    while True:
      for key, _ in self._selector.select(watch._interval_s / 4):
        key.data(key.fileobj)
      if pacer.due():
        self._tell({'beat': watch._what(), 'others': watch.doing()})
      for task, line in list(self._lines.items()):
        if pacer.silent(line):
          self._bury(task, 'silent', f'has not answered for {watch._timeout_s:g} s')
      for death in watch._take_sightings():
        self._declare(death)
      self._compare()
      if time.monotonic() - watch._started > watch._startup_timeout_s:
        for task in watch._missing():
          self._declare(self._absence(task))
      if watch._closing:
        break
    self._end()

  def _absence(self, task: str) -> Death:
    cluster, limit = self._watch.cluster, self._watch._startup_timeout_s
    return Death(
      task,
      'absent',
      f'({cluster.address_of(task)}) has not joined within {limit:g} s: has it been started, and '
      f'does it reach the chief at {cluster.heartbeat_address}?',
    )

  def _compare(self) -> None:
    ours = self._watch._facts
    for task, line in self._lines.items():
      if ours is not None and line.facts is not None:
        difference = _difference(line.facts, ours)
        line.facts = None
        if difference is not None:
          self._declare(Death(task, 'refused', f'{_OTHERWISE}: {difference}', line.doing))

  def _accept(self, listener: socket.socket) -> None:
    try:
      connection, _ = listener.accept()
    except OSError:  # it has gone again
      return
    line = Line(connection)
    self._strangers.append(line)
    self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(line))

  def _hear(self, line: Line) -> None:
    messages, stands = line.receive()
    for message in messages:
      if line.task is None:
        self._meet(line, message.get('hello'))
        if line.closed:  # refused, whatever else it has said, or whether it has gone meanwhile
          return
      elif 'beat' in message:
        line.doing = str(message['beat'])
        self._watch._note_doing({line.task: line.doing})
      elif 'facts' in message:
        line.facts = dict(message['facts'])
      elif 'dead' in message:  # what shows from there alone: a server that can't be reached
        self._declare(Death(**message['dead']))
      elif 'bye' in message:
        self._dismiss(line, message)
        return
    if stands:
      return
    if line.task is not None and self._lines.get(line.task) is line:
      self._bury(line.task, 'lost', _BROKEN)
    else:
      self._drop(line)

  def _meet(self, line: Line, hello: Any) -> None:
    """A new connection introduces itself: it must be of this cluster, and the only one."""
    watch = self._watch
    if (
      not isinstance(hello, dict)
      or not isinstance(hello.get('task'), str)
      or not isinstance(hello.get('shared'), dict)
    ):
      self._drop(line)
      return
    task = hello['task']
    ours = watch._hello()
    difference = _difference({**hello, **hello['shared']}, {**ours, **ours['shared']})
    if difference is not None:
      reason = f'{_OTHERWISE}: {difference}'
      line.send({'refused': f'{task} {reason}'})
      self._drop(line)
      if task in watch._missing():  # otherwise it is of some other training
        self._declare(Death(task, 'refused', reason))
    elif task in self._lines or task == watch.cluster.task:
      address = watch.cluster.address_of(task)
      line.send({'refused': f'there is a {task} ({address}) already: has it been started twice?'})
      self._drop(line)
    elif task in watch.deaths or task in watch._left:
      line.send({'refused': f'{task} has already ended in this training: start all tasks again'})
      self._drop(line)
    else:
      line.task = task
      self._strangers.remove(line)
      self._lines[task] = line
      watch._note_joined([task])
      for death in watch.deaths.values():
        line.send({'dead': dataclasses.asdict(death)})
      self._tell({'joined': sorted(watch._joined), 'run': watch.run_id})

  def _dismiss(self, line: Line, message: Mapping[str, Any]) -> None:
    task = str(line.task)
    if message['bye'] is not None:
      self._bury(task, 'failed', f'has ended with an error: {message["bye"]}')
      return
    del self._lines[task]
    self._watch.reports[task] = message.get('report')
    self._watch.left_at[task] = time.monotonic() - message.get('ago', 0.0)
    self._watch._note_left(task)
    self._drop(line)
    self._tell({'left': task})

  def _bury(self, task: str, kind: str, reason: str) -> None:
    line = self._lines.pop(task)
    self._declare(Death(task, kind, reason, line.doing))
    self._drop(line)

  def _declare(self, death: Death) -> None:
    if death.task not in self._watch.deaths:
      self._tell({'dead': dataclasses.asdict(death)})  # before the death can end this process
      self._watch._note_death(death)

  def _tell(self, message: Mapping[str, Any]) -> None:
    for line in self._lines.values():
      line.send(message)

  def _drop(self, line: Line) -> None:
    if line in self._strangers:
      self._strangers.remove(line)
    self._selector.unregister(line.connection)
    line.close()

  def _end(self) -> None:
    self._tell({'bye': self._watch._farewell})
    until = time.monotonic() + _GOODBYE_S
    lines = [*self._lines.values(), *self._strangers]
    for line in lines:
      line.finish()
    for line in self._lines.values():
      line.drain(until)
    for line in lines:
      line.close()
    for listener in self._listeners:
      listener.close()
    self._selector.close()


class _Member:
  """Any other task: it has one connection, to the chief."""

  def __init__(self, watch: Watch):
    self._watch = watch
    self._chief = watch.cluster.tasks[0]

  def run(self) -> None:
    watch = self._watch
    line = self._connect()
    if line is None:
      return
    line.send({'hello': watch._hello()})
    try:
      if self._stay(line):
        ago = time.monotonic() - watch._closed_at
        line.send({'bye': watch._farewell, 'report': watch._report, 'ago': ago})
        line.finish()
        line.drain(time.monotonic() + _GOODBYE_S)
    finally:
      line.close()

  def _stay(self, line: Line) -> bool:
    """Hears and speaks until this process leaves (True), or there is nobody to hear it (False)."""
    watch = self._watch
    pacer = Pacer(watch._interval_s, watch._timeout_s)
    told: dict[str, str] | None = None
    with selectors.DefaultSelector() as selector:
      selector.register(line.connection, selectors.EVENT_READ)
      while True:
        selector.select(watch._interval_s / 4)
        messages, stands = line.receive()
        for message in messages:
          if self._is_last(line, message):
            return False
        if not stands:
          watch._note_death(Death(self._chief, 'lost', _BROKEN, line.doing))
          return False
        if pacer.due():
          line.send({'beat': watch._what()})
        if pacer.silent(line):
          reason = f'has not answered for {watch._timeout_s:g} s'
          watch._note_death(Death(self._chief, 'silent', reason, line.doing))
          line.send({'bye': f'{self._chief} {reason}'})
          return False
        for death in watch._take_sightings():
          line.send({'dead': dataclasses.asdict(death)})
          watch._note_death(death)
        if told is not watch._facts:
          told = watch._facts
          line.send({'facts': told})
        if watch._closing:
          return True

  def _is_last(self, line: Line, message: Mapping[str, Any]) -> bool:
    """Takes a message of the chief; whether none will follow."""
    watch = self._watch
    if 'beat' in message:
      line.doing = str(message['beat'])
      watch._note_doing({**message.get('others', {}), self._chief: line.doing})
    elif 'joined' in message:
      watch.run_id = str(message['run'])
      watch._note_joined(message['joined'])
    elif 'left' in message:
      watch._note_left(message['left'])
    elif 'dead' in message:
      watch._note_death(Death(**message['dead']))
    elif 'refused' in message:
      watch._note_refusal(str(message['refused']))
      return True
    elif message.get('bye', '') is None:
      watch._note_left(self._chief)
      return True
    elif 'bye' in message:
      reason = f'has ended with an error: {message["bye"]}'
      watch._note_death(Death(self._chief, 'failed', reason, line.doing))
      return True
    return False

  def _connect(self) -> Line | None:
    """A connection to the chief, which may start later; None if there will be none."""
    watch = self._watch
    address, limit = watch.cluster.heartbeat_address, watch._startup_timeout_s
    while not watch._closing:
      try:
        return Line(socket.create_connection(address, timeout=2))
      except OSError as error:
        if time.monotonic() - watch._started > limit:
          watch._note_death(
            Death(
              self._chief,
              'absent',
              f'does not answer at {address} (its heartbeat) within {limit:g} s: '
              f'{error.strerror or error}: has it been started, and is the address right?',
            )
          )
          return None
      time.sleep(0.2)
    return None


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
  """What a task was started with otherwise than the chief, in words."""
  for name in dict.fromkeys((*ours, *theirs)):
    if name not in ('task', 'shared') and theirs.get(name) != ours.get(name):
      return f'{name} {_text(theirs.get(name))} instead of {_text(ours.get(name))}'
  return None


def _text(value: Any) -> str:
  if value is None:
    return 'left out'
  return (','.join(map(str, value)) or 'none') if isinstance(value, list) else str(value)
