"""All-reduce: from one list of tensors a device to their sums on every device.

  all_reduce = hpm.variable_mgr.all_reduce('copy', devices)
  sums = all_reduce([[a0, b0], [a1, b1]])        # a0, b0 on devices[0]; a1, b1 on devices[1]
  # sums[0] = [a0 + a1, b0 + b1] on devices[0], sums[1] the same on devices[1]

Every device ends with the same bits: each sum is formed in one place and then copied, or by a ring
that forms each part in one place.
"""

from collections.abc import Sequence
import itertools
from typing import Any, Protocol
import weakref

import tensorflow as tf

from hpm.devices import CPU
from hpm.errors import UsageError

__all__ = ['AllReduce', 'Collective', 'Copy', 'HalfTransfer', 'nccl']

Lists = Sequence[Sequence[tf.Tensor]]


class AllReduce(Protocol):
  """Sums over devices; graph-building, in a `tf.function` or a `tf.Graph`."""

  @property
  def variables(self) -> list[tf.Variable]:
    """What it keeps between steps, for a session's initialisation."""

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    """One list a device, all of the same shapes and dtypes -> the sums, on each device."""


class Copy:
  """Sums on one device and copies the result back to all.

  Args:
    devices: device strings, as many as lists.
    sum_on: 'spread' sums tensor i on device i mod n, which spreads the work and the traffic; 'cpu'
      sums all on the host.
  """

  variables: list[tf.Variable] = []

  def __init__(self, devices: Sequence[str], sum_on: str = 'spread'):
    if sum_on not in ('cpu', 'spread'):
      raise UsageError(f'sum_on {sum_on!r}: use cpu or spread')
    self._devices = tuple(devices)
    self._places = (CPU,) if sum_on == 'cpu' else self._devices

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    sums: list[list[tf.Tensor]] = [[] for _ in self._devices]
    for values, place in zip(zip(*tensors, strict=True), itertools.cycle(self._places)):
      with tf.device(place):
        total = tf.add_n(values)
      for device, result in zip(self._devices, sums, strict=True):
        if device == place:
          result.append(total)
        else:
          with tf.device(device):
            result.append(tf.identity(total))
    return sums


class Collective:
  """TensorFlow's collective op: a ring over CPU devices, NCCL over GPUs.

  Devices issue their collectives in the same order, chained on each device by control edges and
  (for a `tf.function`, which would otherwise chain them over all devices and deadlock) by an
  ordering token, one variable a device.

  Args:
    devices: device strings, as many as lists.
    hint: TensorFlow's communication hint, 'auto', 'ring' or 'nccl'.
    timeout_s: after so many seconds without a peer the step fails; 0 waits for ever.
  """

  _group_keys = itertools.count(1)
  _instance_keys = itertools.count(1)

  def __init__(self, devices: Sequence[str], hint: str = 'auto', timeout_s: float = 300.0):
    self._devices = tuple(devices)
    self._hint = hint
    self._timeout_s = timeout_s
    self._group_key = next(self._group_keys)
    # Graph -> device -> name of its last collective: names, since an op would keep its graph alive.
    self._last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    self.variables: list[tf.Variable] = []

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    if len(self._devices) == 1:
      return [list(values) for values in tensors]
    if not self.variables:
      self.variables = [self._token(device) for device in self._devices]
    keys = [next(self._instance_keys) for _ in tensors[0]]
    graph = tf.compat.v1.get_default_graph()
    last = self._last.setdefault(graph, {})  # a step reduces gradients and state, in two calls
    sums = []
    for device, token, values in zip(self._devices, self.variables, tensors, strict=True):
      with tf.device(device):
        size = tf.constant(len(self._devices))
        group = tf.constant(self._group_key)
        result: list[tf.Tensor] = []
        for key, value in zip(keys, values, strict=True):
          before = [graph.get_operation_by_name(last[device])] if device in last else []
          with tf.control_dependencies(before):
            reduced = tf.raw_ops.CollectiveReduceV2(
              input=value,
              group_size=size,
              group_key=group,
              instance_key=tf.constant(key),
              ordering_token=[token.handle],
              merge_op='Add',
              final_op='Id',
              communication_hint=self._hint,
              timeout_seconds=self._timeout_s,
            )
          last[device] = reduced.op.name
          result.append(reduced)
        sums.append(result)
    return sums

  def _token(self, device: str) -> tf.Variable:
    with tf.init_scope():  # out of the function that is being traced
      with tf.device(CPU):
        value = tf.zeros([])
      with tf.device(device):
        return tf.Variable(value, name='collective_token')


def nccl(devices: Sequence[str], **options: Any) -> Collective:
  """`Collective` held to NCCL; refused where a device is no GPU: nothing else would be NCCL."""
  if not all('GPU' in device.upper() for device in devices):
    raise UsageError(
      f"all-reduce 'nccl' needs GPUs, but the devices are {', '.join(devices)}: "
      "use 'copy' or 'collective' on CPU devices"
    )
  return Collective(devices, hint='nccl', **options)


class HalfTransfer:
  """Wraps an all-reduce so that float32 tensors travel, and are summed, in half precision.

  Args:
    inner: the all-reduce.
    devices: its devices.
    dtype: 'float16' or 'bfloat16'.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str], dtype: str):
    if dtype not in ('float16', 'bfloat16'):
      raise UsageError(f'transfer dtype {dtype!r}: use float16 or bfloat16')
    self._inner = inner
    self._devices = tuple(devices)
    self._dtype = tf.as_dtype(dtype)

  @property
  def variables(self) -> list[tf.Variable]:
    return self._inner.variables

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    dtypes = [t.dtype for t in tensors[0]]
    half = [
      self._cast(device, values, [self._dtype] * len(values))
      for device, values in zip(self._devices, tensors, strict=True)
    ]
    return [
      self._cast(device, values, dtypes)
      for device, values in zip(self._devices, self._inner(half), strict=True)
    ]

  def _cast(self, device, values, dtypes):
    with tf.device(device):
      return [tf.cast(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]
