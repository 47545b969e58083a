"""What the driver's flags refuse, and with what words; all of it before TensorFlow is imported."""

from absl import flags as absl_flags
import pytest

from benchmarks import flags
from hpm.errors import DataError, UsageError

CPUS = ('/CPU:0', '/CPU:1')
GPUS = ('/GPU:0', '/GPU:1')


def completed(*arguments: str, devices=CPUS) -> flags.Options:
  options = flags.parse(arguments)
  flags.complete(options, devices)
  return options


REFUSED = {
  # unknown names, with the nearest
  '--modle=lenet': 'did you mean --model',
  '--model=alexnett': 'did you mean alexnet',
  '--variable_update=replicatd': 'did you mean replicated',
  '--optimizer=adm': 'did you mean adam',
  '--all_reduce_spec=cpy': 'did you mean copy',
  '--data_name=imagnet': 'did you mean imagenet',
  '--device=tpu': 'valid: cpu, gpu',
  '--local_parameter_device=host': 'valid: cpu, gpu',
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
  '--data_name=imagenet': 'needs --data_dir',
  '--data_name=synthetic --data_dir=.': 'drop one',
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
  assert options.local_parameter_device == 'gpu'
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
  options = completed('--num_epochs=2', '--batch_size=5')  # 10 images a step
  assert flags.steps.total(options, epoch_size=77, position=0) == 16  # 154 images
  assert flags.steps.total(options, epoch_size=77, position=56) == 10  # 98 are left
  with pytest.raises(UsageError, match='154 images, and the checkpoint has seen 154 already'):
    flags.steps.total(options, epoch_size=77, position=154)
  with pytest.raises(UsageError, match='is 2 steps, all of them warm-up'):
    flags.steps.total(options, epoch_size=77, position=135)


def test_whole_epochs_end_inside_the_pipeline_and_parts_by_steps():
  whole = completed('--num_epochs=2', '--data_dir=.')
  part = completed('--num_epochs=0.5', '--data_dir=.')
  assert flags.data.pipeline_options(whole) == {
    'data_dir': '.',
    'split': 'train',
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
