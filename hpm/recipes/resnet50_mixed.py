"""ResNet-50 v1.5 in mixed precision, as NVIDIA trains it."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='resnet50_v1.5',
  data='imagenet',
  global_batch=2048,
  epochs=90,
  rate=0.256,
  decay='cosine',
  warmup_epochs=5,
  constants={'momentum': 0.875},
  weight_decay=1 / 32768,
  label_smoothing=0.1,
  precision='fp16',
  top_1=76.93,
  source='NVIDIA DeepLearningExamples, ResNet-50 v1.5 for TensorFlow 1, its README',
)
