"""How many images a second more devices would give, from the rate of one device.

  python -m benchmarks.scaling --rate=51.9 --model=resnet50 --batch_size=64 --num_gpus=8 \
    --variable_update=distributed_replicated --hosts=1,2,4,8 --machine=ec2_k80
  python -m benchmarks.scaling --result=one.json --num_gpus=8 --host_gb_per_s=20 --crowding=0.02
  python -m benchmarks.scaling --validate --plot=scaling.png

It takes the driver's flags for the model, the mode and the devices of a host (--num_gpus), and

  --rate                images a second of one device, or
  --result              result file (--result_json) of a run on one device of the same flags
  --hosts               how many, by commas; default 1
  --num_ps              parameter servers, on the workers' hosts; default: as many as hosts
  --machine             constants of a platform of TensorFlow's Benchmarks page, as --validate finds
                        them: dgx1_p100, gce_k80, ec2_k80; or
  --crowding            share that computing takes longer beside other devices; default 0
  --host_gb_per_s       GB a second between all devices of a host together
  --network_gbit_per_s  Gbit a second that a host sends, and at the same time receives

The model is `benchmarks.scaling_model`. Bytes are the managers' own and what overlaps is what the
plan of the step finds, both read from graphs as by `benchmarks.plan`. --validate holds the model to
all published rows on synthetic data (see `benchmarks.scaling_page`); --plot draws them.

Exit code: 0 done; 1 a result file that can't be used; 2 flags that can't work.
"""

from __future__ import annotations  # flags.Options in a signature

from collections.abc import Sequence
import functools
import sys
from typing import Any

from absl import flags as absl_flags
import rich.box
import rich.console
import rich.table

from benchmarks import command, flags, plan, results
from benchmarks.scaling_model import Load, Machine, Network, step
from hpm.errors import DataError, UsageError

__all__ = ['load_of', 'main', 'network_of']

_NETWORK = ('model', 'image_size', 'num_classes', 'stem_rewrite')
_HELP = 'See the top of this page.'
_SMALL = 'lenet'  # its graph tells quickly what a manager moves, as a multiple of the gradients


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """One command, from its flags to its exit code."""
  own, rest = _split(arguments)
  console = rich.console.Console(highlight=False)
  if own.validate:
    from benchmarks import scaling_page

    if rest:
      raise UsageError(f'{rest[0]} does not go with --validate, which takes --plot alone')
    scaling_page.show(console, own.plot)
    return 0
  if own.plot:
    raise UsageError('--plot draws what --validate finds: add that')
  hosts = _numbers('hosts', own.hosts or '1')
  run, rest = _measured(own, rest)
  machine = _machine(own, hosts)
  options = _options([*rest, *_cluster(_mode(rest), 1, own.num_ps)])
  flags.complete(options, [f'/GPU:{i}' for i in range(options.num_gpus or 1)])
  rate = run if own.rate is None else own.rate
  if not 0 < rate < float('inf'):
    raise UsageError(f'--rate={rate:g}: images a second above 0 are needed')
  console.print(_table(options, rest, rate, machine, hosts, own.num_ps), soft_wrap=True)
  return 0


def load_of(arguments: Sequence[str], hosts: int = 1, num_ps: int | None = None) -> Load:
  """What a step has to move within each host, from plans of its graphs.

  Args:
    arguments: flags of the driver, without those of a cluster.
    hosts: workers.
    num_ps: parameter servers, of modes that have them; None: as many as workers.
  """
  ready = _ready(*_model(arguments))
  size = sum(count for _, count in ready)
  inside, _, _ = _moved(*_modes(arguments), *_cluster(_mode(arguments), hosts, num_ps))
  return Load(size, ready, inside * size)


def network_of(
  arguments: Sequence[str], load: Load, hosts: int, num_ps: int | None = None
) -> Network | None:
  """What crosses between workers, each on a host of its own, with the servers on the first ones.

  Args:
    arguments, hosts, num_ps: as for `load_of`.
    load: of these.
  """
  cluster = _cluster(_mode(arguments), hosts, num_ps)
  if hosts == 1 or not cluster:
    return None
  _, own, ring = _moved(*_modes(arguments), *cluster)
  half = own / 2 * load.gradient_bytes
  if ring:
    return Network(half, half, overlaps=True)
  largest = max(count for _, count in load.ready)
  return Network.of_servers(half, hosts, num_ps or hosts, largest)


@functools.cache
def _ready(*arguments: str) -> tuple[tuple[float, float], ...]:
  """(share of backprop before it, bytes) of each gradient of a model."""
  made = plan.of(_options([*arguments, '--num_gpus=1', '--variable_update=independent']))
  return tuple((wait.share, float(wait.bytes)) for wait in made.waits)


@functools.cache
def _moved(*arguments: str) -> tuple[float, float, bool]:
  """Bytes that move within a host, and between it and others, as multiples of the gradients';
  whether the latter go around a ring."""
  options = _options([f'--model={_SMALL}', '--batch_size=2', *arguments])
  made = plan.of(options)
  size = sum(wait.bytes for wait in made.waits)
  inside = between = 0
  for transfer in made.transfers:
    if transfer.link == 'network':
      between += transfer.bytes
    elif transfer.link != 'host':  # what the host's memory moves for itself
      inside += transfer.bytes * (options.num_gpus if transfer.link == 'collective' else 1)
  return inside / size, between / size, any(t.destination == 'all workers' for t in made.transfers)


def _options(arguments: Sequence[str]) -> flags.Options:
  options = flags.parse([*arguments, '--dry_run'])
  if options is None or options.model == flags.model.LIST:
    raise UsageError("--help and --model=list are the driver's: python benchmarks/run.py --help")
  return options


def _model(arguments: Sequence[str]) -> list[str]:
  """The flags that make the network what it is."""
  found = [a for a in arguments if _name(a) in _NETWORK]
  return [*found, '--device=gpu', '--batch_size=1']


def _modes(arguments: Sequence[str]) -> list[str]:
  """The flags that say what is moved, and how."""
  found = [a for a in arguments if _name(a) not in (*_NETWORK, 'batch_size', 'device')]
  return [*found, '--device=gpu']


def _name(argument: str) -> str:
  return argument.lstrip('-').partition('=')[0]


def _table(
  options: flags.Options,
  arguments: Sequence[str],
  rate: float,
  machine: Machine,
  hosts: Sequence[int],
  num_ps: int | None,
) -> rich.table.Table:
  """A row for each number of hosts."""
  batch, devices = options.batch_size, options.num_gpus or 1
  if max(hosts) > 1 and options.variable_update not in flags.cluster.MODES:
    raise UsageError(
      f'--variable_update={options.variable_update} works on one host: for several give '
      f'{", ".join(flags.cluster.MODES)}'
    )
  table = rich.table.Table(
    title=f'{options.model}, {batch} images on each of {devices} devices a host, '
    f'{options.variable_update}',
    title_justify='left',
    box=rich.box.SIMPLE,
    padding=0,
  )
  for column in ('hosts', 'devices', 'images/s', 'of linear', 'ms', 'compute', 'host', 'network'):
    table.add_column(column, justify='right')
  for count in hosts:
    load = load_of(arguments, count, num_ps)
    network = network_of(arguments, load, count, num_ps)
    found = step(batch / rate, load, machine, devices, network)
    many = count * devices
    images = many * batch / found.total
    parts = (found.total, found.compute, found.host, found.network)
    table.add_row(
      str(count),
      str(many),
      f'{images:,.1f}',
      f'{images / many / rate:.1%}',
      *(f'{1e3 * part:,.1f}' for part in parts),
    )
  return table


def _cluster(mode: str | None, hosts: int, num_ps: int | None = None) -> list[str]:
  """Flags of so many workers; none for what one process does by itself."""
  if mode not in flags.cluster.MODES or (mode == 'parameter_server' and hosts == 1):
    return []
  servers = f',ps:{num_ps or hosts}' if flags.cluster.MODES[mode] else ''
  return [f'--local_cluster=workers:{hosts}{servers}']


def _mode(arguments: Sequence[str]) -> str | None:
  """What --variable_update says, if it is there."""
  values = [a.partition('=')[2] for a in arguments if a.lstrip('-').startswith('variable_update=')]
  return values[-1] if values else None


def _split(arguments: Sequence[str]) -> tuple[Any, list[str]]:
  """This command's flags, and the driver's."""
  values = absl_flags.FlagValues()
  absl_flags.DEFINE_string('result', None, _HELP, flag_values=values)
  absl_flags.DEFINE_string('hosts', None, _HELP, flag_values=values)
  absl_flags.DEFINE_string('machine', None, _HELP, flag_values=values)
  absl_flags.DEFINE_string('plot', None, _HELP, flag_values=values)
  absl_flags.DEFINE_float('rate', None, _HELP, flag_values=values)
  absl_flags.DEFINE_float('crowding', None, _HELP, flag_values=values)
  absl_flags.DEFINE_float('host_gb_per_s', None, _HELP, flag_values=values)
  absl_flags.DEFINE_float('network_gbit_per_s', None, _HELP, flag_values=values)
  absl_flags.DEFINE_integer('num_ps', None, _HELP, flag_values=values)
  absl_flags.DEFINE_boolean('validate', False, _HELP, flag_values=values)
  mine = {*values, 'novalidate'}
  own = [a for a in arguments if a.lstrip('-').partition('=')[0] in mine]
  command.parse(values, own)
  return values, [a for a in arguments if a not in own]


def _numbers(name: str, text: str) -> list[int]:
  try:
    found = [int(part) for part in text.split(',')]
  except ValueError:
    found = [0]
  if min(found) < 1:
    raise UsageError(f'--{name}={text}: whole numbers above 0, by commas, such as 1,2,4,8')
  return found


def _measured(own: Any, rest: list[str]) -> tuple[float, list[str]]:
  """The rate of --result, and its flags before those of the command line."""
  if (own.rate is None) == (own.result is None):
    raise UsageError('give --rate, images a second of one device, or --result, a file with it')
  if own.result is None:
    return 0.0, rest
  record = results.read(own.result)
  if record['status'] != 'ok' or 'images_per_second' not in record:
    raise DataError(f'{own.result}: the run has no rate: {record.get("reason", record["status"])}')
  if len(record['devices']) != 1 or record.get('num_workers', 1) != 1:
    raise DataError(f'{own.result}: a run on one device is needed, this one had more')
  known = [f'--model={record["model"]}', f'--batch_size={record["batch_size_per_device"]}']
  return record['images_per_second'], [*known, *rest]


def _machine(own: Any, hosts: Sequence[int]) -> Machine:
  given = [
    n for n in ('crowding', 'host_gb_per_s', 'network_gbit_per_s') if own[n].value is not None
  ]
  for name in given:
    if not own[name].value >= (0 if name == 'crowding' else 1e-9):
      raise UsageError(f'--{name}={own[name].value:g}: a number above 0 is needed')
  base = Machine(0.0, float('inf'))
  if own.machine is not None:
    from benchmarks import scaling_page

    base = scaling_page.machine(own.machine)
  elif own.host_gb_per_s is None:
    raise UsageError(
      '--host_gb_per_s is missing, or --machine: how fast the devices of a host exchange bytes'
    )
  found = Machine(
    base.crowding if own.crowding is None else own.crowding,
    base.host_rate if own.host_gb_per_s is None else own.host_gb_per_s * 1e9,
    base.network_rate if own.network_gbit_per_s is None else own.network_gbit_per_s * 1e9 / 8,
  )
  if max(hosts) > 1 and found.network_rate == float('inf'):
    raise UsageError('--network_gbit_per_s is missing: several hosts exchange bytes')
  return found


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
