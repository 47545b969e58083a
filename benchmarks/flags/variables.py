"""Where variables live, and how gradients meet."""

from absl import flags

from hpm import errors, variable_mgr
from hpm.errors import UsageError

TITLE = 'Variables'
NAMES = ('variable_update', 'local_parameter_device', 'all_reduce_spec', 'use_nccl')

# Manager -> those of the other flags here that it takes.
TAKES = {
  'replicated': ('all_reduce_spec', 'local_parameter_device'),
  'parameter_server': ('local_parameter_device',),
}
PARAMETER_DEVICE = {'replicated': 'gpu', 'parameter_server': 'cpu'}


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'variable_update',
    'replicated',
    f'{", ".join(variable_mgr.VARIABLE_MANAGERS)}. Default: replicated.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'local_parameter_device',
    None,
    'Where parameter_server keeps variables and replicated sums gradients: cpu, the host, or '
    'gpu, spread over the compute devices. Default: gpu for replicated, cpu for '
    'parameter_server.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'all_reduce_spec',
    None,
    f'How replicated sums gradients: {", ".join(variable_mgr.ALL_REDUCES)}. '
    'Default: nccl on two or more GPUs, otherwise copy.',
    flag_values=values,
  )
  flags.DEFINE_boolean(
    'use_nccl',
    None,
    'Short form: true is --all_reduce_spec=nccl, false is --all_reduce_spec=copy.',
    flag_values=values,
  )


def check(options) -> None:
  manager = options.variable_update
  if manager not in variable_mgr.VARIABLE_MANAGERS:
    raise errors.unknown('--variable_update', manager, variable_mgr.VARIABLE_MANAGERS)
  place = options.local_parameter_device
  if place is not None:
    options.local_parameter_device = place = place.lower()
    if place not in ('cpu', 'gpu'):
      raise errors.unknown('--local_parameter_device', place, ('cpu', 'gpu'))
  spec = options.all_reduce_spec
  if spec is not None and spec not in variable_mgr.ALL_REDUCES:
    raise errors.unknown('--all_reduce_spec', spec, variable_mgr.ALL_REDUCES)
  for name in NAMES[1:]:
    takers = [m for m in TAKES if name.replace('use_nccl', 'all_reduce_spec') in TAKES[m]]
    if manager not in takers:
      options.refuse_given(
        [name],
        f'has no effect with --variable_update={manager}: drop it, or use '
        f'--variable_update={" or ".join(takers)}',
      )
  if options.use_nccl is not None:
    meant = 'nccl' if options.use_nccl else 'copy'
    if spec not in (None, meant):
      raise UsageError(
        f'{options.spelled("use_nccl")} means --all_reduce_spec={meant}, but '
        f'--all_reduce_spec={spec} is given: drop one'
      )
    options.all_reduce_spec = spec = meant
  if place == 'cpu' and spec not in (None, 'copy'):
    raise UsageError(
      f'--local_parameter_device=cpu sums on the host, but {spec} sums on the devices: drop one, '
      'or use --all_reduce_spec=copy'
    )
  if options.device == 'cpu':
    _refuse_nccl(options)


def complete(options) -> None:
  takes = TAKES.get(options.variable_update, ())
  if options.device == 'cpu':
    _refuse_nccl(options)
  if options.all_reduce_spec is None and 'all_reduce_spec' in takes:
    several_gpus = options.device == 'gpu' and options.num_gpus > 1
    on_host = options.local_parameter_device == 'cpu'
    options.all_reduce_spec = 'nccl' if several_gpus and not on_host else 'copy'
  if options.local_parameter_device is None and 'local_parameter_device' in takes:
    options.local_parameter_device = PARAMETER_DEVICE[options.variable_update]


def manager_options(options) -> dict[str, str]:
  """What `hpm.variable_mgr.create` takes beside name and devices."""
  takes = TAKES.get(options.variable_update, ())
  given = {name: getattr(options, name) for name in takes if getattr(options, name) is not None}
  if 'local_parameter_device' in given:
    spread = given['local_parameter_device'] == 'gpu'
    given['local_parameter_device'] = 'spread' if spread else 'cpu'
  return given


def _refuse_nccl(options) -> None:
  if options.all_reduce_spec == 'nccl':
    asked = 'use_nccl' if options.use_nccl else 'all_reduce_spec'
    raise UsageError(
      f'{options.spelled(asked)}: NCCL needs GPUs, and the devices are CPUs: use '
      '--all_reduce_spec=copy or --all_reduce_spec=collective'
    )
