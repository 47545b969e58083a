"""Two sides beside each other: what the interval covers, what is listed, what is refused."""

import json
import re

import numpy as np
import pytest

from benchmarks import compare, difference, results, speed

TRIALS = 1200
IMAGES = 64


def result(seconds, number=0, **changed):
  """As the driver writes it, of steps that took `seconds`; `number` tells when."""
  timed = speed.Speed()
  for step in seconds:
    timed.add(float(step), IMAGES)
  record = {
    'schema_version': results.SCHEMA_VERSION,
    'status': 'ok',
    'mode': 'training',
    'started_at': f'2026-01-01T00:{number:02}:00+00:00',
    'command': [],
    'flags_given': {},
    'flags': {'model': 'resnet50', 'xla': False, 'result_json': f'{number}.json'},
    'machine': {'cpu': 'one', 'environment': {'TF_ENABLE_ONEDNN_OPTS': '1'}},
    'model': 'resnet50',
    'devices': ['/CPU:0'],
    'batch_size_per_device': IMAGES,
    'images_per_second': timed.mean,
    'images_per_second_total': timed.mean,
    'images_per_second_median': timed.median,
    'images_per_second_interval': None,
    'standard_error': timed.standard_error,
    'jitter': timed.jitter,
    'step_seconds': timed.seconds,
    'step_images': timed.images,
    'step_seconds_mean': float(np.mean(seconds)),
    'step_seconds_median': float(np.median(seconds)),
    'step_seconds_percentiles': speed.percentiles(timed.seconds),
    **changed,
  }
  return {name: value for name, value in record.items() if value is not ...}


@pytest.fixture
def written(tmp_path):
  def write(name, seconds, number=0, **changed):
    path = str(tmp_path / name)
    results.write(path, result(seconds, number, **changed))
    return path

  return write


def noisy(mean, seed=0, steps=100):
  return np.random.default_rng(seed).normal(mean, 0.05 * mean, steps)


def independent(rng, steps):
  return rng.normal(1.0, 0.1, (TRIALS, steps))


def heavy_tailed(rng, steps):
  return 0.8 + 0.2 * rng.lognormal(-0.5, 1.0, (TRIALS, steps))  # mean 1


def autocorrelated(rng, steps):
  """Each step has 0.7 of what the one before it was away from the mean."""
  noise = rng.normal(0.0, 0.1 * np.sqrt(1 - 0.7**2), (TRIALS, steps))
  found = [rng.normal(0.0, 0.1, TRIALS)]
  for step in range(1, steps):
    found.append(0.7 * found[-1] + noise[:, step])
  return 1.0 + np.stack(found, axis=1)


DISTRIBUTIONS = [independent, heavy_tailed, autocorrelated]


def run(seconds, number=0):
  """As far as a difference reads it."""
  return {
    'step_seconds': list(seconds),
    'step_images': [IMAGES] * len(seconds),
    'started_at': f'{number:04}',
  }


@pytest.mark.parametrize('distribution', DISTRIBUTIONS)
def test_one_run_each_covers_the_truth_in_95_of_100(distribution):
  rng = np.random.default_rng(1)
  a, b = distribution(rng, 400), 1.25 * distribution(rng, 400)
  found = [difference.of([run(x)], [run(y)]) for x, y in zip(a, b, strict=True)]
  assert 0.93 <= np.mean([one.low <= 1 / 1.25 <= one.high for one in found]) <= 0.97
  assert all(one.how == difference.WITHIN for one in found)


@pytest.mark.parametrize('distribution', DISTRIBUTIONS)
def test_the_interval_of_a_result_covers_the_truth_too(distribution):
  rng = np.random.default_rng(2)
  found = [
    speed.interval(speed.blocks(times, [IMAGES] * len(times)), 1.0)
    for times in distribution(rng, 400)
  ]
  assert 0.93 <= np.mean([low <= IMAGES <= high for low, high in found]) <= 0.97


def test_steps_that_hang_together_are_not_independent():
  rng = np.random.default_rng(3)
  found = [speed.interval(list(times), IMAGES) for times in autocorrelated(rng, 400)]
  assert np.mean([low <= IMAGES <= high for low, high in found]) < 0.75


@pytest.mark.parametrize('counts', [(5, 5), (4, 8)], ids=str)
def test_several_runs_hold_what_differs_from_run_to_run(counts):
  rng = np.random.default_rng(4)
  sides = [rng.normal(1.0, 0.05, (TRIALS, n)) for n in counts]  # a run is slow as a whole
  found = [
    difference.of([run([t]) for t in x], [run([1.25 * t], 1) for t in y])
    for x, y in zip(*sides, strict=True)
  ]
  assert found[0].how == difference.APART
  assert 0.93 <= np.mean([one.low <= 1 / 1.25 <= one.high for one in found]) <= 0.97


def test_turns_take_out_what_slows_both():
  rng = np.random.default_rng(5)
  drift = 1.0 + np.linspace(0, 0.5, 6)
  sides = [drift * rng.normal(1.0, 0.01, (TRIALS, 6)) for _ in 'ab']
  found, apart = [], []
  for x, y in zip(*sides, strict=True):
    found.append(
      difference.of(
        [run([t], 2 * i) for i, t in enumerate(x)], [run([t], 2 * i + 1) for i, t in enumerate(y)]
      )
    )
    apart.append(difference.of([run([t], 0) for t in x], [run([t], 1) for t in y]))
  assert found[0].how == difference.PAIRED and apart[0].how == difference.APART
  assert 0.93 <= np.mean([one.low <= 1 <= one.high for one in found]) <= 0.97
  widths = [np.median([one.high - one.low for one in those]) for those in (found, apart)]
  assert widths[0] < 0.2 * widths[1]


def test_a_loss_beyond_the_threshold_ends_with_1(written, capsys):
  a, b = written('a.json', noisy(1.0)), written('b.json', noisy(1.1, 1))
  assert compare.main([a, b, '--threshold=0.05']) == 1
  out = capsys.readouterr().out
  assert re.search(r'B is (8|9|10)\.\d+% slower than A; .* significant', out)
  assert 'Slower than the threshold of 0.05 allows' in out
  assert 'two runs of one command can differ by more' in out
  assert compare.main([a, b, '--threshold=0.2']) == 0
  assert compare.main([b, a]) == 0
  assert 'faster than A' in capsys.readouterr().out


def test_a_loss_within_the_noise_is_none(written, capsys):
  a = [written(f'a{i}.json', [t] * 4, 2 * i) for i, t in enumerate((0.8, 1.2))]
  b = [written(f'b{i}.json', [t] * 4, 2 * i + 1) for i, t in enumerate((1.5, 0.9))]
  assert compare.main([f'--a={",".join(a)}', f'--b={",".join(b)}']) == 0
  out = capsys.readouterr().out
  assert 'which is no difference' in out and '2 pairs of runs made by turns' in out
  assert 'A loss of more than 0.02 is not ruled out' in out


def test_every_run_of_a_file_counts(written, capsys):
  runs = [
    {'images_per_second': r, 'images_per_second_total': r, 'num_steps': 4} for r in (60.0, 64.0)
  ]
  a, b = (written(f'{name}.json', [1.0] * 4, runs=runs) for name in 'ab')
  assert compare.main([a, b]) == 0
  assert '2 and 2 runs' in capsys.readouterr().out


def test_settings_that_differ_are_listed_and_no_others(written, capsys):
  a = written('a.json', noisy(1.0))
  b = written(
    'b.json',
    noisy(1.0),
    flags={'model': 'resnet50', 'xla': True, 'result_json': 'elsewhere'},
    machine={'cpu': 'two', 'environment': {'TF_ENABLE_ONEDNN_OPTS': '0'}},
  )
  assert compare.main([a, b]) == 0
  listed = [line for line in capsys.readouterr().out.splitlines() if ' | ' in line]
  assert listed == [
    '--xla: False | True',
    'cpu: one | two',
    'environment: TF_ENABLE_ONEDNN_OPTS=1 | TF_ENABLE_ONEDNN_OPTS=0',
  ]


NO_SPEED = dict.fromkeys(results.THROUGHPUT, ...)


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({**NO_SPEED, 'status': 'failed', 'reason': 'out of memory'}, 'has no rate: out of memory'),
    ({**NO_SPEED, 'accuracy': {'top_1': 0.7}}, 'it measured no speed'),
    ({'model': 'vgg16'}, 'model is resnet50 in A and vgg16 in B'),
    ({'mode': 'forward only'}, 'mode is training in A'),
    ({'devices': ['/CPU:0', '/CPU:1']}, 'num_devices is 1 in A and 2 in B'),
  ],
  ids=str,
)
def test_what_is_not_two_measurements_of_one_thing_is_refused(written, capsys, changed, message):
  a, b = written('a.json', noisy(1.0)), written('b.json', noisy(1.0), **changed)
  assert compare.main([a, b]) == 2
  captured = capsys.readouterr()
  assert message in captured.err and captured.err.count('\n') == 1 and not captured.out
  if 'model' in changed:
    assert compare.main([a, b, '--anyway']) == 0


def test_other_files_are_refused(written, tmp_path, capsys):
  a = written('a.json', noisy(1.0))
  old = tmp_path / 'old.json'
  old.write_text(json.dumps({**result(noisy(1.0)), 'schema_version': 1}))
  for b in (str(old), str(tmp_path / 'none.json')):
    assert compare.main([a, b]) == 2
    assert 'is no result of benchmarks/run.py' in capsys.readouterr().err
  assert compare.main([a, a]) == 2
  assert 'is given twice' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], 'two result files are needed'),
    (['a.json'], 'two result files are needed'),
    (['--a=a.json'], 'two result files are needed'),
    (['a', 'b', '--threshold=-1'], '--threshold=-1: a share'),
    (['a', 'b', '--threshold=nan'], '--threshold=nan'),
    (['--rounds=0'], '--rounds=0'),
    (['--rounds=2', '--model=lenet'], 'give --a or --b'),
    (['a', 'b', '--model=lenet'], '--model=lenet: flags of the driver go with --rounds'),
    (['a', 'b', '--out=x'], '--out keeps the results of --rounds'),
    (['--rounds=1', '--a=--xla', '--model=lenett', '--device=cpu'], "unknown --model 'lenett'"),
  ],
  ids=str,
)
def test_arguments_that_can_not_work_end_with_2(arguments, message, capsys):
  assert compare.main(arguments) == 2
  captured = capsys.readouterr()
  assert message in captured.err and captured.err.count('\n') == 1, captured.err


@pytest.mark.long
def test_runs_made_by_turns(tmp_path, capsys):
  code = compare.main(
    [
      *('--rounds=2', '--a=--all_reduce_spec=copy', '--b=--all_reduce_spec=xring'),
      *('--model=trivial', '--image_size=8', '--device=cpu', '--num_gpus=2', '--batch_size=2'),
      *('--num_batches=3', '--num_warmup_batches=1', f'--out={tmp_path}/out', '--threshold=0.99'),
    ]
  )
  out = capsys.readouterr().out
  assert code == 0
  assert '--all_reduce_spec: copy | xring' in out and '2 pairs of runs made by turns' in out
  times = {
    path.stem: results.read(str(path))['started_at'] for path in (tmp_path / 'out').iterdir()
  }
  assert sorted(times, key=times.get) == ['a1', 'b1', 'b2', 'a2']
