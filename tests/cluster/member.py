"""A task of a cluster for the tests of the heartbeat: a process that does as it is told by stdin.

  python member.py '{"task": "worker:0", "worker_hosts": [...], ...}'

It writes one line for each thing that happens, and obeys: wait, servers, leave JSON, fail REASON,
end. Nothing here imports TensorFlow.
"""

import json
import sys
import threading

from hpm.cluster import heartbeat
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages


def main() -> int:
  settings = json.loads(sys.argv[1])
  job, _, index = settings.pop('task').partition(':')
  hosts = {name: tuple(settings.pop(name, ())) for name in ('worker_hosts', 'ps_hosts')}
  cluster = Cluster(job, int(index), **hosts)
  stages = Stages()
  lock = threading.Lock()

  def say(line: str) -> None:
    with lock:
      print(line, flush=True)

  watch = heartbeat.Watch(
    cluster, on_death=lambda death: say(f'dead {death}'), what=stages.what, **settings
  )
  try:
    with watch:
      say('started')
      for order in sys.stdin:
        verb, _, argument = order.strip().partition(' ')
        if verb == 'wait':
          watch.wait_for_all()
          stages.enter('step', 7)
          say(f'run {watch.run_id}')
        elif verb == 'servers':
          watch.wait_for_servers()
        elif verb == 'leave':
          watch.leave(json.loads(argument or 'null'))
          say(f'reports {json.dumps(watch.reports, sort_keys=True)}')
          return 0
        elif verb == 'agree':
          watch.agree(json.loads(argument))
        elif verb == 'missing':
          say(f'missing {watch.missing()}')
        elif verb == 'fail':
          raise RuntimeError(argument)
        elif verb == 'end':
          watch.wait_for_end()
          return 0
        say(f'{verb} done')
  except (heartbeat.PeerError, RuntimeError, ValueError) as error:
    say(f'{type(error).__name__}: {error}')
    return 4
  return 0


if __name__ == '__main__':
  sys.exit(main())
