"""Handwritten digits on two devices: a model of one's own, trained and evaluated by hpm.

python examples/digits.py
"""

import numpy as np
from sklearn import datasets
import tensorflow as tf

import hpm


def network(b: hpm.models.Builder, images: tf.Tensor) -> tf.Tensor:
  x = tf.nn.relu(b.batch_norm('bn1', b.conv('conv1', images, 32, 3)))
  x = tf.nn.relu(b.batch_norm('bn2', b.conv('conv2', x, 64, 3, strides=2)))
  return b.dense('logits', b.flatten(x), 10)


def main() -> None:
  devices = hpm.devices.cpu(2)
  digits = datasets.load_digits()
  images = np.uint8(digits.images[..., np.newaxis] * 255 / 16)
  order = np.random.default_rng(0).permutation(len(images))
  images, labels = images[order], digits.target[order]

  model = hpm.models.Model(network, name='digits', image_shape=(8, 8, 1), num_classes=10)
  manager = hpm.variable_mgr.create('replicated', devices)
  step = hpm.TrainStep(model, manager, hpm.optimizers.create('momentum', learning_rate=0.05))

  train = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
  for metrics in step.run(train.shuffle(1437, seed=0).repeat(10).batch(32)):
    if metrics.step % 50 == 0:
      print(f'step {metrics.step}: loss {metrics.loss:.4f}')
  test = tf.data.Dataset.from_tensor_slices((images[1437:], labels[1437:])).batch(32)
  print(hpm.EvalStep(model, manager).evaluate(test))


if __name__ == '__main__':
  main()
