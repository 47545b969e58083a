"""A training of one's own under the driver's watchdog, in which a part stops for ever.

python stalling.py SECONDS source, staging or computing

The source sleeps in one of its samples, or the copies to the devices don't arrive any more, or the
towers don't end, each after some steps.
"""

import os
import sys
import threading

import numpy as np
import tensorflow as tf

from benchmarks import stalls
import hpm
from hpm.cluster.watchdog import Stages
from hpm.staging import StagedLoop

STEPS = 4  # that end, before one doesn't
stopped = threading.Event()


class Sleeper:
  """64 images as a data set of one's own; it sleeps when it should."""

  def __init__(self, sleeps: bool):
    self.sleeps = sleeps
    self._image = tf.io.encode_png(tf.zeros([32, 32, 3], tf.uint8)).numpy()

  def __len__(self):
    return 64

  def __getitem__(self, index):
    if self.sleeps and stopped.is_set():
      threading.Event().wait()
    return self._image, index % 3


def stops(tensor: tf.Tensor) -> tf.Tensor:
  """The same, until it stops."""

  def wait(value: np.ndarray) -> np.ndarray:
    if stopped.is_set():
      threading.Event().wait()
    return value

  same = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
  same.set_shape(tensor.shape)
  return same


class Stopping(StagedLoop):
  """Whose copies to the devices stop."""

  def _at(self, device, batch):
    return super()._at(device, [stops(tensor) for tensor in batch])


def main(timeout_s: float, fault: str) -> None:
  def preprocess(images, dtype, layout):
    del layout
    images = tf.cast(images, dtype)
    return stops(images) if fault == 'computing' else images

  devices = hpm.devices.cpu(2)
  model = hpm.models.create('trivial', num_classes=3, image_size=8)
  manager = hpm.variable_mgr.create('replicated', devices)
  rule = hpm.optimizers.create('sgd', 0.001)
  step = hpm.TrainStep(model, manager, rule, preprocess=preprocess)
  if fault == 'staging':
    step._loop.__class__ = Stopping
  pipeline = hpm.pipelines.create(
    'iterable',
    samples=Sleeper(fault == 'source'),
    batch_size=1,
    image_size=8,
    num_classes=3,
    prefetch=1,
  )
  stages = Stages()
  run = stalls.Run('Sleeper')
  run.steps.append(step)

  def end(line: str) -> None:
    os.write(2, f'error: {line}\n'.encode())
    os._exit(stalls.EXIT_CODE)

  with stalls.watched(run, stages, timeout_s, end):
    stages.enter('step', 1)
    for number, _ in enumerate(step.run(pipeline.dataset()), 2):
      stages.enter('step', number)
      if number == STEPS:
        stopped.set()


if __name__ == '__main__':
  main(float(sys.argv[1]), sys.argv[2])
