"""Ports: whether one can be had, who may reach it, whether somebody answers there.

TensorFlow's servers bind every interface of the machine, whatever address they are given (measured:
`ss -ltn` shows `*:port` for `tf.distribute.Server`, the eager server and tf.data's). `restrict` has
the kernel drop what comes to such a port for another address than the one that was meant.
"""

from collections.abc import Iterator, Sequence
import ctypes
import errno
import ipaddress
import os
import random
import socket
import struct

from hpm.cluster.spec import Address
from hpm.errors import UsageError

__all__ = ['answers', 'check_free', 'free_ports', 'is_public', 'listen', 'local_ips', 'restrict']

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python has no name for it
_INSTRUCTION = struct.Struct('=HBBI')  # struct sock_filter: code, two jumps, a constant
_PORTS = range(10000, 32000)  # unprivileged, and below Linux's ports for outgoing connections


def local_ips(address: Address, owner: str) -> tuple[str, ...]:
  """The IP addresses to listen on for `address`; none means all of the machine's.

  A host's own name often stands for 127.0.1.1 in its own /etc/hosts and for its real address
  elsewhere; so a name that means loopback here, other than localhost, restricts nothing.

  Raises:
    UsageError: the host is unknown.
  """
  try:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
  except OSError as error:
    raise UsageError(
      f'{address} of {owner}: the host is not known here ({error.strerror})'
    ) from None
  ips = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
  loopback = all(ipaddress.ip_address(ip.partition('%')[0]).is_loopback for ip in ips)
  named = address.host not in (*ips, 'localhost')
  return () if loopback and named else ips


def is_public(address: Address) -> bool:
  """Whether the address can be reached from the internet, as far as it shows."""
  ips = local_ips(address, 'this process')
  return any(ipaddress.ip_address(ip.partition('%')[0]).is_global for ip in ips)


def check_free(address: Address, owner: str) -> None:
  """UsageError unless a server of this process can listen at `address`.

  Args:
    address: where.
    owner: the task whose it is, for the error.
  """
  for ip in (*local_ips(address, owner), '0.0.0.0', '::'):  # TensorFlow binds all interfaces
    try:
      _bound(ip, address.port).close()
    except OSError as error:
      if ip == '::' and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
        continue  # a machine without IPv6
      raise _refusal(error, address, owner) from None


def listen(address: Address, owner: str) -> list[socket.socket]:
  """Sockets that listen at `address` alone, one for each of its IP addresses.

  Raises:
    UsageError: the port is taken, or the address is none of this machine's.
  """
  sockets: list[socket.socket] = []
  try:
    for ip in local_ips(address, owner) or ('0.0.0.0',):
      sockets.append(_bound(ip, address.port))
      sockets[-1].listen(128)
      sockets[-1].setblocking(False)
  except OSError as error:
    for one in sockets:
      one.close()
    if sockets and error.errno == errno.EADDRNOTAVAIL:  # localhost without IPv6
      return listen(Address(sockets[0].getsockname()[0], address.port), owner)
    raise _refusal(error, address, owner) from None
  return sockets


def answers(address: Address, timeout_s: float = 1.0) -> bool:
  """Whether a connection to `address` is taken."""
  try:
    socket.create_connection(address, timeout_s).close()
  except OSError:
    return False
  return True


def free_ports(count: int) -> list[int]:
  """Ports that nobody listens on now, below those that outgoing connections are given.

  Raises:
    UsageError: there are not so many.
  """
  ports = random.SystemRandom().sample(_PORTS, len(_PORTS))
  found: list[int] = []
  for port in ports:
    try:
      _bound('0.0.0.0', port).close()
    except OSError:
      continue
    found.append(port)
    if len(found) == count:
      return found
  raise UsageError(f'there are no {count} free ports on this machine')


def restrict(address: Address, owner: str) -> bool:
  """Lets this process's servers on that port answer at `address` alone.

  Their listening sockets get a filter that drops every packet for another address, so who tries
  one finds no answer. Connections from before that, in the moment since the server's start, stay.

  Returns:
    Whether it was possible: False where the host restricts nothing (see `local_ips`), and where the
    kernel has no such filters.

  Raises:
    UsageError: the host is unknown.
    LookupError: this process doesn't listen on the port.
  """
  ips = local_ips(address, owner)
  sockets = _listening(address.port)
  if not sockets:
    raise LookupError(f'this process does not listen on port {address.port}')
  code = b''.join(_filter(ips))
  program = ctypes.create_string_buffer(code, len(code))
  option = struct.pack('@HP', len(code) // _INSTRUCTION.size, ctypes.addressof(program))
  try:
    for one in sockets if ips else ():
      one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
  except OSError:
    return False
  finally:
    for one in sockets:
      one.close()
  return bool(ips)


def _bound(ip: str, port: int) -> socket.socket:
  family = socket.AF_INET6 if ':' in ip else socket.AF_INET
  bound = socket.socket(family, socket.SOCK_STREAM)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a port rests for a minute
    if family == socket.AF_INET6:
      bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind(socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0][4])
    return bound
  except OSError:
    bound.close()
    raise


def _refusal(error: OSError, address: Address, owner: str) -> UsageError:
  reasons = {
    errno.EADDRINUSE: f'port {address.port} is in use on this machine: end the process that has it '
    '(ss -ltnp names it), or give another port to all tasks',
    errno.EADDRNOTAVAIL: f'{address.host} is no address of this machine: is this the right task, '
    'and the right host?',
    errno.EACCES: f'port {address.port} needs privileges: use one above 1023',
  }
  reason = reasons.get(error.errno or 0, error.strerror or str(error))
  return UsageError(f'{owner} can not listen at {address}: {reason}')


def _listening(port: int) -> list[socket.socket]:
  """This process's own listening sockets on that port, as duplicates."""
  found = []
  for name in os.listdir('/proc/self/fd') if os.path.isdir('/proc/self/fd') else ():
    try:
      if not os.readlink(f'/proc/self/fd/{name}').startswith('socket:'):
        continue
      one = socket.socket(fileno=os.dup(int(name)))
    except OSError:  # closed since
      continue
    inet = one.family in (socket.AF_INET, socket.AF_INET6)
    if (
      inet
      and one.type == socket.SOCK_STREAM
      and one.getsockname()[1] == port
      and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
      found.append(one)
    else:
      one.close()
  return found


def _filter(ips: Sequence[str]) -> Iterator[bytes]:
  """A classic BPF program that passes what is addressed to one of these IP addresses.

  Instructions and offsets: linux/bpf_common.h, linux/filter.h. A jump names how many instructions
  to skip if the comparison holds, and if not.
  """
  addresses = [ipaddress.ip_address(ip.partition('%')[0]) for ip in ips]
  v4 = [one.packed for one in addresses if one.version == 4]
  v6 = [one.packed for one in addresses if one.version == 6]
  load_word, load_byte, jump_equal, shift_right, give = 0x20, 0x30, 0x15, 0x74, 0x06
  network = -0x100000 & 0xFFFFFFFF  # SKF_NET_OFF: from the IP header on
  accept, drop = (_INSTRUCTION.pack(give, 0, 0, size) for size in (0x40000, 0))
  tests_v4 = b''.join(
    _INSTRUCTION.pack(jump_equal, 0, 1, int.from_bytes(one, 'big')) + accept for one in v4
  )
  yield _INSTRUCTION.pack(load_byte, 0, 0, network)
  yield _INSTRUCTION.pack(shift_right, 0, 0, 4)
  # IPv4: its destination stands at 16.
  yield _INSTRUCTION.pack(jump_equal, 0, len(tests_v4) // _INSTRUCTION.size + 2, 4)
  yield _INSTRUCTION.pack(load_word, 0, 0, network + 16)
  yield tests_v4
  yield drop
  # IPv6: four words from 24.
  for one in v6:
    for word in range(4):
      value = int.from_bytes(one[4 * word : 4 * word + 4], 'big')
      yield _INSTRUCTION.pack(load_word, 0, 0, network + 24 + 4 * word)
      yield _INSTRUCTION.pack(jump_equal, 0, 2 * (3 - word) + 1, value)
    yield accept
  yield drop
