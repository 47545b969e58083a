"""Training by collectives: one eager client a worker, no parameter server."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# What `tf.distribute.MultiWorkerMirroredStrategy` starts its collectives with; the public way to
# them, DTensor's, sets no device filters.
from tensorflow.python.eager import context

from hpm.cluster import listening
from hpm.cluster.spec import Cluster, parse_address
from hpm.cluster.training import Training
from hpm.devices import CPU, select
from hpm.errors import UsageError
from hpm.staging import Batch, StagedLoop
from hpm.step import METRICS, Metrics, TrainStep
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


class CollectiveTraining(Training):
  """A `Training` in a `CollectiveRuntime`: every worker has all variables, and sums by collectives.

  Args:
    runtime: where it runs.
    step: what runs.
  """

  def __init__(self, runtime: CollectiveRuntime, step: TrainStep):
    assert isinstance(step.manager, CollectiveAllReduce)
    self.manager: CollectiveAllReduce
    super().__init__(step, runtime.cluster.task_index, runtime.cluster.num_workers)
    with tf.device(CPU):
      self._wished = tf.Variable(tf.constant(self._wishes(), tf.float64))
    result = (METRICS, tf.TensorSpec([self._num_votes], tf.float64))
    self._loop = StagedLoop(self._build, self.manager.devices, result, agrees=True)

  def begin(self):
    with tf.device(CPU):
      consumed = tf.Variable(tf.constant(self.consumed, tf.int64))
    variables = [*self._step.named_variables().values(), consumed]

    @tf.function(autograph=False)
    def broadcast() -> None:
      self.manager.broadcast(variables)

    broadcast()
    self._step.restore(self._step.snapshot())  # to all copies
    self.consumed = consumed.numpy().tolist()

  def run(self, dataset, num_steps=None, steps_per_call=1):
    running = self._loop.run(dataset, num_steps, steps_per_call)
    while True:
      self._wished.assign(self._wishes())
      with self._step.watched():
        result = next(running, None)
      if result is None:
        return
      metrics, totals = result
      self._agreed(totals.numpy())
      yield metrics

  def blocked(self, within_s):
    return self._loop.blocked(within_s)

  def progress(self):
    return self._step.progress()

  def snapshot(self, names=None):
    values = self._step.snapshot()
    return values if names is None else {name: values[name] for name in names}

  def restore(self, values):
    self._step.restore(values)

  def _build(
    self, staged: Sequence[Batch], more: tf.Tensor
  ) -> tuple[tuple[Metrics, tf.Tensor], tf.Tensor]:
    """One step with its votes; whether any worker has more data, and none wants to end."""
    with tf.device(CPU):
      own = tf.add_n([tf.shape(labels, tf.int64)[0] for _, labels in staged])
      votes = [tf.cast(more, tf.float64), *tf.unstack(self._wished.read_value())]
      votes += [
        tf.cast(own, tf.float64) if worker == self._worker else tf.zeros([], tf.float64)
        for worker in range(len(self.consumed))
      ]
    metrics, totals = self._step.build_with_votes(
      staged, {f'vote/{i}': vote for i, vote in enumerate(votes)}
    )
    with tf.device(CPU):
      more, stop, reached, *_ = totals.values()
      goes_on = tf.logical_and(more > 0.0, stop + reached < 1.0)
      return (metrics, tf.stack(list(totals.values()))), goes_on
