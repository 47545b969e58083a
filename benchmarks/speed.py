"""Images per second, its spread, and the lines that say so."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
import statistics

__all__ = ['RULE', 'Speed', 'blocks', 'drift', 'interval', 'percentiles', 'summary', 't95', 'title']

RULE = '-' * 64
PERCENTILES = (5, 25, 50, 75, 95, 99)

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom.
_T95 = (
  *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
  *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
  *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclasses.dataclass
class Speed:
  """The timed steps of a run.

  Attributes:
    ewma: weight of a new step in the lines' mean; None weighs all steps alike.
    seconds: time of each step.
    images: images of each step, on all devices.
  """

  ewma: float | None = None
  seconds: list[float] = dataclasses.field(default_factory=list)
  images: list[int] = dataclasses.field(default_factory=list)
  _weighted: float | None = None  # seconds an image

  def add(self, seconds: float, images: int) -> None:
    self.seconds.append(seconds)
    self.images.append(images)
    if self.ewma is not None and images:
      now = seconds / images
      before = now if self._weighted is None else self._weighted
      self._weighted = self.ewma * now + (1.0 - self.ewma) * before

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

  def line(self, step: int, loss: float, accuracies: Sequence[float] = ()) -> str:
    """The step line, as tf_cnn_benchmarks prints it: 9 words, 11 with two accuracies."""
    speed = self.mean if self._weighted is None else 1.0 / self._weighted
    return '\t'.join(
      [
        f'{step}',
        f'images/sec: {speed:.1f} +/- {self.standard_error:.1f} (jitter = {self.jitter:.1f})',
        *(f'{value:.3f}' for value in (loss, *accuracies)),
      ]
    )


def title(loss: str, accuracies: bool) -> str:
  """The line above the step lines."""
  columns = ['Step', 'Img/sec', loss]
  return '\t'.join([*columns, 'top_1_accuracy', 'top_5_accuracy'] if accuracies else columns)


def summary(images_per_second: float) -> str:
  """The three lines that end a run."""
  return f'{RULE}\ntotal images/sec: {images_per_second:.2f}\n{RULE}'


def interval(seconds: Sequence[float], images: float) -> list[float] | None:
  """95 % confidence interval of `images` over the mean of `seconds`; None if there is none.

  There is none for a single value, nor for a few that are so far apart that the mean time's
  interval reaches down to nought, where the rate has no upper end.

  Student's t on the mean time, turned into a rate. It takes the times for independent: those of
  runs in processes of their own are, and of `blocks` of steps nearly; single steps are not.
  """
  if len(seconds) < 2:
    return None
  mean = statistics.fmean(seconds)
  freedom = len(seconds) - 1
  half = t95(freedom) * statistics.stdev(seconds) / math.sqrt(len(seconds))
  return [images / (mean + half), images / (mean - half)] if half < mean else None


def t95(freedom: float) -> float:
  """Student's t, two-sided 95 %; between whole degrees of freedom (1 and more) linear."""
  if freedom > len(_T95):
    return 1.960 + 2.4 / freedom
  low, high = math.floor(max(freedom, 1.0)), math.ceil(max(freedom, 1.0))
  return _T95[low - 1] + (max(freedom, 1.0) - low) * (_T95[high - 1] - _T95[low - 1])


def blocks(seconds: Sequence[float], images: Sequence[int], count: int = 10) -> list[float]:
  """Seconds an image of so many parts of the steps, one after the other.

  A step is like the one before it, so a step more tells less than a new one; means of parts that
  are longer than such likeness lasts are nearly independent (batch means, Law and Kelton). Fewer
  steps than parts stay steps.
  """
  count = min(count, len(seconds))
  bounds = [round(i * len(seconds) / count) for i in range(count + 1)]
  return [
    sum(seconds[low:high]) / sum(images[low:high]) for low, high in itertools.pairwise(bounds)
  ]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
  """'p5' to 'p99', linear between neighbours."""
  ordered = sorted(seconds)
  values = {}
  for percent in PERCENTILES:
    position = percent / 100 * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    values[f'p{percent}'] = ordered[low] + (position - low) * (ordered[high] - ordered[low])
  return values


def drift(seconds: Sequence[float]) -> float | None:
  """How much longer the steps of the last third take than those of the first, as a share.

  Medians, so that a few slow steps are no drift. None where steps are too few, or the difference
  lies within what their scatter allows (three standard errors of a median).
  """
  third = len(seconds) // 3
  if third < 5:
    return None
  first, last = seconds[:third], seconds[-third:]
  difference = statistics.median(last) - statistics.median(first)
  spread = 1.4826 * max(_deviation(first), _deviation(last))
  if abs(difference) <= 3 * 1.2533 * spread * math.sqrt(2 / third):
    return None
  return difference / statistics.median(first)


def _deviation(values: Sequence[float]) -> float:
  middle = statistics.median(values)
  return statistics.median(abs(value - middle) for value in values)
