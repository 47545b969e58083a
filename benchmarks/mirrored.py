"""A training step under `replicated` beside tf.distribute.MirroredStrategy, in one run, by turns.

  python -m benchmarks.mirrored --device=cpu --num_gpus=2          # or 4; on GPUs without --device
  python -m benchmarks.mirrored --model=MobileNetV2 --image_size=64 --batch_size=8 --rounds=11

Both train the same network of keras.applications on the same images, by momentum: hpm through its
Keras adapter, tf.distribute by a custom loop of `strategy.run` and the Keras optimizer, which sums
gradients over replicas, in one tf.function. Start-up is from the network's construction to the end
of the first step, each contender in a process of its own, by turns. A round of steps runs each
contender in one process, in an order that turns; given are medians, and the median and quartiles of
the ratios within a round. CPU seconds count most: a neighbour's load takes wall time and hardly any
of them.

On logical CPU devices copies between devices are aliases, and all towers share the cores: this
shows what the managers' own work costs, and says nothing about links.

Exit code: 0 done; 2 flags that can't work.
"""

from collections.abc import Callable, Sequence
import json
import statistics
import sys
import time
from typing import Any

from absl import flags

from benchmarks import allreduce, command, files, machine, process
from hpm.errors import UsageError

__all__ = ['CONTENDERS', 'main', 'ratios']

NUM_CLASSES = 1000
RATE, MOMENTUM = 0.01, 0.9

Step = Callable[[], float]


def hpm_step(build: Callable[[], Any], devices: Sequence[str], batches: Sequence[Any]) -> Step:
  """A step of `replicated`; each call returns its loss."""
  import hpm

  step = hpm.TrainStep(
    hpm.models.from_keras(build),
    hpm.variable_mgr.create('replicated', devices),
    hpm.optimizers.create('momentum', RATE, momentum=MOMENTUM),
  )
  return lambda: float(step(batches).loss)


def mirrored_step(build: Callable[[], Any], devices: Sequence[str], batches: Sequence[Any]) -> Step:
  """The same under MirroredStrategy, with its own choice of all-reduce."""
  import keras
  import tensorflow as tf

  strategy = allreduce.strategy('CollectiveAllReduce', tuple(devices))  # its own choice
  with strategy.scope():
    model = build()
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
  total = sum(len(labels) for _, labels in batches)
  values = strategy.experimental_distribute_values_from_function(
    lambda context: batches[context.replica_id_in_sync_group]
  )

  def replica(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
      logits = model(tf.cast(images, tf.float32) / 127.5 - 1.0, training=True)
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
      loss = tf.reduce_sum(losses) / total
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)  # sums over replicas first
    return loss

  @tf.function(autograph=False)
  def step():
    losses = strategy.run(replica, args=(values,))
    return strategy.reduce('sum', losses, axis=None)

  return lambda: float(step())


CONTENDERS = {'hpm': hpm_step, 'tf.distribute': mirrored_step}


def ratios(times: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
  """Lower quartile, median, upper quartile of others / times, round by round."""
  found = [other / own for own, other in zip(times, others, strict=True)]
  low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
  return low, middle, high


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
  """Contender -> 'wall_s' and 'cpu_s' of each round's step; the first call is not counted."""
  for step in steps.values():
    step()
  found: dict[str, dict[str, list[float]]] = {n: {'wall_s': [], 'cpu_s': []} for n in steps}
  names = list(steps)
  for turn in range(rounds):
    start = turn % len(names)
    for name in (*names[start:], *names[:start]):
      wall, cpu = time.perf_counter(), time.process_time()
      steps[name]()
      found[name]['wall_s'].append(time.perf_counter() - wall)
      found[name]['cpu_s'].append(time.process_time() - cpu)
  return found


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Measures and prints; see the module's docstring for the exit code."""
  options = parse(arguments)
  devices = process.devices(options.device, options.num_gpus)
  if options.start_up_of:
    print(json.dumps(start_up(options, devices)))
    return 0
  steps = {name: _step(name, options, devices) for name in CONTENDERS}
  figures: dict[str, Any] = measure(steps, options.rounds)
  started: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
  for _ in range(options.start_ups):
    for name in CONTENDERS:
      started[name].append(_start_up_apart(name, arguments))
  print(f'{options.model}, {len(devices)} x {options.batch_size} images of {options.image_size}')
  for name in CONTENDERS:
    cells = [f'{key} {statistics.median(values):.3f}' for key, values in figures[name].items()]
    if started[name]:
      for key in ('wall_s', 'cpu_s'):
        middle = statistics.median(one[key] for one in started[name])
        cells.append(f'start-up {key} {middle:.2f}')
    print(f'{name:<14} {", ".join(cells)}')
  for key in ('wall_s', 'cpu_s'):
    low, middle, high = ratios(figures['hpm'][key], figures['tf.distribute'][key])
    print(f'tf.distribute / hpm, {key}: {middle:.3f} ({low:.3f} to {high:.3f})')
  if options.json:
    record = {'machine': machine.describe(), 'steps': figures, 'start_up': started}
    record |= {'devices': list(devices), 'batch_size': options.batch_size, 'model': options.model}
    files.write(options.json, json.dumps(record, indent=2) + '\n')
  return 0


def start_up(options: Any, devices: Sequence[str]) -> dict[str, float]:
  """Seconds from the network's construction to the end of the first step, TensorFlow imported."""
  import keras

  keras.utils.set_random_seed(0)
  wall, cpu = time.perf_counter(), time.process_time()
  _step(options.start_up_of, options, devices)()
  return {'wall_s': time.perf_counter() - wall, 'cpu_s': time.process_time() - cpu}


def parse(arguments: Sequence[str]) -> Any:
  """The flags' values."""
  values = flags.FlagValues()
  flags.DEFINE_enum('device', None, ['cpu', 'gpu'], 'Default: gpu, if any.', flag_values=values)
  flags.DEFINE_integer('num_gpus', None, 'Devices of that kind.', 1, flag_values=values)
  flags.DEFINE_string('model', 'ResNet50', 'Of keras.applications.', flag_values=values)
  flags.DEFINE_integer('image_size', 64, 'Pixels.', 32, flag_values=values)
  flags.DEFINE_integer('batch_size', 8, 'Images a device.', 1, flag_values=values)
  flags.DEFINE_integer('rounds', 9, 'Steps of each contender.', 1, flag_values=values)
  flags.DEFINE_integer('start_ups', 2, 'Processes of each contender.', 0, flag_values=values)
  flags.DEFINE_enum('start_up_of', None, list(CONTENDERS), 'That alone.', flag_values=values)
  flags.DEFINE_string('json', None, 'Where to write the figures.', flag_values=values)
  command.parse(values, arguments)
  return values


def _step(name: str, options: Any, devices: Sequence[str]) -> Step:
  import keras
  import numpy as np
  import tensorflow as tf

  if not hasattr(keras.applications, options.model):
    raise UsageError(f'--model={options.model}: keras.applications has no such network')

  def build() -> Any:
    return getattr(keras.applications, options.model)(
      weights=None,
      input_shape=(options.image_size, options.image_size, 3),
      classes=NUM_CLASSES,
      classifier_activation=None,
    )

  rng = np.random.default_rng(0)
  shape = (options.batch_size, options.image_size, options.image_size, 3)
  batches = []
  for device in devices:
    with tf.device(device):
      images = tf.constant(rng.integers(0, 256, shape).astype(np.uint8))
      batches.append((images, tf.constant(rng.integers(0, NUM_CLASSES, options.batch_size))))
  return CONTENDERS[name](build, devices, batches)


def _start_up_apart(name: str, arguments: Sequence[str]) -> dict[str, float]:
  kept = [argument for argument in arguments if not argument.startswith('--json')]
  worker = ['-m', 'benchmarks.mirrored', *kept, f'--start_up_of={name}']
  return json.loads(command.work(name, worker))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
