"""Precision policies: what towers compute in, and how far the loss is scaled up for it.

Parameters, batch-norm statistics, the loss and the update are always float32.
"""

import dataclasses

from hpm import errors

__all__ = ['POLICIES', 'Precision', 'create']


@dataclasses.dataclass(frozen=True)
class Precision:
  """What a tower computes in.

  Attributes:
    compute_dtype: dtype name of activations and of the parameters as the tower casts them.
    loss_scale: factor on the loss before backprop, taken out of the aggregated gradient again. In
      float16 small gradients would vanish without it; tf_cnn_benchmarks' default is 128.
  """

  compute_dtype: str
  loss_scale: float = 1.0


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
