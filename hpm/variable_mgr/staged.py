"""Staged variables: what towers compute with is on their devices before the step begins."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from hpm.devices import CPU
from hpm.variable_mgr.base import Copy

__all__ = ['StagedVariables']

_PREFIX = 'carry/variables/'


class StagedVariables:
  """One copy of the parameters a device: the staging area between a fetch and its use.

  A step's towers compute with what the step before has put here, while the step fetches the current
  values for the next one. The fetch waits for no tower. In a checkpoint the values in flight are
  `carry/variables/<name>`, the same for all devices; where they are missing, towers start with the
  current parameters.

  Args:
    devices: one device string a tower.
  """

  def __init__(self, devices: Sequence[str]):
    self._devices = tuple(devices)
    self._copies: list[Copy] = []

  def create(self, params: Mapping[str, tf.Tensor]) -> None:
    self._copies = [
      Copy(params, {}, dict.fromkeys(params, device), scope=f'staged_{i}/')
      for i, device in enumerate(self._devices)
    ]

  def of(self, tower: int) -> dict[str, tf.Variable]:
    """Parameter name -> variable on the tower's device."""
    return self._copies[tower].params

  def store(
    self, fetched: Sequence[Mapping[str, tf.Tensor]], barriers: Mapping[str, tf.Operation]
  ) -> list[tf.Operation]:
    """Puts the next step's values in place of this step's.

    Args:
      fetched: name -> value, for each tower on its device.
      barriers: device -> the op that runs when this step's values have been read there.
    """
    operations = []
    for device, copy, values in zip(self._devices, self._copies, fetched, strict=True):
      with tf.device(device), tf.control_dependencies([barriers[device]]):
        operations += [
          tf.raw_ops.AssignVariableOp(resource=variable.handle, value=values[name])
          for name, variable in copy.params.items()
        ]
    return operations

  def named_variables(self) -> dict[str, tf.Variable]:
    params = self._copies[0].params if self._copies else {}
    return {_PREFIX + name: variable for name, variable in params.items()}

  def restore(self, values: Mapping[str, tf.Tensor]) -> list[tf.Operation]:
    operations = []
    for device, copy in zip(self._devices, self._copies):
      for name, variable in copy.params.items():
        with tf.device(CPU):
          value = tf.identity(values.get(_PREFIX + name, values[f'params/{name}']))
        with tf.device(device):
          operations.append(tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value))
    return operations

  @property
  def variables(self) -> list[tf.Variable]:
    return [variable for copy in self._copies for variable in copy.params.values()]
