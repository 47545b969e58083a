"""ResNet-50 as the comparison of TPUs and GPUs trained it."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='resnet50_v1.5',
  data='imagenet',
  global_batch=1024,
  epochs=90,
  rate=0.1,
  decay='steps',
  decay_epochs=(30, 60, 80),
  warmup_epochs=5,
  label_smoothing=0.1,
  precision='bf16',
  zero_init=True,
  top_1=76.4,
  top_1_epoch=86,
  source='RiseML 2018, TPUv2 against V100',
  departures='the comparison names batch, smoothing and accuracy; what else is here is the usual',
)
