"""Ports: refusals in one line, and servers that answer at their own address alone."""

import socket
import threading

import pytest

from hpm.cluster import listening
from hpm.cluster.spec import Address
from hpm.errors import UsageError


@pytest.fixture
def port() -> int:
  return listening.free_ports(1)[0]


def test_a_port_in_use_is_refused(port):
  address = Address('127.0.0.1', port)
  listening.check_free(address, 'worker:0')
  with socket.create_server(('127.0.0.1', port)):
    for refuses in (listening.check_free, listening.listen):
      with pytest.raises(UsageError) as refused:
        refuses(address, 'worker:0')
      assert f'worker:0 can not listen at {address}: port {port} is in use' in str(refused.value)


def test_a_port_in_use_at_another_address_is_refused_for_a_server_that_binds_all(port):
  with (
    socket.create_server(('127.0.0.2', port)),
    pytest.raises(UsageError, match=f'port {port} is in use'),
  ):
    listening.check_free(Address('127.0.0.1', port), 'worker:0')


def test_an_address_of_another_machine_is_refused(port):
  with pytest.raises(UsageError, match=r'192\.0\.2\.1 is no address of this machine'):
    listening.check_free(Address('192.0.2.1', port), 'ps:0')


def test_an_unknown_host_is_refused(port):
  with pytest.raises(UsageError, match='of ps:0: the host is not known here'):
    listening.check_free(Address('no-such-host.invalid', port), 'ps:0')


def test_public_and_private_addresses():
  assert listening.is_public(Address('8.8.8.8', 1))
  for private in ('127.0.0.1', '10.1.2.3', '192.168.0.1', '172.16.0.1', '::1', 'fd00::1'):
    assert not listening.is_public(Address(private, 1))


@pytest.mark.parametrize('address', ['127.0.0.1', '::1', 'localhost'])
def test_the_heartbeat_listens_at_its_own_address_alone(port, address):
  sockets = listening.listen(Address(address, port), 'worker:0')
  try:
    assert listening.answers(Address(address, port))
    assert not listening.answers(Address('127.0.0.2', port))
  finally:
    for one in sockets:
      one.close()


@pytest.mark.parametrize('family', [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize('host', ['127.0.0.1', '127.0.0.3', '::1', 'localhost'])
def test_a_server_that_binds_all_interfaces_is_restricted_to_one(port, family, host):
  if family == socket.AF_INET and host == '::1':
    return  # can't be reached there in the first place
  dual = family == socket.AF_INET6
  everywhere = '::' if dual else '0.0.0.0'
  with socket.create_server((everywhere, port), family=family, dualstack_ipv6=dual):
    others = {'127.0.0.1', '127.0.0.2', '127.0.0.3'} | ({'::1'} if dual else set())
    assert all(listening.answers(Address(other, port), 0.2) for other in others)
    assert listening.restrict(Address(host, port), 'worker:0')
    assert listening.answers(Address(host, port), 0.2)
    allowed = {'127.0.0.1', '::1'} if host == 'localhost' else {host}
    for other in others - allowed:
      assert not listening.answers(Address(other, port), 0.2), other


def test_data_still_flows_through_a_restricted_server(port):
  payload = bytes(range(256)) * 4096
  with socket.create_server(('0.0.0.0', port)) as server:
    assert listening.restrict(Address('127.0.0.1', port), 'worker:0')
    with socket.create_connection(('127.0.0.1', port)) as client:
      accepted, _ = server.accept()
      with accepted:
        sender = threading.Thread(target=accepted.sendall, args=[payload])
        sender.start()
        assert client.recv(len(payload), socket.MSG_WAITALL) == payload
        sender.join()


def test_only_own_servers_can_be_restricted(port):
  with pytest.raises(LookupError):
    listening.restrict(Address('127.0.0.1', port), 'worker:0')


def test_free_ports_are_distinct_and_free():
  ports = listening.free_ports(20)
  assert len(set(ports)) == 20
  for one in ports:
    listening.check_free(Address('127.0.0.1', one), 'worker:0')
