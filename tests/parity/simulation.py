"""Data-parallel training of a two-layer network, in NumPy alone: the definition of correct.

Forward and backward are written out, in float64, and the update rules beside them. Nothing comes
from TensorFlow or from `hpm`, so that agreement with it proves something.

A step is a list with one (images, labels) a tower. All towers of a step compute with the same
version of the parameters, and the gradient is the mean over the samples of all towers, however
many each of them has.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

__all__ = [
  'LARS',
  'SGD',
  'Adam',
  'Averaged',
  'Momentum',
  'Result',
  'RMSProp',
  'normalize',
  'normalized',
  'train',
  'train_independent',
  'two_layers',
]

Values = dict[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]
# (params, images, labels) -> summed loss, its gradients, and of a network with batch norm the
# statistics that its moving averages follow.
Network = Callable[[Values, np.ndarray, np.ndarray], tuple]


def normalize(images: np.ndarray) -> np.ndarray:
  """uint8 -> float64 in -1 .. 1."""
  return (images.astype(np.float64) - 127.5) / 127.5


def two_layers(params: Values, images: np.ndarray, labels: np.ndarray) -> tuple[float, Values]:
  """Dense, tanh, dense, softmax cross entropy.

  Args:
    params: 'hidden/kernel' [n, h], 'hidden/bias' [h], 'logits/kernel' [h, c], 'logits/bias' [c].
    images: uint8 [b, H, W, C] with H * W * C = n; b may be 0.
    labels: integers [b].

  Returns:
    The loss and its gradients, summed over the samples.
  """
  x = normalize(images).reshape(len(images), len(params['hidden/kernel']))
  hidden = np.tanh(x @ params['hidden/kernel'] + params['hidden/bias'])
  logits = hidden @ params['logits/kernel'] + params['logits/bias']
  shifted = logits - logits.max(axis=1, keepdims=True)
  log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
  samples = np.arange(len(labels))
  loss = -log_probabilities[samples, labels].sum()

  d_logits = np.exp(log_probabilities)
  d_logits[samples, labels] -= 1.0
  d_hidden = (d_logits @ params['logits/kernel'].T) * (1.0 - hidden**2)
  return loss, {
    'hidden/kernel': x.T @ d_hidden,
    'hidden/bias': d_hidden.sum(axis=0),
    'logits/kernel': hidden.T @ d_logits,
    'logits/bias': d_logits.sum(axis=0),
  }


def normalized(
  params: Values, images: np.ndarray, labels: np.ndarray
) -> tuple[float, Values, Values]:
  """A dense layer on each pixel, batch norm, tanh, dense, softmax cross entropy.

  Args:
    params: 'conv/kernel' [1, 1, C, h], 'bn/scale' and 'bn/offset' [h], 'logits/kernel'
      [H * W * h, c], 'logits/bias' [c].
    images: uint8 [b, H, W, C], b at least 1.
    labels: integers [b].

  Returns:
    The loss and its gradients, summed over the samples, and the batch's mean and unbiased variance
    of each channel, as 'bn/moving_mean' and 'bn/moving_variance'.
  """
  x = normalize(images).reshape(-1, images.shape[-1])
  kernel = params['conv/kernel'][0, 0]
  z = x @ kernel
  mean, variance = z.mean(axis=0), z.var(axis=0)
  deviation = np.sqrt(variance + 1e-5)
  unit = (z - mean) / deviation
  hidden = np.tanh(unit * params['bn/scale'] + params['bn/offset'])
  flat = hidden.reshape(len(images), -1)
  logits = flat @ params['logits/kernel'] + params['logits/bias']
  shifted = logits - logits.max(axis=1, keepdims=True)
  log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
  samples = np.arange(len(labels))
  loss = -log_probabilities[samples, labels].sum()

  d_logits = np.exp(log_probabilities)
  d_logits[samples, labels] -= 1.0
  d_hidden = (d_logits @ params['logits/kernel'].T).reshape(hidden.shape) * (1.0 - hidden**2)
  d_unit = d_hidden * params['bn/scale']
  # The statistics depend on every pixel, so each pixel gets its share of what they get.
  d_z = (d_unit - d_unit.mean(axis=0) - unit * (d_unit * unit).mean(axis=0)) / deviation
  gradients = {
    'conv/kernel': (x.T @ d_z)[None, None],
    'bn/scale': (d_hidden * unit).sum(axis=0),
    'bn/offset': d_hidden.sum(axis=0),
    'logits/kernel': flat.T @ d_logits,
    'logits/bias': d_logits.sum(axis=0),
  }
  return loss, gradients, {'bn/moving_mean': mean, 'bn/moving_variance': z.var(axis=0, ddof=1)}


class Optimizer(Protocol):
  """An update rule for one parameter."""

  def start(self, param: np.ndarray) -> Values:
    """Slot name -> value before the first update."""

  def update(
    self, param: np.ndarray, slots: Values, gradient: np.ndarray, number: int
  ) -> tuple[np.ndarray, Values]:
    """The parameter and its slots after update `number`, which counts from 1."""


@dataclasses.dataclass(frozen=True)
class SGD:
  learning_rate: float

  def start(self, param):
    return {}

  def update(self, param, slots, gradient, number):
    return param - self.learning_rate * gradient, {}


@dataclasses.dataclass(frozen=True)
class Momentum:
  learning_rate: float
  momentum: float = 0.9
  nesterov: bool = False

  def start(self, param):
    return {'momentum': np.zeros_like(param)}

  def update(self, param, slots, gradient, number):
    velocity = self.momentum * slots['momentum'] + gradient
    direction = gradient + self.momentum * velocity if self.nesterov else velocity
    return param - self.learning_rate * direction, {'momentum': velocity}


@dataclasses.dataclass(frozen=True)
class RMSProp:
  learning_rate: float
  decay: float = 0.9
  momentum: float = 0.9
  epsilon: float = 1.0

  def start(self, param):
    return {'rms': np.ones_like(param), 'momentum': np.zeros_like(param)}

  def update(self, param, slots, gradient, number):
    rms = self.decay * slots['rms'] + (1.0 - self.decay) * gradient**2
    step = self.learning_rate * gradient / np.sqrt(rms + self.epsilon)
    momentum = self.momentum * slots['momentum'] + step
    return param - momentum, {'rms': rms, 'momentum': momentum}


@dataclasses.dataclass(frozen=True)
class Adam:
  learning_rate: float
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8

  def start(self, param):
    return {'m': np.zeros_like(param), 'v': np.zeros_like(param)}

  def update(self, param, slots, gradient, number):
    m = self.beta1 * slots['m'] + (1.0 - self.beta1) * gradient
    v = self.beta2 * slots['v'] + (1.0 - self.beta2) * gradient**2
    rate = self.learning_rate * np.sqrt(1.0 - self.beta2**number) / (1.0 - self.beta1**number)
    return param - rate * m / (np.sqrt(v) + self.epsilon), {'m': m, 'v': v}


@dataclasses.dataclass(frozen=True)
class LARS:
  """Algorithm 1 of arXiv:1708.03888; vectors take the rate as it is, and don't decay."""

  learning_rate: float
  momentum: float = 0.9
  trust: float = 0.001
  weight_decay: float = 0.0

  def start(self, param):
    return {'momentum': np.zeros_like(param)}

  def update(self, param, slots, gradient, number):
    rate, direction = self.learning_rate, gradient
    if param.ndim > 1:
      weights, slope = np.linalg.norm(param), np.linalg.norm(gradient)
      rate *= self.trust * weights / (slope + self.weight_decay * weights)
      direction = gradient + self.weight_decay * param
    velocity = self.momentum * slots['momentum'] + rate * direction
    return param - velocity, {'momentum': velocity}


@dataclasses.dataclass(frozen=True)
class Averaged:
  """Any rule, and the moving average of the parameter after each update."""

  rule: Optimizer
  decay: float

  def start(self, param):
    return {**self.rule.start(param), 'average': param}

  def update(self, param, slots, gradient, number):
    updated, own = self.rule.update(param, slots, gradient, number)
    kept = min(self.decay, number / (9 + number))
    return updated, {**own, 'average': kept * slots['average'] + (1.0 - kept) * updated}


@dataclasses.dataclass(frozen=True)
class Result:
  """What training ends with.

  Attributes:
    values: 'params/NAME', 'slots/SLOT/NAME' and of a network with statistics 'state/NAME' ->
      float64.
    losses: mean loss of each step's samples.
  """

  values: Values
  losses: list[float]


def train(
  params: Mapping[str, np.ndarray],
  steps: Sequence[Sequence[Batch]],
  optimizer: Optimizer,
  *,
  network: Network = two_layers,
  variable_delay: int = 0,
  gradient_delay: int = 0,
  clip_norm: float = np.inf,
  clip_value: float = np.inf,
  weight_decay: float = 0.0,
  skipped: Sequence[int] = (),
  reduction: str = 'mean',
  statistics: str = 'mean',
) -> Result:
  """Synchronous data-parallel training.

  Args:
    params: initial values; not changed.
    steps: the batches of each step, one a tower.
    optimizer: the rule.
    network: (params, images, labels) -> summed loss and gradients.
    variable_delay: towers compute with the version of so many updates ago, at the start with the
      initial values (staged variables).
    gradient_delay: step t applies the gradients of step t - gradient_delay; the first steps apply
      zeros (relaxed consistency).
    clip_norm: bound on the norm of all gradients together.
    clip_value: bound on each element, after that.
    weight_decay: times the kernels, added to their gradients after clipping.
    skipped: steps that change no parameter and no slot, as after an overflow; from 0.
    reduction: 'mean' over samples, or 'sum' over towers of each tower's mean.
    statistics: what moving averages follow, of towers that have samples: their 'mean', those of the
      'first', or 'cross_replica', the statistics of the whole batch, by which it is normalised too.
  """
  params = {name: np.asarray(value, np.float64) for name, value in params.items()}
  slots = {name: optimizer.start(value) for name, value in params.items()}
  versions, gradients, losses = [params], [], []
  state: Values = {}
  number = 0
  for towers in steps:
    if statistics == 'cross_replica':
      towers = [tuple(np.concatenate(part) for part in zip(*towers, strict=True))]
    read = versions[max(0, len(versions) - 1 - variable_delay)]
    results = [network(read, *batch) for batch in towers]
    counts = [len(labels) for _, labels in towers]
    num_samples = max(1, sum(counts))
    losses.append(sum(result[0] for result in results) / num_samples)
    divisors = [num_samples if reduction == 'mean' else max(1, count) for count in counts]
    gradients.append(
      {
        name: sum(result[1][name] / divisor for result, divisor in zip(results, divisors))
        for name in params
      }
    )
    if len(results[0]) > 2:
      own = [result[2] for result in (results[:1] if statistics == 'first' else results)]
      for name in own[0]:
        old = state.get(name, np.full_like(own[0][name], name.endswith('variance')))
        state[name] = 0.9 * old + 0.1 * np.mean([values[name] for values in own], axis=0)
    if len(gradients) - 1 not in skipped:
      number += 1
      applied = len(gradients) - 1 - gradient_delay
      mean = {n: np.zeros_like(v) for n, v in params.items()} if applied < 0 else gradients[applied]
      norm = np.sqrt(sum(np.sum(gradient**2) for gradient in mean.values()))
      for name, gradient in mean.items():
        clipped = np.clip(
          gradient * min(1.0, clip_norm / max(norm, 1e-300)), -clip_value, clip_value
        )
        decay = weight_decay if name.endswith('kernel') else 0.0
        mean[name] = clipped + decay * params[name]
      updated = {
        name: optimizer.update(value, slots[name], mean[name], number)
        for name, value in params.items()
      }
      params = {name: value for name, (value, _) in updated.items()}
      slots = {name: value for name, (_, value) in updated.items()}
    versions.append(params)
  values = _named(params, slots) | {f'state/{name}': value for name, value in state.items()}
  return Result(values, losses)


def train_independent(
  params: Mapping[str, np.ndarray], steps: Sequence[Sequence[Batch]], optimizer: Optimizer
) -> Result:
  """Each tower trains by itself; tower i > 0 stands under 'replica/<i>/' as in a snapshot."""
  towers = [train(params, [[b] for b in batches], optimizer) for batches in zip(*steps)]
  values = dict(towers[0].values)
  for i, tower in enumerate(towers[1:], 1):
    values |= {f'replica/{i}/{name}': value for name, value in tower.values.items()}
  counts = [[len(labels) for _, labels in batches] for batches in steps]
  losses = [
    float(np.average([tower.losses[t] for tower in towers], weights=count))
    for t, count in enumerate(counts)
  ]
  return Result(values, losses)


def _named(params: Values, slots: Mapping[str, Values]) -> Values:
  values = {f'params/{name}': value for name, value in params.items()}
  for name, of_param in slots.items():
    values |= {f'slots/{slot}/{name}': value for slot, value in of_param.items()}
  return values
