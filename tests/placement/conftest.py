"""These tests ask which kernels TensorFlow has registered for GPUs; no GPU need be there."""

import pytest

from hpm import placement
from hpm.errors import UsageError


@pytest.fixture(scope='session', autouse=True)
def gpu_kernels() -> None:
  """Skips, with the command that mends it, on a build of TensorFlow that lists no GPU kernels."""
  try:
    placement.kernels_of('NoOp')
  except UsageError as error:
    pytest.skip(str(error))
