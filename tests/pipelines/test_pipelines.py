"""The registry, the lazy exports and the command line."""

import subprocess
import sys

import pytest

from hpm import errors, pipelines
from hpm.pipelines import __main__ as command_line


def run(*code: str) -> str:
  result = subprocess.run(
    [sys.executable, '-c', '\n'.join(code)], capture_output=True, text=True, check=True
  )
  return result.stdout.strip()


def test_create_makes_what_the_registry_names():
  pipeline = pipelines.create('synthetic', batch_size=3, num_classes=4)
  assert isinstance(pipeline, pipelines.Pipeline)
  assert (pipeline.batch_size, pipeline.image_size, pipeline.num_classes) == (3, 224, 4)


def test_unknown_names_and_options_are_answered_with_the_valid_ones():
  with pytest.raises(errors.UsageError, match=r'did you mean imagenet.*imagenet, .*synthetic'):
    pipelines.create('imagnet')
  with pytest.raises(
    errors.UsageError, match=r"'synthetic' has no option 'data_dir'; .*batch_size, image_size"
  ):
    pipelines.create('synthetic', batch_size=1, data_dir='x')
  with pytest.raises(errors.UsageError, match=r"'imagenet' needs 'data_dir', 'batch_size'"):
    pipelines.create('imagenet')
  with pytest.raises(errors.UsageError, match=r"unknown pipeline 'tf': did you mean tfdata"):
    pipelines.create('imagenet', pipeline='tf', data_dir='x', batch_size=1)
  with pytest.raises(errors.UsageError, match=r"'imagenet' takes nothing after a colon"):
    pipelines.create('imagenet:x', data_dir='x', batch_size=1)


def test_listing_the_registry_imports_no_tensorflow():
  seen = run(
    'import sys',
    'from hpm import pipelines',
    'print(*pipelines.PIPELINES, "keras" in sys.modules, "tensorflow" in sys.modules)',
    'print("imagenet" in pipelines.SOURCES)',
  )
  assert 'tfdata' in seen and seen.endswith(' False False\nTrue')
  with pytest.raises(AttributeError, match='nonsense'):
    pipelines.nonsense  # noqa: B018


def test_the_command_line_lists_its_commands(capsys):
  with pytest.raises(SystemExit) as ended:
    command_line.main(['--help'])
  assert ended.value.code == 0
  assert 'sample' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('arguments', 'code', 'message'),
  [
    (['smple'], 2, "unknown command 'smple': did you mean sample or compile? valid: compile, "),
    (['sample', '--out', '{tmp}', '--num_images=3'], 2, 'num_images=3 must be at least 35'),
    (['sample', '--out', '{tmp}/file/sample'], 2, 'file is a file, where a directory is needed'),
    (['sample', '--out', '{tmp}/file'], 2, 'is a file: give a directory'),
    (['sample', '--out', '{tmp}'], 2, 'is not empty and holds no sample data set'),
  ],
)
def test_faults_end_with_one_line_and_a_code(tmp_path, capsys, arguments, code, message):
  (tmp_path / 'file').write_text('x')
  assert command_line.main([item.format(tmp=tmp_path) for item in arguments]) == code
  output = capsys.readouterr()
  assert message in output.err
  assert output.err.count('\n') == 1 and output.out == ''


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], 'required: COMMAND (--help shows the arguments)'),
    (['sample'], 'required: --out (--help shows the arguments)'),
    (['sample', '--out=x', '--colour'], 'unrecognized arguments: --colour'),
  ],
)
def test_wrong_flags_end_with_code_2_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert command_line.main(arguments) == 2
  error = capsys.readouterr().err
  assert error.startswith('python -m hpm.pipelines: ') and error.count('\n') == 1
  assert message in error
  assert not list(tmp_path.iterdir())
