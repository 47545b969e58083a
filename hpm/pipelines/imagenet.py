"""ImageNet's TFRecords as training and evaluation batches, with tf.data.

The order is arithmetic: epoch, file permutation, shuffling, crop and flip all follow from the
seed and the position in the stream, for any number of threads. So a position is one number, and
resuming is to skip records, before any is decoded.

Training decodes only the window that the crop needs (exactly, see `augment.decode_window`), and
batches stay uint8: `hpm.pipelines.normalize` does the rest on the device.
"""

from collections.abc import Mapping
import os

import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, base, faults, order, records

__all__ = ['ImageNetPipeline']

SPLITS = ('train', 'validation')


class ImageNetPipeline(base.Pipeline):
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
    shuffle_buffer: records that are shuffled among one another (about 110 KB each); 1 leaves each
      file's records in their order.
    num_parallel_calls: images decoded at once; None: as many as there are cores.
    with_ids: adds int64 ids: (index of the file in sorted order << 32) | record in the file.
    label_offset: is added to the records' labels.
    use_bbox: the random crop has to cover a tenth of one of the record's boxes, not of the image.
    prefetch: batches kept ready. Where several devices take from one pipeline, they take a batch
      each at a time: give at least their number.

  Raises:
    UsageError: an option out of range.
    DataError: missing, incomplete, empty or damaged files, records without the needed features,
      labels that don't fit, images that can't be decoded (in the first records of 16 shards).
  """

  def __init__(
    self,
    data_dir: str,
    split: str = 'train',
    *,
    batch_size: int,
    image_size: int = 224,
    num_classes: int = 1000,
    num_epochs: int | None = None,
    seed: int = 0,
    training: bool | None = None,
    shuffle_buffer: int = 2048,
    num_parallel_calls: int | None = None,
    with_ids: bool = False,
    label_offset: int | None = None,
    use_bbox: bool = False,
    prefetch: int = 4,
  ):
    super().__init__(batch_size=batch_size, image_size=image_size, num_classes=num_classes)
    if split not in SPLITS:
      raise errors.unknown('split', split, SPLITS)
    if not data_dir:
      raise UsageError(f'data_dir={data_dir!r}: give the directory of the {split}-*-of-* files')
    self._training = split == 'train' if training is None else bool(training)
    if num_epochs is not None:
      num_epochs = base.positive('num_epochs', num_epochs, 'give passes over the data, or None')
    elif not self._training:
      num_epochs = 1
    self._num_epochs = num_epochs
    self._seed = base.integer('seed', seed, 'give any integer')
    self._shuffle_buffer = base.positive('shuffle_buffer', shuffle_buffer, '1 means no shuffling')
    self._num_parallel_calls = base.positive(
      'num_parallel_calls',
      base.num_cores() if num_parallel_calls is None else num_parallel_calls,
      'None means one per core',
    )
    if label_offset is None:
      label_offset = 0 if num_classes == 1001 else -1
    self._label_offset = base.integer('label_offset', label_offset, 'it is added to every label')
    self._prefetch = base.positive('prefetch', prefetch, 'give the batches to keep ready')
    self._with_ids, self._use_bbox = with_ids, use_bbox
    self._first_sample = 0
    self._epoch_size: int | None = None
    self._paths = records.shard_files(os.fspath(data_dir), split)
    faults.check_first_records(self._paths, self._problem)

  @property
  def epoch_size(self) -> int:
    """Records in all shards; counted when first asked for, from the headers alone.

    Raises:
      DataError: a shard with a damaged header, or one that ends inside a record.
    """
    if self._epoch_size is None:
      self._epoch_size = sum(records.count_records(self._paths))
    return self._epoch_size

  def dataset(self) -> tf.data.Dataset:
    """(uint8 [B, H, W, 3], int32 [B]), and int64 [B] ids if asked for, from the position on."""
    with tf.device('/CPU:0'):
      samples = self._decoded(self._samples(self._first_sample))
      endless = self._num_epochs is None
      batches = samples.batch(self.batch_size, drop_remainder=endless)
      if endless:  # said to consumers, who may then count on full batches
        batches = batches.apply(
          tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )
      options = tf.data.Options()
      options.deterministic = True
      options.autotune.enabled = False  # nothing is left to tune, and its buffers grow
      return batches.prefetch(self._prefetch).with_options(options)

  def state(self, num_samples: int) -> dict[str, int]:
    samples = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed')
    return {
      'seed': self._seed,
      'samples': samples,
      'epoch_size': self.epoch_size,
      'shuffle_buffer': self._shuffle_buffer if self._training else 0,
    }

  def restore(self, state: Mapping[str, int]) -> None:
    current = self.state(0)
    for name in ('seed', 'shuffle_buffer', 'epoch_size'):
      if name not in state:
        raise UsageError(f'the position has no {name!r}: it is not that of an imagenet pipeline')
      saved, here = int(state[name]), current[name]
      if saved != here and name == 'epoch_size':
        raise DataError(
          f'{os.path.dirname(self._paths[0])} holds {here} records, but the position '
          f'was saved with {saved}: restore with the same data, or start anew'
        )
      if saved != here:
        raise UsageError(
          f'{name}={here}, but the position was saved with {name}={saved}: '
          f'pass {name}={saved} to go on in the same order'
        )
    self._first_sample = int(state['samples'])

  def _samples(self, first: int) -> tf.data.Dataset:
    """(position int64, (record string, id int64)) from position `first` on, nothing decoded."""
    return order.samples(
      self._paths,
      skip=first,
      epoch_size=self.epoch_size if first else None,
      num_epochs=self._num_epochs,
      seed=self._seed if self._training else None,
      shuffle_buffer=self._shuffle_buffer,
    )

  def _decoded(self, samples: tf.data.Dataset) -> tf.data.Dataset:
    return samples.map(
      self._decode, num_parallel_calls=self._num_parallel_calls, deterministic=True
    )

  def _decode(self, position: tf.Tensor, sample: tuple[tf.Tensor, tf.Tensor]) -> tuple:
    """(image uint8 [H, W, 3], label int32[, id int64]) of one record."""
    record, ident = sample
    features: dict[str, object] = {
      records.ENCODED: tf.io.FixedLenFeature([], tf.string),
      records.LABEL: tf.io.FixedLenFeature([], tf.int64),
    }
    use_bbox = self._use_bbox and self._training
    if use_bbox:
      features |= {side: tf.io.VarLenFeature(tf.float32) for side in records.BBOX}
    parsed = tf.io.parse_single_example(record, features)
    label = self._checked_label(parsed[records.LABEL], ident)
    encoded = parsed[records.ENCODED]
    if self._training:
      sides = [tf.sparse.to_dense(parsed[side]) for side in records.BBOX] if use_bbox else []
      image = self._training_image(encoded, position, tf.stack(sides, -1) if sides else None)
    else:
      image = augment.resize_central_crop(augment.decode(encoded), self.image_size)
    image = tf.ensure_shape(image, [self.image_size, self.image_size, 3])
    return (image, label, ident) if self._with_ids else (image, label)

  def _checked_label(self, label: tf.Tensor, ident: tf.Tensor) -> tf.Tensor:
    """int32 [] in 0 .. num_classes - 1, or an InvalidArgumentError with file and record."""
    shifted = label + self._label_offset
    file, record = order.split_id(ident)
    check = tf.raw_ops.Assert(
      condition=tf.logical_and(shifted >= 0, shifted < self.num_classes),
      data=[
        f'label outside 0..{self.num_classes - 1} with label_offset={self._label_offset}; '
        'file, record, label:',
        tf.gather(tf.constant(self._paths), file),
        record,
        label,
      ],
    )
    with tf.control_dependencies([check]):
      return tf.cast(shifted, tf.int32)

  def _training_image(
    self, encoded: tf.Tensor, position: tf.Tensor, boxes: tf.Tensor | None
  ) -> tf.Tensor:
    seed = tf.stack([order.subseed(self._seed, 'crop'), position])

    def jpeg() -> tf.Tensor:
      shape = augment.jpeg_shape(encoded)
      return augment.decode_window(encoded, shape, augment.random_window(shape, seed, boxes))

    def other() -> tf.Tensor:
      # PNG and others under a JPEG's name have no decoder that crops.
      whole = augment.decode(encoded)
      window = augment.random_window(tf.shape(whole), seed, boxes)
      return tf.slice(whole, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))

    image = augment.resize(tf.cond(augment.is_jpeg(encoded), jpeg, other), self.image_size)
    return augment.flip(image, tf.stack([order.subseed(self._seed, 'flip'), position]))

  def explain(self, error: Exception, num_samples: int = 0) -> DataError:
    """Finds the record that made the iterator raise; see `Pipeline.explain`.

    A damaged file is looked for at the byte that TensorFlow names, in every shard. Other errors
    are found by going through the stream from `num_samples` on, for at most 8192 samples and
    two minutes.
    """
    first = max(num_samples, self._first_sample)
    try:
      if isinstance(error, tf.errors.DataLossError):
        found = faults.find_damage(self._paths, error)
      else:
        found = faults.find_bad_sample(
          lambda skipped: self._samples(first + skipped), self._decoded, self._describe
        )
    except DataError as culprit:
      return culprit
    except tf.errors.OpError as another:
      found = f'searching failed as well: {base.first_line(another)}'
    return DataError(f'failed after {first} samples: {base.first_line(error)} ({found})')

  def _problem(self, record: bytes) -> str | None:
    return faults.problem(record, self.num_classes, self._label_offset)

  def _describe(self, sample: tuple) -> DataError:
    """The error that names an undecoded sample and what is wrong with it."""
    _, (record, ident) = sample
    file, number = (int(part) for part in order.split_id(ident))
    what = self._problem(record.numpy()) or 'its window of the image cannot be decoded'
    return DataError(f'{self._paths[file]}: record {number}: {what}')
