"""A loss and a GradientTape of one's own; hpm keeps only the variables and sums the gradients.

python examples/own_loop.py
"""

import tensorflow as tf

import hpm
from hpm.variable_mgr import Mean, TowerResult


def main() -> None:
  devices = hpm.devices.cpu(2)
  all_reduce = hpm.variable_mgr.all_reduce('collective', devices)
  manager = hpm.variable_mgr.create('replicated', devices, all_reduce_spec=all_reduce)
  optimizer = hpm.optimizers.create('sgd', learning_rate=0.1)
  manager.create({'slopes': tf.zeros([3, 1]), 'offset': tf.zeros([1])}, {}, optimizer)

  @tf.function(autograph=False)
  def train(batches, step):
    towers = []
    for i, (device, x) in enumerate(zip(devices, batches, strict=True)):
      params, _ = manager.read(i)
      with tf.device(device), tf.GradientTape() as tape:
        tape.watch(params)
        error = x @ params['slopes'] + params['offset'] - (x @ [[2.0], [-3.0], [0.5]] + 4.0)
        loss = tf.reduce_sum(tf.square(error))
      gradients = tape.gradient(loss, params)
      towers.append(TowerResult(gradients, {}, tf.constant(x.shape[0], tf.int64)))
    manager.update(towers, Mean(), optimizer, step)

  for step in range(100):
    train([tf.random.normal([64, 3]) for _ in devices], tf.constant(step, tf.int64))
  for name, value in manager.snapshot().items():
    print(name, value.numpy().ravel().round(3))


if __name__ == '__main__':
  main()
