"""TensorFlow's collective ops: a ring over CPU devices, NCCL over GPUs."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any
import weakref

import tensorflow as tf

from hpm.devices import CPU
from hpm.errors import UsageError
from hpm.variable_mgr.allreduce import Lists

__all__ = ['Collective', 'CrossReplica', 'Group', 'nccl', 'next_key', 'tokens_of']

_group_keys = itertools.count(1 << 20)  # tf.distribute counts its own from 1, in each strategy
_instance_keys = itertools.count(1)

# Graph -> device -> name of its last collective: devices issue theirs in one order, whichever
# all-reduce they belong to. Names, since an op would keep its graph alive.
_last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Group:
  """Devices that reduce together, of one process or one of each of several.

  Several processes name the same group by the same key: they make their groups in the same order.

  The ops of a device are chained by control edges and (for a `tf.function`, which would otherwise
  chain them over all devices and deadlock) by an ordering token, one variable a device.
  """

  def __init__(self, size: int, hint: str = 'auto', timeout_s: float = 0.0):
    self._size = size
    self._key = next(_group_keys)
    self._hint = hint
    self._timeout_s = timeout_s

  def reduce(self, value: tf.Tensor, key: int, token: Any, device: str) -> tf.Tensor:
    """The sum of the values that all devices give under this key; on the current device.

    Args:
      value: this device's.
      key: of the instance; from `next_key`, the same on all devices.
      token: handle of the device's ordering token.
      device: the name under which its collectives are chained.
    """
    if tf.executing_eagerly():
      raise UsageError(
        'a collective waits for all devices, and in eager mode one comes after the other: '
        "debug with all_reduce_spec='copy', or batch_norm_statistics='mean'"
      )
    graph = tf.compat.v1.get_default_graph()
    last = _last.setdefault(graph, {})
    before = [graph.get_operation_by_name(last[device])] if device in last else []
    with tf.control_dependencies(before):
      reduced = tf.raw_ops.CollectiveReduceV2(
        input=value,
        group_size=tf.constant(self._size),
        group_key=tf.constant(self._key),
        instance_key=tf.constant(key),
        ordering_token=[token],
        merge_op='Add',
        final_op='Id',
        communication_hint=self._hint,
        timeout_seconds=self._timeout_s,
      )
    last[device] = reduced.op.name
    return reduced


def next_key() -> int:
  """A key for one more collective: the same in all processes that build the same graphs."""
  return next(_instance_keys)


def tokens_of(devices: Sequence[str]) -> list[tf.Variable]:
  """An ordering token a device, for its collectives in a `tf.function`."""
  tokens = []
  with tf.init_scope():  # out of the function that is being traced
    for device in devices:
      with tf.device(CPU):
        value = tf.zeros([])
      with tf.device(device):
        tokens.append(tf.Variable(value, name='collective_token'))
  return tokens


class Collective:
  """TensorFlow's collective op as an all-reduce.

  The sum is formed inside the op, in the dtype of the tensors: in half precision under
  `HalfTransfer`.

  Args:
    devices: device strings, as many as lists.
    hint: TensorFlow's communication hint, 'auto', 'ring' or 'nccl'.
    timeout_s: after so many seconds without a peer the step fails; 0 waits for ever. TensorFlow
      lets two threads sleep for so long for each single collective, so it is for looking into a
      hang, on few steps: in ordinary training a process would soon run out of threads. An error
      anywhere in a step ends its collectives without it.
  """

  buckets = 8  # each op costs a meeting of all devices

  def __init__(self, devices: Sequence[str], hint: str = 'auto', timeout_s: float = 0.0):
    self._devices = tuple(devices)
    self._group = Group(len(self._devices), hint, timeout_s)
    self.variables: list[tf.Variable] = []

  def __call__(self, tensors: Lists) -> list[list[tf.Tensor]]:
    if len(self._devices) == 1:
      return [list(values) for values in tensors]
    if not self.variables:
      self.variables = tokens_of(self._devices)
    keys = [next_key() for _ in tensors[0]]
    sums = []
    for device, token, values in zip(self._devices, self.variables, tensors, strict=True):
      with tf.device(device):
        sums.append(
          [
            self._group.reduce(value, key, token.handle, device)
            for key, value in zip(keys, values, strict=True)
          ]
        )
    return sums


def nccl(devices: Sequence[str], **options: Any) -> Collective:
  """`Collective` held to NCCL; refused where a device is no GPU: nothing else would be NCCL.

  Raises:
    UsageError: a device is no GPU.
  """
  if not all('GPU' in device.upper() for device in devices):
    raise UsageError(
      f"all-reduce 'nccl' needs GPUs, but the devices are {', '.join(devices)}: "
      "use 'copy' or 'collective' on CPU devices"
    )
  return Collective(devices, hint='nccl', **options)


class CrossReplica:
  """Sums inside the towers, with a gradient: what synchronised batch norm is given.

  The tower is one function for all devices, so keys are constants of its trace, and the token of
  the device that it is called on is an argument. Towers of different batch sizes are traced apart;
  they meet because keys count from the start of each trace. The gradient of a sum over all
  replicas is the sum of what all replicas send back: a collective as well.

  Args:
    devices: of the towers.
    timeout_s: as for `Collective`.
  """

  def __init__(self, devices: Sequence[str], timeout_s: float = 0.0):
    self._devices = tuple(devices)
    self._group = Group(len(self._devices), 'auto', timeout_s)
    self.variables: list[tf.Variable] = []

  def token(self, tower: int) -> tf.Variable:
    """The ordering token of a tower's device, for `function` inside that tower."""
    if not self.variables:
      self.variables = tokens_of(self._devices)
    return self.variables[tower]

  def used_in(self, device: str, call: tf.Operation) -> None:
    """The device's next collective in the current graph waits for this call of a tower.

    Where the towers' collectives and those of the gradients could run side by side, devices might
    issue them in different orders.
    """
    _last.setdefault(tf.compat.v1.get_default_graph(), {})[device] = call.name

  def function(
    self, token: Any, weight: tf.Tensor | None = None
  ) -> Callable[[tf.Tensor], tf.Tensor]:
    """tensor -> its sum over all towers, for use while a tower is traced.

    Args:
      token: that of `token`, as it arrived in the tower.
      weight: float32 scalar that this tower's values and their gradients are multiplied with: 0
        where it has no samples.
    """
    keys = itertools.count(1)

    def weighted(value: tf.Tensor) -> tf.Tensor:
      return value if weight is None else value * weight

    def reduced(value: tf.Tensor) -> tf.Tensor:
      if len(self._devices) == 1:
        return tf.identity(value)
      return self._group.reduce(value, next(keys), token.handle, '')

    @tf.custom_gradient
    def cross_replica(value: tf.Tensor) -> Any:
      return reduced(weighted(value)), lambda dy: weighted(reduced(dy))

    return cross_replica
