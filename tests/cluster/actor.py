"""A program for the tests of the local cluster: what each task does stands in one argument.

  python actor.py '{"worker:0": "sleep 60", "worker:1": "exit 3"}' --job_name=worker --task_index=0

It says who it is and obeys: sleep S, exit CODE, kill SIGNAL (itself), stubborn (ignores signals),
polite (ends with 143 on SIGTERM, 130 on SIGINT), cry (to stderr). Several are joined by ';'.
"""

import json
import os
import signal
import sys
import time


def main() -> int:
  given = dict(a.removeprefix('--').split('=', 1) for a in sys.argv[2:] if '=' in a)
  task = f'{given["job_name"]}:{given["task_index"]}'
  print(f'{os.getpid()} is {task}', flush=True)
  for order in json.loads(sys.argv[1]).get(task, '').split(';'):
    verb, _, argument = order.strip().partition(' ')
    if verb == 'sleep':
      time.sleep(float(argument))
    elif verb == 'exit':
      return int(argument)
    elif verb == 'kill':
      os.kill(os.getpid(), int(argument))
    elif verb == 'stubborn':
      for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
      print('deaf', flush=True)
    elif verb == 'polite':
      for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        signal.signal(number, lambda *_, code=code: _bow(code))
      print('ready', flush=True)
    elif verb == 'cry':
      print('a cry', file=sys.stderr, flush=True)
  return 0


def _bow(code: int) -> None:
  print('bowed', flush=True)
  os._exit(code)


if __name__ == '__main__':
  sys.exit(main())
