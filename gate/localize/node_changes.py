"""Changes of an operator, of a number or of two inputs that may explain a wrong value."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

from gate.localize.file_graph import REFERENCE_SUFFIX
from gate.localize.layer_weights import Detail
from gate.localize.node_differences import COMMUTATIVE, format_value
from gate.onnx_file.reading import RANDOM_OPERATORS, STANDARD_DOMAINS, attributes
from gate.storage.arrays import OutputArray

Change = tuple[Detail, onnx.ModelProto]
"""The detail of a fault, and a copy of the model without it."""

_ALIKE = (
    ("MaxPool", "AveragePool"),
    ("GlobalMaxPool", "GlobalAveragePool"),
    ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum"),
    ("Sin", "Cos"),
    ("Max", "Min"),
    ("Add", "Sub"),
    ("Mul", "Div"),
    ("Floor", "Ceil", "Round"),
    ("Greater", "Less", "GreaterOrEqual", "LessOrEqual"),
    ("Relu", "Sigmoid", "Tanh", "Softplus", "Erf", "Abs", "Exp"),
    ("Softmax", "LogSoftmax"),
)
"""Operators with the same inputs, one of which a file may have in place of another."""

_NEAREST = {
    "mode": "nearest",
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
}
_CUBIC = {"mode": "cubic", "cubic_coeff_a": -0.75}
_ALIGNMENTS = ("half_pixel", "align_corners", "asymmetric")
_INTERPOLATIONS: tuple[dict[str, Any], ...] = (
    {**_NEAREST, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    _NEAREST,
    *(
        {**mode, "coordinate_transformation_mode": alignment, "antialias": antialias}
        for mode in ({"mode": "linear"}, _CUBIC)
        for alignment in _ALIGNMENTS
        for antialias in (0, 1)
    ),
)
"""Attributes of Resize that exporters write."""


def _changeable(model: onnx.ModelProto) -> Iterator[tuple[int, onnx.NodeProto]]:
    """Yield the nodes that may be changed with their indices: those of standard operators, whose
    inputs ONNX Runtime checks, but no random ones, which end it for a standard deviation of 0."""
    for index, node in enumerate(model.graph.node):
        if node.domain in STANDARD_DOMAINS and not node.op_type.startswith(RANDOM_OPERATORS):
            yield index, node


def other_operators(model: onnx.ModelProto, opset: int) -> Iterator[Change]:
    """Yield the model with another operator in place of that of one node."""
    for index, node in _changeable(model):
        alike = next((names for names in _ALIKE if node.op_type in names), ())
        for operator in (name for name in alike if name != node.op_type):
            allowed = defs.get_schema(operator, opset).attributes
            stated = {name: value for name, value in attributes(node).items() if name in allowed}
            stated |= {"count_include_pad": 1} if operator == "AveragePool" else {}
            detail = _detail("operator", node, node.op_type, operator)
            changed = helper.make_node(operator, node.input, node.output, node.name, **stated)
            yield detail, _with_node(model, index, changed)


def other_interpolations(model: onnx.ModelProto) -> Iterator[Change]:
    """Yield the model with another interpolation of a Resize, the most similar one first."""
    for index, node in _changeable(model):
        if node.op_type != "Resize":
            continue
        got = {**_NEAREST, "cubic_coeff_a": -0.75, "antialias": 0, **attributes(node)}
        got = {name: v.decode() if isinstance(v, bytes) else v for name, v in got.items()}
        changes = [{n: v for n, v in want.items() if v != got[n]} for want in _INTERPOLATIONS]
        for change in sorted(filter(None, changes), key=len):
            changed = helper.make_node("Resize", node.input, node.output, node.name)
            stated = {**attributes(node), **change}
            changed.attribute.extend(helper.make_attribute(*pair) for pair in stated.items())
            texts = [
                ", ".join(f"{n}={format_value(of[n])}" for n in change) for of in (got, change)
            ]
            yield _detail("interpolation", node, *texts), _with_node(model, index, changed)


def exchanged_inputs(
    model: onnx.ModelProto, constants: Mapping[str, OutputArray]
) -> Iterator[Change]:
    """Yield the model with two inputs of a node exchanged, or two constants of equal shape."""
    for index, node in _changeable(model):
        pairs = [] if node.op_type in COMMUTATIVE else combinations(range(len(node.input)), 2)
        for first, second in pairs:
            changed, names = copy.deepcopy(node), (node.input[first], node.input[second])
            changed.input[first], changed.input[second] = names[::-1]
            yield _exchange(*names), _with_node(model, index, changed)
    tables = {name: array for name, array in constants.items() if array.size > 1}
    for one, two in combinations(tables, 2):
        arrays = tables[one], tables[two]
        if arrays[0].shape == arrays[1].shape and arrays[0].dtype == arrays[1].dtype:
            exchange, changed_model = {one: two, two: one}, copy.deepcopy(model)
            for node in changed_model.graph.node:
                node.input[:] = [exchange.get(name, name) for name in node.input]
            yield _exchange(one, two), changed_model


def other_numbers(
    model: onnx.ModelProto, constants: Mapping[str, OutputArray], numbers: Iterable[float]
) -> Iterator[Change]:
    """Yield the model with one of `numbers` in place of a constant or of a float attribute, the
    most similar ones first."""
    changes = []
    for index, node in _changeable(model):
        stated = attributes(node)
        read = {name: constants[name] for name in node.input if name in constants}
        scalars = {n: a.item() for n, a in read.items() if a.size == 1 and a.dtype.kind == "f"}
        scalars |= {name: got for name, got in stated.items() if isinstance(got, float)}
        for (name, got), want in product(scalars.items(), numbers):
            if not math.isclose(got, want, rel_tol=1e-6):
                changes.append((_distance(got, want), index, name, got, float(want)))
    for _, index, name, got, want in sorted(changes):
        node, added = copy.deepcopy(model.graph.node[index]), []
        if name in constants:
            value = np.full_like(constants[name], want)
            added = [numpy_helper.from_array(value, f"{name}::{want}")]
            node.input[:] = [added[0].name if read == name else read for read in node.input]
        for attribute in node.attribute:
            if attribute.name == name:
                attribute.f = want
        title = name if name not in constants else "constant"
        detail = _detail(title, node, format_value(got), format_value(want))
        yield detail, _with_node(model, index, node, *added)


def _distance(got: float, want: float) -> float:
    """Return the distance of the logarithms; infinite for zero and for another sign."""
    return abs(math.log(want / got)) if got * want > 0.0 else math.inf


def _detail(setting: str, node: onnx.NodeProto, got: str, want: str) -> Detail:
    title = f"{setting} of {node.op_type} {node.name}".strip()
    return {"code": "right_with", "setting": title, "got": got, "want": want}


def _exchange(first: str, second: str) -> Detail:
    names = sorted(name.removesuffix(REFERENCE_SUFFIX) for name in (first, second))
    return {"code": "exchanged", **dict(zip(("setting", "want"), names, strict=True))}


def _with_node(
    model: onnx.ModelProto, index: int, node: onnx.NodeProto, *added: onnx.TensorProto
) -> onnx.ModelProto:
    changed = copy.deepcopy(model)
    changed.graph.node[index].CopyFrom(node)
    changed.graph.initializer.extend(added)
    return changed
