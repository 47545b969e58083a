"""The measurement of all-reduces: its arithmetic, its contenders, a run in miniature."""

import json

import numpy as np
import pytest

from benchmarks import allreduce


def test_sizes_are_powers_up_to_the_largest():
  assert allreduce.sizes(1024, 70000) == [1024, 8192, 65536, 70000]
  assert allreduce.sizes(1024, 1024) == [1024]


def test_the_gradients_of_a_model_come_last_layer_first():
  shapes = allreduce.shapes_of('resnet50')
  assert len(shapes) == 161
  assert shapes[:2] == [(1000,), (2048, 1000)]
  assert sum(np.prod(shape) for shape in shapes) == 25_557_032


@pytest.mark.parametrize(
  ('spec', 'buckets', 'expected'),
  [
    ('copy', 0, 6 * 4 * 150),
    ('xring', 2, 6 * 4 * 150),
    ('pscpu', 0, 8 * 4 * 150),
    ('nccl', 0, 6 * 4 * 150),  # as a ring
    ('collective', 3, 6 * 4 * 150),
  ],
)
def test_bytes_moved_over_four_devices(spec, buckets, expected):
  assert allreduce.moved_bytes(spec, 4, [(100,), (50,)], buckets) == expected


def test_every_round_runs_each_contender_once_in_an_order_that_turns():
  calls = []
  reduces = {name: (lambda name=name: calls.append(name)) for name in 'abc'}
  figures = allreduce.measure(reduces, rounds=3)
  assert ''.join(calls[-9:]) == 'abcbcacab'
  assert {name: len(figure['times_s']) for name, figure in figures.items()} == dict.fromkeys(
    'abc', 3
  )


def test_contenders_and_their_twins_reduce_the_same(cpu_devices):
  shapes = [(3,), (2, 2)]
  built = allreduce.contenders(('copy', 'hierarchical_copy', 'collective'), cpu_devices[:2], shapes)
  assert list(built) == [
    'copy', 'tf.distribute ReductionToOneDevice',
    'hierarchical_copy', 'tf.distribute HierarchicalCopyAllReduce',
    'collective', 'tf.distribute CollectiveAllReduce',
  ]  # fmt: skip
  for name, reduce in built.items():
    results = reduce()
    for values, shape in zip(results, shapes) if 'tf.' in name else zip(zip(*results), shapes):
      for value in values.values if 'tf.' in name else values:
        np.testing.assert_array_equal(value.numpy(), np.full(shape, 3.0), err_msg=name)


def test_a_run_in_miniature(cpu_devices, capsys, tmp_path):
  file = tmp_path / 'allreduce.json'
  arguments = [
    '--device=cpu', '--num_gpus=2', '--sets=sizes', '--min_bytes=1k', '--max_bytes=16k',
    '--specs=copy,xring', '--rounds=2', f'--json={file}',
  ]  # fmt: skip
  assert allreduce.main(arguments) == 0
  assert '1,024 bytes: 1 tensors' in capsys.readouterr().out
  record = json.loads(file.read_text())
  assert [one['bytes'] for one in record['sets']] == [1024, 8192, 16384]
  for one in record['sets']:
    names = [row['contender'] for row in one['rows']]
    assert names == ['copy', 'tf.distribute ReductionToOneDevice', 'xring']
    for row in one['rows']:
      assert len(row['times_s']) == 2
      assert row['bus_bytes_per_s'] == row['algorithm_bytes_per_s'] > 0  # 2 (n - 1) / n is 1
      assert row['share_of_memcpy'] == row['bus_bytes_per_s'] / record['memcpy_bytes_per_s']
      assert row['moved_bytes'] in (None, 2 * one['bytes'])


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--sets=resnet'], '--sets=resnet: use'),
    (['--specs=cpy'], 'did you mean copy'),
    (['--specs=nccl'], 'needs GPUs'),
    (['--num_gpus=1'], 'at least 2'),
    (['--max_bytes=many'], "size 'many'"),
    (['--min_bytes=2M', '--max_bytes=1M'], 'is more than'),
    (['--rounds=0'], 'rounds'),
    (['fast'], "unexpected 'fast'"),
  ],
)
def test_what_can_not_work_is_exit_code_2(arguments, message, cpu_devices, capsys):
  assert allreduce.main(['--device=cpu', *arguments]) == 2
  assert message in capsys.readouterr().err
