"""Which devices of a machine are close to one another. Imports no TensorFlow.

Hierarchical copying sums within two groups of devices, and then across one link between them. A
topology says which the groups are and which links to take in turn.
"""

from collections.abc import Sequence
import dataclasses
import itertools

from hpm import errors
from hpm.errors import UsageError

__all__ = ['TOPOLOGIES', 'Topology', 'create', 'from_links']

# Beyond this many devices the number of ways to halve them gets out of hand (16: 6435).
MAX_DEVICES = 16

Links = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Topology:
  """Two groups of devices by number, and pairs (main device, main device of the other group)."""

  groups: tuple[tuple[int, ...], tuple[int, ...]]
  pairs: tuple[tuple[int, int], ...]


def dgx1(count: int) -> Topology:
  """Two halves, fully connected in themselves, device i linked to its like in the other half.

  NVIDIA's DGX-1 has such a hybrid cube mesh of eight GPUs; any other number is halved alike.
  """
  half = count // 2
  first, second = tuple(range(half)), tuple(range(half, count))
  across = [(i, half + i) for i in range(half)]
  return Topology((first, second), (*across, *((b, a) for a, b in across)))


def gcp_v100(count: int) -> Topology:
  """Eight V100 as Google's cloud hands them out: the links that cross join 0, 5 and 2, 7."""
  if count != 8:
    raise UsageError(
      f'network topology gcp_v100 has 8 devices, not {count}: use dgx1, or give a link matrix'
    )
  return Topology(((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 5), (2, 7), (5, 0), (7, 2)))


TOPOLOGIES = {'dgx1': dgx1, 'gcp_v100': gcp_v100}


def from_links(links: Links) -> Topology:
  """The two halves with the fastest links inside them, and the fastest pairs across.

  Args:
    links: bandwidth, or number of links, from device i to device j, in any unit; the diagonal
      doesn't count. What the slower of the two directions has is taken for both.

  Raises:
    UsageError: no square matrix of 2 to 16 devices, or no link between the halves.
  """
  count = len(links)
  if not 2 <= count <= MAX_DEVICES or any(len(row) != count for row in links):
    raise UsageError(
      f'link matrix with rows of {[len(row) for row in links]} numbers: a square one for 2 to '
      f'{MAX_DEVICES} devices is needed'
    )
  speed = [[min(links[i][j], links[j][i]) for j in range(count)] for i in range(count)]

  def inside(group: Sequence[int]) -> tuple[float, float]:
    """The slowest link decides how fast a group is summed; then all of them together."""
    found = [speed[i][j] for i, j in itertools.combinations(group, 2)]
    return (min(found), sum(found)) if found else (float('inf'), 0.0)

  best, halves = None, None
  for rest in itertools.combinations(range(1, count), (count + 1) // 2 - 1):
    first = (0, *rest)
    second = tuple(i for i in range(count) if i not in first)
    a, b = inside(first), inside(second)
    score = (min(a[0], b[0]), a[1] + b[1])
    if best is None or score > best:
      best, halves = score, (first, second)
  assert halves is not None
  first, second = halves
  across = []
  for i in first:  # each device with the one that it reaches fastest
    j = max(second, key=lambda j, i=i: (speed[i][j], -abs(j - i)))  # type: ignore[misc]
    across.append((speed[i][j], i, j))
  fastest = max(across)[0]
  if not fastest > 0:
    raise UsageError(
      f'link matrix: no link between the devices {list(first)} and {list(second)}, so nothing '
      'could be summed over both'
    )
  pairs = [(i, j) for speed_, i, j in across if speed_ == fastest]
  return Topology((first, second), (*pairs, *((j, i) for i, j in pairs)))


def create(topology: str | Links | Topology, count: int) -> Topology:
  """A topology by name, from a link matrix, or as it is, for `count` devices.

  Raises:
    UsageError: an unknown name, or one for another number of devices.
  """
  if isinstance(topology, str):
    if topology not in TOPOLOGIES:
      raise errors.unknown('network topology', topology, TOPOLOGIES)
    return TOPOLOGIES[topology](count)
  if not isinstance(topology, Topology):
    if len(topology) != count:
      raise UsageError(
        f'link matrix for {len(topology)} devices, but there are {count}: one row a device'
      )
    topology = from_links(topology)
  if sorted(itertools.chain(*topology.groups)) != list(range(count)):
    raise UsageError(f'network topology with groups {topology.groups}, but {count} devices')
  return topology
