"""Runs the library for the parity tests: every mode, as a tf.function and as a session graph."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hpm
from tests.parity import simulation

__all__ = [
  'FP32',
  'MODES',
  'OPTIMIZERS',
  'SYNCHRONOUS',
  'TWO',
  'Result',
  'assert_agrees',
  'assert_replicas_equal',
  'chosen',
  'create_manager',
  'create_step',
  'normalized',
  'random_steps',
  'relative_error',
  'simulate',
  'start_values',
  'train',
  'train_in_session',
  'two_layers',
]

FP32 = 1e-6  # of a tensor's largest value: the agreement that float32 owes

# Every mode of training: id -> (manager, its options).
MODES: dict[str, tuple[str, dict[str, str]]] = {
  'independent': ('independent', {}),
  'parameter_server_cpu': ('parameter_server', {'local_parameter_device': 'cpu'}),
  'parameter_server_spread': ('parameter_server', {'local_parameter_device': 'spread'}),
  'replicated_cpu': ('replicated', {'local_parameter_device': 'cpu'}),
  'replicated_spread': ('replicated', {'local_parameter_device': 'spread'}),
  'replicated_collective': ('replicated', {'all_reduce_spec': 'collective'}),
}
SYNCHRONOUS = [mode for mode in MODES if mode != 'independent']
# Of the modes that share what is under test, the two that differ most in how gradients meet.
TWO = ('parameter_server_spread', 'replicated_collective')

# Name in the registry -> (options, the simulation's rule with the same ones). The rates are those
# at which five steps change the small network visibly. Adam's beta2 is the float32 next to 0.999,
# as an update in float32 has it: between the two 1 - beta2, and with it slot v, differs by 1.3e-5.
# Its epsilon is one at which the few gradients near zero aren't blown up to a full step together
# with their rounding; the default is held to NumPy in tests/test_optimizers.py.
OPTIMIZERS: dict[str, tuple[dict[str, float], simulation.Optimizer]] = {
  'sgd': ({'learning_rate': 0.1}, simulation.SGD(0.1)),
  'momentum': ({'learning_rate': 0.05}, simulation.Momentum(0.05)),
  'nesterov': ({'learning_rate': 0.05}, simulation.Momentum(0.05, nesterov=True)),
  'rmsprop': ({'learning_rate': 0.05}, simulation.RMSProp(0.05)),
  'adam': (
    {'learning_rate': 0.01, 'epsilon': 1e-3},
    simulation.Adam(0.01, beta2=float(np.float32(0.999)), epsilon=1e-3),
  ),
}

Batch = tuple[np.ndarray, np.ndarray]
Steps = Sequence[Sequence[Batch]]


@dataclasses.dataclass(frozen=True)
class Result:
  """What training ends with.

  Attributes:
    values: the step's snapshot.
    metrics: of each step.
    copies: for each copy of the variables, canonical name -> value.
  """

  values: dict[str, np.ndarray]
  metrics: list[hpm.Metrics]
  copies: list[dict[str, np.ndarray]]


def chosen(values: Sequence[Any], default: Sequence[Any]) -> list[Any]:
  """Values for `pytest.mark.parametrize`, of which the default run takes those in `default`."""
  assert not [value for value in default if value not in values]
  marks = [() if value in default else (pytest.mark.long,) for value in values]
  return [
    pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=own)
    for value, own in zip(values, marks, strict=True)
  ]


def two_layers(dtype: str = 'float32') -> hpm.models.Model:
  """The simulation's network: images of 4 x 4 x 3, 16 hidden units, 5 classes."""

  def network(b, images):
    x = tf.tanh(b.dense('hidden', b.flatten(images), 16))
    return b.dense('logits', x, 5)

  return hpm.models.Model(
    network, name='two_layers', image_shape=(4, 4, 3), num_classes=5, dtype=dtype
  )


def normalized() -> hpm.models.Model:
  """The network of `simulation.normalized`: images of 4 x 4 x 3, 4 channels, 5 classes."""

  def network(b, images):
    x = tf.tanh(b.batch_norm('bn', b.conv('conv', images, 4, 1)))
    return b.dense('logits', b.flatten(x), 5)

  return hpm.models.Model(network, name='normalized', image_shape=(4, 4, 3), num_classes=5)


def random_steps(
  sizes: Sequence[Sequence[int]],
  image_shape: tuple[int, ...] = (4, 4, 3),
  num_classes: int = 5,
  seed: int = 0,
) -> list[list[Batch]]:
  """Batches of random uint8 images and int64 labels; `sizes[step][tower]` samples each."""
  rng = np.random.default_rng(seed)
  return [
    [
      (
        rng.integers(0, 256, (size, *image_shape)).astype(np.uint8),
        rng.integers(0, num_classes, size),
      )
      for size in towers
    ]
    for towers in sizes
  ]


def create_manager(
  mode: str, devices: Sequence[str], **options: Any
) -> hpm.variable_mgr.VariableManager:
  """The manager of one of `MODES`; `options` come on top of the mode's own."""
  name, own = MODES[mode]
  return hpm.variable_mgr.create(name, devices, **own, **options)


def create_step(
  manager: hpm.variable_mgr.VariableManager,
  optimizer: str | Any = 'momentum',
  model: hpm.models.Model | None = None,
  **options: Any,
) -> hpm.TrainStep:
  """A step of `two_layers`, or of `model`; `options` are TrainStep's."""
  if isinstance(optimizer, str):
    optimizer = hpm.optimizers.create(optimizer, **OPTIMIZERS[optimizer][0])
  return hpm.TrainStep(model or two_layers(), manager, optimizer, **options)


def train(step: hpm.TrainStep, steps: Steps) -> Result:
  """Runs the step as a tf.function."""
  metrics = [hpm.Metrics(*(m.numpy() for m in step(batches))) for batches in steps]
  return Result(
    {name: value.numpy() for name, value in step.snapshot().items()},
    metrics,
    [{name: v.numpy() for name, v in copy.items()} for copy in step.manager.copies],
  )


def train_in_session(create: Callable[[], hpm.TrainStep], steps: Steps) -> Result:
  """Builds the step that `create` makes into a graph of its own, and runs it in a session.

  Where all of a tower's batches are of one size, its placeholder has that size.
  """
  with tf.Graph().as_default():
    step = create()
    placeholders = [_placeholders(batches) for batches in zip(*steps, strict=True)]
    metrics_op = step.build(placeholders)
    snapshot = step.snapshot()
    copies = [
      {name: variable.read_value() for name, variable in copy.items()}
      for copy in step.manager.copies
    ]
    # A device that isn't there must be an error; collectives inside a graph need a key of its own.
    config = tf.compat.v1.ConfigProto(
      device_count={'CPU': len(step.manager.devices)}, allow_soft_placement=False
    )
    options = tf.compat.v1.RunOptions(
      experimental=tf.compat.v1.RunOptions.Experimental(collective_graph_key=1)
    )
    with tf.compat.v1.Session(config=config) as session:
      session.run([variable.initializer for variable in step.variables])
      metrics = []
      for batches in steps:
        pairs = zip(placeholders, batches, strict=True)
        feed = {p: array for pair in pairs for p, array in zip(*pair, strict=True)}
        metrics.append(hpm.Metrics(*session.run(metrics_op, feed, options=options)))
      values, copies = session.run((snapshot, copies))
      return Result(values, metrics, copies)


def start_values(model: hpm.models.Model, seed: int = 0) -> dict[str, np.ndarray]:
  """The parameters that training starts with."""
  return {name: value.numpy() for name, value in model.init(seed)[0].items()}


def simulate(mode: str, steps: Steps, optimizer: str = 'momentum') -> simulation.Result:
  """What `mode` has to end with on `two_layers`."""
  run = simulation.train_independent if mode == 'independent' else simulation.train
  return run(start_values(two_layers()), steps, OPTIMIZERS[optimizer][1])


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
  """Largest difference, as a share of the largest expected value; NaN if either has one."""
  largest = np.max(np.abs(expected), initial=np.finfo(np.float32).tiny)
  difference = np.abs(np.asarray(actual, np.float64) - expected)
  return float(np.max(difference, initial=0.0) / largest)


def assert_agrees(
  actual: Result, expected: simulation.Result | Result, tolerance: float = FP32
) -> None:
  """Parameters, slots and the steps' losses and counts agree.

  Values in flight (`carry/...`) are none of them. Each tensor to `tolerance` of its largest value,
  each loss to `tolerance` of itself.
  """
  values = {name: v for name, v in expected.values.items() if name not in ('step', 'samples')}
  own = {name for name in actual.values if not name.startswith('carry/')}
  assert own == {'step', 'samples', *values}
  errors = {name: relative_error(actual.values[name], value) for name, value in values.items()}
  differing = {name: error for name, error in errors.items() if not error <= tolerance}  # or NaN
  assert not differing, f'differ by more than {tolerance} of the largest value: {differing}'
  losses = getattr(expected, 'losses', None) or [metrics.loss for metrics in expected.metrics]
  np.testing.assert_allclose([m.loss for m in actual.metrics], losses, rtol=tolerance)
  assert [m.step for m in actual.metrics] == list(range(1, len(losses) + 1))
  assert actual.values['step'] == len(losses)
  assert actual.values['samples'] == sum(m.num_samples for m in actual.metrics)


def assert_replicas_equal(copies: Sequence[Mapping[str, np.ndarray]]) -> None:
  """All copies of a synchronous mode hold the same bits."""
  for copy in copies[1:]:
    for name, value in copy.items():
      np.testing.assert_array_equal(value, copies[0][name], err_msg=name)


def _placeholders(batches: Sequence[Batch]) -> tuple[tf.Tensor, ...]:
  """Placeholders on the host for one tower's batches of all steps."""
  sizes = {len(labels) for _, labels in batches}
  size = sizes.pop() if len(sizes) == 1 else None
  with tf.device('/CPU:0'):
    return tuple(
      tf.compat.v1.placeholder(array.dtype, (size, *array.shape[1:])) for array in batches[0]
    )
