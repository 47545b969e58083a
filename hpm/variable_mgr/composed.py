"""All-reduces from others: by size of the tensor, and in two levels of groups of devices."""

from collections.abc import Mapping, Sequence
import inspect
from typing import Any

import tensorflow as tf

from hpm import registry
from hpm.errors import UsageError
from hpm.variable_mgr import spec as specs
from hpm.variable_mgr.allreduce import Algorithm, AllReduce, HalfTransfer, Lists

__all__ = ['BySize', 'TwoLevels', 'build', 'groups_of']


class BySize:
  """Each tensor by the first all-reduce whose limit is not below its size.

  Args:
    ranges: (largest size in bytes, all-reduce), sizes ascending; None, for all others, at the end.
  """

  def __init__(self, ranges: Sequence[tuple[int | None, AllReduce]]):
    self._ranges = tuple(ranges)

  @property
  def variables(self) -> list[tf.Variable]:
    return [variable for _, inner in self._ranges for variable in inner.variables]

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    chosen = [self._range(t.shape.num_elements() * t.dtype.size) for t in tensors[0]]
    sums: list[list[Any]] = [[None] * len(chosen) for _ in tensors]
    for number, (_, inner) in enumerate(self._ranges):
      own = [i for i, range_ in enumerate(chosen) if range_ == number]
      if not own:
        continue
      reduced = inner([[values[i] for i in own] for values in tensors])
      for result, values in zip(sums, reduced, strict=True):
        for i, value in zip(own, values, strict=True):
          result[i] = value
    return sums

  def _range(self, size: int) -> int:
    return next(
      number for number, (limit, _) in enumerate(self._ranges) if limit is None or size <= limit
    )


class TwoLevels:
  """Sums within each group of devices, then between the groups, then back within each.

  The members of a group take turns in speaking for it: tensor i crosses from the i-th member of one
  group to the i-th of the others, so that all links between groups are used.

  Args:
    devices: device strings.
    groups: which devices are close to one another, by number; each in one group.
    within: an all-reduce for each group, in their order.
    between: one for each of `lanes(groups)`, in their order.
  """

  def __init__(
    self,
    devices: Sequence[str],
    groups: Sequence[Sequence[int]],
    within: Sequence[AllReduce],
    between: Sequence[AllReduce],
  ):
    self._devices = tuple(devices)
    self._groups = [tuple(group) for group in groups]
    self._within = tuple(within)
    self._between = tuple(between)

  @staticmethod
  def lanes(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The devices that speak for the groups together: the k-th of each, for every k that all have.

    One group alone has no one to speak to, and no lane.
    """
    if len(groups) == 1:
      return []
    return [[group[k] for group in groups] for k in range(min(map(len, groups)))]

  @property
  def variables(self) -> list[tf.Variable]:
    return [v for inner in (*self._within, *self._between) for v in inner.variables]

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    sums: list[list[tf.Tensor]] = [[] for _ in self._devices]
    for group, inner in zip(self._groups, self._within, strict=True):
      for i, values in zip(group, inner([tensors[i] for i in group]), strict=True):
        sums[i] = list(values)
    for number, (lane, inner) in enumerate(
      zip(self.lanes(self._groups), self._between, strict=True)
    ):
      own = range(number, len(tensors[0]), len(self._between))
      if not own:
        continue
      reduced = inner([[sums[speaker][k] for k in own] for speaker in lane])
      for group, speaker, values, within in zip(
        self._groups, lane, reduced, self._within, strict=True
      ):
        # Nobody asks for what the silent members had of their group. But what isn't built of copies
        # and sums may wait for all of them, and a session leaves out what nobody asks for.
        must_run = not isinstance(within, Algorithm)
        for k, value in zip(own, values, strict=True):
          for i in group:
            if i == speaker:
              sums[i][k] = value
            else:
              waits = [sums[i][k]] if must_run else []
              with tf.device(self._devices[i]), tf.control_dependencies(waits):
                sums[i][k] = tf.identity(value)
    return sums


def groups_of(devices: Sequence[str]) -> list[list[int]]:
  """Devices by the task that they belong to; those of one machine in two halves, its sockets."""
  tasks: dict[Any, list[int]] = {}
  for i, device in enumerate(devices):
    place = tf.DeviceSpec.from_string(device)
    tasks.setdefault((place.job, place.replica, place.task), []).append(i)
  if len(tasks) > 1:
    return list(tasks.values())
  half = len(devices) // 2
  indices = list(range(len(devices)))
  return [group for group in (indices[:half], indices[half:]) if group]


def build(
  spec: str, names: Mapping[str, str], devices: Sequence[str], options: Mapping[str, Any]
) -> AllReduce:
  """The all-reduce that a spec stands for.

  Args:
    spec: see `hpm.variable_mgr.spec`.
    names: `hpm.variable_mgr.ALL_REDUCES`.
    devices: device strings.
    options: each is given to the algorithms whose signature has it. What has no `transfer_dtype`
      is wrapped in `HalfTransfer` instead.

  Raises:
    UsageError: the spec can not be read, or not be had on these devices or with these options.
  """
  ranges = specs.parse(spec, names)
  specs.check_devices(spec, ranges, devices)
  taken: set[str] = set()

  def one(level: specs.Level, places: Sequence[str]) -> AllReduce:
    name = level.name
    if name in names:
      factory = registry.resolve('all-reduce', names, name)
    else:
      factory = registry.by_path('all-reduce', name)
    accepted = inspect.signature(factory).parameters
    given = {option: value for option, value in options.items() if option in accepted}
    taken.update(given)
    if level.shards is not None:
      given['shards'] = level.shards
    inner = factory(places, **given)
    half = options.get('transfer_dtype')
    if half is not None and 'transfer_dtype' not in accepted:
      return HalfTransfer(inner, places, half)
    return inner

  def both(algorithm: specs.Algorithm) -> AllReduce:
    if algorithm.between is None:
      return one(algorithm.within, devices)
    groups = groups_of(devices)
    within = [one(algorithm.within, [devices[i] for i in group]) for group in groups]
    lanes = TwoLevels.lanes(groups)
    between = [one(algorithm.between, [devices[i] for i in lane]) for lane in lanes]
    return TwoLevels(devices, groups, within, between)

  built = [(range_.max_bytes, both(range_.algorithm)) for range_ in ranges]
  for option in options:
    if option not in taken and option != 'transfer_dtype':
      raise UsageError(f'{option} has no effect on the all-reduce {spec!r}: leave it out')
  return built[0][1] if len(built) == 1 else BySize(built)
