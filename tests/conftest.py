"""What every test can rely on: 8 logical CPU devices, quiet logs, fixed global seeds.

TensorFlow takes its logical devices once a process, before its first op. They are set here, after
collection and before the first test; so a test module may import TensorFlow, and even name dtypes,
but must run no op while it is imported. Tests that need no TensorFlow (TENSORFLOW_FREE) don't wait
for its import when they run alone.
"""

import os
from pathlib import Path
import random
import sys

import numpy as np
import pytest

NUM_DEVICES = 8
TENSORFLOW_FREE = ('packaging',)  # directories of tests/

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')


def pytest_collection_finish(session: pytest.Session) -> None:
  here = Path(__file__).parent
  areas = {item.path.relative_to(here).parts[0] for item in session.items}
  if areas.difference(TENSORFLOW_FREE) and not session.config.option.collectonly:
    import hpm

    hpm.devices.cpu(NUM_DEVICES)


@pytest.fixture(scope='session')
def cpu_devices() -> tuple[str, ...]:
  """Device strings '/CPU:0' to '/CPU:7'; a test that wants two takes `cpu_devices[:2]`."""
  import hpm

  return hpm.devices.cpu(NUM_DEVICES)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
  """The same random numbers whatever tests ran before, for what takes a global seed."""
  random.seed(0)
  np.random.seed(0)
  if 'tensorflow' in sys.modules:
    sys.modules['tensorflow'].random.set_seed(0)
