"""Graph that is the same on every device: traced once, and called on each by one op.

  def update():                                       # of the first device's tensors
    return [tf.raw_ops.AssignVariableOp(resource=variable.handle, value=gradient)]

  shared = Shared(update, [variable.handle, gradient])
  for device, handle, gradient in ...:
    with tf.device(device):
      shared([handle, gradient])                      # the same with this device's tensors

A call costs the trace two or three milliseconds, however many ops the function has; built anew each
of them would cost a tenth of one. TensorFlow puts the ops in place of the call before the step
runs, and they stand where the call stands.

Nothing here relies on automatic control dependencies, so a function does only what its results, or
the operations that it returns, depend on.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import gc
import types
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import ops
from tensorflow.python.ops import handle_data_util

__all__ = ['NO_CONTROL_DEPENDENCIES', 'Function', 'Shared']

# For `tf.function`'s experimental_attributes.
NO_CONTROL_DEPENDENCIES = {'_disable_acd': True}

_TYPE_OF_HANDLE = attr_value_pb2.AttrValue(type=tf.resource.as_datatype_enum).SerializeToString()
_SHAPE_OF_HANDLE = attr_value_pb2.AttrValue(shape=tf.TensorShape([]).as_proto()).SerializeToString()
_XLA = '_XlaMustCompile'


class Function:
  """A traced function, for calls from any number of graphs.

  `ConcreteFunction.__call__` does the same, but binds and checks each argument anew, which takes
  five times as long where there are hundreds.

  Args:
    concrete: what to call.
  """

  def __init__(self, concrete: Any):
    self._concrete = concrete
    results = concrete.graph.outputs
    self._shapes = [t.shape for t in results]
    self._dtypes = [t.dtype for t in results]
    stateful = any(op.op_def.is_stateful for op in concrete.graph.get_operations())
    self._type = 'StatefulPartitionedCall' if stateful else 'PartitionedCall'
    self._attributes = {
      'f': attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=concrete.name)),
      'Tin': _types(t.dtype for t in concrete.inputs),
      'Tout': _types(self._dtypes),
      # Shapes are known from the trace: TensorFlow needn't infer them for each call.
      '_disable_call_shape_inference': attr_value_pb2.AttrValue(b=True),
    }
    given = concrete.function_def.attr
    if _XLA in given:
      self._attributes[_XLA] = given[_XLA]

  def __call__(self, arguments: Sequence[tf.Tensor]) -> tf.Operation:
    """The call in the current graph; its outputs are the function's results.

    Args:
      arguments: in the order of the function's inputs, captured ones last.
    """
    if tf.executing_eagerly():
      results = tf.raw_ops.StatefulPartitionedCall(
        args=arguments, Tout=self._dtypes, f=self._concrete
      )
      return types.SimpleNamespace(outputs=results)
    graph = tf.compat.v1.get_default_graph()
    self._concrete.add_to_graph(graph)
    inputs = _captured(graph, arguments)
    # That of `tf.Graph`: a function's graph would look for what it has to capture once more.
    call = ops.Graph._create_op_internal(
      graph, self._type, inputs, self._dtypes, attrs=self._attributes
    )
    for tensor, shape in zip(call.outputs, self._shapes, strict=True):
      tensor.set_shape(shape)
    return call


class Shared:
  """What one device's tensors are used for, to be done with other devices' as well.

  Args:
    build: builds it of the first device's tensors, without arguments; ops in it name no device.
      Returns a list of tensors, which are the results, or of operations, which are only run.
    arguments: the first device's tensors, handles of variables among them. What else `build` uses
      is the same for all devices.
  """

  def __init__(
    self, build: Callable[[], Sequence[tf.Tensor | tf.Operation]], arguments: Sequence[tf.Tensor]
  ):
    def body() -> list[tf.Tensor]:
      made = build()
      # What a caller's control edges wait for. Those of a call without any vanish with the call.
      tf.compat.v1.get_default_graph().control_outputs.extend(
        made_one.op if isinstance(made_one, tf.Tensor) else made_one for made_one in made
      )
      return [made_one for made_one in made if isinstance(made_one, tf.Tensor)]

    traced = tf.function(
      body, autograph=False, experimental_attributes=NO_CONTROL_DEPENDENCIES
    ).get_concrete_function()
    position = {id(tensor): i for i, tensor in enumerate(arguments)}
    self._function = Function(traced)
    self._inputs = [position.get(id(tensor), tensor) for tensor in traced.captured_inputs]

  def __call__(self, arguments: Sequence[tf.Tensor]) -> tf.Operation:
    """The same with these tensors, under the current device; see `Function.__call__`."""
    return self._function([arguments[i] if isinstance(i, int) else i for i in self._inputs])


class Calls:
  """Calls of a `tf.function`, as `function(*arguments)` makes them in a graph.

  Args:
    function: takes nests of tensors and Python values.
  """

  def __init__(self, function: Any):
    self._function = function
    self._traced: dict[Any, tuple[Function, Any]] = {}

  def __call__(self, *arguments: Any) -> Any:
    if tf.executing_eagerly():  # the function says whether it wants to be traced then
      return self._function(*arguments)
    flat = [
      value.handle if isinstance(value, tf.Variable) else value
      for value in tf.nest.flatten(arguments)
    ]
    tensors = [value for value in flat if isinstance(value, tf.Tensor)]
    key = tuple(
      (value.dtype, value.shape) if isinstance(value, tf.Tensor) else value for value in flat
    )
    if key not in self._traced:
      concrete = self._function.get_concrete_function(*arguments)
      self._traced[key] = Function(concrete), concrete.structured_outputs
    function, structure = self._traced[key]
    return tf.nest.pack_sequence_as(structure, function(tensors).outputs)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
  """No garbage is collected inside.

  Building a graph makes hundreds of thousands of objects that stay. To look through all of them
  again and again takes Python a quarter of the time.
  """
  enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if enabled:
      gc.enable()


def _captured(graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """The tensors as they are in `graph`: those from outside as arguments of the function it builds.

  Handles of eager variables, of which a step has hundreds for each device, are captured in a third
  of the time that `FuncGraph.capture` takes.
  """
  if not graph.building_function:
    return list(tensors)
  known = graph.function_captures.by_val_internal
  new = [
    tensor
    for tensor in tensors
    if tensor.dtype == tf.resource and not tf.is_symbolic_tensor(tensor) and id(tensor) not in known
  ]
  for tensor in new:
    with graph._c_graph.get() as c_graph:
      made = pywrap_tf_session.TF_NewOperation(c_graph, 'Placeholder', graph.unique_name('handle'))
      pywrap_tf_session.TF_SetAttrValueProto(made, 'dtype', _TYPE_OF_HANDLE)
      pywrap_tf_session.TF_SetAttrValueProto(made, 'shape', _SHAPE_OF_HANDLE)
      operation = ops.Operation._from_c_op(pywrap_tf_session.TF_FinishOperation(made), graph)
    (argument,) = operation.outputs
    handle_data_util.set_handle_data(argument, tensor._handle_data)
    graph.add_capture(tensor, argument)
  return [known[id(tensor)] if id(tensor) in known else graph.capture(tensor) for tensor in tensors]


def _types(dtypes: Any) -> attr_value_pb2.AttrValue:
  numbers = [dtype.as_datatype_enum for dtype in dtypes]
  return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(type=numbers))
