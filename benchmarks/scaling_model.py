"""How long a step takes on many devices of many hosts. Pure arithmetic.

A step on n devices of each of h hosts takes

  compute    what one device needs alone, a share longer where it has others beside it (`crowding`:
             boards that share power and clock, cores that feed all of them)
  host       what the bytes that a manager moves between the devices of a host add
  network    what the bytes add that the busiest host sends or receives

Bytes come in two halves: gradients on their way to where they are summed, and what comes back from
there, values or sums. A gradient leaves as soon as backprop has it, behind those before it; what
has left before backprop ends costs nothing. When it is there is in the plan of the step
(`hpm.planning.GradientWait`). What comes back adds all its time, for the next step begins with it;
only the buckets of `collective_all_reduce` between hosts come back while backprop still runs.

Backprop is two thirds of computing: each layer's forward pass is one product of matrices, its two
gradients are two more of the same size.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

__all__ = ['BACKPROP', 'Load', 'Machine', 'Network', 'Step', 'one_device', 'step']

BACKPROP = 2 / 3  # of computing


@dataclasses.dataclass(frozen=True)
class Machine:
  """What a host is: three constants.

  Attributes:
    crowding: share that a step's computing takes longer on several devices than on one.
    host_rate: bytes a second between all devices of a host together.
    network_rate: bytes a second that a host sends, and at the same time receives.
  """

  crowding: float
  host_rate: float
  network_rate: float = float('inf')


@dataclasses.dataclass(frozen=True)
class Load:
  """What a model's step has to move.

  Attributes:
    gradient_bytes: of one device.
    ready: for each gradient, in the order in which backprop has them: the share of backprop before
      it, and its bytes.
    host_bytes: between the devices of one host, both halves.
  """

  gradient_bytes: float
  ready: Sequence[tuple[float, float]]
  host_bytes: float


@dataclasses.dataclass(frozen=True)
class Network:
  """What crosses between hosts.

  Attributes:
    push: bytes that the busiest host sends or receives, whichever is more, of gradients.
    back: the same of what comes back.
    overlaps: whether that comes back bucket by bucket, as gradients leave.
  """

  push: float = 0.0
  back: float = 0.0
  overlaps: bool = False

  @classmethod
  def of_servers(
    cls, size: float, hosts: int, num_ps: int, largest: float = 0.0, apart: bool = False
  ) -> 'Network':
    """Of parameter servers.

    Args:
      size: bytes of all variables.
      hosts: workers, one on each host.
      num_ps: servers, which share the variables by bytes.
      largest: bytes of the largest variable, which stays whole.
      apart: whether they have hosts of their own; otherwise they are on the first of the workers'.
    """
    share = max(size / num_ps, largest)
    if apart:
      most = max(size, hosts * share)
    else:
      own = share if num_ps >= hosts else 0.0  # which stays on its host
      most = max((hosts - 1) * share, size - own) if hosts > 1 else 0.0
    return cls(most, most)

  @classmethod
  def of_ring(cls, size: float, hosts: int) -> 'Network':
    """Of a ring of hosts: reduced in parts that are scattered, and gathered (Patarasuk & Yuan)."""
    half = (hosts - 1) / hosts * size
    return cls(half, half, overlaps=True)


@dataclasses.dataclass(frozen=True)
class Step:
  """Seconds of a step: its parts add up to `total`."""

  compute: float
  host: float
  network: float

  @property
  def total(self) -> float:
    return self.compute + self.host + self.network


def step(
  one_device_s: float,
  load: Load,
  machine: Machine,
  devices: int,
  network: Network | None = None,
  backprop: float = BACKPROP,
) -> Step:
  """A step on so many devices of each host.

  Args:
    one_device_s: a step on one device alone.
    load: of the model, manager and devices.
    machine: what the hosts are.
    devices: of each host.
    network: of several hosts; None: one host, or nothing crosses.
    backprop: share of computing.
  """
  compute = one_device_s * (1 + machine.crowding * (devices > 1))
  half = load.host_bytes / 2 / machine.host_rate
  host = exposed(load.ready, half, backprop * compute) + half
  if network is None:
    return Step(compute, host, 0.0)
  push, back = network.push / machine.network_rate, network.back / machine.network_rate
  if network.overlaps:
    push, back = push + back, 0.0
  return Step(compute, host, exposed(load.ready, push, backprop * compute) + back)


def one_device(
  measured_s: float, load: Load, machine: Machine, devices: int, backprop: float = BACKPROP
) -> float:
  """What a step on one device takes, if one on so many of a host takes `measured_s`."""
  found = measured_s
  for _ in range(50):  # what is exposed hardly depends on it
    found *= measured_s / step(found, load, machine, devices, backprop=backprop).total
  return found


def exposed(ready: Sequence[tuple[float, float]], seconds: float, backprop_s: float) -> float:
  """What of a transfer is left when backprop ends: gradients queue up as they come to be.

  Args:
    ready: as of `Load`.
    seconds: that all of them take.
    backprop_s: seconds of backprop.
  """
  shares, sizes = np.array(sorted(ready)).T
  behind = np.cumsum(sizes[::-1])[::-1] / sizes.sum()  # this one's bytes, and all after it
  return max(0.0, float(np.max(shares * backprop_s + behind * seconds)) - backprop_s)
