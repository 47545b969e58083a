"""Where a step's ops stand and what moves between devices, read from the graph alone.

Nothing runs, and no device need be there: a step for eight GPUs is built in a `tf.Graph` on a
machine without one, and the graph then says what would happen.

  with tf.Graph().as_default() as graph:
    step = hpm.TrainStep(model, manager, optimizer)       # manager over '/GPU:0' .. '/GPU:7'
    metrics = step.build(batches)                         # placeholders, each on its device
  assert placement.check(graph, metrics) == []
  moved = sum(copy.bytes for copy in placement.copies(graph, metrics) if not copy.on_host)

No formula of a manager is in here: what is counted are the edges of the graph. Every function takes
the graph and, if only what runs for certain fetches is meant (not, say, the initialisers), those
fetches. A `tf.Graph` is needed: in the graph of a `tf.function` variables carry no device.
"""

from collections.abc import Iterable, Iterator, Mapping
import functools
import math
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

from hpm.errors import UsageError

__all__ = [
  'Access',
  'Call',
  'Collective',
  'Copy',
  'Edge',
  'ForeignOp',
  'HostCopy',
  'Kernel',
  'accesses',
  'calls',
  'check',
  'check_kernels',
  'collectives',
  'colocated_ops',
  'control_edges',
  'copies',
  'device_of',
  'foreign_ops',
  'host_copies',
  'kernels_of',
  'ops_of',
  'resource_edges',
  'undevised_ops',
]

Fetches = Any  # a nest of tensors and operations


class Edge(NamedTuple):
  """Something that one device hands to another.

  Attributes:
    source_name: of the tensor, or of the op that a control edge leaves.
    source, destination: device strings.
  """

  source_name: str
  source: str
  destination: str


class Copy(NamedTuple):
  """A tensor that one device sends to another, once for all its consumers there.

  Attributes:
    tensor: its name.
    source, destination: device strings.
    bytes: from its static shape; None where that isn't known.
    on_host: it lies in host memory at both ends (int32 arguments of calls, shapes), so that
      nothing crosses the bus.
  """

  tensor: str
  source: str
  destination: str
  bytes: int | None
  on_host: bool


class HostCopy(NamedTuple):
  """A tensor that a device's ops make in one memory and want in the other, device's or host's.

  Such a copy stands between ops of one device, so no edge between devices shows it. Towards the
  host it makes the host wait for the device.

  Attributes:
    tensor: its name; in a function 'function/name'.
    device: where both ops stand.
    to_host: from device to host memory; the other way otherwise.
    consumer: an op that wants it there.
  """

  tensor: str
  device: str
  to_host: bool
  consumer: str


class Call(NamedTuple):
  """An op that calls a function.

  Attributes:
    name: of the op.
    function: what it calls.
    device: where it stands.
  """

  name: str
  function: str
  device: str


class Access(NamedTuple):
  """An op that takes a variable's handle: reads it, or changes it.

  Attributes:
    type: of the op.
    variable: name of the op that holds the variable.
    device: where the op stands; where its call does, inside of a function.
    outer: name of the op in the graph itself: of the outermost call, inside of functions.
  """

  type: str
  variable: str
  device: str
  outer: str


class ForeignOp(NamedTuple):
  """An op inside a function that carries a device other than its caller's.

  Attributes:
    name: of the op.
    function: that it stands in.
    device: its own.
    caller_device: of the call.
  """

  name: str
  function: str
  device: str
  caller_device: str


class Collective(NamedTuple):
  """One device's part in a collective: it moves bytes, but over no edge of the graph.

  Attributes:
    name, device: of the op.
    instance: key that the parts of one collective share.
    bytes: size of the tensor; None where its shape isn't static.
    size: how many parts there are, those of other processes included; None where it isn't said.
  """

  name: str
  device: str
  instance: Any
  bytes: int | None
  size: int | None = None


class Kernel(NamedTuple):
  """What TensorFlow has registered for one op on one kind of device.

  Attributes:
    device_type: 'GPU', or 'DEFAULT' (any accelerator's).
    types: attribute -> the types that it may take.
    host_arguments: inputs and outputs that lie in host memory.
    label, priority: as registered.
  """

  device_type: str
  types: Mapping[str, frozenset[int]]
  host_arguments: frozenset[str]
  label: str
  priority: int


def device_of(op: tf.Operation) -> str:
  """The op's device in canonical form, '/device:GPU:3'; '' unless kind and number are explicit."""
  return _explicit(op.device)


def ops_of(graph: tf.Graph, fetches: Fetches = None) -> list[tf.Operation]:
  """The ops that run when `fetches` are fetched, all without any; in the graph's order."""
  operations = graph.get_operations()
  if fetches is None:
    return operations
  flat = [value for value in tf.nest.flatten(fetches) if value is not None]
  pending = [value if isinstance(value, tf.Operation) else value.op for value in flat]
  seen = set(pending)
  while pending:
    op = pending.pop()
    for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
      if before not in seen:
        seen.add(before)
        pending.append(before)
  return [op for op in operations if op in seen]


def undevised_ops(graph: tf.Graph, fetches: Fetches = None) -> list[tf.Operation]:
  """Ops whose device is left to the runtime.

  Ops inside functions stand where their call stands and don't count; nor do the arguments of the
  function whose graph this is.
  """
  arguments = {id(tensor.op) for tensor in getattr(graph, 'inputs', ())}
  return [op for op in ops_of(graph, fetches) if not device_of(op) and id(op) not in arguments]


def colocated_ops(graph: tf.Graph, fetches: Fetches = None) -> list[tf.Operation]:
  """Ops tied to another op's device, whatever their own says."""
  return [
    op
    for op in ops_of(graph, fetches)
    if any(c.startswith(b'loc:@') and c != f'loc:@{op.name}'.encode() for c in _classes(op))
  ]


def copies(graph: tf.Graph, fetches: Fetches = None) -> list[Copy]:
  """Every copy between devices: one per (tensor, destination), however many consumers it has there.

  Edges of ops without a device aren't counted (see `undevised_ops`), nor those of resources (see
  `resource_edges`); inside a function there are none as long as `foreign_ops` is empty.
  """
  found: dict[tuple[Any, str], list[bool]] = {}
  for op in ops_of(graph, fetches):
    destination = device_of(op)
    for index, tensor in enumerate(op.inputs):
      source = device_of(tensor.op)
      if source and destination and source != destination and not _is_handle(tensor):
        on_host = _on_host(tensor.op, 1, tensor.value_index) and _on_host(op, 0, index)
        found.setdefault((tensor.ref(), destination), []).append(on_host)
  return [
    Copy(
      ref.deref().name,
      device_of(ref.deref().op),
      destination,
      _bytes(ref.deref()),
      all(on_host),
    )
    for (ref, destination), on_host in found.items()
  ]


def resource_edges(graph: tf.Graph, fetches: Fetches = None) -> list[Edge]:
  """Handles of variables and the like that reach an op on another device: always a fault."""
  edges = {
    Edge(tensor.name, device_of(tensor.op), device_of(op)): None
    for op in ops_of(graph, fetches)
    for tensor in op.inputs
    if _is_handle(tensor)
  }
  return [edge for edge in edges if edge.source != edge.destination]


def control_edges(graph: tf.Graph, fetches: Fetches = None) -> list[Edge]:
  """Control edges between devices, one per (op, destination): each is a message without bytes."""
  edges = {
    Edge(before.name, device_of(before), device_of(op)): None
    for op in ops_of(graph, fetches)
    for before in op.control_inputs
  }
  return [edge for edge in edges if edge.source != edge.destination]


def collectives(graph: tf.Graph, fetches: Fetches = None) -> list[Collective]:
  """Every device's part in every collective reduction."""
  found = []
  for op in ops_of(graph, fetches):
    size = None
    if op.type in ('CollectiveReduceV2', 'CollectiveReduceV3'):
      names = [name for name, _ in _arguments(op.op_def.input_arg, op.node_def.attr)]
      instance = _number(op, names, 'instance_key')
      size = _number(op, names, 'group_size')
    elif op.type in ('CollectiveReduce', 'NcclAllReduce'):
      attr = 'instance_key' if op.type == 'CollectiveReduce' else 'shared_name'
      instance = op.get_attr(attr)
    else:
      continue
    found.append(Collective(op.name, device_of(op), instance, _bytes(op.inputs[0]), size))
  return found


def calls(graph: tf.Graph, fetches: Fetches = None) -> list[Call]:
  """Every op that calls functions, one entry for each function that it calls."""
  functions = _functions(graph.as_graph_def())
  return [
    Call(op.name, function, device_of(op))
    for op in ops_of(graph, fetches)
    for function in _called(op.node_def, functions)
  ]


def accesses(graph: tf.Graph, fetches: Fetches = None) -> list[Access]:
  """Every op that reads or changes a variable; inside functions once for each of their calls."""
  graph_def = graph.as_graph_def()
  functions = _functions(graph_def)
  wanted = {op.name for op in ops_of(graph, fetches)}
  nodes = [node for node in graph_def.node if node.name in wanted]
  variables = {node.name: node.name for node in nodes if node.op == 'VarHandleOp'}
  return list(_accesses(nodes, variables, '', '', functions))


def _accesses(
  nodes: Iterable[Any],
  variables: Mapping[str, str],
  device: str,
  outer: str,
  functions: Mapping[str, Any],
) -> Iterator[Access]:
  """Of one body; `variables` says which of its nodes hold which."""
  for node in nodes:
    taken = [variables.get(_split(reference)[0]) for reference in _data_inputs(node)]
    if not any(taken):
      continue
    place = _merge(device, node.device)
    called = _called(node, functions)
    for name in called:
      function = functions[name]
      arguments = [argument.name for argument in function.signature.input_arg]
      of_arguments = taken[len(taken) - len(arguments) :]  # a condition comes first
      inner = {a: v for a, v in zip(arguments, of_arguments, strict=True) if v}
      yield from _accesses(function.node_def, inner, place, outer or node.name, functions)
    if not called:
      yield Access(node.op, next(filter(None, taken)), place, outer or node.name)


def foreign_ops(graph: tf.Graph, fetches: Fetches = None) -> list[ForeignOp]:
  """Ops inside functions that stand elsewhere than their call, at any depth.

  A device function leaves such ops: it stamps the device of the first call on a trace that all
  calls share.
  """
  return [
    ForeignOp(node.name, body.function, _merge(body.device, node.device), body.device)
    for body in _bodies(graph, fetches)
    if body.function
    for node in body.nodes
    if _merge(body.device, node.device) != body.device
  ]


def kernels_of(op_type: str, kind: str = 'GPU') -> list[Kernel]:
  """The kernels that a device of this kind takes for an op: its own first, then the default ones.

  Raises:
    UsageError: this build of TensorFlow lists none at all for the kind.
  """
  if not _registered('Conv2D', kind):
    raise UsageError(
      f'this TensorFlow lists no {kind} kernels, so nothing can be said about them: '
      "install the full wheel, pip install 'tensorflow', in place of tensorflow-cpu"
    )
  return list(_registered(op_type, kind))


def check_kernels(graph: tf.Graph, fetches: Fetches = None, kind: str = 'GPU') -> list[str]:
  """Ops on devices of one kind for whose types no kernel is registered; each a line of text.

  Functions are walked through attributes of all kinds (calls, branches, loops, registered
  gradients), with the device of the call; so are their arguments and results. What a kernel
  refuses when it runs, such as a layout, isn't known to the registry.

  Raises:
    UsageError: as for `kernels_of`.
  """
  kernels_of('NoOp', kind)
  problems: dict[str, None] = {}
  for body in _bodies(graph, fetches):
    for node in body.nodes:
      device = _merge(body.device, node.device)
      if _kind(device) != kind or node.op in body.functions:
        continue  # a function called by its name is the runtime's own business
      if _kernel(node, kind) is None:
        where = f' in {body.function}' if body.function else ''
        types = ', '.join(f'{k}={v}' for k, v in _types(node).items())
        problems[f'{node.op} {node.name!r}{where} on {device}: no {kind} kernel for {types}'] = None
  return list(problems)


def host_copies(graph: tf.Graph, fetches: Fetches = None) -> list[HostCopy]:
  """Copies between a device's memory and the host's that ops of one device cause among themselves.

  Kernels take and give some arguments in host memory: shapes, seeds, axes, most of what is int32.
  """
  found: dict[tuple[str, str, bool], HostCopy] = {}
  for body in _bodies(graph, fetches):
    made = {name: (device, flags) for name, device, flags in _outputs(body)}
    for node in body.nodes:
      device = _merge(body.device, node.device)
      if _kind(device) in ('', 'CPU'):
        continue
      wanted = _memories(node, _kind(device), body.functions)[0]
      for reference, to_host in zip(_data_inputs(node), wanted, strict=True):
        producer, key = _split(reference)
        source, flags = made[producer]
        if source == device and flags[key] != to_host:
          prefix = f'{body.function}/' if body.function else ''
          copy = HostCopy(prefix + reference, device, to_host, prefix + node.name)
          found.setdefault((copy.tensor, device, to_host), copy)
  return list(found.values())


def check(graph: tf.Graph, fetches: Fetches = None) -> list[str]:
  """All that is wrong with the placement of any step, whatever its manager; each a line of text.

  Ops without a device or tied to another's, handles that leave their device, functions with a
  device baked in, ops without a kernel on their GPU.

  Raises:
    UsageError: as for `kernels_of`.
  """
  return [
    *(f'{op.type} {op.name!r}: no device' for op in undevised_ops(graph, fetches)),
    *(f'{op.type} {op.name!r}: colocated' for op in colocated_ops(graph, fetches)),
    *(
      f'handle {edge.source_name!r} of {edge.source or "no device"} used on {edge.destination}'
      for edge in resource_edges(graph, fetches)
    ),
    *(
      f'{op.name!r} in {op.function}: on {op.device}, but called on {op.caller_device}'
      for op in foreign_ops(graph, fetches)
    ),
    *check_kernels(graph, fetches),
  ]


# Graphs as protocol buffers: functions are only there.


class _Body(NamedTuple):
  """The graph itself, or a function as called on one device.

  Attributes:
    function: its name, '' for the graph.
    device: the call's; what nodes without a device stand on.
    nodes: its nodes; for a function its arguments and results too, as `_Arg` and `_Retval`.
    functions: name -> definition, of the whole library.
  """

  function: str
  device: str
  nodes: list[Any]
  functions: Mapping[str, Any]


def _bodies(graph: tf.Graph, fetches: Fetches) -> Iterator[_Body]:
  """The graph, then each function once for each device that it is called on."""
  graph_def = graph.as_graph_def()
  functions = _functions(graph_def)
  gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
  wanted = {op.name for op in ops_of(graph, fetches)}
  pending = [_Body('', '', [n for n in graph_def.node if n.name in wanted], functions)]
  seen = set()
  while pending:
    body = pending.pop()
    yield body
    for node in body.nodes:
      for name in _called(node, functions):
        device = _merge(body.device, node.device)
        for function in (name, gradients.get(name)):
          if function in functions and (function, device) not in seen:
            seen.add((function, device))
            nodes = _function_nodes(functions[function])
            pending.append(_Body(function, device, nodes, functions))


def _functions(graph_def: Any) -> dict[str, Any]:
  return {function.signature.name: function for function in graph_def.library.function}


def _function_nodes(function: Any) -> list[Any]:
  """A function's nodes, and one for each argument and result, as the runtime makes them."""
  nodes = []
  for argument in function.signature.input_arg:
    node = tf.compat.v1.NodeDef(name=argument.name, op='_Arg')
    node.attr['T'].type = argument.type
    nodes.append(node)
  nodes += function.node_def
  for result in function.signature.output_arg:
    reference = function.ret[result.name]
    node = tf.compat.v1.NodeDef(name=f'{result.name}_RetVal', op='_Retval', input=[reference])
    node.attr['T'].type = result.type
    nodes.append(node)
  return nodes


def _called(node: Any, functions: Mapping[str, Any]) -> list[str]:
  """Functions that a node calls: by its attributes, or because it bears the function's name."""
  names = [node.op] if node.op in functions else []
  for _, value in sorted(node.attr.items()):
    if value.HasField('func'):
      names.append(value.func.name)
    names += [function.name for function in value.list.func]
  return [name for name in dict.fromkeys(names) if name in functions]


def _data_inputs(node: Any) -> list[str]:
  return [reference for reference in node.input if not reference.startswith('^')]


def _split(reference: str) -> tuple[str, Any]:
  """'node:3' or 'node:output:3' to the node and what tells its outputs apart."""
  node, *rest = reference.split(':')
  if len(rest) == 2:
    return node, (rest[0], int(rest[1]))
  return node, int(rest[0]) if rest else 0


def _outputs(body: _Body) -> Iterator[tuple[str, str, dict[Any, bool]]]:
  """Each node's name, device, and outputs, by number and by name -> whether in host memory."""
  for node in body.nodes:
    device = _merge(body.device, node.device)
    flags = _memories(node, _kind(device), body.functions)[1]
    keyed: dict[Any, bool] = dict(enumerate(flags))
    arguments = _arguments(_op_def(node, body.functions).output_arg, _attributes(node))
    numbers: dict[str, int] = {}
    for (name, _), flag in zip(arguments, flags, strict=True):
      numbers[name] = numbers.get(name, -1) + 1
      keyed[name, numbers[name]] = flag
    yield node.name, device, keyed


# Types, kernels and memory, by the rules of TensorFlow's runtime.


def _op_def(node: Any, functions: Mapping[str, Any] | None = None) -> Any:
  if functions and node.op in functions:
    return functions[node.op].signature
  return op_def_registry.get(node.op)


def _attributes(node: Any) -> Mapping[str, Any]:
  """The node's attributes, those left at their default included."""
  op_def = op_def_registry.get(node.op)
  defaults = {a.name: a.default_value for a in op_def.attr} if op_def else {}
  return {**defaults, **node.attr}


def _types(node: Any) -> dict[str, str]:
  """Attribute -> name of its type, or types."""
  types = {}
  for name, value in sorted(_attributes(node).items()):
    if not name.startswith('_') and (value.HasField('type') or value.list.type):
      values = value.list.type or [value.type]
      types[name] = '+'.join(tf.as_dtype(v).name for v in values)
  return types


def _arguments(definitions: Iterable[Any], attributes: Mapping[str, Any]) -> list[tuple[str, int]]:
  """(name, type) of each tensor that the definitions of inputs or outputs stand for."""
  arguments = []
  for definition in definitions:
    if definition.type_list_attr:
      types = list(attributes[definition.type_list_attr].list.type)
    else:
      one = definition.type or attributes[definition.type_attr].type
      count = attributes[definition.number_attr].i if definition.number_attr else 1
      types = [one] * count
    arguments += [(definition.name, type_) for type_ in types]
  return arguments


@functools.cache
def _registered(op_type: str, kind: str) -> tuple[Kernel, ...]:
  found = [
    Kernel(
      kernel.device_type,
      {c.name: frozenset(c.allowed_values.list.type) for c in kernel.constraint},
      frozenset(kernel.host_memory_arg),
      kernel.label,
      kernel.priority,
    )
    for kernel in kernels.get_registered_kernels_for_op(op_type).kernel
    if kernel.device_type in (kind, 'DEFAULT')
  ]
  return tuple(sorted(found, key=lambda k: (k.device_type == 'DEFAULT', -k.priority)))


def _kernel(node: Any, kind: str) -> Kernel | None:
  """The kernel that the runtime would choose for a node, or None."""
  attributes = _attributes(node)
  label = attributes['_kernel'].s.decode() if '_kernel' in attributes else ''
  for kernel in _registered(node.op, kind):
    if kernel.label == label and all(
      name in attributes and set(attributes[name].list.type or [attributes[name].type]) <= types
      for name, types in kernel.types.items()
    ):
      return kernel
  return None


# For these the runtime goes by type alone, not by the kernel's word.
_BY_TYPE = ('PartitionedCall', 'StatefulPartitionedCall', 'SymbolicGradient', 'While')
_ALWAYS_ON_HOST = (tf.string.as_datatype_enum, tf.resource.as_datatype_enum)
_INT32 = tf.int32.as_datatype_enum


def _memories(node: Any, kind: str, functions: Mapping[str, Any]) -> tuple[list[bool], list[bool]]:
  """Whether each input, and each output, lies in host memory."""
  op_def, attributes = _op_def(node, functions), _attributes(node)
  kernel = None if kind == 'CPU' or node.op in _BY_TYPE else _kernel(node, kind)
  sides = []
  for definitions in (op_def.input_arg, op_def.output_arg):
    sides.append(
      [
        kind == 'CPU'
        or type_ in _ALWAYS_ON_HOST
        or (name in kernel.host_arguments if kernel else type_ == _INT32)
        for name, type_ in _arguments(definitions, attributes)
      ]
    )
  return sides[0], sides[1]


def _on_host(op: tf.Operation, side: int, index: int) -> bool:
  """Whether an op's input (side 0) or output (side 1) lies in host memory."""
  kind = _kind(device_of(op))
  if kind == 'CPU' or op_def_registry.get(op.type) is None:  # a function called by its name
    return kind == 'CPU' or (op.outputs if side else op.inputs)[index].dtype == tf.int32
  return _memories(op.node_def, kind, {})[side][index]


@functools.cache
def _explicit(device: str) -> str:
  spec = tf.DeviceSpec.from_string(device)
  return spec.to_string() if spec.device_type and spec.device_index is not None else ''


@functools.cache
def _merge(outer: str, inner: str) -> str:
  if not inner:
    return outer
  spec = tf.DeviceSpec.from_string(outer).make_merged_spec(tf.DeviceSpec.from_string(inner))
  return spec.to_string()


@functools.cache
def _kind(device: str) -> str:
  return tf.DeviceSpec.from_string(device).device_type or ''


def _classes(op: tf.Operation) -> list[bytes]:
  value = op.node_def.attr.get('_class')
  return list(value.list.s) if value else []


def _number(op: tf.Operation, names: list[str], name: str) -> int | None:
  """An integer input, if the graph says what it is."""
  value = tf.get_static_value(op.inputs[names.index(name)]) if name in names else None
  return None if value is None else int(value)


def _is_handle(tensor: tf.Tensor) -> bool:
  return tensor.dtype == tf.resource


def _bytes(tensor: tf.Tensor) -> int | None:
  if not tensor.shape.is_fully_defined() or not tensor.dtype.size:
    return None
  return math.prod(tensor.shape.as_list()) * tensor.dtype.size
