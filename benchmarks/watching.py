"""What the death of another process means to this one: an end with one line, or a notice.

A synchronous training can't go on without any of its tasks, an asynchronous one without its chief
and its parameter servers. The main thread may be blocked in a step that will never end; so the line
is printed, and the process ended, by the thread that watches.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import os
import threading
import time
from typing import Any

from benchmarks import saving
from benchmarks.loop import say
from hpm.cluster import listening
from hpm.cluster.heartbeat import Death, PeerError, Watch
from hpm.cluster.spec import Cluster, parse_address
from hpm.cluster.watchdog import Stages
from hpm.errors import UsageError

__all__ = ['EXIT_CODE', 'GRACE_S', 'ORDERLY', 'Ending', 'Guard', 'service', 'warnings', 'watched']

EXIT_CODE = 3  # of a process that ends because another task has died
GRACE_S = 2.0  # for the main thread to end by itself
_PATIENCE_S = 5.0  # of waiting for others without a word
ORDERLY = (saving.Stopped,)  # after these the others are not to be told of an error
_EXPLAINED_S = 5.0  # for a watch to name who caused an error in TensorFlow


class Ending:
  """The end of this process because another has died, from a thread that watches.

  Args:
    last_words: called with the line right before the process is ended from outside the main thread,
      which then has not ended by itself; to write down what became of it.
    grace_s: how long the main thread has.
    end: ends the process with a code, whatever its threads are doing.

  Attributes:
    death: why it ends; None as long as it doesn't.
  """

  def __init__(
    self,
    last_words: Callable[[str], None] = lambda line: None,
    grace_s: float = GRACE_S,
    end: Callable[[int], object] = os._exit,
  ):
    self.death: Death | None = None
    self._last_words, self._grace_s, self._end = last_words, grace_s, end
    self._stderr = os.dup(2)  # `process` holds back what is written there while TensorFlow loads

  def begin(
    self, death: Death, line: str, code: int = EXIT_CODE, grace_s: float | None = None
  ) -> None:
    """Says the line, and ends the process when the main thread has had its time."""
    if self.death is not None:
      return
    self.death = death
    os.write(self._stderr, f'error: {line}\n'.encode())
    wait_s = self._grace_s if grace_s is None else grace_s
    threading.Thread(target=self._end_later, args=[line, code, wait_s], daemon=True).start()

  def check(self) -> None:
    """For the main thread: PeerError once this process has to end."""
    if self.death is not None:
      raise PeerError(self.death)

  @contextlib.contextmanager
  def explaining(self, *kinds: type[BaseException]) -> Iterator[None]:
    """Turns an exception of these kinds into PeerError if a dead process explains it.

    TensorFlow may see a connection break a moment before it is known who has died.
    """
    try:
      yield
    except (UsageError, PeerError, *ORDERLY):
      raise  # which say by themselves what they are
    except kinds:
      until = time.monotonic() + _EXPLAINED_S
      while self.death is None and time.monotonic() < until:
        time.sleep(0.05)
      self.check()
      raise

  def _end_later(self, line: str, code: int, wait_s: float) -> None:
    time.sleep(wait_s)
    try:
      self._last_words(line)
    finally:
      self._end(code)


class Guard(Ending):
  """Called with each death in a cluster; ends this process after those that it can't survive.

  Args:
    cluster: whose tasks die.
    synchronous: whether every worker is needed.
    stages: what this process is doing, for the line.
    **options: of `Ending`.
  """

  def __init__(
    self,
    cluster: Cluster,
    *,
    synchronous: bool,
    stages: Stages,
    **options: Any,
  ):
    super().__init__(**options)
    self._cluster, self._synchronous, self._stages = cluster, synchronous, stages

  def __call__(self, death: Death) -> None:
    """What `Watch` calls, in its own thread."""
    if self.death is not None:
      return
    if self.survives(death):
      say(f'Notice: {death}: asynchronous training goes on without it')
      return
    self.begin(death, f'{death}; {self._cluster.task} waited in {self._stages.what()}')

  def survives(self, death: Death) -> bool:
    """Whether this training goes on without that task."""
    needed = death.task == self._cluster.tasks[0] or death.task.startswith('ps:')
    came = death.kind not in ('absent', 'refused')
    return came and not needed and not self._synchronous


def warnings(cluster: Cluster) -> list[str]:
  """What there is to say of where this process listens.

  Raises:
    UsageError: the host is unknown.
  """
  address = parse_address(cluster.address, cluster.task)
  found = []
  if listening.is_public(address):
    found.append(
      f'{address} is a public address, and TensorFlow lets everybody in who reaches it: use a '
      'private network, or a firewall'
    )
  if not listening.local_ips(address, cluster.task):
    found.append(
      f"{address.host} means this machine's loopback here, so {cluster.task} listens at all of the "
      "machine's addresses: give it by the address that the others use"
    )
  return found


@contextlib.contextmanager
def watched(
  guard: Guard,
  cluster: Cluster,
  stages: Stages,
  *,
  shared: Mapping[str, str],
  timeout_s: float,
  startup_timeout_s: float,
  waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Watch]:
  """Watches the cluster while it lasts, and waits for all tasks to come at its start.

  Args:
    guard: decides on each death.
    cluster, stages: as for `Guard`.
    shared, timeout_s, startup_timeout_s: as for `hpm.cluster.Watch`.
    waiting: entered while this process waits for the others.

  Raises:
    UsageError, PeerError: as `Watch` does; the line of a PeerError has been printed.

  A run that was told to stop, and has, leaves in order.
  """
  with Watch(
    cluster,
    on_death=guard,
    what=stages.what,
    shared=shared,
    timeout_s=timeout_s,
    startup_timeout_s=startup_timeout_s,
  ) as watch:
    with waiting(), _patience(watch, startup_timeout_s):
      watch.wait_for_all()
    try:
      yield watch
    except ORDERLY:
      watch.leave()
      raise


@contextlib.contextmanager
def service(
  address: str | None, ending: Ending, tell: Callable[[str], object], timeout_s: float
) -> Iterator[None]:
  """Watches a tf.data service while it lasts, without which its trainings would wait for ever.

  Args:
    address: of its dispatcher; None: there is none to watch.
    ending: of this process, if one of the service's dies.
    tell: called with the line, to tell others why.
    timeout_s: as for `hpm.pipelines.ServiceWatch`.

  Raises:
    PeerError: one has died; the line has been printed.
  """
  if address is None:
    yield
    return
  from hpm.pipelines import ServiceWatch

  def died(who: str, how: str) -> None:
    death = Death(who, 'lost', how)
    ending.begin(death, f'{death}: start the service again, and then the same command')
    tell(str(death))

  with ServiceWatch(address, died, timeout_s), ending.explaining(Exception):
    yield
    ending.check()


@contextlib.contextmanager
def _patience(watch: Watch, limit_s: float) -> Iterator[None]:
  """Says whom this process waits for, if that takes a while."""

  def notice() -> None:
    tasks = ', '.join(f'{task} ({watch.cluster.address_of(task)})' for task in watch.missing())
    say(f'Notice: {watch.cluster.task} waits for {tasks}, {limit_s:g} s from its start at most')

  timer = threading.Timer(_PATIENCE_S, notice)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()
