"""Memory of pipelines, each in a process of its own: what they hold, and that it doesn't grow."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from hpm.pipelines import convert

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MIB = 2**20
NUM_EPOCHS, SETTLED = 50, 10  # what is made once, thread pools and caches, is there after so many

# Prints the process's resident bytes after every epoch, or once its buffers are full.
PROGRAM = """
import gc, json, os, sys, time
from hpm import pipelines

name, directory, what, options = sys.argv[1:]
options = json.loads(options)
source = 'raw' if name == 'raw' else 'imagenet'
if name == 'dali':
  import hpm
  hpm.devices.cpu(1)

def resident():
  gc.collect()
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

def make(**more):
  options.update(data_dir=directory, num_classes=7, **more)
  return pipelines.create(source, pipeline=name, **options)

seen = []
if what == 'passes':  # one stream of many epochs
  pipeline = make(num_epochs=int(os.environ['EPOCHS']))
  batches = -(-pipeline.epoch_size // options['batch_size'])
  count = 0
  for count, _ in enumerate(pipeline.dataset(), 1):
    if count % batches == 0:
      seen.append(resident())
  assert count == -(-pipeline.epoch_size * int(os.environ['EPOCHS']) // options['batch_size'])
elif what == 'restarts':  # a new iterator every epoch, as evaluation has
  pipeline = make(num_epochs=1)
  for _ in range(int(os.environ['EPOCHS'])):
    assert sum(len(labels) for _, labels in pipeline.dataset()) == pipeline.epoch_size
    seen.append(resident())
else:
  batches = iter(make().dataset())
  next(batches)
  idle = 0
  while idle < 4:  # a consumer that is slower than the pipeline, until that has nothing to do
    before = time.process_time()
    time.sleep(1)
    idle = idle + 1 if time.process_time() - before < 0.03 else 0
  seen.append(resident())
print('RESIDENT', json.dumps(seen), flush=True)
"""


@pytest.fixture(scope='module')
def directories(sample_dir, tmp_path_factory) -> dict[str, str]:
  """Where the data of each pipeline are."""
  root = tmp_path_factory.mktemp('memory')
  found = {'tfdata': sample_dir, 'dali': sample_dir}
  for name in ('indexed', 'raw'):
    found[name] = str(root / name)
    convert.convert(
      'imagenet', found[name], name, options={'data_dir': sample_dir}, splits=['train']
    )
  return found


def resident(name: str, directory: str, what: str, **options: object) -> list[int]:
  """Resident bytes as `PROGRAM` prints them."""
  if name == 'dali':
    pytest.importorskip('nvidia.dali')
  defaults = {'batch_size': 8, 'image_size': 64, 'shuffle_buffer': 16, 'num_parallel_calls': 2}
  if name == 'raw':
    del defaults['shuffle_buffer']
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM, name, directory, what, json.dumps(defaults | options)],
    cwd=ROOT,
    env=os.environ | {'EPOCHS': str(NUM_EPOCHS), 'TF_CPP_MIN_LOG_LEVEL': '3'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  line = next(line for line in done.stdout.splitlines() if line.startswith('RESIDENT'))
  return json.loads(line.split(' ', 1)[1])


@pytest.mark.parametrize('what', ['passes', 'restarts'])
@pytest.mark.parametrize('name', ['tfdata', 'indexed', 'raw', 'dali'])
def test_many_short_epochs_take_no_more_memory_than_a_few(name, what, directories):
  seen = resident(name, directories[name], what)
  assert len(seen) >= NUM_EPOCHS - 1
  grown = seen[-1] - max(seen[:SETTLED])
  print(f'{name}, {what}: {seen[0] / MIB:.0f} MiB, then {seen[-1] / MIB:.0f}')
  # Allocators go on spreading for some 10,000 images, by less each time. If the files of an epoch,
  # 5 MiB, were kept, or the functions of a data set that is made anew, it would be 200 and more.
  assert grown < 60 * MIB, [round(value / MIB) for value in seen]


@pytest.mark.parametrize('name', ['tfdata', 'indexed', 'raw', 'dali'])
def test_what_a_pipeline_holds_follows_from_prefetch(name, directories):
  batch = 16 * 224 * 224 * 3
  few, many = (
    resident(name, directories[name], 'buffers', batch_size=16, image_size=224, prefetch=prefetch)[
      0
    ]
    for prefetch in (2, 66)
  )
  print(f'{name}: {few / MIB:.0f} and {many / MIB:.0f} MiB')
  # Beside the batches, what allocators have spread to while a thousand images were made.
  assert 0.7 * 64 * batch < many - few < 64 * batch + 80 * MIB
