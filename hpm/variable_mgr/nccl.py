"""TensorFlow's older NCCL op as an all-reduce: no token and no order, within one process."""

from collections.abc import Sequence
import itertools

import tensorflow as tf

from hpm.errors import UsageError
from hpm.variable_mgr.allreduce import AllReduce, HalfTransfer, Lists

__all__ = ['NcclAllReduce', 'nccl_all_reduce']

_names = itertools.count(1)


class NcclAllReduce:
  """`tf.raw_ops.NcclAllReduce`: what all devices give under one name is summed by NCCL.

  The members of a sum meet inside the op by a name, and TensorFlow hands a sum to NCCL once all of
  them are there; so devices may come in any order, and nothing is kept between steps. It sums in
  the dtype of the tensors, which may be float16, float32, float64, int32 or int64.

  Args:
    devices: GPUs of this process, as many as lists.
  """

  variables: list[tf.Variable] = []

  def __init__(self, devices: Sequence[str]):
    self._devices = tuple(devices)

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    if len(self._devices) == 1:
      return [list(values) for values in tensors]
    if any(value.dtype == tf.bfloat16 for value in tensors[0]):
      raise _no_bfloat16()
    names = [f'hpm_nccl_{next(_names)}' for _ in tensors[0]]
    sums = []
    for device, values in zip(self._devices, tensors, strict=True):
      with tf.device(device):
        sums.append(
          [
            tf.raw_ops.NcclAllReduce(
              input=value, reduction='sum', num_devices=len(self._devices), shared_name=name
            )
            for name, value in zip(names, values, strict=True)
          ]
        )
    return sums


def nccl_all_reduce(devices: Sequence[str], transfer_dtype: str | None = None) -> AllReduce:
  """`NcclAllReduce`, in float16 if that is to travel; it has no bfloat16.

  Raises:
    UsageError: a device is no GPU, or bfloat16 is to travel.
  """
  if not all('GPU' in device.upper() for device in devices):
    raise UsageError(
      f"all-reduce 'nccl_all_reduce' needs GPUs, but the devices are {', '.join(devices)}: "
      "use 'copy' or 'collective' on CPU devices"
    )
  if transfer_dtype == 'bfloat16':
    raise _no_bfloat16()
  plain = NcclAllReduce(devices)
  return plain if transfer_dtype is None else HalfTransfer(plain, devices, transfer_dtype)


def _no_bfloat16() -> UsageError:
  return UsageError(
    "all-reduce 'nccl_all_reduce' has no bfloat16: use 'nccl', or let float16 or float32 travel"
  )
