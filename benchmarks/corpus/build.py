"""Builds the corpus: draws sizes, cuts photographs, adds grain, writes folders and TFRecords."""

from collections.abc import Sequence
import os
from pathlib import Path
import random
import shutil
import tempfile
from typing import Any, NamedTuple

import numpy as np

from benchmarks.corpus import photographs
from hpm.errors import UsageError
from hpm.pipelines import records

__all__ = ['Entry', 'build', 'cut']

SEED = 20261130
CLASSES = 50
SHARDS = 8
SHARDS_SEED = 1

# Shares of ImageNet's usual sizes, cumulative; what is left has a long side that is drawn.
_USUAL = ((0.42, (500, 375)), (0.53, (375, 500)), (0.65, (500, 333)), (0.69, (333, 500)))
_SQUARE = (0.71, (500, 500))
_SMALL, _MEDIUM = 0.84, 0.962  # cumulative as well
_ASPECTS = (4 / 3, 3 / 4, 1.5, 1 / 1.5, 1.0, 16 / 9, 1.2)
_LARGE = (1024, 1024, 1024, 1280, 1600, 2048, 2592)
_MIN_SIDE = 64
_LARGE_PIXELS = 7e5  # above, files come from cameras: less grain, more compression


class Entry(NamedTuple):
  """One image of the corpus.

  Attributes:
    path: of its file.
    label: from 1 on.
    box: (xmin, ymin, xmax, ymax) in 0 .. 1, or None.
    grey: whether it has one channel.
  """

  path: Path
  label: int
  box: tuple[float, float, float, float] | None
  grey: bool


def build(out: str, num_images: int = 1000) -> str:
  """Builds the corpus, or leaves it as it is if it is there; returns its directory of TFRecords.

  Args:
    out: a directory, which appears when everything is written.
    num_images: how many.

  Raises:
    UsageError: `out` holds something else.
    DataError: photographs that can't be had.
  """
  target = Path(out).resolve()
  shards = target / 'tfrecord'
  if shards.is_dir():
    return str(shards)
  if target.exists():
    raise UsageError(f'{target} exists and holds no corpus: give another directory')
  target.parent.mkdir(parents=True, exist_ok=True)
  building = Path(tempfile.mkdtemp(prefix=f'.{target.name}-', dir=target.parent))
  try:
    with tempfile.TemporaryDirectory() as unpacked:
      sources = photographs.download(Path(unpacked)) + photographs.installed()
      entries = cut(sources, building / 'train', num_images)
    _write_shards(entries, building / 'tfrecord')
    building.chmod(0o755)
    building.rename(target)
  except BaseException:
    shutil.rmtree(building, ignore_errors=True)
    raise
  return str(shards)


def cut(sources: Sequence[Path], out: Path, num_images: int) -> list[Entry]:
  """Writes the images into a directory a class; the same calls give the same images."""
  from PIL import Image

  # The order of all draws is part of the corpus: another order is another corpus.
  rng, grain = random.Random(SEED), np.random.default_rng(SEED)
  limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
  try:
    opened = [Image.open(path).convert('RGB') for path in sources]
  finally:
    Image.MAX_IMAGE_PIXELS = limit
  # Photographs rich in texture are drawn more often: ImageNet's files have 4.5 bits a pixel.
  weights = [min(9, max(1.2, _texture(image))) for image in opened]
  entries = []
  for index in range(num_images):
    image = _cut_one(opened, weights, rng)
    width, height = image.size
    large = width * height > _LARGE_PIXELS
    image = _add_grain(image, rng.uniform(0, 2) if large else rng.uniform(3.0, 8.5), grain)
    quality = rng.randint(78, 91) if large else rng.randint(91, 96)
    subsampling = 2 if large or rng.random() < 0.6 else 0
    grey = rng.random() < 0.012
    if grey:
      image = image.convert('L')
    label = 1 + index % CLASSES * (1000 // CLASSES)
    directory = out / f'n{label:08d}'
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f'n{label:08d}_{index}.JPEG'
    image.save(path, 'JPEG', quality=quality, subsampling=subsampling)
    left, right = sorted(rng.uniform(0, 1) for _ in range(2))
    top, bottom = sorted(rng.uniform(0, 1) for _ in range(2))
    has_box = rng.random() < 0.42
    entries.append(Entry(path, label, (left, top, right, bottom) if has_box else None, grey))
  return entries


def _texture(image: Any) -> float:
  from PIL import Image

  small = image.convert('L').resize((600, 400), Image.Resampling.LANCZOS)
  return float(np.abs(np.diff(np.asarray(small, np.float32))).mean())


def _size(rng: random.Random) -> tuple[int, int]:
  """Width and height as ImageNet's images have them."""
  draw = rng.random()
  for share, size in (*_USUAL, _SQUARE):
    if draw < share:
      return size
  aspect = rng.choice(_ASPECTS)
  if draw < _SMALL:
    long = rng.uniform(180, 470)
  elif draw < _MEDIUM:
    long = rng.uniform(470, 720)
  else:
    long = rng.choice(_LARGE)
  width = long if aspect >= 1 else long * aspect
  return max(_MIN_SIDE, int(width)), max(_MIN_SIDE, int(width / aspect))


def _cut_one(opened: Sequence[Any], weights: Sequence[float], rng: random.Random) -> Any:
  """A part of one of the photographs, shrunk to a size that was drawn; PIL RGB."""
  from PIL import Image

  width, height = _size(rng)
  for _ in range(50):
    photograph = opened[rng.choices(range(len(opened)), weights)[0]]
    largest = min(photograph.width / width, photograph.height / height)
    if largest >= 1:
      break
  else:  # none is so large
    width, height = 375, 281
    largest = min(photograph.width / width, photograph.height / height)
  scale = min(largest, rng.uniform(1.0, min(largest, 5.0)) if largest > 1 else 1)
  columns, rows = int(width * scale), int(height * scale)
  left, top = rng.randint(0, photograph.width - columns), rng.randint(0, photograph.height - rows)
  image = photograph.crop((left, top, left + columns, top + rows))
  if (columns, rows) != (width, height):
    image = image.resize((width, height), Image.Resampling.LANCZOS)
  if rng.random() < 0.5:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  return image


def _add_grain(image: Any, sigma: float, grain: np.random.Generator) -> Any:
  """Sensor noise, mostly of brightness."""
  from PIL import Image

  pixels = np.asarray(image, np.float32)
  brightness = grain.normal(0, sigma, pixels.shape[:2])[..., None]
  noise = brightness + grain.normal(0, sigma * 0.5, pixels.shape)
  return Image.fromarray(np.clip(pixels + noise + 0.5, 0, 255).astype(np.uint8))


def _write_shards(entries: Sequence[Entry], out: Path) -> None:
  """Writes ImageNet's TFRecords, shuffled."""
  out.mkdir()
  shuffled = list(entries)
  random.Random(SHARDS_SEED).shuffle(shuffled)
  for shard in range(SHARDS):
    path = str(out / f'train-{shard:05d}-of-{SHARDS:05d}')
    records.write_records(path, map(_example, shuffled[shard::SHARDS]))


def _example(entry: Entry) -> bytes:
  from PIL import Image

  with Image.open(entry.path) as image:
    width, height = image.size
  sides = np.array([] if entry.box is None else [entry.box], np.float32).reshape(-1, 4)
  synset = f'n{entry.label:08d}'.encode()
  return records.encode_example(
    {
      'image/height': height,
      'image/width': width,
      'image/colorspace': b'Grayscale' if entry.grey else b'RGB',
      'image/channels': 1 if entry.grey else 3,
      records.LABEL: entry.label,
      'image/class/synset': synset,
      'image/class/text': b'class ' + synset,
      **{
        f'image/object/bbox/{side}': sides[:, i]
        for i, side in enumerate(('xmin', 'ymin', 'xmax', 'ymax'))
      },
      'image/object/bbox/label': [entry.label] * len(sides),
      'image/format': b'JPEG',
      records.FILENAME: os.path.basename(entry.path).encode(),
      records.ENCODED: entry.path.read_bytes(),
    }
  )
