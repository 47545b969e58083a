"""What the processes of a test train, and what they have to end with."""

from typing import Any

import numpy as np
import tensorflow as tf

import hpm
from tests.parity import harness, simulation

__all__ = [
  'create_step',
  'dataset',
  'expected',
  'expected_loss',
  'linear_values',
  'own_copies',
  'steps_of',
  'validation',
  'wide',
]


def create_step(case: dict[str, Any], manager: hpm.variable_mgr.VariableManager) -> hpm.TrainStep:
  """The step of a case: `two_layers`, or a network whose gradients know nothing of its weights."""
  options = case.get('step', {})
  if case.get('model') == 'linear':
    rate = hpm.optimizers.create('sgd', 0.5)
    return harness.create_step(manager, rate, linear(), loss=of_logits, **options)
  models = {'two_layers': harness.two_layers, 'normalized': harness.normalized, 'wide': wide}
  model = models[case.get('model', 'two_layers')]()
  return harness.create_step(manager, case.get('optimizer', 'momentum'), model, **options)


def linear() -> hpm.models.Model:
  """Images of 4 x 4 x 3 to 5 logits."""

  def network(b, images):
    return b.dense('logits', b.flatten(images), 5)

  return hpm.models.Model(network, name='linear', image_shape=(4, 4, 3), num_classes=5)


def wide() -> hpm.models.Model:
  """100 MB of parameters, and little to compute."""

  def network(b, images):
    x = tf.nn.relu(b.dense('in', b.flatten(images), 3072))
    for i in range(2):
      x = tf.nn.relu(b.dense(f'hidden_{i}', x, 3072))
    for i in range(4):
      x = tf.nn.relu(b.dense(f'narrow_{i}', x, 1024))
    return b.dense('logits', x, 5)

  return hpm.models.Model(network, name='wide', image_shape=(4, 4, 3), num_classes=5)


def of_logits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Their sum: its gradient is the image."""
  del labels
  return tf.reduce_sum(logits, 1)


def steps_of(case: dict[str, Any]) -> list[list[harness.Batch]]:
  """The batches of each step, of all towers of all workers."""
  return harness.random_steps(case['sizes'])


def dataset(case: dict[str, Any], cluster: hpm.cluster.Cluster) -> tf.data.Dataset:
  """A worker's own batches, which end when it has had them all."""
  num_devices = len(case['sizes'][0]) // cluster.num_workers
  first = cluster.task_index * num_devices
  own = [
    batch
    for towers in steps_of(case)
    for batch in towers[first : first + num_devices]
    if len(batch[1])
  ]
  return tf.data.Dataset.from_generator(
    lambda: iter(own),
    output_signature=(
      tf.TensorSpec([None, 4, 4, 3], tf.uint8),
      tf.TensorSpec([None], tf.int64),
    ),
  )


def validation() -> tf.data.Dataset:
  """Batches that no training has; the last one is short, and the devices do not divide them."""
  ((images, labels),) = validation_batch()
  return tf.data.Dataset.from_tensor_slices((images, labels)).batch(2)


def validation_batch() -> list[harness.Batch]:
  """The same in one."""
  ((batch,),) = harness.random_steps([[9]], seed=1)
  return [batch]


def expected_loss(case: dict[str, Any]) -> float:
  """NumPy's mean loss over `validation` after the step that `evaluate_after` names."""
  values = expected({**case, 'sizes': case['sizes'][: case['evaluate_after']]}).values
  params = {n.removeprefix('params/'): v for n, v in values.items() if n.startswith('params/')}
  ((images, labels),) = validation_batch()
  return simulation.two_layers(params, images, labels)[0] / len(labels)


def own_copies(runtime: Any, manager: hpm.variable_mgr.VariableManager) -> dict[str, np.ndarray]:
  """<tower>/<name> -> the value on that tower's device, where a device keeps its own."""
  with runtime.scope():
    values = {
      f'{tower}/{name}': variable.read_value()
      for tower in range(len(manager.devices))
      for name, variable in manager.copy_of(tower).items()
      if manager.copy_of(tower) is not manager.copies[0] or len(manager.copies) > 1
    }
  return runtime.run(values) if values else {}


def expected(case: dict[str, Any]) -> simulation.Result:
  """What NumPy ends with, from the batches of all workers together."""
  model = case.get('model', 'two_layers')
  network = {'two_layers': simulation.two_layers, 'normalized': simulation.normalized}[model]
  start = harness.start_values(getattr(harness, model)())
  rule = harness.OPTIMIZERS[case.get('optimizer', 'momentum')][1]
  return simulation.train(start, steps_of(case), rule, network=network)


def linear_values(case: dict[str, Any], num_workers: int) -> dict[str, np.ndarray]:
  """The linear network after asynchronous workers have all applied all of their own means."""
  values = harness.start_values(linear())
  kernel = values['logits/kernel'].astype(np.float64)
  bias = values['logits/bias'].astype(np.float64)
  for towers in steps_of(case):
    num_devices = len(towers) // num_workers
    for worker in range(num_workers):
      batches = towers[worker * num_devices : (worker + 1) * num_devices]
      images = simulation.normalize(np.concatenate([batch[0] for batch in batches]))
      mean = images.reshape(len(images), -1).mean(axis=0)
      kernel -= 0.5 * mean[:, None]
      bias -= 0.5
  return {'params/logits/kernel': kernel, 'params/logits/bias': bias}
