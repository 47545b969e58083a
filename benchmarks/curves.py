"""The course of a training: loss, rate, accuracy and speed against steps, time and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import importlib.util
import time
from typing import Any

from benchmarks.loop import Step
from hpm.errors import UsageError

__all__ = ['Curve', 'draw', 'require_charts']

_MOST = 1000  # points that a result keeps; beyond, neighbours are joined


class Curve:
  """Watches the steps of a run.

  Args:
    done: steps of earlier runs.
    images: of those.
    seconds: that those took.
    tensorboard_dir: also gets scalars while the training goes on.
    every: scalars every so many steps.
  """

  def __init__(
    self,
    done: int = 0,
    images: int = 0,
    seconds: float = 0.0,
    tensorboard_dir: str | None = None,
    every: int = 10,
  ):
    self._step, self._images = done, images
    self._before = seconds
    self._training = 0.0
    self._begun: float | None = None
    self._every = every
    self._merged = 1  # steps in a full point
    # Of each point: last step, images and seconds at its end, sums of its losses and step times.
    self._points: list[list[float]] = []
    self._open = 0
    self._evaluations: list[Mapping[str, Any]] = []
    self._directory, self._writer = tensorboard_dir, None

  def over(self, steps: Iterator[Step]) -> Iterator[Step]:
    """Passes steps on, and keeps what they say."""
    for step in steps:
      now = time.perf_counter()
      if self._begun is None:
        self._begun = now - step.seconds
      self._step += 1
      self._images += _images(step)
      self._training += step.seconds
      self._add(step, self._before + now - self._begun)
      if self._step % self._every == 0:
        rate = _images(step) / step.seconds if step.seconds else 0.0
        self._scalars({'loss': step.loss, 'images_per_second': rate})
      yield step

  def time(self) -> dict[str, float]:
    """Seconds of the training so far, evaluations included; over all runs of it."""
    now = 0.0 if self._begun is None else time.perf_counter() - self._begun
    return {'seconds': self._before + now}

  def evaluated(self, point: Mapping[str, Any]) -> None:
    """Notes an evaluation of the current step."""
    self._evaluations.append(point)
    self._scalars({'top_1': point['top_1'], 'top_5': point['top_5']})

  def values(self, rate: Callable[[int], float]) -> dict[str, list[float]]:
    """Columns of equal length, a row a point.

    Args:
      rate: from the number of finished steps to the learning rate of the next.
    """
    columns: dict[str, list[float]] = {
      name: []
      for name in ('step', 'images', 'seconds', 'loss', 'learning_rate', 'images_per_second')
    }
    for step, images, seconds, losses, count, spent, own in self._points:
      row = (int(step), int(images), seconds, losses / count, rate(int(step) - 1), own / spent)
      for name, value in zip(columns, row, strict=True):
        columns[name].append(value)
    return columns

  def close(self) -> None:
    """Everything that was meant for TensorBoard is on disk."""
    if self._writer is not None:
      self._writer.close()

  def _add(self, step: Step, seconds: float) -> None:
    if self._open and self._open < self._merged:
      point = self._points[-1]
      self._open += 1
    else:
      point = [0.0] * 7
      self._points.append(point)
      self._open = 1
    point[:3] = [self._step, self._images, seconds]
    for i, value in enumerate((step.loss, 1.0, step.seconds, _images(step)), 3):
      point[i] += value
    if len(self._points) == _MOST and self._open == self._merged:
      pairs = zip(self._points[::2], self._points[1::2], strict=True)
      self._points = [[*b[:3], *(x + y for x, y in zip(a[3:], b[3:]))] for a, b in pairs]
      self._merged *= 2
      self._open = self._merged

  def _scalars(self, values: Mapping[str, float]) -> None:
    if self._directory is None:
      return
    import tensorflow as tf

    if self._writer is None:
      self._writer = tf.summary.create_file_writer(self._directory)
    # What tf.summary.scalar writes, which would need TensorBoard itself to be installed.
    metadata = tf.compat.v1.SummaryMetadata(
      plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name='scalars'), data_class=1
    )
    with self._writer.as_default(step=self._step), tf.device('/CPU:0'):
      for name, value in values.items():
        tf.summary.write(name, tf.constant(value, tf.float32), metadata=metadata)


def _images(step: Step) -> int:
  """Of a step, those of all workers that make it together."""
  return int(getattr(step.metrics, 'num_samples', step.images))


def require_charts() -> None:
  """UsageError unless matplotlib is installed."""
  if importlib.util.find_spec('matplotlib') is None:
    raise UsageError("charts need matplotlib: pip install 'hpm[report]'")


def draw(path: str, record: Mapping[str, Any]) -> None:
  """Draws the curves of a result: four rows, against steps, seconds and images.

  Args:
    path: of the PNG.
    record: the result, with `curve`, and `evaluations` if there were any.
  """
  require_charts()
  import matplotlib
  from matplotlib import figure

  with matplotlib.rc_context({'font.size': 8}):
    curve, evaluations = record['curve'], record.get('evaluations', [])
    rows = ['loss', 'learning_rate', 'images_per_second']
    rows += ['top_1'] if evaluations else []
    chart = figure.Figure(figsize=(9, 2 * len(rows)), layout='constrained')
    axes = chart.subplots(len(rows), 3, sharex='col', sharey='row', squeeze=False)
    for row, name in enumerate(rows):
      for column, against in enumerate(('step', 'seconds', 'images')):
        ax = axes[row][column]
        if name == 'top_1':
          ax.plot([e[against] for e in evaluations], [e[name] for e in evaluations], '.-')
        else:
          ax.plot(curve[against], curve[name], linewidth=0.8)
        if column == 0:
          ax.set_ylabel(name.replace('_', ' '))
        if row == len(rows) - 1:
          ax.set_xlabel(against)
    chart.suptitle(f'{record["model"]}, {record["flags"]["variable_update"]}')
    chart.savefig(path, format='png', dpi=120)
