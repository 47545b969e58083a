"""ResNet-50 in 16 epochs, from small images to larger ones."""

from hpm.recipes.base import Recipe

__all__ = ['RECIPE']

RECIPE = Recipe(
  model='resnet50_v1.5',
  data='imagenet',
  global_batch=1024,
  epochs=16,
  rate=1.7,
  rate_batch=1024,
  decay='linear',
  warmup_epochs=2,
  label_smoothing=0.1,
  precision='fp16',
  image_size={0: 160, 12: 192},
  top_1=73.8,
  source='FFCV, rn50_16_epochs of github.com/libffcv/ffcv-imagenet',
  departures='there with blurred pooling, images of 224 to 256 pixels and their mirror images in '
  'evaluation, and sizes between the two around epoch 12: expect less',
)
