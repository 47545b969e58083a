"""TensorFlow's gRPC server in each process of a cluster with parameter servers."""

import tensorflow as tf

from hpm.cluster import listening
from hpm.cluster.spec import Cluster, parse_address

__all__ = ['config', 'ps_device', 'start']


def start(cluster: Cluster, num_devices: int = 1, kind: str = 'cpu') -> tf.distribute.Server:
  """Starts this process's server, which answers at its own address alone.

  Args:
    cluster: who takes part.
    num_devices: compute devices of this process.
    kind: 'cpu', for so many logical CPU devices, or 'gpu'.

  Raises:
    UsageError: the address can't be listened on.
  """
  address = parse_address(cluster.address, cluster.task)
  listening.check_free(address, cluster.task)
  started = tf.distribute.Server(
    cluster.as_dict(),
    job_name=cluster.job_name,
    task_index=cluster.task_index,
    protocol='grpc',
    config=config(cluster, num_devices, kind),
  )
  listening.restrict(address, cluster.task)
  return started


def config(cluster: Cluster, num_devices: int = 1, kind: str = 'cpu') -> tf.compat.v1.ConfigProto:
  """Of the server, and of this process's session: it sees the parameter servers and itself.

  So a session needs no other worker, which may have come later or left earlier.
  """
  own = f'/job:{cluster.job_name}/task:{cluster.task_index}'
  return tf.compat.v1.ConfigProto(
    # Without GPUs it is to leave them, and their memory, to others on the same machine.
    device_count={'CPU': num_devices, 'GPU': 0}
    if kind == 'cpu'
    else {'CPU': 1, 'GPU': num_devices},
    device_filters=[own] if cluster.job_name == 'ps' else ['/job:ps', own],
    allow_soft_placement=False,
  )


def ps_device(index: int) -> str:
  """Where a parameter server keeps variables."""
  return f'/job:ps/task:{index}/device:CPU:0'
