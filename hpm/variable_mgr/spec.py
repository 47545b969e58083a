"""The language of all-reduces: `pscpu:32k:xring#2` as data. Imports no TensorFlow.

  spec = ALGORITHM[:SIZE:ALGORITHM]...      tensors up to SIZE bytes go by what stands before it
  ALGORITHM = NAME[#N][/NAME[#N]]           two names: within groups of devices, then between them
  SIZE = bytes, or with k, M, G, T: powers of 1024

`xring` sums everything in a ring; `pscpu:32k:xring` sums tensors of up to 32,768 bytes on the CPU
and larger ones in a ring; `nccl/xring` sums by NCCL within each group of devices, in rings between
the groups. N is the number of shards of `psgpu` and `pscpu`, and of a ring the pieces that each
device's share is cut into.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re

from hpm import errors
from hpm.errors import UsageError

__all__ = [
  'Algorithm',
  'Level',
  'Range',
  'check_devices',
  'is_path',
  'parse',
  'parse_size',
  'to_text',
]

GRAMMAR = (
  'ALGORITHM[:SIZE:ALGORITHM]... with ALGORITHM = NAME[#N][/NAME[#N]] and SIZE in bytes '
  'or with k, M, G, T (powers of 1024), as in xring#2, nccl/xring or pscpu:32k:xring'
)
WITHOUT_SHARDS = {
  'collective',
  'copy',
  'hierarchical_copy',
  'nccl',
  'nccl_all_reduce',
  'rechd',
}

_MOST_SHARDS = 4096
_DIGITS = 19  # of 2**63; Python refuses to read numbers of thousands
_UNITS = {'': 0, 'k': 1, 'm': 2, 'g': 3, 't': 4}


@dataclasses.dataclass(frozen=True)
class Level:
  """One algorithm over one set of devices; `shards` is None where the spec says nothing."""

  name: str
  shards: int | None = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """`within` groups of devices and then `between` them; without groups `between` is None."""

  within: Level
  between: Level | None = None

  @property
  def levels(self) -> tuple[Level, ...]:
    return (self.within,) if self.between is None else (self.within, self.between)


@dataclasses.dataclass(frozen=True)
class Range:
  """Tensors of up to `max_bytes` that no range before it takes; None: all that are left."""

  algorithm: Algorithm
  max_bytes: int | None = None


def parse(text: str, names: Mapping[str, str]) -> tuple[Range, ...]:
  """What a spec says, ranges in order of their sizes.

  Args:
    text: the spec.
    names: the valid names, `hpm.variable_mgr.ALL_REDUCES`. A 'module:function' that is none of
      them stands for itself, as the whole spec.

  Raises:
    UsageError: with the grammar and the names.
  """
  if is_path(text, names):
    return (Range(Algorithm(Level(text))),)
  parts = text.split(':')
  if len(parts) % 2 == 0:
    raise _refusal(text, f'{parts[-1]!r} ends it, an algorithm must follow', names)
  algorithms = [_algorithm(part, text, names) for part in parts[::2]]
  limits = [_limit(part, text, names) for part in parts[1::2]]
  if limits != sorted(set(limits)):
    raise _refusal(text, 'each size must be larger than the one before', names)
  return tuple(Range(a, limit) for a, limit in zip(algorithms, [*limits, None], strict=True))


def to_text(ranges: Sequence[Range]) -> str:
  """The spec that `parse` reads as these ranges, sizes in the largest unit that is exact."""
  parts = []
  for one in ranges:
    levels = one.algorithm.levels
    parts.append('/'.join(f'{at.name}#{at.shards}' if at.shards else at.name for at in levels))
    if one.max_bytes is not None:
      parts.append(_size_text(one.max_bytes))
  return ':'.join(parts)


def check_devices(text: str, ranges: Sequence[Range], devices: Sequence[str]) -> None:
  """Refuses NCCL where a device is no GPU: nothing else would be NCCL.

  Raises:
    UsageError: with what to use instead.
  """
  names = [level.name for one in ranges for level in one.algorithm.levels]
  if any(name.startswith('nccl') for name in names) and not all(
    'GPU' in device.upper() for device in devices
  ):
    raise UsageError(
      f'all-reduce {text!r} needs GPUs, but the devices are {", ".join(devices)}: '
      "use 'copy' or 'collective' on CPU devices"
    )


def parse_size(text: str) -> int:
  """'32k' -> 32768; a whole number of bytes above 0, suffixes k, M, G, T of 1024 in either case.

  Raises:
    UsageError: anything else.
  """
  match = re.fullmatch(r'([0-9]+)([kKmMgGtT]?)', text)
  if not match or not match[1].strip('0'):
    raise UsageError(
      f'size {text!r}: a whole number of bytes above 0 is needed, or one with k, M, G or T '
      '(powers of 1024), such as 32k'
    )
  if len(match[1]) > _DIGITS or int(match[1]) * 1024 ** _UNITS[match[2].lower()] >= 2**63:
    raise UsageError(f'size {text!r}: below 2**63 bytes is needed')
  return int(match[1]) * 1024 ** _UNITS[match[2].lower()]


def is_path(text: str, names: Mapping[str, str]) -> bool:
  """Whether this is 'module:function' rather than a name or a spec."""
  module, colon, attribute = text.partition(':')
  return bool(
    colon
    and re.fullmatch(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*', module)
    and re.fullmatch(r'[A-Za-z_]\w*', attribute)
    and module not in names
  )


def _algorithm(text: str, spec: str, names: Mapping[str, str]) -> Algorithm:
  found = [_level(part, spec, names) for part in text.split('/')]
  if len(found) > 2:
    raise _refusal(spec, f'{text!r} has {len(found)} levels, two are the most', names)
  return Algorithm(*found)


def _level(text: str, spec: str, names: Mapping[str, str]) -> Level:
  name, mark, number = text.partition('#')
  if name not in names:
    problem = str(errors.unknown('algorithm', name, names)).partition('valid:')[0].rstrip('?: ')
    raise _refusal(spec, problem + ('?' if 'did you mean' in problem else ''), names)
  if not mark:
    return Level(name)
  if name in WITHOUT_SHARDS:
    raise _refusal(spec, f'{name} takes no #{number}', names)
  if not re.fullmatch('[1-9][0-9]*', number):
    raise _refusal(spec, f'#{number} after {name}: a whole number above 0 is needed', names)
  if len(number) > len(str(_MOST_SHARDS)) or int(number) > _MOST_SHARDS:
    raise _refusal(spec, f'#{number} after {name}: at most {_MOST_SHARDS}', names)
  return Level(name, int(number))


def _limit(text: str, spec: str, names: Mapping[str, str]) -> int:
  try:
    return parse_size(text)
  except UsageError as error:
    raise _refusal(spec, str(error), names) from None


def _size_text(size: int) -> str:
  for unit, power in (('T', 4), ('G', 3), ('M', 2), ('k', 1)):
    if size % 1024**power == 0:
      return f'{size // 1024**power}{unit}'
  return str(size)


def _refusal(spec: str, problem: str, names: Mapping[str, str]) -> UsageError:
  return UsageError(
    f'all-reduce spec {spec!r}: {problem}. Grammar: {GRAMMAR}. Names: {", ".join(sorted(names))}'
  )
