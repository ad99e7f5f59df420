"""An ONNX file as an `nn.Module` with one submodule per node, computed by PyTorch."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, defs, helper, inliner, shape_inference
from torch import nn

from gate.data.input_binding import InputBinding
from gate.errors import ModelError, first_line
from gate.onnx_file.reading import (
    WithData,
    inline_functions,
    keys_name,
    map_keys,
    nodes_within,
    subgraphs,
)
from gate.onnx_file.sessions import open_session, session_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.records.evidence import Subject
from gate.reference import (  # noqa: F401 - importing them registers their operators
    onnx_contrib_operators,
    onnx_ml_operators,
    onnx_network_operators,
    onnx_quantized_operators,
)
from gate.reference.onnx_operators import (
    DTYPES,
    TABLE,
    UNSIGNED,
    OperatorCall,
    Tensor,
    Value,
    attribute_value,
    find_operator,
    from_numpy,
    is_text,
    scalar,
    tensor_from_proto,
    to_numpy,
)
from gate.reference.onnx_widening import widened
from gate.storage.arrays import Batch, OutputArray, text_digests, whole_batches

Env = dict[str, Value]
"""Values by their names in the graph."""

_HALF = (torch.float16, torch.bfloat16)

_MIXED_TYPES = {"Cast", "CastLike", "Pow", "Dropout", "BitCast"}
"""Operators whose float inputs may have different types."""

_CASTS = {"Cast", "BitCast"}
"""Operators that take any integers."""

_CONTROL = {"If", "Loop", "Scan", "SequenceMap"}

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)

_LARGE = 2**31 - 1
"""Size in bytes from which protobuf can't serialize a model, as type inference requires."""


@dataclass(frozen=True)
class _Scope:
    """Values that all nodes of a file share."""

    opsets: Mapping[str, int]
    types: Mapping[str, int]
    """Element types by value name, as far as they can be inferred."""
    constants: Mapping[str, Value]
    """Initializers and constants of the enclosing graphs, by name."""


class OnnxNode(nn.Module):
    """One node. Its initializers are its parameters, named as in the operator's schema."""

    def __init__(self, proto: onnx.NodeProto, scope: _Scope) -> None:
        super().__init__()
        self.proto = proto
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        opset = scope.opsets.get(domain, 1)
        schema = _schema(domain, proto.op_type, opset)
        bodies = {
            each.name: OnnxGraph(each.g, scope)
            for each in proto.attribute
            if each.type == onnx.AttributeProto.GRAPH
        }
        self.bodies = nn.ModuleDict(bodies)
        self.captured = sorted({name for body in bodies.values() for name in body.captured})
        self.call = OperatorCall(
            proto.op_type,
            domain,
            opset,
            _attributes(proto, schema),
            len(proto.output),
            tuple(scope.types.get(name, 0) for name in proto.output),
            tuple(scope.types.get(name, 0) for name in proto.input),
        )
        self.sources: list[tuple[str, Any]] = []
        """The source of each input: `("initializer", name of the parameter)`, `("text", array)`,
        `("value", name in the graph)` or `("absent", None)`."""
        for index, name in enumerate(proto.input):
            self.sources.append(self._source(index, name, schema, scope))
        self.value_names = [name for kind, name in self.sources if kind == "value"]

    @property
    def has_sixteen_bits(self) -> bool:
        """True if the node returns or computes with 16-bit floats."""
        typed_sources = zip(self.sources, self.call.input_types, strict=True)
        kinds = [kind for (source, _), kind in typed_sources if source == "value"]
        if any(DTYPES.get(kind) in _HALF for kind in (*kinds, *self.call.output_types)):
            return True
        if self.call.operator in _MIXED_TYPES:  # weights may be stored in 16 bits
            return False
        return any(each.dtype in _HALF for each in self.parameters(recurse=False))

    def attributes_of(self, node: onnx.NodeProto, opset: int) -> dict[str, Any]:
        """Return the attributes of another node of this operator, with the defaults of an opset."""
        return _attributes(node, _schema(self.call.domain, self.call.operator, opset))

    def _source(self, index: int, name: str, schema: Any, scope: _Scope) -> tuple[str, Any]:
        if not name:
            return "absent", None
        if name not in scope.constants:
            return "value", name
        value = scope.constants[name]
        if not isinstance(value, torch.Tensor):
            return "text", value
        attribute_name = f"input_{index}"
        if schema is not None and index < len(schema.inputs):
            stated = schema.inputs[index]
            if stated.option != defs.OpSchema.FormalParameterOption.Variadic:
                attribute_name = stated.name
        attribute_name = _unused_name(self, attribute_name)
        if value.is_floating_point():
            self.register_parameter(attribute_name, nn.Parameter(value, requires_grad=False))
        else:
            self.register_buffer(attribute_name, value)
        return "initializer", attribute_name

    def forward(self, *values: Value, outer: Env | None = None) -> Value:
        """Return the outputs of the node.

        values: the inputs that are not initializers. outer: values that subgraphs take from the
        enclosing graph.
        """
        remaining = iter(values)
        inputs: list[Value] = []
        for kind, name in self.sources:
            if kind == "value":
                inputs.append(next(remaining))
            else:
                inputs.append(getattr(self, name) if kind == "initializer" else name)
        if self.call.operator in _CONTROL and not self.call.domain:
            return self._controlled(inputs, outer or {})
        function = find_operator(self.call.domain, self.call.operator, self.call.opset)
        if function is None:
            return compute_with_onnx(self.proto, self.call, inputs)
        unsorted = self.call.operator == "TopK" and not self.call.get("sorted", 1)
        if unsorted or (self.call.operator not in _CASTS and any(map(_exceeds_int64, inputs))):
            return compute_with_runtime(self.proto, self.call, inputs)
        typed, narrow = _as_computable(inputs, self.call)
        return self._as_declared(function(self.call, *typed), narrow)

    def _as_declared(self, outputs: Value, narrow: torch.dtype | None) -> Value:
        """Convert outputs to the graph's element types, but keep floats that are wider."""
        if isinstance(outputs, tuple):
            return tuple(self._to_declared_dtype(each, i, narrow) for i, each in enumerate(outputs))
        return self._to_declared_dtype(outputs, 0, narrow)

    def _to_declared_dtype(self, output: Value, index: int, narrow: torch.dtype | None) -> Value:
        if isinstance(output, str):  # an element of a NumPy array of strings
            return np.array(output, object)
        if not isinstance(output, torch.Tensor):
            return output
        types = self.call.output_types
        stated = DTYPES.get(types[index]) if index < len(types) else None
        if output.is_floating_point():
            if narrow is None or output.dtype in _HALF:
                return output
            target = narrow if stated is None else stated
            return output.to(target) if target in _HALF else output
        if stated is None or stated.is_floating_point or stated.is_complex:
            return output
        return output if output.dtype == stated else output.to(stated)

    def _controlled(self, inputs: list[Value], outer: Env) -> Value:
        kind = self.call.operator
        if kind == "If":
            name = "then_branch" if scalar(inputs[0]) else "else_branch"
            return _as_outputs(self.bodies[name](outer=outer))
        body: Any = self.bodies["body"]
        if kind == "Loop":
            return _loop(body, inputs, outer)
        if kind == "SequenceMap":
            return _sequence_map(body, inputs, outer)
        return _scan(self.call, body, inputs, outer)


def _schema(domain: str, operator: str, opset: int) -> Any:
    try:
        return defs.get_schema(operator, opset, domain)
    except defs.SchemaError:
        return None


def _attributes(node: onnx.NodeProto, schema: Any) -> dict[str, Any]:
    """Return the attributes of a node, with the schema's defaults and without subgraphs."""
    defaults = {} if schema is None else {k: v.default_value for k, v in schema.attributes.items()}
    without = (onnx.AttributeProto.UNDEFINED, onnx.AttributeProto.GRAPH)
    stated = {**defaults, **{each.name: each for each in node.attribute}}
    return {
        name: attribute_value(each) for name, each in stated.items() if each.type not in without
    }


_RESERVED = {"captured", "constants", "file", "last", "loaded", "order", "returned", "texts"}
"""Attributes that a graph sets after adding its nodes."""


def _unused_name(module: nn.Module, name: str) -> str:
    """Return an unused attribute name without dots, which torch interprets as paths."""
    name = re.sub(r"[.\s]", "_", name) or "_"
    while hasattr(module, name) or name in _RESERVED:
        name += "_"
    return name


def _exceeds_int64(value: Value) -> bool:
    """Return whether uint64 values do not fit in int64, in which they would be computed."""
    is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.uint64
    return is_wide and bool((value.view(torch.int64) < 0).any())


def _as_computable(
    inputs: Sequence[Value], call: OperatorCall
) -> tuple[list[Value], torch.dtype | None]:
    """Return inputs in types for which torch has all operators, and their 16-bit type if any.

    16-bit values are computed in 32 bits and rounded after each node, like in ONNX Runtime's CPU
    provider.
    """
    floats = {v.dtype for v in inputs if isinstance(v, torch.Tensor) and v.is_floating_point()}
    narrow = next((dtype for dtype in _HALF if dtype in floats), None)
    widest = torch.float64 if torch.float64 in floats else torch.float32
    mixed = len(floats - set(_HALF)) > 1 and call.operator not in _MIXED_TYPES

    def typed(value: Value) -> Value:
        if isinstance(value, list):
            return [typed(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype in UNSIGNED and call.operator not in _CASTS:
            return value.to(torch.int64)
        if value.dtype in _HALF and call.operator != "BitCast":
            return value.to(widest)
        if mixed and value.dtype == torch.float32:
            return value.to(widest)
        return value

    return [typed(value) for value in inputs], narrow


class OnnxGraph(nn.Module):
    """A graph whose nodes are submodules in the order of the file."""

    def __init__(self, graph: onnx.GraphProto, scope: _Scope) -> None:
        super().__init__()
        constants: Env = {each.name: tensor_from_proto(each) for each in graph.initializer}
        constants |= {each.values.name: _dense(each) for each in graph.sparse_initializer}
        nodes = []
        for node in graph.node:
            constant = _constant(node)
            if constant is None:
                nodes.append(node)
            else:
                constants[node.output[0]] = constant
        bound = {each.name for each in graph.input if each.name not in constants}
        bound |= {name for node in nodes for name in node.output}
        kept = {name: value for name, value in scope.constants.items() if name not in bound}
        inner = replace(scope, constants=kept | constants, types={**scope.types, **_types(graph)})
        self.inputs = [each.name for each in graph.input if each.name not in constants]
        inputs_declared = [each for each in graph.input if each.name in self.inputs]
        self.input_shapes = [_shape(each) for each in inputs_declared]
        self.input_types = [each.type.tensor_type.elem_type for each in inputs_declared]
        self.outputs = [each.name for each in graph.output]
        self.output_shapes = [_shape(each) for each in graph.output]
        self.output_types = [each.type.tensor_type.elem_type for each in graph.output]
        self.paths: list[str] = []
        counts: Counter[str] = Counter()
        for node in nodes:
            name = node.name or f"{node.op_type}_{counts[node.op_type]}"
            counts[node.op_type] += 1
            path = _unused_name(self, name)
            self.add_module(path, OnnxNode(node, inner))
            self.paths.append(path)
        computed = {name for node in nodes for name in node.output} | set(self.inputs)
        self.constants: dict[str, str] = {}
        """Constants that are outputs, for example of a branch, with the names of their buffers."""
        self.texts: Env = {}
        for name in dict.fromkeys(self.outputs):
            if name in inner.constants and name not in computed:
                value = inner.constants[name]
                if isinstance(value, torch.Tensor):
                    self.constants[name] = _unused_name(self, f"constant_{name}")
                    self.register_buffer(self.constants[name], value)
                else:
                    self.texts[name] = value
        used = {name for path in self.paths for name in self._read_names(path)}
        used |= {name for name in self.outputs if name not in inner.constants}
        self.captured = sorted(used - computed - {""})
        """Names of values from enclosing graphs."""
        self.last: list[list[str]] = self._last_uses()

    def _read_names(self, path: str) -> list[str]:
        node: Any = self.get_submodule(path)
        return [*node.value_names, *node.captured]

    def _last_uses(self) -> list[list[str]]:
        """Return, for each node, the values that are not needed after it."""
        needed = set(self.outputs)
        freed: list[list[str]] = []
        for path in reversed(self.paths):
            names = set(self._read_names(path)) - needed
            needed |= names
            freed.insert(0, sorted(names))
        return freed

    def values(
        self, inputs: Sequence[Value], outer: Env | None = None
    ) -> Iterator[tuple[str, Value]]:
        """Compute node by node; yield each value with its name."""
        env: Env = dict(outer or {}) | dict(zip(self.inputs, inputs, strict=True)) | self.texts
        env |= {name: getattr(self, buffer) for name, buffer in self.constants.items()}
        yield from env.items()
        for path, freed in zip(self.paths, self.last, strict=True):
            node: Any = self.get_submodule(path)
            values = [env[name] for name in node.value_names]
            try:
                if node.captured:
                    outputs = node(*values, outer={name: env[name] for name in node.captured})
                else:
                    outputs = node(*values)
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(
                    f"the node {path!r} ({node.call.operator}, opset {node.call.opset}) of the "
                    f"reference can't be computed: {type(error).__name__}: {first_line(error)}"
                ) from error
            for name, value in zip(node.proto.output, _outputs(outputs), strict=False):
                if name:
                    env[name] = value
                    yield name, value
            for name in freed:
                env.pop(name, None)

    def compute(self, inputs: Sequence[Value], outer: Env | None = None) -> list[Value]:
        """Return the outputs in the order of the graph."""
        outputs = {name: v for name, v in self.values(inputs, outer) if name in self.outputs}
        return [outputs[name] for name in self.outputs]

    def forward(self, *inputs: Value, outer: Env | None = None) -> Any:
        """Return the outputs in the order of the graph."""
        return self.compute(inputs, outer)


def _outputs(result: Value) -> tuple[Value, ...]:
    return result if isinstance(result, tuple) else (result,)


def _as_outputs(values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else tuple(values)


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    types = {
        each.name: each.type.tensor_type.elem_type
        for each in (*graph.input, *graph.value_info, *graph.output)
        if each.type.HasField("tensor_type")
    }
    return types | {each.name: each.data_type for each in graph.initializer}


def _shape(value: onnx.ValueInfoProto) -> list[int]:
    """Return the shape of a value, with 0 for axes without a fixed size."""
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _dense(sparse: onnx.SparseTensorProto) -> Tensor:
    values, indices = tensor_from_proto(sparse.values), tensor_from_proto(sparse.indices)
    flat = torch.zeros(math.prod(sparse.dims), dtype=values.dtype)
    if indices.ndim == 2:
        strides = [math.prod(sparse.dims[i + 1 :]) for i in range(len(sparse.dims))]
        indices = (indices * torch.tensor(strides)).sum(1)
    flat[indices] = values
    return flat.reshape(tuple(sparse.dims))


def _constant(node: onnx.NodeProto) -> Value | None:
    """Return the value of a Constant node; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    value = attribute_value(node.attribute[0])
    kind = node.attribute[0].name
    if kind == "value":
        return tensor_from_proto(value)
    if kind == "sparse_value":
        return _dense(value)
    if kind.startswith("value_string"):
        return np.array(value if kind.endswith("s") else [value], object).reshape(
            (-1,) if kind.endswith("s") else ()
        )
    return torch.tensor(value, dtype=torch.float32 if "float" in kind else torch.int64)


# Control flow.


def _loop(body: OnnxGraph, inputs: list[Value], outer: Env) -> Value:
    most = None if inputs[0] is None else int(scalar(inputs[0]))
    live = True if len(inputs) < 2 or inputs[1] is None else bool(scalar(inputs[1]))
    states = inputs[2:]
    rows: list[list[Value]] = [[] for _ in body.outputs[1 + len(states) :]]
    iteration = 0
    while live and (most is None or iteration < most):
        outputs = body(torch.tensor(iteration), torch.tensor(True), *states, outer=outer)
        live, states = bool(scalar(outputs[0])), outputs[1 : 1 + len(states)]
        for row, value in zip(rows, outputs[1 + len(states) :], strict=True):
            row.append(value)
        iteration += 1
    first = 1 + len(states)
    stacked = [_stack(row, body, first + i) for i, row in enumerate(rows)]
    return _as_outputs([*states, *stacked])


def _stack(rows: list[Value], body: OnnxGraph, index: int, axis: int = 0) -> Value:
    if rows and is_text(rows[0]):
        return np.stack(rows, axis)
    if rows:
        return torch.stack(rows, axis)
    dtype = DTYPES.get(body.output_types[index], torch.float32)
    return torch.zeros((0, *body.output_shapes[index]), dtype=dtype)


def _scan(call: OperatorCall, body: OnnxGraph, inputs: list[Value], outer: Env) -> Value:
    if call.opset < 9:  # axis 0 is the batch, and the first input holds lengths
        parts = [
            _outputs(_run_scan(call, body, [each[row] for each in inputs[1:]], outer))
            for row in range(len(inputs[1]))
        ]
        return _as_outputs([torch.stack(column) for column in zip(*parts, strict=True)])
    return _run_scan(call, body, inputs, outer)


def _run_scan(call: OperatorCall, body: OnnxGraph, inputs: list[Value], outer: Env) -> Value:
    count = call.get("num_scan_inputs")
    states, scans = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    axes = call.get("scan_input_axes") or [0] * count
    back = call.get("scan_input_directions") or call.get("directions") or [0] * count
    slices = [
        list(reversed(scan.unbind(axis))) if flip else scan.unbind(axis)
        for scan, axis, flip in zip(scans, axes, back, strict=True)
    ]
    kept = len(states)
    rows: list[list[Value]] = [[] for _ in body.outputs[kept:]]
    for parts in zip(*slices, strict=True):
        outputs = body(*states, *parts, outer=outer)
        states = outputs[:kept]
        for row, value in zip(rows, outputs[kept:], strict=True):
            row.append(value)
    into = call.get("scan_output_axes") or [0] * len(rows)
    behind = call.get("scan_output_directions") or [0] * len(rows)
    stacked = [
        _stack(row[::-1] if flip else row, body, kept + i, axis)
        for i, (row, axis, flip) in enumerate(zip(rows, into, behind, strict=True))
    ]
    return _as_outputs([*states, *stacked])


def _sequence_map(body: OnnxGraph, inputs: list[Value], outer: Env) -> Value:
    rows = [
        body(*(each[i] if isinstance(each, list) else each for each in inputs), outer=outer)
        for i in range(len(inputs[0]))
    ]
    columns = zip(*rows, strict=True) if rows else ([] for _ in body.outputs)
    return _as_outputs([list(column) for column in columns])


# Operators that the table lacks. In places `onnx.reference` applies the newest version of an
# operator (Softmax at opset 12 with the semantics of opset 13), so it must agree with ONNX Runtime.

_TOLERANCE = 1e-4
"""Relative to the largest value: far more than rounding, far less than different semantics."""


def open_plain(model: bytes | str | WithData) -> Any:
    """Open a session of ONNX Runtime on the CPU, without optimizations."""
    setup = plain_setup("ort-cpu")
    options = session_options(
        setup,
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return open_session(model, options, setup)


def compute_with_onnx(proto: onnx.NodeProto, call: OperatorCall, inputs: Sequence[Value]) -> Value:
    """Compute one node with `onnx.reference`.

    Raises ModelError if it fails, or disagrees with ONNX Runtime.
    """
    from onnx.reference import ReferenceEvaluator

    where = f"{call.domain or 'ai.onnx'}.{call.operator} at opset {call.opset}"
    arrays = [None if value is None else to_numpy(value) for value in inputs]
    try:
        model, feed = _single_node_model(proto, call, arrays)
        outputs: Any = ReferenceEvaluator(model).run(None, feed)
        if not call.derived.get("agrees"):
            narrow = [a.astype(np.float32) if a is not None and a.dtype == np.float64
                      and call.input_types[i : i + 1] != (TensorProto.DOUBLE,) else a
                      for i, a in enumerate(arrays)]  # fmt: skip
            single, narrow_feed = _single_node_model(proto, call, narrow)
            expected = open_plain(single.SerializeToString()).run(None, narrow_feed)
            call.derived["agrees"] = _agree(outputs, expected)
    except Exception as error:
        raise ModelError(
            f"the reference has the operator {where} (node {proto.name!r}), which can't be "
            f"computed: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not call.derived["agrees"]:
        raise ModelError(
            f"the reference has the operator {where} (node {proto.name!r}), for which onnx's "
            "reference implementation and ONNX Runtime disagree, so nothing can judge it."
        )
    return _as_outputs([_value(each) for each in outputs])


def compute_with_runtime(
    proto: onnx.NodeProto, call: OperatorCall, inputs: Sequence[Value]
) -> Value:
    """Compute a node whose result ONNX does not fully define, such as an unsorted TopK.

    Raises any error of ONNX Runtime.
    """
    model, feed = _single_node_model(
        proto, call, [None if v is None else to_numpy(v) for v in inputs]
    )
    return _as_outputs(_value(open_plain(model.SerializeToString()).run(None, feed)))


def _value(result: Any) -> Value:
    if isinstance(result, list):
        return [_value(each) for each in result]
    if not isinstance(result, np.ndarray):
        return result if isinstance(result, dict) else torch.as_tensor(result)
    if result.dtype.kind in "OUS":
        return result.astype(object)
    value = from_numpy(result)
    # For the float64 reference, the float32 result of this node continues in float64.
    return value.to(torch.get_default_dtype()) if value.dtype == torch.float32 else value


def _single_node_model(
    proto: onnx.NodeProto, call: OperatorCall, arrays: Sequence[Any]
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model of this node alone and its inputs by name."""
    node = onnx.NodeProto()
    node.CopyFrom(proto)
    feed: dict[str, Any] = {}
    infos = []
    for index, array in enumerate(arrays):
        if array is None:
            continue
        node.input[index] = name = f"input_{index}"
        kind = (
            TensorProto.STRING
            if array.dtype.kind in "OU"
            else (helper.np_dtype_to_tensor_dtype(array.dtype))
        )
        feed[name] = array
        infos.append(helper.make_tensor_value_info(name, kind, array.shape))
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", infos, outputs)
    imports = [helper.make_opsetid(call.domain, call.opset)]
    if call.domain:
        imports.append(helper.make_opsetid("", 17))
    return helper.make_model(graph, opset_imports=imports, ir_version=8), feed


def _agree(outputs: Sequence[Any], expected: Sequence[Any]) -> bool:
    if len(outputs) != len(expected):
        return False
    for actual_output, expected_output in zip(outputs, expected, strict=True):
        if isinstance(actual_output, list) or isinstance(expected_output, list):
            if actual_output != expected_output:
                return False
            continue
        a, b = np.asarray(actual_output), np.asarray(expected_output)
        if a.shape != b.shape:
            return False
        if b.dtype.kind != "f":
            if not np.array_equal(a, b):
                return False
            continue
        size = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        if not np.allclose(a, b, rtol=0, atol=_TOLERANCE * size, equal_nan=True):
            return False
    return True


# The whole file.


class OnnxReference(OnnxGraph):
    """An ONNX file as a torch module with the file's inputs and outputs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        model = _prepare(model)
        opsets = {each.domain: each.version for each in model.opset_import}
        opsets[""] = opsets.get("", opsets.pop("ai.onnx", 1))
        super().__init__(model.graph, _Scope(opsets, {}, {}))
        self.order: tuple[int, ...] = tuple(range(len(self.inputs)))
        """For each input of the file, the index of the argument of forward."""
        self.returned: tuple[str, ...] | None = None
        """Output names in the order of forward; None: the file's order."""
        self.rows: int | None = None
        """Batch size to which calls are split: that of the file, if the judged file takes any."""
        self.file: TestedFile | None = None
        self.loaded: bytes | str | WithData | None = None
        """Model for ONNX Runtime: bytes or a path."""
        self.is_widened = False
        """True if the file computes in 16 bits and this module in float32."""

    @classmethod
    def from_file(cls, file: TestedFile) -> OnnxReference:
        """Read a file with its external data. Raises DigestMismatch; ModelError for a file that
        can't be read.

        A file that computes in float16 or bfloat16 becomes the same graph in float32: rounding to
        16 bits would hide errors of the judged file.
        """
        loaded = file.loadable()
        try:
            model = (
                onnx.load_from_string(loaded) if isinstance(loaded, bytes) else onnx.load(file.path)
            )
            reference = cls(model)
            if reference.computes_in_16_bits():
                model = widened(model)
                reference, loaded = cls(model), model.SerializeToString()
                reference.is_widened = True
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"the reference {file.path} can't be read as a graph: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        reference.file, reference.loaded = file, loaded
        return reference

    def computes_in_16_bits(self) -> bool:
        """Return True unless the file at most stores weights in 16 bits."""
        nodes = (each for each in self.modules() if isinstance(each, OnnxNode))
        return any(node.has_sixteen_bits for node in nodes)

    def arranged(self, subject: Subject) -> OnnxReference:
        """Return the module with inputs and outputs in the order of another file.

        They are matched by name, or by position if the two files share no name. Raises ModelError
        if they share only some of the names.
        """
        inputs, outputs = ([s.name for s in each] for each in (subject.inputs, subject.outputs))
        arranged = copy.copy(self)
        sizes = {shape[0] if shape else 0 for shape in (*self.input_shapes, *self.output_shapes)}
        takes_any = all(spec.shape and isinstance(spec.shape[0], str) for spec in subject.inputs)
        arranged.rows = max(sizes) if takes_any and len(sizes) == 1 and max(sizes) else None
        arranged.order, arranged.returned = tuple(range(len(self.inputs))), None
        if _paired_by_name("inputs", self.inputs, inputs):
            arranged.order = tuple(list(inputs).index(name) for name in self.inputs)
        if _paired_by_name("outputs", self.outputs, outputs):
            arranged.returned = tuple(outputs)
        return arranged

    def node_paths(self) -> dict[str, str]:
        """Return the module path of each node, by the names of the node and of its outputs.

        Tools that fuse or rename nodes keep the names of values.
        """
        nodes = [(path, m.proto) for path, m in self.named_modules() if isinstance(m, OnnxNode)]
        paths = {proto.name: path for path, proto in nodes if proto.name}
        return paths | {name: path for path, proto in nodes for name in proto.output if name}

    def session(self, binding: InputBinding) -> RuntimeReference | None:
        """Return the file in ONNX Runtime; None if the module was not read from a file."""
        return None if self.loaded is None else RuntimeReference(self, binding)

    def arguments(self, values: Sequence[Value]) -> list[Value]:
        """Return the inputs of the graph, in its order, from the arguments of forward."""
        if len(values) != len(self.order):
            raise ModelError(
                f"the reference takes {len(self.order)} inputs ({', '.join(self.inputs)}), but the "
                f"judged file takes {len(values)}. Compare files with the same inputs."
            )
        ordered = [
            _as_declared_integer(values[index], kind)
            for index, kind in zip(self.order, self.input_types, strict=True)
        ]
        return [np.array(v, object) if isinstance(v, list) and v and not isinstance(
            v[0], torch.Tensor) else v for v in ordered]  # fmt: skip

    def in_parts(
        self,
        values: Sequence[Any],
        run: Callable[[Sequence[Any]], list[Any]],
        join: Callable[[list[Any]], Any],
    ) -> list[Any]:
        """Return the outputs of `run` for all rows, in calls of `rows` of them.

        The last row fills up the last call."""
        count = len(values[0]) if values else 0
        if self.rows is None or count in (0, self.rows):
            return run(values)
        batches = whole_batches(count, self.rows).tolist()
        calls = [run([value[rows] for value in values]) for rows in batches]
        return [join(list(parts))[:count] for parts in zip(*calls, strict=True)]

    def forward(self, *values: Value, outer: Env | None = None) -> Any:  # noqa: ARG002
        """Return the outputs; by name if the other file has the same names."""
        computed = self.in_parts(self.arguments(values), self.compute, torch.cat)
        outputs = [_comparable(value) for value in computed]
        if self.returned is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        named = dict(zip(self.outputs, outputs, strict=True))
        return {name: named[name] for name in self.returned}


def _as_declared_integer(value: Any, kind: int) -> Any:
    """Convert integers to those of the reference's input, unless one of them does not fit.

    Converters for phones replace int64 by int32."""
    if kind not in _INTEGERS:
        return value
    converted = value
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        converted = value.astype(helper.tensor_dtype_to_np_dtype(kind))
    elif isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
        converted = value.to(DTYPES[kind])
    return converted if bool((converted == value).all()) else value


def _comparable(value: Value) -> Value:
    """Return an output as the gate compares it: strings as digests."""
    return torch.from_numpy(text_digests(value)) if is_text(value) else value


def _paired_by_name(kind: str, names: Sequence[str], judged: Sequence[str]) -> bool:
    """Return False if the two files share no name, or differ in number, which is judged later."""
    if set(names) == set(judged):
        return True
    shared = [name for name in names if name in judged]
    if not shared or len(names) != len(judged):
        return False
    only = [name for name in names if name not in judged]
    raise ModelError(
        f"the {kind} of the reference and of the judged file share only some names: "
        f"{_quote(shared)}. Only the reference has {_quote(only)}, only the judged file has "
        f"{_quote(name for name in judged if name not in names)}. Rename the "
        f"{kind} of one file so that the names are the same in both."
    )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class RuntimeReference:
    """The reference in float32: its file in ONNX Runtime on the CPU, without optimizations."""

    def __init__(self, reference: OnnxReference, binding: InputBinding) -> None:
        self._reference = reference
        self._binding = binding
        self._session: Any = None

    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs in the order of the module, 16-bit floats as float32.

        Raises any error of ONNX Runtime.
        """
        if self._session is None:
            assert self._reference.loaded is not None
            self._session = open_plain(self._reference.loaded)
        values = self._reference.arguments(self._binding.by_argument(batch))
        specs = {spec.name: spec.type for spec in self._session.get_inputs()}
        typed = [
            _as_input_type(value, specs[name])
            for name, value in zip(self._reference.inputs, values, strict=True)
        ]
        names = list(self._reference.returned or self._reference.outputs)

        def run(values: Sequence[Any]) -> list[Any]:
            feed = dict(zip(self._reference.inputs, values, strict=True))
            return [_plain(each) for each in self._session.run(names, feed)]

        outputs = self._reference.in_parts(typed, run, np.concatenate)
        return self._binding.from_call(outputs)


def _as_input_type(value: Any, kind: str) -> Any:
    """Convert a float input, which is float32 in the gate, to the type of the file."""
    types = {
        "tensor(float16)": np.float16,
        "tensor(double)": np.float64,
        "tensor(float)": np.float32,
    }
    dtype = types.get(kind)
    return value.astype(dtype) if dtype is not None and value.dtype.kind == "f" else value


def _plain(value: Any) -> OutputArray:
    if not isinstance(value, np.ndarray):
        raise ModelError("the reference returns a sequence or a map, which can't be compared.")
    return value.astype(np.float32) if value.dtype == np.float16 else text_digests(value)


def _prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its functions inlined and the types of all values inferred.

    Operators that the table lacks are replaced by the function of their schema.
    """
    if model.functions:
        model = inline_functions(model)
    model = _with_keys(model)
    opsets = {each.domain: each.version for each in model.opset_import}
    lacking = sorted({
        (node.domain, node.op_type)
        for node in nodes_within(model.graph.node)
        if (node.domain, node.op_type) not in TABLE and _has_body(node, opsets)
    })  # fmt: skip
    if model.ByteSize() >= _LARGE:
        return model
    if lacking:
        model = shape_inference.infer_shapes(model)
        model = inliner.inline_selected_functions(model, lacking, inline_schema_functions=True)
    return shape_inference.infer_shapes(model)


def _with_keys(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a second output for the keys of each output that is a list of maps."""
    maps = map_keys(model)
    if not maps:
        return model
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    for node in extended.graph.node:
        if maps.keys() & set(node.output):
            node.output.append(keys_name(node.output[0]))
    del extended.graph.output[:]
    for value in model.graph.output:
        names = [value.name, keys_name(value.name)] if value.name in maps else []
        extended.graph.output.extend([onnx.ValueInfoProto(name=name) for name in names] or [value])
    return extended


def _has_body(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bool:
    if any(True for _ in subgraphs(node)):
        return False
    schema = _schema(node.domain, node.op_type, opsets.get(node.domain, 1))
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)
