"""The contenders of `benchmarks.model_step`, each in a process of its own.

  python -m benchmarks.step_workers WORKER MODEL BATCH_SIZE IMAGE_SIZE training|forward

builds a model, runs one step, prints `{}`, and for each number on its input runs so many steps and
prints their seconds and the process's peak memory as JSON. All contenders compute the same: uint8
images scaled to -1 .. 1, logits of 1000 classes, and in training cross entropy, gradients and SGD
with momentum; no weight decay, no auxiliary heads.

Nothing but the standard library is imported before a worker is chosen, so a Python that has torch
and torchvision needs nothing else.
"""

from collections.abc import Callable, Sequence
import functools
import json
import os
import sys
import time
from typing import Any

from benchmarks import machine

__all__ = ['NAMESAKES', 'WORKERS', 'main']

Run = Callable[[int], None]

# Model of hpm -> its namesakes in keras.applications and torchvision.
NAMESAKES = {
  'resnet50': ('ResNet50', None),
  'resnet50_v1.5': (None, 'resnet50'),
  'resnet101': ('ResNet101', None),
  'resnet152': ('ResNet152', None),
  'inception3': ('InceptionV3', 'inception_v3'),
  'vgg16': ('VGG16', 'vgg16'),
  'vgg19': ('VGG19', 'vgg19'),
  'densenet121': ('DenseNet121', 'densenet121'),
  'mobilenet_v2': ('MobileNetV2', 'mobilenet_v2'),
  'alexnet': ('alexnet', 'alexnet'),
}
# What makes ours and torchvision's the same network as Keras's: those drop nothing.
OPTIONS = {
  'inception3': {'auxiliary': False, 'dropout': 0.0},
  'vgg16': {'dropout': 0.0},
  'vgg19': {'dropout': 0.0},
  'mobilenet_v2': {'dropout': 0.0},
}
TORCH_OPTIONS = {
  'inception3': {'aux_logits': False, 'init_weights': False, 'dropout': 0.0},
  'vgg16': {'dropout': 0.0},
  'vgg19': {'dropout': 0.0},
  'mobilenet_v2': {'dropout': 0.0},
}
RATE, MOMENTUM, CLASSES = 1e-3, 0.9, 1000


def build_hpm(name: str, batch_size: int, image_size: int, training: bool, **options: Any) -> Run:
  import hpm

  model = hpm.models.create(name, image_size=image_size, **OPTIONS.get(name, {}), **options)
  pipeline = hpm.pipelines.create('synthetic', batch_size=batch_size, image_size=image_size)
  if not training:
    module = hpm.models.Module(model, preprocess=hpm.pipelines.normalize)
    return forward(module, iter(pipeline.dataset()))
  manager = hpm.variable_mgr.create('replicated', hpm.devices.cpu(1))
  optimizer = hpm.optimizers.create('momentum', learning_rate=RATE, momentum=MOMENTUM)
  running = hpm.TrainStep(model, manager, optimizer).run(pipeline.dataset())

  def run(steps: int) -> None:
    for _ in range(steps):
      float(next(running).loss)

  return run


def forward(model: Callable[..., Any], iterator: Any) -> Run:
  """The forward pass of a model of hpm or Keras over (images, labels) batches."""
  import tensorflow as tf

  @tf.function(autograph=False)
  def predict(images: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(model(images, training=False))

  def run(steps: int) -> None:
    for _ in range(steps):
      float(predict(next(iterator)[0]))

  return run


def keras_model(name: str, image_size: int) -> Any:
  """uint8 images to logits."""
  import keras

  namesake = NAMESAKES[name][0]
  shape = (image_size, image_size, 3)
  if namesake == 'alexnet':
    network = keras.Sequential(keras_alexnet(shape))
  else:
    application = getattr(keras.applications, namesake)
    network = application(weights=None, input_shape=shape, classifier_activation=None)
  scaled = keras.layers.Rescaling(1 / 127.5, -1.0)
  return keras.Sequential([keras.layers.Input(shape, dtype='uint8'), scaled, network])


def keras_alexnet(shape: tuple[int, int, int]) -> list[Any]:
  """The layers of `hpm.models.alexnet`, as a user of Keras writes them: applications has none."""
  from keras import layers

  network = [layers.Input(shape)]
  for filters, size, strides, padding, pool in (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
  ):
    if strides > 1:
      network.append(layers.ZeroPadding2D(padding))
    same = 'valid' if strides > 1 else 'same'
    network.append(layers.Conv2D(filters, size, strides, same, activation='relu'))
    if pool:
      network.append(layers.MaxPooling2D(3, 2))
  network.append(layers.Flatten())
  for _ in range(2):
    network += [layers.Dropout(0.5), layers.Dense(4096, activation='relu')]
  return [*network, layers.Dense(CLASSES)]


def keras_data(batch_size: int, image_size: int) -> Any:
  """An endless data set of one batch, as hpm's synthetic pipeline gives it."""
  import numpy as np
  import tensorflow as tf

  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (batch_size, image_size, image_size, 3)).astype(np.uint8)
  labels = rng.integers(0, CLASSES, batch_size)
  return tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(2)


def build_keras_loop(name: str, batch_size: int, image_size: int, training: bool) -> Run:
  """A custom loop: GradientTape in one tf.function."""
  import keras
  import tensorflow as tf

  model = keras_model(name, image_size)
  iterator = iter(keras_data(batch_size, image_size))
  if not training:
    return forward(model, iterator)
  optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
  loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  @tf.function
  def step() -> tf.Tensor:
    images, labels = next(iterator)
    with tf.GradientTape() as tape:
      loss = loss_function(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss

  def run(steps: int) -> None:
    for _ in range(steps):
      float(step())

  return run


def build_keras_fit(name: str, batch_size: int, image_size: int, training: bool) -> Run:
  """`fit`, or `predict`."""
  import keras

  model = keras_model(name, image_size)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss)
  dataset = keras_data(batch_size, image_size)
  if training:
    return lambda steps: model.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0)
  return lambda steps: model.predict(dataset, steps=steps, verbose=0)


def build_torch(name: str, batch_size: int, image_size: int, training: bool, compiled: bool) -> Run:
  """torchvision's network with channels last, which its convolutions on CPUs prefer."""
  import torch
  import torchvision

  create = getattr(torchvision.models, NAMESAKES[name][1])
  model = create(weights=None, **TORCH_OPTIONS.get(name, {}))
  model = model.to(memory_format=torch.channels_last).train(training)
  optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
  compute = torch.compile(model) if compiled else model
  images = torch.randint(0, 256, (batch_size, 3, image_size, image_size), dtype=torch.uint8)
  images = images.to(memory_format=torch.channels_last)
  labels = torch.randint(0, CLASSES, (batch_size,))

  def train() -> Any:
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(compute(images.float() / 127.5 - 1.0), labels)
    loss.backward()
    optimizer.step()
    return loss

  def predict() -> Any:
    with torch.inference_mode():
      return compute(images.float() / 127.5 - 1.0).max()

  def run(steps: int) -> None:
    for _ in range(steps):
      float(train() if training else predict())

  return run


def build_matmul(*_: Any) -> Run:
  """A product of two 4096 x 4096 matrices: what TensorFlow gets out of this processor at most."""
  import tensorflow as tf

  a = tf.random.normal([4096, 4096])
  product = tf.function(lambda: tf.reduce_sum(a @ a))

  def run(steps: int) -> None:
    for _ in range(steps):
      float(product())

  return run


WORKERS: dict[str, Callable[..., Run]] = {
  'hpm': build_hpm,
  'hpm_nchw': functools.partial(build_hpm, data_format='NCHW'),
  'hpm_pad_channels': functools.partial(build_hpm, stem_rewrite='pad_channels'),
  'hpm_space_to_depth': functools.partial(build_hpm, stem_rewrite='space_to_depth'),
  'keras_loop': build_keras_loop,
  'keras_fit': build_keras_fit,
  'torch_eager': functools.partial(build_torch, compiled=False),
  'torch_compile': functools.partial(build_torch, compiled=True),
  'matmul': build_matmul,
}


def main(arguments: Sequence[str]) -> None:
  """A worker's life: build, say so, then run as many steps as each line of input says."""
  worker, name, batch_size, image_size, kind = arguments
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)  # what libraries print is none of the answers
  run = WORKERS[worker](name, int(batch_size), int(image_size), kind == 'training')
  run(1)
  print('{}', file=answers)
  for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    run(int(line))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
      json.dumps({'wall_s': wall, 'cpu_s': cpu, 'peak_mib': machine.peak_rss_mib()}), file=answers
    )


if __name__ == '__main__':
  main(sys.argv[1:])
