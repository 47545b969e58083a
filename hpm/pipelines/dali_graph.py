"""What NVIDIA DALI computes of a batch: decode, resize, flip, and the type and layout asked for.

A graph takes packed samples: a header of `HEADER_BYTES`, and an encoded image behind it. All that
is random or arithmetic (order, windows, flips) comes with the header, from the same code as for
tf.data, so that the pixels are the same as well.

DALI is imported when a graph is made, and not before.
"""

from collections.abc import Callable, Sequence
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from hpm import errors
from hpm.errors import UsageError

if TYPE_CHECKING:
  from nvidia.dali.pipeline import Pipeline

__all__ = [
  'DTYPES',
  'HEADER_BYTES',
  'INPUT',
  'INSTALL',
  'LAYOUTS',
  'build',
  'outputs',
  'require',
]

INSTALL = 'pip install nvidia-dali-cuda120==2.4.0'
DTYPES = ('uint8', 'float16', 'float32')
LAYOUTS = ('NHWC', 'NCHW')

# Eight bytes each:
#   window   4 int64: top, left, height, width of the part to decode, pixels of the encoded image
#   region   4 float64: evaluation's crop, in pixels of the window: top, left, bottom, right
#   flip     int64, 1 to exchange left and right
#   label    int64
#   id       int64
#   valid    int64, 0 for what pads a last batch
HEADER_BYTES = 96
INPUT = 'samples'


def require() -> None:
  """Raises a UsageError with the command that installs DALI, if it is absent; imports nothing."""
  try:
    found = importlib.util.find_spec('nvidia.dali') is not None
  except ModuleNotFoundError:
    found = False
  if not found:
    raise UsageError(f'NVIDIA DALI is not installed: {INSTALL} (in a checkout: make dali)')


def outputs(
  samples: Any,
  *,
  training: bool,
  image_size: int,
  antialias: bool,
  dtype: str,
  data_format: str,
  on_gpu: bool,
) -> dict[str, Any]:
  """What a graph can deliver of packed samples; for use where one is defined.

  On a GPU the image is decoded in the `mixed` way, which takes its bytes on the CPU, and
  everything behind that runs on the GPU, where all outputs end.

  Returns:
    images: in the type and layout asked for.
    labels: int32 [].
    ids: int64 [].
    valid: int64 [], 0 for padding.
  """
  from nvidia.dali import fn, types

  header = fn.reinterpret(samples[:HEADER_BYTES], dtype=types.INT64)
  encoded = samples[HEADER_BYTES:]
  top_left = fn.cast(header[0:2], dtype=types.INT32)
  sides = fn.cast(header[2:4], dtype=types.INT32)
  # EXIF rotation is ignored, as TensorFlow does. The default DCT is the accurate one.
  image = fn.decoders.image_slice(
    encoded,
    top_left,
    sides,
    axis_names='HW',
    device='mixed' if on_gpu else 'cpu',
    adjust_orientation=False,
  )
  how: dict[str, Any] = {
    'size': [image_size, image_size],
    'antialias': antialias or not training,
    'interp_type': types.INTERP_TRIANGULAR if antialias or not training else types.INTERP_LINEAR,
  }
  if not training:
    # The filter reaches beyond the region, so the result is that of resizing all and cropping.
    region = fn.cast(fn.reinterpret(header[4:8], dtype=types.FLOAT64), dtype=types.FLOAT)
    how |= {'roi_start': region[0:2], 'roi_end': region[2:4]}
  image = fn.resize(image, **how)
  as_is = dtype == 'uint8'
  image = fn.crop_mirror_normalize(
    image,
    mirror=fn.cast(header[8], dtype=types.INT32),
    dtype={'uint8': types.UINT8, 'float16': types.FLOAT16, 'float32': types.FLOAT}[dtype],
    output_layout={'NHWC': 'HWC', 'NCHW': 'CHW'}[data_format],
    mean=[0.0 if as_is else 127.5],
    std=[1.0 if as_is else 127.5],
  )
  numbers = {
    'labels': fn.cast(header[9], dtype=types.INT32),
    'ids': header[10],
    'valid': header[11],
  }
  if on_gpu:
    numbers = {name: number.gpu() for name, number in numbers.items()}
  return {'images': image, **numbers}


def build(
  *,
  training: bool,
  image_size: int,
  batch_size: int,
  num_threads: int,
  antialias: bool = False,
  dtype: str = 'uint8',
  data_format: str = 'NHWC',
  device_id: int | None = None,
  prefetch: int = 2,
  deliver: Sequence[str] = ('images', 'labels', 'ids', 'valid'),
  feed: Callable[[], list[np.ndarray]] | None = None,
) -> 'Pipeline':
  """A built pipeline of DALI's from packed samples to what `outputs` says.

  Args:
    training: crop the window, resize, flip; False: resize, central crop.
    image_size: pixels, height and width of the result.
    batch_size: the largest batch.
    num_threads: that decode and resize.
    antialias: in training; evaluation always is antialiased.
    dtype: 'uint8', or 'float16' and 'float32' in -1 .. 1, which is what
      `hpm.pipelines.normalize` gives.
    data_format: 'NHWC' or 'NCHW'.
    device_id: GPU whose decoder and operators are used; None: CPU operators, with or without one.
    prefetch: batches that DALI works on ahead.
    deliver: which of `outputs`, in this order.
    feed: () -> a batch of packed samples, StopIteration at the end; for `run()`. None: the samples
      come from outside, under the name of `INPUT`.

  Raises:
    UsageError: DALI is absent, a dtype or layout that isn't there, or DALI refuses the graph, as
      it does for a GPU that isn't there.
  """
  require()
  if dtype not in DTYPES:
    raise errors.unknown('dtype', dtype, DTYPES)
  if data_format not in LAYOUTS:
    raise errors.unknown('data_format', data_format, LAYOUTS)
  from nvidia.dali import fn, pipeline, types

  try:
    graph = pipeline.Pipeline(
      batch_size=batch_size,
      num_threads=num_threads,
      device_id=device_id,
      prefetch_queue_depth=prefetch,
    )
    with graph:
      source: dict[str, Any] = {} if feed is None else {'source': feed, 'batch': True}
      samples = fn.external_source(name=INPUT, dtype=types.UINT8, ndim=1, **source)
      results = outputs(
        samples,
        training=training,
        image_size=image_size,
        antialias=antialias,
        dtype=dtype,
        data_format=data_format,
        on_gpu=device_id is not None,
      )
    graph.set_outputs(*(results[name] for name in deliver))
    graph.build()
  except RuntimeError as error:  # here it is an exception; inside DALIDataset it ends the process
    where = '' if device_id is None else f' with device_id={device_id}'
    reason = str(error).strip().splitlines()[0]
    fix = 'leave device_id out to use the CPU' if device_id is not None else f'check: {INSTALL}'
    raise UsageError(f'DALI refuses the pipeline{where} ({reason}): {fix}') from error
  return graph
