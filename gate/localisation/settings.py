"""The settings of a module against the attributes of the nodes that compute it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from onnx import helper
from torch import nn

_WINDOW = {"strides": ("stride", 1), "pads": ("padding", 0), "dilations": ("dilation", 1)}
_SETTINGS: dict[str, Mapping[str, tuple[str, Any]]] = {
    "Conv": {**_WINDOW, "group": ("groups", 1)},
    "ConvTranspose": {**_WINDOW, "group": ("groups", 1)},
    "MaxPool": {**_WINDOW, "kernel_shape": ("kernel_size", None), "ceil_mode": ("ceil_mode", 0)},
    "AveragePool": {
        "strides": ("stride", 1),
        "pads": ("padding", 0),
        "kernel_shape": ("kernel_size", None),
        "ceil_mode": ("ceil_mode", 0),
        "count_include_pad": ("count_include_pad", 0),
    },
    "BatchNormalization": {"epsilon": ("eps", 1e-5)},
    "LayerNormalization": {"epsilon": ("eps", 1e-5)},
    "InstanceNormalization": {"epsilon": ("eps", 1e-5)},
    "GroupNormalization": {"epsilon": ("eps", 1e-5)},
    "LeakyRelu": {"alpha": ("negative_slope", 0.01)},
    "Elu": {"alpha": ("alpha", 1.0)},
    "Gelu": {"approximate": ("approximate", "none")},
}
"""Operator to attribute to (attribute of the module, default of the operator)."""

_PADDING_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}
"""`padding_mode` of a convolution to `mode` of Pad."""

_MEANS = ("ReduceMean", "GlobalAveragePool")
"""What computes the statistics of a batch, which BatchNormalization reads in the place of those of
training: exporters write a norm that has lost them so."""

_FUNCTIONS = {
    ("Relu",): "ReLU",
    ("LeakyRelu",): "LeakyReLU",
    ("PRelu",): "PReLU",
    ("Elu",): "ELU",
    ("Selu",): "SELU",
    ("Celu",): "CELU",
    ("Sigmoid",): "Sigmoid",
    ("Mul", "Sigmoid"): "SiLU",
    ("Swish",): "SiLU",
    ("HardSigmoid",): "Hardsigmoid",
    ("HardSwish",): "Hardswish",
    ("HardSigmoid", "Mul"): "Hardswish",
    ("Tanh",): "Tanh",
    ("Softplus",): "Softplus",
    ("Mul", "Softplus", "Tanh"): "Mish",
    ("Mish",): "Mish",
    ("Softsign",): "Softsign",
    ("Softmax",): "Softmax",
    ("LogSoftmax",): "LogSoftmax",
}
"""Sorted operators, constants left out, to the module that exporters write so."""
_ACTIVATIONS = {*_FUNCTIONS.values(), "ReLU6", "Hardtanh", "GELU", "Softmin"}


def another_function(module: nn.Module, nodes: Iterable[onnx.NodeProto]) -> str | None:
    """The activation that exporters write by just these operators, where the module is another
    one; else None."""
    operators = sorted(node.op_type for node in nodes if node.op_type != "Constant")
    kind = type(module).__name__
    if kind not in _ACTIVATIONS:
        return None
    function = _FUNCTIONS.get(tuple(operators)) or _gelu(operators)
    if kind == "GELU":
        kind = "GELU" if getattr(module, "approximate", "none") == "none" else "GELU by tanh"
    return None if function == kind else function


def _gelu(operators: list[str]) -> str | None:
    of = set(operators)
    if "Erf" in of and of <= {"Erf", "Mul", "Add", "Div"}:
        return "GELU"
    return "GELU by tanh" if {"Tanh", "Add"} <= of <= {"Tanh", "Add", "Mul", "Pow"} else None


def differing(module: nn.Module, nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Each setting that a node has otherwise than the module, in words."""
    listed = list(nodes)
    yield from _padding_mode(module, listed)
    padded = any(node.op_type == "Pad" for node in listed)  # then pads say only a part of it
    for node in listed:
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for name, (attribute, default) in _SETTINGS.get(node.op_type, {}).items():
            if not hasattr(module, attribute) or (name == "pads" and padded):
                continue
            stated, want = given.get(name, default), getattr(module, attribute)
            if stated is not None and not _equal(stated, want, name):
                text = stated.decode() if isinstance(stated, bytes) else stated
                yield f"{name} is {_short(text)} in the file, {attribute} is {want} in the model"


def compared(module: nn.Module, nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """The attributes of the module that nodes have too."""
    names = (one for node in nodes for one, _ in _SETTINGS.get(node.op_type, {}).values())
    return [name for name in dict.fromkeys(names) if hasattr(module, name)]


def training(nodes: Iterable[onnx.NodeProto]) -> bool:
    """True if a node computes as in training: BatchNorm by the batch, Dropout at random."""
    listed = list(nodes)
    means = {name for node in listed if node.op_type in _MEANS for name in node.output}
    for node in listed:
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        by_batch = given.get("training_mode") == 1 or bool(means & set(node.input[3:5]))
        if node.op_type == "BatchNormalization" and by_batch:
            return True
        if node.op_type == "Dropout" and len(node.input) > 2:
            return True
    return False


def _padding_mode(module: nn.Module, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    want = getattr(module, "padding_mode", None)
    if want not in _PADDING_MODES:
        return
    pads = [node for node in nodes if node.op_type == "Pad"]
    modes = [a.s.decode() for node in pads for a in node.attribute if a.name == "mode"]
    found = set(modes or ["constant"])
    if _PADDING_MODES[want] not in found:
        yield f"padding mode is {', '.join(found)} in the file, padding_mode is {want} in the model"


def _equal(stated: Any, want: Any, name: str) -> bool:
    if isinstance(stated, bytes):
        return bool(stated.decode() == want)
    if isinstance(stated, float):
        return isinstance(want, float | int) and math.isclose(stated, want, rel_tol=1e-6)
    if isinstance(want, str):  # padding='same'
        return True
    stated_all = [stated] if isinstance(stated, int) else list(stated)
    want_all = [int(want)] if isinstance(want, bool | int) else [int(one) for one in want]
    if name == "pads" and len(want_all) > 1:
        want_all = want_all * 2
    if 1 in (len(stated_all), len(want_all)):
        return len({*stated_all, *want_all}) == 1
    return stated_all == want_all


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
