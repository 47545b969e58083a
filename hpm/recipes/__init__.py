"""Published trainings by name, as data: model, batch, learning rate, regularisation, accuracy.

  recipe = hpm.recipes.find('resnet50')
  recipe.global_batch, recipe.top_1

A new recipe is one new file and one line in `RECIPES`. Nothing here imports TensorFlow.
"""

from typing import TYPE_CHECKING

from hpm import registry

if TYPE_CHECKING:
  from hpm.recipes.base import Recipe

__all__ = ['RECIPES', 'Recipe', 'find']

RECIPES = {
  'resnet50': 'hpm.recipes.resnet50:RECIPE',
  'resnet50_tpu': 'hpm.recipes.resnet50_tpu:RECIPE',
  'resnet50_mixed': 'hpm.recipes.resnet50_mixed:RECIPE',
  'resnet50_progressive': 'hpm.recipes.resnet50_progressive:RECIPE',
  'inception3': 'hpm.recipes.inception3:RECIPE',
  'vgg16': 'hpm.recipes.vgg16:RECIPE',
  'alexnet': 'hpm.recipes.alexnet:RECIPE',
  'cifar_resnet': 'hpm.recipes.cifar_resnet:RECIPE',
  'digits': 'hpm.recipes.digits:RECIPE',
}

__getattr__ = registry.lazy(__name__, {'Recipe': 'hpm.recipes.base:Recipe'})


def find(name: str) -> 'Recipe':
  """The recipe of that name; UsageError with the nearest names if there is none."""
  return registry.resolve('recipe', RECIPES, name)
