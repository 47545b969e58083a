"""One task of one contender of `benchmarks.cluster`: trains so many steps and times them.

  python -m benchmarks.cluster_worker '{"contender": "distributed_replicated", "task": ...}'

The chief writes what it measured as one JSON object: `seconds` of each step, and `first_s`, from
the start of the process to the end of the first step. All train the variables of a model by
momentum, with a gradient that is the variable itself, made small: it costs next to nothing, and
has to be computed where the variable has been fetched to. With `backprop_ms` the gradients come
one after the other, the last layer's first, over so long a time, in which no processor is busy: as
an accelerator would make them.
"""

from __future__ import annotations  # tf.Variable in a signature would import TensorFlow

from collections.abc import Callable, Mapping, Sequence
import json
import os
import sys
import time
from typing import Any

import hpm
from hpm.cluster.spec import Cluster

__all__ = ['CONTENDERS', 'MIRRORED', 'STRATEGY', 'SYNC_REPLICAS', 'main']

MIRRORED = 'MultiWorkerMirroredStrategy, 1 device'
SYNC_REPLICAS = 'SyncReplicasOptimizer, 1 device'
STRATEGY = 'ParameterServerStrategy, 1 device'
_SCHEDULED = 4  # steps of each worker that are waited for together

RATE, MOMENTUM = 1e-3, 0.9
SCALE = 1e-6
STARTED = time.perf_counter()


class Cheap:
  """The parameters of a model, and a loss whose gradient is in proportion to each of them.

  Args:
    model: whose parameters.
    backprop_s: how long the gradients take.
  """

  name, dtype, data_format, num_classes = 'cheap', 'float32', 'NHWC', 1

  def __init__(self, model: hpm.models.Model, backprop_s: float = 0.0):
    self._backprop_s = backprop_s
    self.shapes = {name: tuple(value.shape) for name, value in model.init(0)[0].items()}

  def init(self, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    import tensorflow as tf

    del seed
    with tf.device('/CPU:0'):
      return {name: tf.fill(shape, 0.01) for name, shape in self.shapes.items()}, {}

  def forward(self, params: Mapping[str, Any], state: Mapping[str, Any], images: Any, **_: Any):
    import tensorflow as tf

    from hpm.models.builder import Forward

    logits = tf.zeros([tf.shape(images)[0], 1]) + self.total(list(params.values()))
    return Forward(logits, dict(state), (), None)

  def total(self, values: Sequence[Any]) -> Any:
    """The loss: half the squares of all values, made small."""
    import tensorflow as tf

    if not self._backprop_s:
      return SCALE * tf.add_n([tf.nn.l2_loss(value) for value in values])
    num_layers = sum(len(value.shape) > 1 for value in values)

    def wait(scalar: Any, _: Any) -> Any:
      time.sleep(self._backprop_s / num_layers)
      return scalar

    @tf.custom_gradient
    def loss(*values: Any) -> Any:
      def backprop(upstream: Any) -> list[Any]:
        gradients, scale = [], SCALE * upstream
        for value in reversed(values):
          if len(value.shape) > 1:  # a layer's kernel
            # A tower with stateful calls hands on all gradients at once, when the last is there; a
            # stateless one of nothing but constants would be made before the step.
            given = [scale, tf.reshape(value, [-1])[0]]
            scale = tf.numpy_function(wait, given, tf.float32, stateful=False)
            scale = tf.ensure_shape(scale, [])
          gradients.append(scale * value)
        return gradients[::-1]

      return SCALE * tf.add_n([tf.nn.l2_loss(value) for value in values]), backprop

    return loss(*(tf.convert_to_tensor(value) for value in values))


def cheap(settings: Mapping[str, Any]) -> Cheap:
  """The model of a contender."""
  return Cheap(hpm.models.create(settings['model']), settings['backprop_ms'] / 1e3)


def main() -> int:
  settings = json.loads(sys.argv[1])
  job, _, index = settings['task'].partition(':')
  cluster = Cluster(job, int(index), tuple(settings['worker_hosts']), tuple(settings['ps_hosts']))
  with hpm.cluster.Watch(
    cluster, on_death=lambda death: os._exit(3), timeout_s=60.0, startup_timeout_s=120.0
  ) as watch:
    watch.wait_for_all()
    if job == 'ps':
      from hpm.cluster import server

      if settings['contender'] == STRATEGY:
        _serve(_strategy_spec(cluster), 'ps', cluster.task_index)
      started = server.start(cluster)
      watch.wait_for_end()
      del started
      return 0
    step = CONTENDERS[settings['contender']](cluster, settings)
    seconds, first = [], None
    for _ in range(settings['warmup'] + settings['steps']):
      begun = time.perf_counter()
      taken = step() or 1
      first = first or time.perf_counter() - STARTED
      seconds.append((time.perf_counter() - begun) / taken)
    if cluster.is_chief:
      print(json.dumps({'seconds': seconds[settings['warmup'] :], 'first_s': first}), flush=True)
    if settings['contender'] == STRATEGY:
      os._exit(0)  # its workers serve for ever
  sys.stdout.flush()
  os._exit(0)  # strategies of tf.distribute have threads that wait for one another


def ours(mode: str, **options: Any) -> Callable[[Cluster, dict[str, Any]], Callable[[], Any]]:
  """A mode of this library."""

  def start(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
    runtime = hpm.cluster.join(cluster, settings['num_devices'])
    import tensorflow as tf

    model = cheap(settings)
    with runtime.scope():
      manager = hpm.variable_mgr.create(mode, runtime.devices, **runtime.options, **options)
      optimizer = hpm.optimizers.create('momentum', RATE, momentum=MOMENTUM)
      step = hpm.TrainStep(
        model,
        manager,
        optimizer,
        loss=lambda labels, logits: logits[:, 0],
        preprocess=lambda images, dtype, layout: images,
      )
    training = runtime.training(step)
    training.begin()
    batch = (tf.zeros([1, 1], tf.float32), tf.zeros([1], tf.int64))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    running = training.run(data)

    def run() -> None:
      float(next(running).loss)

    return run

  return start


def multi_worker_mirrored(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
  """tf.distribute's collectives, with one device a worker, which is all that it takes of CPUs."""
  os.environ['TF_CONFIG'] = json.dumps(
    {'cluster': cluster.as_dict(), 'task': {'type': 'worker', 'index': cluster.task_index}}
  )
  import tensorflow as tf

  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  model = cheap(settings)
  with strategy.scope():
    variables = [tf.Variable(tf.fill(shape, 0.01)) for shape in model.shapes.values()]
    slots = [tf.Variable(tf.zeros(shape)) for shape in model.shapes.values()]

  def replica() -> Any:
    with tf.GradientTape() as tape:
      loss = model.total(variables)
    gradients = tape.gradient(loss, variables)
    context = tf.distribute.get_replica_context()
    gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

    def apply(strategy: Any, gradients: Any) -> None:
      for variable, slot, gradient in zip(variables, slots, gradients, strict=True):
        strategy.extended.update(slot, lambda s, g: s.assign(MOMENTUM * s + g), args=(gradient,))
        strategy.extended.update(variable, lambda v, s: v.assign_sub(RATE * s), args=(slot,))

    context.merge_call(apply, args=(gradients,))
    return loss

  step = tf.function(lambda: strategy.run(replica))

  def run() -> None:
    strategy.experimental_local_results(step())[0].numpy()

  return run


def parameter_server_strategy(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
  """tf.distribute's parameter servers, asynchronous, one tower a worker.

  Worker 0 is the process that coordinates and computes nothing; it says how many steps of each
  worker a call has made. The update is one fused op on the parameter server, as this library's.
  """
  import tensorflow as tf

  spec, workers = _strategy_spec(cluster), cluster.num_workers - 1
  if not cluster.is_chief:
    _serve(spec, 'worker', cluster.task_index - 1)
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    spec, task_type='chief', task_id=0, rpc_layer='grpc'
  )
  strategy = tf.distribute.ParameterServerStrategy(resolver)
  coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
  model = cheap(settings)
  with strategy.scope():
    variables = [tf.Variable(tf.fill(shape, 0.01)) for shape in model.shapes.values()]
    slots = [tf.Variable(tf.zeros(shape)) for shape in model.shapes.values()]

  @tf.function
  def step() -> Any:
    with tf.GradientTape() as tape:
      loss = model.total([tf.identity(variable) for variable in variables])
    gradients = tape.gradient(loss, variables)
    for variable, slot, gradient in zip(variables, slots, gradients, strict=True):
      with tf.device(variable.device):
        tf.raw_ops.ResourceApplyMomentum(
          var=variable.handle, accum=slot.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
        )
    return loss

  def run() -> int:
    for _ in range(_SCHEDULED * workers):
      coordinator.schedule(step)
    coordinator.join()
    return _SCHEDULED

  return run


def _strategy_spec(cluster: Cluster) -> Any:
  """The same tasks under the names that the strategy has for them."""
  import tensorflow as tf

  chief, *workers = cluster.worker_hosts
  return tf.train.ClusterSpec({'chief': [chief], 'worker': workers, 'ps': list(cluster.ps_hosts)})


def _serve(spec: Any, job: str, index: int) -> None:
  """A task that does what a coordinator asks of it; never returns."""
  import tensorflow as tf

  config = tf.compat.v1.ConfigProto(device_count={'GPU': 0})
  tf.distribute.Server(spec, job_name=job, task_index=index, protocol='grpc', config=config).join()


def sync_replicas(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
  """tf.compat.v1's SyncReplicasOptimizer in graph mode, one tower a worker."""
  import tensorflow as tf

  from hpm.cluster import server

  v1 = tf.compat.v1
  model = cheap(settings)
  started = server.start(cluster)
  graph = tf.Graph()
  with graph.as_default():
    own = f'/job:worker/task:{cluster.task_index}'
    places = v1.train.replica_device_setter(
      worker_device=own, ps_device='/job:ps/cpu:0', cluster=cluster.as_dict()
    )
    with v1.device(places):
      count = v1.train.get_or_create_global_step()
      variables = [
        v1.get_variable(f'v{i}', initializer=tf.fill(shape, 0.01), use_resource=True)
        for i, shape in enumerate(model.shapes.values())
      ]
      optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.MomentumOptimizer(RATE, MOMENTUM),
        replicas_to_aggregate=cluster.num_workers,
        total_num_replicas=cluster.num_workers,
      )
      train = optimizer.minimize(model.total(variables), global_step=count, var_list=variables)
    hook = optimizer.make_session_run_hook(cluster.is_chief)
    config = server.config(cluster)
    config.allow_soft_placement = True
    session = v1.train.MonitoredTrainingSession(
      started.target,
      cluster.is_chief,
      hooks=[hook],
      config=config,
      save_checkpoint_secs=None,
      log_step_count_steps=None,
    )

  finished = 0

  def run() -> int:
    # Workers run ahead of the update by a step or so; gradients that come too late are dropped. So
    # what is counted are steps of the model.
    nonlocal finished
    before = finished
    while finished == before:
      session.run(train)
      finished = int(session.run(count))
    return finished - before

  return run


CONTENDERS: dict[str, Callable[[Cluster, dict[str, Any]], Callable[[], Any]]] = {
  name + devices: start
  for devices in ('', ', 1 device')
  for name, start in {
    'parameter_server': ours('parameter_server'),
    'parameter_server, asynchronous': ours('parameter_server', cross_replica_sync=False),
    'distributed_replicated': ours('distributed_replicated'),
    'collective_all_reduce': ours('collective_all_reduce'),
  }.items()
} | {
  MIRRORED: multi_worker_mirrored,
  SYNC_REPLICAS: sync_replicas,
  STRATEGY: parameter_server_strategy,
}


if __name__ == '__main__':
  sys.exit(main())
