"""Recursive halving and doubling: a logarithm of exchanges (Thakur et al. 2005, IJHPCA 19)."""

from collections.abc import Sequence

import tensorflow as tf

from hpm.variable_mgr import sums
from hpm.variable_mgr.allreduce import Algorithm, flat, joined, split

__all__ = ['HalvingDoubling']


class HalvingDoubling(Algorithm):
  """Devices exchange halves, then quarters, and so on, until each has summed its own part.

  Then the parts go the same ways back. As many bytes as in a ring, in 2 log2(n) exchanges instead
  of 2 (n - 1). Where n is no power of two the devices beyond the largest one hand their values to
  the first ones and get the sums back. With a transfer dtype each exchange rounds once; additions
  are float32.
  """

  def _reduce(self, values, index):
    del index
    shape, devices = values[0].shape, self._devices
    count = _power_of_two(min(len(devices), max(1, shape.num_elements())))
    held = [flat(value, device) for value, device in zip(values, devices, strict=True)]
    for extra in range(count, len(devices)):
      here = extra % count
      held[here] = self._added(held[here], held[extra], extra, here)

    distance = count // 2
    while distance:
      held[:count] = self._halved(held[:count], distance)
      distance //= 2

    packed = [self._pack(part, device) for part, device in zip(held[:count], devices)]
    distance = 1
    while distance < count:
      packed = [
        self._joined_with(packed[i], packed[i ^ distance], i, distance) for i in range(count)
      ]
      distance *= 2
    for extra in range(count, len(devices)):
      with tf.device(devices[extra]):
        packed.append(tf.identity(packed[extra % count]))
    return [
      joined([self._unpack(p, values[0].dtype, device)], shape, device)
      for p, device in zip(packed, devices, strict=True)
    ]

  def _halved(self, held: Sequence[tf.Tensor], distance: int) -> list[tf.Tensor]:
    """Each device keeps one half of what it holds and sends its partner the other."""
    halves = []
    for vector, device in zip(held, self._devices):
      size = vector.shape[0]
      halves.append(split(vector, [size // 2, size - size // 2], device))
    kept = []
    for i in range(len(held)):
      upper = int(bool(i & distance))
      kept.append(self._added(halves[i][upper], halves[i ^ distance][upper], i ^ distance, i))
    return kept

  def _added(self, own: tf.Tensor, other: tf.Tensor, source: int, here: int) -> tf.Tensor:
    arrived = self._send(other, self._devices[source], self._devices[here])
    with tf.device(self._devices[here]):
      return sums.add(own, arrived)

  def _joined_with(self, own: tf.Tensor, other: tf.Tensor, i: int, distance: int) -> tf.Tensor:
    parts = [other, own] if i & distance else [own, other]
    with tf.device(self._devices[i]):
      return tf.concat(parts, 0)


def _power_of_two(number: int) -> int:
  """The largest that isn't above `number`."""
  return 1 << (number.bit_length() - 1)
