"""Refuses a training that this machine's memory can't hold, where the kernel would kill it unheard.

Of CPU devices alone: a GPU's allocator says itself that it has no more. What a step needs is read
from its graph by `hpm.plan`, which takes seconds; so it is asked only where a rough bound leaves
doubt. Both count tensors alone, so what they refuse is certain not to fit.
"""

from __future__ import annotations  # hpm.models.Model in a signature would import TensorFlow

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hpm
from hpm.errors import UsageError

__all__ = ['available_bytes', 'check', 'least_bytes']

# Bytes of activations for each of an image's, more than any model here needs (densenet121 820).
_MOST_ACTIVATIONS = 2000
_CGROUPS = (
  ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory.current', '/sys/fs/cgroup/memory.stat'),
  (
    '/sys/fs/cgroup/memory/memory.limit_in_bytes',
    '/sys/fs/cgroup/memory/memory.usage_in_bytes',
    '/sys/fs/cgroup/memory/memory.stat',
  ),
)


def available_bytes() -> int | None:
  """What can still be taken without swapping, by the machine and by this process's container.

  None where the system doesn't say (not Linux).
  """
  found = []
  try:
    for line in Path('/proc/meminfo').read_text().splitlines():
      if line.startswith('MemAvailable:'):
        found.append(int(line.split()[1]) * 1024)
  except OSError:
    pass
  for limit, usage, stat in _CGROUPS:
    try:
      numbers = dict(line.split() for line in Path(stat).read_text().splitlines())
      cached = int(numbers.get('inactive_file', 0))  # given back when it is needed
      found.append(int(Path(limit).read_text()) - int(Path(usage).read_text()) + cached)
    except (OSError, ValueError):  # no such group, or no limit ('max')
      continue
  return min(found, default=None)


def least_bytes(num_params: int, image_size: int, images: int, copies: int) -> int:
  """A bound from below: float32 parameters and gradients, and the images as bytes and float32."""
  return copies * num_params * 8 + images * image_size**2 * 3 * 5


def check(options: Any, model: hpm.models.Model, devices: Sequence[str]) -> None:
  """Refuses what can't fit into host memory; before anything is built.

  Args:
    options: complete.
    model: of theirs.
    devices: strings.

  Raises:
    UsageError: with what is needed, what there is, and what to lower.
  """
  available = available_bytes()
  if available is None or any('CPU' not in device for device in devices):
    return
  images = len(devices) * options.batch_size
  copies = 1 if options.variable_update == 'parameter_server' else len(devices)
  needed = least_bytes(model.num_params, model.image_size, images, copies)
  at_most = needed * 4 + images * model.image_size**2 * 3 * _MOST_ACTIVATIONS
  if needed <= available < at_most:
    if options.forward_only or options.eval:
      needed = max(needed, len(devices) * _forward(model, options.batch_size))
    else:
      needed = max(needed, _training(options, model, devices))
  if needed > available:
    raise UsageError(
      f'--batch_size={options.batch_size} on {len(devices)} CPU devices needs '
      f'{needed / 2**30:.1f} GiB of memory at least for {options.model}, and '
      f'{available / 2**30:.1f} GiB are free: lower --batch_size, --image_size, --num_classes or '
      '--num_gpus (--dry_run shows what takes it)'
    )


def _training(options: Any, model: hpm.models.Model, devices: Sequence[str]) -> int:
  """Bytes of all devices in a training step."""
  import tensorflow as tf

  from benchmarks import plan

  with tf.Graph().as_default():
    return sum(device.total_bytes for device in plan.planned(options, devices, model)[1].devices)


def _forward(model: hpm.models.Model, batch_size: int) -> int:
  """Bytes of a forward pass at its fullest, on one device."""
  import tensorflow as tf

  from hpm import planning
  from hpm.pipelines import normalize

  specs = [
    {
      name: tf.TensorSpec(spec.shape, getattr(spec, 'dtype', tf.float32))
      for name, spec in specs.items()
    }
    for specs in (model.param_specs, model.state_specs)
  ]

  @tf.function(autograph=False)
  def tower(params, state, images):
    images = normalize(images, model.dtype, model.data_format)
    return model.apply(params, state, images, training=False)[0]

  with tf.Graph().as_default():
    images = tf.TensorSpec([batch_size, *model.image_shape], tf.uint8)
    return sum(planning.peak(tower.get_concrete_function(*specs, images).graph))
