"""Ring all-reduce: each device talks to its two neighbours alone (Patarasuk & Yuan 2009, JPDC 69).

Each tensor is cut into one share a device. Each share goes once round the ring to be summed, and
once more to be handed out: 2 (n - 1) / n of a tensor leave each device, however many there are.
"""

from collections.abc import Sequence
import itertools

import tensorflow as tf

from hpm.variable_mgr import sums
from hpm.variable_mgr.allreduce import Algorithm, even, flat, joined, split

__all__ = ['Ring']


class Ring(Algorithm):
  """Sums in a ring over the devices in their order.

  With a transfer dtype additions are float32, but what a device hands on is a partial sum, so each
  of the n - 1 hops rounds once.

  Args:
    devices, transfer_dtype: as for `Algorithm`.
    shards: pieces that each device's share is cut into, so that one is summed while the next is on
      its way; 1 if nothing is said. A tensor of few elements has fewer.
  """

  def __init__(
    self,
    devices: Sequence[str],
    shards: int | None = None,
    transfer_dtype: str | None = None,
  ):
    super().__init__(devices, transfer_dtype)
    self._shards = shards or 1

  def _reduce(self, values, index):
    shape = values[0].shape
    sizes = even(shape.num_elements(), len(self._devices) * self._shards)
    cut = [
      split(flat(value, device), sizes, device)
      for value, device in zip(values, self._devices, strict=True)
    ]
    results: list[list] = [[] for _ in self._devices]
    for piece, parts in enumerate(zip(*cut, strict=True)):
      for result, part in zip(results, self._round(parts, index + piece), strict=True):
        result.append(part)
    return [joined(p, shape, device) for p, device in zip(results, self._devices, strict=True)]

  def _round(self, parts: Sequence[tf.Tensor], start: int) -> list[tf.Tensor]:
    """Sums one piece from device `start` round to the one before it, then hands it round."""
    count = len(self._devices)
    order = [(start + hop) % count for hop in range(count)]
    total = parts[order[0]]
    for before, here in itertools.pairwise(order):
      arrived = self._send(total, self._devices[before], self._devices[here])
      with tf.device(self._devices[here]):
        total = sums.add(arrived, parts[here])
    last = self._devices[order[-1]]
    packed = self._pack(total, last)
    results = {order[-1]: self._unpack(packed, total.dtype, last)}
    for here in order[:-1]:  # on from the last, whose neighbour is the first
      with tf.device(self._devices[here]):
        packed = tf.identity(packed)
      results[here] = self._unpack(packed, total.dtype, self._devices[here])
    return [results[i] for i in range(count)]
