"""What can be wrong with images and their records, and finding the one that is.

TensorFlow names neither file nor record: for a damaged file it gives a byte, for an image that
can't be decoded nothing. So the first records are looked at before anything is built, and after a
failure the culprit is searched for.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import re
import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpm.errors import DataError
from hpm.pipelines import base, records

if TYPE_CHECKING:
  from hpm.pipelines import sources

__all__ = [
  'ERRORS',
  'Demands',
  'check_first_records',
  'eagerly',
  'examine',
  'fault',
  'find_bad_sample',
  'find_damage',
]

# What iterating over a damaged data set raises: TensorFlow quotes a record that is no example in
# its message, and where that is no UTF-8 the message itself can't be raised.
ERRORS = (tf.errors.OpError, UnicodeDecodeError)

MAX_PIXELS = 100_000_000  # 300 MB decoded; ImageNet's largest image has 28 million

_MAX_SHARDS = 16
_MAX_SAMPLES = 8192
_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Demands:
  """What a pipeline expects of every sample.

  Attributes:
    num_classes: outputs of the model.
    label_offset: is added to stored labels, which then have to be below `num_classes`.
    max_pixels: height x width above which an image isn't decoded.
  """

  num_classes: int
  label_offset: int = 0
  max_pixels: int = MAX_PIXELS


def examine(
  source: 'sources.Source', file: int, record: int, demands: Demands, item: bytes | None = None
) -> DataError | None:
  """What is wrong with a record, with its place and the remedy; None if nothing is.

  Args:
    source: where it is from.
    file: index of its file.
    record: its number in it.
    demands: what is expected of it.
    item: what the file's reader gave for it; None (or nothing) has it read.
  """
  place = source.describe(file, record)
  try:
    contents = source.contents(file, record, item or None)
  except DataError as error:
    named = str(error).startswith(source.files[file])
    return error if named else DataError(f'{place}: {error}')
  what = fault(source, contents, demands)
  return None if what is None else DataError(f'{place}: {what}')


def fault(source: 'sources.Source', contents: 'sources.Contents', demands: Demands) -> str | None:
  """What is wrong with an image that could be read, and the remedy; None if nothing is."""
  image = f'image {contents.key}' if contents.key else 'image'
  label, offset, encoded = contents.label, demands.label_offset, contents.encoded
  if not 0 <= label + offset < demands.num_classes:
    return (
      f'label {label} of {image} with label_offset={offset} is outside '
      f'0..{demands.num_classes - 1}: raise num_classes, or pass the label_offset that fits'
      f'{source.label_hint}'
    )
  if not encoded:
    return f'{image} has 0 bytes: {source.remedy}'
  try:
    pixels = int(eagerly(source.num_pixels, encoded))
    if pixels > demands.max_pixels:
      return (
        f'{image} of {len(encoded)} bytes claims {pixels} pixels, more than '
        f'max_pixels={demands.max_pixels}: raise max_pixels if that is right'
      )
    eagerly(source.decode, encoded)
  except (tf.errors.OpError, ValueError) as error:
    text = base.first_line(error)
    return f'{image} of {len(encoded)} bytes cannot be decoded ({text}): {source.remedy}'
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


def check_first_records(source: 'sources.Source', demands: Demands) -> None:
  """Raises a DataError if the first record of 16 evenly spread files has a problem."""
  empty = source.empty_files()
  if empty:
    raise DataError(f'{source.files[empty[0]]} is empty (0 bytes): copy or write this shard again')
  total = len(source.files)
  count = min(_MAX_SHARDS, total)
  for i in range(count):
    found = examine(source, i * total // count, 0, demands)
    if found:
      raise found


def find_damage(paths: Sequence[str], error: Exception) -> str:
  """Raises a DataError that names the damaged record behind a DataLossError of TensorFlow's.

  Returns what was searched if there is none to be found.
  """
  deadline = time.monotonic() + _TIMEOUT_S
  # Raises if lengths are damaged, or a file ends too early.
  tables = {
    path: records.record_offsets(path).tolist() for path in paths if not records.is_empty(path)
  }
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
    except ERRORS as error:
      raise describe(next(iter(samples(count)))) from error
    return f'the data seem to be fine: the next {count} samples can be decoded'

  return eagerly(search)
