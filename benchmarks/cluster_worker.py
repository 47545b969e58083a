"""One task of one contender of `benchmarks.cluster`: trains so many steps and times them.

  python -m benchmarks.cluster_worker '{"contender": "distributed_replicated", "task": ...}'

The chief writes what it measured as one JSON object: `seconds` of each step, and `first_s`, from
the start of the process to the end of the first step. All train the variables of a model with a
gradient that costs next to nothing, by momentum.
"""

from __future__ import annotations  # tf.Variable in a signature would import TensorFlow

from collections.abc import Callable, Mapping
import json
import os
import sys
import time
from typing import Any

import hpm
from hpm.cluster.spec import Cluster

__all__ = ['CONTENDERS', 'main']

RATE, MOMENTUM = 1e-3, 0.9
STARTED = time.perf_counter()


class Cheap:
  """The parameters of a model, and a loss whose gradient is one number for each of them."""

  name, dtype, data_format, num_classes = 'cheap', 'float32', 'NHWC', 1

  def __init__(self, model: hpm.models.Model):
    self.shapes = {name: tuple(value.shape) for name, value in model.init(0)[0].items()}

  def init(self, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    import tensorflow as tf

    del seed
    with tf.device('/CPU:0'):
      return {name: tf.fill(shape, 0.01) for name, shape in self.shapes.items()}, {}

  def forward(self, params: Mapping[str, Any], state: Mapping[str, Any], images: Any, **_: Any):
    import tensorflow as tf

    from hpm.models.builder import Forward

    logits = tf.zeros([tf.shape(images)[0], 1]) + total(params.values())
    return Forward(logits, dict(state), (), None)


def total(variables: Any) -> Any:
  """A loss: the sum of all values of all variables, made small."""
  import tensorflow as tf

  return 1e-6 * tf.add_n([tf.reduce_sum(variable) for variable in variables])


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

      started = server.start(cluster)
      watch.wait_for_end()
      del started
      return 0
    step = CONTENDERS[settings['contender']](cluster, settings)
    seconds, first = [], None
    for _ in range(settings['warmup'] + settings['steps']):
      begun = time.perf_counter()
      step()
      first = first or time.perf_counter() - STARTED
      seconds.append(time.perf_counter() - begun)
    if cluster.is_chief:
      print(json.dumps({'seconds': seconds[settings['warmup'] :], 'first_s': first}), flush=True)
  sys.stdout.flush()
  os._exit(0)  # strategies of tf.distribute have threads that wait for one another


def ours(mode: str, **options: Any) -> Callable[[Cluster, dict[str, Any]], Callable[[], Any]]:
  """A mode of this library."""

  def start(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
    runtime = hpm.cluster.join(cluster, settings['num_devices'])
    import tensorflow as tf

    model = Cheap(hpm.models.create(settings['model']))
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
    return lambda: float(next(running).loss)

  return start


def multi_worker_mirrored(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
  """tf.distribute's collectives, with one device a worker, which is all that it takes of CPUs."""
  os.environ['TF_CONFIG'] = json.dumps(
    {'cluster': cluster.as_dict(), 'task': {'type': 'worker', 'index': cluster.task_index}}
  )
  import tensorflow as tf

  strategy = tf.distribute.MultiWorkerMirroredStrategy()
  model = Cheap(hpm.models.create(settings['model']))
  with strategy.scope():
    variables = [tf.Variable(tf.fill(shape, 0.01)) for shape in model.shapes.values()]
    slots = [tf.Variable(tf.zeros(shape)) for shape in model.shapes.values()]

  def replica() -> Any:
    with tf.GradientTape() as tape:
      loss = total(variables)
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
  return lambda: strategy.experimental_local_results(step())[0].numpy()


def sync_replicas(cluster: Cluster, settings: dict[str, Any]) -> Callable[[], Any]:
  """tf.compat.v1's SyncReplicasOptimizer in graph mode, one tower a worker."""
  import tensorflow as tf

  from hpm.cluster import server

  v1 = tf.compat.v1
  shapes = Cheap(hpm.models.create(settings['model'])).shapes
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
        for i, shape in enumerate(shapes.values())
      ]
      optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.MomentumOptimizer(RATE, MOMENTUM),
        replicas_to_aggregate=cluster.num_workers,
        total_num_replicas=cluster.num_workers,
      )
      train = optimizer.minimize(total(variables), global_step=count, var_list=variables)
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
  return lambda: session.run(train)


CONTENDERS: dict[str, Callable[[Cluster, dict[str, Any]], Callable[[], Any]]] = {
  'parameter_server': ours('parameter_server'),
  'parameter_server, asynchronous': ours('parameter_server', cross_replica_sync=False),
  'distributed_replicated': ours('distributed_replicated'),
  'collective_all_reduce': ours('collective_all_reduce'),
  'collective_all_reduce, 1 device': ours('collective_all_reduce'),
  'MultiWorkerMirroredStrategy, 1 device': multi_worker_mirrored,
  'SyncReplicasOptimizer, 1 device': sync_replicas,
}


if __name__ == '__main__':
  sys.exit(main())
