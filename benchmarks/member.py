"""This process as one of those that train a model: alone, a worker, or a parameter server.

`Alone` and `Worker` have the same methods, so that the driver reads the same for both.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Callable, Iterator, Sequence
import contextlib
import time
from typing import Any

from benchmarks import flags, process, speed, stalls, watching
from benchmarks.loop import Step, say
import hpm
from hpm.cluster import listening, spec
from hpm.cluster.heartbeat import Death
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages
from hpm.errors import UsageError

__all__ = ['Alone', 'Worker', 'joined', 'serve']


class Alone:
  """One process, with all devices.

  Args:
    ending: of this process, if another one dies without which it can't go on.
    stages: what this process is doing.

  Attributes:
    number, num_workers: which of how many workers this is.
    is_chief: whether it reads and writes checkpoints.
    manager_options, pipeline_options: what its part of a cluster adds to these.
  """

  number = 0
  num_workers = 1
  is_chief = True

  def __init__(self, ending: watching.Ending, stages: Stages) -> None:
    self.manager_options: dict[str, Any] = {}
    self._ending, self._stages = ending, stages
    self._run: stalls.Run | None = None

  def devices(self, kind: str | None, count: int | None) -> tuple[str, ...]:
    """Starts TensorFlow; device strings."""
    return process.devices(kind, count)

  def agree(self, options: flags.Options) -> None:
    """Tells the others what this process's devices have made of the flags, once that is known."""

  def pipeline_options(self, options: flags.Options) -> dict[str, Any]:
    return {}

  def service(self, options: flags.Options) -> contextlib.AbstractContextManager[None]:
    """While it lasts, the death of the tf.data service that makes its batches is noticed."""
    address, timeout_s = options.data_service, options.heartbeat_timeout_s
    return watching.service(address, self._ending, self._tell, timeout_s)

  @contextlib.contextmanager
  def stalls(self, options: flags.Options) -> Iterator[None]:
    """While it lasts, this process is ended if it stops moving."""
    self._run = self._asked(options)
    with stalls.watched(self._run, self._stages, options.stall_timeout_s, self._end):
      yield

  def _asked(self, options: flags.Options) -> stalls.Run:
    """What is asked then."""
    return stalls.Run(flags.data.source(options), options.train_dir)

  def _end(self, line: str) -> None:
    self._tell(line)
    self._ending.begin(Death('this process', 'failed', line), line, stalls.EXIT_CODE, 0.0)

  def running(self, step: Any) -> Any:
    """The step, which may be asked whether its data and devices answer."""
    if self._run is not None:
      self._run.steps.append(step)
    return step

  def _tell(self, line: str) -> None:
    """Tells the others why this process ends."""

  def scope(self) -> contextlib.AbstractContextManager[None]:
    """Inside, managers and steps are made."""
    return contextlib.nullcontext()

  def training(self, step: hpm.TrainStep) -> Any:
    """What runs the step."""
    return self.running(step)

  def eval_step(self, step: Any, **options: Any) -> hpm.EvalStep:
    """What evaluates the current variables of a step; options of `hpm.EvalStep`."""
    return self.running(hpm.EvalStep(step.model, step.manager, **options))

  def stages(self, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps, each known to others, and to the watchdog, while it runs."""
    number = 1
    while True:
      self._stages.enter('step', number)
      step = next(steps, None)
      if step is None:
        self._stages.enter('end')
        return
      yield step
      number += 1

  def stage(self, name: str, detail: object = '') -> contextlib.AbstractContextManager[None]:
    """While it lasts, others know that this process is doing this; see `Stages.stage`."""
    return self._stages.stage(name, detail)

  def total(self, images: int, seconds: float, ago: float) -> tuple[float, str]:
    """Images a second of all workers, and its line.

    Args:
      images, seconds: of this process's timed loop.
      ago: seconds since its end.
    """
    total = images / seconds
    return total, speed.summary(total)


class Worker(Alone):
  """A worker of a cluster.

  Args:
    cluster: who takes part.
    options: the flags.
    watch: sees who is alive.
    stages, ending: as for `Alone`.
    waiting: entered while it waits for the others' servers.
  """

  def __init__(
    self,
    cluster: Cluster,
    options: flags.Options,
    watch: hpm.cluster.Watch,
    stages: Stages,
    ending: watching.Ending,
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ):
    super().__init__(ending, stages)
    self.number, self.num_workers = cluster.task_index, cluster.num_workers
    self.is_chief = cluster.is_chief
    self._cluster, self._watch = cluster, watch
    self._waiting = waiting
    self._synchronous = options.cross_replica_sync
    self._mode = options.variable_update
    self._runtime: Any = None

  def devices(self, kind, count):
    def join(kind: str, devices: Sequence[str]) -> tuple[str, ...]:
      self._runtime = hpm.cluster.join(self._cluster, len(devices), kind)
      return self._runtime.devices

    devices = process.devices(kind, count, join)
    with self._waiting():
      self._watch.wait_for_servers(
        task for task in self._cluster.tasks if task.startswith('ps:') or not self._cluster.ps_hosts
      )
    self.manager_options = dict(self._runtime.options)
    if self._mode == 'parameter_server':
      self.manager_options['cross_replica_sync'] = self._synchronous
    return devices

  def agree(self, options):
    found = {'num_gpus': options.num_gpus, **options.chosen()}
    self._watch.agree({f'--{name}': str(value) for name, value in found.items()})

  def pipeline_options(self, options):
    if flags.data.synthetic(options):
      return {'seed': options.tf_random_seed + self.number}
    if options.data_service is not None:
      return {'service_job': self._watch.run_id}  # a name that the service has not seen
    return {'num_shards': self.num_workers, 'shard_index': self.number}

  def _asked(self, options):
    tasks = [task for task in self._cluster.tasks if task != self._cluster.task]
    needed = [task for task in tasks if self._synchronous or task.startswith('ps:')]
    servers = {task: self._cluster.address_of(task) for task in needed}
    own = options.train_dir if self.is_chief else None
    return stalls.Run(flags.data.source(options), own, servers, self._watch.doing)

  def _tell(self, line):
    self._watch.fail(line)

  def scope(self):
    return self._runtime.scope()

  def training(self, step):
    return self.running(self._runtime.training(step))

  def eval_step(self, step, **options):
    return self.running(step.eval_step(**options))

  def total(self, images, seconds, ago):
    """The chief's is that of all workers, and comes when they are done; others give their own.

    The wall time behind it is that from the first to begin to the last to end: asynchronous workers
    need not train at the same time.
    """
    ended = time.monotonic() - ago
    own = images / seconds
    line = f'images/sec of {self._cluster.task}: {own:.2f}'
    if not self.is_chief:
      self._watch.leave({'images': images, 'seconds': seconds, 'ago': ago})
      return own, line
    workers = [f'worker:{i}' for i in range(1, self.num_workers)]
    self._watch.wait_until_left(workers)
    loops = [(ended, images, seconds)]
    for worker, report in self._watch.reports.items():
      if report is not None:  # it has trained
        end = self._watch.left_at[worker] - report['ago']
        loops.append((end, report['images'], report['seconds']))
    wall = max(end for end, _, _ in loops) - min(end - seconds for end, _, seconds in loops)
    total = sum(images for _, images, _ in loops) / wall
    return total, f'{line}\n{speed.summary(total)}'

  def close(self) -> None:
    """Ends what was joined."""
    if self._runtime is not None:
      self._runtime.close()


@contextlib.contextmanager
def joined(
  options: flags.Options,
  last_words: Callable[[str], None],
  orderly: tuple[type[BaseException], ...],
  waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Alone | None]:
  """This process's part, while it lasts; None for a parameter server, when it has served.

  Args:
    options: the flags.
    last_words: called with one line before the death of another task ends this process.
    orderly: exceptions that end all workers together, so that none takes this one for dead.
    waiting: entered while this process waits for the others.

  Raises:
    hpm.cluster.PeerError: another task has died; the line has been printed.
  """
  cluster = flags.cluster.cluster(options)
  if cluster is None:
    yield Alone(watching.Ending(last_words), Stages())
    return
  stages = Stages()
  guard = watching.Guard(
    cluster, synchronous=options.cross_replica_sync, stages=stages, last_words=last_words
  )
  with watching.watched(
    guard,
    cluster,
    stages,
    shared=flags.cluster.shared(options),
    timeout_s=options.heartbeat_timeout_s,
    startup_timeout_s=options.cluster_timeout_s,
    waiting=waiting,
  ) as watch:
    # TensorFlow's server does so too, but only when TensorFlow is there.
    listening.check_free(spec.parse_address(cluster.address, cluster.task), cluster.task)
    if cluster.job_name == 'worker':
      worker = Worker(cluster, options, watch, stages, guard, waiting)
      yield from _working(worker, watch, guard, orderly)
      return
    serve(cluster, watch, stages)
  yield None


def _working(
  worker: Worker,
  watch: hpm.cluster.Watch,
  guard: watching.Guard,
  orderly: tuple[type[BaseException], ...],
) -> Iterator[Worker]:
  try:
    yield worker
  except orderly:
    watch.leave()
    raise
  except (UsageError, hpm.cluster.PeerError, process.Terminated):
    raise
  except Exception:
    with guard.explaining(Exception):
      raise
  worker.close()


def serve(cluster: Cluster, watch: hpm.cluster.Watch, stages: Stages) -> None:
  """What a parameter server does until the chief has left."""
  process.start_server(cluster)
  stages.enter('service')
  say(f'{cluster.task} serves at {cluster.address}')
  watch.wait_for_end()
