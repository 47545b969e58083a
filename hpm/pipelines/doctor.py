"""Reads a data set as the pipelines would, and says what is wrong or odd about it.

    python -m hpm.pipelines doctor DIR [--source=folder] [--decode] [--num_classes=1000]
        [--workers=8] [--json=FILE]

Every record of every split is read and its checksums are verified; labels, images' kinds and sizes
(from their headers), duplicates and index files are looked at. --decode decodes every image too,
and compares the index of an indexed JPEG with its segments. --num_classes says what labels have to
fit, --workers how many workers the files have to serve.

Exit code: 0 nothing wrong; 3 something odd, which training survives; 1 something that a pipeline
stops at, or that makes results wrong.
"""

import collections
from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import hashlib
import io
import json
import os
import statistics
import struct
from typing import Any

from hpm.errors import DataError
from hpm.pipelines import (
  base,
  convert,
  detect,
  faults,
  indexed_jpeg,
  progress,
  records,
  sources,
)

__all__ = ['Finding', 'Report', 'examine']

_SHOWN = 20  # findings of one kind that are printed; the JSON has all of them
_RATIO = 10  # largest class : smallest class above which classes are out of balance
_PART = 1024  # bytes of a JPEG that are compared
_EXIT = {'ok': 0, 'odd': 3, 'wrong': 1}
_FRAMES = {0xC0: '', 0xC1: '', 0xC2: ' progressive'}  # of JPEGs, by marker
_MODES = {1: 'L', 3: 'RGB', 4: 'CMYK'}  # by number of components
_FRAME_SIDES = struct.Struct('>HH')
_PLAIN = {*range(0xE0, 0xF0), 0xC4, 0xDB, 0xDD, 0xFE}  # applications', tables, restarts, comments


@dataclasses.dataclass(frozen=True)
class Finding:
  """One thing that was noticed: `severity` is 'odd' or 'wrong'."""

  severity: str
  what: str


@dataclasses.dataclass
class Split:
  """What one split holds.

  Attributes:
    files: name -> records that can be read.
    labels: label as stored -> images.
    kinds: such as 'JPEG RGB' -> images.
    sides: (width, height) of each image whose header says so.
    num_bytes: of all images.
    num_boxes: images that have bounding boxes.
    label_offset: what a pipeline adds to the labels.
  """

  files: dict[str, int] = dataclasses.field(default_factory=dict)
  labels: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  kinds: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  sides: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  num_bytes: int = 0
  num_boxes: int = 0
  label_offset: int = 0

  def add(self, path: str, contents: sources.Contents, kind: str, side: tuple[int, int]) -> None:
    """Counts one image of a file."""
    self.files[path] = self.files.get(path, 0) + 1
    self.labels[contents.label] += 1
    self.kinds[kind] += 1
    if side != (0, 0):
      self.sides.append(side)
    self.num_bytes += len(contents.encoded)
    self.num_boxes += bool(contents.boxes)

  def update(self, other: 'Split') -> None:
    """Counts what another has counted, of other files."""
    self.files.update(other.files)
    self.labels.update(other.labels)
    self.kinds.update(other.kinds)
    self.sides += other.sides
    self.num_bytes += other.num_bytes
    self.num_boxes += other.num_boxes


@dataclasses.dataclass
class Report:
  """The whole.

  Attributes:
    origin: the directory or data set.
    splits: name -> Split.
    findings: in the order in which they were made, by split and file.
  """

  origin: str
  splits: dict[str, Split] = dataclasses.field(default_factory=dict)
  findings: list[Finding] = dataclasses.field(default_factory=list)

  @property
  def severity(self) -> str:
    """'ok', 'odd' or 'wrong': the worst finding."""
    severities = {finding.severity for finding in self.findings}
    return next((s for s in ('wrong', 'odd') if s in severities), 'ok')


def examine(
  source: str,
  *,
  options: dict[str, Any],
  splits: Sequence[str] | None = None,
  num_classes: int | None = None,
  decode: bool = False,
  num_workers: int = 1,
  max_pixels: int = faults.MAX_PIXELS,
) -> Report:
  """Reads a data set to its end.

  Args:
    source: a name of `hpm.pipelines.SOURCES`.
    options: of the source, without its split.
    splits: None: train and validation, as far as they are there.
    num_classes: outputs of the model that labels have to fit; None: whatever is there.
    decode: whether images are decoded.
    num_workers: workers of a training run that share the files.
    max_pixels: height x width above which an image is refused by pipelines.

  Raises:
    UsageError: a number below 1.
    DataError: there is nothing to be read at all.
  """
  if num_classes is not None:
    num_classes = base.positive('num_classes', num_classes, 'give the outputs of the model')
  num_workers = base.positive('num_workers', num_workers, 'give the workers that share the files')
  found = convert.sources_of(source, options, splits)
  report = Report(next(iter(found.values())).origin)
  images: dict[bytes, tuple[str, int, int]] = {}
  for name, one in found.items():
    split = report.splits[name] = Split()
    offset = one.label_offset(num_classes or 0)
    split.label_offset = offset
    demands = faults.Demands(num_classes or 2**31, offset, max_pixels)
    _read(name, found, split, report, images, demands, decode)
    _judge(name, one, split, report, num_classes, num_workers)
  _compare(report)
  return report


def _read(
  name: str,
  found: dict[str, sources.Source],
  split: Split,
  report: Report,
  images: dict[bytes, tuple[str, int, int]],
  demands: faults.Demands,
  decode: bool,
) -> None:
  """Reads all records of a split, files in parallel; `images` tells which were seen, and where."""
  source = found[name]

  def one_part(part: Sequence[int]) -> tuple[Split, list[Finding], list[tuple[bytes, int, int]]]:
    """What these files hold, what is wrong, and the images: their digests and places."""
    own, seen = Split(), []
    findings: list[Finding] = []
    for file, record, contents in _contents(source, part, findings):
      if source.stores_files:
        kind, side = _kind(contents.encoded)
      else:
        kind, side = 'raw', source.sides(contents.encoded)
      own.add(source.files[file], contents, kind, side)
      what = _wrong(source, file, record, contents, demands, side, decode)
      if what:
        findings.append(what)
      else:
        seen.append((_digest(contents.encoded), file, record))
    return own, findings, seen

  parts = _parts(source)
  pool = concurrent.futures.ThreadPoolExecutor(base.num_cores())
  with progress.bar(f'reading {name}', len(source.files)) as advance, pool:
    # In the files' order, whoever has finished first: the same report every time.
    for part, (own, findings, seen) in zip(parts, pool.map(one_part, parts)):
      split.update(own)
      report.findings += findings
      for digest, file, record in seen:
        first = images.setdefault(digest, (name, file, record))
        if first != (name, file, record):
          same = found[first[0]].describe(*first[1:])
          # One that is in two splits makes an accuracy look better than it is.
          severity = 'odd' if first[0] == name else 'wrong'
          what = f'{source.describe(file, record)}: the same image as {same}'
          report.findings.append(Finding(severity, what))
      advance(len(part))


def _parts(source: sources.Source) -> list[list[int]]:
  """Files in groups: a file each, or hundreds of files that are one image each."""
  size = 1 if isinstance(source, sources.Stream) else max(1, min(256, len(source.files) // 8))
  files = list(range(len(source.files)))
  return [files[i : i + size] for i in range(0, len(files), size)]


def _contents(
  source: sources.Source, files: Sequence[int], findings: list[Finding]
) -> Iterator[tuple[int, int, sources.Contents]]:
  """(file, record, contents) of all records that can be read; the others become findings."""
  for file in files:
    path = source.files[file]
    if isinstance(source, sources.RecordFiles):
      if records.is_empty(path):
        findings.append(Finding('wrong', f'{path} is empty (0 bytes)'))
        continue
      items: Iterator[bytes | DataError | None] = records.scan(path)
    else:
      items = iter([None] * source.tolerant_counts[file])
    for record, item in enumerate(items):
      try:
        if isinstance(item, DataError):
          raise item
        yield file, record, source.contents(file, record, item)
      except DataError as error:
        named = str(error).startswith(path)
        text = str(error) if named else f'{source.describe(file, record)}: {error}'
        findings.append(Finding('wrong', text))


def _digest(encoded: bytes) -> bytes:
  """Tells images apart by length and, of a JPEG, three parts: entropy-coded, no two are alike."""
  digest = hashlib.blake2b(len(encoded).to_bytes(8, 'little'), digest_size=16)
  if len(encoded) > 4 * _PART and encoded.startswith(b'\xff\xd8'):
    middle = len(encoded) // 2
    for start in (0, middle, len(encoded) - _PART):
      digest.update(encoded[start : start + _PART])
  else:
    digest.update(encoded)
  return digest.digest()


def _kind(encoded: bytes) -> tuple[str, tuple[int, int]]:
  """What an image is and (width, height), from its header; ('unknown', (0, 0)) if it is none."""
  kind, side = _plain_jpeg(encoded) or _kind_by_pillow(encoded)
  return (f'{kind} indexed' if indexed_jpeg.has_index(encoded) else kind), side


def _plain_jpeg(encoded: bytes) -> tuple[str, tuple[int, int]] | None:
  """The same of a JPEG without EXIF or further images, in a fifth of Pillow's time; else None."""
  if not encoded.startswith(b'\xff\xd8\xff'):
    return None
  found, at = None, 2
  try:
    while encoded[at] == 0xFF:
      marker, length, body = encoded[at + 1], int.from_bytes(encoded[at + 2 : at + 4]), at + 4
      if marker == 0xDA:  # the image's data begin
        return found
      if marker in _FRAMES and encoded[body] == 8 and encoded[body + 5] in _MODES:
        height, width = _FRAME_SIDES.unpack_from(encoded, body + 1)
        found = f'JPEG {_MODES[encoded[body + 5]]}{_FRAMES[marker]}', (width, height)
      elif marker not in _PLAIN or encoded.startswith((b'Exif', b'MPF\0'), body):
        return None
      at += 2 + length
  except (IndexError, struct.error):
    pass  # it ends within its header
  return None


def _kind_by_pillow(encoded: bytes) -> tuple[str, tuple[int, int]]:
  try:
    from PIL import Image
  except ImportError:
    raise DataError('the doctor needs Pillow: pip install pillow') from None
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      extras = [
        text
        for text, there in (
          ('progressive', image.info.get('progressive')),
          ('with EXIF rotation', _is_rotated(image)),
        )
        if there
      ]
      return ' '.join([f'{image.format} {image.mode}', *extras]), image.size
  except Exception:  # whatever Pillow makes of bytes that are no image
    return 'unknown', (0, 0)


def _is_rotated(image: Any) -> bool:
  # The tag is looked for only where there are EXIF bytes, since to parse them takes time.
  return 'exif' in image.info and image.getexif().get(0x0112, 1) not in (0, 1)


def _wrong(
  source: sources.Source,
  file: int,
  record: int,
  contents: sources.Contents,
  demands: faults.Demands,
  side: tuple[int, int],
  decode: bool,
) -> Finding | None:
  """What a pipeline would stop at in a record that can be read."""
  label = contents.label + demands.label_offset
  suspicious = (
    not 0 <= label < demands.num_classes
    or not contents.encoded
    or side == (0, 0)
    or side[0] * side[1] > demands.max_pixels
  )
  if not suspicious and not decode:
    return None
  error = faults.fault(source, contents, demands)
  if error is None and source.stores_files and not _index_fits(contents.encoded):
    error = f'the index of image {contents.key} is not that of its segments: {source.remedy}'
  if error is None:
    return None
  return Finding('wrong', f'{source.describe(file, record)}: {error}')


def _index_fits(encoded: bytes) -> bool:
  """Whether an indexed JPEG's index is what its segments give; True for other files."""
  if not indexed_jpeg.has_index(encoded):
    return True
  try:
    return indexed_jpeg.add_index(indexed_jpeg.without_index(encoded)) == encoded
  except (DataError, IndexError, ValueError, struct.error):  # numbers that lead nowhere
    return False


def _judge(
  name: str,
  source: sources.Source,
  split: Split,
  report: Report,
  num_classes: int | None,
  num_workers: int,
) -> None:
  """What a split as a whole gives rise to."""

  def add(severity: str, what: str) -> None:
    report.findings.append(Finding(severity, f'{source.origin}, {name}: {what}'))

  total = sum(split.files.values())
  if not total:
    add('wrong', 'no record can be read')
    return
  count = len(source.files)
  if count < num_workers and isinstance(source, sources.RecordFiles):
    add(
      'odd',
      f'{_counted(count, "file")} for {num_workers} workers: share by record '
      "(shard_by='record'), or write more shards",
    )
  low, high = min(split.labels), max(split.labels)
  holes = high - low + 1 - len(split.labels)
  if holes:
    add('odd', f'{holes} labels between {low} and {high} have no image')
  largest, smallest = max(split.labels.values()), min(split.labels.values())
  if largest > _RATIO * smallest:
    add('odd', f'classes have between {smallest} and {largest} images')
  if num_classes and high - low + 1 > num_classes:
    add('wrong', f'labels {low} to {high} do not fit {num_classes} classes')
  if isinstance(source, sources.RecordFiles):
    for path in source.files:
      _judge_index(path, report)


def _judge_index(path: str, report: Report) -> None:
  from hpm.pipelines import index

  place = index.index_path(path)
  if not os.path.exists(place):
    return
  try:
    index.read(path, place)
  except DataError as error:
    report.findings.append(Finding('wrong', str(error)))


def _compare(report: Report) -> None:
  """What splits have to agree on."""
  if len(report.splits) < 2:
    return
  train, other = (set(split.labels) for split in list(report.splits.values())[:2])
  strange = sorted(other - train)
  if train and strange:
    report.findings.append(
      Finding(
        'wrong',
        f'{report.origin}: {len(strange)} labels are in {list(report.splits)[1]} and not in '
        f'{next(iter(report.splits))}, such as {strange[0]}',
      )
    )


def table(report: Report) -> str:
  """The report as text."""
  lines = []
  for name, split in report.splits.items():
    total = sum(split.files.values())
    counts = list(split.files.values())
    lines.append(
      f'{report.origin}, {name}: {_counted(total, "image")} in {_counted(len(split.files), "file")}'
    )
    if not total:
      continue
    widths, heights = zip(*split.sides) if split.sides else ((0,), (0,))
    balance = sorted(split.labels.values())
    rows = [
      ('images a file', f'{min(counts)} to {max(counts)}'),
      ('MB', f'{split.num_bytes / 1e6:.1f}, {split.num_bytes / total / 1e3:.1f} KB an image'),
      (
        'labels',
        f'{min(split.labels)} to {max(split.labels)}, {len(split.labels)} different; '
        f'label_offset={split.label_offset}',
      ),
      (
        'images a class',
        f'{balance[0]} to {balance[-1]}, median {statistics.median(balance):g}',
      ),
      ('kinds', ', '.join(f'{count} {kind}' for kind, count in split.kinds.most_common())),
      (
        'size',
        f'{statistics.mean(widths):.0f} x {statistics.mean(heights):.0f} on average, '
        f'{min(widths)} x {min(heights)} to {max(widths)} x {max(heights)}',
      ),
      ('with boxes', str(split.num_boxes)),
    ]
    lines += [f'  {title:<16}{text}' for title, text in rows]
  for severity in ('wrong', 'odd'):
    found = [finding.what for finding in report.findings if finding.severity == severity]
    lines += [f'{severity}: {what}' for what in found[:_SHOWN]]
    if len(found) > _SHOWN:
      lines.append(f'{severity}: {len(found) - _SHOWN} more')
  wrong = sum(finding.severity == 'wrong' for finding in report.findings)
  odd = len(report.findings) - wrong
  lines.append(f'{_counted(wrong, "thing")} wrong, {odd} odd')
  return '\n'.join(lines)


def _counted(count: int, what: str) -> str:
  return f'{count} {what}' if count == 1 else f'{count} {what}s'


def as_json(report: Report) -> dict[str, Any]:
  """The report as plain values."""
  splits = {}
  for name, split in report.splits.items():
    widths, heights = zip(*split.sides) if split.sides else ((0,), (0,))
    splits[name] = {
      'num_images': sum(split.files.values()),
      'num_bytes': split.num_bytes,
      'files': {os.path.basename(path): count for path, count in sorted(split.files.items())}
      if len(split.files) < 10_000
      else len(split.files),
      'label_offset': split.label_offset,
      'labels': {str(label): count for label, count in sorted(split.labels.items())},
      'kinds': dict(split.kinds.most_common()),
      'width': [min(widths), statistics.mean(widths), max(widths)],
      'height': [min(heights), statistics.mean(heights), max(heights)],
      'num_images_with_boxes': split.num_boxes,
    }
  return {
    'origin': report.origin,
    'severity': report.severity,
    'splits': splits,
    'findings': [dataclasses.asdict(finding) for finding in report.findings],
  }


def add_arguments(parser: Any) -> None:
  """Declares the flags of the command on an argparse parser."""
  parser.add_argument('dir', metavar='DIR', help='the directory of the data set')
  detect.add_source(parser)
  parser.add_argument('--splits', help='such as train,validation (default: those there are)')
  parser.add_argument('--decode', action='store_true', help='decode every image')
  parser.add_argument('--num_classes', type=int, help='outputs of the model (default: any)')
  parser.add_argument('--workers', type=int, default=1, help='that share the files (default: 1)')
  parser.add_argument('--json', metavar='FILE', help='write the report there as well')


def run(args: Any) -> tuple[str, int]:
  """Runs the command with its parsed flags; returns what to print, and the exit code."""
  report = examine(
    args.source or detect.source(args.dir),
    options={'data_dir': args.dir},
    splits=None if args.splits is None else args.splits.split(','),
    num_classes=args.num_classes,
    decode=args.decode,
    num_workers=args.workers,
  )
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as file:
      json.dump(as_json(report), file, indent=1)
  return table(report), _EXIT[report.severity]
