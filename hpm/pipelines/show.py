"""Draws a contact sheet of what a model gets: originals with their boxes, and augmented views.

    python -m hpm.pipelines show DIR --out=sheet.png [--source=folder] [--split=train]
        [--num_images=8] [--num_views=5] [--image_size=224] [--use_bbox] [--antialias]
        [--distort_colors] [--seed=0] [--evaluate]

A row is one image: the original, shrunk, with the record's boxes drawn on it; its id, label and
class; then views of it as training makes them in several epochs, or as evaluation makes it.
"""

import io
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hpm import pipelines
from hpm.errors import DataError, UsageError
from hpm.pipelines import base, detect, faults, sources, tfdata

if TYPE_CHECKING:
  from PIL import Image

__all__ = ['check_name', 'sheet']

_MOST_PIXELS = 2**27  # of a sheet: as RGB 400 MB
_GAP = 8
_LINE = 14  # pixels a line of text
_COLOR = (220, 30, 30)


def sheet(
  source: str,
  *,
  options: dict[str, Any],
  num_images: int = 8,
  num_views: int = 5,
  image_size: int = 224,
  **pipeline_options: Any,
) -> 'Image.Image':
  """The contact sheet, as a PIL image.

  Args:
    source: a name of `hpm.pipelines.SOURCES`.
    options: of the source.
    num_images: rows; those that come first in the first epoch.
    num_views: columns of views.
    image_size: of a view, pixels.
    **pipeline_options: of `tfdata`, such as `use_bbox` or `seed`.

  Raises:
    UsageError: a number below 1, or a sheet of too many pixels.
    DataError: Pillow isn't there, or what the pipeline raises.
  """
  try:
    from PIL import Image, ImageDraw
  except ImportError:
    raise DataError('a contact sheet needs Pillow: pip install pillow') from None
  num_images = base.positive('num_images', num_images, 'give rows')
  training = pipeline_options.get('training', True)
  num_views = base.positive('num_views', num_views, 'give columns') if training else 1
  image_size = base.positive('image_size', image_size, 'give height and width in pixels')
  pixels = num_images * (num_views + 1) * image_size**2
  if pixels > _MOST_PIXELS:
    raise UsageError(
      f'{num_images} rows of {num_views} views of {image_size} pixels are {pixels} pixels in all, '
      f'at most {_MOST_PIXELS}: lower one of them'
    )
  made = pipelines.source(source, **options)
  names = made.class_names
  rows = _views(made, num_images, num_views, image_size, pipeline_options)

  height = image_size + 2 * _LINE + _GAP
  width = (num_views + 1) * (image_size + _GAP) + _GAP
  result = Image.new('RGB', (width, len(rows) * height + _GAP), 'white')
  draw = ImageDraw.Draw(result)
  for row, (ident, label, views) in enumerate(rows):
    file, record = ident >> 32, ident & 0xFFFFFFFF
    contents = made.contents(file, record)
    top = _GAP + row * height
    original = _original(made, contents, image_size, Image, ImageDraw)
    result.paste(original, (_GAP, top + 2 * _LINE))
    for column, view in enumerate(views):
      place = (_GAP + (column + 1) * (image_size + _GAP), top + 2 * _LINE)
      result.paste(Image.fromarray(view), place)
    name = names[contents.label] if names and contents.label < len(names) else ''
    boxes = f', boxes: {len(contents.boxes)}' if contents.boxes else ''
    shard = os.path.basename(made.files[file])
    draw.text((_GAP, top), f'id {ident}: {shard}, record {record}, {contents.key}', fill='black')
    draw.text(
      (_GAP, top + _LINE), f'label {label} (stored: {contents.label}) {name}{boxes}', fill='black'
    )
  return result


def check_name(path: str) -> None:
  """Refuses the name of a picture whose end says no format that Pillow writes.

  Raises:
    UsageError: with an end that does.
    DataError: Pillow isn't there.
  """
  try:
    from PIL import Image
  except ImportError:
    raise DataError('a picture needs Pillow: pip install pillow') from None
  if Image.registered_extensions().get(os.path.splitext(path)[1].lower()) not in Image.SAVE:
    raise UsageError(f'--out={path}: a name that ends in .png, .jpg or the like is needed')


def _views(
  source: sources.Source,
  num_images: int,
  num_views: int,
  image_size: int,
  pipeline_options: dict[str, Any],
) -> list[tuple[int, int, list[np.ndarray]]]:
  """(id, label, views) of the first images of an order."""
  pipeline = tfdata.TfDataPipeline(
    source,
    **({'training': True} | pipeline_options),
    batch_size=1,
    image_size=image_size,
    num_classes=2**31 - 1,
  )
  try:
    return [
      (int(ident), int(label), list(views.numpy()))
      for views, label, ident in pipeline.views(num_views).take(num_images)
    ]
  except faults.ERRORS as error:
    raise pipeline.explain(error) from error


def _original(
  source: sources.Source, contents: sources.Contents, size: int, image_module: Any, draw: Any
) -> 'Image.Image':
  """The whole image, shrunk into a square, with the record's boxes."""
  encoded = contents.encoded if source.stores_files else source.as_file(contents.encoded)
  with image_module.open(io.BytesIO(encoded)) as opened:
    image = opened.convert('RGB')
  image.thumbnail((size, size))
  pen = draw.Draw(image)
  for ymin, xmin, ymax, xmax in contents.boxes:
    corners = (xmin * image.width, ymin * image.height, xmax * image.width, ymax * image.height)
    pen.rectangle(corners, outline=_COLOR, width=2)
  return image


def add_arguments(parser: Any) -> None:
  """Declares the flags of the command on an argparse parser."""
  parser.add_argument('dir', metavar='DIR', help='the directory of the data set')
  parser.add_argument('--out', required=True, metavar='FILE', help='such as sheet.png')
  detect.add_source(parser)
  parser.add_argument('--split', default='train')
  parser.add_argument('--num_images', type=int, default=8)
  parser.add_argument('--num_views', type=int, default=5)
  parser.add_argument('--image_size', type=int, default=224)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--use_bbox', action='store_true')
  parser.add_argument('--antialias', action='store_true')
  parser.add_argument('--distort_colors', action='store_true')
  parser.add_argument('--evaluate', action='store_true', help='as evaluation sees it')


def run(args: Any) -> str:
  """Runs the command with its parsed flags; returns what to print."""
  check_name(args.out)
  drawn = sheet(
    args.source or detect.source(args.dir),
    options={'data_dir': args.dir, 'split': args.split},
    num_images=args.num_images,
    num_views=args.num_views,
    image_size=args.image_size,
    seed=args.seed,
    use_bbox=args.use_bbox,
    antialias=args.antialias,
    distort_colors=args.distort_colors,
    training=not args.evaluate,
  )
  drawn.save(args.out)
  return f'{args.out}: {drawn.width} x {drawn.height} pixels'
