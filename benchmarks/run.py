"""Trains an image model on one or several devices and says how many images a second it gets.

  python benchmarks/run.py --variable_update=replicated
  python benchmarks/run.py --model=resnet50 --num_gpus=8 --batch_size=256 --use_fp16
  python benchmarks/run.py --device=cpu --num_gpus=2 --model=trivial --result_json=run.json
  python benchmarks/run.py --dry_run --model=vgg16 --num_gpus=8 --batch_size=64
  python benchmarks/run.py --model=list
  python benchmarks/run.py --preset=dgx1_p100/resnet50 --dry_run

On real images, here a small set of photographs; with a checkpoint, and its accuracy. The same
command again goes on where it was stopped:

  python -m hpm.pipelines sample --out=/tmp/sample
  python benchmarks/run.py --data_dir=/tmp/sample --train_dir=/tmp/train --num_batches=50
  python benchmarks/run.py --data_dir=/tmp/sample --train_dir=/tmp/train --eval

Exit code: 0 done; 1 the run failed (data, a loss that isn't finite); 2 flags that can't work;
3 another task of the cluster, or the tf.data service, died; 4 nothing has moved for
--stall_timeout_s; 130 interrupted; 143 stopped by SIGTERM, after a checkpoint.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Iterator, Sequence
import contextlib
import datetime
import functools
import math
import os
from pathlib import Path
import shlex
import sys
import time
from typing import Any

if __package__ in (None, ''):  # python benchmarks/run.py: find the checkout, not benchmarks/
  sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import (
  comparison,
  cost,
  curves,
  demand,
  diagnose,
  evaluation,
  flags,
  header,
  local_cluster,
  loop,
  machine,
  member,
  memory,
  plan,
  presets,
  process,
  profiling,
  results,
  runs,
  saving,
  stalls,
  watching,
)
from benchmarks.loop import say
import hpm
from hpm.errors import DataError, UsageError, printable


class Finished(Exception):
  """Nothing is left to do: one line that says so, and why."""


def main(arguments: Sequence[str]) -> int:
  """One command, from its flags to its exit code."""
  try:
    options = flags.parse(arguments)
    if options is None:
      say(f'{__doc__}\n{flags.help_text()}')
      return 0
    if options.model == flags.model.LIST:
      for line in flags.model.table():
        say(line)
      return 0
    if options.preset == flags.preset.LIST:
      for line in presets.table():
        say(line)
      return 0
    if options.recipe == flags.recipe.LIST:
      for line in flags.recipe.table():
        say(line)
      return 0
    if options.dry_run:
      process.set_environment(flags.runtime.environment(options, dict(os.environ)))
      plan.show(options)
      return 0
    if options.diagnose:
      process.set_environment(flags.runtime.environment(options, dict(os.environ)))
      record = begin(arguments, options)
      with recorded(options, record):
        record |= diagnose.show(options)
      return 0
    if options.local_cluster or flags.cluster.starts_host(options):
      return local_cluster.run(arguments, options)
    record = begin(arguments, options)
    cut_short = functools.partial(write_down, options, record, 'stopped')
    with recorded(options, record), process.terminations(cut_short) as stop:
      if options.num_runs > 1:
        runs.repeated(arguments, options.num_runs, record, stop)
      else:
        benchmark(options, record, stop)
      if 'images_per_second' in record:
        note_demand(record)
        note_published(options, record)
    say(closing(options, record))
  except Finished as finished:
    say(str(finished))
  except (saving.Stopped, process.Terminated) as stopped:
    print(stopped, file=sys.stderr)
    return 143
  except BrokenPipeError:  # nobody reads on, as in `run.py | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except hpm.cluster.PeerError:  # which the watch has explained
    return watching.EXIT_CODE
  except runs.Refused:  # which the run itself has explained
    return 2
  except (UsageError, DataError, loop.RunError, OSError) as error:
    print(f'error: {printable(error)}', file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
  except MemoryError as error:
    print(f'error: out of memory ({error}): lower --batch_size', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return 0


def benchmark(options: flags.Options, record: dict[str, Any], stop: process.Terminations) -> None:
  """One process's part, alone or in a cluster; what is learned on the way goes into `record`."""
  started = time.perf_counter()
  process.set_environment(flags.runtime.environment(options, dict(os.environ)))
  failed = functools.partial(write_down, options, record, 'failed')
  with member.joined(options, failed, (Finished, saving.Stopped), stop.at_once) as part:
    if part is None:
      raise Finished('Done: the training is over, and this parameter server with it')
    benchmark_as(part, options, record, stop, started)


def benchmark_as(
  part: member.Alone,
  options: flags.Options,
  record: dict[str, Any],
  stop: list[int],
  started: float,
) -> None:
  """Devices, and what runs on them."""
  try:
    devices = part.devices(options.device, options.num_gpus)
  except UsageError as error:
    raise flags.preset.without_devices(options, error) from None
  flags.complete(options, devices)
  if options.eval:
    saving.newest(options.train_dir)
  part.agree(options)
  with part.stalls(options):
    run_as(part, options, devices, record, stop, started)


def run_as(
  part: member.Alone,
  options: flags.Options,
  devices: Sequence[str],
  record: dict[str, Any],
  stop: list[int],
  started: float,
) -> None:
  """Parts, header, loop."""
  model = create_model(options)
  if not flags.cluster.tasks(options):
    memory.check(options, model, devices)
  pipeline = create_pipeline(options, model, part)
  with part.scope():
    manager = hpm.variable_mgr.create(
      options.variable_update,
      devices,
      **flags.variables.manager_options(options),
      **part.manager_options,
    )
  note_parts(record, model, devices, options, part)
  if not options.eval:
    record['image_bytes'] = demand.image_bytes(model.image_size, pipeline)
  epoch_size = epoch_size_of(options, pipeline)
  for line in header.lines(options, devices, epoch_size, record['machine']):
    say(line)
  if options.data_service is not None and options.train_dir is not None:
    from hpm.pipelines.service import INEXACT

    say(f'Notice: {INEXACT}')
  say('=' * 10)

  with part.service(options):
    if options.eval:
      evaluate(part, options, model, manager, pipeline, record, stop, started)
    else:
      measure(part, options, model, manager, pipeline, epoch_size, record, stop, started)
  note_skipped(record, pipeline)


def evaluate(
  part: member.Alone,
  options: flags.Options,
  model: hpm.models.Model,
  manager: hpm.variable_mgr.VariableManager,
  pipeline: hpm.pipelines.Pipeline,
  record: dict[str, Any],
  stop: list[int],
  started: float,
) -> None:
  """The accuracy of the newest checkpoint; of the average of its weights, if it holds one."""
  averaged = saving.averaged(options.train_dir)
  rule = hpm.optimizers.create('sgd', 0.0, average_decay=0.0 if averaged else None)
  trained = hpm.TrainStep(model, manager, rule)
  record['resumed_from'] = saving.restore(options.train_dir, trained)
  if averaged:
    say('Evaluated: the moving average of the weights')
  step = part.running(hpm.EvalStep(model, manager, xla=options.xla, averaged=averaged))
  steps = loop.watched(
    step, pipeline, options.num_batches, private_threads=options.datasets_num_private_threads
  )
  steps = saving.Saving(step, pipeline, None, stop, record=record).over(part.stages(steps))
  loop.evaluate(steps, options.num_batches, options.display_every, record, started)


def measure(
  part: member.Alone,
  options: flags.Options,
  model: hpm.models.Model,
  manager: hpm.variable_mgr.VariableManager,
  pipeline: hpm.pipelines.Pipeline,
  epoch_size: int | None,
  record: dict[str, Any],
  stop: list[int],
  started: float,
) -> None:
  """Training, or inference alone: from the newest checkpoint, if there is one, to the goal."""
  done = position = 0
  directory = options.train_dir if part.is_chief else None
  if options.forward_only:
    manager.create(*model.init(options.tf_random_seed))
    step = part.running(hpm.EvalStep(model, manager, xla=options.xla))
  else:
    with part.scope():
      step = create_train_step(options, model, manager, epoch_size)
    goal = flags.steps.goal(options, epoch_size)
    record.setdefault('warnings', []).extend(flags.schedule.warnings(options, epoch_size, goal))
    step = part.training(step)
    done, position = saving.resume(directory, step, pipeline, record, part.number)
  images = step.progress()[1] if done else 0
  work = plan_work(part, options, pipeline, epoch_size, done, position, images)

  # Whole passes end with the data: the shares of workers may differ by some samples.
  by_data = part.num_workers > 1 and flags.data.whole_passes(options)
  steps = loop.watched(
    step,
    pipeline,
    None if by_data else work.num_steps,
    position,
    steps_per_call=options.steps_per_call,
    private_threads=options.datasets_num_private_threads,
  )
  before = saving.seconds(record.get('resumed_from'))
  every, board = options.display_every, options.tensorboard_dir if part.is_chief else None
  curve = curves.Curve(done, images, before, board, every)
  saved = saving.Saving(
    step,
    pipeline,
    directory,
    stop,
    every_steps=options.save_model_steps,
    every_s=options.save_model_secs,
    keep=options.max_ckpts_to_keep or 0,
    facts=curve.time,
    record=record,
    stage=part.stage,
    keeper=None if part.is_chief else 'worker:0',
  )
  steps = saved.over(curve.over(part.stages(steps)))
  evaluating = create_evaluating(part, options, step, epoch_size, curve, record)
  if evaluating is not None:
    steps = evaluating.over(steps)
  steps = profiled(options, steps, work.num_warmup, record)
  lines = flags.lines.shown(options)
  num_timed = work.num_steps - work.num_warmup
  try:
    loop.measure(steps, work.num_warmup, num_timed, lines, record, started, part.total)
  except loop.NotFinite as error:
    raise loop.RunError(f'{error}; {saved.last_good()}') from error
  finally:
    curve.close()
  saved.finish()
  if evaluating is not None:
    evaluating.finish()
  if part.is_chief and not options.forward_only:
    note_course(options, epoch_size, curve, record)
  if options.graph_file is not None:
    profiling.write_graph(options.graph_file, step, pipeline)
    record.setdefault('files', {})['graph_file'] = options.graph_file


def plan_work(
  part: member.Alone,
  options: flags.Options,
  pipeline: hpm.pipelines.Pipeline,
  epoch_size: int | None,
  done: int,
  position: int,
  images: int,
) -> flags.steps.Plan:
  """The steps that are left, the same number for all workers that make them together.

  Args:
    part, options, pipeline, epoch_size: as for `measure`.
    done, images: of the training so far, of all workers.
    position: images that this one has taken.
  """
  if flags.cluster.num_apart(options) > 1:  # each for itself, with its share
    done, images = position // (options.batch_size * options.num_gpus), position
    if flags.data.synthetic(options):
      epoch_size = math.ceil(epoch_size / part.num_workers)
    elif options.num_epochs is not None:
      epoch_size = pipeline.epoch_size
  work = flags.steps.plan(options, epoch_size, done, images)
  if not work.num_steps:
    raise Finished(f'Nothing to do: {flags.steps.finished(options, done, images)}')
  return work


def create_pipeline(
  options: flags.Options,
  model: hpm.models.Model,
  part: member.Alone | None = None,
  validation: bool = False,
) -> hpm.pipelines.Pipeline:
  """The images that the flags ask for, of this process; or a pass over all validation images."""
  return hpm.pipelines.create(
    options.data_name,
    **{
      'image_size': model.image_size,
      'batch_size': options.batch_size,
      'num_classes': model.num_classes,
      'seed': options.tf_random_seed,
      **flags.data.pipeline_options(options, validation),
      **(part.pipeline_options(options) if part is not None else {}),
    },
  )


def create_evaluating(
  part: member.Alone,
  options: flags.Options,
  step: hpm.TrainStep | hpm.EvalStep,
  epoch_size: int | None,
  curve: curves.Curve,
  record: dict[str, Any],
) -> evaluation.Evaluating | None:
  """What evaluates the training on its way, in the chief of several workers; None without it."""
  if options.forward_only or not part.is_chief or not flags.evaluation.asked(options):
    return None
  averaged = options.weight_average_decay is not None
  evaluated = part.eval_step(step, xla=options.xla, averaged=averaged)
  images = create_pipeline(options, step.model, validation=True)

  accuracy = evaluation.accuracy(evaluated, images, options.num_eval_batches)

  def evaluate() -> dict[str, Any]:
    with part.stage('evaluation'):
      return accuracy()

  return evaluation.Evaluating(
    step,
    evaluate,
    functools.partial(flags.evaluation.due, options, epoch_size),
    curve,
    stop_at=options.stop_at_top_1_accuracy,
    directory=options.train_dir,
    record=record,
  )


def create_model(options: flags.Options) -> hpm.models.Model:
  """The model as the flags describe it."""
  layout = {} if options.data_format == 'NHWC' else {'data_format': options.data_format}
  stem = {'stem_rewrite': options.stem_rewrite} if options.stem_rewrite else {}
  dtype = hpm.precision.create(options.precision).compute_dtype
  again = {'recompute': True} if options.recompute else {}
  own = flags.model.model_options(options)
  return hpm.models.create(options.model, dtype=dtype, **layout, **stem, **again, **own)


def create_train_step(
  options: flags.Options,
  model: hpm.models.Model,
  manager: hpm.variable_mgr.VariableManager,
  epoch_size: int | None,
) -> hpm.TrainStep:
  """The training step as the flags describe it."""
  rate = flags.schedule.create(options, epoch_size, flags.steps.goal(options, epoch_size))
  optimizer = hpm.optimizers.create(
    options.optimizer, rate, **flags.optimizer.rule_options(options)
  )
  return hpm.TrainStep(
    model,
    manager,
    optimizer,
    loss_scale=flags.compute.loss_scale(options),
    seed=options.tf_random_seed,
    accumulate=options.accumulate,
    xla=options.xla,
    **flags.optimizer.step_options(options),
    **flags.lines.step_options(options),
    **flags.variables.step_options(options),
  )


def epoch_size_of(options: flags.Options, pipeline: hpm.pipelines.Pipeline) -> int | None:
  """Images a pass over the data of all workers; None where nothing asks: counting takes a while."""
  if flags.data.synthetic(options):
    return flags.data.SYNTHETIC_EPOCH
  training = not options.eval and not options.forward_only
  needed = options.num_epochs is not None or (
    training and (flags.schedule.needs_epochs(options) or flags.evaluation.needs_epochs(options))
  )
  return pipeline.epoch_size_of_all if needed else None


def profiled(
  options: flags.Options, steps: Iterator[loop.Step], num_warmup: int, record: dict[str, Any]
) -> Iterator[loop.Step]:
  """The steps, the last of the warm-up under the profiler if the flags ask for it."""
  count = flags.steps.num_profiled(options)
  if count and num_warmup < options.num_warmup_batches:
    say('Notice: the few steps that are left are not profiled')
    count = 0
  names = [name for name in flags.profile.PROFILED if getattr(options, name) is not None]
  paths = {name: getattr(options, name) for name in names}
  return profiling.profiled(steps, num_warmup - count + 1, count, paths, record)


def note_parts(
  record: dict[str, Any],
  model: hpm.models.Model,
  devices: Sequence[str],
  options: flags.Options,
  part: member.Alone,
) -> None:
  """Puts into `record` what the run is made of."""
  record['machine'] |= {
    'gpus': process.gpu_names(devices),
    'gpu_driver': machine.gpu_driver(),
    'tensorflow_build': machine.build(),
    'environment': machine.environment(),
    'onednn': machine.onednn(),
  }
  record |= {
    'model': model.name,
    'num_parameters': model.num_params,
    'devices': list(devices),
    'batch_size_per_device': options.batch_size,
    'batch_size_global': options.batch_size * len(devices) * flags.cluster.num_together(options),
  }
  if part.num_workers > 1:
    record |= {'worker': part.number, 'num_workers': part.num_workers}


def note_course(
  options: flags.Options, epoch_size: int | None, curve: curves.Curve, record: dict[str, Any]
) -> None:
  """Puts the curves into `record`, draws them, and says what the accuracy cost."""
  rate = flags.schedule.create(options, epoch_size, flags.steps.goal(options, epoch_size))
  record['curve'] = curve.values(lambda step: float(rate(step)) if callable(rate) else rate)
  if options.curve_file is not None:
    curves.draw(options.curve_file, {**record, 'flags': options.values()})
    record.setdefault('files', {})['curve_file'] = options.curve_file
  if options.usd_per_hour is not None:
    record['cost'] = cost.of_run(record, options.usd_per_hour)
    for line in cost.lines(record['cost']):
      say(line)


def note_skipped(record: dict[str, Any], pipeline: hpm.pipelines.Pipeline) -> None:
  """Puts into `record`, and says, which bad records the pipeline left out."""
  skipped = pipeline.skipped()
  if skipped:
    record['skipped_records'] = [{'what': s.what, 'times': s.times} for s in skipped]
    say(f'Skipped: {len(skipped)} bad records, the last one {skipped[-1].what}')


def note_demand(record: dict[str, Any]) -> None:
  """Puts into `record` how much input each of this process's devices takes."""
  if 'image_bytes' in record:  # an evaluation's rate is that of its input
    rate, count = record['images_per_second'], len(record['devices'])
    record['input_demand'] = demand.of(rate, count, record['image_bytes'])


def note_published(options: flags.Options, record: dict[str, Any]) -> None:
  """Puts into `record`, and says, what the run is beside the nearest published row."""
  if record['mode'] != 'training' or record.get('worker', 0):  # in a cluster the chief speaks
    return
  values = record['flags'] if options.num_runs > 1 else options.values()
  workers = record.get('num_workers', 1)
  rate = record['images_per_second' if workers == 1 else 'images_per_second_total']
  found = comparison.compare(values, len(record['devices']) * workers, rate)
  if found is not None:
    record['published'] = found
    names = dict.fromkeys(record['machine']['gpus']) or [f'{values["device"].upper()} devices']
    say(comparison.line(found, ', '.join(names)))


def begin(arguments: Sequence[str], options: flags.Options) -> dict[str, Any]:
  """What is known of a run before it starts."""
  return {
    'schema_version': results.SCHEMA_VERSION,
    'status': 'failed',  # until it has ended well
    'mode': flags.mode.title(options),
    'started_at': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': list(arguments),
    'flags_given': dict(options.given),
    'flags': options.values(),
    'machine': machine.describe(),
  }


@contextlib.contextmanager
def recorded(options: flags.Options, record: dict[str, Any]) -> Iterator[None]:
  """Writes the result file, whichever way the run ends."""
  kinds = {saving.Stopped: 'stopped', process.Terminated: 'stopped', Finished: 'finished'}
  try:
    yield
    record['status'] = 'ok'
  except BaseException as error:
    for name in results.THROUGHPUT:
      record.pop(name, None)
    known = isinstance(error, (*kinds, UsageError, DataError, loop.RunError)) and str(error)
    record['status'] = kinds.get(type(error), 'failed')
    record['reason'] = known or f'{type(error).__name__}: {error}'.removesuffix(': ')
    raise
  finally:
    if options.num_runs == 1:  # otherwise each of the runs has said so for itself
      record['flags'] = options.values()
      record['peak_rss_mib'] = machine.peak_rss_mib()
      gpus = machine.peak_gpu_mib(record.get('devices', []))
      record |= {'peak_gpu_mib': gpus} if gpus else {}
    if path := result_path(options):
      results.write(path, record)


def write_down(options: flags.Options, record: dict[str, Any], status: str, line: str) -> None:
  """The result file of a run whose main thread can't write it any more."""
  if path := result_path(options):
    known = {k: v for k, v in record.items() if k not in results.THROUGHPUT}
    results.write(path, {**known, 'status': status, 'reason': line})


def result_path(options: flags.Options) -> str | None:
  """Where the result goes: of several workers the chief's has the name that was given."""
  cluster = flags.cluster.cluster(options)
  if options.result_json is None or cluster is None or cluster.is_chief:
    return options.result_json
  path = Path(options.result_json)
  return str(path.with_stem(f'{path.stem}.{cluster.job_name}-{cluster.task_index}'))


def closing(options: flags.Options, record: dict[str, Any]) -> str:
  """The last line: the result file, and the next command to try."""
  path = result_path(options)
  file = f'Result: {path}. ' if path else ''
  if options.num_runs > 1:
    return f'{file}Next: {shlex.join(["python", "benchmarks/run.py", "--help"])}'
  if flags.cluster.cluster(options) is not None:
    return f'{file}Done'
  command = shlex.join(['python', 'benchmarks/run.py', *flags.next_command(options)])
  return f'{file}Next: {command}'


if __name__ == '__main__':
  code = main(sys.argv[1:])
  if code in (
    watching.EXIT_CODE,
    stalls.EXIT_CODE,
  ):  # TensorFlow's destructors may wait for the dead for ever
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
