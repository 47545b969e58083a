"""Training by collectives: one eager client a worker, no parameter server."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# What `tf.distribute.MultiWorkerMirroredStrategy` starts its collectives with; the public way to
# them, DTensor's, sets no device filters.
from tensorflow.python.eager import context

from hpm.cluster import listening
from hpm.cluster.spec import Cluster, parse_address
from hpm.devices import CPU, select
from hpm.errors import DataError, UsageError
from hpm.staging import StagedLoop
from hpm.step import Metrics, TrainStep
from hpm.variable_mgr.collective_all_reduce import CollectiveAllReduce

__all__ = ['CollectiveRuntime', 'CollectiveTraining']


class CollectiveRuntime:
  """A worker of a cluster without parameter servers. Comes before TensorFlow's first op.

  Args:
    cluster: who takes part; this process is one of the workers.
    num_devices: compute devices of this worker.
    kind: 'cpu' or 'gpu'.

  Attributes:
    devices: device strings, for a manager.
    options: further options of a manager, for `hpm.variable_mgr.create`.
  """

  _joined: Cluster | None = None  # TensorFlow's eager runtime joins once a process

  def __init__(self, cluster: Cluster, num_devices: int, kind: str = 'cpu'):
    self.cluster = cluster
    self.devices = select(kind, num_devices)
    self.options = {'worker': cluster.task_index, 'num_workers': cluster.num_workers}
    if CollectiveRuntime._joined not in (None, cluster):
      raise UsageError('this process has joined another cluster already, and can not change it')
    if CollectiveRuntime._joined is None and cluster.num_workers > 1:
      self._join()
      CollectiveRuntime._joined = cluster

  @contextlib.contextmanager
  def scope(self) -> Iterator[None]:
    """Inside, variables and steps are made; here a place like any other."""
    yield

  def training(self, step: TrainStep) -> 'CollectiveTraining':
    """The step, for training in this cluster."""
    return CollectiveTraining(self, step)

  def run(self, values: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Name -> value, as of a session's run."""
    return {name: value.numpy() for name, value in values.items()}

  def close(self) -> None:
    """Nothing is to be ended: the server goes with the process."""

  def _join(self) -> None:
    address = parse_address(self.cluster.address, self.cluster.task)
    listening.check_free(address, self.cluster.task)
    eager = context.context()
    eager.configure_collective_ops(
      collective_leader='/job:worker/replica:0/task:0',
      device_filters=(f'/job:worker/task:{self.cluster.task_index}',),
    )
    eager.enable_collective_ops(
      tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(self.cluster.as_dict()).as_cluster_def(),
        default_session_config=eager.config,
        job_name='worker',
        task_index=self.cluster.task_index,
        protocol='grpc',
      )
    )
    eager.ensure_initialized()
    listening.restrict(address, self.cluster.task)


class CollectiveTraining:
  """A `TrainStep` in a `CollectiveRuntime`, with the methods of one.

  In every step the workers agree whether one of them has more data, and whether one wants to stop.
  Who has no more data goes on with empty batches, which count nothing, until nobody has any; so
  all end with the same step.

  Args:
    runtime: where it runs.
    step: what runs.

  Attributes:
    model, manager: the step's.
    consumed: samples that each worker has taken from its pipeline for finished steps.
    stop: set to True, to stop after the step that runs.
    stopped: whether training has ended because a worker wanted to.
  """

  def __init__(self, runtime: CollectiveRuntime, step: TrainStep):
    assert isinstance(step.manager, CollectiveAllReduce)
    self.model, self.manager = step.model, step.manager
    self.consumed = [0] * runtime.cluster.num_workers
    self.stop = self.stopped = False
    self._worker = runtime.cluster.task_index
    self._step = step
    self._loop = StagedLoop(step.build, self.manager.devices, None)
    self._compiled: dict[Any, Any] = {}

  def begin(self) -> None:
    """Waits for all workers, and gives them the chief's values."""
    with tf.device(CPU):
      consumed = tf.Variable(tf.constant(self.consumed, tf.int64))
    variables = [*self._step.named_variables().values(), consumed]

    @tf.function(autograph=False)
    def broadcast() -> None:
      self.manager.broadcast(variables)

    broadcast()
    self._step.restore(self._step.snapshot())  # to all copies
    self.consumed = consumed.numpy().tolist()

  def run(
    self, dataset: tf.data.Dataset, num_steps: int | None = None, steps_per_call: int = 1
  ) -> Iterator[Metrics]:
    """Trains as `TrainStep.run`; the batches are of this worker's share of the data."""
    if steps_per_call != 1:
      raise UsageError(
        f'steps_per_call {steps_per_call}: over several workers each step is a call of its own'
      )
    prime, step = self._functions(dataset)
    iterator = iter(dataset)
    staged, more = prime(iterator)
    if not more:
      raise DataError('the data set yields no batch at all')
    finished = 0
    while more and not self.stopped and finished != num_steps:
      with self._step.watched():
        metrics, staged, totals = step(iterator, staged, tf.constant(float(self.stop), tf.float64))
        more, stopped, *consumed = (int(total) for total in totals.numpy())
      self.stopped = bool(stopped)
      self.consumed = [n + m for n, m in zip(self.consumed, consumed, strict=True)]
      finished += 1
      yield metrics

  def named_variables(self) -> dict[str, tf.Variable]:
    """As `TrainStep.named_variables`."""
    return self._step.named_variables()

  def progress(self) -> tuple[int, int]:
    """Finished steps, and their samples over all workers."""
    return self._step.progress()

  def snapshot(self) -> dict[str, tf.Tensor]:
    """As `TrainStep.snapshot`; any worker's."""
    return self._step.snapshot()

  def restore(self, values: Mapping[str, tf.Tensor]) -> None:
    """As `TrainStep.restore`; for the chief, before `begin`."""
    self._step.restore(values)

  def _functions(self, dataset: tf.data.Dataset) -> tuple[Any, Any]:
    loop = self._loop
    spec, staged_spec, endless = loop.specs(dataset)
    key = (spec, endless)
    if key not in self._compiled:
      iterator_spec = tf.data.IteratorSpec(dataset.element_spec)

      @tf.function(autograph=False, input_signature=[iterator_spec])
      def prime(iterator):
        return loop.fetch(iterator, spec, endless)

      @tf.function(
        autograph=False,
        input_signature=[iterator_spec, staged_spec, tf.TensorSpec([], tf.float64)],
        experimental_attributes={'_disable_acd': True},  # as in `StagedLoop`
      )
      def step(iterator, staged, stop):
        following, more = loop.fetch(iterator, spec, endless)
        with tf.device(CPU):
          votes = {'more': tf.cast(more, tf.float64), 'stop': stop}
          sizes = [tf.shape(labels, tf.int64)[0] for _, labels in staged]
          for i in range(len(self.consumed)):
            own = tf.add_n(sizes) if i == self._worker else tf.zeros([], tf.int64)
            votes[f'consumed/{i}'] = tf.cast(own, tf.float64)
        metrics, totals = self._step.build_with_votes(staged, votes)
        with tf.device(CPU):
          return metrics, following, tf.stack(list(totals.values()))

      self._compiled[key] = (prime, step)
    return self._compiled[key]
