"""Canonical checkpoints: saved in any mode, on any number of devices, restored in any other.

A checkpoint is a directory `ckpt-<step>` that appears whole or not at all:

  values.index, values.data-...   TensorFlow's own format, readable by `tf.train.load_checkpoint`
  meta.json                       the model, the mode and the number of devices that wrote it, and
                                  where the input pipeline stood

Names of the values: `step` and `samples` (int64; samples of finished steps), `params/<name>`,
`state/<name>`, `slots/<slot>/<name>`; with a dynamic loss scale `loss_scale` and `finite_steps`;
from `independent` also `replica/<i>/...`, from staged variables and relaxed consistency the values
in flight, `carry/...`. Other modes drop both, and say so.
"""

from collections.abc import Iterable, Mapping
import json
import os
import re
import shutil
import tempfile
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import json_file
from hpm.errors import DataError, UsageError, whole
from hpm.step import TrainStep

__all__ = [
  'Damaged',
  'Writer',
  'facts',
  'last_finite',
  'latest',
  'names',
  'paths',
  'read',
  'restore',
  'save',
  'set_aside',
  'write',
]

SCHEMA_VERSION = 1
_PREFIX = 'values'
_META = 'meta.json'
_SCRATCH = '.writing-'
_ABANDONED_S = 3600.0  # a scratch directory of this age is what a killed process left
_LOSS_SCALE = ('loss_scale', 'finite_steps')
_OPTIONAL = ('replica/', 'carry/')
# Values in flight -> what takes their place where a checkpoint has none.
_CARRIED = {
  'carry/variables/': 'the first step computes with the current variables',
  'carry/gradients/': 'the first step applies gradients of zero',
}


class Damaged(DataError):
  """A checkpoint can't be read; `reason` says why."""

  def __init__(self, path: str, reason: str):
    super().__init__(
      f'{path} is no readable checkpoint ({reason}): choose another, or remove it to go on from '
      'the one before'
    )
    self.reason = reason


def save(
  directory: str,
  train_step: TrainStep,
  pipeline_state: Mapping[str, int] | None = None,
  facts: Mapping[str, float] | None = None,
) -> str:
  """Writes the step's snapshot into `directory` and returns the checkpoint's path (eager mode).

  Args:
    directory: is made if it isn't there.
    train_step: what to save.
    pipeline_state: from `hpm.pipelines.Pipeline.state`; kept as a fact, see `facts`.
    facts: of the training, such as its accuracy; kept as the fact 'training'.
  """
  return write(directory, train_step.snapshot(), _meta(train_step, pipeline_state, facts))


class Writer:
  """Writes checkpoints in a thread of its own, while training goes on (eager mode).

  The values are taken in `save`, so they are of one step; what is slow, the disk, comes after it.

  Args:
    directory: is made if it isn't there.
    keep: the newest so many checkpoints stay; None keeps all.
  """

  def __init__(self, directory: str, keep: int | None = None):
    if keep is not None:
      whole('keep', keep)
    self._directory = directory
    self._keep = keep
    self._thread: threading.Thread | None = None
    self._failure: Exception | None = None

  def save(
    self,
    train_step: TrainStep,
    pipeline_state: Mapping[str, int] | None = None,
    facts: Mapping[str, float] | None = None,
  ) -> str:
    """Starts to write the step's snapshot, as `save`; waits for the one before.

    Returns:
      The path that the checkpoint will have.

    Raises:
      OSError: the one before could not be written.
    """
    self.wait()
    with tf.device('/CPU:0'):  # what lies on a GPU is copied now, and takes no memory there
      values = {name: tf.identity(value) for name, value in train_step.snapshot().items()}
    meta = _meta(train_step, pipeline_state, facts)
    self._thread = threading.Thread(target=self._write, args=(values, meta), name='checkpoint')
    self._thread.start()
    return _path(self._directory, values)

  def wait(self) -> None:
    """Returns when nothing is being written any more.

    Raises:
      OSError: it could not be written.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    failure, self._failure = self._failure, None
    if failure is not None:
      reason = str(failure).splitlines()[0]
      raise OSError(f'no checkpoint could be written to {self._directory}: {reason}') from failure

  def _write(self, values: Mapping[str, tf.Tensor], meta: Mapping[str, Any]) -> None:
    try:
      write(self._directory, values, meta)
      _prune(self._directory, self._keep)
    except (OSError, tf.errors.OpError) as error:
      self._failure = error


def restore(path: str, train_step: TrainStep) -> list[str]:
  """Restores a step from a checkpoint of any mode (eager mode).

  Returns:
    Notices: a sentence for whatever the checkpoint holds and this mode drops, or lacks.

  Raises:
    UsageError: the checkpoint is another model's, or its shapes or slots do not fit.
    Damaged: it can't be read.
  """
  values, meta = read(path)
  if meta.get('model') != train_step.model.name:
    raise UsageError(
      f'{path} holds the model {meta.get("model")}, not {train_step.model.name}: '
      'choose that model, or another directory'
    )
  named = train_step.named_variables()
  fitting, notices = _match({n: v.shape for n, v in named.items()}, values, path)
  train_step.restore({name: tf.constant(value) for name, value in fitting.items()})
  return notices


def paths(directory: str) -> list[str]:
  """The checkpoints of `directory`, by step, the newest last."""
  if not os.path.isdir(directory):
    return []
  found = (re.fullmatch(r'ckpt-(\d+)', name) for name in os.listdir(directory))
  return [os.path.join(directory, f'ckpt-{n}') for n in sorted(int(m[1]) for m in found if m)]


def latest(directory: str) -> str | None:
  """The checkpoint of the highest step in `directory`; None if there is none."""
  found = paths(directory)
  return found[-1] if found else None


def set_aside(path: str) -> str:
  """Renames a checkpoint that can't be read, so that it is none any more; its new path."""
  aside = f'{path}.damaged'
  if os.path.exists(aside):  # of the same step, earlier
    shutil.rmtree(aside)
  os.rename(path, aside)
  return aside


def last_finite(directory: str) -> str | None:
  """The newest checkpoint whose values are all finite; None if there is none."""
  for path in reversed(paths(directory)):
    try:
      values, _ = read(path)
    except Damaged:
      continue
    if all(np.all(np.isfinite(value)) for value in values.values()):
      return path
  return None


def names(path: str) -> set[str]:
  """The names of a checkpoint's values.

  Raises:
    Damaged: there is none, or it can't be read.
  """
  try:
    return set(tf.train.load_checkpoint(os.path.join(path, _PREFIX)).get_variable_to_shape_map())
  except (OSError, ValueError, tf.errors.OpError) as error:
    raise _unreadable(path, error) from error


def write(directory: str, values: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
  """Writes values (arrays or tensors, `step` among them) and JSON facts as one checkpoint."""
  path = _path(directory, values)
  os.makedirs(directory, exist_ok=True)
  # Written beside its place and renamed: whoever lists the directory sees whole checkpoints only.
  with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
    whole = os.path.join(scratch, 'whole')
    os.mkdir(whole)
    names = sorted(values)
    with tf.device('/CPU:0'):
      tf.raw_ops.SaveV2(
        prefix=os.path.join(whole, _PREFIX),
        tensor_names=names,
        shape_and_slices=[''] * len(names),
        tensors=[tf.identity(values[name]) for name in names],
      )
    with open(os.path.join(whole, _META), 'w') as file:
      json.dump({'schema_version': SCHEMA_VERSION, **meta}, file, indent=2)
    for name in os.listdir(whole):
      _sync(os.path.join(whole, name))
    if os.path.exists(path):  # the same step once more: the newer one holds
      os.rename(path, os.path.join(scratch, 'replaced'))
    os.rename(whole, path)
  _sync(directory)
  return path


def read(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """The values and the facts of a checkpoint.

  Raises:
    Damaged: there is no checkpoint, or it can't be read.
    DataError: it is of a newer schema.
  """
  meta = facts(path)
  try:
    reader = tf.train.load_checkpoint(os.path.join(path, _PREFIX))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
  except (OSError, ValueError, IndexError, RuntimeError, tf.errors.OpError) as error:
    raise _unreadable(path, error) from error
  return values, meta


def facts(path: str) -> dict[str, Any]:
  """What stands beside the values: 'model', 'variable_update', 'num_devices', and more.

  'pipeline' is the state that `save` was given, if it was. Of a training over several processes it
  is the chief's, and 'consumed' says how many samples each worker has taken. 'training'
  are the facts that it was given.

  Raises:
    Damaged: there is no checkpoint, or it can't be read.
    DataError: it is of a newer schema.
  """
  try:
    meta = json_file.read(os.path.join(path, _META))
    if not isinstance(meta, dict):
      raise ValueError(f'{_META} holds no object')
  except (OSError, ValueError) as error:
    raise _unreadable(path, error) from error
  if meta.get('schema_version') != SCHEMA_VERSION:
    raise DataError(
      f'{path} has checkpoint schema {meta.get("schema_version")}, this hpm reads '
      f'{SCHEMA_VERSION}: use the version that wrote it'
    )
  return meta


def _match(
  shapes: Mapping[str, tf.TensorShape], values: Mapping[str, np.ndarray], path: str
) -> tuple[dict[str, np.ndarray], list[str]]:
  """The values that fit, and notices for what is dropped or lacks."""
  lacking = [name for name in shapes if name not in values]
  required = [n for n in lacking if not n.startswith(_OPTIONAL) and n not in _LOSS_SCALE]
  if required:
    raise UsageError(
      f'{path} lacks {_listed(required)}: it was written with another model or optimizer'
    )
  fitting = {name: values[name] for name in shapes if name in values}
  for name, value in fitting.items():
    if shapes[name] != value.shape:
      raise UsageError(
        f'{path}: {name} has shape {list(value.shape)}, this model needs {list(shapes[name])}: '
        'use the options (number of classes, image size) that wrote it'
      )
  notices = []
  if 'loss_scale' in lacking:
    notices.append('no loss scale in the checkpoint: it starts anew')
  for carried, start in _CARRIED.items():
    if any(name.startswith(carried) for name in lacking):
      notices.append(f'no {carried}... in the checkpoint: {start}')
  replicas = [name for name in lacking if name.startswith('replica/')]
  if replicas:
    notices.append(f'{_replicas(replicas)} not in the checkpoint: started from replica 0')
  dropped = [name for name in values if name not in shapes]
  for carried in _CARRIED:
    if any(name.startswith(carried) for name in dropped):
      notices.append(
        f'{carried}... of the checkpoint dropped: this mode has no such values in flight'
      )
  replicas = [name for name in dropped if name.startswith('replica/')]
  if replicas:
    notices.append(f'{_replicas(replicas)} of the checkpoint dropped: replica 0 goes on')
  others = [name for name in dropped if not name.startswith(_OPTIONAL)]
  if others:
    notices.append(f'{_listed(others)} of the checkpoint dropped: nothing here uses it')
  return fitting, notices


def _replicas(names: Iterable[str]) -> str:
  indices = sorted({int(name.split('/')[1]) for name in names})
  return f'replica {", ".join(map(str, indices))}'


def _listed(names: Iterable[str]) -> str:
  groups = sorted({'/'.join(name.split('/')[:2]) for name in names})
  return ', '.join(groups[:3]) + (f' and {len(groups) - 3} more' if len(groups) > 3 else '')


def _meta(
  train_step: TrainStep,
  pipeline_state: Mapping[str, int] | None,
  training: Mapping[str, float] | None,
) -> dict[str, Any]:
  meta: dict[str, Any] = {
    'model': train_step.model.name,
    'variable_update': train_step.manager.name,
    'num_devices': len(train_step.manager.devices),
  }
  consumed = getattr(train_step, 'consumed', None)
  if consumed is not None:
    meta['consumed'] = list(consumed)
  if pipeline_state is not None:
    meta['pipeline'] = dict(pipeline_state)
  if training is not None:
    meta['training'] = dict(training)
  return meta


def _path(directory: str, values: Mapping[str, Any]) -> str:
  return os.path.join(directory, f'ckpt-{int(values["step"])}')


def _prune(directory: str, keep: int | None) -> None:
  """Removes all but the newest `keep` checkpoints, and what killed processes left."""
  for path in paths(directory)[:-keep] if keep else []:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
      os.rename(path, os.path.join(scratch, 'old'))  # gone at once for whoever lists
  for name in os.listdir(directory):
    path = os.path.join(directory, name)
    if name.startswith(_SCRATCH) and time.time() - os.path.getmtime(path) > _ABANDONED_S:
      shutil.rmtree(path, ignore_errors=True)


def _unreadable(path: str, error: Exception) -> Damaged:
  return Damaged(path, str(error).splitlines()[0])


def _sync(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
