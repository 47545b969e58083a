"""Images per second, its spread, and the lines that say so."""

from collections.abc import Sequence
import dataclasses
import statistics

__all__ = ['RULE', 'TITLE', 'Speed', 'summary']

RULE = '-' * 64
TITLE = 'Step\tImg/sec\ttotal_loss'  # above the step lines


@dataclasses.dataclass
class Speed:
  """The timed steps of a run.

  Attributes:
    seconds: time of each step.
    images: images of each step, on all devices.
  """

  seconds: list[float] = dataclasses.field(default_factory=list)
  images: list[int] = dataclasses.field(default_factory=list)

  def add(self, seconds: float, images: int) -> None:
    self.seconds.append(seconds)
    self.images.append(images)

  @property
  def per_step(self) -> Sequence[float]:
    """Images per second of each step."""
    return [n / s for n, s in zip(self.images, self.seconds, strict=True)]

  @property
  def mean(self) -> float:
    """Images over seconds of all steps: for equal batches, the batch over the mean time."""
    return sum(self.images) / sum(self.seconds)

  @property
  def median(self) -> float:
    """Images per second of the middle step."""
    return statistics.median(self.per_step)

  @property
  def standard_error(self) -> float:
    """Standard deviation of the steps' speeds over the root of their number."""
    return statistics.pstdev(self.per_step) / len(self.seconds) ** 0.5

  @property
  def jitter(self) -> float:
    """1.4826 times the median absolute deviation: of normal noise, the standard deviation."""
    middle = self.median
    return 1.4826 * statistics.median(abs(speed - middle) for speed in self.per_step)

  def line(self, step: int, loss: float) -> str:
    """The step line, as tf_cnn_benchmarks prints it: 9 words."""
    return (
      f'{step}\timages/sec: {self.mean:.1f} +/- {self.standard_error:.1f} '
      f'(jitter = {self.jitter:.1f})\t{loss:.3f}'
    )


def summary(images_per_second: float) -> str:
  """The three lines that end a run."""
  return f'{RULE}\ntotal images/sec: {images_per_second:.2f}\n{RULE}'
