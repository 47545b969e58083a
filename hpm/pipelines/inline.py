"""Maps over data sets whose functions are small: they run where the element is asked for.

`Dataset.map` hands every call of its function to TensorFlow's pool of threads. Where the function
is a dozen ops on numbers, waking a thread and being woken by it is most of the work, and on two
cores twice that of one.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ['map_inline']


def map_inline(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
  """What `dataset.map(function)` gives, computed by the thread that asks for it.

  Args:
    dataset: elements are tuples of tensors.
    function: (the components of an element) -> a tuple of tensors, without branches and loops: the
      executor of one thread knows none.
  """
  traced = tf.function(function, input_signature=dataset.element_spec, autograph=False)
  concrete = traced.get_concrete_function()
  mapped = tf.raw_ops.MapDataset(
    input_dataset=tf.data.experimental.to_variant(dataset),
    other_arguments=concrete.captured_inputs,
    f=concrete,
    output_types=[output.dtype for output in concrete.outputs],
    output_shapes=[output.shape for output in concrete.outputs],
    use_inter_op_parallelism=False,
    preserve_cardinality=True,
  )
  structure = tuple(tf.TensorSpec(output.shape, output.dtype) for output in concrete.outputs)
  result = tf.data.experimental.from_variant(mapped, structure)
  result.function = concrete  # which lives as long as what calls it
  return result
