"""A run beside the nearest published row."""

import pytest

from benchmarks import comparison, flags


def compared(*arguments, devices=2, rate=100.0):
  options = flags.parse(['--device=gpu', *arguments])
  flags.complete(options, [f'/GPU:{i}' for i in range(devices)])
  return comparison.compare(options.values(), devices, rate)


def test_every_rate_of_a_known_batch_is_a_reference():
  # 207 of the page, two of the comparison as presets, and of its other 12 rows the 9 whose batch
  # is published.
  assert len(comparison.references()) == 207 + 2 + 9


def test_the_same_data_and_the_nearest_number_of_devices_are_chosen_first():
  found = compared('--batch_size=64', '--optimizer=sgd', '--variable_update=parameter_server')
  assert found['name'] == 'dgx1_p100/resnet50@2'
  assert found['ratio_per_device'] == pytest.approx(100 / 422)
  assert found['scaling'] == pytest.approx(422 / (2 * 219))
  assert found['differs'] == ['num_runs 1 (there 5)']


def test_what_differs_is_said_with_both_values():
  found = compared('--batch_size=64', '--preset=dgx1_p100/vgg16', '--num_gpus=2', '--xla')
  assert found['name'] == 'dgx1_p100/vgg16'
  assert found['differs'] == ['devices 2 (there 8)', 'xla true (there false)']
  real = compared(
    *('--batch_size=64', '--data_dir=.', '--data_name=imagenet', '--num_runs=5'), devices=3
  )
  assert real['name'].endswith('/real')
  assert 'devices 3 (there 4)' in real['differs']
  assert 'optimizer momentum (there sgd)' in real['differs']
  ring = compared('--batch_size=64', '--model=vgg16', '--all_reduce_spec=xring')
  assert 'use_nccl xring (there true)' in ring['differs']


def test_half_precision_is_held_to_half_precision():
  found = compared('--batch_size=256', '--use_fp16', devices=1, rate=2000.0)
  assert found['name'] == 'v100x4_2018/resnet50'
  assert found['ratio_per_device'] == pytest.approx(2000 / 782)
  assert 'scaling' not in found
  fast = compared('--batch_size=400', '--use_fp16', '--data_dir=.', devices=8)
  assert fast['name'] == 'nvidia_h200_x8'
  assert 'MXNet' in fast['hardware']


@pytest.mark.parametrize(
  'arguments', [['--batch_size=63'], ['--batch_size=64', '--use_fp16'], ['--model=lenet']], ids=str
)
def test_what_nobody_published_is_compared_with_nothing(arguments):
  assert compared(*arguments) is None


def test_the_line_has_rate_ratio_scaling_and_differences():
  found = compared('--batch_size=64', '--preset=dgx1_p100/resnet50@4', devices=4, rate=1704.0)
  assert comparison.line(found, 'NVIDIA H200') == (
    'Published: dgx1_p100/resnet50@4, 213 images/sec a device on Tesla P100; this run 2 times that '
    'on NVIDIA H200; scaling there 97% on 4 devices; differs: nothing that was published'
  )


@pytest.mark.long
def test_a_run_prints_it_and_several_runs_print_it_once(command_line, tmp_path):
  arguments = ('--device=cpu', '--num_gpus=1', '--model=alexnet', '--batch_size=512')
  steps = ('--num_batches=1', '--num_warmup_batches=0', '--num_runs=2')
  run = command_line(*arguments, *steps, f'--result_json={tmp_path / "run.json"}')
  assert run.code == 0, run.errors
  (line,) = [line for line in run.lines if line.startswith('Published: ')]
  assert 'times that on CPU devices' in line
