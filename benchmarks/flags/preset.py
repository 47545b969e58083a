"""A published configuration as a whole; what the command line says beside it goes before it."""

import functools
from typing import Any

from absl import flags

from benchmarks import presets
from benchmarks.flags import cluster, named
from hpm.errors import UsageError

TITLE = 'Preset'
LIST = 'list'  # the name that asks for the table

# Flag of a preset -> flags of the command line that say the same thing in another way.
_SAYS_SO_TOO = {
  'precision': ('use_fp16',),
  'use_nccl': ('all_reduce_spec', 'hierarchical_copy'),
  'num_batches': ('num_epochs',),
  'init_learning_rate': (
    'learning_rate_schedule',
    'piecewise_learning_rate_schedule',
    'resnet_base_lr',
  ),
}
# What belongs to the preset's manager, and goes with it.
_OF_MANAGER = ('local_parameter_device', 'use_nccl')


def define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    'preset',
    None,
    'A published configuration, such as dgx1_p100/resnet50: sets every flag that it had, and the '
    'result stands beside what was published. @N for the cell of N GPUs, /b32 for the other batch, '
    '/real for real data; list shows every cell. Flags beside it go before it, and the run says '
    'so.',
    flag_values=values,
  )


def check(options) -> None:
  """Puts the preset's flags where the command line has none; comes before all other checks."""
  preset = find(options)
  if preset is None:
    return
  if options.eval:
    raise UsageError(
      f'{options.spelled("preset")} is a measurement of training: drop it, or --eval'
    )
  if preset.ps_tasks and cluster.tasks(options) is None:
    workers, servers = preset.num_hosts, preset.ps_tasks
    if options.dry_run:
      options.local_cluster = f'workers:{workers},ps:{servers}'
    else:
      raise UsageError(
        f'{options.spelled("preset")} ran on {workers} workers and {servers} parameter servers: '
        'give --worker_hosts, --ps_hosts, --job_name=host and --task_index on each host '
        f'(docs/cluster.md); try it here by --local_cluster=workers:{workers},ps:{servers} '
        '--device=cpu; or plan it by --dry_run'
      )
  named.put(options, _flags(options, preset), functools.partial(_replaced, options, preset))
  if options.data_name == 'imagenet' and options.data_dir is None:
    if not options.dry_run:
      raise UsageError(
        f'{options.spelled("preset")} was measured on ImageNet: give its TFRecords by --data_dir, '
        'or drop /real'
      )
    options.data_name = None  # a plan reads none
  if options.use_nccl and 'use_nccl' not in options.given and options.device == 'cpu':
    raise UsageError(
      f'{options.spelled("preset")} has NCCL, which needs GPUs: use --dry_run, without --device, '
      'or --device=cpu --use_nccl=false'
    )


def complete(options) -> None:
  del options  # a preset leaves nothing open but what was not published


def find(options) -> presets.Preset | None:
  """The preset that the flags ask for."""
  return None if options.preset in (None, LIST) else presets.find(options.preset)


def without_devices(options, error: UsageError) -> UsageError:
  """The error of a machine that lacks the preset's GPUs, with what can be done there."""
  if find(options) is None or options.device != 'gpu':
    return error
  nccl = ' --use_nccl=false' if options.use_nccl else ''
  return UsageError(
    f'{options.spelled("preset")} on this machine: {error}: --dry_run plans it, '
    f'--device=cpu{nccl} runs it on CPU devices'
  )


def overridden(options) -> list[str]:
  """What the command line puts in the place of a preset's flag, each in words."""
  preset = find(options)
  if preset is None:
    return []
  words = []
  tasks = cluster.tasks(options) if preset.ps_tasks else None
  if tasks is not None and tasks != (preset.num_hosts, preset.ps_tasks):
    words.append(
      f'{tasks[0]} workers and {tasks[1]} parameter servers (preset: {preset.num_hosts} and '
      f'{preset.ps_tasks})'
    )
  replaced = functools.partial(_replaced, options, preset)
  return words + named.overridden(options, 'preset', _flags(options, preset), replaced)


def facts(options) -> list[tuple[str, str]]:
  """Label and text of the lines that a run or a plan says about its preset."""
  preset = find(options)
  if preset is None:
    return []
  lines = [('Preset', f'{preset.name}: {presets.figure(preset)}, on {preset.machine}')]
  lines += [('Overridden', words) for words in overridden(options)]
  return lines


def _flags(options, preset: presets.Preset) -> dict[str, Any]:
  """What the preset sets."""
  found = dict(preset.flags)
  if preset.ps_tasks:  # each process of a cluster is one run; the result says what differs
    del found['num_runs']
  return found


def _replaced(options, preset: presets.Preset, name: str) -> str | None:
  """The flag of the command line that stands for the preset's flag `name`."""
  for other in _SAYS_SO_TOO.get(name, ()):
    if other in options.given:
      return other
  if name == 'data_name' and preset.data == 'synthetic' and 'data_dir' in options.given:
    return 'data_dir'
  manager = options.given.get('variable_update')
  if name in _OF_MANAGER and manager not in (None, preset.flags.get('variable_update')):
    return 'variable_update'
  return None
