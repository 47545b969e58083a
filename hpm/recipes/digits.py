"""Handwritten digits on any machine, in a minute: what tests train to the end."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='lenet',
  data='digits',
  global_batch=64,
  epochs=40,
  rate=0.05,
  rate_batch=64,
  decay='cosine',
  warmup_epochs=1,
  weight_decay=5e-4,
  label_smoothing=0.1,
  average_decay=0.99,
  image_size=8,
  num_classes=10,
  top_1=98.5,
  source='docs/results.md, measured with this library',
)
