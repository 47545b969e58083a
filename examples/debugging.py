"""A training step line by line, to look at a network's tensors or stop among them.

python examples/debugging.py
"""

import tensorflow as tf

import hpm


def network(b: hpm.models.Builder, images: tf.Tensor) -> tf.Tensor:
  x = tf.nn.relu(b.conv('conv', images, 8, 3))
  look('relu', x)
  x = b.dense('logits', b.global_average_pool(x), 2)
  look('logits', x)
  return x


def look(name: str, x: tf.Tensor) -> None:
  if tf.executing_eagerly():  # here breakpoint() works as well
    print(f'{name} {x.shape}: mean {tf.reduce_mean(x):.3f}, largest {tf.reduce_max(x):.3f}')


def main() -> None:
  devices = hpm.devices.cpu(2)
  model = hpm.models.Model(network, name='own', image_shape=(6, 6, 3), num_classes=2)
  manager = hpm.variable_mgr.create('replicated', devices)
  step = hpm.TrainStep(model, manager, hpm.optimizers.create('sgd', learning_rate=0.1))
  images = tf.cast(tf.random.stateless_uniform([4, 6, 6, 3], [0, 1], 0, 256, tf.int32), tf.uint8)
  labels = tf.constant([0, 1, 0, 1], tf.int64)
  tf.config.run_functions_eagerly(True)
  metrics = step([(images[:2], labels[:2]), (images[2:], labels[2:])])  # a batch a device
  print(f'step {metrics.step}: loss {metrics.loss:.3f} over {metrics.num_samples} images')


if __name__ == '__main__':
  main()
