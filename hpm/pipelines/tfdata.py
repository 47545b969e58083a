"""Training and evaluation batches of any source, with tf.data.

The order is arithmetic: epoch, permutation, shuffling, crop and flip all follow from the seed and
the position in the stream, for any number of threads. So a position is one number, and resuming is
to skip records, before any is decoded.

Training decodes only the window that the crop needs (exactly, see `augment.decode_window`), and
batches stay uint8: `hpm.pipelines.normalize` does the rest on the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, base, faults, order, skips, sources

__all__ = ['TfDataPipeline']


class TfDataPipeline(base.Pipeline):
  """Batches of a source, whose first records are checked before anything is built.

  Training: random crop, bilinear resize, flip; files and records in a new order every epoch.
  Evaluation: one pass in a fixed order that drops nothing; short side to 256/224 of
  `image_size`, antialiased, central crop.

  Args:
    source: where undecoded samples come from.
    batch_size: samples per device.
    image_size: height and width of the images, pixels; or a size for each epoch from which on it
      holds, such as {0: 128, 6: 176, 14: 224}. It changes at the first batch that begins in the
      epoch (see `size_step`), and the batches' height and width are then not static.
    num_classes: outputs of the model. A label outside them is an error that names the record.
    num_epochs: passes over the data; the last batch may then be smaller, and the batch dimension
      isn't static. None: training never ends, and every batch is full; evaluation takes one pass.
    seed: decides the order, the crops and the flips. Independent of tf.random.set_seed.
    training: False evaluates, True trains; None: whether the source's split is 'train'.
    shuffle_buffer: records that are shuffled among one another (about 110 KB each); 1 leaves each
      file's records in their order. Sources with random access are permuted as a whole.
    num_parallel_calls: images decoded at once; None: as many as there are cores.
    with_ids: adds int64 ids: (index of the file in sorted order << 32) | record in the file.
    label_offset: is added to the records' labels; None: what fits the source.
    use_bbox: the random crop has to cover a tenth of one of the record's boxes, not of the image.
    antialias: training resizes with antialiasing, as evaluation does: nearer to the original, and
      almost twice the work of the host (docs/pipelines.md).
    distort_colors: training changes brightness, saturation, hue and contrast at random.
    bad_records: 'fail' raises at a record that can't be used; 'skip' leaves it out and lists it in
      `skipped()`; 'limit:N' does so for at most N different records. To be able to go on costs
      about 0.2 ms of a core an image.
    num_shards, shard_index: workers that share the data, and which of them this is. Each sees
      records of its own, all together see every record once an epoch.
    shard_by: 'record': each takes every n-th record, and reads all files; 'file': each reads files
      of its own, of which there have to be enough.
    max_pixels: an image that claims more is a bad record, and isn't decoded.
    size_step: samples that must be of one size, where `image_size` changes: the global batch, if
      several devices take from this pipeline; None: `batch_size`.
    prefetch: batches kept ready. Where several devices take from one pipeline, they take a batch
      each at a time: give at least their number.

  Raises:
    UsageError: an option out of range.
    DataError: empty or damaged files, records without the needed features, labels that don't fit,
      images that can't be decoded (in the first records of 16 files; not if bad records are
      skipped).
  """

  def __init__(
    self,
    source: sources.Source,
    *,
    batch_size: int,
    image_size: int | Mapping[int, int] = 224,
    num_classes: int = 1000,
    num_epochs: int | None = None,
    seed: int = 0,
    training: bool | None = None,
    shuffle_buffer: int = 2048,
    num_parallel_calls: int | None = None,
    with_ids: bool = False,
    label_offset: int | None = None,
    use_bbox: bool = False,
    antialias: bool = False,
    distort_colors: bool = False,
    bad_records: str = 'fail',
    num_shards: int = 1,
    shard_index: int = 0,
    shard_by: str = 'record',
    max_pixels: int = faults.MAX_PIXELS,
    size_step: int | None = None,
    prefetch: int = 4,
  ):
    self._sizes = _sizes(image_size)
    super().__init__(
      batch_size=batch_size, image_size=self._sizes[max(self._sizes)], num_classes=num_classes
    )
    self.source = source
    if training is None:
      training = source.split == 'train'
    self._training = base.flag('training', training)
    if num_epochs is not None:
      num_epochs = base.positive('num_epochs', num_epochs, 'give passes over the data, or None')
    elif not self._training:
      num_epochs = 1
    self._num_epochs = num_epochs
    self._seed = base.integer('seed', seed, 'give any integer')
    shuffle_buffer = base.positive('shuffle_buffer', shuffle_buffer, '1 means no shuffling')
    self._num_parallel_calls = base.positive(
      'num_parallel_calls',
      base.num_cores() if num_parallel_calls is None else num_parallel_calls,
      'None means one per core',
    )
    if label_offset is None:
      label_offset = source.label_offset(num_classes)
    self._demands = faults.Demands(
      num_classes,
      base.integer('label_offset', label_offset, 'it is added to every label'),
      base.positive('max_pixels', max_pixels, 'give height x width of the largest image'),
    )
    self._prefetch = base.positive('prefetch', prefetch, 'give the batches to keep ready')
    self._size_step = base.positive(
      'size_step', batch_size if size_step is None else size_step, 'give samples of one size'
    )
    self._with_ids = base.flag('with_ids', with_ids)
    self._use_bbox = base.flag('use_bbox', use_bbox)
    self._antialias = base.flag('antialias', antialias)
    self._distort_colors = base.flag('distort_colors', distort_colors)
    self._order = order.Order(
      self._seed if self._training else None, shuffle_buffer, num_shards, shard_index, shard_by
    )
    self._first_sample = self._skipped_before = 0
    policy = skips.Policy.parse(bad_records)
    self._strict = not policy.skip
    self._skips = skips.Skips(policy, source.origin)
    if policy.skip and len(self._sizes) > 1:
      raise UsageError(
        f'bad_records={bad_records!r} with an image_size that changes by epoch: what is left out '
        "would mix sizes in a batch; give one size, or bad_records='fail'"
      )
    if use_bbox and not source.has_boxes:
      raise UsageError(f'use_bbox: {source.origin} has no boxes')
    self._order.files(len(source.files))  # refuses fewer files than workers
    self._check(policy)
    # A file has a record at least, so that counting them can wait if there are files enough.
    if len(source.files) < num_shards and not self.epoch_size:
      counts = source.counts if self._strict else source.tolerant_counts
      raise UsageError(
        f'{num_shards} workers (num_shards) but {sum(counts)} records in {source.origin}: worker '
        f'{shard_index} would have none'
      )

  def _check(self, policy: skips.Policy) -> None:
    known = self.source.class_names
    if known is not None:
      last = len(known) - 1 + self._demands.label_offset
      if last >= self.num_classes:
        raise DataError(
          f'{self.source.origin} has {len(known)} classes, labels up to {last} with '
          f'label_offset={self._demands.label_offset}, but num_classes={self.num_classes}: raise '
          'num_classes'
        )
    if not policy.skip:
      faults.check_first_records(self.source, self._demands)
      return
    for file in self.source.empty_files():
      self._skips.note(file << 32, f'{self.source.files[file]} is empty (0 bytes)')
    if not self.epoch_size:
      raise DataError(f'{self.source.origin} holds no records in {len(self.source.files)} files')

  @property
  def epoch_size(self) -> int:
    """Records an epoch of this worker; counted when first asked for, without reading them.

    Where bad records are skipped they count as well.

    Raises:
      DataError: a file that is damaged, or that ends inside a record.
    """
    return self._order.epoch_size(self._counts)

  @property
  def epoch_size_of_all(self) -> int:
    return sum(self._counts)

  @property
  def _counts(self) -> list[int]:
    return self.source.counts if self._strict else self.source.tolerant_counts

  def skipped(self) -> list[skips.Skipped]:
    return self._skips.list()

  def dataset(self) -> tf.data.Dataset:
    """(uint8 [B, H, W, 3], int32 [B]), and int64 [B] ids if asked for, from the position on."""
    with tf.device('/CPU:0'):
      batches = self._batches(self._first_sample)
      if self._num_epochs is None:  # said to consumers, who may then count on full batches
        batches = batches.apply(
          tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )
      options = tf.data.Options()
      options.deterministic = True
      options.autotune.enabled = False  # nothing is left to tune, and its buffers grow
      return batches.prefetch(self._prefetch).with_options(options)

  def _batches(self, first: int) -> tf.data.Dataset:
    """What `dataset` gives, from position `first` on."""
    samples = self._decoded(self._samples(first))
    return samples.batch(self.batch_size, drop_remainder=self._num_epochs is None)

  def state(self, num_samples: int) -> dict[str, int]:
    samples = base.at_least(0, 'num_samples', num_samples, 'give the samples consumed')
    shuffles = self._training and not isinstance(self.source, sources.RandomAccess)
    state = {
      'seed': self._seed,
      'samples': samples,
      'epoch_size': self.epoch_size,
      'shuffle_buffer': self._order.shuffle_buffer if shuffles else 0,
    }
    optional = {
      'num_shards': self._order.num_shards,
      'shard_index': self._order.shard_index,
      'shard_by_file': int(self._order.shard_by == 'file' and self._order.num_shards > 1),
      'skipped': self._position(samples) - samples,
    }
    return state | {name: value for name, value in optional.items() if value != _DEFAULTS[name]}

  def restore(self, state: Mapping[str, int]) -> None:
    current = _DEFAULTS | self.state(0) | {'skipped': 0}
    for name in ('seed', 'shuffle_buffer', 'epoch_size'):
      if name not in state:
        raise UsageError(f'the position has no {name!r}: it is not that of a pipeline of records')
    saved = _DEFAULTS | dict(state)
    for name in ('seed', 'shuffle_buffer', 'num_shards', 'shard_index', 'shard_by_file'):
      if int(saved[name]) != current[name]:
        raise UsageError(
          f'{name}={current[name]}, but the position was saved with {name}={saved[name]}: '
          f'pass {name}={saved[name]} to go on in the same order'
        )
    if int(saved['epoch_size']) != current['epoch_size']:
      raise DataError(
        f'{self.source.origin} holds {current["epoch_size"]} records, but the position '
        f'was saved with {saved["epoch_size"]}: restore with the same data, or start anew'
      )
    self._skipped_before = int(saved['skipped'])
    self._first_sample = int(saved['samples']) + self._skipped_before

  def views(self, num_views: int) -> tf.data.Dataset:
    """Each sample in its order, seen several times: what augmentation does, for people to look at.

    Elements are (uint8 [num_views, H, W, 3], int32 label, int64 id); the first view is that of the
    first epoch, the others are such as other epochs see.
    """

    def look(position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> tuple:
      seen = [self._decode(position + i * _APART, ident, item)[:2] for i in range(num_views)]
      return tf.stack([image for image, _ in seen]), seen[0][1], ident

    with tf.device('/CPU:0'):
      return self._samples(self._first_sample).map(look)

  def _position(self, num_samples: int) -> int:
    """The position in the stream when so many samples had been consumed since its start."""
    position = num_samples + self._skipped_before
    ahead = position - self._first_sample
    return position + self._skips.behind(self._first_sample, ahead) if ahead > 0 else position

  def _samples(self, first: int, strict: bool | None = None) -> tf.data.Dataset:
    """(position int64, id int64, item string) from position `first` on, nothing decoded."""
    return order.samples(
      self.source,
      self._order,
      skip=first,
      num_epochs=self._num_epochs,
      strict=self._strict if strict is None else strict,
    )

  def _decoded(self, samples: tf.data.Dataset) -> tf.data.Dataset:
    """Samples as `_decode` makes them, without those that are to be skipped."""
    if self._strict:
      return samples.map(
        self._decode, num_parallel_calls=self._num_parallel_calls, deterministic=True
      )
    guarded = samples.map(
      self._guarded, num_parallel_calls=self._num_parallel_calls, deterministic=True
    )
    return guarded.filter(self._kept).map(lambda good, position, ident, item, sample: sample)

  def _decode(self, position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> tuple:
    """(image uint8 [H, W, 3], label int32[, id int64]) of one record."""
    sample = self.source.load(ident, item, self._use_bbox and self._training)
    label = self._checked_label(sample.label, ident)
    encoded = self._checked_size(sample.encoded, ident)
    if self._training:
      image, size = self._training_image(encoded, position, sample.boxes)
    else:
      size = self.image_size
      image = self._evaluation_image(encoded)
    static = size if isinstance(size, int) else None
    image = tf.ensure_shape(image, [static, static, 3])
    return (image, label, ident) if self._with_ids else (image, label)

  def _guarded(self, position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> tuple:
    """(whether it went well, position, id, item, what `_decode` gives, or zeros)."""
    # An error can't be caught in a graph, but a data set can leave out what raises one. (To reduce
    # it takes less code and a hundred times longer: TensorFlow makes the function anew each time.)
    one = tf.data.Dataset.from_tensors((position, ident, item)).map(
      lambda *record: (True, self._decode(*record))
    )
    blank = tf.nest.map_structure(
      lambda spec: tf.zeros([side or 0 for side in spec.shape], spec.dtype), one.element_spec
    )
    either = one.ignore_errors(log_warning=False).concatenate(
      tf.data.Dataset.from_tensors(blank)  # whose first part is False
    )
    went_well, sample = either.take(1).get_single_element()
    return went_well, position, ident, item, sample

  def _kept(
    self, good: tf.Tensor, position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor, _: tuple
  ) -> tf.Tensor:
    def skip() -> tf.Tensor:
      return tf.numpy_function(self._skip, [position, ident, item], tf.bool)

    return tf.ensure_shape(tf.cond(good, lambda: True, skip), [])

  def _skip(self, position: np.int64, ident: np.int64, item: bytes) -> np.bool_:
    """Lists a record that is left out; runs between TensorFlow's threads."""
    what = self._skips.known(int(ident)) or str(self._describe(int(ident), item))
    self._skips.add(int(position), int(ident), what, self.epoch_size)
    return np.False_

  def _checked_label(self, label: tf.Tensor, ident: tf.Tensor) -> tf.Tensor:
    """int32 [] in 0 .. num_classes - 1, or an InvalidArgumentError with file and record."""
    shifted = label + self._demands.label_offset
    good = tf.logical_and(shifted >= 0, shifted < self.num_classes)
    what = f'label outside 0..{self.num_classes - 1} with label_offset={self._demands.label_offset}'
    with tf.control_dependencies([self._check_that(good, what, ident, 'label', label)]):
      return tf.cast(shifted, tf.int32)

  def _checked_size(self, encoded: tf.Tensor, ident: tf.Tensor) -> tf.Tensor:
    """The same bytes, or an InvalidArgumentError if they claim more than `max_pixels`."""
    pixels = self.source.num_pixels(encoded)
    what = f'an image of more than max_pixels={self._demands.max_pixels}'
    good = pixels <= self._demands.max_pixels
    with tf.control_dependencies([self._check_that(good, what, ident, 'pixels', pixels)]):
      return tf.identity(encoded)

  def _check_that(
    self, good: tf.Tensor, what: str, ident: tf.Tensor, name: str, value: tf.Tensor
  ) -> tf.Operation:
    file, record = order.split_id(ident)
    place = tf.gather(tf.constant(self.source.files), file)
    return tf.raw_ops.Assert(
      condition=good, data=[f'{what}; file, record, {name}:', place, record, value]
    )

  def _training_image(
    self, encoded: tf.Tensor, position: tf.Tensor, boxes: tf.Tensor | None
  ) -> tuple[tf.Tensor, int | tf.Tensor]:
    def seed(use: str) -> tf.Tensor:
      return self._sample_seed(use, position)

    window = self._crop(encoded, lambda shape: augment.random_window(shape, seed('crop'), boxes))
    size = self._size_at(position)
    resize = augment.resize_antialiased if self._antialias else augment.resize
    image = augment.flip(resize(window, size), seed('flip'))
    if self._distort_colors:
      image = augment.distort_colors(image, seed('colors'))
    return image, size

  def _sample_seed(self, use: str, position: tf.Tensor) -> tf.Tensor:
    """int64 [2]: what decides on a sample's 'crop', 'flip' or 'colors'."""
    return tf.stack([order.subseed(self._seed, use), position])

  def _crop(self, encoded: tf.Tensor, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """The window that `choose` makes of an image's shape; see `Source.decode_crop`."""
    return self.source.decode_crop(encoded, choose)

  def _evaluation_image(self, encoded: tf.Tensor) -> tf.Tensor:
    return augment.resize_central_crop(self.source.decode(encoded), self.image_size)

  def _size_at(self, position: tf.Tensor) -> 'int | tf.Tensor':
    """The image size of the batch that holds the sample at `position`."""
    if len(self._sizes) == 1:
      return self.image_size
    begin = position - (position - self._first_sample) % self._size_step
    epochs = tf.constant(list(self._sizes), tf.int64)
    index = tf.searchsorted(epochs, [begin // self.epoch_size], side='right')[0] - 1
    return tf.gather(tf.constant(list(self._sizes.values()), tf.int32), index)

  def explain(self, error: Exception, num_samples: int = 0) -> DataError:
    """Finds the record that made the iterator raise; see `Pipeline.explain`.

    A damaged file is looked for at the byte that TensorFlow names, in every file. Other errors
    are found by going through the stream from `num_samples` on, for at most 8192 samples and
    two minutes.
    """
    if self._skips.error is not None:
      return self._skips.error
    first = max(self._position(num_samples), self._first_sample)
    found = None
    try:
      if isinstance(error, tf.errors.DataLossError):
        found = self.source.find_damage(error)
      if found is None:
        found = faults.find_bad_sample(
          lambda skipped: self._samples(first + skipped),
          self._decoded,
          lambda sample: self._describe(int(sample[1]), sample[2].numpy()),
        )
    except DataError as culprit:
      return culprit
    except faults.ERRORS as another:
      found = f'searching failed as well: {base.first_line(another)}'
    return DataError(f'failed after {first} samples: {base.first_line(error)} ({found})')

  def _describe(self, ident: int, item: bytes) -> DataError:
    """The error that names an undecoded sample and what is wrong with it."""
    file, record = ident >> 32, ident & 0xFFFFFFFF
    found = faults.examine(self.source, file, record, self._demands, item)
    place = self.source.describe(file, record)
    return found or DataError(f'{place}: its window of the image cannot be decoded')


_APART = 1_000_000_007  # positions between two views of a sample

_DEFAULTS: dict[str, Any] = {'num_shards': 1, 'shard_index': 0, 'shard_by_file': 0, 'skipped': 0}


def _sizes(image_size: int | Mapping[int, int]) -> dict[int, int]:
  """Epoch -> size from there on, sorted, from epoch 0 on."""
  fix = 'give height and width in pixels'
  if not isinstance(image_size, Mapping):
    return {0: base.positive('image_size', image_size, fix)}
  sizes = {
    base.at_least(0, 'image_size', epoch, 'epochs are numbered from 0'): base.positive(
      'image_size', size, fix
    )
    for epoch, size in sorted(image_size.items())
  }
  if 0 not in sizes:
    raise UsageError(f'image_size={dict(image_size)}: say which size epoch 0 has')
  return sizes
