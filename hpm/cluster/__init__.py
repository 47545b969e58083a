"""Training across processes and hosts: who takes part, where they listen, and who is still alive.

Nothing here imports TensorFlow before it is used, so a cluster is checked, joined and watched
while TensorFlow is still being loaded.
"""

from typing import TYPE_CHECKING

from hpm import registry

if TYPE_CHECKING:
  from hpm.cluster.spec import Cluster

__all__ = ['Cluster']

__getattr__ = registry.lazy(__name__, {'Cluster': 'hpm.cluster.spec:Cluster'})
