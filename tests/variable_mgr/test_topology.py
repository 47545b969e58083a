"""Groups and pairs of hierarchical copying, by name and from the links of known machines."""

import pytest

from hpm.errors import UsageError
from hpm.variable_mgr import topology
from hpm.variable_mgr.topology import Topology

# DGX-1 of P100s: two fully connected quads, GPU i linked to i + 4.
CUBE_MESH = [
  [int(i != j and (i // 4 == j // 4 or i % 4 == j % 4)) for j in range(8)] for i in range(8)
]


def test_dgx1_by_hand():
  assert topology.create('dgx1', 4) == Topology(((0, 1), (2, 3)), ((0, 2), (1, 3), (2, 0), (3, 1)))
  assert topology.create('dgx1', 3) == Topology(((0,), (1, 2)), ((0, 1), (1, 0)))


def test_v100_of_the_cloud_crosses_over_the_links_that_there_are():
  found = topology.create('gcp_v100', 8)
  assert found.pairs == ((0, 5), (2, 7), (5, 0), (7, 2))
  with pytest.raises(UsageError, match='gcp_v100 has 8 devices, not 4'):
    topology.create('gcp_v100', 4)


def test_the_links_of_a_dgx1_give_its_topology():
  assert topology.create(CUBE_MESH, 8) == topology.create('dgx1', 8)


def test_devices_in_any_order_are_halved_by_their_links():
  order = [0, 4, 1, 5, 2, 6, 3, 7]  # quads interleaved
  links = [[CUBE_MESH[i][j] for j in order] for i in order]
  found = topology.from_links(links)
  assert found.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
  assert set(found.pairs[:4]) == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_only_the_fastest_links_are_crossed():
  # Two pairs of fast links inside; across, 0-2 is twice as fast as 1-3.
  links = [[0, 50, 20, 5], [50, 0, 5, 10], [20, 5, 0, 50], [5, 10, 50, 0]]
  assert topology.from_links(links) == Topology(((0, 1), (2, 3)), ((0, 2), (2, 0)))


def test_a_link_is_as_fast_as_its_slower_direction():
  links = [[0, 50, 90, 0], [50, 0, 0, 10], [1, 0, 0, 50], [0, 10, 50, 0]]
  assert topology.from_links(links).pairs == ((1, 3), (3, 1))


@pytest.mark.parametrize(
  ('links', 'message'),
  [
    ([[0]], 'a square one for 2 to 16'),
    ([[0, 1], [1]], 'a square one'),
    ([[0, 0], [0, 0]], 'no link between the devices'),
    ([[0, 1], [1, 0]], 'for 2 devices, but there are 3'),
  ],
)
def test_impossible_matrices_are_refused(links, message):
  with pytest.raises(UsageError, match=message):
    topology.create(links, 3 if 'there are 3' in message else len(links))


def test_an_unknown_name_is_refused_with_the_nearest():
  with pytest.raises(UsageError, match="'dgx2': did you mean dgx1"):
    topology.create('dgx2', 8)
