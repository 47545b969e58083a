"""What images and an accuracy cost: dollars, from result files or from what others published.

  python -m benchmarks.cost --usd_per_hour=12.20 results/run.json    # of runs of this driver
  python -m benchmarks.cost --usd_per_hour=12.20 --epochs=84 results/run.json
  python -m benchmarks.cost --reference    # TPUv2, V100 and MXNet side by side, as published

The price is that of the whole machine. A result that holds `to_accuracy` gives its own time; with
--epochs the cost is that of so many passes over ImageNet at the measured rate. Published cells that
are empty stay empty.
"""

from collections.abc import Mapping, Sequence
import sys
from typing import Any

from absl import flags

from benchmarks import command, published, results
from benchmarks.loop import say
from hpm.errors import DataError, UsageError

__all__ = ['IMAGENET', 'images_per_usd', 'lines', 'main', 'of_run', 'reference', 'usd_to_epochs']

IMAGENET = 1281167  # images of its training set


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """Prints the table; exit code 0, 1 for a file that can't be used, 2 for flags."""
  values = flags.FlagValues()
  flags.DEFINE_float('usd_per_hour', None, 'Price of the machine.', flag_values=values)
  flags.DEFINE_float('epochs', None, 'Passes over ImageNet.', flag_values=values)
  flags.DEFINE_boolean('reference', False, 'What was published.', flag_values=values)
  paths = command.parse(values, arguments, positional=True)
  for name in ('usd_per_hour', 'epochs'):
    if values[name].value is not None and not 0 < values[name].value < float('inf'):
      raise UsageError(f'--{name}={values[name].value:g}: a finite number above 0 is needed')
  if values.reference:
    for line in reference():
      say(line)
  elif not paths:
    raise UsageError('nothing to do: name result files (--result_json), or give --reference')
  for path in paths:
    for line in _of_file(path, values.usd_per_hour, values.epochs):
      say(line)
  return 0


def images_per_usd(images_per_second: float, usd_per_hour: float) -> float:
  """Images that a dollar trains."""
  return images_per_second * 3600 / usd_per_hour


def usd_to_epochs(epochs: float, images_per_second: float, usd_per_hour: float) -> float:
  """Dollars that so many passes over ImageNet take at a rate."""
  return epochs * IMAGENET / images_per_second / 3600 * usd_per_hour


def of_run(record: Mapping[str, Any], usd_per_hour: float) -> dict[str, float]:
  """The costs of a result, in dollars; see `results.FIELDS`."""
  found = {'usd_per_hour': usd_per_hour}
  rate = 'images_per_second_total' if record.get('num_workers', 1) > 1 else 'images_per_second'
  if rate in record:
    found['images_per_usd'] = images_per_usd(record[rate], usd_per_hour)
  if 'to_accuracy' in record:
    found['usd_to_accuracy'] = record['to_accuracy']['seconds'] / 3600 * usd_per_hour
  return found


def lines(cost: Mapping[str, float]) -> list[str]:
  """What `of_run` gave, in words."""
  said = []
  if 'images_per_usd' in cost:
    said.append(
      f'Cost: {cost["images_per_usd"]:,.0f} images per dollar at {cost["usd_per_hour"]:.2f} $/h'
    )
  if 'usd_to_accuracy' in cost:
    said.append(f'Cost to the accuracy asked for: {cost["usd_to_accuracy"]:.4g} $')
  return said


def reference() -> list[str]:
  """The published comparison, a line a row; the last column follows from the ones before it."""
  form = '{:<20} {:<13} {:<36} {:>6} {:<9} {:>9} {:>6} {:>9} {:>6} {:>6} {:>7}'
  said = [
    form.format(
      *('system', 'precision', 'framework', 'batch', 'data', 'images/s', '$/h', 'images/$'),
      *('top-1', 'epochs', '$'),
    )
  ]
  for row in published.accelerators():
    price = row.usd_per_hour
    per_usd = None if price is None else images_per_usd(row.images_per_sec, price)
    whole = (
      None
      if price is None or row.epochs is None
      else usd_to_epochs(row.epochs, row.images_per_sec, price)
    )
    cells = (
      (row.global_batch, '{}'),
      (row.data, '{}'),
      (row.images_per_sec, '{:.0f}'),
      (price, '{:.2f}'),
      (per_usd, '{:,.0f}'),
      (row.top1, '{:.2f}'),
      (row.epochs, '{:g}'),
      (whole, '{:.1f}'),
    )
    shown = ['' if value is None else text.format(value) for value, text in cells]
    said.append(form.format(row.system, row.precision, row.framework, *shown).rstrip())
  return [*said, 'Empty: not published. $: epochs of 1,281,167 images at that rate and price.']


def _of_file(path: str, usd_per_hour: float | None, epochs: float | None) -> list[str]:
  result = results.read(path)
  price = usd_per_hour or result['flags'].get('usd_per_hour')
  if price is None:
    raise UsageError(f'{path} says no price: give --usd_per_hour')
  found = of_run(result, price)
  said = [f'{path}: {result.get("model", "")}', *lines(found)]
  if epochs is not None:
    if 'images_per_second' not in result:
      raise DataError(f'{path} has no rate, so {epochs:g} epochs have no price')
    whole = usd_to_epochs(epochs, result['images_per_second'], price)
    said.append(f'Cost of {epochs:g} epochs of ImageNet: {whole:.1f} $')
  if len(said) == 1:
    raise DataError(f'{path} has neither a rate nor an accuracy: nothing has a price')
  return said


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
