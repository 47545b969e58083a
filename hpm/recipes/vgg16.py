"""VGG16, the network D of its paper."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='vgg16',
  data='imagenet',
  global_batch=256,
  epochs=74,
  rate=0.01,
  decay='steps',
  decay_epochs=(20, 40, 60),
  weight_decay=5e-4,
  distort_colors=True,
  top_1=73.0,
  source='Simonyan & Zisserman 2015, arXiv:1409.1556, sections 3.1 and 4.1, table 3',
  departures='there the rate fell three times, whenever accuracy stood still, the first layers '
  'came from a smaller network, and crops were of one scale',
)
