"""Published configurations by name: what each measured, and the driver's flags that ask for it.

  preset = presets.find('dgx1_p100/resnet50@4/b32/real')
  preset.flags['batch_size'], preset.images_per_sec

PLATFORM/MODEL is the headline of the published page: the larger batch, synthetic data, all GPUs.
@N asks for the cell of N GPUs, /b32 for the other batch, /real for real data. The platforms are
those of `benchmarks.published`, and v100x4_2018: four V100 with tf_cnn_benchmarks in float16, from
the comparison of accelerators.
"""

from collections.abc import Iterable, Mapping
import functools
import re
from typing import Any, NamedTuple

from benchmarks import published
from hpm import errors
from hpm.errors import UsageError

__all__ = ['METHOD', 'Preset', 'figure', 'find', 'presets', 'rate', 'table']

# The page's: 5 runs whose times are averaged, each of 10 steps of warm-up and 100 timed ones.
METHOD = {'num_runs': 5, 'num_warmup_batches': 10, 'num_batches': 100}
# Not published, and nothing that speed depends on: small, so that losses stay finite.
LEARNING_RATE = 0.005
V100 = 'v100x4_2018'
_V100_SYSTEM, _V100_FRAMEWORK = 'aws_p3_8xlarge_v100', 'tf_cnn_benchmarks'
_FORM = 'PLATFORM/MODEL, then @GPUS, /bBATCH or /real, as in dgx1_p100/resnet50@4/b32/real'


class Preset(NamedTuple):
  """A published cell as the driver's flags.

  Attributes:
    name: in its shortest form.
    platform, model, num_gpus, batch_size, data: which cell; GPUs on all hosts, images a GPU, data
      'synthetic' or 'imagenet'.
    flags: name of a flag -> its value; of one host, where there are several.
    num_hosts: machines.
    ps_tasks: parameter-server tasks; 0 where there was one process.
    images_per_sec: as published, on all GPUs; None where it isn't.
    note: why not, then.
    machine: what it ran on.
    source: where it was published.
  """

  name: str
  platform: str
  model: str
  num_gpus: int
  batch_size: int
  data: str
  flags: Mapping[str, Any]
  num_hosts: int
  ps_tasks: int
  images_per_sec: float | None
  note: str
  machine: str
  source: str


@functools.cache
def presets() -> dict[str, Preset]:
  """Name -> preset: one a published cell, and those of the comparison of 2018."""
  found = [_of_page(row) for row in published.results()]
  found += [
    _of_comparison(row)
    for row in published.accelerators()
    if row.system == _V100_SYSTEM and _V100_FRAMEWORK in row.framework
  ]
  return {preset.name: preset for preset in found}


def find(name: str) -> Preset:
  """The preset of that name; its parts may all be written out, as in dgx1_p100/resnet50@8/b64.

  Raises:
    UsageError: with the nearest names, or with the cells that there are.
  """
  known = presets()
  if name in known:
    return known[name]
  match = re.fullmatch('([^/]+)/([^/@]+)(?:@([0-9]+))?((?:/(?:b[0-9]+|real|synthetic))*)', name)
  platforms = _unique(preset.platform for preset in known.values())
  if match is None or match[1] not in platforms:
    wrong = name.partition('/')[0]
    if wrong in platforms:
      raise UsageError(f'--preset={name} is no preset: write {_FORM}')
    raise errors.unknown('platform of --preset', wrong, platforms)
  platform, model = match[1], match[2]
  of_platform = [preset for preset in known.values() if preset.platform == platform]
  family = [preset for preset in of_platform if preset.model == model]
  if not family:
    models = _unique(preset.model for preset in of_platform)
    raise errors.unknown(f'model of --preset={platform}', model, models)
  parts = match[4].split('/')
  batches = [int(part[1:]) for part in parts if part.startswith('b')]
  wanted = (
    int(match[3]) if match[3] else max(preset.num_gpus for preset in family),
    batches[-1] if batches else max(preset.batch_size for preset in family),
    'imagenet' if 'real' in parts else 'synthetic',
  )
  for preset in family:
    if (preset.num_gpus, preset.batch_size, preset.data) == wanted:
      return preset
  gpus = ', '.join(f'@{n}' for n in _unique(preset.num_gpus for preset in family))
  sizes = ', '.join(f'/b{n}' for n in _unique(preset.batch_size for preset in family))
  real = ', /real' if any(preset.data == 'imagenet' for preset in family) else ''
  raise UsageError(
    f'--preset={name} was not measured: {platform}/{model} has {gpus}; {sizes}{real} '
    '(--preset=list shows every cell)'
  )


def figure(preset: Preset) -> str:
  """What was published of it, in words."""
  if preset.images_per_sec is None:
    return preset.note
  return f'{rate(preset.images_per_sec)} images/sec published'


def rate(value: float) -> str:
  """A published rate with the digits that the page gives it."""
  return f'{value:.0f}' if value >= 100 else f'{value:.1f}'


def table() -> list[str]:
  """A line a preset: what the cell is, and what was measured."""
  names = ('preset', 'GPUs', 'hosts', 'ps', 'batch', 'data', 'variables', 'images/s')
  form = '{:<38} {:>4} {:>5} {:>2} {:>5} {:<9} {:<32} {:>8}'
  lines = [form.format(*names)]
  for preset in presets().values():
    value = '' if preset.images_per_sec is None else rate(preset.images_per_sec)
    lines.append(
      form.format(
        preset.name,
        preset.num_gpus,
        preset.num_hosts,
        preset.ps_tasks or '',
        preset.batch_size,
        preset.data,
        _variables(preset),
        value,
      ).rstrip()
      + (f' {preset.note}' if preset.note else '')
    )
  cells = len(published.results())
  return [
    *lines,
    f'{cells} cells of the {published.PAGE}, in float32, and {V100}, in float16; batch: images a '
    f'GPU. {METHOD["num_runs"]} runs of {METHOD["num_warmup_batches"]} steps of warm-up and '
    f'{METHOD["num_batches"]} timed ones.',
  ]


def _of_page(row: published.Result) -> Preset:
  flags = {
    'device': 'gpu',
    'num_gpus': row.gpus_per_host,
    'model': row.model,
    'batch_size': row.batch_size_per_gpu,
    'precision': 'fp32',
    'data_name': row.data,
    'variable_update': row.variable_update,
    'local_parameter_device': row.local_parameter_device,
    'use_nccl': row.nccl,
    'gradient_repacking': 0 if row.nccl else None,  # the page's runs reduced each by itself
    'optimizer': row.optimizer,
    'init_learning_rate': LEARNING_RATE,
    **METHOD,
  }
  platform = published.platforms()[row.platform]
  return Preset(
    _name(row.platform, row.model, row.num_gpus, row.batch_size_per_gpu, row.data),
    row.platform,
    row.model,
    row.num_gpus,
    row.batch_size_per_gpu,
    row.data,
    {name: value for name, value in flags.items() if value is not None},
    row.hosts,
    row.ps_tasks or 0,
    row.images_per_sec,
    row.note,
    f'{row.num_gpus} x {platform.gpu}',
    platform.source,
  )


def _of_comparison(row: published.Accelerator) -> Preset:
  flags = {
    'device': 'gpu',
    'num_gpus': row.chips,
    'model': row.model,
    'batch_size': row.batch_size_per_device,
    'precision': 'fp16',
    'data_name': row.data,
    'init_learning_rate': LEARNING_RATE,
    **METHOD,
  }
  return Preset(
    f'{V100}/{row.model}{"/real" if row.data == "imagenet" else ""}',
    V100,
    row.model,
    row.chips,
    row.batch_size_per_device or 0,
    row.data,
    flags,
    1,
    0,
    row.images_per_sec,
    '',
    f'{row.chips} x Tesla V100',
    row.source,
  )


def _name(platform: str, model: str, num_gpus: int, batch_size: int, data: str) -> str:
  """Without the parts that are the headline's."""
  rows = [row for row in published.results() if (row.platform, row.model) == (platform, model)]
  name = f'{platform}/{model}'
  if num_gpus != max(row.num_gpus for row in rows):
    name += f'@{num_gpus}'
  if batch_size != published.headline_batch(platform, model):
    name += f'/b{batch_size}'
  return f'{name}/real' if data == 'imagenet' else name


def _variables(preset: Preset) -> str:
  flags = preset.flags
  words = [flags.get('variable_update', 'not published')]
  if 'use_nccl' in flags:
    words.append('NCCL' if flags['use_nccl'] else 'without NCCL')
  elif 'local_parameter_device' in flags:
    words.append(flags['local_parameter_device'].upper())
  return ', '.join(words)


def _unique(values: Iterable[Any]) -> list[Any]:
  return list(dict.fromkeys(values))
