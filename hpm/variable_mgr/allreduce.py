"""All-reduce: from one list of tensors a device to their sums on every device.

  all_reduce = hpm.variable_mgr.all_reduce('copy', devices)
  sums = all_reduce([[a0, b0], [a1, b1]])        # a0, b0 on devices[0]; a1, b1 on devices[1]
  # sums[0] = [a0 + a1, b0 + b1] on devices[0], sums[1] the same on devices[1]

Every device ends with the same bits: each sum is formed in one place, as a whole or part by part,
and then copied.
"""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from hpm.calls import Shared
from hpm.devices import CPU
from hpm.errors import UsageError
from hpm.variable_mgr import sums

__all__ = [
  'Algorithm',
  'AllReduce',
  'Copy',
  'HalfTransfer',
  'Wrapper',
  'check_place',
  'even',
  'flat',
  'half',
  'joined',
  'split',
]

Lists = Sequence[Sequence[tf.Tensor]]


class AllReduce(Protocol):
  """Sums over devices; graph-building, in a `tf.function` or a `tf.Graph`.

  One that is quicker with few large tensors than with many small ones may say so by an attribute
  `buckets`: managers then put gradients together in so many shares, unless they are told otherwise.
  """

  @property
  def variables(self) -> list[tf.Variable]:
    """What it keeps between steps, for a session's initialisation."""

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    """One list a device, all of the same shapes and dtypes -> the sums, on each device."""


class Algorithm:
  """Base of the all-reduces that are built of copies and sums, one tensor at a time.

  A subclass says in `_reduce` what happens to one tensor of each device. With a transfer dtype
  float32 values cross between devices in half precision and are summed in float32 where they
  arrive; the finished sum is rounded once for all devices, the one that formed it included.

  Args:
    devices: device strings, as many as lists.
    transfer_dtype: 'float16', 'bfloat16', or None for the tensors' own.
  """

  variables: list[tf.Variable] = []

  def __init__(self, devices: Sequence[str], transfer_dtype: str | None = None):
    self._devices = tuple(devices)
    self._wire = None if transfer_dtype is None else half(transfer_dtype)

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    if len(self._devices) == 1:
      return [list(values) for values in tensors]
    results: list[list[tf.Tensor]] = [[] for _ in self._devices]
    for index, values in enumerate(zip(*tensors, strict=True)):
      for result, value in zip(results, self._reduce(values, index), strict=True):
        result.append(value)
    return results

  def _reduce(self, values: Sequence[tf.Tensor], index: int) -> list[tf.Tensor]:
    """The sum of one value a device, on each device; `index` counts the tensors of a call."""
    raise NotImplementedError

  def _pack(self, value: tf.Tensor, device: str) -> tf.Tensor:
    """The value as it leaves `device`, where it lies."""
    if self._wire is None or value.dtype != tf.float32:
      return value
    with tf.device(device):
      return tf.cast(value, self._wire)

  def _unpack(self, packed: tf.Tensor, dtype: tf.DType, device: str) -> tf.Tensor:
    """What arrives on `device`, in the dtype in which it is summed."""
    if packed.dtype == dtype:
      return packed
    with tf.device(device):
      return tf.cast(packed, dtype)

  def _send(self, value: tf.Tensor, source: str, destination: str) -> tf.Tensor:
    """The value for an op on `destination`, which is what copies it there."""
    if source == destination:
      return value
    return self._unpack(self._pack(value, source), value.dtype, destination)

  def _sum(self, values: Sequence[tf.Tensor], sources: Sequence[str], place: str) -> tf.Tensor:
    arrived = [self._send(v, source, place) for v, source in zip(values, sources, strict=True)]
    with tf.device(place):
      return sums.in_order(arrived)

  def _everywhere(self, value: tf.Tensor, source: str) -> list[tf.Tensor]:
    """A finished sum, copied from `source` to all devices: the same bits on each."""
    packed = self._pack(value, source)
    return [
      self._unpack(_at(device, source, packed), value.dtype, device) for device in self._devices
    ]


class Copy(Algorithm):
  """Sums on one device and copies the result back to all.

  Args:
    devices, transfer_dtype: as for `Algorithm`; sums are float32.
    sum_on: 'spread' sums tensor i on device i mod n, which spreads the work and the traffic; 'cpu'
      sums all on the host; one of the devices sums all there.
  """

  def __init__(
    self, devices: Sequence[str], sum_on: str = 'spread', transfer_dtype: str | None = None
  ):
    super().__init__(devices, transfer_dtype)
    check_place('sum_on', sum_on, devices)
    self._places = {'cpu': (CPU,), 'spread': self._devices}.get(sum_on, (sum_on,))

  def __call__(self, tensors):
    if len(self._devices) == 1:
      return super().__call__(tensors)
    sums = []
    for index, values in enumerate(zip(*tensors, strict=True)):
      place = self._places[index % len(self._places)]
      total = self._sum(values, self._devices, place)
      sums.append(self._pack(total, place))
    dtypes = [value.dtype for value in tensors[0]]

    def unpack():
      return [
        tf.identity(value) if value.dtype == dtype else tf.cast(value, dtype)
        for value, dtype in zip(sums, dtypes, strict=True)
      ]

    shared = Shared(unpack, sums)
    results = []
    for device in self._devices:
      with tf.device(device):
        results.append(list(shared(sums).outputs))
    return results


class Wrapper:
  """Base of what changes the tensors before another all-reduce, and changes the sums back.

  A subclass says how in `_reduce`; on one device there is nothing to reduce, and nothing to change.

  Args:
    inner: the all-reduce.
    devices: its devices.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str]):
    self._inner = inner
    self._devices = tuple(devices)

  @property
  def variables(self) -> list[tf.Variable]:
    return self._inner.variables

  @property
  def num_workers(self) -> int:
    """Processes over which the inner one sums; most know of one alone."""
    return getattr(self._inner, 'num_workers', 1)

  @property
  def buckets(self) -> int:
    """In how many shares the inner one takes gradients best; 0 as they are, as most do."""
    return getattr(self._inner, 'buckets', 0)

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    alone = len(self._devices) * self.num_workers == 1
    return self._inner(tensors) if alone else self._reduce(tensors)

  def _reduce(self, tensors: Lists) -> list[list[tf.Tensor]]:
    raise NotImplementedError


class HalfTransfer(Wrapper):
  """Wraps an all-reduce so that float32 tensors travel, and are summed, in half precision.

  For all-reduces that know no `transfer_dtype` of their own: where the sum is formed inside an op,
  as in `Collective`, it is formed in what travels. n additions then round n times.

  Args:
    inner, devices: as for `Wrapper`.
    dtype: 'float16' or 'bfloat16'.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str], dtype: str):
    super().__init__(inner, devices)
    self._dtype = half(dtype)

  def _reduce(self, tensors: Lists) -> list[list[tf.Tensor]]:
    dtypes = [t.dtype for t in tensors[0]]
    sent = [self._dtype if dtype == tf.float32 else dtype for dtype in dtypes]
    packed = [
      self._cast(device, values, sent)
      for device, values in zip(self._devices, tensors, strict=True)
    ]
    return [
      self._cast(device, values, dtypes)
      for device, values in zip(self._devices, self._inner(packed), strict=True)
    ]

  def _cast(self, device, values, dtypes):
    with tf.device(device):
      return [tf.cast(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]


def check_place(option: str, place: str, devices: Sequence[str]) -> None:
  """UsageError unless `place` is cpu, spread (over the devices), or one of them."""
  if place not in ('cpu', 'spread', *devices):
    raise UsageError(f'{option} {place!r}: use cpu or spread, or one of {", ".join(devices)}')


def half(name: str) -> tf.DType:
  """The half-precision dtype of this name; UsageError for any other."""
  if name not in ('float16', 'bfloat16'):
    raise UsageError(f'transfer dtype {name!r}: use float16 or bfloat16')
  return tf.as_dtype(name)


def split(flat: tf.Tensor, sizes: Sequence[int], device: str) -> list[tf.Tensor]:
  """A vector cut into parts of these sizes, on the device where it lies."""
  if len(sizes) == 1:
    return [flat]
  with tf.device(device):
    return tf.split(flat, list(sizes))


def flat(value: tf.Tensor, device: str) -> tf.Tensor:
  """A tensor of one axis with the same elements, on its device."""
  if value.shape.rank == 1:
    return value
  with tf.device(device):
    return tf.reshape(value, [-1])


def joined(parts: Sequence[tf.Tensor], shape: tf.TensorShape, device: str) -> tf.Tensor:
  """The inverse of `flat` and `split`."""
  with tf.device(device):
    value = tf.concat(list(parts), 0) if len(parts) > 1 else parts[0]
    return value if shape.rank == 1 else tf.reshape(value, shape)


def even(size: int, parts: int) -> list[int]:
  """`size` elements in at most `parts` parts, none empty, whose sizes differ by one at most."""
  parts = max(1, min(parts, size))
  return [size // parts + (i < size % parts) for i in range(parts)]


def _at(device: str, source: str, value: tf.Tensor) -> tf.Tensor:
  if device == source:
    return value
  with tf.device(device):
    return tf.identity(value)
