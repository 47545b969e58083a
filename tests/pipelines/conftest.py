"""What the tests of the pipelines share: a small sample data set, the compiled reader."""

import pytest

from hpm import errors
from hpm.pipelines import jpeg_native, sample


@pytest.fixture(scope='session', autouse=True)
def _own_cache(tmp_path_factory):
  """What the tests compile is theirs alone, and gone with them."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture
def native() -> None:
  """Has the compiled reader built; without a compiler and headers its tests are skipped."""
  try:
    jpeg_native.build()
  except errors.DataError as error:
    pytest.skip(str(error))


@pytest.fixture(scope='session')
def sample_dir(tmp_path_factory) -> str:
  """A sample data set of 64 training images in 8 shards and 16 validation images in 2."""
  directory = tmp_path_factory.mktemp('data') / 'sample'
  sample.write_sample(str(directory), num_images=80)
  return str(directory)
