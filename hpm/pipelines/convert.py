"""Writes a data set again in another format, in parallel, and verifies it.

    python -m hpm.pipelines convert SRC OUT --format=tfrecord [--source=folder] [--num_shards=N]

SRC is a directory of images by class, of ImageNet's TFRecords, of a prepared TFDS data set, or of
CIFAR's binaries. Each of its splits, train and validation, is written
in shards; images of a folder are shuffled, everything else keeps its order.

OUT appears when all shards are written and have been read back, or not at all. What is finished of
it waits in OUT.part: the same command, run again, goes on from there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import random
from typing import Any, NamedTuple, Protocol

from hpm import json_file, pipelines
from hpm.errors import DataError, UsageError
from hpm.pipelines import base, detect, progress, skips, sources

__all__ = [
  'FORMATS',
  'Converted',
  'Format',
  'Item',
  'convert',
  'items',
  'sources_of',
]

# name -> the module that is the format; a new one is one file and one line here.
FORMATS = {
  'indexed': 'hpm.pipelines.to_indexed',
  'raw': 'hpm.pipelines.to_raw',
  'tfrecord': 'hpm.pipelines.to_tfrecord',
}

SPLITS = ('train', 'validation')
_MANIFEST = 'convert.json'
_VERSION = 1
_RECORDS_PER_SHARD = 1250  # ImageNet's 1024 shards hold so many
_SEED = 0


class Item(NamedTuple):
  """A sample on its way into another format.

  Attributes:
    contents: image, label as the source stores it, key, boxes; the image is a file's bytes.
    label: as ImageNet's TFRecords store it, from 1 on.
    class_name: '' if the source doesn't say.
    record: the whole record, if the source has ImageNet's records; it may hold more features.
  """

  contents: sources.Contents
  label: int
  class_name: str
  record: bytes | None


class Format(Protocol):
  """What the module of a format has.

  It may have `prepare(item)` as well, which makes of an item what `write` takes, and raises a
  DataError for one that it can't use; and `configure(detail)`, the format that NAME:DETAIL means.

  Attributes:
    PROCESSES: whether writing is Python's own work, so that it needs processes, not threads.
  """

  PROCESSES: bool

  def file_name(self, split: str, shard: int, num_shards: int) -> str:
    """The name of a shard."""

  def write(self, path: str, items: Iterator[Any]) -> tuple[int, str]:
    """Writes one shard; returns the records written, and a digest of what they hold."""

  def check(self, path: str) -> tuple[int, str]:
    """The same two of a file, read back; DataError if it is damaged."""


@dataclasses.dataclass(frozen=True)
class Converted:
  """What was written.

  Attributes:
    directory: where.
    counts: split -> records.
    num_bytes: of all shards.
    skipped: what was left out, a line each.
    already_there: nothing had to be done.
  """

  directory: str
  counts: dict[str, int]
  num_bytes: int
  skipped: list[str]
  already_there: bool


@dataclasses.dataclass(frozen=True)
class _Shard:
  """One shard to be written, as a process can be told."""

  source: str
  options: Mapping[str, Any]
  format: str
  path: str
  ids: Sequence[int]
  skip: bool


def convert(
  source: str,
  out: str,
  format: str = 'tfrecord',
  *,
  options: Mapping[str, Any],
  splits: Sequence[str] | None = None,
  num_shards: int | None = None,
  num_workers: int | None = None,
  bad_records: str = 'fail',
) -> Converted:
  """Converts a data set.

  Args:
    source: a name of `hpm.pipelines.SOURCES`.
    out: a directory that doesn't exist yet, or holds the result of the same conversion.
    format: a name of `FORMATS`, with what belongs to it after a colon ('raw:320').
    options: of the source, without its split.
    splits: None: train and validation, as far as the source has them.
    num_shards: a split; None: one for 1250 records.
    num_workers: shards written at once; None: one a core.
    bad_records: 'fail', 'skip' or 'limit:N', as for pipelines, for records that can't be read or
      hold no image. Nothing is decoded.

  Raises:
    UsageError: an option out of range, or a directory that holds something else.
    DataError: the source can't be read; a shard that reads back differently.
  """
  module = _format(format)
  policy = skips.Policy.parse(bad_records)
  workers = base.positive(
    'num_workers',
    base.num_cores() if num_workers is None else num_workers,
    'leave it out for one a core',
  )
  out = os.path.abspath(out)
  found = sources_of(source, options, splits)
  plan, shards = _plan(source, options, found, module, format, out, num_shards, policy.skip)
  if os.path.exists(out):
    done = _manifest(out)
    if done is None or done['plan'] != plan:
      raise UsageError(f'{out} exists and holds something else: give another directory')
    return _converted(out, done, already_there=True)
  building = out + '.part'
  _begin(building, plan)
  entries = _write(shards, building, workers, module.PROCESSES, found, source)
  _verify(building, entries, module, workers)
  skipped = [line for entry in entries.values() for line in entry['skipped']]
  if policy.limit is not None and len(skipped) > policy.limit:
    raise DataError(
      f'more than bad_records={bad_records} bad records, the last one being {skipped[-1]}'
    )
  if not sum(entry['count'] for entry in entries.values()):
    raise DataError(f'{source}: nothing could be read, so nothing was written')
  manifest = {'plan': plan, 'shards': entries}
  _write_json(os.path.join(building, _MANIFEST), manifest)
  for name in os.listdir(building):  # sidecars, and what a killed process has left
    if name != _MANIFEST and name not in entries:
      os.remove(os.path.join(building, name))
  os.rename(building, out)
  return _converted(out, manifest, already_there=False)


def _format(name: str) -> Any:
  kind, colon, detail = name.partition(':')
  if kind not in FORMATS:
    from hpm import errors

    raise errors.unknown('format', name, FORMATS)
  module = importlib.import_module(FORMATS[kind])
  if not colon:
    return module
  if not hasattr(module, 'configure'):
    raise UsageError(f'format {name!r}: {kind!r} takes nothing after a colon')
  return module.configure(detail)


def sources_of(
  name: str, options: Mapping[str, Any], splits: Sequence[str] | None
) -> dict[str, sources.Source]:
  """The splits of a data set that are asked for, or train and validation if they are there."""
  if splits is not None:
    return {split: pipelines.source(name, split=split, **options) for split in splits}
  found, missing = {}, None
  for split in SPLITS:
    try:
      found[split] = pipelines.source(name, split=split, **options)
    except DataError as error:
      missing = missing or error
  if not found:
    assert missing
    raise missing
  return found


def _plan(
  name: str,
  options: Mapping[str, Any],
  found: Mapping[str, sources.Source],
  module: Any,
  format: str,
  out: str,
  num_shards: int | None,
  skip: bool,
) -> tuple[dict[str, Any], list[_Shard]]:
  """What identifies this conversion, and its shards."""
  shards, inputs = [], hashlib.sha256()
  for split, source in found.items():
    counts = source.count(strict=not skip)
    for path, count in zip(source.files, counts):
      inputs.update(f'{path} {count} {os.path.getsize(path)}\n'.encode())
    ids = [file << 32 | record for file, count in enumerate(counts) for record in range(count)]
    if not ids:
      raise DataError(f'{source.origin} holds no records of split {split!r}')
    if isinstance(source, sources.RandomAccess):  # classes come one after the other
      random.Random(f'{_SEED}/{split}').shuffle(ids)
    total = -(-len(ids) // _RECORDS_PER_SHARD) if num_shards is None else num_shards
    total = base.positive('num_shards', total, 'give shards a split')
    if total > len(ids):
      raise UsageError(f'num_shards={total}, but split {split!r} has {len(ids)} records')
    for shard in range(total):
      path = os.path.join(f'{out}.part', module.file_name(split, shard, total))
      part = ids[len(ids) * shard // total : len(ids) * (shard + 1) // total]
      shards.append(_Shard(name, {**options, 'split': split}, format, path, part, skip))
  plan = {
    'version': _VERSION,
    'format': format,
    'source': name,
    'skip': skip,
    'inputs': inputs.hexdigest(),
    'shards': [os.path.basename(shard.path) for shard in shards],
  }
  return plan, shards


def _begin(building: str, plan: Mapping[str, Any]) -> None:
  """Makes the directory of what is unfinished, or makes sure that it is of this conversion."""
  path = os.path.join(building, '.plan.json')
  if os.path.isdir(building):
    # What was finished without leaving out anything is as good where that is allowed.
    if _read_json(path) not in (plan, {**plan, 'skip': False}):
      raise UsageError(
        f'{building} is left from another conversion: remove it, or give another OUT'
      )
  else:
    os.makedirs(building)
  _write_json(path, plan)


def _write(
  shards: Sequence[_Shard],
  building: str,
  num_workers: int,
  processes: bool,
  found: Mapping[str, sources.Source],
  name: str,
) -> dict[str, dict[str, Any]]:
  """Writes the shards that aren't there; file name -> count, digest, skipped."""
  entries, missing = {}, []
  for shard in shards:
    entry = _read_json(_sidecar(shard.path))
    if entry is not None and os.path.exists(shard.path):
      entries[os.path.basename(shard.path)] = entry
    else:
      missing.append(shard)
  with progress.bar('writing', sum(len(shard.ids) for shard in missing)) as advance:
    if processes and len(missing) > 1 and num_workers > 1:
      pool: concurrent.futures.Executor = concurrent.futures.ProcessPoolExecutor(
        num_workers, multiprocessing.get_context('spawn')
      )
      tasks = {pool.submit(_write_shard, shard): shard for shard in missing}
    else:
      pool = concurrent.futures.ThreadPoolExecutor(num_workers)
      tasks = {
        pool.submit(_write_shard, shard, found[shard.options['split']]): shard for shard in missing
      }
    with pool:
      try:
        for task in concurrent.futures.as_completed(tasks):
          entries[os.path.basename(tasks[task].path)] = task.result()
          advance(len(tasks[task].ids))
      except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
  return {os.path.basename(shard.path): entries[os.path.basename(shard.path)] for shard in shards}


def _write_shard(shard: _Shard, source: sources.Source | None = None) -> dict[str, Any]:
  """Writes one shard beside its place, moves it there, notes what it holds."""
  if source is None:
    source = pipelines.source(shard.source, **shard.options)
  skipped: list[str] = []
  temporary = f'{shard.path}.{os.getpid()}.tmp'
  try:
    module = _format(shard.format)
    listed = skipped if shard.skip else None
    prepare = getattr(module, 'prepare', None)
    count, digest = module.write(temporary, items(source, shard.ids, listed, prepare))
    os.replace(temporary, shard.path)
  finally:
    if os.path.exists(temporary):
      os.remove(temporary)
  split = shard.options['split']
  entry = {'split': split, 'count': count, 'digest': digest, 'skipped': skipped}
  if count + len(skipped) != len(shard.ids):
    raise DataError(f'{shard.path}: {count} records written of {len(shard.ids)}')
  _write_json(_sidecar(shard.path), entry)
  return entry


def items(
  source: sources.Source,
  ids: Sequence[int],
  skipped: list[str] | None,
  prepare: Callable[[Item], Any] | None = None,
) -> Iterator[Any]:
  """The samples of these ids; bad ones raise a DataError, or go into `skipped`.

  Args:
    source: where they are from.
    ids: which.
    skipped: the list for what is left out, a line each; None: nothing is.
    prepare: what is yielded in an item's place; a DataError of it is one of the sample's.
  """
  names = source.class_names
  offset = source.label_offset(0) + 1  # from 0 on in a pipeline, from 1 on in ImageNet's records
  for ident in ids:
    file, record = ident >> 32, ident & 0xFFFFFFFF
    try:
      original = source.record(file, record) if isinstance(source, sources.RecordFiles) else None
      contents = source.contents(file, record, original)
      if not contents.encoded:
        raise DataError(f'image {contents.key} has 0 bytes: {source.remedy}')
      if not source.stores_files:
        contents = contents._replace(encoded=source.as_file(contents.encoded))
      name = names[contents.label] if names and 0 <= contents.label < len(names) else ''
      kept = original if source.has_boxes else None  # ImageNet's records have boxes, TFDS's others
      item = Item(contents, contents.label + offset, name, kept)
      prepared = item if prepare is None else prepare(item)
    except DataError as error:
      named = str(error).startswith(source.files[file])
      text = str(error) if named else f'{source.describe(file, record)}: {error}'
      if skipped is None:
        raise DataError(text) from None
      skipped.append(text)
      continue
    yield prepared


def _verify(
  building: str, entries: Mapping[str, Mapping[str, Any]], module: Any, num_workers: int
) -> None:
  """Reads every shard back; counts and digests have to be those of the writing."""

  def check(name: str) -> None:
    path = os.path.join(building, name)
    count, digest = module.check(path)
    entry = entries[name]
    if (count, digest) != (entry['count'], entry['digest']):
      os.remove(path)
      raise DataError(
        f'{path} reads back differently ({count} records in place of {entry["count"]}, or others): '
        'run the command again, which writes it anew; should it happen twice, check the disk'
      )

  pool = concurrent.futures.ThreadPoolExecutor(num_workers)
  with progress.bar('verifying', len(entries)) as advance, pool:
    for _ in pool.map(check, entries):
      advance(1)


def _sidecar(path: str) -> str:
  directory, name = os.path.split(path)
  return os.path.join(directory, f'.{name}.json')


def _write_json(path: str, value: Any) -> None:
  with open(path + '.tmp', 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=1)
  os.replace(path + '.tmp', path)


def _read_json(path: str) -> Any:
  try:
    return json_file.read(path)
  except (OSError, ValueError):
    return None


def _manifest(out: str) -> Any:
  found = _read_json(os.path.join(out, _MANIFEST))
  return found if isinstance(found, dict) and 'plan' in found else None


def _converted(out: str, manifest: Mapping[str, Any], already_there: bool) -> Converted:
  counts: dict[str, int] = {}
  for entry in manifest['shards'].values():
    counts[entry['split']] = counts.get(entry['split'], 0) + entry['count']
  size = sum(os.path.getsize(os.path.join(out, name)) for name in manifest['shards'])
  skipped = [line for entry in manifest['shards'].values() for line in entry['skipped']]
  return Converted(out, counts, size, skipped, already_there)


def add_arguments(parser: Any) -> None:
  """Declares the flags of the command on an argparse parser."""
  parser.add_argument('src', metavar='SRC', help='the directory of the data set')
  parser.add_argument('out', metavar='OUT', help='a new directory')
  parser.add_argument(
    '--format', default='tfrecord', help=f'{", ".join(FORMATS)} (default: %(default)s)'
  )
  detect.add_source(parser, 'SRC')
  parser.add_argument('--splits', help='such as train,validation (default: those there are)')
  parser.add_argument('--num_shards', type=int, help='a split (default: one for 1250 records)')
  parser.add_argument('--num_workers', type=int, help='shards at once (default: one a core)')
  parser.add_argument('--bad_records', default='fail', help='fail, skip or limit:N')


def run(args: Any) -> str:
  """Runs the command with its parsed flags; returns what to print."""
  done = convert(
    args.source or detect.source(args.src),
    args.out,
    args.format,
    options={'data_dir': args.src},
    splits=None if args.splits is None else args.splits.split(','),
    num_shards=args.num_shards,
    num_workers=args.num_workers,
    bad_records=args.bad_records,
  )
  counts = ' and '.join(f'{count} {split}' for split, count in done.counts.items())
  verb = 'is already there' if done.already_there else 'written and read back'
  lines = [f'left out: {line}' for line in done.skipped]
  lines.append(f'{done.directory}: {counts} images, {done.num_bytes / 1e6:.1f} MB, {verb}')
  return '\n'.join(lines)
