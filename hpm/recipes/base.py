"""What a recipe says: everything that decides what accuracy a training ends at."""

from collections.abc import Mapping
import dataclasses

from hpm.errors import UsageError

__all__ = ['DECAYS', 'Recipe']

DECAYS = ('steps', 'exponential', 'linear', 'cosine')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A published training, as data.

  Attributes:
    model: a name of `hpm.models`.
    data: a name of `hpm.pipelines`.
    global_batch: images behind an update.
    epochs: passes over the training data.
    rate: learning rate at a batch of `rate_batch`; it follows the batch in proportion.
    rate_batch: images.
    decay: of `DECAYS`. 'steps': times `decay_factor` at each of `decay_epochs`; 'exponential':
      times `decay_factor` every `decay_epochs[0]` epochs; 'linear' and 'cosine': to nought at the
      end.
    decay_epochs, decay_factor: see `decay`.
    warmup_epochs: of a linear ramp in front.
    optimizer: a name of `hpm.optimizers`.
    constants: of the update rule, by the names of its fields.
    weight_decay: on the kernels of convolutions and dense layers.
    label_smoothing: see `hpm.losses`.
    clip_value: bound on each element of the gradient.
    average_decay: of the moving average of the weights that is evaluated.
    precision: a name of `hpm.precision`.
    image_size: pixels; or a size for each epoch from which on it holds; None: the model's own.
    num_classes: None: the model's own.
    distort_colors: whether training changes brightness, saturation, hue and contrast.
    zero_init: whether the last scale of each residual block starts at nought.
    top_1: validation accuracy of one crop, per cent, as `source` states it.
    top_1_epoch: when it was reached; None at the end.
    source: where it is published.
    departures: what is otherwise here than there, so that another accuracy may come out.
  """

  model: str
  data: str
  global_batch: int
  epochs: int
  rate: float
  decay: str
  top_1: float
  source: str
  rate_batch: int = 256
  decay_epochs: tuple[float, ...] = ()
  decay_factor: float = 0.1
  warmup_epochs: float = 0.0
  optimizer: str = 'momentum'
  constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
  weight_decay: float = 1e-4
  label_smoothing: float = 0.0
  clip_value: float | None = None
  average_decay: float | None = None
  precision: str = 'fp32'
  image_size: int | Mapping[int, int] | None = None
  num_classes: int | None = None
  distort_colors: bool = False
  zero_init: bool = False
  top_1_epoch: int | None = None
  departures: str = ''

  def __post_init__(self):
    if self.decay not in DECAYS:
      raise UsageError(f'decay {self.decay!r}: use {", ".join(DECAYS)}')
    if bool(self.decay_epochs) != (self.decay in ('steps', 'exponential')):
      raise UsageError(f'decay {self.decay!r} with decay_epochs {self.decay_epochs}')
