"""The header, for devices that are not here."""

import pytest

from benchmarks import flags, header

GPUS = ('/GPU:0', '/GPU:1')
VERSIONS = {'tensorflow': '2.21.0', 'cpu': 'some', 'cores': 8, 'gpus': ['H100', 'H100']}


def facts(*arguments, devices=GPUS):
  options = flags.parse(arguments)
  flags.complete(options, devices)
  lines = header.lines(options, devices, flags.data.SYNTHETIC_EPOCH, VERSIONS)
  return {label: text.strip() for label, _, text in (line.partition(':') for line in lines)}


def test_gpus_are_named_once_with_what_was_chosen_for_them():
  said = facts('--use_fp16', '--data_format=NCHW', '--model=resnet50')
  assert said['Batch size'] == '128 global'
  assert said['GPU'] == 'H100'
  assert said['Precision'] == 'float16, loss scale 128'
  assert said['Data format'] == 'NCHW'
  assert said['AllReduce'] == 'nccl'
  assert said['Learn. rate'] == '0.05 (0.1 * 128 / 256)'
  assert '--num_batches=100' in said['Chosen']
  assert 'Environment' not in said


def test_a_dynamic_loss_scale_says_where_it_starts():
  said = facts('--use_fp16', '--fp16_enable_auto_loss_scale', '--fp16_loss_scale=1024')
  assert said['Precision'] == 'float16, loss scale from 1024'


def test_settings_of_tensorflow_are_said_where_they_were_given():
  said = facts('--tf32=false', '--gpu_thread_mode=gpu_shared')
  assert said['Environment'] == 'TF_GPU_THREAD_MODE=gpu_shared NVIDIA_TF32_OVERRIDE=0'


@pytest.mark.parametrize('devices', [GPUS, ('/CPU:0',)])
def test_inference_has_no_optimizer(devices):
  said = facts('--forward_only', '--precision=bf16', devices=devices)
  assert not {'Optimizer', 'Learn. rate', 'AllReduce'} & set(said)
  assert said['Mode'] == 'forward only'
