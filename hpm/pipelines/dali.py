"""Training and evaluation batches of any source, decoded and resized by NVIDIA DALI.

The same batches as `tfdata`'s, in the same order: records are read (checksums verified), parsed and
checked by the same code, and the same stateless sampler draws windows and flips. They go into DALI
with the encoded image, and DALI does the expensive rest: decode the window, resize, flip, change
type and layout. Its own reader is not used, because it verifies no checksum, reads a missing
feature as whatever is in memory, has an order and shards of its own, and lets batches run over the
end of an epoch; and with its own random crop no pixel could be compared. Reading and packing cost
about a tenth of the decoding.

DALI's results equal tf.data's: windows are decoded to the same pixels, and what comes of them
differs by one level where a float32 sum lies on the edge of rounding: of photographs in at most a
few of ten thousand values. (Only with `antialias` do borders of training images differ: DALI
repeats the last pixel where the filter reaches beyond the window, TensorFlow weighs the pixels that
are there.) Images that aren't JPEGs are decoded by TensorFlow, and handed to DALI without loss; of
indexed JPEGs, DALI gets the segments that the window needs.

Batches come into TensorFlow through DALI's plugin for it, as a dataset that feeds itself from
tf.data without Python; and where the plugin isn't installed, through Python.
"""

from collections.abc import Iterator
import functools
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import errors
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, dali_graph, faults, indexed, sources, tfdata

__all__ = ['BRIDGES', 'DaliPipeline', 'has_plugin']

BRIDGES = ('plugin', 'python')

# Options of tfdata's that have no counterpart in DALI with the same pixels.
_ABSENT = ('distort_colors', 'size_step')
_AHEAD = 2  # batches that DALI works on, beside those that are kept ready


class DaliPipeline(tfdata.TfDataPipeline):
  """Batches of a source, made by DALI; all that isn't said here is as for `tfdata`.

  `bad_records` other than 'fail' decodes each image twice, by TensorFlow to learn whether it can
  be decoded: a batch that DALI fails in is lost as a whole.

  Args:
    source: where undecoded samples come from.
    device_id: GPU whose decoder and operators DALI uses: batches are made there and stay there.
      Give each GPU a pipeline and a shard of its own (num_shards, shard_index). None: CPU
      operators, with or without a GPU in the machine.
    dtype: 'uint8', or 'float16' or 'float32': then normalised to -1 .. 1 already.
    data_format: 'NHWC' or 'NCHW', the layout of the images.
    bridge: 'plugin' or 'python', how batches come into TensorFlow; None: by the plugin if it is
      installed.
    **options: those of `tfdata`, without distort_colors and with one image_size.

  Raises:
    UsageError: DALI or, if asked for, its plugin is not installed; DALI refuses the pipeline; an
      option out of range.
    DataError: as for `tfdata`.
  """

  def __init__(
    self,
    source: sources.Source,
    *,
    device_id: int | None = None,
    dtype: str = 'uint8',
    data_format: str = 'NHWC',
    bridge: str | None = None,
    **options: Any,
  ):
    dali_graph.require()
    if isinstance(options.get('image_size', 0), dict):
      raise UsageError(
        f"image_size={options['image_size']}: DALI's graph has one size; give one, or use the "
        'tfdata pipeline'
      )
    if bridge is not None and bridge not in BRIDGES:
      raise errors.unknown('bridge', bridge, BRIDGES)
    if bridge == 'plugin' and not has_plugin():
      raise UsageError(
        "bridge='plugin': DALI's plugin for this TensorFlow is not installed: "
        "make dali, or bridge='python'"
      )
    super().__init__(source, **options)
    self.bridge = bridge or ('plugin' if has_plugin() else 'python')
    self._device_id, self._dtype, self._data_format = device_id, dtype, data_format
    if device_id is not None:
      self._check_gpu()
    # Whatever DALI refuses, it refuses now: within TensorFlow's dataset it would end the process.
    self._graph(self.batch_size)

  def _check_gpu(self) -> None:
    if self.bridge == 'python':
      raise UsageError(
        f"device_id={self._device_id} needs DALI's plugin for TensorFlow (make dali): through "
        'Python, batches would go back to the host; leave device_id out to use the CPU'
      )
    if self._num_epochs is not None:
      raise UsageError(
        f'device_id={self._device_id} with num_epochs={self._num_epochs}: on a GPU nothing can '
        "cut a last batch to its size; train without end, or leave device_id out to use DALI's "
        'CPU operators'
      )

  def dataset(self) -> tf.data.Dataset:
    """(images, int32 [B]), and int64 [B] ids if asked for, from the position on.

    Images are [B, H, W, 3] or [B, 3, H, W], in the type asked for.
    """
    with tf.device('/CPU:0'):
      if self.bridge == 'plugin':
        batches = self._through_plugin(self._first_sample)
        if self._device_id is not None:
          return batches  # TensorFlow has no kernels to change data sets on a GPU
      else:
        batches = self._through_python(self._first_sample)
      if self._num_epochs is None:
        batches = batches.apply(
          tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )
      options = tf.data.Options()
      options.deterministic = True
      options.autotune.enabled = False
      return batches.prefetch(self._prefetch).with_options(options)

  def _packed(self, first: int) -> tf.data.Dataset:
    """Packed samples ((uint8 [N],), see `dali_graph`) from position `first` on."""
    return super()._decoded(self._samples(first))

  def windows(self, num_samples: int) -> list[tuple[int, ...]]:
    """(top, left, height, width) that DALI decodes of each of the next samples.

    Pixels of what DALI is handed: of the whole image, unless it is handed a part of it (see the
    module).
    """
    with tf.device('/CPU:0'):
      packed = self._packed(self._first_sample).take(num_samples)
    headers = (sample.numpy()[: dali_graph.HEADER_BYTES] for (sample,) in packed)
    return [tuple(header.view(np.int64)[:4].tolist()) for header in headers]

  def _through_plugin(self, first: int) -> tf.data.Dataset:
    from nvidia.dali.plugin import tf as plugin

    packed, endless = self._packed(first), self._num_epochs is None
    if not endless:
      # The plugin leaves a last batch out that isn't full. What is too much of this padding, it
      # leaves out as well.
      padding = tf.data.Dataset.from_tensors((self._padding(),))
      packed = packed.concatenate(padding.repeat(self.batch_size - 1))
    packed = packed.prefetch(self.batch_size)
    device = '/CPU:0' if self._device_id is None else f'/GPU:{self._device_id}'
    if self._device_id is not None:
      # The plugin takes its input on its own device. DALI copies the bytes back to where its
      # decoder wants them; they are a tenth of the pixels.
      packed = packed.apply(tf.data.experimental.copy_to_device(device))
    names = self._delivered() + (() if endless else ('valid',))
    specs = self._specs(self.batch_size)
    with tf.device(device):
      batches = plugin.experimental.DALIDatasetWithInputs(
        self._graph(self.batch_size, names),
        input_datasets={dali_graph.INPUT: plugin.experimental.Input(packed, batch=False)},
        batch_size=self.batch_size,
        num_threads=self._num_parallel_calls,
        device_id=self._device_id,
        prefetch_queue_depth=_AHEAD,
        output_dtypes=tuple(specs[name].dtype for name in names),
        output_shapes=tuple(specs[name].shape for name in names),
      )
    if endless:
      return batches

    def trim(*parts: tf.Tensor) -> tuple[tf.Tensor, ...]:
      count = tf.reduce_sum(parts[-1])
      return tuple(part[:count] for part in parts[:-1])

    # The plugin says that its data never end; a filter makes that unknown.
    return batches.map(trim).filter(lambda _, labels, *ids: tf.size(labels) > 0)

  def _through_python(self, first: int) -> tf.data.Dataset:
    names = self._delivered()

    def batches() -> Iterator[tuple[Any, ...]]:
      feed = self._feed(first)
      graph = self._graph(self.batch_size, names, feed=lambda: next(feed))
      while True:
        try:
          results = graph.run()
        except StopIteration:
          return
        # DALI uses its memory again, and TensorFlow keeps what it is given without a copy.
        yield tuple(np.array(result.as_tensor()) for result in results)

    specs = self._specs(self.batch_size if self._num_epochs is None else None)
    return tf.data.Dataset.from_generator(
      batches, output_signature=tuple(specs[name] for name in names)
    )

  def _feed(self, first: int) -> Iterator[list[np.ndarray]]:
    """Batches of packed samples for `Pipeline.run`, from position `first` on."""
    endless = self._num_epochs is None
    with tf.device('/CPU:0'):
      batches = self._packed(first).ragged_batch(self.batch_size, drop_remainder=endless)
      batches = batches.prefetch(1)
    for (batch,) in batches:
      yield np.split(batch.flat_values.numpy(), batch.row_splits.numpy()[1:-1])

  def _delivered(self) -> tuple[str, ...]:
    return ('images', 'labels', 'ids') if self._with_ids else ('images', 'labels')

  def _specs(self, batch_size: int | None) -> dict[str, tf.TensorSpec]:
    sides = [self.image_size, self.image_size]
    shape = [*sides, 3] if self._data_format == 'NHWC' else [3, *sides]
    return {
      'images': tf.TensorSpec([batch_size, *shape], tf.as_dtype(self._dtype)),
      'labels': tf.TensorSpec([batch_size], tf.int32),
      'ids': tf.TensorSpec([batch_size], tf.int64),
      'valid': tf.TensorSpec([batch_size], tf.int64),
    }

  def _graph(
    self, batch_size: int, deliver: tuple[str, ...] = ('images', 'labels'), **options: Any
  ) -> Any:
    return dali_graph.build(
      training=self._training,
      image_size=self.image_size,
      batch_size=batch_size,
      num_threads=self._num_parallel_calls,
      antialias=self._antialias,
      dtype=self._dtype,
      data_format=self._data_format,
      device_id=self._device_id,
      deliver=deliver,
      **{'prefetch': _AHEAD, **options},
    )

  def _decode(self, position: tf.Tensor, ident: tf.Tensor, item: tf.Tensor) -> tuple:
    """A record as a packed sample, (uint8 [N],)."""
    sample = self.source.load(ident, item, self._use_bbox and self._training)
    label = self._checked_label(sample.label, ident)
    encoded = self._checked_size(sample.encoded, ident)

    def place(shape: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      return self._place(shape, position, sample.boxes)

    def plain() -> tuple[tf.Tensor, ...]:
      # Where bad records are skipped it takes TensorFlow's decoder to find them.
      shape = augment.jpeg_shape(encoded) if self._strict else tf.shape(augment.decode(encoded))
      return encoded, *place(shape)

    def cut() -> tuple[tf.Tensor, ...]:
      window, region = place(indexed.image_shape(encoded))
      jpeg, origin = indexed.assemble(encoded, window)
      return jpeg, window - tf.concat([origin, [0, 0]], 0), region

    def other() -> tuple[tf.Tensor, ...]:
      whole = self.source.decode(encoded)
      window, region = place(tf.shape(whole))
      png = tf.io.encode_png(augment.window_of(whole, window), compression=0)
      return png, window * [0, 0, 1, 1], region

    def jpeg() -> tuple[tf.Tensor, ...]:
      if not self._strict:
        return plain()
      return tf.cond(indexed.has_index(encoded), cut, plain)

    if type(self.source).decode is sources.Source.decode:
      encoded, window, region = tf.cond(augment.is_jpeg(encoded), jpeg, other)
    else:
      encoded, window, region = other()
    flip = augment.flips(self._sample_seed('flip', position)) if self._training else [0]
    return (_pack(encoded, window, region, flip, label, ident, 1),)

  def _place(
    self, shape: tf.Tensor, position: tf.Tensor, boxes: tf.Tensor | None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """What is seen of an image of `shape`: the window and region of `dali_graph`'s header."""
    if self._training:
      window = augment.random_window(shape, self._sample_seed('crop', position), boxes)
      return window, tf.zeros([4])
    window = augment.central_source(shape, self.image_size)
    resized, offset = augment.central_window(shape, self.image_size)
    step = tf.cast(shape[:2], tf.float32) / tf.cast(resized, tf.float32)
    corners = tf.cast(tf.stack([offset, offset + self.image_size]), tf.float32) * step
    return window, tf.reshape(corners - tf.cast(window[:2], tf.float32), [4])

  def _padding(self) -> tf.Tensor:
    """A packed sample that is trimmed away again."""
    image = tf.io.encode_png(tf.zeros([1, 1, 3], tf.uint8))
    return _pack(image, [0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0], [0], 0, -1, 0)

  def _decoded(self, samples: tf.data.Dataset) -> Any:
    """Decodes one sample after the other, for `explain`."""
    packed = super()._decoded(samples)

    def one_by_one() -> Iterator[None]:
      for (sample,) in packed:
        one = [[sample.numpy()]]
        graph = trial()
        try:
          graph.feed_input(dali_graph.INPUT, one.pop())
          graph.run()
        except RuntimeError as error:
          trial.cache_clear()
          raise tf.errors.InvalidArgumentError(None, None, _reason(error)) from error
        yield

    @functools.cache
    def trial() -> Any:
      return self._graph(1, prefetch=1)

    return one_by_one()

  def explain(self, error: Exception, num_samples: int = 0) -> DataError:
    text = str(error)
    if 'DataLossError' in text:  # on its way through Python it lost its type
      error = tf.errors.DataLossError(None, None, text)
    elif 'encountered:' in text:
      error = tf.errors.InvalidArgumentError(None, None, _reason(error))
    return super().explain(error, num_samples)

  def _describe(self, ident: int, item: bytes) -> DataError:
    file, record = ident >> 32, ident & 0xFFFFFFFF
    found = faults.examine(self.source, file, record, self._demands, item)
    place = self.source.describe(file, record)
    return found or DataError(f'{place}: DALI cannot decode its image: {self.source.remedy}')


def _options() -> inspect.Signature:
  """The options of this pipeline: tfdata's, less what DALI hasn't got, and its own."""
  own = inspect.signature(DaliPipeline.__init__).parameters
  shared = inspect.signature(tfdata.TfDataPipeline).parameters
  merged = {name: p for name, p in shared.items() if name not in _ABSENT}
  merged |= {name: p for name, p in own.items() if p.kind is p.KEYWORD_ONLY}
  return inspect.Signature(list(merged.values()))


DaliPipeline.__signature__ = _options()  # type: ignore[attr-defined]


@functools.cache
def has_plugin() -> bool:
  """Whether DALI's plugin is installed and made for this TensorFlow."""
  try:
    from nvidia.dali.plugin import tf as plugin
  except (ImportError, tf.errors.OpError):
    return False
  return hasattr(plugin, 'experimental')


def _pack(
  encoded: tf.Tensor, window: Any, region: Any, flip: Any, label: Any, ident: Any, valid: int
) -> tf.Tensor:
  """A packed sample, uint8 [N], of string [] and what `dali_graph` says of its header."""
  whole = [tf.cast(part, tf.int64) for part in (window, flip, [label], [ident], [valid])]
  region = tf.bitcast(tf.cast(region, tf.float64), tf.int64)
  header = tf.bitcast(tf.concat([whole[0], region, *whole[1:]], 0), tf.uint8)
  front = tf.reshape(header, [dali_graph.HEADER_BYTES])
  return tf.concat([front, tf.io.decode_raw(encoded, tf.uint8)], 0)


def _reason(error: Exception) -> str:
  """DALI's own words in one line: what stands behind 'encountered:', if anything does."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  if 'encountered:' in lines:
    lines = lines[lines.index('encountered:') + 1 :]
  return lines[0] if lines else type(error).__name__
