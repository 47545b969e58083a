"""Any Keras optimizer as an update rule, whose state the variable managers keep."""

from concurrent import futures
import dataclasses
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hpm.errors import UsageError
from hpm.optimizers.rules import Schedule, learning_rate_at

__all__ = ['KerasRule', 'from_keras']

_TRIED_STEPS = 2
_PROBES = ((3,), (3, 2), (2, 2, 3, 4))  # shapes of a bias, of a dense and of a convolution kernel
# What the step has options of its own for, since it concerns the gradients of all devices.
_STEPS_OWN = {
  'clipnorm': 'clip with TrainStep(clip_norm=...), which is the norm of the whole gradient',
  'global_clipnorm': 'clip with TrainStep(clip_norm=...)',
  'clipvalue': 'clip with TrainStep(clip_value=...)',
  'use_ema': 'wrap the rule in hpm.optimizers.Averaged(rule, decay)',
  'loss_scale_factor': 'scale with TrainStep(loss_scale=...)',
  'gradient_accumulation_steps': 'accumulate with TrainStep(accumulate=...)',
}


def from_keras(optimizer: keras.optimizers.Optimizer) -> 'KerasRule':
  """The update rule of a Keras optimizer, its learning-rate schedule and weight decay included.

  Taken is what `build` and `update_step` say, so optimizers of one's own will do. Their state must
  be variables of the parameters' shapes, filled with one number, and their update of one parameter
  must need no other: whether it is so is tried on three small parameters.

  Raises:
    UsageError: the optimizer has other state (Nadam, Adafactor, Muon), or options that are the
      step's.
  """
  return KerasRule(optimizer)


@dataclasses.dataclass(frozen=True)
class KerasRule:
  """What `from_keras` gives.

  It computes in several ops what the rules of `hpm.optimizers.rules` do in one, and is not atomic:
  where processes update the same variable at the same time (asynchronous parameter servers), one's
  update may be lost.

  Attributes:
    optimizer: taken as a recipe, and left as it is: it counts no iterations and gets no variables.
  """

  optimizer: keras.optimizers.Optimizer
  _rate: float | Schedule = dataclasses.field(init=False, repr=False)
  _fills: dict[str, float] = dataclasses.field(init=False, repr=False)
  atomic: ClassVar[bool] = False

  def __post_init__(self):
    name = type(self.optimizer).__name__
    if not isinstance(self.optimizer, keras.optimizers.Optimizer):
      raise UsageError(
        f'{self.optimizer!r} is no Keras optimizer: give one of keras.optimizers, such as '
        'keras.optimizers.AdamW(1e-3)'
      )
    for option, instead in _STEPS_OWN.items():
      value = getattr(self.optimizer, option, None)
      if value:
        raise UsageError(f'{option}={value!r} of the Keras optimizer {name}: {instead}')
    if getattr(self.optimizer, '_exclude_from_weight_decay', None):
      raise UsageError(
        f"exclude_from_weight_decay(var_list=...) of the Keras optimizer {name}: the step's "
        'variables are not those of the list: exclude by var_names'
      )
    if not isinstance(self.optimizer._learning_rate, keras.Variable) and not _is_schedule(
      self.optimizer
    ):
      raise UsageError(
        f'the learning rate of the Keras optimizer {name} is a function without arguments, which '
        'a graph would call once: give a number or a Keras LearningRateSchedule'
      )
    with tf.init_scope():
      rate = self.optimizer._learning_rate
      object.__setattr__(self, '_rate', rate if callable(rate) else float(rate))
      object.__setattr__(self, '_fills', self._tried())

  @property
  def slots(self) -> dict[str, float]:
    return dict(self._fills)

  def scalars(self, step: tf.Tensor) -> dict[str, tf.Tensor]:
    rate = learning_rate_at(self._rate, step)
    # Nothing that TensorFlow takes for constant: it would move a constant factor from behind the
    # point where updates wait for all gradients to before it, and find a cycle.
    rate = tf.raw_ops.PlaceholderWithDefault(input=rate, shape=[])
    return {
      'learning_rate': rate,
      'iterations': tf.cast(step, tf.float32),
    }

  def apply(self, variable, slots, gradient, scalars):
    with futures.ThreadPoolExecutor(1) as outside:  # of every graph: Keras creates variables
      rule, weight, state = outside.submit(self._built, variable).result()
    for name, of_state in state.items():
      of_state._value = slots[name]

    def update(gradient, rate, iterations):
      rule.iterations._value = iterations
      if rule.weight_decay is not None and rule._use_weight_decay(weight):
        weight.assign(weight - weight * rule.weight_decay * rate)
      rule.update_step(gradient, weight, rate)
      return tf.constant(True)

    # A function of its own keeps reads and writes in order.
    arguments = gradient, scalars['learning_rate'], scalars['iterations']
    done = tf.function(update, autograph=False).get_concrete_function(*arguments)(*arguments)
    return done if tf.executing_eagerly() else done.op

  def _built(self, variable: tf.Variable) -> tuple[Any, keras.Variable, dict[str, keras.Variable]]:
    """A fresh optimizer for one parameter, that parameter, and its state by name, in order."""
    rule = self._fresh()
    name = variable.name.partition(':')[0].replace('/', '.')
    weight = keras.Variable('zeros', tuple(variable.shape), 'float32', name=name)
    weight._value = variable  # Keras's variable becomes a name for it: reads and writes go there
    rule.build([weight])
    own = [rule.iterations] if _is_schedule(rule) else [rule.iterations, rule._learning_rate]
    state = [v for v in rule.variables if not any(v is known for known in own)]
    return rule, weight, {v.name.removeprefix(f'{weight.path}_'): v for v in state}

  def _fresh(self) -> Any:
    rule = type(self.optimizer).from_config(self.optimizer.get_config())
    pattern = getattr(self.optimizer, '_exclude_from_weight_decay_pattern', None)
    if pattern is not None:  # which no configuration holds
      rule._exclude_from_weight_decay_pattern = pattern
    return rule

  def _tried(self) -> dict[str, float]:
    """Slot name -> what fills it, after steps of Keras's own on all probes, and ours on each."""
    name = type(self.optimizer).__name__
    fills: dict[str, float] = {}
    for i, shape in enumerate(_PROBES):
      _, _, state = self._built(tf.Variable(tf.zeros(shape), name='probe'))
      of_shape = {}
      for slot, variable in state.items():
        numbers = set(variable.numpy().flat)
        if tuple(variable.shape) != shape or len(numbers) > 1:
          raise UsageError(
            f'the Keras optimizer {name} keeps {slot!r} of shape {tuple(variable.shape)} for a '
            f'parameter of shape {shape}: only state of the same shape, filled with one number, '
            'has a place beside the parameter in every mode'
          )
        of_shape[slot] = float(numbers.pop())
      if i and of_shape != fills:
        raise UsageError(
          f'the Keras optimizer {name} keeps {sorted(of_shape)} for a parameter of shape {shape}, '
          f'but {sorted(fills)} for one of shape {_PROBES[0]}: they must be the same for all'
        )
      fills = of_shape
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape).astype(np.float32) for shape in _PROBES]
    weights = [keras.Variable(value, name=f'probe{i}') for i, value in enumerate(start)]
    rule = self._fresh()
    ours = [tf.Variable(value) for value in start]
    slots = [
      {slot: tf.Variable(tf.fill(value.shape, fill)) for slot, fill in fills.items()}
      for value in start
    ]
    for step in range(_TRIED_STEPS):
      gradients = [tf.constant(generator.normal(size=s).astype(np.float32)) for s in _PROBES]
      rule.apply(gradients, weights)
      scalars = self.scalars(tf.constant(step, tf.int64))
      for variable, of_variable, gradient in zip(ours, slots, gradients, strict=True):
        self.apply(variable, of_variable, gradient, scalars)
    for weight, variable in zip(weights, ours, strict=True):
      if not np.allclose(weight.numpy(), variable.numpy(), rtol=1e-5, atol=1e-6):
        raise UsageError(
          f'the Keras optimizer {name} does more in a step than its update_step of each parameter '
          'with that weight decay: it has no place in a variable manager'
        )
    return fills


def _is_schedule(optimizer: Any) -> bool:
  return isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
