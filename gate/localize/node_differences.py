"""Compare nodes of the file with the nodes of an ONNX reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from gate.localize.file_graph import FileGraph
from gate.localize.layer_weights import Detail, is_rounded_to_16_bits
from gate.onnx_file.reading import constant_tensor
from gate.records.localization import FaultCode
from gate.reference.onnx_operators import to_numpy
from gate.reference.onnx_reference import OnnxNode, OnnxReference
from gate.storage.arrays import OutputArray

_DEFAULTS = {
    **dict.fromkeys(("strides", "dilations"), 1),
    **dict.fromkeys(("pads", "output_padding", "scan_input_axes", "scan_output_axes"), 0),
    **dict.fromkeys(("scan_input_directions", "scan_output_directions"), 0),
}
"""Values of attributes, along each axis, for which the schemas state no default."""

_FLATTENING = {"Softmax", "LogSoftmax", "Hardmax"}
"""Operators that take all axes from `axis` on as one before opset 13."""

_KEEPS_RANK = {"Softmax", "LogSoftmax", "Hardmax", "Concat", "LayerNormalization", "TopK", "Split"}

COMMUTATIVE = {"Add", "Mul", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal"}

Differences = Iterator[tuple[FaultCode, Detail]]


@dataclass(frozen=True)
class _Scope:
    """The graph or subgraph whose nodes are compared."""

    constant: Callable[[str], OutputArray | None]
    """Returns a constant by its name; None for other values."""
    opsets: Mapping[str, int]
    reduced: bool
    """True if constants may be rounded to 16 bits."""


def node_differences(
    model: OnnxReference,
    graph: FileGraph,
    path: str,
    nodes: Sequence[onnx.NodeProto],
    rank: int,
    *,
    reduced: bool,
) -> Differences:
    """Yield the constants, inputs and attributes in which nodes differ from those of the reference.

    path: of the node of the reference that computes the value; rank: that of the value. reduced:
    constants that a conversion to 16 bits explains do not differ.
    A node is compared with it if no other one has its operator, else with the one that has its
    output.
    """
    paths = model.node_paths()
    same = [node for node in nodes if _is_same_operator(model.get_submodule(path), node)]
    for node in nodes:
        node_path = path if same == [node] else paths.get(node.output[0], "")
        module = model.get_submodule(node_path)
        if isinstance(module, OnnxNode) and _is_same_operator(module, node):
            scope = _Scope(graph.constant, graph.opsets, reduced)
            yield from _compare_node(module, node_path, node, scope, rank)


def _compare_node(
    module: OnnxNode, path: str, node: onnx.NodeProto, scope: _Scope, rank: int
) -> Differences:
    names = [*node.input, *[""] * (len(module.sources) - len(node.input))]
    is_permuted = node.op_type not in COMMUTATIVE and sorted(names) == sorted(module.proto.input)
    for index, ((kind, field), name) in enumerate(zip(module.sources, names, strict=False)):
        got = scope.constant(name) if kind == "initializer" and name else None
        if got is not None:
            want = to_numpy(getattr(module, field))
            yield from _compare_constant(f"{path}.{field}", got, want, reduced=scope.reduced)
        elif (kind == "absent") != (not name):
            states = ("present", "absent") if name else ("absent", "present")
            yield "settings", setting(f"input {index} of {path}", *states)
        elif is_permuted and name != module.proto.input[index]:
            yield "settings", setting(f"input {index} of {path}", name, module.proto.input[index])
    opset = scope.opsets.get(module.call.domain, module.call.opset)
    if node.op_type in _FLATTENING and (opset < 13) != (module.call.opset < 13):
        yield "settings", setting("opset", str(opset), str(module.call.opset))
    stated = module.attributes_of(node, opset)
    for name in sorted(stated.keys() | module.call.attributes.keys()):
        got, want = (
            attributes.get(name, _DEFAULTS.get(name))
            for attributes in (stated, module.call.attributes)
        )
        if not _is_equal(name, got, want, rank if node.op_type in _KEEPS_RANK else 0):
            yield "settings", _attribute_setting(name, got, want)
    for attribute in node.attribute:
        if attribute.name in module.bodies:
            body = module.bodies[attribute.name]
            body_path = f"{path}.bodies.{attribute.name}"
            yield from _compare_body(body, body_path, attribute.g, scope)


def _compare_constant(
    name: str, got: OutputArray, want: OutputArray, *, reduced: bool
) -> Differences:
    if got.dtype.kind not in "biuf" or (got.shape != want.shape and got.size * want.size != 1):
        return
    values, right = got.astype(np.float64), want.astype(np.float64)
    distance = np.abs(values - right).ravel()
    wrong = distance[distance > 0]
    if wrong.size and not (reduced and is_rounded_to_16_bits(right, values)):
        share = {"changed": wrong.size, "total": want.size, "largest": float(wrong.max())}
        yield "weights", {"code": "differs", "name": name, **share}


def _compare_body(body: Any, path: str, graph: onnx.GraphProto, scope: _Scope) -> Differences:
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {n.output[0]: t for n in graph.node if (t := constant_tensor(n)) is not None}
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    if len(nodes) != len(body.paths):
        return

    def inner_constant(name: str) -> OutputArray | None:
        return numpy_helper.to_array(tensors[name]) if name in tensors else scope.constant(name)

    inner = replace(scope, constant=inner_constant)
    for name, node in zip(body.paths, nodes, strict=True):
        module, path_ = body.get_submodule(name), f"{path}.{name}"
        if _is_same_operator(module, node):
            yield from _compare_node(module, path_, node, inner, 0)
        else:
            yield "settings", setting(f"operator of {path_}", node.op_type, module.call.operator)


def _is_same_operator(module: Any, node: onnx.NodeProto) -> bool:
    domain = "" if node.domain == "ai.onnx" else node.domain
    call = getattr(module, "call", None)
    return call is not None and (call.domain, call.operator) == (domain, node.op_type)


def _is_equal(name: str, got: Any, want: Any, rank: int) -> bool:
    """Return True also for values that cannot be compared, such as an axis and one that counts
    from the end if the rank is unknown."""
    lists = [value for value in (got, want) if isinstance(value, list)]
    if lists:  # of a number for each axis, or one number for all
        left, right = (v if isinstance(v, list) else [v] * len(lists[0]) for v in (got, want))
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_is_equal(name, *pair, rank) for pair in pairs)
    if not isinstance(got, int | float | str) or not isinstance(want, int | float | str):
        return True
    if isinstance(got, str) or isinstance(want, str):
        return bool(got == want)
    if name in ("axis", "axes") and (got < 0) != (want < 0):
        return rank == 0 or got % rank == want % rank
    if isinstance(got, float) and isinstance(want, float):
        return math.isclose(got, want, rel_tol=1e-6)
    return bool(got == want)


def _attribute_setting(name: str, got: Any, want: Any) -> Detail:
    """Return the detail of two values; of long lists, that of the first element that differs."""
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want) > _SHOWN:
        pairs = enumerate(zip(got, want, strict=True))
        index = next(i for i, pair in pairs if not _is_equal(name, *pair, 0))
        name, got, want = f"{name}[{index}]", got[index], want[index]
    return setting(name, format_value(got), format_value(want))


_SHOWN = 8
"""Longest list that a message shows."""


def format_value(value: object) -> str:
    """Return the text of an attribute in a message."""
    if isinstance(value, list):
        if len(value) > _SHOWN:
            return f"a list of {len(value)} values"
        return f"[{', '.join(map(format_value, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def setting(name: str, got: str, want: object, attribute: str = "it") -> Detail:
    """Return the detail of a setting that differs; attribute: that of the module or node."""
    values = {"got": got, "want": str(want)}
    return {"code": "setting", "setting": name, "attribute": attribute, **values}
