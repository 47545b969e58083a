"""This process: TensorFlow's start, its devices, and how the process is asked to stop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import signal
import sys

from hpm import quiet
from hpm.cluster.spec import Cluster
from hpm.errors import UsageError

__all__ = [
  'Terminated',
  'Terminations',
  'devices',
  'gpu_names',
  'set_environment',
  'start_server',
  'terminations',
]


def set_environment(changes: Mapping[str, str | None]) -> None:
  """Sets variables, or removes those of value None; TensorFlow reads them while it starts."""
  for name, value in changes.items():
    if value is None:
      os.environ.pop(name, None)
    else:
      os.environ[name] = value


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
def terminations() -> Iterator[Terminations]:
  """While it lasts, a SIGTERM is noted in the list that it yields; a second one ends the process.

  In another thread than the main one, which Python lets set no handler, nothing is noted.
  """
  received = Terminations()

  def note(number: int, frame: object) -> None:
    received.append(number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    received.check()

  try:
    before = signal.signal(signal.SIGTERM, note)
  except ValueError:
    yield received
    return
  try:
    yield received
  finally:
    signal.signal(signal.SIGTERM, before)


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
