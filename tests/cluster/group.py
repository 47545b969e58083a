"""Starts tests/cluster/actor.py as a local cluster: python group.py SECONDS LASTING TASKS..."""

import json
from pathlib import Path
import sys

from benchmarks import local_cluster


def main() -> int:
  settings = json.loads(sys.argv[1])
  local_cluster.ALONE_S = settings.get('alone_s', 1.0)
  local_cluster.TOLD_S = settings.get('told_s', 1.0)
  local_cluster.STOPPING_S = settings.get('stopping_s', 5.0)
  actor = str(Path(__file__).with_name('actor.py'))
  with local_cluster.Group(lasting=settings.get('lasting', False)) as group:
    for task in settings['tasks']:
      job, _, index = task.partition(':')
      command = [sys.executable, actor, json.dumps(settings['tasks'])]
      group.start(task, [*command, f'--job_name={job}', f'--task_index={index}'], {})
    return group.wait()


if __name__ == '__main__':
  sys.exit(main())
