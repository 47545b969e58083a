"""The learning rate that flags ask for, step by step, and the optimizer around it."""

import pytest
import tensorflow as tf

from benchmarks import flags
import hpm

EPOCH = 1000  # images; 10 a step, so 100 steps


def completed(*arguments):
  options = flags.parse(['--batch_size=5', *arguments])
  flags.complete(options, ('/CPU:0', '/CPU:1'))
  return options


def rates(arguments, steps, num_steps=1000):
  schedule = flags.schedule.create(completed(*arguments), EPOCH, num_steps)
  if not callable(schedule):
    return [schedule] * len(steps)
  return [float(schedule(tf.constant(step, tf.int64))) for step in steps]


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    ([], {0: 0.1 * 10 / 256, 999: 0.1 * 10 / 256}),
    (['--init_learning_rate=0.5'], {0: 0.5, 999: 0.5}),
    # tf_cnn_benchmarks' own example of the syntax: rates between epochs
    (
      ['--piecewise_learning_rate_schedule=0.4;2;0.1;5;0.01'],
      {0: 0.4, 199: 0.4, 200: 0.1, 499: 0.1, 500: 0.01, 999: 0.01},
    ),
    (['--piecewise_learning_rate_schedule=0.4;0.5;0.1'], {49: 0.4, 50: 0.1}),
    (['--piecewise_learning_rate_schedule=0.4'], {0: 0.4, 999: 0.4}),
    (
      [
        '--init_learning_rate=1',
        '--num_epochs_per_decay=2',
        '--learning_rate_decay_factor=0.5',
        '--minimum_learning_rate=0.2',
      ],
      {0: 1.0, 199: 1.0, 200: 0.5, 400: 0.25, 600: 0.2, 999: 0.2},
    ),
    (
      ['--init_learning_rate=1', '--learning_rate_schedule=polynomial'],
      {0: 1.0, 500: 0.25, 1000: 0.0},
    ),
    (
      [
        '--init_learning_rate=1',
        '--learning_rate_schedule=polynomial',
        '--polynomial_power=1',
        '--minimum_learning_rate=0.5',
      ],
      {0: 1.0, 500: 0.75, 1000: 0.5},
    ),
    (
      ['--init_learning_rate=1', '--learning_rate_schedule=cosine'],
      {0: 1.0, 250: 0.5 + 0.5**1.5, 500: 0.5, 1000: 0.0},
    ),
    (
      ['--init_learning_rate=1', '--num_learning_rate_warmup_epochs=0.99'],
      {0: 0.01, 49: 0.5, 99: 1.0, 500: 1.0},
    ),
    # 0.128 at 256 images, five epochs of warm-up, a tenth at 30, 60, 80, 90
    (
      ['--resnet_base_lr=0.256'],
      {
        499: 0.01 * 500 / 501,
        500: 0.01,
        2999: 0.01,
        3000: 0.001,
        6000: 1e-4,
        8000: 1e-5,
        9000: 1e-6,
      },
    ),
    (['--learning_rate_schedule=resnet'], {500: 0.128 * 10 / 256}),
    # a replica of its own sees half the images of a step
    (
      ['--variable_update=independent', '--resnet_base_lr=0.256'],
      {2999: 0.005, 3000: 0.0005},
    ),
    (['--optimizer=adam'], {0: 0.001}),
  ],
  ids=str,
)
def test_rate_of_a_step(arguments, expected):
  assert rates(arguments, list(expected)) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize('schedule', ['constant', 'cosine', 'polynomial'])
def test_a_training_that_ends_in_its_warm_up_goes_up_all_the_while(schedule):
  arguments = [
    '--init_learning_rate=1',
    f'--learning_rate_schedule={schedule}',
    '--num_learning_rate_warmup_epochs=5',
  ]
  found = rates(arguments, [0, 9, 19], num_steps=20)
  assert found == pytest.approx([1 / 501, 10 / 501, 20 / 501])
  options = completed(*arguments)
  (warning,) = flags.schedule.warnings(options, EPOCH, 20)
  assert '20 of 500 steps, to 0.04 of 1;' in warning
  assert flags.schedule.warnings(options, EPOCH, 501) == []
  assert flags.schedule.warnings(completed('--learning_rate_schedule=cosine'), None, 20) == []


def test_epochs_are_counted_only_where_the_rate_needs_them():
  assert not flags.schedule.needs_epochs(completed('--learning_rate_schedule=cosine'))
  assert flags.schedule.needs_epochs(completed('--resnet_base_lr=1'))
  assert flags.schedule.needs_epochs(completed('--num_learning_rate_warmup_epochs=1'))
  assert flags.schedule.needs_epochs(completed('--piecewise_learning_rate_schedule=1;2;3'))


@pytest.mark.parametrize(
  ('arguments', 'title'),
  [
    ([], '0.00390625 (0.1 * 10 / 256)'),
    (['--optimizer=adam'], '0.001'),
    (['--piecewise_learning_rate_schedule=0.4;2;0.1'], '0.4, 0.1 from epoch 2'),
    (
      ['--init_learning_rate=1', '--num_epochs_per_decay=2', '--learning_rate_decay_factor=0.5'],
      '1, times 0.5 every 2 epochs',
    ),
    (['--init_learning_rate=1', '--learning_rate_schedule=cosine'], '1, cosine'),
    (
      ['--resnet_base_lr=0.256'],
      '0.01 (0.256 * 10 / 256), a tenth from epochs 30, 60, 80, 90 each, 5 epochs of warm-up',
    ),
  ],
)
def test_the_header_says_where_the_rate_goes(arguments, title):
  assert flags.schedule.title(completed(*arguments)) == title


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (['--optimizer=sgd'], {}),
    (['--momentum=0.5'], {'momentum': 0.5, 'nesterov': False}),
    (['--optimizer=nesterov'], {'momentum': 0.9, 'nesterov': True}),
    (
      ['--optimizer=rmsprop', '--rmsprop_epsilon=0.1'],
      {'decay': 0.9, 'momentum': 0.9, 'epsilon': 0.1},
    ),
    (['--optimizer=adam', '--adam_beta2=0.9'], {'beta1': 0.9, 'beta2': 0.9, 'epsilon': 1e-8}),
  ],
)
def test_constants_reach_the_rule(arguments, expected):
  options = completed(*arguments)
  rule = hpm.optimizers.create(options.optimizer, 0.1, **flags.optimizer.rule_options(options))
  assert {name: getattr(rule, name) for name in expected} == expected


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    ([], 1.0),
    (['--precision=bf16'], 1.0),
    (['--use_fp16'], 128.0),
    (['--use_fp16', '--fp16_loss_scale=4'], 4.0),
    (
      ['--use_fp16', '--fp16_enable_auto_loss_scale'],
      hpm.precision.DynamicLossScale(128.0, 1000),
    ),
    (
      [
        '--use_fp16',
        '--fp16_enable_auto_loss_scale',
        '--fp16_loss_scale=8',
        '--fp16_inc_loss_scale_every_n=3',
      ],
      hpm.precision.DynamicLossScale(8.0, 3),
    ),
  ],
)
def test_loss_scale_is_of_float16_alone(arguments, expected):
  assert flags.compute.loss_scale(completed(*arguments)) == expected


def test_the_header_says_what_decays_and_what_is_clipped():
  assert (
    flags.optimizer.title(completed()) == 'momentum (momentum 0.9, weight decay 4e-05 on kernels)'
  )
  options = completed('--optimizer=sgd', '--gradient_clip_norm=2', '--weight_decay=0')
  assert flags.optimizer.title(options) == 'sgd (norm clipped at 2, no weight decay)'
  assert flags.optimizer.step_options(options) == {
    'clip_value': None,
    'clip_norm': 2.0,
    'weight_decay': 0.0,
  }


PS = ('--variable_update=parameter_server', '--local_cluster=workers:4,ps:1')


@pytest.mark.parametrize(
  ('arguments', 'epoch'),
  # Four workers with 10 images each: one step of 40, or four of 10 that one counter counts.
  [(PS, 25), ((*PS, '--cross_replica_sync=false'), 100)],
  ids=['synchronous', 'asynchronous'],
)
def test_rates_of_several_workers_follow_the_epochs_of_all(arguments, epoch):
  piecewise = '--piecewise_learning_rate_schedule=0.4;2;0.1'
  found = rates([*arguments, piecewise], [2 * epoch - 1, 2 * epoch])
  assert found == pytest.approx([0.4, 0.1])
  options = completed(*arguments, '--num_batches=8', '--num_warmup_batches=2')
  assert flags.steps.goal(options, None) == (10 if epoch == 25 else 40)
  assert flags.steps.plan(options, None, 4, 0) == (6, 2)
  options = completed(*arguments, '--num_epochs=3', '--num_warmup_batches=2')
  assert flags.steps.goal(options, EPOCH) == 3 * epoch


def test_the_header_explains_no_rate_that_a_preset_gives():
  options = completed('--preset=gce_k80/resnet50', '--device=cpu', '--num_gpus=2')
  assert flags.schedule.title(options) == '0.005'
