"""This process: TensorFlow's start, its devices, and how the process is asked to stop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import select
import signal
import sys
import threading
import time

from hpm import quiet
from hpm.cluster.spec import Cluster
from hpm.errors import UsageError

__all__ = [
  'Terminated',
  'Terminations',
  'devices',
  'gpu_names',
  'import_tensorflow',
  'set_environment',
  'start_server',
  'terminations',
]

_UNHEARD_S = 2.0  # for the main thread to come back from TensorFlow, without a word
_BUSY = 'this process ends when TensorFlow has done what it is doing, and at once at a second one'


def set_environment(changes: Mapping[str, str | None]) -> None:
  """Sets variables, or removes those of value None; TensorFlow reads them while it starts."""
  for name, value in changes.items():
    if value is None:
      os.environ.pop(name, None)
    else:
      os.environ[name] = value


def import_tensorflow() -> None:
  """Imports TensorFlow and lets it look for GPUs, without what its C++ code writes of that."""
  with quiet.native_log():
    import tensorflow as tf

    tf.config.list_physical_devices()


def start_server(cluster: Cluster) -> None:
  """Imports TensorFlow and starts a parameter server's server, which goes with the process."""
  with quiet.native_log():
    from hpm.cluster import server

    server.start(cluster)


def devices(
  kind: str | None,
  count: int | None,
  join: Callable[[str, tuple[str, ...]], tuple[str, ...]] | None = None,
) -> tuple[str, ...]:
  """Imports and starts TensorFlow; device strings as from `hpm.devices.select`.

  Args:
    kind: 'cpu', 'gpu', or None for GPUs if TensorFlow sees any, otherwise CPU devices.
    count: number of devices; None for all GPUs, or two logical CPU devices.
    join: joins a cluster, with the kind and the devices, before TensorFlow's runtime starts.

  Raises:
    UsageError: TensorFlow doesn't see so many GPUs.
  """
  with quiet.native_log() as hidden:
    with _without('sklearn'):
      import tensorflow as tf

    import hpm

    if kind is None:
      kind = 'gpu' if tf.config.list_physical_devices('GPU') else 'cpu'
    try:
      selected = hpm.devices.select(kind, count)
    except UsageError as error:
      hint = f' ({quiet.LEVEL}=0 shows what TensorFlow says of it)' if hidden else ''
      raise UsageError(f'{error}{hint}') from None
    if kind == 'cpu' and tf.config.list_physical_devices('GPU'):
      tf.config.set_visible_devices([], 'GPU')  # or TensorFlow would take all their memory
    if join is not None:
      selected = join(kind, selected)
    tf.config.list_logical_devices()  # starts the runtime, which fixes the devices
  return selected


def gpu_names(devices: Sequence[str]) -> list[str]:
  """What the GPUs among `devices` are sold as, in their order."""
  import tensorflow as tf

  gpus = tf.config.list_physical_devices('GPU')
  details = tf.config.experimental.get_device_details
  return [
    details(gpus[int(device.rpartition(':')[2])]).get('device_name', 'unknown')
    for device in devices
    if 'GPU' in device
  ]


class Terminated(Exception):
  """SIGTERM has come where there was nothing to be kept."""


class Terminations(list[int]):
  """The SIGTERMs so far."""

  _at_once = False

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Inside, where the main thread waits and nothing is to be kept, one raises Terminated."""
    self._at_once = True
    try:
      self.check()
      yield
    finally:
      self._at_once = False

  def check(self) -> None:
    if self and self._at_once:
      raise Terminated('stopped by SIGTERM before the training began')


@contextlib.contextmanager
def terminations(last_words: Callable[[str], None] = lambda line: None) -> Iterator[Terminations]:
  """While it lasts, a SIGTERM is noted in the list that it yields; a second one ends the process.

  Python's handlers run in the main thread alone, and only when TensorFlow has given it back. Where
  that takes long, a thread says that the signal has come, and ends the process at the second one.
  In another thread than the main one, which Python lets set no handler, nothing is noted.

  Args:
    last_words: called with one line before the process is ended with its main thread in TensorFlow.
  """
  received = Terminations()
  heard = [0]  # signals whose handlers have run

  def note(number: int, frame: object) -> None:
    heard[0] += 1
    received.append(number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    received.check()

  def interrupt(number: int, frame: object) -> None:
    heard[0] += 1
    raise KeyboardInterrupt

  try:
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, note)}
  except ValueError:
    yield received
    return
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  fd_before = signal.set_wakeup_fd(writer)
  threading.Thread(target=_hear, args=[reader, heard, set(before), last_words], daemon=True).start()
  try:
    yield received
  finally:
    signal.set_wakeup_fd(fd_before)
    os.close(writer)  # which ends the thread
    for number, handler in before.items():
      signal.signal(number, handler)


def _hear(
  reader: int, heard: list[int], numbers: set[int], last_words: Callable[[str], None]
) -> None:
  """Reads a byte for each signal, as it comes; see `terminations`."""
  come = 0
  while number := os.read(reader, 1):
    if number[0] not in numbers:
      continue
    come += 1
    name = signal.Signals(number[0]).name
    if come - heard[0] > 1:
      line = f'ended by a second {name}, with the main thread in TensorFlow'
      os.write(2, f'{line}\n'.encode())
      try:
        last_words(line)
      finally:
        os._exit(128 + number[0])
    waited_until = time.monotonic() + _UNHEARD_S
    while heard[0] < come and time.monotonic() < waited_until:
      if select.select([reader], [], [], 0.05)[0]:
        break
    if heard[0] < come:
      os.write(2, f'Notice: {name} has come; {_BUSY}\n'.encode())
  os.close(reader)


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
  """Inside, `module` can't be imported, unless it has been already.

  TensorFlow imports Keras, and Keras scikit-learn where there is one, for wrappers of its own; that
  takes a fifth of TensorFlow's import.
  """
  if module in sys.modules:
    yield
    return
  sys.modules[module] = None  # type: ignore[assignment]
  try:
    yield
  finally:
    del sys.modules[module]
