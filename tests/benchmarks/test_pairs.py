"""Every flag in every mode: what goes together, and what is refused at the door with its value."""

import pytest

from benchmarks import flags
from hpm.errors import UsageError
from tests.benchmarks.samples import CLUSTER, SAMPLES, STEP

# A mode, by its arguments.
MODES = {
  'training': [],
  'eval': SAMPLES['eval'],
  'forward_only': ['--forward_only'],
  'dry_run': ['--dry_run'],
  'diagnose': ['--diagnose'],
  'num_runs': ['--num_runs=2'],
  'independent': ['--variable_update=independent'],
  'parameter_server': ['--variable_update=parameter_server'],
  'cpu': ['--device=cpu'],
  'fp16': ['--precision=fp16'],
  'train_dir': ['--train_dir=.'],
  'steps_per_call': ['--steps_per_call=4'],
  'accumulate': ['--accumulate=2'],
  'xla': ['--xla'],
  'cosine': ['--learning_rate_schedule=cosine'],
  'adam': ['--optimizer=adam'],
  'synthetic': ['--data_name=synthetic'],
  'cluster': CLUSTER,
  'local_cluster': SAMPLES['local_cluster'],
}
LOSS_SCALE = {'fp16_loss_scale', 'fp16_enable_auto_loss_scale', 'fp16_inc_loss_scale_every_n'}
UPDATES = {
  *{'optimizer', 'momentum', 'rmsprop_decay', 'rmsprop_momentum', 'rmsprop_epsilon'},
  *{'adam_beta1', 'adam_beta2', 'adam_epsilon'},
  *{'gradient_clip', 'gradient_clip_norm', 'weight_decay', 'accumulate', 'loss_type_to_report'},
  *{'init_learning_rate', 'learning_rate_schedule', 'polynomial_power', 'minimum_learning_rate'},
  *{'piecewise_learning_rate_schedule', 'num_epochs_per_decay', 'learning_rate_decay_factor'},
  *{'num_learning_rate_warmup_epochs', 'resnet_base_lr', 'learning_rate_base_batch'},
  *{'lars_trust', 'lars_epsilon', 'weight_decay_on', 'label_smoothing', 'weight_average_decay'},
  *LOSS_SCALE,
}
EVALUATION = {
  *{'eval_during_training_every_n_steps', 'eval_during_training_every_n_epochs'},
  *{'eval_during_training_at_specified_steps', 'eval_during_training_at_specified_epochs'},
  *{'num_eval_batches', 'stop_at_top_1_accuracy'},
}
CURVES = {'curve_file', 'tensorboard_dir'}
REDUCTION = {
  *{'all_reduce_spec', 'use_nccl', 'hierarchical_copy', 'network_topology'},
  *{'gradient_repacking', 'agg_small_grads_max_bytes', 'agg_small_grads_max_group'},
  'compact_gradient_transfer',
}
SYNCHRONOUS = {'variable_consistency', 'gradient_reduction', 'batch_norm_statistics'}
PROFILES = {'trace_file', 'profile_dir', 'tfprof_file', 'graph_file'}
CHECKPOINTS = {'train_dir', 'save_model_steps', 'save_model_secs', 'max_ckpts_to_keep'}
GPU_KNOBS = {
  *{'gpu_thread_mode', 'per_gpu_thread_count', 'allow_growth', 'use_unified_memory', 'tf32'},
  *{'cudnn_autotune', 'autotune_threshold', 'winograd_nonfused', 'batchnorm_persistent'},
  'sync_on_finish',
}
SEVERAL = {
  *{'job_name', 'task_index', 'worker_hosts', 'ps_hosts', 'cluster_resolver', 'num_ps'},
  *{'cluster_port', 'local_cluster', 'heartbeat_port', 'heartbeat_timeout_s', 'cluster_timeout_s'},
  'cross_replica_sync',
}
ALONE = {
  *{'eval', 'forward_only', 'diagnose', 'num_runs', 'steps_per_call', *PROFILES},
  *REDUCTION - {'compact_gradient_transfer'},
  *{'variable_consistency', 'batch_norm_statistics', 'local_parameter_device'},
}
STEPS = {'steps_per_call', 'num_epochs', 'num_warmup_batches', 'num_runs'}
LINES = {'display_perf_ewma', 'print_training_accuracy'}

# Mode -> the flags that it refuses; it takes all others.
REFUSED = {
  'training': set(),
  'eval': {
    *SEVERAL,
    *UPDATES,
    *REDUCTION,
    *SYNCHRONOUS,
    'staged_vars',
    *PROFILES,
    *STEPS,
    *LINES,
    *EVALUATION,
    *CURVES,
    *{'recipe', 'zero_init', 'recompute'},
    *{'forward_only', 'dry_run', 'diagnose', 'data_name', 'local_parameter_device', 'preset'},
  },
  'forward_only': {
    *SEVERAL,
    *UPDATES,
    *REDUCTION,
    *SYNCHRONOUS,
    *CHECKPOINTS,
    *EVALUATION,
    *CURVES,
    *{'recipe', 'zero_init', 'recompute', 'distort_colors'},
    *{'staged_vars', 'eval', 'dry_run', 'diagnose', 'local_parameter_device'},
  },
  'dry_run': {
    *PROFILES,
    *CHECKPOINTS,
    *EVALUATION,
    *CURVES,
    'eval',
    'forward_only',
    'diagnose',
    'num_runs',
    'result_json',
  },
  'diagnose': {
    *PROFILES,
    *CHECKPOINTS,
    *EVALUATION,
    *CURVES,
    *{'eval', 'forward_only', 'dry_run', 'num_runs', 'num_batches', 'num_epochs'},
    *{'num_warmup_batches', 'steps_per_call', 'data_service', *SEVERAL},
  },
  'num_runs': {
    *SEVERAL,
    *CHECKPOINTS,
    *PROFILES,
    *EVALUATION,
    *CURVES,
    'eval',
    'dry_run',
    'diagnose',
  },
  'independent': {*REDUCTION, *SYNCHRONOUS, *EVALUATION, 'local_parameter_device', 'eval'},
  'parameter_server': REDUCTION,
  'cpu': {*GPU_KNOBS, 'data_format', 'use_nccl'},
  'fp16': set(),
  'train_dir': {'forward_only', 'dry_run', 'diagnose', 'num_runs', 'preset'},
  'steps_per_call': {'eval', 'diagnose', 'preset', *SEVERAL},
  'accumulate': {'eval', 'forward_only', 'batch_norm_statistics'},
  'xla': {'batch_norm_statistics', 'recompute'},
  'cosine': {
    *{'piecewise_learning_rate_schedule', 'num_epochs_per_decay', 'learning_rate_decay_factor'},
    *{'resnet_base_lr', 'eval', 'forward_only'},
  },
  'adam': {'momentum', 'eval', 'forward_only'},
  'synthetic': {'distort_colors', 'data_dir', 'bad_records', 'pipeline', 'data_service', 'eval'},
  'cluster': ALONE,
  'local_cluster': {*ALONE, 'device'},  # gpu, without --num_gpus
}


@pytest.fixture(autouse=True)
def slurm_step(monkeypatch):
  for name, value in STEP.items():
    monkeypatch.setenv(name, value)


def names(arguments):
  return {argument.removeprefix('--').partition('=')[0] for argument in arguments}


def test_every_flag_has_a_sample_that_is_valid_by_itself():
  defined = set(flags.parse([]).values())
  assert set(SAMPLES) == defined, 'add the new flag to tests/benchmarks/samples.py'
  for name, arguments in SAMPLES.items():
    assert name in flags.parse(arguments).given


@pytest.mark.parametrize('mode', MODES)
def test_mode_takes_or_refuses_each_flag(mode):
  refused = set()
  for name, arguments in SAMPLES.items():
    if names(MODES[mode]) & names(arguments):
      continue  # the mode itself is set by it
    for command in ([*MODES[mode], *arguments], [*arguments, *MODES[mode]]):
      try:
        flags.parse(command)
      except UsageError as refusal:
        refused.add(name)
        message = str(refusal)
        assert '\n' not in message
        assert '--' in message, message
  assert refused == REFUSED[mode]


def test_what_is_known_only_with_the_devices_is_refused_then():
  for name in sorted(GPU_KNOBS | {'data_format', 'use_nccl'}):
    options = flags.parse(SAMPLES[name])
    with pytest.raises(UsageError, match=f'--{name}'):
      flags.complete(options, ('/CPU:0',))
    flags.complete(flags.parse(SAMPLES[name]), ('/GPU:0', '/GPU:1'))
