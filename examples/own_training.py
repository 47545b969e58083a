"""Training code of one's own: loss, metric, data, frozen layers and a Keras optimizer.

python examples/own_training.py
"""

import keras
import tensorflow as tf

import hpm


def network(b: hpm.models.Builder, images: tf.Tensor) -> tf.Tensor:
  x = tf.nn.relu(b.conv('frozen', images, 8, 3))
  x = tf.stop_gradient(x)  # what lies before it is never moved
  return b.dense('logits', b.flatten(x), 2)


def hinge(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """One value a sample."""
  return tf.nn.relu(1.0 - tf.cast(2 * labels - 1, tf.float32) * (logits[:, 1] - logits[:, 0]))


def main() -> None:
  devices = hpm.devices.cpu(2)
  labels = tf.range(256, dtype=tf.int64) % 2
  noise = tf.random.stateless_uniform([256, 6, 6, 3], [0, 1], 0, 128, tf.int64)
  images = tf.cast(noise + 100 * labels[:, None, None, None], tf.uint8)
  data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(32)
  model = hpm.models.Model(network, name='own', image_shape=(6, 6, 3), num_classes=2)
  manager = hpm.variable_mgr.create('replicated', devices)
  rate = keras.optimizers.schedules.CosineDecay(0.05, 40)
  optimizer = hpm.optimizers.from_keras(keras.optimizers.SGD(rate, momentum=0.5))
  step = hpm.TrainStep(model, manager, optimizer, loss=hinge, count_hits=True)
  for metrics in step.run(data.repeat(10)):
    share = metrics.top_1 / metrics.num_samples
  print(f'step {metrics.step}: loss {metrics.loss:.3f}, right {share:.0%}')


if __name__ == '__main__':
  main()
