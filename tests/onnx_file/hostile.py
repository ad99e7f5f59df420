"""ONNX files that exceed limits of time or memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gate.sandbox.limits import SandboxLimits

TIGHT_LIMITS = SandboxLimits(3.0, 300 * 10**6)
WIDE_LIMITS = SandboxLimits(60.0, TIGHT_LIMITS.memory_bytes)
"""Limits for valid files, which take half a second and 60 MB to read."""
PARENT_BYTES = 150 * 10**6
"""Memory that the parent process may use in addition."""
_FLOAT = TensorProto.FLOAT
_OPSET = helper.make_opsetid("", 17)


def empty_nodes(path: Path, *, count: int = 10_000_000) -> Path:
    """Write nodes of two bytes in the file and 350 in memory: 20 MB take 3.5 GB."""
    data = _model(path, [helper.make_node("Identity", ["input"], ["logits"])]).read_bytes()
    nodes = b"\x0a\x00" * count
    path.write_bytes(data + b"\x3a" + _varint(len(nodes)) + nodes)  # a second graph field
    return path


def nested_functions(path: Path, *, depth: int = 40) -> Path:
    """Write functions that each call the previous one twice: 2^40 nodes after inlining."""
    opsets = [_OPSET, helper.make_opsetid("local", 1)]
    functions = [_function("f0", [helper.make_node("Neg", ["x"], ["y"])], opsets)]
    for number in range(1, depth + 1):
        before = {"op_type": f"f{number - 1}", "domain": "local"}
        nodes = [
            helper.make_node(inputs=["x"], outputs=["between"], **before),
            helper.make_node(inputs=["between"], outputs=["y"], **before),
        ]
        functions.append(_function(f"f{number}", nodes, opsets))
    call = helper.make_node(f"f{depth}", ["input"], ["logits"], domain="local")
    return _model(path, [call], functions=functions, opsets=opsets)


def endless_loop(path: Path) -> Path:
    """Write a loop with as many iterations as an int64 can count, and a condition that is always
    true."""
    return _loop(path, helper.make_node("Neg", ["value"], ["next"]))


def growing_loop(path: Path) -> Path:
    """Write a loop that doubles the number of rows in each iteration."""
    return _loop(path, helper.make_node("Concat", ["value", "value"], ["next"], axis=0))


def large_constant(path: Path, *, exponent: int = 40) -> Path:
    """Write a tensor of 4 TB whose size depends on the input."""
    nodes = [
        helper.make_node("Size", ["input"], ["size"]),
        helper.make_node("Sub", ["size", "size"], ["zero"]),
        helper.make_node("Add", ["zero", "elements"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["large"]),
        helper.make_node("ReduceMax", ["large"], ["most"], keepdims=0),
        helper.make_node("Add", ["input", "most"], ["logits"]),
    ]
    return _model(path, nodes, [numpy_helper.from_array(np.array([2**exponent]), "elements")])


EXPENSIVE_TO_READ: dict[str, Callable[[Path], Path]] = {"20 MB of empty nodes": empty_nodes}
"""Files that exceed the limits when they are read."""
EXPENSIVE_TO_LOAD: dict[str, Callable[[Path], Path]] = {
    "2^40 nodes in nested functions": nested_functions
}
"""Files that exceed the limits when ONNX Runtime loads them."""
EXPENSIVE_TO_RUN: dict[str, Callable[[Path], Path]] = {
    "endless loop": endless_loop,
    "growing loop": growing_loop,
    "a constant of 4 TB": large_constant,
    "a constant of 16 GB": lambda path: large_constant(path, exponent=32),
}
"""Files that exceed the limits when they run."""


def _loop(path: Path, node: Any) -> Path:
    body = helper.make_graph(
        [helper.make_node("Identity", ["before"], ["after"]), node],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("before", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", _FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("after", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", _FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["rounds", "true", "input"], ["logits"], body=body)
    rounds = numpy_helper.from_array(np.array(2**63 - 1), "rounds")
    return _model(path, [loop], [rounds, numpy_helper.from_array(np.array(True), "true")])


def _function(name: str, nodes: Sequence[Any], opsets: Sequence[Any]) -> Any:
    return helper.make_function("local", name, ["x"], ["y"], nodes, opsets)


def _model(
    path: Path,
    nodes: Sequence[Any],
    weights: Sequence[TensorProto] = (),
    *,
    functions: Sequence[Any] = (),
    opsets: Sequence[Any] = (_OPSET,),
) -> Path:
    ends = [
        [helper.make_tensor_value_info(name, _FLOAT, ["batch", 3])] for name in ("input", "logits")
    ]
    graph = helper.make_graph(nodes, "hostile", *ends, initializer=list(weights))
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=list(opsets), functions=list(functions), ir_version=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
