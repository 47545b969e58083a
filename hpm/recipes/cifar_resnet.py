"""ResNet-56 on CIFAR-10."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='resnet56',
  data='cifar10',
  global_batch=128,
  epochs=164,
  rate=0.1,
  rate_batch=128,
  decay='steps',
  decay_epochs=(82, 123),
  top_1=93.03,
  source='He et al. 2015, arXiv:1512.03385, section 4.2 and table 6',
  departures='crops are of all scales here, there of 32 pixels within a border of 4',
)
