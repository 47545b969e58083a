"""Digits shared by workers: each image once an epoch, moved as it is without them."""

import numpy as np
import pytest

from hpm import pipelines
from hpm.errors import UsageError

SIZE = 1437


def samples(pipeline):
  return [
    (image.numpy(), int(label))
    for images, labels in pipeline.dataset()
    for image, label in zip(images, labels, strict=True)
  ]


@pytest.mark.parametrize('num_shards', [2, 3])
def test_workers_take_turns_at_the_images_of_one(num_shards):
  options = {'batch_size': 100, 'num_epochs': 2, 'seed': 7}
  whole = samples(pipelines.create('digits', **options))
  shares = []
  for index in range(num_shards):
    pipeline = pipelines.create('digits', num_shards=num_shards, shard_index=index, **options)
    assert pipeline.epoch_size == len(range(index, SIZE, num_shards))
    assert pipeline.epoch_size_of_all == SIZE
    shares.append(samples(pipeline))
  for epoch in range(2):
    for index, share in enumerate(shares):
      size = len(share) // 2
      own = share[epoch * size : (epoch + 1) * size]
      expected = whole[epoch * SIZE : (epoch + 1) * SIZE][index::num_shards]
      assert [label for _, label in own] == [label for _, label in expected]
      np.testing.assert_array_equal([i for i, _ in own], [i for i, _ in expected])


def test_a_share_goes_on_where_it_was_and_another_one_is_refused():
  def share(index, num_shards=2):
    return pipelines.create(
      'digits', batch_size=10, num_epochs=2, num_shards=num_shards, shard_index=index
    )

  unbroken, resumed = samples(share(1)), share(1)
  resumed.restore(share(1).state(725))
  rest = samples(resumed)
  assert len(rest) == len(unbroken) - 725
  np.testing.assert_array_equal([i for i, _ in rest], [i for i, _ in unbroken[725:]])
  with pytest.raises(UsageError, match='num_shards=3, but .* num_shards=2'):
    share(1, 3).restore(share(1).state(0))
  with pytest.raises(UsageError, match='num_shards=1, but .* num_shards=2'):
    pipelines.create('digits', batch_size=10).restore(share(0).state(0))
  with pytest.raises(UsageError, match='shard_index=2 must lie below num_shards=2'):
    share(2)
