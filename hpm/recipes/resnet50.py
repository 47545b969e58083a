"""ResNet-50 in 90 epochs, the classic."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='resnet50_v1.5',  # fb.resnet.torch's, with its strides on the 3x3 convolutions
  data='imagenet',
  global_batch=256,
  epochs=90,
  rate=0.1,
  decay='steps',
  decay_epochs=(30, 60, 80),
  warmup_epochs=5,
  zero_init=True,
  top_1=76.4,
  source='Goyal et al. 2017, arXiv:1706.02677, table 1',
  departures='biases and batch norm do not decay, there only batch norm does not',
)
