"""tf.data, NVIDIA DALI and PIL side by side: ids, labels, windows and pixels of the same images.

    python -m hpm.pipelines parity DIR [--source=imagenet] [--split=validation]
        [--num_images=16] [--image_size=224] [--out=parity.png] [--json=parity.json]

Each image goes through training (one random window) and evaluation, in three ways: by the pipelines
`tfdata` and `dali`, and by PIL, which decodes, cuts the same window and resizes in its own way (in
training, where the pipelines don't antialias, the resize is a few lines of NumPy instead). DIR may
be any source's directory: TFRecords, class folders of image files, a prepared TFDS data set.

The table gives mean and greatest difference of grey levels (0-255); the picture shows, for the
images that differ most, the original with the window, the three results, and where the pipelines
differ, 64 times as strong. The exit code is 1 if tf.data and DALI differ by more than a level.
"""

from collections.abc import Sequence
import dataclasses
import io
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

from hpm import pipelines
from hpm.errors import DataError, UsageError
from hpm.pipelines import augment, base, dali_graph, detect, faults, order, show

__all__ = ['Result', 'compare', 'picture', 'table']

_PAIRS = (('tfdata', 'dali'), ('tfdata', 'pil'), ('dali', 'pil'))
_ROWS = 8  # of the picture
_STRONGER = 64


@dataclasses.dataclass
class Result:
  """One image in one mode.

  Attributes:
    mode: 'training' or 'evaluation'.
    id: (index of the file << 32) | record in it.
    place: the record, in words.
    key: what the data set calls the image.
    labels: as `tfdata` and `dali` give them.
    window: what is seen of it, by the sampler: top, left, height, width.
    dali_window: what DALI decodes, of the whole image or of the part of it that DALI was handed.
    differences: 'a-b' -> (mean, greatest), in grey levels.
    images: name -> uint8 [S, S, 3].
    whole: the original, uint8 [H, W, 3].
  """

  mode: str
  id: int
  place: str
  key: str
  labels: tuple[int, int]
  window: tuple[int, ...]
  dali_window: tuple[int, ...]
  differences: dict[str, tuple[float, int]]
  images: dict[str, np.ndarray]
  whole: np.ndarray

  @property
  def agrees(self) -> bool:
    """Same label, size of the window, and no pixel that differs by more than a level."""
    same = self.labels[0] == self.labels[1] and self.window[2:] == self.dali_window[2:]
    return same and self.differences['tfdata-dali'][1] <= 1


def compare(name: str, *, num_images: int = 16, seed: int = 0, **options: Any) -> list[Result]:
  """Both modes of the first images of a data set.

  Args:
    name: of `hpm.pipelines.SOURCES`.
    num_images: how many.
    seed: of order, windows and flips.
    **options: of source and pipelines, such as data_dir, split, image_size.

  Raises:
    UsageError: DALI is absent, or an option that isn't there.
    DataError: fewer images than one, or one that can't be read.
  """
  dali_graph.require()
  num_images = base.positive('num_images', num_images, 'give the images to compare')
  found = []
  for mode in ('training', 'evaluation'):
    found += _compare(
      name,
      mode,
      num_images,
      {'num_epochs': 1, 'with_ids': True, 'seed': seed, 'shuffle_buffer': 256} | options,
    )
  return found


def _compare(name: str, mode: str, num_images: int, options: dict[str, Any]) -> list[Result]:
  options = options | {'training': mode == 'training', 'batch_size': num_images}
  made = {kind: pipelines.create(name, pipeline=kind, **options) for kind in ('tfdata', 'dali')}
  batches: dict[str, list[np.ndarray]] = {}
  for kind, pipeline in made.items():
    try:
      batches[kind] = [part.numpy() for part in next(iter(pipeline.dataset()))]
    except StopIteration:
      raise DataError(f'{name} {options.get("data_dir", "")} yields no image') from None
    except Exception as error:
      raise pipeline.explain(error) from error
  images, labels, ids = batches['tfdata']
  dali_images, dali_labels, dali_ids = batches['dali']
  if not np.array_equal(ids, dali_ids):
    raise DataError(f'tfdata gives the records {ids.tolist()}, but dali {dali_ids.tolist()}')
  dali_windows = made['dali'].windows(len(ids))  # type: ignore[attr-defined]
  source = made['tfdata'].source  # type: ignore[attr-defined]
  results = []
  for i, ident in enumerate(ids.tolist()):
    file, record = ident >> 32, ident & 0xFFFFFFFF
    contents = source.contents(file, record)
    whole = _by_pil(contents.encoded, source)
    size = images.shape[1]
    window, flip = _seen(whole.shape, size, mode, options['seed'], i)
    three = {
      'tfdata': images[i],
      'dali': dali_images[i],
      'pil': _resized(whole, window if mode == 'training' else None, flip, size),
    }
    results.append(
      Result(
        mode=mode,
        id=ident,
        place=source.describe(file, record),
        key=contents.key,
        labels=(int(labels[i]), int(dali_labels[i])),
        window=window,
        dali_window=dali_windows[i],
        differences={f'{a}-{b}': _difference(three[a], three[b]) for a, b in _PAIRS},
        images=three,
        whole=whole,
      )
    )
  return results


def _seen(
  shape: Sequence[int], size: int, mode: str, seed: int, position: int
) -> tuple[tuple[int, ...], bool]:
  """(window, whether it is flipped) of an image of `shape` at a position of the stream."""
  if mode == 'evaluation':
    return tuple(augment.central_source(tf.constant(shape), size).numpy().tolist()), False

  def of(use: str) -> tf.Tensor:
    return tf.constant([order.subseed(seed, use), position], tf.int64)

  window = augment.random_window(tf.constant(shape), of('crop')).numpy().tolist()
  return tuple(window), bool(augment.flips(of('flip')).numpy()[0])


def _difference(one: np.ndarray, other: np.ndarray) -> tuple[float, int]:
  difference = np.abs(one.astype(int) - other)
  return float(difference.mean()), int(difference.max())


def _by_pil(encoded: bytes, source: Any) -> np.ndarray:
  """The whole image, uint8 [H, W, 3], by PIL; by the source where it isn't a file of images."""
  from PIL import Image, UnidentifiedImageError

  try:
    with Image.open(io.BytesIO(encoded)) as image:
      return np.asarray(image.convert('RGB'))
  except UnidentifiedImageError:
    return faults.eagerly(source.decode, encoded).numpy()


def _resized(whole: np.ndarray, window: Sequence[int] | None, flip: bool, size: int) -> np.ndarray:
  """Training of a window, or evaluation (no window): uint8 [size, size, 3]."""
  from PIL import Image

  if window is not None:
    top, left, height, width = window
    image = whole[top : top + height, left : left + width].astype(np.float64)
    for axis, length in enumerate((height, width)):
      # Bilinear between the centres of pixels, the last of which reach to the border.
      place = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
      below = np.floor(place).astype(int)
      above = np.minimum(below + 1, length - 1)
      weight = (place - below).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
      image = image.take(below, axis) * (1 - weight) + image.take(above, axis) * weight
    image = np.rint(image).astype(np.uint8)
    return image[:, ::-1] if flip else image
  # As the pipelines compute: so that a half is rounded to the same side.
  sides = np.asarray(whole.shape[:2], np.float32)
  height, width = np.rint(sides * (np.float32(round(size * 256 / 224)) / sides.min())).astype(int)
  top, left = (height - size) // 2, (width - size) // 2
  resized = Image.fromarray(whole).resize((int(width), int(height)), Image.Resampling.BILINEAR)
  return np.asarray(resized)[top : top + size, left : left + size]


def table(results: Sequence[Result]) -> str:
  """The results as a table, for people."""
  import rich.console
  import rich.table

  console = rich.console.Console(file=io.StringIO(), width=80)
  console.print('Window: top, left, height, width. Differences in grey levels: mean, greatest.')
  for mode, summary in _summary(results).items():
    shown = rich.table.Table(box=None, pad_edge=False)
    for column in (mode, 'label', 'window', *('-'.join(pair) for pair in _PAIRS), ''):
      shown.add_column(column, overflow='fold')
    for result in (result for result in results if result.mode == mode):
      windows = [result.window, result.dali_window]
      if windows[0][2:] == windows[1][2:]:  # of the whole, or of a part that DALI was handed
        windows[1] = windows[0]
      shown.add_row(
        result.key or os.path.basename(result.place),
        _both(result.labels[0], result.labels[1]),
        _both(*(' '.join(map(str, window)) for window in windows)),
        *(f'{mean:.4f} {most}' for mean, most in result.differences.values()),
        'equal' if result.agrees else 'DIFFERS',
      )
    means = (f'{mean:.4f} {most}' for mean, most in summary['pairs'].values())
    shown.add_row(f'{summary["agree"]} of {summary["images"]} agree', '', '', *means, '')
    console.print()
    console.print(shown)
  return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _both(one: object, other: object) -> str:
  """What `tfdata` and `dali` have: once if they agree."""
  return str(one) if one == other else f'{one}, dali {other}'


def _summary(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
  """Mode -> images, those that agree, and for each pair mean and greatest difference."""
  summary = {}
  for mode in dict.fromkeys(result.mode for result in results):
    of_mode = [result for result in results if result.mode == mode]
    pairs = {}
    for pair in of_mode[0].differences:
      means, mosts = zip(*(result.differences[pair] for result in of_mode))
      pairs[pair] = (float(np.mean(means)), max(mosts))
    agree = sum(result.agrees for result in of_mode)
    summary[mode] = {'images': len(of_mode), 'agree': agree, 'pairs': pairs}
  return summary


def picture(results: Sequence[Result], path: str) -> None:
  """Writes a sheet of the images that differ most to a file that PIL can write.

  Raises:
    UsageError: it can not be written there.
  """
  from PIL import Image, ImageDraw

  def strength(result: Result) -> float:
    return result.differences['tfdata-dali'][0]

  chosen: list[Result] = []
  for mode in dict.fromkeys(result.mode for result in results):
    of_mode = [result for result in results if result.mode == mode]
    chosen += sorted(of_mode, key=strength, reverse=True)[: _ROWS // 2]
  side, gap, text = 160, 8, 16
  titles = ('original, window', 'tf.data', 'DALI', 'PIL', f'tf.data - DALI, x{_STRONGER}')
  sheet = Image.new(
    'RGB',
    (gap + len(titles) * (side + gap), gap + text + len(chosen) * (side + text + gap)),
    'white',
  )
  draw = ImageDraw.Draw(sheet)
  for column, title in enumerate(titles):
    draw.text((gap + column * (side + gap), gap // 2), title, fill='black')
  for row, result in enumerate(chosen):
    y = gap + text + row * (side + text + gap)
    original = Image.fromarray(result.whole)
    top, left, height, width = result.window
    thick = max(2, max(original.size) // 100)
    frame = (left, top, left + width - 1, top + height - 1)
    ImageDraw.Draw(original).rectangle(frame, outline='red', width=thick)
    original.thumbnail((side, side))
    one, other = result.images['tfdata'], result.images['dali']
    difference = np.abs(one.astype(int) - other) * _STRONGER
    cells = [np.asarray(original), one, other, result.images['pil'], difference.clip(0, 255)]
    for column, cell in enumerate(cells):
      image = Image.fromarray(np.asarray(cell, np.uint8))
      if column:
        image = image.resize((side, side), Image.Resampling.NEAREST)
      sheet.paste(image, (gap + column * (side + gap), y))
    mean, most = result.differences['tfdata-dali']
    caption = f'{result.mode}, {os.path.basename(result.place)}, label {result.labels[0]}'
    draw.text((gap, y + side), f'{caption}: mean {mean:.5f}, greatest {most}', fill='black')
  try:
    sheet.save(path)
  except (ValueError, OSError) as error:
    raise UsageError(f'{path} cannot be written ({error}): give a name that ends in .png') from None


def add_arguments(parser: Any) -> None:
  """Declares the flags of the command on an argparse parser."""
  parser.add_argument('data_dir', metavar='DIR', help='where the images are')
  detect.add_source(parser)
  parser.add_argument('--split', default='validation', help='train or validation (%(default)s)')
  parser.add_argument('--num_images', type=int, default=16, help='%(default)s')
  parser.add_argument('--image_size', type=int, default=224, help='pixels (%(default)s)')
  parser.add_argument('--num_classes', type=int, default=1000, help='%(default)s')
  parser.add_argument('--seed', type=int, default=0, help='of the windows (%(default)s)')
  parser.add_argument('--out', metavar='FILE', help='the picture, a .png')
  parser.add_argument('--json', metavar='FILE', help='the results, for programs')


def run(args: Any) -> tuple[str, int]:
  """The command; returns what to print, and 1 if the pipelines don't agree."""
  if args.out:
    show.check_name(args.out)
  results = compare(
    args.source or detect.source(args.data_dir),
    num_images=args.num_images,
    seed=args.seed,
    data_dir=args.data_dir,
    split=args.split,
    image_size=args.image_size,
    num_classes=args.num_classes,
  )
  lines = [table(results)]
  if args.json:
    records = [
      {k: v for k, v in vars(result).items() if k not in ('images', 'whole')}
      | {'agrees': result.agrees}
      for result in results
    ]
    with open(args.json, 'w', encoding='utf-8') as file:
      json.dump({'summary': _summary(results), 'results': records}, file, indent=1)
    lines.append(f'wrote {args.json}')
  if args.out:
    picture(results, args.out)
    lines.append(f'wrote {args.out}')
  equal = all(result.agrees for result in results)
  lines += [] if equal else ['tf.data and DALI do not agree']
  return '\n'.join(lines), int(not equal)
