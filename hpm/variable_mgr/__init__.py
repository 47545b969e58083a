"""Variable managers: where variables live, what a tower reads, how gradients meet, who updates.

A new mode is one new file and one line in `VARIABLE_MANAGERS`; a new all-reduce one line in
`ALL_REDUCES`. Both take yours as well, or are given its 'module:class' in place of a name; see
docs/own_managers.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpm import registry
from hpm.errors import UsageError
from hpm.variable_mgr import spec

if TYPE_CHECKING:
  from hpm.variable_mgr.allreduce import AllReduce
  from hpm.variable_mgr.base import TowerResult, VariableManager
  from hpm.variable_mgr.transform import Mean, Transform

__all__ = [
  'ALL_REDUCES',
  'DISTRIBUTED_MANAGERS',
  'VARIABLE_MANAGERS',
  'AllReduce',
  'Mean',
  'TowerResult',
  'Transform',
  'VariableManager',
  'all_reduce',
  'create',
]

VARIABLE_MANAGERS = {
  'independent': 'hpm.variable_mgr.independent:Independent',
  'parameter_server': 'hpm.variable_mgr.parameter_server:ParameterServer',
  'replicated': 'hpm.variable_mgr.replicated:Replicated',
}

# Over several processes, which `hpm.cluster` starts and joins.
DISTRIBUTED_MANAGERS = {
  'collective_all_reduce': 'hpm.variable_mgr.collective_all_reduce:CollectiveAllReduce',
  'distributed_replicated': 'hpm.variable_mgr.distributed_replicated:DistributedReplicated',
  'parameter_server': 'hpm.variable_mgr.ps_tasks:ParameterServerTasks',
}

ALL_REDUCES = {
  'copy': 'hpm.variable_mgr.allreduce:Copy',
  'psgpu': 'hpm.variable_mgr.sharded:psgpu',
  'pscpu': 'hpm.variable_mgr.sharded:pscpu',
  'xring': 'hpm.variable_mgr.ring:Ring',
  'rechd': 'hpm.variable_mgr.halving:HalvingDoubling',
  'hierarchical_copy': 'hpm.variable_mgr.hierarchical:HierarchicalCopy',
  'collective': 'hpm.variable_mgr.collective:Collective',
  'nccl': 'hpm.variable_mgr.collective:nccl',
  'nccl_all_reduce': 'hpm.variable_mgr.nccl:nccl_all_reduce',
}

__getattr__ = registry.lazy(
  __name__,
  {
    'AllReduce': 'hpm.variable_mgr.allreduce:AllReduce',
    'TowerResult': 'hpm.variable_mgr.base:TowerResult',
    'Mean': 'hpm.variable_mgr.transform:Mean',
    'Transform': 'hpm.variable_mgr.transform:Transform',
    'VariableManager': 'hpm.variable_mgr.base:VariableManager',
  },
)


def create(
  name: str,
  devices: Sequence[str],
  *,
  variable_consistency: str = 'strong',
  num_workers: int | None = None,
  **options: Any,
) -> 'VariableManager':
  """The manager called `name` over compute devices such as `('/GPU:0', '/GPU:1')`.

  Args:
    name: one of `VARIABLE_MANAGERS`, or 'module:class' for one of your own.
    devices: device strings, one a tower.
    variable_consistency: 'strong', or 'relaxed' to apply gradients one step late.
    num_workers: how many processes train one model; `name` is then one of `DISTRIBUTED_MANAGERS`,
      and `hpm.cluster` gives the options of this process.
    **options: what the manager's own class takes.

  Raises:
    UsageError: there is no such manager or option, or it can not be had with the others.
  """
  if variable_consistency not in ('relaxed', 'strong'):
    raise UsageError(f'variable_consistency {variable_consistency!r}: use strong or relaxed')
  kind = 'variable manager'
  if num_workers is not None:
    if variable_consistency != 'strong':
      raise UsageError(
        f'variable_consistency {variable_consistency!r} does not go with {name} over several '
        'processes: leave it out'
      )
    create_one = registry.resolve(kind, DISTRIBUTED_MANAGERS, name)
    return create_one(devices, num_workers=num_workers, **options)
  if spec.is_path(name, VARIABLE_MANAGERS):
    manager = registry.by_path(kind, name)(devices, **options)
  else:
    manager = registry.resolve(kind, VARIABLE_MANAGERS, name)(devices, **options)
  if variable_consistency == 'strong':
    return manager
  from hpm.variable_mgr import relaxed  # TensorFlow is imported only here

  return relaxed.Relaxed(manager)


def all_reduce(spec: str, devices: Sequence[str], **options: Any) -> 'AllReduce':
  """The all-reduce that a spec such as 'xring#2' or 'pscpu:32k:collective' stands for.

  Args:
    spec: see `hpm.variable_mgr.spec`; a whole 'module:function' is one of your own.
    devices: device strings.
    **options: `transfer_dtype` ('float16', 'bfloat16'), `sum_on` of copy, `network_topology` of
      hierarchical_copy; each reaches the algorithms that take it.
  """
  from hpm.variable_mgr import composed  # TensorFlow is imported only here

  return composed.build(spec, ALL_REDUCES, devices, options)
