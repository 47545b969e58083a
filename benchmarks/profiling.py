"""Some steps under TensorFlow's profiler: a Chrome trace, a table of the costliest ops, the graph.

The profiler writes events by thread and stream, each with the name of its node, which begins with
`tower_<i>/` inside a tower. From them come spans of the steps and the towers.
"""

from __future__ import annotations  # hpm.TrainStep in a signature would import TensorFlow

from collections.abc import Iterator, Mapping
import contextlib
import glob
import itertools
import json
import os
import re
import tempfile
from typing import Any, NamedTuple

from benchmarks import files
from benchmarks.loop import Step, say
import hpm

__all__ = ['Event', 'chrome_trace', 'op_table', 'profiled', 'write_graph']

NUM_PRINTED = 20

_STEP = 'step'
_OP = re.compile(r'([^:]+):([A-Z_]\w*)')  # node:OpType
_TOWER = re.compile(r'(?:^|/)tower_(\d+)/')


class Event(NamedTuple):
  """Something that took time on one thread or stream.

  Attributes:
    name: of an op 'node:OpType'.
    place: the device or host it belongs to, such as '/host:CPU' or '/device:GPU:0'.
    row: its thread or stream there.
    start_us, duration_us: microseconds.
    arguments: what the profiler says of it.
  """

  name: str
  place: str
  row: str
  start_us: float
  duration_us: float
  arguments: Mapping[str, Any]

  @property
  def op(self) -> tuple[str, str] | None:
    """(node, op type); a GPU kernel's are those of the op that started it."""
    match = _OP.fullmatch(str(self.arguments.get('tf_op', self.name)))
    return (match[1], match[2]) if match else None


def profiled(
  steps: Iterator[Step], first: int, count: int, paths: Mapping[str, str], record: dict[str, Any]
) -> Iterator[Step]:
  """Passes steps on, `count` of them from number `first` on (from 1) under the profiler.

  Args:
    steps: from `watched`.
    first, count: whole calls of several steps.
    paths: flag -> path of what to write: trace_file, tfprof_file, profile_dir.
    record: gets them once they are written.
  """
  if not count:
    yield from steps
    return
  import tensorflow as tf

  with contextlib.ExitStack() as stack:
    directory = paths.get('profile_dir') or stack.enter_context(tempfile.TemporaryDirectory())
    running = False
    try:
      for number in itertools.count(1):
        if number == first:
          options = tf.profiler.experimental.ProfilerOptions(python_tracer_level=0)
          tf.profiler.experimental.start(directory, options)
          running = True
        if running:
          with tf.profiler.experimental.Trace(_STEP, step_num=number, _r=1):
            step = next(steps, None)
        else:
          step = next(steps, None)
        if running and (step is None or number == first + count - 1):
          tf.profiler.experimental.stop()
          running = False
          _write(_events(directory), paths)
          record['files'] = {**record.get('files', {}), **paths}
        if step is None:
          return
        yield step
    finally:
      if running:
        tf.profiler.experimental.stop(save=False)


def chrome_trace(events: list[Event]) -> dict[str, Any]:
  """The events in the format of chrome://tracing, with spans of steps and towers on top."""
  rows = [*_spans(events), *events]
  places = list(dict.fromkeys(event.place for event in rows))
  threads = list(dict.fromkeys((event.place, event.row) for event in rows))
  origin = min((event.start_us for event in rows), default=0.0)
  content: list[dict[str, Any]] = []
  for index, place in enumerate(places):
    content.append(_named('process_name', place, pid=index))
    content.append(
      {'ph': 'M', 'name': 'process_sort_index', 'pid': index, 'args': {'sort_index': index}}
    )
  for index, (place, row) in enumerate(threads):
    content.append(_named('thread_name', row, pid=places.index(place), tid=index))
  for event in rows:
    content.append(
      {
        'ph': 'X',
        'name': event.name,
        'pid': places.index(event.place),
        'tid': threads.index((event.place, event.row)),
        'ts': event.start_us - origin,
        'dur': event.duration_us,
        'args': dict(event.arguments),
      }
    )
  return {'displayTimeUnit': 'ms', 'traceEvents': content}


def op_table(events: list[Event]) -> list[str]:
  """A line an op, by the time that it took in all steps; the same op of all towers is one line.

  Times are of execution; ops that run side by side add up to more than the wall's time.
  """
  totals: dict[tuple[str, str, str], list[float]] = {}
  for event in events:
    if event.op:
      node, kind = event.op
      totals.setdefault((event.place, kind, _TOWER.sub('tower_*/', node)), []).append(
        event.duration_us / 1e3
      )
  ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
  everything = sum(sum(times) for times in totals.values()) or 1.0
  lines = [f'{"ms":>10} {"share":>6} {"count":>6}  {"place":<14} {"op":<28} node']
  for (place, kind, node), times in ranked:
    lines.append(
      f'{sum(times):>10.3f} {sum(times) / everything:>6.1%} {len(times):>6}  {place:<14} '
      f'{kind:<28} {node}'
    )
  return lines


def write_graph(
  path: str, step: hpm.TrainStep | hpm.EvalStep, pipeline: hpm.pipelines.Pipeline
) -> None:
  """The step's GraphDef with its functions; as text where the name ends in txt."""
  import tensorflow as tf

  images, labels = pipeline.dataset().element_spec[:2]
  batch = (images, tf.TensorSpec(labels.shape, tf.int64))  # as staged
  batches = [batch for _ in step.manager.devices]
  function = tf.function(lambda *batches: step.build(batches), autograph=False)
  graph = function.get_concrete_function(*batches).graph.as_graph_def()
  files.write(path, str(graph) if path.endswith('txt') else graph.SerializeToString())


def _write(events: list[Event], paths: Mapping[str, str]) -> None:
  if 'trace_file' in paths:
    files.write(paths['trace_file'], json.dumps(chrome_trace(events)))
  if 'tfprof_file' in paths:
    table = op_table(events)
    files.write(paths['tfprof_file'], '\n'.join(table) + '\n')
    say('The costliest ops of the profiled steps:')
    for line in table[: NUM_PRINTED + 1]:
      say(line)


def _events(directory: str) -> list[Event]:
  """What the newest profile in a directory holds."""
  from tensorflow.tsl.profiler.protobuf import xplane_pb2

  found = glob.glob(os.path.join(glob.escape(directory), '**', '*.xplane.pb'), recursive=True)
  space = xplane_pb2.XSpace()
  with open(max(found, key=os.path.getmtime), 'rb') as file:
    space.ParseFromString(file.read())
  events = []
  for plane in space.planes:
    for line in plane.lines:
      row = line.display_name or line.name or str(line.id)
      for event in line.events:
        start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
        name = plane.event_metadata[event.metadata_id].name
        arguments = {
          plane.stat_metadata[stat.metadata_id].name: _value(plane, stat) for stat in event.stats
        }
        events.append(Event(name, plane.name, row, start, event.duration_ps / 1e6, arguments))
  return events


def _spans(events: list[Event]) -> list[Event]:
  """One span a step, and one for each tower within it: from its first op to the end of its last."""
  spans = []
  starts = [event for event in events if event.name == _STEP and 'step_num' in event.arguments]
  for step in sorted(starts, key=lambda event: event.start_us):
    number = step.arguments['step_num']
    spans.append(step._replace(name=f'step {number}', place='steps and towers', row='steps'))
    towers: dict[int, list[Event]] = {}
    for event in events:
      match = _TOWER.search(event.op[0]) if event.op else None
      if match and 0 <= event.start_us - step.start_us < step.duration_us:
        towers.setdefault(int(match[1]), []).append(event)
    for index, ops in sorted(towers.items()):
      begin = min(event.start_us for event in ops)
      end = max(event.start_us + event.duration_us for event in ops)
      spans.append(
        Event(
          f'tower_{index}',
          'steps and towers',
          f'tower_{index}',
          begin,
          end - begin,
          {'step': number, 'ops': len(ops)},
        )
      )
  return spans


def _value(plane: Any, stat: Any) -> Any:
  kind = stat.WhichOneof('value')
  if kind == 'ref_value':
    return plane.stat_metadata[stat.ref_value].name
  value = getattr(stat, kind) if kind else None
  return value.hex() if isinstance(value, bytes) else value


def _named(kind: str, name: str, **ids: int) -> dict[str, Any]:
  return {'ph': 'M', 'name': kind, 'args': {'name': name}, **ids}
