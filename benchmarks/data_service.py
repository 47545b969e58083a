"""Starts a tf.data service, whose workers decode for trainings with --data_service.

All of it on one machine, a dispatcher and two workers:

  python -m benchmarks.data_service --address=127.0.0.1:5050 --num_workers=2
  python benchmarks/run.py --data_dir=DIR --data_service=127.0.0.1:5050

On several, first the dispatcher, which must know all workers, then each worker on its own host:

  python -m benchmarks.data_service --address=10.0.0.1:5050 --workers=10.0.0.2:5051,10.0.0.3:5051
  python -m benchmarks.data_service --dispatcher=10.0.0.1:5050 --address=10.0.0.2:5051
  python -m benchmarks.data_service --dispatcher=10.0.0.1:5050 --address=10.0.0.3:5051

Workers read the data by the path that the training names. It serves until it is ended by SIGTERM or
an interrupt. There is no authentication: keep it in a private network.

A worker waits a minute for its dispatcher.

Exit code: 0 ended by a signal; 1 one of its processes has died; 2 flags that can't work.
"""

from collections.abc import Sequence
import os
import signal
import sys
import threading

from absl import flags

from benchmarks import command, local_cluster
from benchmarks.loop import say
from hpm import quiet
from hpm.cluster import listening, spec
from hpm.errors import UsageError

__all__ = ['main', 'parse']

_READY_S = 60.0


def parse(arguments: Sequence[str]) -> flags.FlagValues:
  """The flags.

  Raises:
    UsageError: what can't work.
  """
  values = flags.FlagValues()
  flags.DEFINE_string('address', None, 'host:port to listen at.', flag_values=values)
  flags.DEFINE_integer(
    'num_workers', None, 'Workers to start here beside the dispatcher.', flag_values=values
  )
  flags.DEFINE_string(
    'workers', None, 'host:port of all workers of this dispatcher, by commas.', flag_values=values
  )
  flags.DEFINE_string(
    'dispatcher', None, 'host:port of the dispatcher: this is a worker.', flag_values=values
  )
  command.parse(values, arguments)
  if not values.address:
    raise UsageError('--address is missing: host:port to listen at, such as 127.0.0.1:5050')
  if values.num_workers is not None and values.num_workers < 1:
    raise UsageError(f'--num_workers={values.num_workers}: 1 or more is needed')
  roles = [name for name in ('num_workers', 'workers', 'dispatcher') if values[name].value]
  if len(roles) != 1:
    raise UsageError(
      'give one of --num_workers=N, all on this machine; --workers=HOST:PORT,..., the dispatcher '
      'of these; --dispatcher=HOST:PORT, a worker of that one'
    )
  spec.parse_address(values.address, '--address')
  for name in ('workers', 'dispatcher'):
    for host in spec.parse_hosts(values[name].value or ''):
      spec.parse_address(host, f'--{name}')
  return values


@command.line(__doc__)
def main(arguments: Sequence[str]) -> int:
  """One command, from its flags to its exit code."""
  values = parse(arguments)
  address = spec.parse_address(values.address, '--address')
  listening.check_free(address, '--address')
  if listening.is_public(address):
    say(f'Warning: {address} is a public address, and the service lets everybody in')
  if values.num_workers:
    return _all_here(values.address, values.num_workers)
  _serve(address, values.dispatcher, spec.parse_hosts(values.workers or ''))


def _all_here(address: str, num_workers: int) -> int:
  host, _, _ = address.rpartition(':')
  ports = listening.free_ports(num_workers)
  hosts = [f'{host}:{port}' for port in ports]
  program = [sys.executable, '-m', 'benchmarks.data_service']
  with local_cluster.Group(lasting=False) as group:
    group.start(
      'dispatcher:0', [*program, f'--address={address}', f'--workers={",".join(hosts)}'], os.environ
    )
    for index, own in enumerate(hosts):
      group.start(
        f'worker:{index}', [*program, f'--dispatcher={address}', f'--address={own}'], os.environ
      )
    return group.wait()


def _serve(address: spec.Address, dispatcher: str | None, workers: Sequence[str]) -> None:
  """A dispatcher or a worker, until it is told to end."""
  ended = threading.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: ended.set())
  os.environ.setdefault('CUDA_VISIBLE_DEVICES', '-1')  # it decodes, and would take all GPU memory
  with quiet.native_log():
    import tensorflow as tf

    service = tf.data.experimental.service
    if dispatcher is None:
      config = service.DispatcherConfig(port=address.port, worker_addresses=list(workers))
      server = service.DispatchServer(config, start=False)
      what = f'tf.data service: the dispatcher of {len(workers)} workers'
    else:
      if not _answers(spec.parse_address(dispatcher, '--dispatcher'), ended):
        return
      server = service.WorkerServer(
        service.WorkerConfig(
          dispatcher_address=dispatcher, worker_address=str(address), port=address.port
        ),
        start=False,
      )
      what = f'tf.data service: a worker of {dispatcher}'
    server.start()
  listening.restrict(address, '--address')
  say(f'{what} serves at {address}')
  ended.wait()
  sys.stdout.flush()
  os._exit(0)  # the server of a worker would wait for a dispatcher that may have gone before it


def _answers(address: spec.Address, ended: threading.Event) -> bool:
  """Waits for the dispatcher, as TensorFlow does without a word or an end; False: told to end."""
  for _ in range(int(_READY_S / 0.5)):
    if listening.answers(address):
      return True
    if ended.wait(0.5):
      return False
  raise UsageError(f'--dispatcher={address}: nothing answers there within {_READY_S:g} s')


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
