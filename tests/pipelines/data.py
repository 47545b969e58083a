"""Small real images and shards for the tests of the pipelines."""

from collections.abc import Sequence
import functools
import io
import os

import numpy as np
from PIL import Image
import skimage

from hpm.pipelines import records


@functools.cache
def photograph(name: str = 'astronaut.png') -> Image.Image:
  """A photograph that scikit-image carries, RGB."""
  path = os.path.join(os.path.dirname(skimage.__file__), 'data', name)
  with Image.open(path) as image:
    return image.convert('RGB')


def image_bytes(
  width: int = 120,
  height: int = 90,
  *,
  form: str = 'JPEG',
  mode: str = 'RGB',
  name: str = 'astronaut.png',
  **options: object,
) -> bytes:
  """An encoded image, shrunk from a photograph."""
  image = photograph(name).resize((width, height)).convert(mode)
  buffer = io.BytesIO()
  image.save(buffer, form, **options)
  return buffer.getvalue()


def record(
  encoded: bytes | None = None, label: int | None = 1, filename: str = 'n01440764_7.JPEG'
) -> bytes:
  """A serialised example; None leaves a feature out, except that an image is made."""
  features: dict[str, object] = {'image/filename': filename.encode()}
  if label is not None:
    features['image/class/label'] = label
  features['image/encoded'] = image_bytes() if encoded is None else encoded
  return records.encode_example(features)


def write_shards(
  directory: os.PathLike | str, shards: Sequence[Sequence[bytes]], split: str = 'train'
) -> str:
  """Writes records as `split-*-of-*`; returns the directory."""
  os.makedirs(directory, exist_ok=True)
  for index, contents in enumerate(shards):
    path = os.path.join(directory, f'{split}-{index:05d}-of-{len(shards):05d}')
    records.write_records(path, contents)
  return str(directory)


def flip_byte(path: str, offset: int) -> None:
  """Damages one byte of a file."""
  with open(path, 'r+b') as file:
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1]))


def collect(pipeline, num_batches: int | None = None) -> list[np.ndarray]:
  """The components of a pipeline's batches, concatenated."""
  dataset = pipeline.dataset()
  if num_batches is not None:
    dataset = dataset.take(num_batches)
  batches = [[part.numpy() for part in batch] for batch in dataset]
  return [np.concatenate(parts) for parts in zip(*batches)]
