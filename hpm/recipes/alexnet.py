"""AlexNet in one column, the variant for several GPUs."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='alexnet',
  data='imagenet',
  global_batch=128,
  epochs=90,
  rate=0.01,
  rate_batch=128,
  decay='steps',
  decay_epochs=(22.5, 45, 67.5),
  decay_factor=250 ** (-1 / 3),
  weight_decay=5e-4,
  top_1=57.67,
  source='Krizhevsky 2014, arXiv:1404.5997, section 5 and table 1',
  departures='crops are of all scales here, there of one',
)
