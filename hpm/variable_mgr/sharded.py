"""Sharded (shuffle) all-reduce: each tensor cut into shards that are summed in different places."""

from collections.abc import Sequence

from hpm.devices import CPU
from hpm.variable_mgr.allreduce import Algorithm, even, flat, joined, split

__all__ = ['Sharded', 'pscpu', 'psgpu']


class Sharded(Algorithm):
  """Cuts each tensor into shards, sums each shard in one place, and puts the sums together again.

  With as many shards as devices every device sums one n-th of each tensor and all links are busy:
  n - 1 n-ths of a tensor leave each device, and as much arrives, twice over. Sums are float32
  whatever crosses.

  Args:
    devices, transfer_dtype: as for `Algorithm`.
    shards: how many a tensor is cut into; one with fewer elements has fewer shards.
    places: devices that sum, taken in turn.
  """

  def __init__(
    self,
    devices: Sequence[str],
    shards: int,
    places: Sequence[str],
    transfer_dtype: str | None = None,
  ):
    super().__init__(devices, transfer_dtype)
    self._shards = shards
    self._places = tuple(places)

  def _reduce(self, values, index):
    shape = values[0].shape
    sizes = even(shape.num_elements(), self._shards)
    if len(sizes) == 1:  # nothing to cut
      place = self._place(index, 0)
      return self._everywhere(self._sum(values, self._devices, place), place)
    cut = [
      split(flat(value, device), sizes, device)
      for value, device in zip(values, self._devices, strict=True)
    ]
    sums: list[list] = [[] for _ in self._devices]
    for shard, parts in enumerate(zip(*cut, strict=True)):
      place = self._place(index, shard)
      total = self._sum(parts, self._devices, place)
      for result, part in zip(sums, self._everywhere(total, place), strict=True):
        result.append(part)
    return [joined(p, shape, device) for p, device in zip(sums, self._devices, strict=True)]

  def _place(self, index: int, shard: int) -> str:
    """Tensor i takes the next `shards` places after those of tensor i - 1."""
    return self._places[(index * self._shards + shard) % len(self._places)]


def psgpu(
  devices: Sequence[str], shards: int | None = None, transfer_dtype: str | None = None
) -> Sharded:
  """Shards summed on the compute devices; as many as there are devices, if nothing is said."""
  return Sharded(devices, shards or len(devices), devices, transfer_dtype)


def pscpu(
  devices: Sequence[str], shards: int | None = None, transfer_dtype: str | None = None
) -> Sharded:
  """Shards summed on the host's CPU; one, if nothing is said. More let sums and copies overlap."""
  return Sharded(devices, shards or 1, [CPU], transfer_dtype)
