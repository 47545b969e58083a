"""The page's sections: what stands on it, in which order."""

from collections.abc import Sequence

from benchmarks import demand, presets, published
from benchmarks.page import charts
from benchmarks.page.blocks import Block, Figure, Heading, Table, Text
from benchmarks.page.rates import SYNTHETIC, Platform, Rate

__all__ = ['page', 'platform_sections']

_EMPTY = '–'
_WORK = (
  'Images over the CPU seconds of all threads of the process, in the timed steps. Other work on '
  'the machine changes these far less than rates by the clock; an idle machine would reach at most '
  'so many times its cores.'
)


def page(
  this: Platform | None, others: Sequence[Platform], limits: Sequence[str], command: str
) -> list[Block]:
  """The whole page.

  Args:
    this: this machine; None for published figures alone.
    others: published platforms.
    limits: what the measurement here can't show, a sentence or more each.
    command: how this machine was measured.
  """
  every = [*([this] if this else []), *others]
  blocks: list[Block] = [Heading(1, 'Benchmarks'), Heading(2, 'Overview')]
  blocks += _overview(every, this, command)
  blocks += _overview_figures(this, others)
  if this is not None and limits:
    blocks.append(Heading(3, 'What this machine can not show'))
    blocks += [Text(text) for text in limits]
  blocks.append(Heading(2, 'Results for each platform'))
  for platform in every:
    if not platform.distributed:
      blocks += platform_sections(platform, figures=True)
  distributed = [platform for platform in every if platform.distributed]
  if distributed:
    blocks.append(Heading(2, 'Distributed training'))
    for platform in distributed:
      blocks += platform_sections(platform, figures=True)
    if this is not None:
      blocks.append(Text('This machine: one host; nothing was measured between hosts.'))
  blocks += [Heading(2, 'Other accelerators'), *_accelerators()]
  return [*blocks, Heading(2, 'Methodology'), *_methodology(this, command)]


def platform_sections(platform: Platform, figures: bool = False) -> list[Block]:
  """Environment, options, configuration and results of one platform."""
  title = platform.title[:1].upper() + platform.title[1:]
  blocks: list[Block] = [Heading(3, title), Heading(4, f'Environment ({platform.short})')]
  blocks.append(Table('', ('', ''), list(platform.environment.items()), left=True))
  blocks += [Heading(4, f'Options ({platform.short})'), _options(platform)]
  blocks += [
    Heading(4, f'Configuration of each model ({platform.short})'),
    _configuration(platform),
  ]
  parts = (
    [(f'Training with synthetic data ({platform.short})', SYNTHETIC, False)]
    + [
      (f'Training with real data, {name} ({platform.short})', name, False)
      for name in platform.real_data
    ]
    + [
      (f'Other results, {name} data ({platform.short})', name, True)
      for name in (SYNTHETIC, *platform.real_data)
    ]
  )
  for heading, data, other in parts:
    tables = _rates(platform, data, other)
    if not tables:
      continue
    blocks += [Heading(4, heading), *tables]
    if platform.remark:
      blocks.append(Text(platform.remark))
    if data == SYNTHETIC and not other:
      blocks += _input(platform)
    if data == SYNTHETIC and not other and figures:
      blocks.append(charts.throughput(platform.name, [platform]))
    if not other and figures and data == (platform.real_data or [''])[-1]:
      blocks.append(charts.real_bars(platform))
  work = _work(platform)
  if work is not None:
    blocks += [Heading(4, f'Images a CPU second ({platform.short})'), Text(_WORK), work]
    if platform.remark:
      blocks.append(Text(platform.remark))
  return blocks


def _overview(every: Sequence[Platform], this: Platform | None, command: str) -> list[Block]:
  blocks: list[Block] = [
    Text(
      'Training of image models in images a second, as the TensorFlow Benchmarks page of May 2017 '
      'measured it on GPUs'
      + (f', and by `{command}` on this machine.' if this else '.')
      + ' Batch sizes are images a device and step.'
    ),
    Table(
      'Images a second on all devices, synthetic data, headline batch (number of devices in '
      'brackets)',
      ('', *(platform.short for platform in every)),
      [[_title(model), *(_headline(p, model) for p in every)] for model in published.MODELS],
    ),
    Table(
      'Images a second on each device, and how much of the ideal remains over one device',
      ('', *(platform.short for platform in every)),
      [[_title(model), *(_each(p, model) for p in every)] for model in published.MODELS],
    ),
  ]
  if this is not None and this.remark:
    blocks.append(Text(this.remark))
  return blocks


def _overview_figures(this: Platform | None, others: Sequence[Platform]) -> list[Figure]:
  every = [*([this] if this else []), *others]
  single = [platform for platform in every if platform.real_data]
  figures = [charts.scaling(every)] if any(len(p.counts) > 1 for p in every) else []
  return [*figures, charts.real_shares(single)] if single else figures


def _options(platform: Platform) -> Table:
  rows = []
  for model in platform.models:
    others = ', '.join(map(str, platform.other_batches(model))) or _EMPTY
    headline = str(platform.headline_batch(model))
    rows.append([_title(model), headline, others, platform.optimizer])
  return Table('', ('model', 'batch size per device', 'other results', 'optimizer'), rows)


def _configuration(platform: Platform) -> Table:
  rows = [[_title(model), *platform.configuration[model]] for model in platform.models]
  return Table('', ('model', 'variable_update', 'local_parameter_device'), rows, left=True)


def _rates(platform: Platform, data: str, other: bool) -> list[Block]:
  """Devices by models, and notes; nothing where there is no figure of the kind."""
  columns = []
  for model in platform.models:
    batches = platform.other_batches(model) if other else [platform.headline_batch(model)]
    for batch in batches:
      cells = [platform.rate(model, count, data, batch) for count in platform.counts]
      if any(cell is not None for cell in cells):
        columns.append((f'{_title(model)} ({batch})', cells))
  if not columns:
    return []
  notes: dict[str, int] = {}
  rows = []
  for number, count in enumerate(platform.counts):
    if any(cells[number] is not None for _, cells in columns):
      rows.append([str(count), *(_cell(cells[number], notes) for _, cells in columns)])
  ranged = any(cell and cell.lowest is not None for _, cells in columns for cell in cells)
  caption = 'Images a second (batch size per device in brackets' + (
    '; behind each rate the lowest and the highest run)' if ranged else ')'
  )
  heads = [f'{platform.device}s', *(name for name, _ in columns)]
  texts = [Text(f'({number}) {note}.') for note, number in notes.items()]
  return [Table(caption, heads, rows), *texts]


def _input(platform: Platform) -> list[Block]:
  """What each device's rate with synthetic data takes of an input pipeline and of storage."""
  rows = []
  for count in platform.counts:
    cells = [platform.rate(model, count, SYNTHETIC) for model in platform.models]
    rows.append(
      [str(count), *(_EMPTY if not c or c.per_device is None else _demand(c) for c in cells)]
    )
  heads = [f'{platform.device}s', *map(_title, platform.models)]
  caption = (
    'Input that these rates take, each device: images a second, and MB/s of JPEGs of the mean size '
    f"of ImageNet's training set ({demand.IMAGENET_BYTES / 1e3:.1f} kB)"
  )
  return [Table(caption, heads, rows)]


def _demand(rate: Rate) -> str:
  found = demand.of(rate.per_device, 1, {'encoded': demand.IMAGENET_BYTES})
  return f'{presets.rate(rate.per_device)}, {found["encoded_mb_per_second"]:.3g} MB/s'


def _work(platform: Platform) -> Table | None:
  """Images a CPU second at the headline's batch; None where CPU seconds are not known."""
  if all(rate.per_cpu_s is None for rate in platform.rates):
    return None
  rows = []
  for data in (SYNTHETIC, *platform.real_data):
    for count in platform.counts:
      cells = [platform.rate(model, count, data) for model in platform.models]
      values = [None if cell is None else cell.per_cpu_s for cell in cells]
      texts = [_EMPTY if value is None else f'{value:.2f}' for value in values]
      rows.append([f'{data}, {count}', *texts])
  heads = [f'data, {platform.device}s', *map(_title, platform.models)]
  return Table('Images a CPU second (headline batch)', heads, rows)


def _cell(rate: Rate | None, notes: dict[str, int]) -> str:
  if rate is None:
    return _EMPTY
  note = f' ({notes.setdefault(rate.note, len(notes) + 1)})' if rate.note else ''
  if rate.value is None:
    return f'{_EMPTY}{note}'
  text = presets.rate(rate.value)
  if rate.lowest is not None and rate.highest is not None and rate.num_runs > 1:
    text += f' [{presets.rate(rate.lowest)} to {presets.rate(rate.highest)}]'
  return text + note


def _headline(platform: Platform, model: str) -> str:
  for count in reversed(platform.counts if model in platform.models else []):
    rate = platform.rate(model, count, SYNTHETIC)
    if rate is not None and rate.value is not None:
      return f'{presets.rate(rate.value)} ({count})'
  return _EMPTY


def _each(platform: Platform, model: str) -> str:
  for count in reversed(platform.counts if model in platform.models else []):
    rate = platform.rate(model, count, SYNTHETIC)
    if rate is not None and rate.per_device is not None:
      scaling = platform.scaling(model, count)
      share = '' if scaling is None or count == 1 else f', {scaling:.0%}'
      return f'{presets.rate(rate.per_device)}{share}'
  return _EMPTY


def _accelerators() -> list[Block]:
  rows = []
  for row in published.accelerators():
    batch = row.batch_size_per_device
    rows.append(
      [
        row.system,
        str(row.chips),
        f'{row.model}, {row.precision}, {row.data}',
        row.framework,
        _EMPTY if batch is None else str(batch),
        f'{row.images_per_sec:.0f}',
        presets.rate(row.per_device),
        *(_EMPTY if value is None else f'{value:g}' for value in (row.usd_per_hour, row.top1)),
        _EMPTY if row.usd_to_top1 is None else f'{row.usd_to_top1:g}',
        row.source,
      ]
    )
  columns = (
    *('system', 'chips', 'model', 'framework', 'batch a chip', 'images/s', 'images/s a chip'),
    *('USD an hour', 'top-1, %', 'USD to it', 'source'),
  )
  return [
    Text(
      'ResNet-50 on what came after. Its sources give global batch sizes; here they are divided by '
      f'the chips. {_EMPTY}: not published. The cost to an accuracy is the published one: epochs '
      'times 1,281,167 images over the rate, times the price.'
    ),
    Table('', columns, rows, left=True),
  ]


def _methodology(this: Platform | None, command: str) -> list[Block]:
  method = presets.METHOD
  blocks: list[Block] = [
    Text(
      f'The published figures: {method["num_runs"]} runs of each cell, whose times are averaged; '
      f'each run is {method["num_warmup_batches"]} steps of warm-up and the mean of the next '
      f'{method["num_batches"]}. GPUs ran in their default state (K80 with GPU Boost on). '
      "Synthetic data is a variable of the real data's shape, so it shows model and aggregation "
      'alone; real data (ImageNet) goes through reading, decoding and augmenting, so it shows '
      'whether input pipeline and disk keep the devices busy. Empty cells were not published; '
      'nothing is interpolated.'
    )
  ]
  if this is not None:
    blocks.append(
      Text(
        f'This machine: `{command}`. Each run is a process of its own; runs are interleaved, one '
        'of each cell before the second of any, so that no busy minute meets one cell alone. '
        'The rate is all images over all seconds of the timed steps of all runs. Data and '
        'configuration are as above: synthetic images of the size and type that the pipeline '
        'delivers, real images through the whole pipeline.'
      )
    )
    if this.remark:
      blocks.append(Text(this.remark))
  return blocks


def _title(model: str) -> str:
  return published.MODELS.get(model, model)
