"""Recipes: what each sets, what goes before it, and what a run says of it."""

import pytest

from benchmarks import flags
from hpm import models, optimizers, pipelines, recipes
from hpm.errors import UsageError


def complete(*arguments, num_gpus=8):
  options = flags.parse(['--device=gpu', *arguments])
  flags.complete(options, [f'/GPU:{i}' for i in range(num_gpus)])
  return options


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_each_names_what_there_is_and_sets_its_flags(name):
  recipe = recipes.find(name)
  assert recipe.model in models.MODELS
  assert recipe.optimizer in optimizers.OPTIMIZERS
  assert recipe.data in {**pipelines.SOURCES, **pipelines.BUILT_IN}
  assert 50 < recipe.top_1 < 100
  assert recipe.source
  options = complete(f'--recipe={name}')
  assert options.model == recipe.model
  assert options.batch_size * 8 == recipe.global_batch
  assert options.num_epochs == recipe.epochs
  assert options.weight_decay == recipe.weight_decay
  rate = flags.schedule.factor(options) * options.init_learning_rate
  assert rate == pytest.approx(recipe.rate * recipe.global_batch / recipe.rate_batch)
  assert options.given.keys() == {'device', 'recipe'}
  lines = dict(flags.recipe.facts(options))
  assert f'{recipe.top_1:g} %' in lines['Recipe']
  assert f'--model={recipe.model}' in lines['Recipe sets']
  assert 'Overridden' not in lines


def test_the_command_line_goes_before_it_and_the_run_says_so():
  options = complete('--recipe=resnet50', '--batch_size=128', '--num_batches=100', '--use_fp16')
  assert (options.num_epochs, options.num_batches, options.precision) == (None, 100, 'fp16')
  assert flags.schedule.title(options).startswith('0.4 (0.1 * 1024 / 256), 0.04 from epoch 30')
  said = [words for label, words in flags.recipe.facts(options) if label == 'Overridden']
  assert '--num_batches=100 (recipe: num_epochs=90.0)' in said
  assert '--use_fp16=true (recipe: precision=fp32)' in said
  assert 'global batch 1024 (recipe: 256)' in said


def test_a_learning_rate_of_one_s_own_replaces_the_schedule():
  options = complete('--recipe=resnet50_mixed', '--init_learning_rate=0.3')
  assert flags.schedule.create(options, 1000, 10) is not None
  assert flags.schedule.title(options).startswith('0.3')
  assert options.learning_rate_base_batch is None


def test_what_contradicts_it_is_refused():
  with pytest.raises(UsageError, match="--recipe=resnet50.*can't be shared by 3 devices"):
    complete('--recipe=resnet50', num_gpus=3)
  for other in ('--preset=gce_k80/resnet50', '--forward_only', '--eval'):
    with pytest.raises(UsageError, match='--recipe=resnet50'):
      flags.parse(['--recipe=resnet50', other])
  with pytest.raises(UsageError, match='resnet50_tpu'):
    flags.parse(['--recipe=resnet50_tp'])


def test_image_sizes_by_epoch_reach_the_pipeline(tmp_path):
  options = complete('--recipe=resnet50_progressive', f'--data_dir={tmp_path}')
  assert flags.model.model_options(options)['image_size'] == 192
  taken = flags.data.pipeline_options(options)
  assert (taken['image_size'], taken['size_step']) == ({0: 160, 12: 192}, 1024)
  validation = flags.data.pipeline_options(options, validation=True)
  assert validation['split'] == 'validation'
  assert 'num_epochs' not in validation
  assert 'image_size' not in validation
  for wrong in ('big', '0', '4:128', '0:128;0:64', '0:128;6:x'):
    with pytest.raises(UsageError, match='--image_size'):
      flags.parse([f'--image_size={wrong}'])
