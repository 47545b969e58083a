"""What each model is, in numbers: `describe` counts, `table` reads what was counted.

Counting builds the network's graph, which takes a second for the deepest. The table is therefore
written down in `hpm.models.figures`, and a test holds it against `describe`; a registered model
without a line there is counted.
"""

import dataclasses
from typing import TYPE_CHECKING

from hpm import models
from hpm.models.figures import FIGURES

if TYPE_CHECKING:
  from hpm.models.builder import Model

__all__ = ['Description', 'describe', 'table']


@dataclasses.dataclass(frozen=True)
class Description:
  """A model with its default options.

  Attributes:
    name: as in the registry.
    num_params: trainable values; moving averages don't count.
    num_macs: multiply-adds of convolutions and dense layers in one image's forward pass.
    image_size: pixels, height and width.
    batch_size: a usual number of samples a device.
    source: paper or library.
  """

  name: str
  num_params: int
  num_macs: int
  image_size: int
  batch_size: int
  source: str

  @property
  def num_flops(self) -> int:
    """Of one image's forward pass: two for each multiply-add (training takes about three times)."""
    return 2 * self.num_macs


def describe(model: 'str | Model') -> Description:
  """Counts a model's parameters and multiply-adds.

  Args:
    model: a name of the registry, or a model with any options.
  """
  if isinstance(model, str):
    model = models.create(model)
  return Description(
    model.name,
    model.num_params,
    model.num_macs,
    model.image_size,
    model.batch_size,
    model.source,
  )


def table() -> list[Description]:
  """Every model of the registry, in its order. Doesn't import TensorFlow."""
  return [
    Description(name, *FIGURES[name]) if name in FIGURES else describe(name)
    for name in models.MODELS
  ]
