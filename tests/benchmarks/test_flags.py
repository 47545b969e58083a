"""What the driver's flags refuse, and with what words; all of it before TensorFlow is imported."""

from absl import flags as absl_flags
import pytest

from benchmarks import flags
from hpm.errors import DataError, UsageError
from tests.benchmarks.samples import STEP

CPUS = ('/CPU:0', '/CPU:1')
GPUS = ('/GPU:0', '/GPU:1')


def completed(*arguments: str, devices=CPUS) -> flags.Options:
  options = flags.parse(arguments)
  flags.complete(options, devices)
  return options


PS = '--variable_update=parameter_server'
REFUSED = {
  # unknown names, with the nearest
  '--modle=lenet': 'did you mean --model',
  '--model=alexnett': 'did you mean alexnet',
  '--variable_update=replicatd': 'did you mean replicated',
  '--optimizer=adm': 'did you mean adam',
  '--all_reduce_spec=cpy': 'did you mean copy',
  '--data_name=imagnet': 'did you mean imagenet',
  '--device=tpu': 'valid: cpu, gpu',
  '--local_parameter_device=host': 'valid: cpu, gpu, gpu:N, spread',
  '--batch_size=2147483648': 'at most 2147483647',
  '--variable_consistency=lax': 'valid: relaxed, strong',
  '--gradient_reduction=men': 'did you mean mean',
  '--batch_norm_statistics=frist': 'did you mean first',
  '--hierarchical_copy --network_topology=dgx2': 'did you mean dgx1',
  # values that don't parse
  '--batch_size=many': '--batch_size=many: a whole number is needed',
  '--num_epochs=few': '--num_epochs=few: a number is needed',
  '--use_nccl=maybe': '--use_nccl=maybe: true or false is needed',
  '--batch_size': '--batch_size has no value',
  '--flagfile=nowhere': 'Unable to open flagfile',
  '--flagfile': 'flagfile with no argument',
  'resnet50': "unexpected 'resnet50'",
  # out of range
  '--batch_size=0': "0 meant the model's default in tf_cnn_benchmarks",
  '--batch_size=-3': '--batch_size=-3: at least 1',
  '--num_gpus=0': '--num_gpus=0: at least 1',
  '--num_batches=0': '0 meant 100 in tf_cnn_benchmarks',
  '--num_epochs=0': 'above 0',
  '--num_epochs=inf': 'finite',
  '--num_warmup_batches=-1': '0 or more',
  '--display_every=0': '1 or more',
  '--init_learning_rate=0': 'above 0',
  '--init_learning_rate=nan': 'finite',
  # flags that don't go together
  '--num_batches=5 --num_epochs=1': 'exclude each other',
  '--eval --forward_only': 'exclude each other',
  '--use_nccl=true --all_reduce_spec=copy': 'means --all_reduce_spec=nccl',
  '--use_nccl=false --all_reduce_spec=nccl': 'means --all_reduce_spec=copy',
  '--use_nccl=false --all_reduce_spec=collective': 'drop one',
  '--device=cpu --use_nccl=true': '--use_nccl=true: NCCL needs GPUs',
  '--device=cpu --all_reduce_spec=nccl': 'NCCL needs GPUs',
  '--variable_update=parameter_server --all_reduce_spec=copy': 'no effect',
  '--variable_update=independent --all_reduce_spec=copy': 'no effect',
  '--variable_update=independent --use_nccl=true': '--variable_update=replicated',
  '--variable_update=independent --local_parameter_device=cpu': 'no effect',
  '--local_parameter_device=cpu --all_reduce_spec=nccl': 'sums on the host',
  '--local_parameter_device=cpu --all_reduce_spec=collective': 'sums on the host',
  '--all_reduce_spec=copy:32k': 'an algorithm must follow',
  '--all_reduce_spec=xring#0': '#0 after xring: a whole number above 0',
  '--all_reduce_spec=copy:32q:xring': "size '32q'",
  '--device=cpu --all_reduce_spec=copy:1k:nccl/xring': 'NCCL needs GPUs',
  '--hierarchical_copy --all_reduce_spec=xring': 'means --all_reduce_spec=hierarchical_copy',
  '--hierarchical_copy --use_nccl=true': 'means --all_reduce_spec=hierarchical_copy',
  '--network_topology=dgx1': 'is about --all_reduce_spec=hierarchical_copy',
  '--hierarchical_copy --network_topology=nowhere.json': 'is no matrix',
  '--gradient_repacking=-1': '0 or more',
  '--agg_small_grads_max_bytes=few': "size 'few'",
  '--agg_small_grads_max_group=4': 'no effect without --agg_small_grads_max_bytes',
  '--agg_small_grads_max_bytes=1k --agg_small_grads_max_group=1': '2 or more',
  '--agg_small_grads_max_bytes=1k --gradient_repacking=2': 'finds no small ones',
  '--staged_vars': '--variable_update=parameter_server',
  '--variable_update=independent --gradient_reduction=sum': 'no effect',
  '--variable_update=independent --variable_consistency=relaxed': 'no effect',
  '--variable_update=independent --batch_norm_statistics=first': 'no effect',
  '--variable_update=my.module:Manager --gradient_repacking=2': 'no effect',
  '--batch_norm_statistics=cross_replica --xla': 'which --xla=true can not have',
  '--batch_norm_statistics=cross_replica --accumulate=2': 'which --accumulate=2 can not have',
  '--batch_norm_statistics=cross_replica --model=keras:ResNet50': "has Keras's own layers",
  '--batch_norm_statistics=cross_replica --recompute': 'which --recompute=true can not have',
  '--recompute --xla': 'merges what is computed twice',
  '--recompute --model=lenet': 'model lenet has no blocks',
  '--recompute --model=keras:ResNet50': 'is built by Keras',
  '--data_name=imagenet': 'needs --data_dir',
  '--data_name=synthetic --data_dir=.': 'drop one',
  '--pipeline=dalli --data_dir=.': 'did you mean dali',
  '--pipeline=dali': '--pipeline=dali has no effect on synthetic data',
  '--data_service=a:1': 'synthetic data needs none',
  '--data_dir=. --data_service=a': "'a' of --data_service is no address",
  '--data_dir=. --data_service=a:1 --pipeline=tfdata': 'drop one',
  '--data_dir=. --data_service=a:1 --bad_records=skip': 'drop one',
  '--data_dir=. --train_dir=. --eval --data_service=a:1': 'each image once',
  '--data_dir=. --pipeline=service': 'needs --data_service',
  '--data_name=tfds:cifar10': 'needs --data_dir',
  '--data_dir=. --bad_records=ignore': 'give fail, skip or limit:N',
  '--bad_records=limit:3': 'synthetic data has none',
  '--forward_only --optimizer=sgd': '--optimizer=sgd has no effect',
  '--forward_only --init_learning_rate=0.1': 'no effect',
  '--forward_only --all_reduce_spec=copy': 'no effect',
  '--forward_only --local_parameter_device=cpu': 'no effect',
  '--forward_only --train_dir=.': 'no effect',
  '--eval': 'needs --train_dir',
  '--eval --train_dir=.': 'needs --data_dir',
  '--eval --train_dir=. --data_dir=. --num_epochs=1': 'goes once over',
  '--eval --train_dir=. --data_dir=. --num_warmup_batches=1': 'goes once over',
  '--eval --train_dir=. --data_dir=. --optimizer=sgd': 'no effect',
  '--eval --train_dir=. --data_dir=. --variable_update=independent': 'the accuracy of one',
  '--eval --train_dir=./nowhere --data_dir=.': 'is no directory',
  # places
  '--result_json=.': 'is a directory',
  '--result_json=': 'is empty',
  '--train_dir=': 'is empty',
  '--result_json=setup.py/run.json': 'setup.py is a file',
  '--train_dir=setup.py': 'setup.py is a file',
  '--trace_file=.': 'is a directory',
  '--graph_file=': 'is empty',
  '--profile_dir=setup.py': 'setup.py is a file',
  '--trace_file=a --result_json=./a': 'is named by two flags',
  # precision, layout, compiler
  '--precision=fp8': 'valid: bf16, fp16, fp32',
  '--use_fp16 --precision=bf16': 'contradict each other',
  '--use_fp16=false --precision=fp16': '--use_fp16=false and --precision=fp16 contradict',
  '--fp16_loss_scale=128': 'no effect without float16',
  '--precision=bf16 --fp16_enable_auto_loss_scale': 'no effect without float16',
  '--use_fp16 --fp16_inc_loss_scale_every_n=5': 'add --fp16_enable_auto_loss_scale',
  '--use_fp16 --fp16_loss_scale=0': '--fp16_loss_scale=0: must lie in 1 ..',
  '--data_format=NHCW': 'did you mean NHWC or NCHW',
  '--device=cpu --data_format=nchw': 'NCHW needs GPUs',
  '--xla --xla_compile=false': 'drop one',
  '--accumulate=0': '--accumulate=0: 1 or more',
  '--accumulate=3 --batch_size=8': '--batch_size=8 can not be cut into --accumulate=3',
  '--steps_per_call=0': '1 or more',
  '--steps_per_call=4 --num_warmup_batches=6': 'no multiple of --steps_per_call=4, and only whole '
  'calls can be timed: use 8',
  '--trace_file=t --num_warmup_batches=3': 'use 4 or more',
  # optimizer and learning rate
  '--optimizer=adam --momentum=0.5': '--momentum=0.5 has no effect with --optimizer=adam',
  '--adam_beta1=0.5': 'use --optimizer=adam',
  '--momentum=1': 'from 0 to below 1',
  '--optimizer=adam --adam_epsilon=0': 'above 0',
  '--gradient_clip=0': 'above 0',
  '--gradient_clip_norm=nan': 'finite',
  '--weight_decay=-1': '0 or more',
  '--learning_rate_schedule=cosin': 'did you mean cosine',
  '--piecewise_learning_rate_schedule=0.1;30': 'rates at both ends',
  '--piecewise_learning_rate_schedule=0.1;x;0.2': 'rates at both ends',
  '--piecewise_learning_rate_schedule=0.1;30;0.01;20;0.001': 'epoch 20 does not come after 30',
  '--piecewise_learning_rate_schedule=0.1;0;0.01': 'epoch 0 does not come after 0',
  '--piecewise_learning_rate_schedule=-1': 'below 0',
  '--piecewise_learning_rate_schedule=1;2;3 --init_learning_rate=1': 'drop one',
  '--piecewise_learning_rate_schedule=1;2;3 --minimum_learning_rate=1': 'drop one',
  '--piecewise_learning_rate_schedule=1;2;3 --resnet_base_lr=1': 'drop one',
  '--num_epochs_per_decay=2': 'needs --learning_rate_decay_factor',
  '--learning_rate_decay_factor=0.5': 'needs --num_epochs_per_decay',
  '--num_epochs_per_decay=2 --learning_rate_decay_factor=2': 'at most 1',
  '--minimum_learning_rate=0.1': 'a constant learning rate',
  '--learning_rate_schedule=cosine --polynomial_power=1': 'drop one',
  '--learning_rate_schedule=cosine --resnet_base_lr=1': 'drop one',
  '--learning_rate_schedule=resnet --init_learning_rate=1': 'drop one',
  '--resnet_base_lr=0.1 --num_learning_rate_warmup_epochs=1': 'drop one',
  '--learning_rate_schedule=cosine --init_learning_rate=1 --minimum_learning_rate=2': 'lies above',
  # steps, lines, runs
  '--num_runs=0': '1 or more',
  '--num_runs=2 --train_dir=.': '--train_dir=. does not go with --num_runs=2',
  '--num_runs=2 --trace_file=t': 'does not go with --num_runs=2',
  '--tf_random_seed=-1': 'must lie in 0 ..',
  '--display_perf_ewma=0': 'above 0, at most 1',
  '--loss_type_to_report=loss': 'valid: base_loss, total_loss',
  # checkpoints
  '--save_model_steps=5': 'need --train_dir',
  '--max_ckpts_to_keep=5': 'need --train_dir',
  '--train_dir=. --save_model_steps=5 --save_model_secs=5': 'exclude each other',
  '--train_dir=. --save_model_secs=0': 'above 0',
  '--train_dir=. --max_ckpts_to_keep=-1': '0 or more',
  '--train_dir=. --save_model_steps=5 --steps_per_call=2': 'no multiple of --steps_per_call=2',
  # what TensorFlow is told before it starts
  '--gpu_thread_mode=private': 'did you mean gpu_private',
  '--gpu_thread_mode=global --per_gpu_thread_count=4': 'drop one',
  '--device=cpu --gpu_thread_mode=global': 'no effect on CPU devices',
  '--device=cpu --tf32=false': 'no effect on CPU devices',
  '--num_intra_threads=-1': '0 or more',
  '--autotune_threshold=0': '1 or more',
  '--datasets_num_private_threads=0': '1 or more',
  # clusters
  '--task_index=0': '--task_index=0 is about a cluster: give --worker_hosts',
  '--job_name=ps': '--job_name=ps is about a cluster: give --worker_hosts',
  '--worker_hosts=a:1': 'which of them is this process? Give --task_index',
  f'{PS} --worker_hosts=a:1 --ps_hosts=b:1 --task_index=1': "no task 1 of job 'worker'",
  f'{PS} --worker_hosts=a:1 --ps_hosts=a:1 --task_index=0': 'the address of both',
  f'{PS} --worker_hosts=a:1,b --ps_hosts=c:1 --task_index=0': "'b' of worker:1 is no address",
  f'{PS} --worker_hosts=a:1 --ps_hosts=c:1 --task_index=0 --job_name=psx': "--job_name 'psx'",
  f'{PS} --worker_hosts=n[2-1]:1 --task_index=0': 'is no range',
  f'{PS} --worker_hosts=a:1 --task_index=0': 'keeps its variables on parameter servers',
  f'{PS} --worker_hosts=a:1 --ps_hosts=b:1 --task_index=0 --heartbeat_port=1': (
    '--heartbeat_port=1: heartbeat port 1 is that of worker:0'
  ),
  f'{PS} --worker_hosts=a:1 --ps_hosts=b:1 --task_index=0 --heartbeat_timeout_s=0': 'above 0',
  f'{PS} --worker_hosts=a:1 --ps_hosts=b:1 --task_index=0 --cluster_timeout_s=-1': 'above 0',
  '--worker_hosts=a:1 --task_index=0': '--variable_update=replicated trains in one process',
  '--local_cluster=workers:2,ps:1': '--variable_update=replicated trains in one process',
  f'{PS} --local_cluster=workers:2': 'such as workers:2,ps:1',
  f'{PS} --local_cluster=2': 'workers:N or workers:N,ps:M is needed',
  f'{PS} --local_cluster=workers:0,ps:1': 'workers:N or workers:N,ps:M is needed',
  f'{PS} --local_cluster=workers:2,ps:1 --task_index=1': 'which chooses hosts and ports',
  f'{PS} --local_cluster=workers:2,ps:1 --device=gpu': 'add --num_gpus',
  f'{PS} --local_cluster=workers:2,ps:1 --num_runs=2': 'repeat the command instead',
  f'{PS} --local_cluster=workers:2,ps:1 --forward_only': 'moves nothing between processes',
  f'{PS} --local_cluster=workers:2,ps:1 --trace_file=t': 'is of the steps of one process',
  f'{PS} --local_cluster=workers:2,ps:1 --steps_per_call=2': 'no loop in the graph',
  f'{PS} --local_cluster=workers:2,ps:1 --staged_vars': 'what --variable_update=distributed_replic',
  f'{PS} --local_cluster=workers:2,ps:1 --variable_consistency=relaxed': 'gradients in flight',
  f'{PS} --local_cluster=workers:2,ps:1 --cross_replica_sync=false --data_name=digits '
  '--eval_during_training_every_n_epochs=1 --stop_at_top_1_accuracy=0.5': 'asynchronous ones have',
  f'{PS} --worker_hosts=a:1,a:2 --ps_hosts=a:3 --task_index=0 --job_name=host': (
    'starts worker:0 and worker:1, which share its GPUs'
  ),
  f'{PS} --local_cluster=workers:2,ps:1 --batch_norm_statistics=cross_replica': 'across processes',
  f'{PS} --local_cluster=workers:2,ps:1 --cross_replica_sync=false --precision=fp16 '
  '--fp16_enable_auto_loss_scale': 'no common gradient',
  '--variable_update=distributed_replicated': '--local_cluster=workers:2,ps:1 starts them here',
  '--variable_update=distributed_all_reduce': '--local_cluster=workers:2 starts them here',
  '--variable_update=collective_all_reduce --local_cluster=workers:2,ps:1': 'no use for parameter',
  '--variable_update=collective_all_reduce --local_cluster=workers:2 --cross_replica_sync=false': (
    'which is always synchronous'
  ),
  f'{PS} --cross_replica_sync=false': 'this one trains alone',
  '--heartbeat_timeout_s=5': 'this process trains alone',
  '--num_ps=1': 'is about --cluster_resolver=slurm',
  '--cluster_resolver=slrm': 'did you mean slurm',
  f'{PS} --cluster_resolver=slurm': 'is not set, so this is no task of a Slurm step',
  f'{PS} --cluster_resolver=tf_config': 'TF_CONFIG is not set',
  '--controller_host=a:1': 'are all alike',
}


@pytest.mark.parametrize('arguments', REFUSED)
def test_what_can_not_work_is_refused_in_one_line(arguments):
  with pytest.raises(UsageError) as refusal:
    flags.parse(arguments.split())
  message = str(refusal.value)
  assert REFUSED[arguments] in message
  assert '\n' not in message


def test_a_data_directory_that_is_not_there_is_missing_data():
  with pytest.raises(DataError, match='--data_dir=./nowhere does not exist'):
    flags.parse(['--data_dir=./nowhere'])
  with pytest.raises(DataError, match='is a file'):
    flags.parse(['--data_dir=setup.py'])


@pytest.mark.parametrize(
  ('file', 'name', 'pipeline'),
  [
    ('train-00000-of-00001', 'imagenet', 'tfdata'),
    ('train-00000-of-00001.raw', 'raw', 'raw'),
    ('data_batch_1.bin', 'cifar10', 'tfdata'),
    ('train/cat/1.jpg', 'folder', 'tfdata'),
  ],
)
def test_what_a_directory_is_can_be_seen(file, name, pipeline, tmp_path):
  (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / file).touch()
  options = completed(f'--data_dir={tmp_path}', '--model=lenet')
  assert (options.data_name, options.pipeline) == (name, pipeline)
  options = completed(f'--data_dir={tmp_path}', '--model=lenet', '--data_name=folder')
  assert options.data_name == 'folder'


def test_a_directory_of_nothing_is_missing_data(tmp_path):
  with pytest.raises(DataError, match='holds no TFRecords .* say what it is with --data_name'):
    flags.parse([f'--data_dir={tmp_path}'])


def test_flags_may_stand_in_a_file(tmp_path):
  (tmp_path / 'flags').write_text('--model=lenet\n--batch_size=3\n')
  options = flags.parse([f'--flagfile={tmp_path}/flags', '--batch_size=4'])
  assert options.given == {'model': 'lenet', 'batch_size': 4}


def test_checking_makes_no_directory(tmp_path):
  flags.parse([f'--train_dir={tmp_path}/a/b', f'--result_json={tmp_path}/c/d.json'])
  assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_refused(tmp_path, monkeypatch):
  # Asked of the system, since the administrator may write everywhere.
  monkeypatch.setattr('os.access', lambda path, mode: False)
  with pytest.raises(UsageError, match='not writable'):
    flags.parse([f'--result_json={tmp_path}/run.json'])


def test_cpu_defaults_are_small():
  options = completed()
  assert (options.device, options.num_gpus, options.batch_size) == ('cpu', 2, 2)
  assert (options.num_warmup_batches, options.num_batches) == (2, 30)
  assert (options.variable_update, options.all_reduce_spec) == ('replicated', 'copy')
  assert options.local_parameter_device == 'spread'
  assert options.data_name == 'synthetic'


def test_gpu_defaults_are_those_of_a_benchmark():
  options = completed(devices=GPUS)
  assert (options.device, options.num_gpus, options.batch_size) == ('gpu', 2, 64)
  assert (options.num_warmup_batches, options.num_batches) == (10, 100)
  assert options.all_reduce_spec == 'nccl'


@pytest.mark.parametrize(
  ('arguments', 'devices', 'spec', 'place'),
  [
    ([], GPUS[:1], 'copy', 'spread'),
    (['--local_parameter_device=cpu'], GPUS, 'copy', 'cpu'),
    (['--use_nccl=true', '--local_parameter_device=gpu'], GPUS, 'nccl', 'spread'),
    (['--local_parameter_device=spread'], GPUS, 'nccl', 'spread'),
    (['--use_nccl=false'], GPUS, 'copy', 'spread'),
    (['--nouse_nccl'], GPUS, 'copy', 'spread'),
    (['--use_nccl=true', '--all_reduce_spec=nccl'], GPUS, 'nccl', 'spread'),
    (['--all_reduce_spec=collective'], CPUS, 'collective', 'spread'),
  ],
)
def test_replicated_gets_its_all_reduce(arguments, devices, spec, place):
  options = completed(*arguments, devices=devices)
  assert flags.variables.manager_options(options) == {
    'all_reduce_spec': spec,
    'local_parameter_device': place,
  }


def test_other_managers_get_only_what_they_take():
  ps = completed('--variable_update=parameter_server', devices=GPUS)
  assert flags.variables.manager_options(ps) == {'local_parameter_device': 'cpu'}
  ps = completed('--variable_update=parameter_server', '--local_parameter_device=GPU')
  assert flags.variables.manager_options(ps) == {'local_parameter_device': 'spread'}
  alone = completed('--variable_update=independent')
  assert flags.variables.manager_options(alone) == {}


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (
      ['--gradient_repacking=4', '--compact_gradient_transfer'],
      {'gradient_repacking': 4, 'transfer_dtype': 'bfloat16'},
    ),
    (
      ['--compact_gradient_transfer', '--precision=fp16', '--variable_consistency=relaxed'],
      {'transfer_dtype': 'float16', 'variable_consistency': 'relaxed'},
    ),
    (
      ['--agg_small_grads_max_bytes=2k', '--agg_small_grads_max_group=3'],
      {'agg_small_grads_max_bytes': 2048, 'agg_small_grads_max_group': 3},
    ),
    (
      ['--hierarchical_copy', '--network_topology=dgx1', '--batch_norm_statistics=first'],
      {
        'all_reduce_spec': 'hierarchical_copy',
        'network_topology': 'dgx1',
        'batch_norm_statistics': 'first',
      },
    ),
    (['--local_parameter_device=gpu:1'], {'local_parameter_device': '/CPU:1'}),
  ],
  ids=str,
)
def test_replicated_gets_its_options(arguments, expected):
  options = completed(*arguments)
  usual = {'all_reduce_spec': 'copy', 'local_parameter_device': 'spread'}
  assert flags.variables.manager_options(options) == {**usual, **expected}


def test_parameter_server_gets_its_options():
  options = completed(
    '--variable_update=parameter_server',
    '--staged_vars',
    '--local_parameter_device=gpu:1',
    '--gradient_reduction=sum',
    devices=GPUS,
  )
  assert flags.variables.manager_options(options) == {
    'staged_vars': True,
    'local_parameter_device': '/GPU:1',
  }
  assert flags.variables.step_options(options) == {'gradient_reduction': 'sum'}


def test_a_link_matrix_comes_from_a_file(tmp_path):
  (tmp_path / 'links.json').write_text('[[0, 2], [2, 0]]')
  options = completed('--hierarchical_copy', f'--network_topology={tmp_path}/links.json')
  assert flags.variables.manager_options(options)['network_topology'] == [[0, 2], [2, 0]]


def test_what_these_devices_can_not_do_is_refused_with_them():
  with pytest.raises(UsageError, match='=gpu:2: there are 2 compute devices, the last is gpu:1'):
    completed('--local_parameter_device=gpu:2')
  with pytest.raises(UsageError, match='gcp_v100 has 8 devices, not 2'):
    completed('--hierarchical_copy', '--network_topology=gcp_v100')


def test_a_manager_of_one_s_own_is_taken_by_its_path():
  options = completed('--variable_update=my.module:Manager')
  assert flags.variables.manager_options(options) == {}
  assert '--variable_update=replicated' in flags.next_command(options)


def test_nccl_is_refused_when_the_devices_turn_out_to_be_cpus():
  with pytest.raises(UsageError, match='--use_nccl=true: NCCL needs GPUs'):
    completed('--use_nccl=true', devices=CPUS)


@pytest.mark.parametrize(
  ('arguments', 'rate'),
  [
    (['--batch_size=128'], 0.1),
    (['--batch_size=64', '--optimizer=sgd'], 0.05),
    (['--batch_size=128', '--variable_update=independent'], 0.05),
    (['--optimizer=adam'], 0.001),
    (['--init_learning_rate=3'], 3.0),
  ],
)
def test_learning_rate_follows_the_batch_behind_one_update(arguments, rate):
  assert completed(*arguments).init_learning_rate == pytest.approx(rate)


def test_steps_of_epochs_include_what_a_checkpoint_has_seen():
  options = completed('--num_epochs=2', '--batch_size=5', '--train_dir=.')  # 10 images a step
  assert flags.steps.plan(options, 77, done=0, position=0) == (16, 2)  # 154 images
  assert flags.steps.plan(options, 77, done=6, position=56) == (10, 2)  # 98 are left
  assert flags.steps.plan(options, 77, done=16, position=154) == (0, 0)
  assert '--num_epochs=2; raise that to go on' in flags.steps.finished(options, 16, 154)


def test_the_last_steps_of_an_interrupted_training_are_made_and_the_last_is_timed():
  options = completed('--num_batches=20', '--num_warmup_batches=5', '--train_dir=.')
  assert flags.steps.plan(options, None, done=0, position=0) == (25, 5)
  assert flags.steps.plan(options, None, done=10, position=40) == (15, 5)
  assert flags.steps.plan(options, None, done=22, position=88) == (3, 2)
  assert flags.steps.plan(options, None, done=24, position=96) == (1, 0)
  assert flags.steps.plan(options, None, done=25, position=100) == (0, 0)


def test_a_first_run_that_would_only_warm_up_is_refused():
  options = completed('--num_epochs=1', '--batch_size=5', '--num_warmup_batches=8')
  with pytest.raises(UsageError, match='is 8 steps, all of them warm-up'):
    flags.steps.plan(options, 77, done=0, position=0)


def test_warm_up_is_of_whole_calls_and_leaves_room_for_profiled_steps():
  assert completed('--steps_per_call=5').num_warmup_batches == 5
  options = completed('--trace_file=trace.json')
  assert (flags.steps.num_profiled(options), options.num_warmup_batches) == (3, 4)
  options = completed('--tfprof_file=ops.txt', '--steps_per_call=2')
  assert (flags.steps.num_profiled(options), options.num_warmup_batches) == (4, 6)
  assert flags.steps.num_profiled(completed()) == 0


def test_whole_epochs_end_inside_the_pipeline_and_parts_by_steps():
  whole = completed('--num_epochs=2', '--data_dir=.')
  part = completed('--num_epochs=0.5', '--data_dir=.')
  assert flags.data.pipeline_options(whole) == {
    'data_dir': '.',
    'split': 'train',
    'bad_records': 'fail',
    'pipeline': 'tfdata',
    'num_epochs': 2,
  }
  assert 'num_epochs' not in flags.data.pipeline_options(part)


@pytest.mark.parametrize('spelling', ['--help', '-h', '--helpfull', '-help'])
def test_help_is_asked_for_in_every_spelling(spelling):
  assert flags.parse([spelling, '--model=nonsense']) is None


def test_help_explains_every_flag_under_its_concern():
  text = flags.help_text()
  for concern in flags.CONCERNS:
    assert f'{concern.TITLE}:\n' in text
    values = absl_flags.FlagValues()
    concern.define(values)
    for name in values:
      assert f'\n  --{name}=' in text
      assert values[name].help
  assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
  'arguments',
  [
    [],
    ['--variable_update=replicated', '--use_nccl=false', '--local_parameter_device=gpu'],
    ['--variable_update=parameter_server', '--local_parameter_device=cpu'],
    ['--variable_update=independent', '--num_epochs=0.5'],
    ['--forward_only', '--variable_update=parameter_server', '--result_json=run.json'],
    ['--train_dir=.', '--data_dir=.', '--optimizer=adam', '--all_reduce_spec=copy'],
    ['--train_dir=.', '--data_dir=.', '--variable_update=independent', '--num_epochs=1'],
    ['--eval', '--train_dir=.', '--data_dir=.', '--num_batches=3'],
    ['--train_dir=.', '--data_dir=.', '--save_model_steps=4', '--steps_per_call=2', '--use_fp16'],
    ['--train_dir=.', '--save_model_secs=4', '--trace_file=t', '--print_training_accuracy'],
    ['--num_runs=3', '--learning_rate_schedule=cosine', '--gradient_clip=1'],
  ],
)
def test_the_next_command_is_valid_and_another(arguments):
  following = flags.next_command(completed(*arguments))
  again = flags.next_command(completed(*following))
  assert sorted(following) != sorted(arguments)
  assert completed(*again)


def test_the_next_commands_lead_through_all_managers_to_a_larger_batch():
  options, seen = completed(), []
  for _ in range(3):
    options = completed(*flags.next_command(options))
    seen.append((options.variable_update, options.batch_size))
  assert seen == [('parameter_server', 2), ('independent', 2), ('replicated', 4)]


def cluster_of(*arguments: str, **environment: str):
  options = flags.parse(['--variable_update=parameter_server', *arguments])
  return flags.cluster.cluster(options, environment)


def test_a_cluster_by_flags():
  found = cluster_of(
    '--worker_hosts=n[1-2]:2222', '--ps_hosts=n1:2223', '--job_name=ps', '--task_index=0'
  )
  assert (found.task, found.address) == ('ps:0', 'n1:2223')
  assert found.worker_hosts == ('n1:2222', 'n2:2222')
  assert str(found.heartbeat_address) == 'n1:3222'
  assert cluster_of() is None


def test_a_cluster_by_the_environment(monkeypatch):
  text = '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "ps"}}'
  monkeypatch.setenv('TF_CONFIG', text)
  assert cluster_of(TF_CONFIG=text).task == 'ps:0'
  same = ['--worker_hosts=a:1,b:1', '--ps_hosts=c:1', '--job_name=ps', '--task_index=0']
  assert cluster_of(*same, '--heartbeat_port=9', TF_CONFIG=text).heartbeat_address.port == 9
  other = [*same[:-1], '--worker_hosts=a:1,d:1', '--task_index=0']
  with pytest.raises(UsageError) as refused:
    cluster_of(*other)
  assert str(refused.value) == (
    'the flags make this ps:0 of workers a:1,d:1 and ps c:1, but TF_CONFIG makes it ps:0 of '
    'workers a:1,b:1 and ps c:1: drop one of them'
  )
  with pytest.raises(UsageError, match='TF_CONFIG makes this process a task of one'):
    flags.parse(['--variable_update=parameter_server', '--local_cluster=workers:1,ps:1'])


def test_a_lone_worker_in_tf_config_trains_alone(monkeypatch):
  text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
  monkeypatch.setenv('TF_CONFIG', text)
  assert flags.cluster.cluster(flags.parse([])) is None


def test_a_slurm_step_that_contradicts_the_flags_is_refused(monkeypatch):
  for name, value in STEP.items():
    monkeypatch.setenv(name, value)
  slurm = ['--variable_update=parameter_server', '--cluster_resolver=slurm', '--num_ps=2']
  assert flags.cluster.cluster(flags.parse(slurm)).ps_hosts == ('node1:2223', 'node2:2223')
  with pytest.raises(UsageError, match='but the Slurm step makes it worker:0 of workers node1'):
    flags.parse([*slurm, '--worker_hosts=a:1', '--ps_hosts=b:1', '--task_index=0'])


def test_what_all_processes_must_share():
  arguments = ['--worker_hosts=a:1', '--ps_hosts=b:1', '--task_index=0', '--model=lenet']
  options = flags.parse(['--variable_update=parameter_server', *arguments, '--num_batches=4'])
  assert flags.cluster.shared(options) == {
    '--model': 'lenet',
    '--num_batches': '4',
    '--variable_update': 'parameter_server',
  }
