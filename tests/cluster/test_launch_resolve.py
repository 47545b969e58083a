"""Clusters from the environment, beside what TensorFlow's own resolvers make of it."""

import json

import pytest

from hpm.cluster import resolve
from hpm.errors import UsageError

STEP = {
  'SLURM_STEP_NODELIST': 'node[1-2]',
  'SLURM_STEP_TASKS_PER_NODE': '2(x2)',
  'SLURM_NODEID': '0',
  'SLURM_LOCALID': '0',
  'SLURM_PROCID': '0',
  'SLURM_STEP_NUM_TASKS': '4',
}


def config(cluster: object, task: object) -> dict[str, str]:
  return {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': task})}


@pytest.mark.parametrize(
  ('cluster', 'task', 'expected'),
  [
    ({'worker': ['a:1', 'b:1']}, {'type': 'worker', 'index': 1}, ('worker:1', 'b:1')),
    ({'worker': ['a:1'], 'ps': ['c:1', 'd:1']}, {'type': 'ps', 'index': 1}, ('ps:1', 'd:1')),
    ({'chief': ['a:1'], 'worker': ['b:1']}, {'type': 'worker', 'index': 0}, ('worker:1', 'b:1')),
    ({'chief': ['a:1'], 'worker': ['b:1']}, {'type': 'chief', 'index': 0}, ('worker:0', 'a:1')),
    ({'chief': ['a:1']}, {'type': 'chief'}, ('worker:0', 'a:1')),
    ({'worker': {'0': 'a:1', '1': 'b:1'}}, {'type': 'worker', 'index': '1'}, ('worker:1', 'b:1')),
    (
      {'worker': ['a:1'], 'evaluator': ['e:1']},
      {'type': 'worker', 'index': 0},
      ('worker:0', 'a:1'),
    ),
  ],
)
def test_tf_config_is_read(cluster, task, expected):
  found = resolve.tf_config(config(cluster, task))
  assert (found.task, found.address) == expected


def test_tf_config_means_what_it_means_to_tensorflow(monkeypatch):
  import tensorflow as tf

  environment = config(
    {'chief': ['a:1'], 'worker': ['b:1', 'c:2'], 'ps': ['d:3']}, {'type': 'ps', 'index': 0}
  )
  monkeypatch.setenv('TF_CONFIG', environment['TF_CONFIG'])
  theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
  ours = resolve.tf_config(environment)
  spec = theirs.cluster_spec().as_dict()
  assert list(ours.worker_hosts) == spec['chief'] + spec['worker']
  assert list(ours.ps_hosts) == spec['ps']
  assert ours.task == f'{theirs.task_type}:{theirs.task_id}'


@pytest.mark.parametrize('environment', [{}, {'TF_CONFIG': ''}, {'TF_CONFIG': '{}'}])
def test_no_tf_config_is_no_cluster(environment):
  assert resolve.tf_config(environment) is None


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{', 'TF_CONFIG is no JSON of a cluster and a task'),
    ('[1]', 'TF_CONFIG is no JSON of a cluster and a task'),
    ('{"cluster": 3}', 'TF_CONFIG is no JSON of a cluster and a task'),
    ('{"cluster": {"worker": ["a:1"]}}', 'has a cluster but no task'),
    ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker"}}', "the hosts of worker are 'a:1'"),
    ('{"cluster": {"worker": [1]}, "task": {"type": "worker"}}', 'a list of host:port is needed'),
    ('{"cluster": {"master": ["a:1"]}, "task": {"type": "master"}}', "a job 'master'"),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator"}}', 'an evaluator, which is'),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "chief"}}', 'chief 0, and names 0'),
    ('{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief"}}', 'has 2 chiefs'),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', 'no task 1'),
    ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}', 'is no address'),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}', 'is no JSON of'),
  ],
)
def test_a_tf_config_that_can_not_work_is_refused(text, message):
  with pytest.raises(UsageError) as refused:
    resolve.tf_config({'TF_CONFIG': text})
  assert message in str(refused.value)
  assert '\n' not in str(refused.value)


def test_slurm_spreads_workers_and_parameter_servers_over_the_nodes():
  roles = {}
  for node in range(2):
    for local in range(2):
      own = {'SLURM_NODEID': str(node), 'SLURM_LOCALID': str(local)}
      cluster = resolve.slurm(STEP | own, num_ps=2)
      assert cluster.worker_hosts == ('node1:2222', 'node2:2222')
      assert cluster.ps_hosts == ('node1:2223', 'node2:2223')
      roles[node, local] = cluster.task
  assert roles == {(0, 0): 'worker:0', (1, 0): 'worker:1', (0, 1): 'ps:0', (1, 1): 'ps:1'}


def test_slurm_nodes_keep_their_order_and_may_have_different_numbers_of_tasks():
  step = STEP | {
    'SLURM_STEP_NODELIST': 'node[10,2],big',
    'SLURM_STEP_TASKS_PER_NODE': '1(x2),3',
    'SLURM_NODEID': '2',
    'SLURM_LOCALID': '1',
  }
  cluster = resolve.slurm(step, num_ps=1, port=7000)
  assert cluster.worker_hosts == ('node10:7000', 'node2:7000', 'big:7000', 'big:7001')
  assert cluster.ps_hosts == ('big:7002',)
  assert cluster.task == 'worker:3'


def test_slurm_has_the_tasks_of_tensorflows_resolver(monkeypatch):
  import tensorflow as tf

  for name, value in STEP.items():
    monkeypatch.setenv(name, value)
  theirs = tf.distribute.cluster_resolver.SlurmClusterResolver(
    jobs={'worker': 4}, port_base=2222, gpus_per_node=4, gpus_per_task=1, auto_set_gpu=False
  )
  hosts = resolve.slurm(STEP).worker_hosts
  assert sorted(hosts) == sorted(theirs.cluster_spec().as_dict()['worker'])


@pytest.mark.parametrize(
  ('changes', 'options', 'message'),
  [
    ({'SLURM_STEP_NODELIST': None}, {}, 'SLURM_STEP_NODELIST is not set, so this is no task of'),
    ({'SLURM_LOCALID': None}, {}, 'SLURM_LOCALID is not set'),
    ({'SLURM_LOCALID': 'x'}, {}, 'SLURM_LOCALID=x: Slurm sets it to a number'),
    ({'SLURM_STEP_TASKS_PER_NODE': '2'}, {}, 'names 2 nodes (SLURM_STEP_NODELIST) and tasks on 1'),
    ({'SLURM_STEP_TASKS_PER_NODE': '2x2'}, {}, 'such as 2(x3),1 is expected'),
    ({'SLURM_LOCALID': '2'}, {}, 'no task 2 on node 0'),
    ({}, {'num_ps': 4}, '4 parameter servers of 4 tasks in this Slurm step leave no worker'),
    ({}, {'port': 65535}, 'a port lies in 1 .. 65535'),
  ],
)
def test_a_slurm_step_that_can_not_work_is_refused(changes, options, message):
  step = {name: value for name, value in (STEP | changes).items() if value is not None}
  with pytest.raises(UsageError) as refused:
    resolve.slurm(step, **options)
  assert message in str(refused.value)
