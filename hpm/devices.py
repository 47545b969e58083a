"""Compute devices: which there are, and how many a run may use."""

import tensorflow as tf

from hpm.errors import UsageError, whole

__all__ = ['CPU', 'MOST_CPUS', 'cpu', 'gpu', 'select']

CPU = '/CPU:0'  # the host: counters, schedules and metrics live here
MOST_CPUS = 64  # logical ones: each has threads, and a copy of the variables in most modes


def select(kind: str, count: int | None = None) -> tuple[str, ...]:
  """Device strings of `count` compute devices of one kind ('cpu' or 'gpu').

  Without a count: all GPUs, or two logical CPU devices.

  Raises:
    UsageError: unknown kind, a count below one, more GPUs than there are, or logical CPU devices
      asked for after TensorFlow has started with fewer.
  """
  kinds = {'cpu': cpu, 'gpu': gpu}
  if kind not in kinds:
    raise UsageError(f'unknown device kind {kind!r}: use cpu or gpu')
  return kinds[kind](count)


def cpu(count: int | None = None) -> tuple[str, ...]:
  """`count` logical CPU devices (two by default), which share the machine's cores.

  They exist to run and to prove every mode without GPUs. TensorFlow fixes their number when it
  first runs an op, so this comes first in a program.

  Raises:
    UsageError: more than `MOST_CPUS`, or more than TensorFlow has started with.
  """
  count = _checked(count, 2)
  if count > MOST_CPUS:
    raise UsageError(
      f'{count} logical CPU devices wanted: at most {MOST_CPUS} share one machine; lower the number'
    )
  physical = tf.config.list_physical_devices('CPU')[0]
  configured = tf.config.get_logical_device_configuration(physical)
  if configured is None or len(configured) < count:
    try:
      tf.config.set_logical_device_configuration(
        physical, [tf.config.LogicalDeviceConfiguration()] * count
      )
    except RuntimeError as error:
      available = len(tf.config.list_logical_devices('CPU'))
      if available < count:
        raise UsageError(
          f'{count} logical CPU devices wanted, but TensorFlow has already started with '
          f'{available}: ask for the largest number first, before any other TensorFlow call'
        ) from error
  return tuple(f'/CPU:{i}' for i in range(count))


def gpu(count: int | None = None) -> tuple[str, ...]:
  """`count` GPUs (all of them by default); never a silent fall-back to the CPU.

  Raises:
    UsageError: more than TensorFlow sees.
  """
  available = len(tf.config.list_physical_devices('GPU'))
  count = _checked(count, available or 1)
  if count > available:
    raise UsageError(
      f'{count} GPU{"s" if count > 1 else ""} wanted, but TensorFlow sees {available}: '
      f'{"lower the number" if available else "install tensorflow[and-cuda] and a driver"}, '
      'or use CPU devices'
    )
  return tuple(f'/GPU:{i}' for i in range(count))


def _checked(count: int | None, default: int) -> int:
  if count is None:
    return default
  return whole('number of devices', count)
