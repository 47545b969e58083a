"""Many small tensors as one flat one, for fewer transfers: wrappers around any all-reduce.

Tensors are taken in the order in which they are given. Managers give gradients as backprop makes
them, the last layer's first, so the first bucket is full, and on its way, while backprop goes on.
"""

from collections.abc import Sequence

import tensorflow as tf

from hpm.errors import whole
from hpm.variable_mgr.allreduce import AllReduce, Lists, Wrapper, flat, joined, split

__all__ = ['Aggregated', 'Buckets', 'Repacked', 'pack', 'unpack']

Tensors = Sequence[tf.Tensor]


def pack(tensors: Tensors) -> tf.Tensor:
  """Tensors of one dtype -> their values in one vector, in the given order."""
  vectors = [t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors]
  return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def unpack(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
  """The inverse of `pack`; all shapes are static."""
  sizes = [shape.num_elements() for shape in shapes]
  parts = tf.split(vector, sizes) if len(shapes) > 1 else [vector]
  return [
    part if shape.rank == 1 else tf.reshape(part, shape)
    for part, shape in zip(parts, shapes, strict=True)
  ]


class _ByDtype(Wrapper):
  """What packs tensors: those of each dtype by themselves."""

  def _reduce(self, tensors: Lists) -> list[list[tf.Tensor]]:
    dtypes = [t.dtype for t in tensors[0]]
    results: list[dict[int, tf.Tensor]] = [{} for _ in tensors]
    for dtype in dict.fromkeys(dtypes):
      own = [i for i, other in enumerate(dtypes) if other == dtype]
      reduced = self._reduce_one_dtype([[values[i] for i in own] for values in tensors])
      for result, values in zip(results, reduced, strict=True):
        result.update(zip(own, values, strict=True))
    return [[result[i] for i in range(len(dtypes))] for result in results]

  def _reduce_one_dtype(self, tensors: Lists) -> list[list[tf.Tensor]]:
    raise NotImplementedError


class Repacked(_ByDtype):
  """Reduces all tensors as so many buckets of equal size.

  A tensor that doesn't fit into what is left of a bucket is cut, its rest opens the next one; so a
  bucket waits for its own tensors alone.

  Args:
    inner, devices: as for `Wrapper`.
    num_buckets: how many, for each dtype; the last takes what doesn't divide.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str], num_buckets: int):
    num_buckets = whole('gradient_repacking', num_buckets)
    super().__init__(inner, devices)
    self._num_buckets = num_buckets

  def _reduce_one_dtype(self, tensors: Lists) -> list[list[tf.Tensor]]:
    shapes = [t.shape for t in tensors[0]]
    buckets, pieces = self._plan([shape.num_elements() for shape in shapes])
    packed = []
    for values, device in zip(tensors, self._devices, strict=True):
      parts = [
        part
        for value, sizes in zip(values, pieces, strict=True)
        for part in split(flat(value, device), sizes, device)
      ]
      with tf.device(device):
        starts = [sum(buckets[:i]) for i in range(len(buckets))]
        packed.append([pack(parts[s : s + n]) for s, n in zip(starts, buckets, strict=True)])
    sizes_of_all = [size for sizes in pieces for size in sizes]
    results = []
    for reduced, device in zip(self._inner(packed), self._devices, strict=True):
      parts, start = [], 0
      for vector, count in zip(reduced, buckets, strict=True):
        parts += split(vector, sizes_of_all[start : start + count], device)
        start += count
      rest = iter(parts)
      results.append(
        [
          joined([next(rest) for _ in sizes], shape, device)
          for sizes, shape in zip(pieces, shapes, strict=True)
        ]
      )
    return results

  def _plan(self, sizes: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Number of pieces in each bucket, and the sizes of each tensor's pieces."""
    total = sum(sizes)
    room = max(1, total // self._num_buckets)
    last = min(self._num_buckets, max(1, total)) - 1
    counts, pieces, left = [0], [], room
    for size in sizes:
      own = []
      while True:
        if left == 0 and len(counts) <= last and size:
          counts.append(0)
          left = room
        part = size if len(counts) > last else min(size, left)
        own.append(part)
        counts[-1] += 1
        size -= part
        left = max(0, left - part)
        if not size:
          break
      pieces.append(own)
    return counts, pieces


class _Runs(_ByDtype):
  """Reduces runs of consecutive whole tensors as one each; a tensor alone stays as it is."""

  def _reduce_one_dtype(self, tensors: Lists) -> list[list[tf.Tensor]]:
    runs = self._runs(tensors[0])
    packed = []
    for values, device in zip(tensors, self._devices, strict=True):
      with tf.device(device):
        packed.append(
          [pack([values[i] for i in run]) if len(run) > 1 else values[run[0]] for run in runs]
        )
    results = []
    for values, reduced, device in zip(tensors, self._inner(packed), self._devices, strict=True):
      result: list[tf.Tensor] = []
      with tf.device(device):
        for run, value in zip(runs, reduced, strict=True):
          result += unpack(value, [values[i].shape for i in run]) if len(run) > 1 else [value]
      results.append(result)
    return results

  def _runs(self, tensors: Tensors) -> list[list[int]]:
    """The indices of the tensors in each run, in their order."""
    raise NotImplementedError


class Buckets(_Runs):
  """Reduces whole tensors together up to an equal share of all bytes; a larger one goes alone.

  Unlike `Repacked` it cuts none, so that large tensors are reduced where they lie, without a copy.

  Args:
    inner, devices: as for `Wrapper`.
    num_buckets: how many shares, for each dtype; there are more runs where tensors don't fill them.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str], num_buckets: int):
    super().__init__(inner, devices)
    self._num_buckets = num_buckets

  def _runs(self, tensors: Tensors) -> list[list[int]]:
    sizes = [t.shape.num_elements() for t in tensors]
    room = sum(sizes) / self._num_buckets
    runs: list[list[int]] = []
    filled = 0
    for i, size in enumerate(sizes):
      if runs and filled + size <= room:
        runs[-1].append(i)
        filled += size
      else:
        runs.append([i])
        filled = size
    return runs


class Aggregated(_Runs):
  """Reduces runs of small tensors together, all others as they are.

  Args:
    inner, devices: as for `Wrapper`.
    max_bytes: a tensor up to this size is small.
    max_group: no more tensors than this in one.
  """

  def __init__(self, inner: AllReduce, devices: Sequence[str], max_bytes: int, max_group: int):
    max_bytes = whole('agg_small_grads_max_bytes', max_bytes)
    max_group = whole('agg_small_grads_max_group', max_group, 2)
    super().__init__(inner, devices)
    self._max_bytes = max_bytes
    self._max_group = max_group

  def _runs(self, tensors: Tensors) -> list[list[int]]:
    runs: list[list[int]] = []
    open_run = False
    for i, t in enumerate(tensors):
      small = t.shape.num_elements() * t.dtype.size <= self._max_bytes
      if small and open_run and len(runs[-1]) < self._max_group:
        runs[-1].append(i)
      else:
        runs.append([i])
      open_run = small
    return runs
