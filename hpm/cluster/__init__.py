"""Training across processes and hosts: who takes part, where they listen, and who is still alive.

Nothing here imports TensorFlow before it is used, so a cluster is checked, joined and watched
while TensorFlow is still being loaded.

  spec        who takes part, checked: `Cluster`
  heartbeat   who is still alive: `Watch`
  watchdog    what this process is doing: `Stages`
  listening   ports, and who may reach them
  runtime     a worker's way into its cluster: `join`
  server      TensorFlow's server in each process
  training    what a worker's training is, in any mode
  session     training over parameter servers
  collective  training without them
"""

from typing import TYPE_CHECKING

from hpm import registry

if TYPE_CHECKING:
  from hpm.cluster.heartbeat import Death, PeerError, Watch
  from hpm.cluster.runtime import join
  from hpm.cluster.spec import Cluster
  from hpm.cluster.watchdog import Stages

__all__ = ['Cluster', 'Death', 'PeerError', 'Stages', 'Watch', 'join']

_HOMES = {
  'Cluster': 'spec',
  'Death': 'heartbeat',
  'PeerError': 'heartbeat',
  'Stages': 'watchdog',
  'Watch': 'heartbeat',
  'join': 'runtime',
}
__getattr__ = registry.lazy(
  __name__, {name: f'hpm.cluster.{_HOMES[name]}:{name}' for name in __all__}
)
