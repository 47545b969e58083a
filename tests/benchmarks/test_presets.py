"""Presets: every published cell as flags, what goes before them, and what they can't do here."""

import pytest

from benchmarks import flags, plan, presets, published
from hpm.errors import DataError, UsageError

HEADLINES = [
  name
  for name, preset in presets.presets().items()
  if '@' not in name and '/b' not in name and preset.data == 'synthetic'
]


def complete(*arguments):
  options = flags.parse(arguments)
  kind, count = (options.device or 'gpu').upper(), options.num_gpus
  flags.complete(options, [f'/{kind}:{i}' for i in range(count)])
  return options


def test_there_is_one_a_published_cell_and_its_name_finds_it():
  known = presets.presets()
  assert len(known) == len(published.results()) + 2
  for name, preset in known.items():
    assert presets.find(name) is preset
    data = 'real' if preset.data == 'imagenet' else 'synthetic'
    whole = f'{preset.platform}/{preset.model}@{preset.num_gpus}/b{preset.batch_size}/{data}'
    assert presets.find(whole) is preset


def test_the_plain_name_is_the_headline():
  headline = presets.find('dgx1_p100/resnet50')
  assert (headline.num_gpus, headline.batch_size, headline.data) == (8, 64, 'synthetic')
  assert headline.images_per_sec == 1734
  small = presets.find('dgx1_p100/resnet50@4/b32/real')
  assert (small.num_gpus, small.batch_size, small.data) == (4, 32, 'imagenet')
  assert small.images_per_sec == 760
  assert presets.find('gce_k80/resnet152').batch_size == 32  # the larger that it has


@pytest.mark.parametrize('name', presets.presets())
def test_each_sets_every_flag_of_its_row(name, tmp_path):
  preset = presets.find(name)
  data = [f'--data_dir={tmp_path}'] if preset.data == 'imagenet' else []
  options = complete(f'--preset={name}', '--dry_run', *data)
  for flag, value in preset.flags.items():
    if flag != 'num_runs':
      assert getattr(options, flag) == value, flag
  num_runs = 1 if preset.ps_tasks else 5
  assert (options.num_runs, options.num_warmup_batches, options.num_batches) == (num_runs, 10, 100)
  there = (preset.num_hosts, preset.ps_tasks) if preset.ps_tasks else None
  assert flags.cluster.tasks(options) == there
  assert options.num_gpus * preset.num_hosts == preset.num_gpus
  if 'use_nccl' in preset.flags:
    assert options.all_reduce_spec == ('nccl' if preset.flags['use_nccl'] else 'copy')
  assert options.given.keys() == {'preset', 'dry_run', *(['data_dir'] if data else [])}
  assert flags.preset.overridden(options) == []


def test_a_row_s_settings_reach_the_manager():
  spread = complete('--preset=ec2_k80/vgg16')
  assert (spread.variable_update, spread.local_parameter_device) == ('parameter_server', 'gpu')
  copied = complete('--preset=ec2_k80/resnet50')
  assert (copied.variable_update, copied.all_reduce_spec) == ('replicated', 'copy')
  v100 = complete('--preset=v100x4_2018/resnet50')
  assert (v100.batch_size, v100.num_gpus, v100.precision) == (256, 4, 'fp16')


@pytest.mark.parametrize(
  ('given', 'said'),
  [
    (['--batch_size=16'], '--batch_size=16 (preset: batch_size=64)'),
    (['--num_gpus=2', '--optimizer=adam'], '--num_gpus=2 (preset: num_gpus=8)'),
    (['--use_fp16'], '--use_fp16=true (preset: precision=fp32)'),
    (['--all_reduce_spec=xring'], '--all_reduce_spec=xring (preset: use_nccl=true)'),
    (['--variable_update=independent'], '--variable_update=independent (preset: use_nccl=true)'),
    (['--num_epochs=1'], '--num_epochs=1.0 (preset: num_batches=100)'),
    (['--data_dir=.'], '--data_dir=. (preset: data_name=synthetic)'),
    (['--resnet_base_lr=0.1'], '--resnet_base_lr=0.1 (preset: init_learning_rate=0.005)'),
  ],
  ids=str,
)
def test_flags_beside_it_go_before_it_and_the_run_says_so(given, said):
  options = complete('--preset=dgx1_p100/vgg16', *given)
  assert said in flags.preset.overridden(options)
  facts = flags.preset.facts(options)
  assert ('Preset', 'dgx1_p100/vgg16: 1081 images/sec published, on 8 x Tesla P100') in facts
  assert ('Overridden', said) in facts
  for name in options.given:
    flag = options.given[name]
    assert name in ('preset',) or getattr(options, name) == flag


def test_the_same_value_again_overrides_nothing():
  assert flags.preset.overridden(complete('--preset=dgx1_p100/vgg16', '--batch_size=64')) == []


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--preset=dgx_p100/resnet50'], "'dgx_p100': did you mean dgx1_p100"),
    (['--preset=dgx1_p100/resnet51'], "'resnet51': did you mean resnet50.* valid: alexnet, ince"),
    (['--preset=dgx1_p100/resnet50@3'], r'has @1, @2, @4, @8; /b64, /b32, /real'),
    (['--preset=ec2_k80_distributed/resnet50/real'], r'has @1, @8, @16, @32, @64; /b64, /b32 \('),
    (['--preset=dgx1_p100/resnet50@x'], 'no preset: write PLATFORM/MODEL, then @GPUS'),
    (['--preset=dgx1_p100'], 'no preset: write PLATFORM/MODEL'),
    (['--preset=gce_k80/vgg16', '--eval', '--train_dir=.', '--data_dir=.'], 'drop it, or --eval'),
    (['--preset=gce_k80/vgg16/real'], 'ImageNet: give its TFRecords by --data_dir, or drop /real'),
    (
      ['--preset=dgx1_p100/vgg16', '--device=cpu'],
      'NCCL, which needs GPUs: use --dry_run, without --device, or --device=cpu --use_nccl=false',
    ),
    (
      ['--preset=ec2_k80_distributed/resnet50'],
      'ran on 8 workers and 8 parameter servers: give --worker_hosts.*--job_name=host.*'
      '--local_cluster=workers:8,ps:8 --device=cpu; or plan it by --dry_run',
    ),
  ],
)
def test_what_can_not_work_is_refused_with_the_ways_on(arguments, message):
  with pytest.raises(UsageError, match=message) as refusal:
    flags.parse(arguments)
  assert '\n' not in str(refusal.value)


def test_a_preset_of_several_hosts_goes_with_a_cluster():
  name = '--preset=ec2_k80_distributed/resnet50@16'
  hosts = ['--worker_hosts=a:1,b:1', '--ps_hosts=a:2,b:2', '--task_index=1']
  whole = complete(name, *hosts)
  assert (whole.variable_update, whole.num_gpus, whole.batch_size) == (
    'distributed_replicated',
    8,
    64,
  )
  assert (whole.num_runs, whole.num_warmup_batches, whole.num_batches) == (1, 10, 100)
  assert flags.preset.overridden(whole) == []
  small = complete(name, '--local_cluster=workers:1,ps:1', '--device=cpu', '--num_gpus=2')
  assert flags.preset.overridden(small) == [
    '1 workers and 1 parameter servers (preset: 2 and 2)',
    '--device=cpu (preset: device=gpu)',
    '--num_gpus=2 (preset: num_gpus=8)',
  ]


@pytest.mark.long
def test_a_preset_of_several_hosts_trains_here_in_small(command_line):
  run = command_line(
    *('--preset=ec2_k80_distributed/resnet50@16/b32', '--local_cluster=workers:2,ps:1'),
    *('--device=cpu', '--num_gpus=1', '--model=trivial', '--batch_size=2', '--num_batches=3'),
  )
  assert run.code == 0, run.errors
  assert any('2 workers and 1 parameter servers (preset: 2 and 2)' in line for line in run.lines)
  assert any('images/sec' in line for line in run.lines)


def test_nccl_is_no_obstacle_where_it_is_switched_off():
  options = complete('--preset=dgx1_p100/vgg16', '--device=cpu', '--use_nccl=false')
  assert (options.device, options.all_reduce_spec) == ('cpu', 'copy')


def test_real_data_that_is_missing_is_named():
  with pytest.raises(DataError, match='does not exist'):
    flags.parse(['--preset=gce_k80/vgg16/real', '--data_dir=/nowhere'])


def test_a_machine_without_gpus_is_told_the_ways_on_once(command_line):
  run = command_line('--preset=dgx1_p100/vgg16')
  assert run.code == 2
  (line,) = run.errors.splitlines()
  assert line.startswith('error: --preset=dgx1_p100/vgg16 on this machine: 8 GPUs wanted')
  assert '--dry_run plans it, --device=cpu --use_nccl=false runs it' in line


def test_a_run_says_its_preset_and_what_was_published(in_process, tmp_path):
  run = in_process(
    *('--preset=gce_k80/alexnet@2', '--model=trivial', '--batch_size=2', '--num_runs=1'),
    *('--num_batches=2', '--num_warmup_batches=1', f'--result_json={tmp_path / "run.json"}'),
  )
  assert run.code == 0, run.errors
  assert run.facts()['Preset'] == 'gce_k80/alexnet@2: 1209 images/sec published, on 2 x Tesla K80'
  assert '--model=trivial' not in run.facts()['Chosen']
  assert run.facts()['Variables'] == 'parameter_server, on the CPU'
  said = [line for line in run.lines if line.startswith('Overridden:')]
  assert len(said) == 6
  assert any(line.endswith('--device=cpu (preset: device=gpu)') for line in said)


def test_the_list_shows_every_cell(in_process):
  run = in_process('--preset=list')
  assert run.code == 0
  assert len(run.lines) == 1 + 209 + 2 + 1
  (empty,) = [line for line in run.lines if line.startswith('dgx1_p100/alexnet/real ')]
  assert empty.endswith('not published: the input pipeline was at its maximum')
  (cell,) = [line for line in run.lines if line.startswith('ec2_k80/resnet50@4/real ')]
  assert cell.split() == [
    *('ec2_k80/resnet50@4/real', '4', '1', '64', 'imagenet'),
    *('replicated,', 'without', 'NCCL', '188'),
  ]


def test_a_plan_of_several_hosts_is_of_that_cluster(capsys):
  options = flags.parse(
    ['--preset=ec2_k80_distributed/inception3', '--dry_run', '--model=trivial', '--batch_size=2']
  )
  plan.show(options)
  out = ' '.join(capsys.readouterr().out.split())
  assert 'Preset: ec2_k80_distributed/inception3: 1783 images/sec published' in out
  assert 'distributed_replicated over 8 workers and 6 parameter servers' in out
  # trivial has 4,255,721 parameters, 16.2 MiB: from and to each of 8 hosts.
  assert '32.5 MiB from and to each worker, 259.7 MiB in all' in out


@pytest.mark.long
@pytest.mark.parametrize('name', HEADLINES)
def test_each_platform_and_model_plans_here(name, capsys):
  options = flags.parse([f'--preset={name}', '--dry_run'])
  plan.show(options)
  out = capsys.readouterr().out
  assert f'{options.model}, {options.batch_size} images on each of {options.num_gpus} GPU' in out
  assert 'largest batch per device in 80 GB' in out
