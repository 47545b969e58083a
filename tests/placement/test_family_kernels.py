"""Every op of every model's step has a GPU kernel for its types, in each precision and layout.

test_kernels looks into the same question for what steps and managers add; here it is the networks.
One of each kind in one combination runs by default, all of them in the long run.
"""

import itertools

import pytest

import hpm
from hpm import placement
from tests.placement import steps

# Each kind of block and op, with a precision and a layout apiece.
_SAMPLE = {
  ('resnet50', 'fp32', 'NHWC'),
  ('inception3', 'fp16', 'NCHW'),
  ('vgg11_bn', 'bf16', 'NHWC'),
  ('resnet18', 'bf16', 'NCHW'),
  ('resnet20_v2', 'fp16', 'NHWC'),
  ('mobilenet_v2', 'fp16', 'NHWC'),
  ('mobilenet_v2', 'bf16', 'NCHW'),
}


def _cases():
  for case in itertools.product(hpm.models.MODELS, ('fp32', 'fp16', 'bf16'), ('NHWC', 'NCHW')):
    yield pytest.param(*case, marks=[] if case in _SAMPLE else pytest.mark.long)


def _problems(name, precision, data_format, **options):
  policy = hpm.precision.create(precision)
  model = hpm.models.create(name, dtype=policy.compute_dtype, data_format=data_format, **options)
  built = steps.build(
    model,
    steps.create_manager('replicated_spread', 1),
    hpm.optimizers.create('sgd', 0.1),
    loss_scale=policy.loss_scale,
  )
  graph, metrics = steps.build_eval(model, steps.create_manager('replicated_spread', 1))
  copied = placement.host_copies(built.graph, built.metrics)
  return [
    *placement.check(built.graph),
    *placement.check(graph, metrics),
    *(f'{copy.tensor} makes the host wait' for copy in copied if copy.to_host),
  ]


@pytest.mark.parametrize(('name', 'precision', 'data_format'), list(_cases()))
def test_models_have_gpu_kernels(name, precision, data_format):
  assert _problems(name, precision, data_format) == []


@pytest.mark.parametrize('precision', ['fp16', pytest.param('fp32', marks=pytest.mark.long)])
def test_recomputation_and_biased_variance_have_gpu_kernels(precision):
  options = {'variant': 'keras', 'recompute': True, 'zero_init': True}
  assert _problems('resnet18', precision, 'NHWC', **options) == []


@pytest.mark.parametrize('rewrite', hpm.models.STEM_REWRITES)
@pytest.mark.parametrize(
  ('precision', 'data_format'),
  [
    ('fp16', 'NCHW'),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in (('fp32', 'NHWC'), ('fp32', 'NCHW'), ('fp16', 'NHWC'), ('bf16', 'NHWC'))
    ),
  ],
)
def test_rewritten_stems_have_gpu_kernels(rewrite, precision, data_format):
  assert _problems('resnet18', precision, data_format, stem_rewrite=rewrite) == []
