"""Joining a cluster: the same few lines for a worker of any mode.

  runtime = hpm.cluster.join(cluster, num_devices=2)
  with runtime.scope():
    manager = hpm.variable_mgr.create('distributed_replicated', runtime.devices, **runtime.options)
    step = hpm.TrainStep(model, manager, optimizer)
  training = runtime.training(step)
  training.begin()                  # the chief has set the variables, the others have waited
  for metrics in training.run(dataset, num_steps=100):
    ...
  if cluster.is_chief:
    print(training.eval_step().evaluate(validation))
    hpm.checkpoint.save('checkpoints', training)
  runtime.close()

With parameter servers each worker has a graph and a session (`hpm.cluster.session`); without them
an eager client and collectives (`hpm.cluster.collective`). A parameter server starts its server
(`hpm.cluster.server.start`) and waits for the end.
"""

from typing import TYPE_CHECKING

from hpm.cluster.spec import Cluster

if TYPE_CHECKING:
  from hpm.cluster.collective import CollectiveRuntime
  from hpm.cluster.session import SessionRuntime

__all__ = ['join']


def join(
  cluster: Cluster,
  num_devices: int,
  kind: str = 'cpu',
  *,
  container: str = '',
  after: 'SessionRuntime | CollectiveRuntime | None' = None,
) -> 'SessionRuntime | CollectiveRuntime':
  """This worker's part of the cluster.

  Args:
    cluster: who takes part.
    num_devices: compute devices of this worker, the same for all.
    kind: 'cpu' or 'gpu'.
    container: a name for what a training keeps on parameter servers; of several trainings one after
      the other each needs its own.
    after: the runtime of the training before this one, whose server goes on.
  """
  if cluster.ps_hosts:
    from hpm.cluster.session import SessionRuntime

    assert after is None or isinstance(after, SessionRuntime)
    server = after.server if after else None
    return SessionRuntime(cluster, num_devices, kind, container=container, server=server)
  from hpm.cluster.collective import CollectiveRuntime

  return CollectiveRuntime(cluster, num_devices, kind)
