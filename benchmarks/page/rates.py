"""What one platform got, in one form whether it was published or measured here."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from benchmarks import presets, published

__all__ = ['Platform', 'Rate', 'measured', 'published_platforms']

SYNTHETIC = 'synthetic'
# Label -> key of a published platform.
_ENVIRONMENT = {
  'Instance': 'instance',
  'GPU': 'gpus',
  'Operating system': 'os',
  'CUDA': 'cuda',
  'cuDNN': 'cudnn',
  'TensorFlow commit': 'tensorflow_commit',
  'Benchmark commit': 'benchmark_commit',
  'Build': 'build',
  'Disk': 'disk',
  'Disk, MB/s': 'disk_mb_per_s',
  'Network, Gbit/s': 'network_gbit_per_s',
  'Data set': 'dataset',
  'Test date': 'date',
  'Source': 'source',
}
_SHORT = {
  'dgx1_p100': 'P100, DGX-1',
  'gce_k80': 'K80, Google',
  'ec2_k80': 'K80, Amazon',
  'ec2_k80_distributed': 'K80, distributed',
}


class Rate(NamedTuple):
  """Images a second of one cell.

  Attributes:
    model, num_devices, batch_size, data: which; images a device, data 'synthetic' or a name.
    value: on all devices; None where there is none.
    lowest, highest: of the runs, where they are known.
    num_runs: how many runs it is the mean of.
    note: why there is no value, or what makes it doubtful.
    per_cpu_s: images a second of CPU time of the process, which other work on the machine leaves
      nearly as it is; None where nothing is known of it.
  """

  model: str
  num_devices: int
  batch_size: int
  data: str
  value: float | None
  lowest: float | None = None
  highest: float | None = None
  num_runs: int = 5
  note: str = ''
  per_cpu_s: float | None = None

  @property
  def per_device(self) -> float | None:
    return None if self.value is None else self.value / self.num_devices


@dataclasses.dataclass(frozen=True)
class Platform:
  """One platform's figures and what they were measured with.

  Attributes:
    name: short and unique.
    title: for headings.
    short: for columns and legends.
    device: what a device is called, 'GPU' or 'CPU device'.
    environment: label -> text.
    configuration: model -> variable_update and local_parameter_device, as on the page.
    optimizer: of all cells.
    rates: all cells.
    remark: what has to stand under each of its tables; empty if nothing.
  """

  name: str
  title: str
  short: str
  device: str
  environment: Mapping[str, str]
  configuration: Mapping[str, tuple[str, str]]
  optimizer: str
  rates: Sequence[Rate]
  remark: str = ''

  @property
  def models(self) -> list[str]:
    """In the page's order, and others after them."""
    found = {rate.model for rate in self.rates}
    known = [model for model in published.MODELS if model in found]
    return known + sorted(found.difference(known))

  @property
  def counts(self) -> list[int]:
    return sorted({rate.num_devices for rate in self.rates})

  @property
  def real_data(self) -> list[str]:
    """Names of the real data sets, in the order of the cells."""
    return list(dict.fromkeys(r.data for r in self.rates if r.data != SYNTHETIC))

  @property
  def distributed(self) -> bool:
    return self.name.endswith('distributed')

  def headline_batch(self, model: str) -> int:
    """The larger batch of the model."""
    return max(rate.batch_size for rate in self.rates if rate.model == model)

  def other_batches(self, model: str) -> list[int]:
    """Batch sizes beside the headline, largest first."""
    found = {rate.batch_size for rate in self.rates if rate.model == model}
    return sorted(found - {self.headline_batch(model)}, reverse=True)

  def rate(
    self, model: str, num_devices: int, data: str, batch_size: int | None = None
  ) -> Rate | None:
    """One cell; the headline's batch where none is given."""
    batch = self.headline_batch(model) if batch_size is None else batch_size
    for rate in self.rates:
      if (rate.model, rate.num_devices, rate.batch_size, rate.data) == (
        *(model, num_devices, batch),
        data,
      ):
        return rate
    return None

  def scaling(self, model: str, num_devices: int, data: str = SYNTHETIC) -> float | None:
    """The rate over that of so many times one device, at the headline's batch."""
    one, many = self.rate(model, 1, data), self.rate(model, num_devices, data)
    if one is None or many is None or not one.value or many.value is None:
      return None
    return many.value / (num_devices * one.value)

  def real_share(self, model: str, num_devices: int, data: str) -> float | None:
    """The rate with real data over that with synthetic data."""
    synthetic, real = self.rate(model, num_devices, SYNTHETIC), self.rate(model, num_devices, data)
    if synthetic is None or real is None or not synthetic.value or real.value is None:
      return None
    return real.value / synthetic.value


def published_platforms() -> list[Platform]:
  """The four of the page."""
  found = []
  for name, facts in published.platforms().items():
    rows = [row for row in published.results() if row.platform == name]
    environment = {}
    for label, column in _ENVIRONMENT.items():
      value = getattr(facts, column)
      why = published.reason(facts, column)
      environment[label] = f'– ({why})' if why else f'{value:g}' if label[-2:] == '/s' else value
    configuration = {row.model: (_update(row), row.local_parameter_device or '–') for row in rows}
    found.append(
      Platform(
        name,
        f'{facts.instance} ({facts.gpus})',
        _SHORT[name],
        'GPU',
        environment,
        configuration,
        rows[0].optimizer,
        [
          Rate(
            row.model,
            row.num_gpus,
            row.batch_size_per_gpu,
            row.data,
            row.images_per_sec,
            num_runs=presets.METHOD['num_runs'],
            note=row.note,
          )
          for row in rows
        ],
      )
    )
  return found


def measured(
  rates: Sequence[Rate],
  results: Iterable[Mapping[str, Any]],
  configuration: Mapping[str, tuple[str, str]],
  optimizer: str,
  data_sets: Mapping[str, str],
  remark: str,
) -> Platform:
  """This machine.

  Args:
    rates: of its cells.
    results: of its runs, from `benchmarks.results`; at least one.
    configuration, optimizer, remark: see `Platform`.
    data_sets: name of real data -> what it is.
  """
  done = sorted(results, key=lambda result: result['started_at'])
  facts = done[-1]['machine']
  on_gpus = bool(facts['gpus'])
  hardware = ', '.join(dict.fromkeys(facts['gpus'])) if on_gpus else facts['cpu']
  loads = [r['other_load_cores'] for r in done if 'other_load_cores' in r]
  revisions = dict.fromkeys(_revision(r['machine']['git_revision']) for r in done)
  compute = f'{len(facts["gpus"])} x {hardware}' if on_gpus else 'none: logical CPU devices'
  environment = {
    'Processor': f'{facts["cpu"]}, {facts["cores"]} cores',
    'Memory': f'{facts["memory_mib"] / 1024:.0f} GiB',
    'GPU': compute,
    'Operating system': facts['system'],
    'TensorFlow': facts['tensorflow'],
    'oneDNN': facts['onednn'],
    'Python': facts['python'],
    'Revision': ', '.join(revisions),
    'Other load': f'{max(loads):.1f} cores at most, {sum(loads) / len(loads):.2f} on average'
    if loads
    else 'not known',
    'Real data': '; '.join(f'{name}: {text}' for name, text in data_sets.items()) or 'none',
    'Test date': done[-1]['started_at'][:10],
  }
  return Platform(
    'this_machine',
    f'this machine ({hardware})',
    'this machine',
    'GPU' if on_gpus else 'CPU device',
    environment,
    configuration,
    optimizer,
    rates,
    remark,
  )


def _revision(text: str | None) -> str:
  commit, plus, changes = (text or 'not known').partition('+')
  return commit[:10] + plus + changes


def _update(row: published.Result) -> str:
  if row.nccl is None:
    return row.variable_update
  return f'{row.variable_update} ({"with" if row.nccl else "without"} NCCL)'
