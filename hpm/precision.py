"""Precision policies: what towers compute in, and how far the loss is scaled up for it.

Parameters, batch-norm statistics, the loss and the update are always float32.
"""

import dataclasses

from hpm import errors

__all__ = ['POLICIES', 'DynamicLossScale', 'Precision', 'create']


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  """A loss scale that follows the gradients (Micikevicius et al. 2018, arXiv:1710.03740).

  Where the aggregated gradient is not finite the step changes no variable, and the scale is halved,
  down to 1; after `increase_every` finite steps in a row it is doubled, up to 2**24.

  Attributes:
    initial: scale of the first step.
    increase_every: number of steps.
  """

  initial: float = 2.0**15
  increase_every: int = 1000

  minimum = 1.0
  maximum = 2.0**24

  def __post_init__(self) -> None:
    errors.number(
      'initial loss scale',
      self.initial,
      'a number from 1 to 2**24',
      lambda x: self.minimum <= x <= self.maximum,
    )
    errors.whole('increase_every', self.increase_every)


@dataclasses.dataclass(frozen=True)
class Precision:
  """What a tower computes in.

  Attributes:
    compute_dtype: dtype name of activations and of the parameters as the tower casts them.
    loss_scale: factor on the loss before backprop, taken out of the aggregated gradient again. In
      float16 small gradients would vanish without it; tf_cnn_benchmarks' default is 128.
  """

  compute_dtype: str
  loss_scale: float | DynamicLossScale = 1.0


POLICIES = {
  'fp32': Precision('float32'),
  'fp16': Precision('float16', loss_scale=128.0),
  'bf16': Precision('bfloat16'),
}


def create(name: str) -> Precision:
  """The policy called fp32, fp16 or bf16."""
  if name not in POLICIES:
    raise errors.unknown('precision', name, POLICIES)
  return POLICIES[name]
