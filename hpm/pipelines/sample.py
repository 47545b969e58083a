"""A small data set of real photographs in ImageNet's layout, without a download.

    python -m hpm.pipelines sample --out DIR [--num_images=640] [--seed=0]

The photographs are those that the packages scikit-image and scikit-learn carry. JPEGs are cut
from them at many places and scales, in sizes as ImageNet has them, with a little sensor grain and
another white balance each, so that their entropy is that of camera files. It proves plumbing and
overfitting, never accuracy.

A class is a kind of subject that several photographs share; of each kind, some photographs serve
for training alone and another for validation alone, so no photograph's pixels are in both (the
two of the stereo pair count as one). A fifth of the images is for validation. The
bounding boxes are drawn at random: they are no annotations. The synsets, n90000001 and up, aren't
WordNet's. The file names end in the photograph's name.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import os
import random
import shutil
import tempfile
from typing import Any

import numpy as np

from hpm import json_file
from hpm.errors import DataError, UsageError
from hpm.pipelines import base, records

__all__ = ['KINDS', 'Kind', 'Sample', 'write_sample']


@dataclasses.dataclass(frozen=True)
class Kind:
  """A class: its name and its photographs, those for training and those for validation."""

  name: str
  train: tuple[str, ...]
  validation: tuple[str, ...]


# The label of KINDS[i] is i + 1.
KINDS = (
  Kind('rough surface', ('brick.png', 'gravel.png'), ('grass.png',)),
  Kind('portrait', ('astronaut.png', 'chelsea.png'), ('camera.png',)),
  Kind('outer space', ('hubble_deep_field.jpg',), ('moon.png',)),
  Kind('medical image', ('retina.jpg', 'ihc.png'), ('cell.png',)),
  Kind('page of text', ('page.png',), ('text.png',)),
  Kind(
    'man-made object', ('coffee.png', 'motorcycle_left.png', 'motorcycle_right.png'), ('coins.png',)
  ),
  Kind('outdoors', ('china.jpg', 'rocket.jpg'), ('flower.jpg',)),
)

# (weight, width, height): near ImageNet's mix, most of whose images have a long side of 500.
_SIZES = (
  (42, 500, 375),
  (11, 375, 500),
  (12, 500, 333),
  (4, 333, 500),
  (3, 500, 500),
  (4, 320, 240),
  (4, 240, 320),
  (4, 256, 256),
  (4, 400, 300),
  (4, 640, 480),
  (3, 480, 640),
  (2, 800, 600),
  (2, 1024, 768),
  (1, 1280, 960),
)
_GREY = 0.03  # share of one-channel JPEGs
_TRAIN_SHARDS, _VALIDATION_SHARDS = 8, 2
_MANIFEST = 'sample.json'
_FORMAT = 2  # to be raised whenever other bytes come from the same options


@dataclasses.dataclass(frozen=True)
class Sample:
  """What a sample data set consists of."""

  directory: str
  num_train: int
  num_validation: int
  num_classes: int
  num_bytes: int
  already_there: bool


def write_sample(out: str, num_images: int = 640, seed: int = 0) -> Sample:
  """Writes the data set; the same options give the same bytes, with the same Pillow.

  Args:
    out: a directory that doesn't exist, is empty, or holds this very sample. It appears when
      everything is written, or not at all.
    num_images: of both splits together, at least 35.
    seed: decides every crop.

  Raises:
    UsageError: too few images, or a directory that holds something else.
    DataError: a package or one of its photographs isn't there.
  """
  minimum = 5 * len(KINDS)
  num_images = base.at_least(
    minimum, 'num_images', num_images, 'every class needs an image in both splits'
  )
  seed = base.integer('seed', seed, 'give any integer')
  out = os.path.abspath(out)
  options = {'format': _FORMAT, 'num_images': num_images, 'seed': seed}
  if os.path.exists(out) and not os.path.isdir(out):
    raise UsageError(f'--out={out} is a file: give a directory')
  if os.path.isdir(out) and os.listdir(out):
    _check_same(out, options)
    return _describe(out, num_images, already_there=True)
  example = functools.partial(
    _example, seed=seed, photographs=_load_photographs(), grain=_grain(seed)
  )
  with _appearing_whole(out) as building:
    shards: dict[str, str] = {}
    for split, count, num_shards in _splits(num_images):
      shards |= _write_split(building, split, count, num_shards, seed, example)
    manifest = options | {'classes': [kind.name for kind in KINDS], 'shards': shards}
    with open(os.path.join(building, _MANIFEST), 'w', encoding='utf-8') as file:
      json.dump(manifest, file, indent=2)
  return _describe(out, num_images, already_there=False)


@contextlib.contextmanager
def _appearing_whole(out: str) -> Iterator[str]:
  """A directory beside `out` that takes its name when all went well, and vanishes if not."""
  try:
    os.makedirs(os.path.dirname(out), exist_ok=True)
  except (FileExistsError, NotADirectoryError) as error:
    raise UsageError(f'--out={out} lies below {error.filename}, which is a file') from None
  building = tempfile.mkdtemp(prefix=f'.{os.path.basename(out)}-', dir=os.path.dirname(out))
  try:
    yield building
    os.chmod(building, 0o755)  # mkdtemp lets nobody else read it
    if os.path.isdir(out):
      os.rmdir(out)  # it is empty
    os.rename(building, out)
  except BaseException:
    shutil.rmtree(building, ignore_errors=True)
    raise


def _splits(num_images: int) -> tuple[tuple[str, int, int], ...]:
  """(split, images, shards) of each."""
  num_validation = num_images // 5
  return (
    ('train', num_images - num_validation, _TRAIN_SHARDS),
    ('validation', num_validation, _VALIDATION_SHARDS),
  )


def _describe(out: str, num_images: int, already_there: bool) -> Sample:
  (_, num_train, _), (_, num_validation, _) = _splits(num_images)
  size = sum(os.path.getsize(os.path.join(out, name)) for name in os.listdir(out))
  return Sample(out, num_train, num_validation, len(KINDS), size, already_there)


def _check_same(out: str, options: dict[str, int]) -> None:
  """Refuses a directory that holds anything but the sample of these options, complete."""
  try:
    manifest = json_file.read(os.path.join(out, _MANIFEST))
    shards = dict(manifest['shards'])
  except (OSError, ValueError, KeyError, TypeError):
    raise UsageError(
      f'--out={out} is not empty and holds no sample data set: give another directory'
    ) from None
  other = [
    f'{name}={manifest.get(name)}' for name in options if manifest.get(name) != options[name]
  ]
  if other:
    raise UsageError(
      f'--out={out} holds another sample ({", ".join(other)}): give another '
      'directory, or remove this one'
    )
  for name, digest in shards.items():
    path = os.path.join(out, name)
    if not os.path.exists(path) or _digest(path) != digest:
      raise UsageError(f'{path} is missing or was changed: remove {out} and write it again')


def _digest(path: str) -> str:
  """The SHA-256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _load_photographs() -> dict[str, Any]:
  """File name -> PIL image, RGB; only files that the installed packages carry."""
  try:
    from PIL import Image
  except ImportError:
    raise DataError('the sample needs Pillow: pip install pillow') from None
  roots = [
    _package_dir('skimage', 'data', 'scikit-image'),
    _package_dir('sklearn', 'datasets/images', 'scikit-learn'),
  ]
  photographs = {}
  for name in (name for kind in KINDS for name in kind.train + kind.validation):
    paths = [os.path.join(root, name) for root in roots]
    path = next((path for path in paths if os.path.exists(path)), None)
    if path is None:
      raise DataError(
        f'the installed packages carry no {name}: '
        'pip install scikit-image==0.26.0 scikit-learn==1.9.1'
      )
    with Image.open(path) as image:
      photographs[name] = image.convert('RGB')
  return photographs


def _package_dir(module: str, below: str, distribution: str) -> str:
  # find_spec looks for the files without importing the package.
  spec = importlib.util.find_spec(module)
  if spec is None or not spec.submodule_search_locations:
    raise DataError(
      f'the sample is cut from photographs inside {distribution}, which is not '
      f'installed: pip install {distribution}'
    )
  return os.path.join(spec.submodule_search_locations[0], *below.split('/'))


def _write_split(
  out: str,
  split: str,
  count: int,
  num_shards: int,
  seed: int,
  example: Callable[[str, int], bytes],
) -> dict[str, str]:
  """Writes one split's shards of `example(split, index)`; returns file name -> SHA-256."""
  order = list(range(count))
  random.Random(f'{seed}/{split}/order').shuffle(order)  # so that a shard holds all classes
  names = [f'{split}-{shard:05d}-of-{num_shards:05d}' for shard in range(num_shards)]
  bounds = [count * shard // num_shards for shard in range(num_shards + 1)]

  # Threads do: Pillow and NumPy let go of the interpreter's lock.
  with concurrent.futures.ThreadPoolExecutor(base.num_cores()) as pool:
    for name, start, end in zip(names, bounds, bounds[1:], strict=False):
      contents = pool.map(functools.partial(example, split), order[start:end])
      records.write_records(os.path.join(out, name), contents)
  return {name: _digest(os.path.join(out, name)) for name in names}


def _example(
  split: str, index: int, *, seed: int, photographs: dict[str, Any], grain: np.ndarray
) -> bytes:
  """One record, decided by split, index and seed alone."""
  rng = random.Random(f'{seed}/{split}/{index}')
  label = 1 + index % len(KINDS)
  kind = KINDS[label - 1]
  name = rng.choice(kind.train if split == 'train' else kind.validation)
  image = _cut(photographs[name], rng, grain)
  grey = rng.random() < _GREY
  if grey:
    image = image.convert('L')
  buffer = io.BytesIO()
  large = image.width * image.height > 500_000
  # 4:2:0 and 4:4:4; large camera files are compressed more.
  image.save(
    buffer,
    'JPEG',
    quality=rng.randint(80, 90) if large else rng.randint(90, 95),
    subsampling=2 if rng.random() < 0.6 else 0,
  )
  boxes = np.asarray(list(_boxes(rng)), np.float32).reshape(-1, 4)
  synset = f'n{90_000_000 + label:08d}'
  filename = f'{synset}_{index}_{os.path.splitext(name)[0]}.JPEG'
  return records.encode_example(
    {
      'image/height': image.height,
      'image/width': image.width,
      'image/colorspace': b'Grayscale' if grey else b'RGB',
      'image/channels': 1 if grey else 3,
      'image/class/label': label,
      'image/class/synset': synset.encode(),
      'image/class/text': kind.name.encode(),
      'image/object/bbox/xmin': boxes[:, 0],
      'image/object/bbox/ymin': boxes[:, 1],
      'image/object/bbox/xmax': boxes[:, 2],
      'image/object/bbox/ymax': boxes[:, 3],
      'image/object/bbox/label': [label] * len(boxes),
      'image/format': b'JPEG',
      'image/filename': filename.encode(),
      'image/encoded': buffer.getvalue(),
    }
  )


def _cut(photograph: Any, rng: random.Random, grain: np.ndarray) -> Any:
  """A crop of random place and scale, in one of ImageNet's sizes; PIL RGB."""
  from PIL import Image

  _, width, height = rng.choices(_SIZES, [weight for weight, _, _ in _SIZES])[0]
  scale = rng.uniform(0.45, 1.0) * min(photograph.width / width, photograph.height / height)
  left = rng.uniform(0, photograph.width - scale * width)
  top = rng.uniform(0, photograph.height - scale * height)
  image = photograph.resize(
    (width, height),
    Image.Resampling.BICUBIC,
    box=(left, top, left + scale * width, top + scale * height),
  )
  if rng.random() < 0.5:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  gains = [rng.uniform(0.9, 1.1) for _ in range(3)]
  image = image.point([min(255, round(level * gain)) for gain in gains for level in range(256)])
  y, x = rng.randrange(grain.shape[0] - height), rng.randrange(grain.shape[1] - width)
  pixels = np.asarray(image, np.int16) + grain[y : y + height, x : x + width]
  return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _grain(seed: int) -> np.ndarray:
  """Sensor grain, mostly of brightness: int8 [1408, 1408, 3]. Enlarged crops have none left."""
  rng = np.random.default_rng([seed & 0xFFFFFFFF, 0x6772])
  shape = (1408, 1408)
  brightness = rng.standard_normal(shape, np.float32)[..., None] * 5.0
  colour = rng.standard_normal((*shape, 3), np.float32) * 2.5
  return np.rint(np.clip(brightness + colour, -127, 127)).astype(np.int8)


def _boxes(rng: random.Random) -> Iterator[tuple[float, float, float, float]]:
  """No box for six images in ten, as in ImageNet's training set, else one or two."""
  for _ in range(rng.choices((0, 1, 2), (6, 3, 1))[0]):
    x, y = sorted(rng.sample(range(1, 100), 2)), sorted(rng.sample(range(1, 100), 2))
    yield x[0] / 100, y[0] / 100, x[1] / 100, y[1] / 100


def add_arguments(parser: Any) -> None:
  """Declares the flags of the command on an argparse parser."""
  parser.add_argument('--out', required=True, metavar='DIR', help='where the shards go')
  parser.add_argument(
    '--num_images', type=int, default=640, help='of both splits together (default: %(default)s)'
  )
  parser.add_argument('--seed', type=int, default=0, help='decides every crop')


def run(args: Any) -> str:
  """Runs the command with its parsed flags; returns what to print."""
  sample = write_sample(args.out, args.num_images, args.seed)
  verb = 'is already there' if sample.already_there else 'written'
  return (
    f'{sample.directory}: {sample.num_train} training and {sample.num_validation} '
    f'validation images, {sample.num_classes} classes, {sample.num_bytes / 1e6:.1f} MB, '
    f'{verb}'
  )
