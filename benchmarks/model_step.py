"""One training step of a model beside Keras's and torch's own, in one run, by turns.

  python -m benchmarks.model_step                              # ResNet-50, batch 16, 224 pixels
  python -m benchmarks.model_step --model=vgg16 --batch_size=8 --pairs=7 --json=step.json
  python -m benchmarks.model_step --torch_python=PYTHON        # one that has torch and torchvision

Each contender lives in a process of its own, since oneDNN is chosen before TensorFlow is imported,
and waits while another runs. A round gives each contender the same number of steps; rounds are
repeated, the order turns, and what is compared are the ratios within a round: a machine that is
slow for a minute is slow for all. Warm-up is left out. CPU seconds stand beside wall time, because
a neighbour's load takes wall time and hardly any CPU time.

Contenders: hpm with oneDNN; keras.applications in a custom loop (GradientTape, one tf.function)
with oneDNN on and as TensorFlow comes; the same by `fit`, as it comes; torchvision's model with
channels_last, eager and by torch.compile.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import os
from pathlib import Path
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from absl import flags
import rich.console
import rich.table

from benchmarks import machine
from hpm import models
from hpm.errors import UsageError

__all__ = ['main', 'ratio_interval']

ROOT = Path(__file__).resolve().parent.parent

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

# Contender -> (worker, oneDNN: '1', or None as TensorFlow comes).
CONTENDERS = {
  'hpm': ('hpm', '1'),
  'keras+oneDNN': ('keras_loop', '1'),
  'keras': ('keras_loop', None),
  'keras fit': ('keras_fit', None),
  'torch eager': ('torch_eager', None),
  'torch.compile': ('torch_compile', None),
}


# The workers' side: builders of a function that runs n steps.


def build_hpm(name: str, batch_size: int, image_size: int) -> Callable[[int], None]:
  import hpm

  manager = hpm.variable_mgr.create('replicated', hpm.devices.cpu(1))
  model = hpm.models.create(name, image_size=image_size)
  optimizer = hpm.optimizers.create('momentum', learning_rate=1e-3)
  step = hpm.TrainStep(model, manager, optimizer)
  pipeline = hpm.pipelines.create('synthetic', batch_size=batch_size, image_size=image_size)
  running = step.run(pipeline.dataset())

  def run(steps: int) -> None:
    for _ in range(steps):
      float(next(running).loss)

  return run


def keras_model(name: str, image_size: int) -> Any:
  import keras

  namesake = NAMESAKES[name][0]
  shape = (image_size, image_size, 3)
  if namesake == 'alexnet':  # keras.applications has none: the same layers, as Keras has them
    layers = keras.layers
    model = [layers.Input(shape)]
    for filters, size, strides, padding, pool in (
      (64, 11, 4, 2, True),
      (192, 5, 1, 2, True),
      (384, 3, 1, 1, False),
      (256, 3, 1, 1, False),
      (256, 3, 1, 1, True),
    ):
      if strides > 1:
        model.append(layers.ZeroPadding2D(padding))
      same = 'valid' if strides > 1 else 'same'
      model.append(layers.Conv2D(filters, size, strides, same, activation='relu'))
      if pool:
        model.append(layers.MaxPooling2D(3, 2))
    model.append(layers.Flatten())
    for _ in range(2):
      model += [layers.Dropout(0.5), layers.Dense(4096, activation='relu')]
    return keras.Sequential([*model, layers.Dense(1000)])
  application = getattr(keras.applications, namesake)
  return application(weights=None, input_shape=shape, classifier_activation=None)


def keras_data(batch_size: int, image_size: int) -> tuple[Any, Any]:
  """uint8 images and labels, as hpm's synthetic pipeline gives them; normalised on the device."""
  import numpy as np

  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (batch_size, image_size, image_size, 3)).astype(np.uint8)
  return images, rng.integers(0, 1000, batch_size)


def build_keras_loop(name: str, batch_size: int, image_size: int) -> Callable[[int], None]:
  import keras
  import tensorflow as tf

  model = keras_model(name, image_size)
  optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
  loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  dataset = tf.data.Dataset.from_tensors(keras_data(batch_size, image_size)).repeat().prefetch(2)
  iterator = iter(dataset)

  @tf.function
  def step() -> tf.Tensor:
    images, labels = next(iterator)
    with tf.GradientTape() as tape:
      logits = model(tf.cast(images, tf.float32) / 127.5 - 1.0, training=True)
      loss = loss_function(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss

  def run(steps: int) -> None:
    for _ in range(steps):
      float(step())

  return run


def build_keras_fit(name: str, batch_size: int, image_size: int) -> Callable[[int], None]:
  import keras
  import tensorflow as tf

  rescaled = keras.Sequential(
    [
      keras.layers.Input((image_size, image_size, 3), dtype='uint8'),
      keras.layers.Rescaling(1 / 127.5, -1.0),
      keras_model(name, image_size),
    ]
  )
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  rescaled.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
  dataset = tf.data.Dataset.from_tensors(keras_data(batch_size, image_size)).repeat().prefetch(2)
  return lambda steps: rescaled.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0)


def build_torch(
  name: str, batch_size: int, image_size: int, compiled: bool
) -> Callable[[int], None]:
  import torch
  import torchvision

  options = {'aux_logits': True, 'init_weights': False} if name == 'inception3' else {}
  model = getattr(torchvision.models, NAMESAKES[name][1])(weights=None, **options)
  model = model.to(memory_format=torch.channels_last).train()
  optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
  forward = torch.compile(model) if compiled else model
  images = torch.randint(0, 256, (batch_size, 3, image_size, image_size), dtype=torch.uint8)
  images = images.to(memory_format=torch.channels_last)
  labels = torch.randint(0, 1000, (batch_size,))

  def run(steps: int) -> None:
    for _ in range(steps):
      optimizer.zero_grad(set_to_none=True)
      output = forward(images.float() / 127.5 - 1.0)
      if isinstance(output, tuple):
        loss = torch.nn.functional.cross_entropy(output.logits, labels)
        loss = loss + 0.4 * torch.nn.functional.cross_entropy(output.aux_logits, labels)
      else:
        loss = torch.nn.functional.cross_entropy(output, labels)
      loss.backward()
      optimizer.step()
      float(loss)

  return run


def build_matmul(*_: Any) -> Callable[[int], None]:
  """A product of two 4096 x 4096 matrices: what this processor can do at most, by this library."""
  import tensorflow as tf

  a = tf.random.normal([4096, 4096])
  product = tf.function(lambda: tf.reduce_sum(a @ a))

  def run(steps: int) -> None:
    for _ in range(steps):
      float(product())

  return run


WORKERS = {
  'hpm': build_hpm,
  'keras_loop': build_keras_loop,
  'keras_fit': build_keras_fit,
  'torch_eager': lambda *args: build_torch(*args, compiled=False),
  'torch_compile': lambda *args: build_torch(*args, compiled=True),
  'matmul': build_matmul,
}


def work(name: str, model: str, batch_size: int, image_size: int) -> None:
  """A worker's life: build, say so, then run as many steps as each line of input says."""
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)  # what libraries print is none of the answers
  run = WORKERS[name](model, batch_size, image_size)
  run(1)
  print('{}', file=answers)
  for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    run(int(line))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
      json.dumps({'wall_s': wall, 'cpu_s': cpu, 'peak_mib': machine.peak_rss_mib()}), file=answers
    )


# The parent's side.


class Contender:
  """A worker process; `run(n)` makes it take n steps and returns its seconds."""

  def __init__(self, label: str, worker: str, onednn: str | None, python: str, *args: Any):
    self.label = label
    env = {k: v for k, v in os.environ.items() if k != 'TF_ENABLE_ONEDNN_OPTS'}
    env |= {'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': str(ROOT)}
    if onednn is not None:
      env['TF_ENABLE_ONEDNN_OPTS'] = onednn
    command = [python, '-m', 'benchmarks.model_step', 'worker', worker, *map(str, args)]
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=env,
      cwd=ROOT,
    )
    self._answer()

  def run(self, steps: int) -> dict[str, float]:
    assert self._process.stdin is not None
    print(steps, file=self._process.stdin, flush=True)
    return self._answer()

  def close(self) -> None:
    self._process.kill()
    self._process.wait()

  def _answer(self) -> dict[str, float]:
    assert self._process.stdout is not None and self._process.stderr is not None
    line = self._process.stdout.readline()
    if not line:
      reason = self._process.stderr.read().strip().splitlines() or ['no message']
      raise RuntimeError(f'{self.label} failed: {reason[-1]}')
    return json.loads(line)


def ratio_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
  """Median of ratios and its 95 % interval, by 10,000 bootstrap samples (Efron 1979)."""
  rng = random.Random(seed)
  medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(10_000))
  return statistics.median(ratios), medians[250], medians[9749]


@contextlib.contextmanager
def started(labels: Sequence[str], options: Any) -> Iterator[list[Contender]]:
  """The contenders that can be had here, each built and warmed up once."""
  contenders: list[Contender] = []
  try:
    for label in labels:
      worker, onednn = CONTENDERS[label]
      python = options.torch_python if worker.startswith('torch') else sys.executable
      with console.status(f'starting {label}'):
        try:
          contenders.append(
            Contender(
              label, worker, onednn, python, options.model, options.batch_size, options.image_size
            )
          )
        except (RuntimeError, OSError) as error:
          console.print(f'left out: {error}')
    yield contenders
  finally:
    for contender in contenders:
      contender.close()


console = rich.console.Console()


def main(arguments: Sequence[str]) -> int:
  """Runs the comparison and prints it; 2 for flags that can't work."""
  if arguments and arguments[0] == 'worker':
    work(arguments[1], arguments[2], int(arguments[3]), int(arguments[4]))
    return 0
  try:
    options = parse(arguments)
  except (UsageError, flags.Error) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  if options is None:
    print(__doc__)
    return 0
  result = measure(options)
  show(result)
  if options.json:
    Path(options.json).write_text(json.dumps(result, indent=2))
  return 0


def parse(arguments: Sequence[str]) -> Any:
  values = flags.FlagValues()
  flags.DEFINE_string('model', 'resnet50', 'A model with a namesake.', flag_values=values)
  flags.DEFINE_integer('batch_size', 16, 'Images a step.', 1, flag_values=values)
  flags.DEFINE_integer('image_size', 224, 'Pixels.', 1, flag_values=values)
  flags.DEFINE_integer('pairs', 7, 'Rounds.', 1, flag_values=values)
  flags.DEFINE_integer('steps', 2, 'Steps of each contender a round.', 1, flag_values=values)
  flags.DEFINE_string('json', None, 'Where to write the figures.', flag_values=values)
  flags.DEFINE_string('torch_python', sys.executable, 'A Python with torch.', flag_values=values)
  flags.DEFINE_list('contenders', list(CONTENDERS), 'Which.', flag_values=values)
  if {'--help', '-h'}.intersection(arguments):
    return None
  values(['model_step', *arguments])
  if values.model not in NAMESAKES:
    models.check_name(values.model)
    raise UsageError(f'--model={values.model}: has no namesake; use {", ".join(NAMESAKES)}')
  return values


def measure(options: Any) -> dict[str, Any]:
  """Rounds by turns; the figures of each contender and the ratios to `hpm`."""
  keras, torch = NAMESAKES[options.model]
  labels = [
    label
    for label in CONTENDERS
    if label in options.contenders
    and not ('keras' in label and keras is None)
    and not ('torch' in label and torch is None)
  ]
  rounds: dict[str, list[dict[str, float]]] = {}
  with started(labels, options) as contenders:
    with console.status('matrix product'):
      matmul = Contender('matmul', 'matmul', '1', sys.executable, options.model, 1, 1)
      rates = []
    for contender in contenders:
      contender.run(1)  # the second step is the first without any start-up
    for i in range(options.pairs):
      turned = contenders[i % len(contenders) :] + contenders[: i % len(contenders)]
      with console.status(f'round {i + 1} of {options.pairs}'):
        rates.append(2 * 4096**3 * 3 / matmul.run(3)['wall_s'] / 1e9)
        for contender in turned:
          rounds.setdefault(contender.label, []).append(contender.run(options.steps))
    matmul.close()
  images = options.steps * options.batch_size
  return {
    'model': options.model,
    'batch_size': options.batch_size,
    'image_size': options.image_size,
    'steps': options.steps,
    'matmul_gflops': rates,
    'macs': models.create(options.model, image_size=options.image_size).num_macs,
    'contenders': {
      label: {
        'images_per_second': [images / r['wall_s'] for r in rounds[label]],
        'cpu_s_per_step': [r['cpu_s'] / options.steps for r in rounds[label]],
        'peak_mib': rounds[label][-1]['peak_mib'],
      }
      for label in labels
      if label in rounds
    },
  }


def show(result: dict[str, Any]) -> None:
  """The table, and a sentence for each baseline."""
  table = rich.table.Table(
    title=f'{result["model"]}, training, batch {result["batch_size"]}, '
    f'{result["image_size"]} pixels'
  )
  for column in ('', 'images/s', 'CPU s a step', 'peak MiB', 'this / hpm, CPU s', '95 %'):
    table.add_column(column, justify='left' if not column else 'right')
  contenders = result['contenders']
  for label, figures in contenders.items():
    middle, low, high = ratio_interval(
      [
        theirs / ours
        for theirs, ours in zip(
          figures['cpu_s_per_step'], contenders['hpm']['cpu_s_per_step'], strict=True
        )
      ]
    )
    table.add_row(
      label,
      f'{statistics.median(figures["images_per_second"]):.2f}',
      f'{statistics.median(figures["cpu_s_per_step"]):.2f}',
      f'{figures["peak_mib"]:.0f}',
      f'{middle:.2f}',
      f'{low:.2f} to {high:.2f}',
    )
  console.print(table)
  rate = statistics.median(result['matmul_gflops'])
  speed = statistics.median(contenders['hpm']['images_per_second'])
  # Training takes three products for each of the forward pass: it, and two gradients.
  used = 3 * 2 * result['macs'] * speed / 1e9
  console.print(
    f'hpm computes {used:.0f} GFLOP/s in convolutions and dense layers, {used / rate:.0%} of the '
    f'{rate:.0f} GFLOP/s of a 4096 x 4096 matrix product '
    f'({min(result["matmul_gflops"]):.0f} to {max(result["matmul_gflops"]):.0f})'
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
