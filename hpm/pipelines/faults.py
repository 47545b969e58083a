"""What can be wrong with records of images, and finding the one that is.

TensorFlow names neither file nor record: for a damaged file it gives a byte, for an image that
can't be decoded nothing. So the first records are looked at before anything is built, and after a
failure the culprit is searched for.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import re
import time
from typing import Any

import tensorflow as tf

from hpm.errors import DataError
from hpm.pipelines import augment, base, records

__all__ = ['check_first_records', 'eagerly', 'find_bad_sample', 'find_damage', 'problem']

_MAX_SHARDS = 16
_MAX_SAMPLES = 8192
_TIMEOUT_S = 120.0
_REMEDY = 'write the record again or leave it out'


def problem(record: bytes, num_classes: int, label_offset: int) -> str | None:
  """What is wrong with a record of ImageNet's layout, and the remedy; None if nothing is.

  Args:
    record: a serialised tf.train.Example.
    num_classes: outputs of the model.
    label_offset: is added to the record's label.
  """
  try:
    features = tf.train.Example.FromString(record).features.feature
  except Exception:  # protobuf's DecodeError, whose module depends on its implementation
    return "not a tf.train.Example: write the data set in the layout of ImageNet's TFRecords"
  needed = {records.ENCODED: 'bytes_list', records.LABEL: 'int64_list'}
  missing = [
    name
    for name, kind in needed.items()
    if name not in features or len(getattr(features[name], kind).value) != 1
  ]
  if missing:
    found = ', '.join(sorted(features)[:6]) or 'none'
    return (
      f'no single value for {" and ".join(missing)} (features found: {found}): write the data '
      "set with the features of ImageNet's TFRecords"
    )
  name = b''.join(features[records.FILENAME].bytes_list.value[:1]).decode(errors='replace')
  image = f'image {name}' if name else 'image'
  label = features[records.LABEL].int64_list.value[0]
  if not 0 <= label + label_offset < num_classes:
    return (
      f'label {label} of {image} with label_offset={label_offset} is outside '
      f'0..{num_classes - 1}: raise num_classes, or pass the label_offset that fits (labels are '
      'taken to run from 1; num_classes=1001 keeps a background class 0)'
    )
  encoded = features[records.ENCODED].bytes_list.value[0]
  if not encoded:
    return f'{image} has 0 bytes: {_REMEDY}'
  try:
    eagerly(augment.decode, encoded)
  except tf.errors.OpError as error:
    text = base.first_line(error)
    return f'{image} of {len(encoded)} bytes cannot be decoded ({text}): {_REMEDY}'
  return None


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function on the CPU in eager mode, even while a tf.Graph is being built or run.

  TensorFlow keeps its stack of graphs a thread, and a new thread begins in eager mode.
  """

  def on_cpu() -> Any:
    with tf.device('/CPU:0'):
      return function(*args)

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(on_cpu).result()


def check_first_records(paths: Sequence[str], find: Callable[[bytes], str | None]) -> None:
  """Raises a DataError if `find` sees a problem in the first record of 16 evenly spread files."""
  count = min(_MAX_SHARDS, len(paths))
  for i in range(count):
    path = paths[i * len(paths) // count]
    found = find(records.read_record(path))
    if found:
      raise DataError(f'{path}: record 0: {found}')


def find_damage(paths: Sequence[str], error: Exception) -> str:
  """Raises a DataError that names the damaged record behind a DataLossError of TensorFlow's.

  Returns what was searched if there is none to be found.
  """
  deadline = time.monotonic() + _TIMEOUT_S
  # Raises if lengths are damaged, or a file ends too early.
  tables = {path: records.record_offsets(path).tolist() for path in paths}
  # TensorFlow names the byte where the record's header or its data begins. Should that lead
  # nowhere, every record is checked.
  match = re.search(r'record at (\d+)', str(error))
  for starts in ({int(match[1]), int(match[1]) - 12} if match else set(), None):
    for path, offsets in tables.items():
      for index, offset in enumerate(offsets):
        if time.monotonic() > deadline:
          return f'no damaged record found in {_TIMEOUT_S:.0f} s'
        if starts is None or offset in starts:
          records.read_record(path, offset, index)
  return f'but all checksums of {len(tables)} files are right now'


def find_bad_sample(
  samples: Callable[[int], tf.data.Dataset],
  decode: Callable[[tf.data.Dataset], tf.data.Dataset],
  describe: Callable[[tuple], DataError],
) -> str:
  """Decodes samples until that fails; raises what `describe` makes of the first that does.

  Returns what was searched if nothing fails within 8192 samples and two minutes.

  Args:
    samples: (n) -> the undecoded samples, without the first n of those that may be bad.
    decode: decodes a dataset of samples, in their order.
    describe: (sample) -> the error to raise; it is called while TensorFlow's is handled.
  """
  deadline = time.monotonic() + _TIMEOUT_S

  def search() -> str:
    count = 0
    try:
      for _ in decode(samples(0).take(_MAX_SAMPLES)):
        count += 1
        if time.monotonic() > deadline:
          break
    except tf.errors.OpError as error:
      raise describe(next(iter(samples(count)))) from error
    return f'the data seem to be fine: the next {count} samples can be decoded'

  return eagerly(search)
