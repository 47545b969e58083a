"""What models of torchvision and timm compute, written to files: run by test_torch_parity in a
process of its own, since torchvision and TensorFlow crash in one.

  python torch_reference.py MODEL IMAGE_SIZE OPTIONS_JSON DIRECTORY

MODEL is torchvision's, or with `timm:` in front timm's. DIRECTORY then has `weights.pth`,
`weights.safetensors`, `images.npz` (images, and the weights of the logits in what is
differentiated) and, for training and inference, with ReLUs and with smooth functions in their
place, `{training|inference}_{relu|smooth}.npz`: logits, gradient, and the state dict afterwards
under `state/`.
"""

import importlib
import json
from pathlib import Path
import sys

import numpy as np
import safetensors.torch
import torch
import torchvision

BATCH = 4
NUM_CLASSES = 10


def main(name: str, image_size: int, options: dict, directory: Path) -> None:
  torch.manual_seed(1)
  model = create(name, num_classes=NUM_CLASSES, **options)
  redraw(model, torch.randn(8, 3, image_size, image_size))
  start = {key: value.clone() for key, value in model.state_dict().items()}
  torch.save(start, directory / 'weights.pth')
  safetensors.torch.save_file(start, directory / 'weights.safetensors')
  images = torch.randn(BATCH, 3, image_size, image_size)
  weights = torch.randn(BATCH, NUM_CLASSES)
  np.savez(directory / 'images.npz', images=last(images), weights=weights.numpy())
  for activation in ('relu', 'smooth'):
    if activation == 'smooth':
      make_smooth()
    for mode in ('training', 'inference'):
      model.load_state_dict(start)
      model.train(mode == 'training')
      pixels = images.clone().requires_grad_()
      logits = model(pixels)
      (logits * weights).sum().backward()
      state = {f'state/{key}': value.numpy() for key, value in model.state_dict().items()}
      np.savez(
        directory / f'{mode}_{activation}.npz',
        logits=logits.detach().numpy(),
        gradient=last(pixels.grad),
        **state,
      )


def create(name: str, **options) -> torch.nn.Module:
  library, _, rest = name.rpartition(':')
  if library == 'timm':  # in no lock file: whoever has it has these cases
    return importlib.import_module('timm').create_model(rest, pretrained=False, **options)
  return getattr(torchvision.models, rest)(weights=None, **options)


def last(images: torch.Tensor) -> np.ndarray:
  """Channels last."""
  return images.numpy().transpose(0, 2, 3, 1)


def redraw(model: torch.nn.Module, images: torch.Tensor) -> None:
  """Draws what starts as zeros and ones; moving averages become those of the images."""
  momenta = {}
  for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
      module.p = 0.0
    if isinstance(module, torch.nn.BatchNorm2d):
      torch.nn.init.uniform_(module.weight, 0.5, 1.5)
      momenta[module] = module.momentum
      module.momentum = 1.0  # the share of the batch, in torch
    if isinstance(getattr(module, 'bias', None), torch.nn.Parameter):
      torch.nn.init.normal_(module.bias, 0.0, 0.1)
  with torch.no_grad():
    model.train()(images)
  for module, momentum in momenta.items():
    module.momentum = momentum


def make_smooth() -> None:
  """No kinks: softplus for ReLUs, averages for the maxima of pools.

  A stem's pool has zeros around it, which count, as where ours pads first.
  """
  softplus = torch.nn.functional.softplus

  def pool(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, **options):
    zeros_count = bool(padding) and stride != 1
    return torch.nn.functional.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, zeros_count)

  torch.nn.functional.max_pool2d = pool
  torch.nn.functional.relu = lambda x, inplace=False: softplus(x)
  torch.nn.ReLU6.forward = lambda self, x: softplus(x)
  torch.nn.ReLU.forward = lambda self, x: softplus(x)


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
