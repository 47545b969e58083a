"""Variable managers: where variables live, what a tower reads, how gradients meet, who updates.

A new mode is one new file and one line in `VARIABLE_MANAGERS`; a new all-reduce one line in
`ALL_REDUCES`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpm import registry

if TYPE_CHECKING:
  from hpm.variable_mgr.allreduce import AllReduce
  from hpm.variable_mgr.base import TowerResult, VariableManager
  from hpm.variable_mgr.transform import Mean, Transform

__all__ = [
  'ALL_REDUCES',
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

ALL_REDUCES = {
  'copy': 'hpm.variable_mgr.allreduce:Copy',
  'collective': 'hpm.variable_mgr.allreduce:Collective',
  'nccl': 'hpm.variable_mgr.allreduce:nccl',
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


def create(name: str, devices: Sequence[str], **options: Any) -> 'VariableManager':
  """The manager called `name` over compute devices such as `('/GPU:0', '/GPU:1')`.

  Args:
    name: one of `VARIABLE_MANAGERS`.
    devices: device strings, one a tower.
    **options: what the manager's own class takes.
  """
  return registry.resolve('variable manager', VARIABLE_MANAGERS, name)(devices, **options)


def all_reduce(spec: str, devices: Sequence[str], **options: Any) -> 'AllReduce':
  """The all-reduce that `spec` names, over `devices`."""
  return registry.resolve('all-reduce', ALL_REDUCES, spec)(devices, **options)
