"""What the tests of the pipelines share: a small sample data set, written once."""

import pytest

from hpm.pipelines import sample


@pytest.fixture(scope='session')
def sample_dir(tmp_path_factory) -> str:
  """A sample data set of 64 training images in 8 shards and 16 validation images in 2."""
  directory = tmp_path_factory.mktemp('data') / 'sample'
  sample.write_sample(str(directory), num_images=80)
  return str(directory)
