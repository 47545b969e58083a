"""Who takes part in a training over several processes, and which of them this one is."""

from collections.abc import Sequence
import dataclasses
import ipaddress
import re
from typing import NamedTuple

from hpm import errors
from hpm.errors import UsageError

__all__ = ['JOBS', 'Address', 'Cluster', 'parse_address', 'parse_hosts']

JOBS = ('worker', 'ps')
# Between the chief's port and that of its heartbeat, unless a task there has that port.
_HEARTBEAT_OFFSET = 1000
_DIGITS = 18  # of a host's number
_MOST_HOSTS = 10_000  # of a list; more is a slip of the pen, and takes all memory to write out


class Address(NamedTuple):
  """Where a task listens.

  Attributes:
    host: a name or an IP address, without the brackets of IPv6.
    port: 1 to 65535.
  """

  host: str
  port: int

  def __str__(self) -> str:
    return f'[{self.host}]:{self.port}' if ':' in self.host else f'{self.host}:{self.port}'


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The tasks of one training, as each of its processes knows them.

  Attributes:
    job_name: this process's: 'worker' or 'ps'.
    task_index: this process's, in the hosts of its job.
    worker_hosts: 'host:port' of TensorFlow's server in each worker; the first is the chief.
    ps_hosts: the same of each parameter server.
    heartbeat_port: where the chief listens for the heartbeats of all others; 0 for the port that
      `heartbeat_address` derives.

  Raises:
    UsageError: an address without a port or twice, an unknown job, an index out of range.
  """

  job_name: str
  task_index: int
  worker_hosts: tuple[str, ...]
  ps_hosts: tuple[str, ...] = ()
  heartbeat_port: int = 0

  def __post_init__(self) -> None:
    if self.job_name not in JOBS:
      raise errors.unknown('job', self.job_name, JOBS)
    if not self.worker_hosts:
      raise UsageError('a cluster needs at least one worker: name the host:port of each')
    seen: dict[Address, str] = {}
    for task in self.tasks:
      address = parse_address(self.address_of(task), task)
      if address in seen:
        raise UsageError(
          f'{address} is the address of both {seen[address]} and {task}: '
          'each task needs a port of its own'
        )
      seen[address] = task
    hosts = self.hosts_of(self.job_name)
    if not 0 <= self.task_index < len(hosts):
      known = f'0 to {len(hosts) - 1}' if hosts else 'none'
      raise UsageError(
        f'there is no task {self.task_index} of job {self.job_name!r}: of {len(hosts)} hosts '
        f'({", ".join(hosts)}) the index is {known}'
        if hosts
        else f'there is no {self.task}: no host of job {self.job_name!r} is given'
      )
    if not 0 <= self.heartbeat_port <= 65535:
      raise UsageError(f'heartbeat port {self.heartbeat_port}: must lie in 1 .. 65535')
    if self.heartbeat_address in seen:
      raise UsageError(
        f'heartbeat port {self.heartbeat_port} is that of {seen[self.heartbeat_address]} on '
        f'{self.heartbeat_address.host}: the heartbeat needs a port of its own'
      )

  @property
  def num_workers(self) -> int:
    """How many workers there are."""
    return len(self.worker_hosts)

  @property
  def num_ps(self) -> int:
    """How many parameter servers there are."""
    return len(self.ps_hosts)

  @property
  def is_chief(self) -> bool:
    """Whether this process is worker 0: it initialises, saves, evaluates, and is the hub."""
    return self.job_name == 'worker' and self.task_index == 0

  @property
  def task(self) -> str:
    """This process, as in 'worker:1'."""
    return f'{self.job_name}:{self.task_index}'

  @property
  def address(self) -> str:
    """'host:port' of this process's server."""
    return self.hosts_of(self.job_name)[self.task_index]

  @property
  def tasks(self) -> tuple[str, ...]:
    """All tasks: the workers, then the parameter servers."""
    return tuple(f'{job}:{i}' for job in JOBS for i in range(len(self.hosts_of(job))))

  @property
  def heartbeat_address(self) -> Address:
    """Where the chief listens for heartbeats: on its host, by default 1000 above its own port."""
    host, port = parse_address(self.worker_hosts[0], 'worker:0')
    if self.heartbeat_port:
      return Address(host, self.heartbeat_port)
    addresses = {parse_address(self.address_of(task), task) for task in self.tasks}
    step = _HEARTBEAT_OFFSET if port + 2 * _HEARTBEAT_OFFSET <= 65535 else -_HEARTBEAT_OFFSET
    derived = Address(host, port + step)
    while derived in addresses:
      derived = Address(host, derived.port + 1)
    return derived

  def hosts_of(self, job: str) -> tuple[str, ...]:
    """The addresses of a job's tasks, by index."""
    return self.worker_hosts if job == 'worker' else self.ps_hosts

  def address_of(self, task: str) -> str:
    """'host:port' of a task such as 'ps:0'."""
    job, _, index = task.partition(':')
    return self.hosts_of(job)[int(index)]

  def as_dict(self) -> dict[str, list[str]]:
    """Job -> addresses, as `tf.train.ClusterSpec` takes it; without jobs that have no task."""
    return {job: list(self.hosts_of(job)) for job in JOBS if self.hosts_of(job)}

  def require_ps(self, mode: str) -> None:
    """UsageError unless there is a parameter server, which `mode` keeps its variables on."""
    if not self.ps_hosts:
      raise UsageError(
        f'{mode} keeps its variables on parameter servers, and none is given: name the host:port '
        'of at least one'
      )

  def refuse_ps(self, mode: str) -> None:
    """UsageError if there are parameter servers, which `mode` has no use for."""
    if self.ps_hosts:
      raise UsageError(
        f'{mode} has no use for parameter servers, but {", ".join(self.ps_hosts)} are given: '
        'leave them out'
      )


def parse_address(text: str, owner: str) -> Address:
  """The address that 'host:port' or '[ipv6]:port' stands for.

  Args:
    text: the address.
    owner: whose it is, for the error.

  Raises:
    UsageError: it has no port, or no host.
  """
  match = re.fullmatch(r'(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,9})', text)
  if not match:
    raise UsageError(
      f'{text!r} of {owner} is no address: host:port is needed, such as 10.0.0.1:2222'
      if '://' not in text
      else f'{text!r} of {owner}: host:port is needed, without {text.partition("://")[0]}://'
    )
  port = int(match[3])
  if not 1 <= port <= 65535:
    raise UsageError(f'{text!r} of {owner}: a port lies in 1 .. 65535')
  if match[1]:
    try:
      ipaddress.IPv6Address(match[1])
    except ValueError:
      raise UsageError(f'{text!r} of {owner}: [{match[1]}] is no IPv6 address') from None
  return Address(match[1] or match[2], port)


def parse_hosts(text: str) -> tuple[str, ...]:
  """The addresses in a list such as 'a:2222,b:2222'; ranges as in 'node[1-3]:2222' are expanded.

  Numbers keep their width: 'node[08-10]:2222' is node08, node09 and node10. IPv6 addresses are
  written '[::1]:2222'.

  Raises:
    UsageError: a range that can't be read or is longer than any cluster, or an entry that is empty.
  """
  parts = _split(text) if text else []
  if not all(parts):
    raise UsageError(f'{text!r}: an entry between the commas is empty: drop the comma, or name it')
  hosts = tuple(host for part in parts for host in _expanded(part))
  if len(hosts) > _MOST_HOSTS:
    raise UsageError(f'{text!r} names {len(hosts)} hosts: at most {_MOST_HOSTS}')
  return hosts


def _split(text: str) -> Sequence[str]:
  """At the commas outside brackets."""
  return [part.strip() for part in re.split(r',(?![^\[]*\])', text)]


def _expanded(text: str) -> list[str]:
  match = re.search(r'\[([0-9,-]+)\]', text)  # no colon: IPv6 stays as it is
  if not match:
    return [text]
  names = []
  for part in match[1].split(','):
    first, dash, last = part.partition('-')
    if (
      not first
      or (dash and not last)
      or max(len(first), len(last)) > _DIGITS
      or (dash and int(first) > int(last))
    ):
      raise UsageError(f'{text!r}: [{match[1]}] is no range: such as [0-3] or [1,4-6] is needed')
    numbers = range(int(first), int(last or first) + 1)
    if numbers.stop - numbers.start > _MOST_HOSTS:
      raise UsageError(f'{text!r}: [{part}] is too long: at most {_MOST_HOSTS} hosts')
    names += [str(number).zfill(len(first)) for number in numbers]
  before, rests = text[: match.start()], _expanded(text[match.end() :])
  if len(names) * len(rests) > _MOST_HOSTS:
    raise UsageError(f'{text!r}: {len(names) * len(rests)} hosts: at most {_MOST_HOSTS}')
  return [before + name + rest for name in names for rest in rests]
