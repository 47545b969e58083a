"""Training over parameter servers: one graph and one session a worker, variables shared by name.

TensorFlow's eager runtime shares no variables between clients that train at the same time; sessions
do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hpm import optimizers
from hpm.cluster import server as servers
from hpm.cluster.spec import Cluster
from hpm.cluster.training import Training
from hpm.devices import CPU, select
from hpm.errors import DataError, UsageError
from hpm.staging import StagedLoop, blocked
from hpm.step import EvalStep, Metrics, TrainStep
from hpm.variable_mgr.ps_tasks import ParameterServerTasks
from hpm.variable_mgr.rendezvous import Rendezvous
from hpm.variable_mgr.replicated import Replicated

__all__ = ['SessionRuntime', 'SessionTraining']


class SessionRuntime:
  """A worker of a cluster with parameter servers: its server, its graph, its session.

  Args:
    cluster: who takes part; this process is one of the workers.
    num_devices: compute devices of this worker.
    kind: 'cpu' or 'gpu'.
    container: keeps what one training has on the parameter servers apart from another's; letters
      and digits.
    server: that of an earlier runtime of this process.

  Attributes:
    devices: device strings, for a manager.
    options: further options of a manager, for `hpm.variable_mgr.create`.
    server: TensorFlow's server in this process.
  """

  def __init__(
    self,
    cluster: Cluster,
    num_devices: int,
    kind: str = 'cpu',
    *,
    container: str = '',
    server: tf.distribute.Server | None = None,
  ):
    self.cluster = cluster
    self.devices = select(kind, num_devices)
    self.options = {
      'ps_devices': [servers.ps_device(i) for i in range(cluster.num_ps)],
      'worker': cluster.task_index,
      'num_workers': cluster.num_workers,
    }
    self._config = servers.config(cluster, num_devices, kind)
    self._container = container
    self.server = server or servers.start(cluster, num_devices, kind)
    self._graph = tf.Graph()
    self._session: tf.compat.v1.Session | None = None

  @contextlib.contextmanager
  def scope(self) -> Iterator[None]:
    """Inside, variables and steps are built into this worker's graph, on its devices."""
    with (
      self._graph.as_default(),
      self._graph.container(self._container),
      tf.device(f'/job:worker/task:{self.cluster.task_index}'),
    ):
      yield

  def training(self, step: TrainStep) -> 'SessionTraining':
    """The step, which was created in `scope`, for training in this cluster."""
    return SessionTraining(self, step)

  def run(self, fetches: Any, feed: Mapping[tf.Tensor, Any] | None = None) -> Any:
    """Runs a part of the graph in this worker's session."""
    if self._session is None:
      self._session = tf.compat.v1.Session(
        self.server.target, graph=self._graph, config=self._config
      )
    return self._session.run(fetches, feed)

  def close(self) -> None:
    """Ends the session; the server goes with the process."""
    if self._session is not None:
      self._session.close()
      self._session = None


class SessionTraining(Training):
  """A `Training` in a `SessionRuntime`: variables, sums and messages are on parameter servers.

  Args:
    runtime: where it runs.
    step: what runs, created in the runtime's scope.
  """

  def __init__(self, runtime: SessionRuntime, step: TrainStep):
    assert isinstance(step.manager, ParameterServerTasks)
    self.manager: ParameterServerTasks
    super().__init__(step, runtime.cluster.task_index, runtime.cluster.num_workers)
    self._runtime = runtime
    self._failed = False
    self._loops: dict[Any, _Loop] = {}
    self._iterator: Any = None
    self._prime: Callable[[], Any] = lambda: None
    with runtime.scope():
      with tf.device(CPU):
        self._values = {
          name: tf.compat.v1.placeholder(v.dtype, v.shape)
          for name, v in step.named_variables().items()
        }
        self._own_consumed = tf.compat.v1.placeholder(tf.float64, [len(self.consumed)])
      self._snapshot = step.snapshot()
      self._restore = tf.group(*step.restore(self._values))
      self._tell, self._begun = self._beginning()
    runtime.run(
      [
        variable.initializer
        for variable in step.variables
        if not self._worker or not variable.device.startswith('/job:ps')
      ]
    )

  def begin(self):
    if not self._worker:
      self._runtime.run(self._tell, {self._own_consumed: self.consumed})
    self.consumed = [int(count) for count in self._runtime.run(self._begun)]

  def run(self, dataset, num_steps=None, steps_per_call=1):
    if steps_per_call != 1:
      raise UsageError(
        f'steps_per_call {steps_per_call}: over parameter servers each step is one run of a '
        'session, which has no loop in the graph: leave it out'
      )
    loop = self._loop(dataset)
    self._iterator = iter(dataset)
    fetch = loop.fetcher(self._iterator)
    staged = fetch()
    if not staged.num_samples:
      raise DataError('the data set yields no batch at all')
    first = staged.feed
    self._prime = lambda: self._runtime.run(loop.prime, first)
    self._prime()
    finished, goes_on = 0, True
    while goes_on and finished != num_steps:
      following = fetch()
      samples = [0] * len(self.consumed)
      samples[self._worker] = staged.num_samples
      votes = [following.num_samples > 0, *self._wishes(), *samples]
      try:
        metrics, totals = self._runtime.run(
          (loop.metrics, loop.totals), {**following.feed, loop.votes: votes}
        )
      except tf.errors.OpError:
        self._failed = True
        raise
      staged = following
      goes_on = self._agreed(totals)
      finished += 1
      yield Metrics(*metrics)

  def blocked(self, within_s):
    return blocked(self._iterator, self._prime, within_s)

  def eval_step(self, **options):
    return _EvalStep(self, self._runtime.devices, **options)

  def progress(self):
    counters = self._step.counters
    step, samples = self._runtime.run([self._snapshot[name] for name in counters][:2])
    return int(step), int(samples)

  def snapshot(self, names=None):
    """As `Training.snapshot`; for the chief.

    Raises:
      RuntimeError: a step has failed, and nothing has been restored since.
    """
    if self._failed:
      raise RuntimeError('a step failed midway: restore a checkpoint first')
    names = self._snapshot if names is None else names
    return self._runtime.run({name: self._snapshot[name] for name in names})

  def restore(self, values):
    lacking = {name: self._snapshot[name] for name in self._values if name not in values}
    values = {**self._runtime.run(lacking), **values}
    self._runtime.run(self._restore, {p: np.asarray(values[n]) for n, p in self._values.items()})
    self._failed = False

  def _beginning(self) -> tuple[tf.Operation, tf.Tensor]:
    """What the chief runs so that the others begin; and what all wait for."""
    home = self.manager.home
    place = servers.ps_device(0)
    rendezvous = Rendezvous('begin', place, self._worker, self._runtime.cluster.num_workers)
    counters = self._step.counters
    names = [f'consumed/{i}' for i in range(len(self.consumed))]
    with tf.device(home):
      message = dict(zip(names, tf.unstack(self._own_consumed), strict=True))
      message |= {name: variable.read_value() for name, variable in counters.items()}
      tell = tf.group(*rendezvous.tell(message))
      told = rendezvous.told(list(message))
      operations = []
      if self._worker and self.manager.synchronous:  # otherwise all share the chief's
        for name, variable in counters.items():
          value = tf.cast(told[name], variable.dtype)
          operations.append(tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value))
      consumed = tf.stack([told[name] for name in names])
      operations += self.manager.pull([consumed.op])
      with tf.control_dependencies(operations):
        return tell, tf.identity(consumed)

  def _loop(self, dataset: tf.data.Dataset) -> '_Loop':
    spec, _, _ = StagedLoop(self._step.build, self.manager.devices, None).specs(dataset)
    if spec not in self._loops:
      with self._runtime.scope():
        self._loops[spec] = _Loop(self._step, spec, self._num_votes)
      self._runtime.run(self._loops[spec].initializers)
    return self._loops[spec]


class _EvalStep(EvalStep):
  """Evaluates on copies of its own what the parameter servers hold when `evaluate` is called.

  So variables cross once for all batches, and are those of one moment, even where asynchronous
  workers train on.

  Args:
    training: whose variables.
    devices: this process's.
    averaged: see `EvalStep`.
    **options: of `EvalStep`.
  """

  def __init__(
    self,
    training: SessionTraining,
    devices: Sequence[str],
    *,
    averaged: bool = False,
    **options: Any,
  ):
    self._training = training
    manager = Replicated(devices)
    rule = optimizers.create('sgd', 0.0, average_decay=0.0 if averaged else None)
    manager.create(*training.model.init(0), rule)
    super().__init__(training.model, manager, averaged=averaged, **options)

  def evaluate(self, dataset):
    self.manager.restore(self._training.snapshot(self.manager.named_variables()))
    return super().evaluate(dataset)


class _Batches(NamedTuple):
  """One batch a device, as it is fed; no samples at all after the end of the data."""

  num_samples: int
  feed: dict[tf.Tensor, np.ndarray]


class _Loop:
  """The graph of a step and of its staging: a batch is fed while the one before is trained on.

  The staged batches are variables on the devices: what a session's run leaves for the next.
  """

  def __init__(self, step: TrainStep, spec: Sequence[tf.TensorSpec], num_votes: int):
    self._spec = spec
    self._fed: list[tuple[tf.Tensor, ...]] = []
    self.initializers, stores, staged = [], [], []
    for i, device in enumerate(step.manager.devices):
      fed, batch = [], []
      for s in spec:
        # int32 tensors stay in host memory whatever the device: labels travel as int64.
        dtype = tf.int64 if s.dtype == tf.int32 else s.dtype
        with tf.device(CPU):
          fed.append(tf.compat.v1.placeholder(dtype, s.shape))
          zeros = tf.zeros([d or 0 for d in s.shape], dtype)
        with tf.device(device):
          variable = tf.Variable(zeros, shape=s.shape, name=f'staged_{i}')
          value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=dtype)
          value.set_shape(s.shape)
          following = tf.identity(fed[-1])
          with tf.control_dependencies([value]):
            store = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=following)
        self.initializers.append(variable.initializer)
        stores.append(store)
        batch.append(value)
      self._fed.append(tuple(fed))
      staged.append(tuple(batch))
    self.prime = tf.group(*stores)
    with tf.device(CPU):
      self.votes = tf.compat.v1.placeholder(tf.float64, [num_votes])
      votes = {f'vote/{i}': value for i, value in enumerate(tf.unstack(self.votes))}
    metrics, totals = step.build_with_votes(staged, votes)
    with tf.device(CPU), tf.control_dependencies([self.prime]):
      self.totals = tf.stack(list(totals.values()))
    self.metrics = metrics

  def fetcher(self, iterator: Iterator[Sequence[tf.Tensor]]) -> Callable[[], _Batches]:
    """Takes the next batch a device from a data set's iterator, in turn."""

    def fetch() -> _Batches:
      feed, num_samples = {}, 0
      for fed in self._fed:
        batch = next(iterator, None)
        for i, placeholder in enumerate(fed):
          if batch is None:
            value = np.zeros([0, *placeholder.shape[1:]], placeholder.dtype.as_numpy_dtype)
          else:
            value = batch[i].numpy()
          feed[placeholder] = value
        num_samples += len(value)
      return _Batches(num_samples, feed)

    return fetch
