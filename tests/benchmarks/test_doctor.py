"""The measurement of the doctor, on a few images."""

import re

import pytest

from benchmarks import doctor


def test_both_readings_are_timed(capsys, sample):
  assert doctor.main([f'--data_dir={sample}', '--num_rounds=2']) == 0
  out = capsys.readouterr().out
  assert re.fullmatch(r'(?s)wall s: bare [\d.]+, doctor [\d.]+; bare / doctor .*\nCPU s: .*\n', out)


@pytest.mark.parametrize(
  ('arguments', 'message', 'code'),
  [(['--num_rounds=0'], '--num_rounds=0: above 0', 2), ([], 'nowhere', 1)],
)
def test_what_is_wrong_is_said_in_a_line(capsys, tmp_path, arguments, message, code):
  assert doctor.main([f'--data_dir={tmp_path}/nowhere', *arguments]) == code
  errors = capsys.readouterr().err
  assert message in errors and errors.count('\n') == 1
