"""A process of a cluster that waits for ever in one call, for the tests of its guard.

python guarded.py '{"task": ..., "worker_hosts": [...], "ps_hosts": [...], "synchronous": true,
                    "then": "block", "check", "fail" or "stop"}'
"""

import json
import sys
import time

from benchmarks import saving, watching
from hpm.cluster.heartbeat import PeerError
from hpm.cluster.spec import Cluster
from hpm.cluster.watchdog import Stages


def main() -> int:
  settings = json.loads(sys.argv[1])
  job, _, index = settings['task'].partition(':')
  cluster = Cluster(
    job, int(index), tuple(settings['worker_hosts']), tuple(settings.get('ps_hosts', ()))
  )
  stages = Stages()
  guard = watching.Guard(
    cluster,
    synchronous=settings.get('synchronous', True),
    stages=stages,
    last_words=lambda line: print(f'last words: {line}', flush=True),
    grace_s=1.0,
  )
  try:
    with watching.watched(
      guard, cluster, stages, shared={}, timeout_s=2.0, startup_timeout_s=60.0
    ) as watch:
      print('all there', flush=True)
      with stages.stage('step', 3):
        if settings['then'] == 'block':
          time.sleep(120)
        elif settings['then'] == 'fail':
          with guard.explaining(ConnectionError):
            time.sleep(settings.get('after_s', 2.0))
            raise ConnectionError('UNAVAILABLE')
        elif settings['then'] == 'stop':
          raise saving.Stopped('stopped by SIGTERM')
        while settings['then'] == 'check':
          guard.check()
          time.sleep(0.05)
        if settings['then'] == 'serve':
          watch.wait_for_end()
  except PeerError as error:
    print(f'by itself: {error}', flush=True)
    return watching.EXIT_CODE
  except saving.Stopped:
    return 143
  except ConnectionError as error:
    print(f'unexplained: {error}', flush=True)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
