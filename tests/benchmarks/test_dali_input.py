"""The comparison with NVIDIA's recipe: every row reads and is measured; wrong usage is one line."""

import json

from benchmarks import dali_input
from hpm.pipelines import sample


def test_every_row_is_measured_and_bridges_are_over_run(tmp_path, capsys):
  directory, path = str(tmp_path / 'data'), tmp_path / 'dali.json'
  sample.write_sample(directory, num_images=40)
  arguments = ['--batch_size=4', '--image_size=32', '--num_batches=2', '--num_rounds=1']
  assert dali_input.main([f'--data_dir={directory}', *arguments, f'--result_json={path}']) == 0
  result = json.loads(path.read_text())
  names = [row['name'] for row in result['rows']]
  assert names[:3] == ['recipe', 'recipe, plugin', 'hpm']
  assert len(set(names)) == 9
  assert all(row['images_per_s'] > 0 and row['cpu_ms_per_image'] > 0 for row in result['rows'])
  printed = capsys.readouterr().out
  assert all(name in printed for name in names)


def test_bridges_are_ratios_of_cpu_time():
  cpu = {'graph, run': 2.0, 'graph, plugin': 2.1, 'graph, python': 3.0}
  results = [{'name': name, 'cpu_ms_per_image': value} for name, value in cpu.items()]
  assert dali_input.bridges(results) == {'plugin': 1.05, 'python': 1.5}


def test_missing_data_is_one_line(tmp_path, capsys):
  assert dali_input.main([f'--data_dir={tmp_path}']) == 1
  complaint = capsys.readouterr().err
  assert complaint.startswith('error: no files match')
  assert complaint.count('\n') == 1
