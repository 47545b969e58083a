"""The Slurm script, the manifest and the page: their flags parse, and name one cluster."""

from pathlib import Path
import re
import shlex
import subprocess

import pytest

from benchmarks import flags

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / 'docs' / 'examples'


def test_the_slurm_script_gives_each_node_a_worker_and_a_parameter_server(monkeypatch, tmp_path):
  text = (EXAMPLES / 'slurm.sh').read_text()
  assert subprocess.run(['bash', '-n', EXAMPLES / 'slurm.sh'], check=False).returncode == 0
  settings = dict(re.findall(r'#SBATCH --([a-z-]+)=(\S+)', text))
  (tmp_path / 'train-00000-of-00001').touch()
  command = shlex.split(text[text.index('srun') :].replace('\\\n', ' '))
  arguments = [
    re.sub(r'\$\w+_DIR', str(tmp_path), word) for word in command[command.index('python') + 2 :]
  ]
  nodes, per_node = int(settings['nodes']), int(settings['ntasks-per-node'])
  clusters = []
  for node in range(nodes):
    for local in range(per_node):
      step = {
        'SLURM_STEP_NODELIST': f'node[1-{nodes}]',
        'SLURM_STEP_TASKS_PER_NODE': f'{per_node}(x{nodes})',
        'SLURM_NODEID': str(node),
        'SLURM_LOCALID': str(local),
      }
      for name, value in step.items():
        monkeypatch.setenv(name, value)
      clusters.append(flags.cluster.cluster(flags.parse(arguments)))
      assert clusters[-1].address.startswith(f'node{node + 1}:')
  assert [one.task for one in clusters] == ['worker:0', 'ps:0', 'worker:1', 'ps:1']
  assert len({(one.worker_hosts, one.ps_hosts) for one in clusters}) == 1


def test_the_manifest_names_one_cluster():
  text = (EXAMPLES / 'kubernetes.yaml').read_text()
  clusters, shared = [], []
  for job in text.split('---'):
    if 'kind: Job' not in job:
      continue
    name = re.search(r'name: (\S+)', job)[1]
    service = re.search(r'subdomain: (\S+)', job)[1]
    arguments = re.findall(r'^ +- (--\S+)$', job, re.MULTILINE)
    count = int(re.search(r'completions: ([0-9]+)', job)[1])
    assert f'parallelism: {count}\n' in job
    for index in range(count):
      options = flags.parse([one.replace('$(TASK_INDEX)', str(index)) for one in arguments])
      clusters.append(flags.cluster.cluster(options, {}))
      shared.append(flags.cluster.shared(options))
      assert clusters[-1].address == f'{name}-{index}.{service}:2222'
  assert sorted(one.task for one in clusters) == ['ps:0', 'worker:0', 'worker:1']
  assert len({(one.worker_hosts, one.ps_hosts) for one in clusters}) == 1
  assert all(one == shared[0] for one in shared)


def test_the_page_commands_parse():
  text = (ROOT / 'docs' / 'cluster.md').read_text().replace('\\\n', ' ')
  found = re.findall(r'python benchmarks/run\.py +(.*)', text)
  whole = [shlex.split(line) for line in found if '`' not in line and '...' not in line]
  (of_host,) = [command for command in whole if '--job_name=host' in command]
  words = [word.replace('=n', '=3') for word in of_host]
  assert flags.cluster.starts_host(flags.parse(words))
  commands = [command for command in whole if command is not of_host]
  assert len(commands) == 4
  for command in commands:
    assert flags.cluster.local_tasks(flags.parse(command)).num_workers == 2
  by_hand = [
    shlex.split(line.removesuffix('...'))
    for line in found
    if '--job_name' in line and '...' in line
  ]
  assert len(by_hand) == 3
  mode = ['--variable_update=parameter_server']
  tasks = [flags.cluster.cluster(flags.parse([*line, *mode]), {}).task for line in by_hand]
  assert tasks == ['ps:0', 'worker:0', 'worker:1']


@pytest.mark.parametrize('name', ['slurm.sh', 'kubernetes.yaml', 'Dockerfile'])
def test_the_page_names_each_example(name):
  assert f'(examples/{name})' in (ROOT / 'docs' / 'cluster.md').read_text()
  assert (EXAMPLES / name).exists()
