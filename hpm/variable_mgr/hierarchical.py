"""Hierarchical copy: sums within two groups of devices, then over one link between them."""

from collections.abc import Sequence

import tensorflow as tf

from hpm.variable_mgr import topology as topologies
from hpm.variable_mgr.allreduce import Algorithm
from hpm.variable_mgr.topology import Links, Topology

__all__ = ['HierarchicalCopy']


class HierarchicalCopy(Algorithm):
  """Each group sums on its main device; the two sums meet on the first; the result goes back.

  Only one value and one result cross between the groups, over the link of the pair of main devices,
  and tensors take the topology's pairs in turn. Sums are float32 whatever crosses; with a transfer
  dtype the second group's is rounded once on its way.

  Args:
    devices, transfer_dtype: as for `Algorithm`.
    network_topology: name of a topology, a link matrix, or a `Topology`; see
      `hpm.variable_mgr.topology`.
  """

  def __init__(
    self,
    devices: Sequence[str],
    network_topology: str | Links | Topology = 'dgx1',
    transfer_dtype: str | None = None,
  ):
    super().__init__(devices, transfer_dtype)
    if len(self._devices) > 1:
      self._topology = topologies.create(network_topology, len(self._devices))

  def _reduce(self, values, index):
    first_main, second_main = self._topology.pairs[index % len(self._topology.pairs)]
    first, second = self._topology.groups
    if first_main not in first:
      first, second = second, first
    main, other = self._devices[first_main], self._devices[second_main]
    total = self._sum(
      [self._within(values, first, main), self._within(values, second, other)], [main, other], main
    )
    packed = self._pack(total, main)
    with tf.device(other):
      across = tf.identity(packed)
    results = []
    for i, device in enumerate(self._devices):
      source = packed if i in first else across
      if i not in (first_main, second_main):
        with tf.device(device):
          source = tf.identity(source)
      results.append(self._unpack(source, total.dtype, device))
    return results

  def _within(self, values: Sequence[tf.Tensor], group: Sequence[int], main: str) -> tf.Tensor:
    if len(group) == 1:
      return values[group[0]]
    return self._sum([values[i] for i in group], [self._devices[i] for i in group], main)
