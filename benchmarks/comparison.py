"""A run beside the published row that is nearest to it, in one line.

Rows of the same model, batch per device and precision are compared; of several, first the run's
preset, then the one with the same data, the nearest number of devices and the fewest other
settings that differ. What differs is said, flag by flag.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any, NamedTuple

from benchmarks import presets, published

__all__ = ['Reference', 'compare', 'line', 'references']

_PRECISIONS = {'float16': 'fp16', 'bfloat16': 'bf16', 'float16+XLA': 'fp16'}
# Of a preset, but nothing that was published.
_OURS = ('device', 'num_gpus', 'model', 'batch_size', 'precision', 'init_learning_rate')


class Reference(NamedTuple):
  """A published rate with what it was measured with.

  Attributes:
    name: of the preset, or of the system.
    model, batch_size, precision, num_devices: as in the driver's flags; images a device.
    images_per_sec: on all devices.
    hardware: what a device is called.
    settings: flag -> value, of those that were published.
    scaling: the rate over so many times that of one device; None for one, or where it isn't known.
  """

  name: str
  model: str
  batch_size: int
  precision: str
  num_devices: int
  images_per_sec: float
  hardware: str
  settings: Mapping[str, Any]
  scaling: float | None

  @property
  def per_device(self) -> float:
    return self.images_per_sec / self.num_devices


@functools.cache
def references() -> tuple[Reference, ...]:
  """Every published rate whose batch size is known, the page's first."""
  found = [_of_preset(p) for p in presets.presets().values() if p.images_per_sec is not None]
  for row in published.accelerators():
    if row.batch_size_per_device is None or 'tf_cnn_benchmarks' in row.framework:
      continue  # the latter are presets
    settings = {'data_name': row.data, 'xla': row.precision.endswith('XLA')}
    found.append(
      Reference(
        row.system,
        row.model,
        row.batch_size_per_device,
        _PRECISIONS[row.precision],
        row.chips,
        row.images_per_sec,
        f'{row.system} with {row.framework}',
        settings,
        None,
      )
    )
  return tuple(found)


def compare(
  flags: Mapping[str, Any], num_devices: int, images_per_second: float
) -> dict[str, Any] | None:
  """The nearest reference and what the run is beside it; None if there is none.

  Args:
    flags: flag -> value, complete.
    num_devices: that the run had.
    images_per_second: on all of them.

  Returns:
    `name`, `images_per_second` (published, all devices), `num_devices`, `hardware`,
    `ratio_per_device` (this run over it), `scaling` where the published rows give it, and
    `differs`: texts.
  """
  wanted = (flags['model'], flags['batch_size'], flags['precision'])
  candidates = [r for r in references() if (r.model, r.batch_size, r.precision) == wanted]
  if not candidates:
    return None
  actual = _settings(flags)

  def distance(reference: Reference) -> tuple[Any, ...]:
    differing = sum(actual.get(name) != value for name, value in reference.settings.items())
    return (
      reference.name != flags.get('preset'),
      reference.settings['data_name'] != actual['data_name'],
      abs(math.log2(reference.num_devices / num_devices)),
      differing,
    )

  nearest = min(candidates, key=distance)
  differs = [
    f'{name} {_shown(actual.get(name))} (there {_shown(value)})'
    for name, value in nearest.settings.items()
    if actual.get(name) != value
  ]
  if nearest.num_devices != num_devices:
    differs.insert(0, f'devices {num_devices} (there {nearest.num_devices})')
  found = {
    'name': nearest.name,
    'images_per_second': nearest.images_per_sec,
    'num_devices': nearest.num_devices,
    'hardware': nearest.hardware,
    'ratio_per_device': images_per_second / num_devices / nearest.per_device,
    'differs': differs,
  }
  return found if nearest.scaling is None else found | {'scaling': nearest.scaling}


def line(found: Mapping[str, Any], hardware: str) -> str:
  """The comparison in one line.

  Args:
    found: from `compare`.
    hardware: what a device of this run is called.
  """
  per_device = found['images_per_second'] / found['num_devices']
  words = [
    f'Published: {found["name"]}, {presets.rate(per_device)} images/sec a device on '
    f'{found["hardware"]}; this run {found["ratio_per_device"]:.3g} times that on {hardware}'
  ]
  if 'scaling' in found:
    words.append(f'scaling there {found["scaling"]:.0%} on {found["num_devices"]} devices')
  words.append(f'differs: {", ".join(found["differs"]) or "nothing that was published"}')
  return '; '.join(words)


def _of_preset(preset: presets.Preset) -> Reference:
  settings = {name: value for name, value in preset.flags.items() if name not in _OURS}
  row = published.cell(
    preset.platform, preset.model, preset.num_gpus, preset.batch_size, preset.data
  )
  scaling = published.scaling(row) if row is not None and preset.num_gpus > 1 else None
  return Reference(
    preset.name,
    preset.model,
    preset.batch_size,
    preset.flags['precision'],
    preset.num_gpus,
    preset.images_per_sec or math.nan,
    preset.machine.partition(' x ')[2],
    {**settings, 'xla': False},
    scaling,
  )


def _settings(flags: Mapping[str, Any]) -> dict[str, Any]:
  """The run's flags in the words of a preset."""
  spec = flags.get('all_reduce_spec')
  nccl = {'nccl': True, 'copy': False}.get(spec, spec)
  return {**flags, 'use_nccl': nccl}


def _shown(value: Any) -> str:
  if value is None:
    return 'none'
  return str(value).lower() if isinstance(value, bool) else str(value)
