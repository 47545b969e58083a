"""Who takes part in a cluster: what is refused, and what follows from the addresses."""

import pytest

from hpm.cluster import spec
from hpm.cluster.spec import Cluster
from hpm.errors import UsageError


def test_a_task_knows_its_place():
  cluster = Cluster('worker', 1, ('a:1', 'b:1'), ('a:2',))
  assert (cluster.num_workers, cluster.num_ps, cluster.is_chief) == (2, 1, False)
  assert (cluster.task, cluster.address) == ('worker:1', 'b:1')
  assert cluster.tasks == ('worker:0', 'worker:1', 'ps:0')
  assert cluster.address_of('ps:0') == 'a:2'
  assert cluster.as_dict() == {'worker': ['a:1', 'b:1'], 'ps': ['a:2']}
  assert Cluster('worker', 0, ('a:1',)).is_chief
  assert not Cluster('ps', 0, ('a:1',), ('b:1',)).is_chief


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('wrker', 0, ('a:1',)), "unknown job 'wrker': did you mean worker"),
    (('worker', 0, ()), 'at least one worker'),
    (('worker', 2, ('a:1', 'b:1')), "no task 2 of job 'worker': of 2 hosts (a:1, b:1) the index"),
    (('worker', -1, ('a:1', 'b:1')), 'the index is 0 to 1'),
    (('ps', 0, ('a:1',)), "no host of job 'ps' is given"),
    (('worker', 0, ('a',)), "'a' of worker:0 is no address: host:port is needed"),
    (('worker', 0, ('a:x',)), "'a:x' of worker:0 is no address"),
    (('worker', 0, (':1',)), "':1' of worker:0 is no address"),
    (('worker', 0, ('a:0',)), 'a port lies in 1 .. 65535'),
    (('worker', 0, ('a:70000',)), 'a port lies in 1 .. 65535'),
    (('worker', 0, ('grpc://a:1',)), 'without grpc://'),
    (('worker', 0, ('[::zz]:1',)), 'is no address'),
    (('worker', 0, ('[1:2]:1',)), '[1:2] is no IPv6 address'),
    (('worker', 0, ('a:1', 'a:1')), 'a:1 is the address of both worker:0 and worker:1'),
    (('worker', 0, ('a:1', 'b:1'), ('b:1',)), 'b:1 is the address of both worker:1 and ps:0'),
    (('worker', 0, ('a:1',), (), 1), 'heartbeat port 1 is that of worker:0 on a'),
    (('worker', 0, ('a:1',), (), 70000), 'heartbeat port 70000'),
  ],
)
def test_what_can_not_work_is_refused(arguments, message):
  with pytest.raises(UsageError) as refused:
    Cluster(*arguments)
  assert message in str(refused.value)
  assert '\n' not in str(refused.value)


def test_modes_with_and_without_parameter_servers():
  with pytest.raises(UsageError, match='parameter_server keeps its variables on parameter servers'):
    Cluster('worker', 0, ('a:1',)).require_ps('parameter_server')
  with pytest.raises(UsageError, match='collective_all_reduce has no use .* b:1 are given'):
    Cluster('worker', 0, ('a:1',), ('b:1',)).refuse_ps('collective_all_reduce')


@pytest.mark.parametrize(
  ('workers', 'servers', 'port', 'expected'),
  [
    (('a:2222', 'b:2222'), (), 0, 'a:3222'),
    (('a:2222',), ('a:3222', 'a:3223'), 0, 'a:3224'),
    (('a:2222',), ('b:3222',), 0, 'a:3222'),
    (('a:65000',), (), 0, 'a:64000'),
    (('[::1]:2222',), (), 0, '[::1]:3222'),
    (('a:2222', 'b:2222'), (), 7, 'a:7'),
  ],
)
def test_every_task_derives_the_same_heartbeat_address(workers, servers, port, expected):
  tasks = [('worker', i) for i in range(len(workers))] + [('ps', i) for i in range(len(servers))]
  found = {str(Cluster(*task, workers, servers, port).heartbeat_address) for task in tasks}
  assert found == {expected}


@pytest.mark.parametrize(
  ('text', 'hosts'),
  [
    ('a:1', ('a:1',)),
    ('a:1, b:2', ('a:1', 'b:2')),
    ('n[1-3]:5', ('n1:5', 'n2:5', 'n3:5')),
    ('n[08-10]', ('n08', 'n09', 'n10')),
    ('n[1,4-5],m7', ('n1', 'n4', 'n5', 'm7')),
    ('r[0-1]n[2-3]', ('r0n2', 'r0n3', 'r1n2', 'r1n3')),
    ('[::1]:2222,[fe80::2]:1', ('[::1]:2222', '[fe80::2]:1')),
    ('', ()),
  ],
)
def test_lists_of_hosts_may_hold_ranges(text, hosts):
  assert spec.parse_hosts(text) == hosts


@pytest.mark.parametrize('text', ['n[3-1]:1', 'n[1-]:1', 'n[-1]:1', 'n[1,,2]:1'])
def test_a_range_that_is_none_is_refused(text):
  with pytest.raises(UsageError, match='is no range'):
    spec.parse_hosts(text)
