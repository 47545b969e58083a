"""Arithmetic of a network, counted from its graph.

The convention: one multiply-add (MAC) is one multiplication and the addition that follows it, and
counts as two FLOPs. Counted are convolutions and dense layers in the forward pass of one image;
biases, batch norm, activations and pooling, together about one per cent in ResNet-50, are not.
Papers differ: He et al. 2015 call multiply-adds FLOPs ("3.8 billion" for ResNet-50).
"""

import math

import tensorflow as tf

__all__ = ['count_macs']


def count_macs(logits: tf.Tensor) -> int:
  """Multiply-adds for one image of everything that `logits` depends on.

  Args:
    logits: [None, ...] in a graph whose images have the shape [None, H, W, C] or [None, C, H, W].

  Returns:
    a number; heads that the logits don't depend on (auxiliary ones) are left out.
  """
  seen = {logits.op}
  pending = [logits.op]
  macs = 0
  while pending:
    op = pending.pop()
    macs += _op_macs(op)
    for tensor in op.inputs:
      if tensor.op not in seen:
        seen.add(tensor.op)
        pending.append(tensor.op)
  return macs


def _op_macs(op: tf.Operation) -> int:
  if op.type in ('Conv2D', 'DepthwiseConv2dNative'):
    height, width, channels, _ = op.inputs[1].shape
    out = math.prod(op.outputs[0].shape[1:])
    # A Conv2D with groups has kernels that are as much narrower.
    return out * height * width * (channels if op.type == 'Conv2D' else 1)
  if op.type == 'MatMul':
    return math.prod(op.inputs[1].shape)
  return 0
