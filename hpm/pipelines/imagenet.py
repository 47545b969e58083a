"""ImageNet's TFRecords as training and evaluation batches, with tf.data.

The order is arithmetic: epoch, file permutation, shuffling, crop and flip all follow from the
seed and the position in the stream, for any number of threads. So a position is one number, and
resuming is to skip records, before any is decoded.

Training decodes only the window that the crop needs (exactly, see `augment.decode_window`), and
batches stay uint8: `hpm.pipelines.normalize` does the rest on the device.
"""

from collections.abc import Iterator, Mapping
import hashlib
import os
import time

import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, base, records

__all__ = ['ImageNetPipeline', 'imagenet']

SPLITS = ('train', 'validation')

_INT64_MAX = 2**63 - 1
_CYCLE = 16  # files read in turn; part of the order, so not a matter of the machine
_MAX_READERS = 4  # threads that read files
_PREFETCH = 4  # batches
_DOOR_SHARDS = 16  # shards whose first record is looked at before anything is built
_EXPLAIN_SAMPLES = 8192  # at most so many samples are replayed to find a bad one
_EXPLAIN_TIMEOUT_S = 120.0


def imagenet(data_dir: str, split: str = 'train', *, batch_size: int, image_size: int = 224,
             num_classes: int = 1000, num_epochs: int | None = None, seed: int = 0,
             training: bool | None = None, shuffle_buffer: int = 2048,
             num_parallel_calls: int | None = None, with_ids: bool = False,
             label_offset: int | None = None, use_bbox: bool = False) -> 'ImageNetPipeline':
  """Batches from `data_dir/split-*-of-*`, ImageNet's TFRecords, checked before anything is built.

  Training: random crop, bilinear resize, flip; files and records in a new order every epoch.
  Evaluation: one pass in a fixed order that drops nothing; short side to 256/224 of
  `image_size`, antialiased, central crop.

  Labels in the records run from 1, and 0 is background. With 1001 classes they are kept; with any
  other number 1 is subtracted, so that 1000 classes are 0 .. 999. `label_offset` overrides this.

  Args:
    data_dir: the directory of the shards.
    split: 'train' or 'validation'.
    batch_size: samples per device.
    image_size: height and width of the images, pixels.
    num_classes: outputs of the model. A label outside them is an error that names the record.
    num_epochs: passes over the data; the last batch may then be smaller, and the batch dimension
      isn't static. None: training never ends, and every batch is full; evaluation takes one pass.
    seed: decides the order, the crops and the flips. Independent of tf.random.set_seed.
    training: False evaluates, True trains; None: whether split is 'train'.
    shuffle_buffer: records that are shuffled among one another (about 110 KB each).
    num_parallel_calls: images decoded at once; None: as many as there are cores.
    with_ids: adds int64 ids: (index of the file in sorted order << 32) | record in the file.
    label_offset: is added to the records' labels.
    use_bbox: the random crop has to cover a tenth of one of the record's boxes, not of the image.

  Raises:
    UsageError: an option out of range.
    DataError: missing, incomplete, empty or damaged files, records without the needed features,
      labels that don't fit, images that can't be decoded (in the first records of 16 shards).
  """
  return ImageNetPipeline(
      data_dir, split, batch_size=batch_size, image_size=image_size, num_classes=num_classes,
      num_epochs=num_epochs, seed=seed, training=training, shuffle_buffer=shuffle_buffer,
      num_parallel_calls=num_parallel_calls, with_ids=with_ids, label_offset=label_offset,
      use_bbox=use_bbox)


class ImageNetPipeline(base.Pipeline):
  """See `imagenet`."""

  def __init__(self, data_dir: str, split: str, *, batch_size: int, image_size: int,
               num_classes: int, num_epochs: int | None, seed: int, training: bool | None,
               shuffle_buffer: int, num_parallel_calls: int | None, with_ids: bool,
               label_offset: int | None, use_bbox: bool):
    super().__init__(batch_size=batch_size, image_size=image_size, num_classes=num_classes)
    if split not in SPLITS:
      raise errors.unknown('split', split, SPLITS)
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give the directory of the {split}-*-of-* files')
    self._training = split == 'train' if training is None else bool(training)
    self._num_epochs = num_epochs if num_epochs is None else base.positive(
        'num_epochs', num_epochs, 'give the passes over the data, or None')
    self._seed = base.integer('seed', seed, 'give any integer')
    self._shuffle_buffer = base.positive(
        'shuffle_buffer', shuffle_buffer, '1 leaves the records of each file in their order')
    self._num_parallel_calls = (os.cpu_count() or 1) if num_parallel_calls is None else (
        base.positive('num_parallel_calls', num_parallel_calls, 'None means one per core'))
    if label_offset is None:
      label_offset = 0 if num_classes == 1001 else -1
    self._label_offset = base.integer('label_offset', label_offset, 'it is added to every label')
    self._with_ids, self._use_bbox = with_ids, use_bbox
    self._order_seed, self._shuffle_seed, self._crop_seed, self._flip_seed = (
        _subseed(self._seed, use) for use in ('files', 'records', 'crop', 'flip'))
    self._first_sample = 0
    self._counts: list[int] | None = None
    self._paths = records.shard_files(os.fspath(data_dir), split)
    self._check_first_records()

  @property
  def epoch_size(self) -> int:
    """Records in all shards; counted when first asked for, from the headers alone.

    Raises:
      DataError: a shard with a damaged header, or one that ends inside a record.
    """
    if self._counts is None:
      self._counts = records.count_records(self._paths)
    return sum(self._counts)

  def dataset(self) -> tf.data.Dataset:
    """(uint8 [B, H, W, 3], int32 [B]), and int64 [B] ids if asked for, from the position on."""
    samples = self._samples(self._first_sample).map(
        self._decode, num_parallel_calls=self._num_parallel_calls, deterministic=True)
    endless = self._training and self._num_epochs is None
    batches = samples.batch(self.batch_size, drop_remainder=endless).prefetch(_PREFETCH)
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing is left to tune, and its buffers grow
    return batches.with_options(options)

  def state(self, num_samples: int) -> dict[str, int]:
    samples = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed')
    return {'seed': self._seed, 'samples': samples, 'epoch_size': self.epoch_size,
            'shuffle_buffer': self._shuffle_buffer if self._training else 0}

  def restore(self, state: Mapping[str, int]) -> None:
    current = self.state(0)
    for name in ('seed', 'shuffle_buffer', 'epoch_size'):
      if name not in state:
        raise UsageError(f'the position has no {name!r}: it is not that of an imagenet pipeline')
      saved, here = int(state[name]), current[name]
      if saved != here and name == 'epoch_size':
        raise DataError(f'{os.path.dirname(self._paths[0])} holds {here} records, but the position '
                        f'was saved with {saved}: restore with the same data, or start anew')
      if saved != here:
        raise UsageError(f'{name}={here}, but the position was saved with {name}={saved}: '
                         f'pass {name}={saved} to go on in the same order')
    self._first_sample = int(state['samples'])

  # The order ---------------------------------------------------------------------------------

  def _samples(self, first: int) -> tf.data.Dataset:
    """(position int64, (record string, id int64)) from position `first` on, nothing decoded."""
    # The number of records is asked for only when it is needed: counting takes time.
    epoch, skipped = divmod(first, self.epoch_size) if first else (0, 0)
    last = self._num_epochs or (_INT64_MAX if self._training else 1)
    stream = tf.data.Dataset.range(epoch, max(epoch, last)).flat_map(self._epoch).skip(skipped)
    return tf.data.Dataset.zip((tf.data.Dataset.range(first, _INT64_MAX), stream))

  def _epoch(self, epoch: tf.Tensor) -> tf.data.Dataset:
    """(record string, id int64) of one epoch (int64 []) in its order."""
    paths = tf.constant(self._paths)
    files = tf.range(len(self._paths), dtype=tf.int64)
    if self._training:
      files = tf.random.experimental.stateless_shuffle(
          files, seed=tf.stack([self._order_seed, epoch]), alg='philox')

    def read(file: tf.Tensor) -> tf.data.Dataset:
      first_id = tf.bitwise.left_shift(file, tf.constant(32, tf.int64))
      return tf.data.Dataset.zip((
          tf.data.TFRecordDataset(tf.gather(paths, file)),
          tf.data.Dataset.range(first_id, _INT64_MAX)))

    stream = tf.data.Dataset.from_tensor_slices(files).interleave(
        read, cycle_length=min(_CYCLE, len(self._paths)), block_length=1,
        num_parallel_calls=min(_MAX_READERS, len(self._paths)), deterministic=True)
    if self._training and self._shuffle_buffer > 1:
      stream = _seeded_shuffle(stream, self._shuffle_buffer, self._shuffle_seed, epoch)
    return stream

  # One sample --------------------------------------------------------------------------------

  def _decode(self, position: tf.Tensor, sample: tuple[tf.Tensor, tf.Tensor]) -> tuple:
    """(image uint8 [H, W, 3], label int32[, id int64]) of one record."""
    record, sample_id = sample
    features = {records.ENCODED: tf.io.FixedLenFeature([], tf.string),
                records.LABEL: tf.io.FixedLenFeature([], tf.int64)}
    sides = [f'image/object/bbox/{side}' for side in ('ymin', 'xmin', 'ymax', 'xmax')]
    if self._use_bbox and self._training:
      features |= {side: tf.io.VarLenFeature(tf.float32) for side in sides}
    parsed = tf.io.parse_single_example(record, features)
    label = parsed[records.LABEL] + self._label_offset
    fits = tf.logical_and(label >= 0, label < self.num_classes)
    path = tf.gather(tf.constant(self._paths), tf.bitwise.right_shift(
        sample_id, tf.constant(32, tf.int64)))
    check = tf.raw_ops.Assert(condition=fits, data=[
        f'label outside 0..{self.num_classes - 1} (file, record, label in the file, label_offset)',
        path, sample_id & 0xFFFFFFFF, parsed[records.LABEL], self._label_offset])
    with tf.control_dependencies([check] if check is not None else []):
      label = tf.cast(label, tf.int32)
    encoded = parsed[records.ENCODED]
    if self._training:
      boxes = None
      if self._use_bbox:
        boxes = tf.stack([tf.sparse.to_dense(parsed[side]) for side in sides], axis=-1)
      image = self._training_image(encoded, position, boxes)
    else:
      image = augment.resize_central_crop(augment.decode(encoded), self.image_size)
    image = tf.ensure_shape(image, [self.image_size, self.image_size, 3])
    return (image, label, sample_id) if self._with_ids else (image, label)

  def _training_image(self, encoded: tf.Tensor, position: tf.Tensor,
                      boxes: tf.Tensor | None) -> tf.Tensor:
    seed = tf.stack([self._crop_seed, position])

    def jpeg() -> tf.Tensor:
      shape = augment.jpeg_shape(encoded)
      return augment.decode_window(encoded, shape, augment.random_window(shape, seed, boxes))

    def other() -> tf.Tensor:
      # PNG and others under a JPEG's name have no decoder that crops.
      whole = augment.decode(encoded)
      window = augment.random_window(tf.shape(whole), seed, boxes)
      return tf.slice(whole, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))

    image = augment.resize(tf.cond(augment.is_jpeg(encoded), jpeg, other), self.image_size)
    return augment.flip(image, tf.stack([self._flip_seed, position]))

  # What is wrong -----------------------------------------------------------------------------

  def _check_first_records(self) -> None:
    """Looks at the first record of up to 16 evenly spread shards."""
    count = min(_DOOR_SHARDS, len(self._paths))
    for i in range(count):
      path = self._paths[i * len(self._paths) // count]
      problem = self._problem(records.read_record(path))
      if problem:
        raise DataError(f'{path}: record 0: {problem}')

  def _problem(self, record: bytes) -> str | None:
    """What is wrong with a record, and the remedy; None if nothing is."""
    try:
      features = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf's DecodeError, whose module depends on its version
      return 'not a tf.train.Example: write the data set in the layout of ImageNet\'s TFRecords'
    missing = [name for name, kind in ((records.ENCODED, 'bytes_list'),
                                       (records.LABEL, 'int64_list'))
               if name not in features or len(getattr(features[name], kind).value) != 1]
    if missing:
      found = ', '.join(sorted(features)[:6]) or 'none'
      return (f'no single value for {" and ".join(missing)} (features found: {found}): write the '
              'data set with the features of ImageNet\'s TFRecords')
    name = b''.join(features[records.FILENAME].bytes_list.value[:1]).decode(errors='replace')
    key = f' (image {name})' if name else ''
    label = features[records.LABEL].int64_list.value[0]
    if not 0 <= label + self._label_offset < self.num_classes:
      return (f'label {label}{key} with label_offset={self._label_offset} is outside '
              f'0..{self.num_classes - 1}: raise num_classes, or pass the label_offset that fits '
              '(labels are taken to run from 1; num_classes=1001 keeps a background class 0)')
    encoded = features[records.ENCODED].bytes_list.value[0]
    if not encoded:
      return f'the image{key} has 0 bytes: write the record again or leave it out'
    try:
      with tf.init_scope(), tf.device('/CPU:0'):
        augment.decode(tf.constant(encoded))
    except tf.errors.OpError as error:
      return (f'the image{key} of {len(encoded)} bytes cannot be decoded: '
              f'{base.first_line(error)}; write the record again or leave it out')
    return None

  def explain(self, error: Exception, num_samples: int = 0) -> DataError:
    """Finds the record that made the iterator raise; see `Pipeline.explain`.

    A damaged file is looked for at the byte that TensorFlow names, in every shard. Other errors
    are found by going through the stream from `num_samples` on, one record at a time, for at
    most 8192 records and two minutes.
    """
    try:
      if isinstance(error, tf.errors.DataLossError):
        found = self._find_damage(error)
      else:
        found = self._find_bad_sample(max(num_samples, self._first_sample))
    except DataError as culprit:
      return culprit
    except tf.errors.OpError as another:
      found = f'the search itself failed: {base.first_line(another)}'
    return DataError(f'the input pipeline failed: {base.first_line(error)} ({found})')

  def _find_damage(self, error: Exception) -> str:
    """Raises the DataError that names the damaged record; or returns what was searched."""
    digits = str(error).split(' at ', 1)[-1].split()[0].strip('.,;')
    position = int(digits) if digits.isdigit() else None
    deadline = time.monotonic() + _EXPLAIN_TIMEOUT_S
    tables = {path: records.record_offsets(path) for path in self._paths}  # raises, for headers
    # TensorFlow names the byte where a record's header or its data begins. If that finds nothing,
    # every record is checked.
    for exact in (True, False):
      for path, offsets in tables.items():
        for index, offset in enumerate(offsets.tolist()):
          if exact and position not in (offset, offset + 12):
            continue
          if time.monotonic() > deadline:
            return f'no damaged record found within {_EXPLAIN_TIMEOUT_S:.0f} s'
          records.read_record(path, offset, index)
    return f'but the checksums of all records of {len(tables)} files are right now'

  def _find_bad_sample(self, first: int) -> str:
    """Raises the DataError that names the bad record; or returns what was searched."""
    deadline = time.monotonic() + _EXPLAIN_TIMEOUT_S
    count = 0
    for position, (record, sample_id) in self._replay(first):
      try:
        with tf.device('/CPU:0'):
          self._decode(position, (record, sample_id))
      except tf.errors.OpError as error:
        file, index = divmod(int(sample_id), 1 << 32)
        problem = self._problem(record.numpy()) or base.first_line(error)
        raise DataError(f'{self._paths[file]}: record {index}: {problem}') from error
      count += 1
      if count == _EXPLAIN_SAMPLES or time.monotonic() > deadline:
        break
    return f'no bad record found among the {count} samples from sample {first} on'

  def _replay(self, first: int) -> Iterator[tuple]:
    with tf.init_scope():
      yield from self._samples(first)


def _seeded_shuffle(stream: tf.data.Dataset, buffer: int, seed: int,
                    epoch: tf.Tensor) -> tf.data.Dataset:
  """`stream.shuffle`, but by these two seeds alone: Dataset.shuffle mixes in the global one."""
  shuffled = tf.raw_ops.ShuffleDataset(
      input_dataset=tf.data.experimental.to_variant(stream), buffer_size=buffer, seed=seed,
      seed2=epoch, output_types=tf.nest.flatten(
          tf.nest.map_structure(lambda spec: spec.dtype, stream.element_spec)),
      output_shapes=tf.nest.flatten(
          tf.nest.map_structure(lambda spec: spec.shape, stream.element_spec)),
      reshuffle_each_iteration=False)
  return tf.data.experimental.from_variant(shuffled, stream.element_spec)


def _subseed(seed: int, use: str) -> int:
  """A seed for one use, never 0 (which tf.data takes for "none"): 62 bits."""
  digest = hashlib.sha256(f'{seed}/{use}'.encode()).digest()
  return int.from_bytes(digest[:8], 'little') >> 2 | 1
