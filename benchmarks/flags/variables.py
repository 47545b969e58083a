"""Where variables live, and how gradients meet."""

import re
from typing import Any

from absl import flags

from benchmarks.flags import cluster
from hpm import errors, json_file, variable_mgr
from hpm.errors import UsageError
from hpm.variable_mgr import spec as specs
from hpm.variable_mgr import topology as topologies

TITLE = 'Variables'

# Flag -> the managers that take it.
_REPLICATED = ('replicated',)
_SYNCHRONOUS = ('replicated', 'parameter_server')
TAKERS = {
  'local_parameter_device': _SYNCHRONOUS,
  'staged_vars': ('parameter_server',),
  'all_reduce_spec': _REPLICATED,
  'use_nccl': _REPLICATED,
  'hierarchical_copy': _REPLICATED,
  'network_topology': _REPLICATED,
  'gradient_repacking': _REPLICATED,
  'agg_small_grads_max_bytes': _REPLICATED,
  'agg_small_grads_max_group': _REPLICATED,
  'compact_gradient_transfer': _REPLICATED,
  'variable_consistency': _SYNCHRONOUS,
  'gradient_reduction': _SYNCHRONOUS,
  'batch_norm_statistics': _SYNCHRONOUS,
}
NAMES = ('variable_update', *TAKERS)
# Flags about updates, which only training makes.
UPDATES = tuple(name for name in TAKERS if name != 'local_parameter_device')
# The same across processes; what is not here has no effect there.
DISTRIBUTED_TAKERS = {
  'gradient_repacking': ('collective_all_reduce',),
  'agg_small_grads_max_bytes': ('collective_all_reduce',),
  'agg_small_grads_max_group': ('collective_all_reduce',),
  'compact_gradient_transfer': tuple(variable_mgr.DISTRIBUTED_MANAGERS),
  'gradient_reduction': tuple(variable_mgr.DISTRIBUTED_MANAGERS),
}
# Why not, where that needs to be said.
_NOT_DISTRIBUTED = {
  'variable_consistency': 'does not go with a cluster: each worker would have gradients in '
  'flight, and the chief alone writes checkpoints, so none could be gone on from: drop it, or use '
  '--cross_replica_sync=false with parameter_server',
  'staged_vars': 'is what --variable_update=distributed_replicated does across processes: its '
  'devices have the variables before a step begins, and no older ones: use that',
  'batch_norm_statistics': 'is of the devices of one process; across processes moving averages are '
  'means over all devices: drop it',
}
PARAMETER_DEVICE = {'replicated': 'spread', 'parameter_server': 'cpu'}
_SPREAD = ('gpu', 'spread')  # two names of one place; the first is tf_cnn_benchmarks'

_CHOICES = {
  'variable_consistency': ('strong', 'relaxed'),
  'gradient_reduction': ('mean', 'sum'),
  'batch_norm_statistics': ('mean', 'first', 'cross_replica'),
}


def define(values: flags.FlagValues) -> None:
  def string(name: str, default: str | None, text: str) -> None:
    flags.DEFINE_string(name, default, text, flag_values=values)

  def boolean(name: str, default: bool | None, text: str) -> None:
    flags.DEFINE_boolean(name, default, text, flag_values=values)

  string(
    'variable_update',
    'replicated',
    f'{", ".join(variable_mgr.VARIABLE_MANAGERS)}; across processes '
    f'{", ".join(variable_mgr.DISTRIBUTED_MANAGERS)}; or module:class for a manager of your own. '
    'Default: replicated.',
  )
  string(
    'local_parameter_device',
    None,
    'Where parameter_server keeps variables and copy sums gradients: cpu, the host; spread (or '
    'gpu), over all compute devices of either kind; gpu:N, compute device N. Default: spread for '
    'replicated, cpu for parameter_server.',
  )
  boolean(
    'staged_vars',
    False,
    'parameter_server: towers compute with the variables that the step before fetched, so they '
    'need not wait for them; older by one update. Default: false.',
  )
  string(
    'all_reduce_spec',
    None,
    f'How replicated sums gradients: {", ".join(variable_mgr.ALL_REDUCES)}, with #N the number '
    'of shards, A/B within and between groups of devices, A:32k:B by size in bytes; or '
    'module:function. Default: nccl on two or more GPUs, otherwise copy.',
  )
  boolean(
    'use_nccl',
    None,
    'Short form: true is --all_reduce_spec=nccl, false is --all_reduce_spec=copy.',
  )
  boolean('hierarchical_copy', None, 'Short form: true is --all_reduce_spec=hierarchical_copy.')
  string(
    'network_topology',
    None,
    f'Of hierarchical_copy: {", ".join(topologies.TOPOLOGIES)}, or a JSON file with a matrix of '
    'the bandwidth between each two devices. Default: dgx1.',
  )
  flags.DEFINE_integer(
    'gradient_repacking',
    None,
    'Reduce gradients as N buckets of equal size, in the order in which backprop makes them; 0 '
    'reduces each by itself. Default: 0, but with nccl, collective and collective_all_reduce '
    'whole gradients go together up to an eighth of all bytes.',
    flag_values=values,
  )
  string(
    'agg_small_grads_max_bytes',
    '0',
    'Reduce runs of gradients up to this size as one; k, M are powers of 1024. Default: 0, none.',
  )
  flags.DEFINE_integer(
    'agg_small_grads_max_group',
    10,
    'The most gradients in such a run. Default: 10.',
    flag_values=values,
  )
  boolean(
    'compact_gradient_transfer',
    False,
    'Gradients cross between devices in half precision: float16 with --precision=fp16, otherwise '
    'bfloat16. Default: false.',
  )
  string(
    'variable_consistency',
    'strong',
    'strong, or relaxed: gradients are combined and applied during the next step. Default: strong.',
  )
  string(
    'gradient_reduction',
    'mean',
    "mean over the global batch, or sum over devices of each device's mean, as "
    "tf_cnn_benchmarks' replicated. Default: mean.",
  )
  string(
    'batch_norm_statistics',
    'mean',
    'Moving averages of batch norm: mean over devices, those of the first, or cross_replica: '
    'normalise by the statistics of the global batch. Default: mean.',
  )


def check(options) -> None:
  manager = options.variable_update
  if manager == 'distributed_all_reduce':  # tf_cnn_benchmarks' name
    manager = options.variable_update = 'collective_all_reduce'
  own = specs.is_path(manager, variable_mgr.VARIABLE_MANAGERS)
  known = {**variable_mgr.VARIABLE_MANAGERS, **variable_mgr.DISTRIBUTED_MANAGERS}
  if not own and manager not in known:
    raise errors.unknown('--variable_update', manager, known)
  for name, takers in TAKERS.items():
    if _distributed(options):
      if manager not in DISTRIBUTED_TAKERS.get(name, ()):
        reason = f'has no effect with --variable_update={manager} across processes: drop it'
        options.refuse_given([name], _NOT_DISTRIBUTED.get(name, reason))
    elif manager not in takers:
      options.refuse_given(
        [name],
        f'has no effect with --variable_update={manager}: drop it, or use '
        f'--variable_update={" or ".join(takers)}',
      )
  for name, valid in _CHOICES.items():
    if getattr(options, name) not in valid:
      raise errors.unknown(f'--{name}', getattr(options, name), valid)
  _check_place(options)
  _check_spec(options)
  _check_packing(options)
  _check_topology(options)
  if options.batch_norm_statistics == 'cross_replica':
    for name, unset in (
      ('xla', False),
      ('xla_compile', False),
      ('accumulate', 1),
      ('recompute', False),
    ):
      if (getattr(options, name, None) or unset) != unset:
        raise UsageError(
          f'--batch_norm_statistics=cross_replica needs collectives inside the towers, which '
          f'{options.spelled(name)} can not have: drop one'
        )
    if options.model.startswith('keras:'):
      raise UsageError(
        f"--batch_norm_statistics=cross_replica: --model={options.model} has Keras's own layers, "
        'which know no other device: drop it, or use a model of this library'
      )


def complete(options) -> None:
  takers_of = DISTRIBUTED_TAKERS if _distributed(options) else TAKERS
  takes = [name for name, takers in takers_of.items() if options.variable_update in takers]
  if options.device == 'cpu':
    _refuse_nccl(options)
  if options.all_reduce_spec is None and 'all_reduce_spec' in takes:
    several_gpus = options.device == 'gpu' and options.num_gpus > 1
    on_host = options.local_parameter_device not in (None, *_SPREAD)
    options.all_reduce_spec = 'nccl' if several_gpus and not on_host else 'copy'
  if options.local_parameter_device is None and 'local_parameter_device' in takes:
    options.local_parameter_device = PARAMETER_DEVICE[options.variable_update]
  number = _device_number(options.local_parameter_device)
  if number is not None and number >= options.num_gpus:
    raise UsageError(
      f'{options.spelled("local_parameter_device")}: there are {options.num_gpus} compute devices, '
      f'the last is gpu:{options.num_gpus - 1}'
    )
  if options.network_topology in topologies.TOPOLOGIES and options.num_gpus > 1:
    try:
      topologies.create(options.network_topology, options.num_gpus)
    except UsageError as error:
      raise UsageError(f'{options.spelled("network_topology")}: {error}') from None


def manager_options(options) -> dict[str, Any]:
  """What `hpm.variable_mgr.create` takes beside name and devices; nothing that is its default."""
  given: dict[str, Any] = {}
  for name in ('all_reduce_spec', 'staged_vars'):
    if getattr(options, name):
      given[name] = getattr(options, name)
  if options.gradient_repacking is not None:
    given['gradient_repacking'] = options.gradient_repacking
  place = options.local_parameter_device
  if place is not None:
    number = _device_number(place)
    if number is not None:
      place = f'/{options.device.upper()}:{number}'
    given['local_parameter_device'] = 'spread' if place in _SPREAD else place
  if options.network_topology is not None:
    given['network_topology'] = _topology(options.network_topology)
  small = _small_bytes(options)
  if small:
    given['agg_small_grads_max_bytes'] = small
    given['agg_small_grads_max_group'] = options.agg_small_grads_max_group
  if options.compact_gradient_transfer:
    given['transfer_dtype'] = 'float16' if options.precision == 'fp16' else 'bfloat16'
  for name in ('variable_consistency', 'batch_norm_statistics'):
    if getattr(options, name) not in (None, _CHOICES[name][0]):
      given[name] = getattr(options, name)
  return given


def step_options(options) -> dict[str, Any]:
  """What `hpm.TrainStep` takes of this concern."""
  return {'gradient_reduction': options.gradient_reduction}


def _distributed(options) -> bool:
  """Whether several processes train one model."""
  return cluster.tasks(options) is not None


def _check_place(options) -> None:
  place = options.local_parameter_device
  if place is None:
    return
  options.local_parameter_device = place = place.lower()
  if place not in ('cpu', *_SPREAD) and _device_number(place) is None:
    raise errors.unknown('--local_parameter_device', place, ('cpu', *_SPREAD, 'gpu:N'))


def _check_spec(options) -> None:
  """The all-reduce, by whichever flag it is asked for; it is `all_reduce_spec` afterwards."""
  for name, value, meant in (
    ('use_nccl', True, 'nccl'),
    ('use_nccl', False, 'copy'),
    ('hierarchical_copy', True, 'hierarchical_copy'),
  ):
    if getattr(options, name) is not value:
      continue
    if options.all_reduce_spec not in (None, meant):
      raise UsageError(
        f'{options.spelled(name)} means --all_reduce_spec={meant}, but '
        f'--all_reduce_spec={options.all_reduce_spec} is given: drop one'
      )
    options.all_reduce_spec = meant
  spec = options.all_reduce_spec
  if spec is None:
    return
  try:
    names = _names(spec)
  except UsageError as error:
    raise UsageError(f'--all_reduce_spec: {error}') from None
  if options.local_parameter_device not in (None, *_SPREAD) and 'copy' not in names:
    place = options.local_parameter_device
    where = 'on the host' if place == 'cpu' else f'on compute device {place}'
    raise UsageError(
      f'--local_parameter_device={place} sums {where}, but {spec} has places of its own: drop one, '
      'or use --all_reduce_spec=copy'
    )
  if options.device == 'cpu':
    _refuse_nccl(options)


def _check_packing(options) -> None:
  if options.gradient_repacking is not None and options.gradient_repacking < 0:
    raise UsageError(f'{options.spelled("gradient_repacking")}: 0 or more is needed')
  small = _small_bytes(options)
  if not small:
    options.refuse_given(
      ['agg_small_grads_max_group'],
      'has no effect without --agg_small_grads_max_bytes, such as --agg_small_grads_max_bytes=32k: '
      'add that, or drop this',
    )
  elif options.gradient_repacking:
    raise UsageError(
      f'{options.spelled("gradient_repacking")} packs all gradients, so that '
      f'{options.spelled("agg_small_grads_max_bytes")} finds no small ones: drop one'
    )
  if options.agg_small_grads_max_group < 2:
    raise UsageError(f'{options.spelled("agg_small_grads_max_group")}: 2 or more is needed')


def _check_topology(options) -> None:
  if options.network_topology is None:
    return
  if 'hierarchical_copy' not in _names(options.all_reduce_spec or ''):
    options.refuse_given(
      ['network_topology'],
      'is about --all_reduce_spec=hierarchical_copy: add that, or drop this',
    )
  _topology(options.network_topology)


def _names(spec: str) -> list[str]:
  """Of all algorithms of a spec."""
  if not spec:
    return []
  ranges = specs.parse(spec, variable_mgr.ALL_REDUCES)
  return [level.name for one in ranges for level in one.algorithm.levels]


def _topology(text: str) -> str | list[list[float]]:
  """A topology's name, or the matrix in a file."""
  if text in topologies.TOPOLOGIES:
    return text
  flag = f'--network_topology={text}'
  if not text.endswith('.json'):
    raise errors.unknown('--network_topology', text, [*topologies.TOPOLOGIES, 'FILE.json'])
  try:
    links = json_file.read(text)
    topologies.from_links(links)
  except UsageError as error:
    raise UsageError(f'{flag}: {error}') from None
  except (OSError, ValueError, TypeError) as error:
    raise UsageError(
      f'{flag} is no matrix ({error}): a JSON file with one row of numbers a device is needed, '
      'such as [[0, 25], [25, 0]]'
    ) from None
  return links


def _small_bytes(options) -> int:
  text = options.agg_small_grads_max_bytes
  if text in (None, '0'):
    return 0
  try:
    return specs.parse_size(text)
  except UsageError as error:
    raise UsageError(f'--agg_small_grads_max_bytes: {error}') from None


def _device_number(place: str | None) -> int | None:
  match = re.fullmatch('gpu:([0-9]+)', place or '')
  return int(match[1]) if match else None


def _refuse_nccl(options) -> None:
  if options.all_reduce_spec and 'nccl' in _names(options.all_reduce_spec):
    asked = 'use_nccl' if options.use_nccl else 'all_reduce_spec'
    raise UsageError(
      f'{options.spelled(asked)}: NCCL needs GPUs, and the devices are CPUs: use '
      '--all_reduce_spec=copy or --all_reduce_spec=collective'
    )
