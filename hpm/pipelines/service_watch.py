"""Who of a tf.data service is still alive: a training whose service dies would wait for ever.

TensorFlow's client asks a dispatcher or worker that has gone again and again, without a word and
without an end, while the training is blocked in `next`. So the same questions are asked here, each
second, in a thread of their own, with a limit: the dispatcher for its workers, and each worker for
its tasks.
"""

from __future__ import annotations  # a context manager that returns itself

from collections.abc import Callable
import threading
import time
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
import grpc

__all__ = ['ServiceWatch']

_INTERVAL_S = 1.0
_BROKEN_S = 3.0  # without a connection: a process that is restarted at once is no dead one
_ASKED = '/tensorflow.data.{}'  # of tensorflow/core/data/service/{dispatcher,worker}.proto
_OPTIONS = (
  ('grpc.enable_http_proxy', 0),
  ('grpc.max_reconnect_backoff_ms', int(1000 * _INTERVAL_S)),
)


class ServiceWatch:
  """Watches the dispatcher of a tf.data service and all workers that it names, while it lasts.

    with ServiceWatch('10.0.0.7:5050', on_death=report):
      ...  # train

  Args:
    service: 'host:port' of the dispatcher.
    on_death: called once, in the watch's thread, with who is dead, such as "the tf.data service's
      worker 10.0.0.8:5051", and how that is known, in words that go on after it.
    timeout_s: how long one may leave a question without an answer; without a connection it is dead
      after three seconds.
  """

  def __init__(self, service: str, on_death: Callable[[str, str], None], timeout_s: float = 10.0):
    self._on_death, self._timeout_s = on_death, timeout_s
    self._dispatcher = _Server(service, 'dispatcher', 'DispatcherService/GetWorkers')
    self._workers: dict[str, _Server] = {}
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name='service watch', daemon=True)

  def __enter__(self) -> ServiceWatch:
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closed.set()

  def _run(self) -> None:
    while not self._closed.wait(_INTERVAL_S):
      servers = [self._dispatcher, *self._workers.values()]
      for server in servers:
        server.ask(self._timeout_s)
      for server in servers:
        ended = server.ended(self._timeout_s)
        if ended is not None and not self._closed.is_set():
          self._on_death(f"the tf.data service's {server.what}", ended)
          return
      for address in _addresses(self._dispatcher.answer):
        if address not in self._workers:
          self._workers[address] = _Server(address, 'worker', 'WorkerService/GetWorkerTasks')


class _Server:
  """One that is asked; one question at a time."""

  def __init__(self, address: str, role: str, question: str):
    self.what = f'{role} {address}'
    self.answer = b''  # the last one
    self._ask = grpc.insecure_channel(address, _OPTIONS).unary_unary(_ASKED.format(question))
    self._asked: grpc.Future | None = None
    self._heard_at = time.monotonic()

  def ask(self, timeout_s: float) -> None:
    if self._asked is None:
      self._asked = self._ask.future(b'', timeout=timeout_s)

  def ended(self, timeout_s: float) -> str | None:
    """How it is known to be dead, once it is."""
    if self._asked is None or not self._asked.done():
      return None
    asked, self._asked = self._asked, None
    code = asked.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
      return f'has not answered for {timeout_s:g} s'
    if code is not grpc.StatusCode.UNAVAILABLE:  # any other answer is one
      self._heard_at = time.monotonic()
      self.answer = asked.result() if code is grpc.StatusCode.OK else self.answer
    elif time.monotonic() - self._heard_at > _BROKEN_S:
      return 'has died: its connection broke'
    return None


def _addresses(answer: bytes) -> list[str]:
  """The workers' addresses in a GetWorkersResponse; its first field is a list of WorkerInfo."""
  return [worker.address for worker in _RESPONSE.FromString(answer).workers]


def _response() -> Any:
  """GetWorkersResponse as far as it is needed: TensorFlow's wheel has no Python code of it."""
  field = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(name='hpm/data_service.proto', package='hpm')
  worker = file.message_type.add(name='WorkerInfo')
  worker.field.add(name='address', number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
  workers = file.message_type.add(name='GetWorkersResponse')
  workers.field.add(
    name='workers',
    number=1,
    type=field.TYPE_MESSAGE,
    type_name='.hpm.WorkerInfo',
    label=field.LABEL_REPEATED,
  )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName('hpm.GetWorkersResponse'))


_RESPONSE = _response()
