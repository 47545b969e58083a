"""Inception v3 by RMSProp, evaluated on the average of its weights."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='inception3',
  data='imagenet',
  global_batch=1600,
  epochs=100,
  rate=0.045,
  rate_batch=1600,
  decay='exponential',
  decay_epochs=(2,),
  decay_factor=0.94,
  optimizer='rmsprop',
  constants={'decay': 0.9, 'momentum': 0.0, 'epsilon': 1.0},
  weight_decay=4e-5,
  label_smoothing=0.1,
  clip_value=2.0,
  average_decay=0.9999,
  distort_colors=True,
  top_1=78.8,
  source='Szegedy et al. 2016, arXiv:1512.00567, section 8 and table 3',
  departures='50 workers of 32 images are one batch of 1600 here; weight decay, colours and the '
  "average's constant are those of Google's published code",
)
