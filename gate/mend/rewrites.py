"""Equivalent forms of single operators, applied to the graph or to torch functions at export."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gate.errors import ExportError, first_line
from gate.mend.mixed_precision import infer_types, save_model
from gate.model.forward_signature import ForwardSignature
from gate.onnx_file.reading import attributes, nodes_of, opset_of, replace_messages, subgraphs
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256

# A file with an edit is a candidate like any other: it is accepted only if the gate's check passes.


class GraphEdit(Record):
    """An edit of a graph, as listed in recipe.yaml and in the export record."""

    rewrite: str
    """A key of `REWRITES`."""
    at: tuple[str, ...]
    """Names of the tensors that are computed in the other form."""
    before: Sha256 | None = None
    """Digest of the file before the edit; None until it is applied."""
    after: Sha256 | None = None

    @property
    def text(self) -> str:
        """The edit in one line, for the export record."""
        return f"{self.rewrite} at {', '.join(self.at)}: {self.before} -> {self.after}"


class Graph:
    """A graph with its nodes by the tensors that they compute."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.producers = {name: node for node in model.graph.node for name in node.output if name}
        self.opset = opset_of(model)

    @classmethod
    def load(cls, path: Path) -> Graph:
        """Read the graph of a file. Raises ExportError for external data or functions in the
        file."""
        model = onnx.load(str(path), load_external_data=False)
        if any(uses_external_data(tensor) for tensor in model.graph.initializer):
            raise ExportError(f"{path.name} has external data: its graph is not edited.")
        if model.functions:
            raise ExportError(f"{path.name} defines functions: its graph is not edited.")
        return cls(model)

    def node(self, name: str, *kinds: str) -> onnx.NodeProto | None:
        """Return the node that computes a tensor, if it is of one of these operators."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type in kinds and not node.domain else None

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the value of a constant tensor; None for a computed one."""
        for initializer in self.model.graph.initializer:
            if initializer.name == name:
                return numpy_helper.to_array(initializer)
        node = self.node(name, "Constant", "Identity", "Cast")
        if node is None:
            return None
        if node.op_type != "Constant":
            return self.value(node.input[0])
        tensor = attributes(node).get("value")
        return None if tensor is None else numpy_helper.to_array(tensor)

    @cached_property
    def types(self) -> dict[str, int]:
        """Element types of the tensors, as far as they can be inferred."""
        return infer_types(self.model)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all nodes and tensors."""
        graph = self.model.graph
        tensors = (*graph.input, *graph.initializer)
        nodes = list(nodes_of(self.model))
        outputs = {name for node in nodes for name in node.output}
        return frozenset(outputs | {item.name for item in (*tensors, *nodes)})

    def is_float32(self, name: str) -> bool:
        """Return whether a tensor is float32; False if its type can't be inferred."""
        return self.types.get(name) == onnx.TensorProto.FLOAT

    def is_number(self, name: str, number: float) -> bool:
        """Return whether a tensor is a constant whose elements all equal this number."""
        value = self.value(name)
        return value is not None and value.size > 0 and bool(np.all(value == number))

    def region(self, ends: Collection[str], borders: Collection[str]) -> tuple[str, ...]:
        """Return the tensors computed between `borders` and `ends`, including `ends`, in graph
        order."""
        visited: set[str] = set()
        pending = [name for name in ends if name in self.producers]
        while pending:
            name = pending.pop()
            if name in visited or (name in borders and name not in ends):
                continue
            visited.add(name)
            pending += [source for source in self.producers[name].input if source in self.producers]
        return tuple(name for name in self.producers if name in visited)


@dataclass(frozen=True)
class EquivalentForm:
    """Nodes that compute one tensor in another form."""

    at: str
    """Name of the tensor, which is kept."""
    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[onnx.TensorProto, ...] = ()
    replaced: tuple[str, ...] = ()
    """Tensors of the replaced form, including `at`."""


class _Writer:
    """Creates the nodes of a form; names of its tensors start with that of the result."""

    def __init__(self, graph: Graph, at: str) -> None:
        self._graph, self._at = graph, at
        self._count = itertools.count()
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def add(self, kind: str, *inputs: str, **attributes_: Any) -> str:
        """Add a node with one output; return the name of the output."""
        name = self._new_name()
        self._nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes_))
        return name

    def constant(self, value: float | NDArray[Any], dtype: Any = np.float32) -> str:
        """Add a constant; return its name."""
        name = self._new_name()
        self._constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def _new_name(self) -> str:
        """Return an unused name; an earlier edit may have added some."""
        names = (f"{self._at}_mend_{number}" for number in self._count)
        return next(name for name in names if name not in self._graph.names)

    def form(self, result: str, replaced: Sequence[str]) -> EquivalentForm:
        """Return the form with the result under the name of the replaced tensor."""
        for node in self._nodes:
            node.output[:] = [self._at if name == result else name for name in node.output]
        return EquivalentForm(self._at, tuple(self._nodes), tuple(self._constants), tuple(replaced))


Find = Callable[[Graph, onnx.NodeProto], EquivalentForm | None]


def _log_softmax(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(Softmax(x)), which is -inf where a share underflows, as LogSoftmax(x)."""
    inner = graph.node(node.input[0], "Softmax") if node.op_type == "Log" else None
    if inner is None:
        return None
    write = _Writer(graph, node.output[0])
    result = write.add("LogSoftmax", inner.input[0], **attributes(inner))
    return write.form(result, [inner.output[0], node.output[0]])


def _log_sum_exp(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(ReduceSum(Exp(x))), which overflows, as ReduceLogSumExp(x), which subtracts the
    largest."""
    total = graph.node(node.input[0], "ReduceSum") if node.op_type == "Log" else None
    inner = None if total is None else graph.node(total.input[0], "Exp")
    if total is None or inner is None:
        return None
    settings = attributes(total)
    axes = settings.pop("axes", None)
    if len(total.input) > 1 and total.input[1]:
        value = graph.value(total.input[1])
        axes = None if value is None else [int(axis) for axis in value.reshape(-1)]
        if value is None:
            return None
    axes = axes or None  # empty ones: all axes
    if settings.pop("noop_with_empty_axes", 0) and axes is None:
        return None
    write = _Writer(graph, node.output[0])
    if axes is None:
        result = write.add("ReduceLogSumExp", inner.input[0], **settings)
    elif graph.opset >= 18:
        result = write.add(
            "ReduceLogSumExp", inner.input[0], write.constant(np.array(axes), np.int64), **settings
        )
    else:
        result = write.add("ReduceLogSumExp", inner.input[0], axes=axes, **settings)
    return write.form(result, [inner.output[0], total.output[0], node.output[0]])


def _log_sigmoid(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(Sigmoid(x)), which is -inf for large negative x, as -Softplus(-x)."""
    inner = graph.node(node.input[0], "Sigmoid") if node.op_type == "Log" else None
    if inner is None:
        return None
    write = _Writer(graph, node.output[0])
    result = write.add("Neg", write.add("Softplus", write.add("Neg", inner.input[0])))
    return write.form(result, [inner.output[0], node.output[0]])


def _log_sigmoid_exp(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(Sigmoid(x)), which ONNX Runtime rounds to -inf below -18, as -Log(1 + Exp(-x)).

    That overflows where PyTorch's log(sigmoid(x)) does.
    """
    inner = graph.node(node.input[0], "Sigmoid") if node.op_type == "Log" else None
    if inner is None or not graph.is_float32(node.output[0]):
        return None
    write = _Writer(graph, node.output[0])
    total = write.add("Add", write.add("Exp", write.add("Neg", inner.input[0])), write.constant(1))
    result = write.add("Neg", write.add("Log", total))
    return write.form(result, [inner.output[0], node.output[0]])


def _log1p_arguments(graph: Graph, node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yield the names of x and 1 + x if the node computes Log(1 + x)."""
    total = graph.node(node.input[0], "Add") if node.op_type == "Log" else None
    if total is not None:
        first, second = total.input
        for x, constant in ((first, second), (second, first)):
            if graph.is_number(constant, 1.0):
                yield x, total.output[0]


def _softplus(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(1 + Exp(x)), which overflows, as Softplus(x)."""
    for x, total in _log1p_arguments(graph, node):
        if (inner := graph.node(x, "Exp")) is not None:
            write = _Writer(graph, node.output[0])
            return write.form(write.add("Softplus", inner.input[0]), [x, total, node.output[0]])
    return None


def _log_add_exp(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(Exp(a) + Exp(b)), which overflows, as Max(a, b) + Softplus(-|a - b|)."""
    total = graph.node(node.input[0], "Add") if node.op_type == "Log" else None
    if total is None:
        return None
    left, right = (graph.node(name, "Exp") for name in total.input)
    if left is None or right is None:
        return None
    a, b = left.input[0], right.input[0]
    write = _Writer(graph, node.output[0])
    difference = write.add("Neg", write.add("Abs", write.add("Sub", a, b)))
    result = write.add("Add", write.add("Max", a, b), write.add("Softplus", difference))
    return write.form(result, [left.output[0], right.output[0], total.output[0], node.output[0]])


_SMALL = 0.5
"""Magnitude of x below which 1 + x loses digits of x."""


def _log1p(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Log(1 + x), which loses the digits of a small x, as 2 Atanh(x / (x + 2)) there."""
    for x, total in _log1p_arguments(graph, node):
        if graph.is_float32(node.output[0]):
            write = _Writer(graph, node.output[0])
            is_small = write.add("Less", write.add("Abs", x), write.constant(_SMALL))
            within = write.add("Where", is_small, x, write.constant(0.0))
            share = write.add("Div", within, write.add("Add", within, write.constant(2.0)))
            small = write.add("Mul", write.add("Atanh", share), write.constant(2.0))
            large = write.add("Log", total)
            return write.form(write.add("Where", is_small, small, large), [node.output[0]])
    return None


def _expm1(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Exp(x) - 1, which loses the digits of a small x, as Tanh(x / 2) (Exp(x) + 1)."""
    if node.op_type not in ("Sub", "Add"):
        return None
    inner = graph.node(node.input[0], "Exp")
    number = 1.0 if node.op_type == "Sub" else -1.0
    if inner is None or not graph.is_number(node.input[1], number):
        return None
    if not graph.is_float32(node.output[0]):
        return None
    write = _Writer(graph, node.output[0])
    half = write.add("Tanh", write.add("Mul", inner.input[0], write.constant(0.5)))
    result = write.add("Mul", half, write.add("Add", inner.output[0], write.constant(1.0)))
    return write.form(result, [node.output[0]])


def _square_of(graph: Graph, name: str) -> str | None:
    """Return the tensor whose square this tensor is; None if it is no square."""
    node = graph.node(name, "Mul", "Pow")
    if node is None:
        return None
    if node.op_type == "Mul":
        return node.input[0] if node.input[0] == node.input[1] else None
    return node.input[0] if graph.is_number(node.input[1], 2.0) else None


def _variance(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Mean(x²) - Mean(x)², which cancels for a large mean, as Mean((x - Mean(x))²)."""
    if node.op_type != "Sub":
        return None
    outer = graph.node(node.input[0], "ReduceMean")
    mean_name = _square_of(graph, node.input[1])
    mean = None if mean_name is None else graph.node(mean_name, "ReduceMean")
    if outer is None or mean is None or _square_of(graph, outer.input[0]) != mean.input[0]:
        return None
    settings = attributes(outer)
    if settings != attributes(mean) or list(outer.input[1:]) != list(mean.input[1:]):
        return None
    x, axes = mean.input[0], list(mean.input[1:])
    write = _Writer(graph, node.output[0])
    centered = write.add("Sub", x, write.add("ReduceMean", x, *axes, **settings | {"keepdims": 1}))
    result = write.add("ReduceMean", write.add("Mul", centered, centered), *axes, **settings)
    return write.form(result, [outer.output[0], node.output[0]])


def _layer_norm(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite LayerNormalization by its ordinary operators, centered before the square is taken."""
    if node.op_type != "LayerNormalization" or len([name for name in node.output if name]) > 1:
        return None
    if not all(graph.is_float32(name) for name in (node.input[0], node.output[0])):
        return None
    settings = attributes(node)
    axis, epsilon = settings.get("axis", -1), settings.get("epsilon", 1e-5)
    scale = graph.value(node.input[1])
    if axis >= 0 and (scale is None or scale.ndim == 0):
        return None
    axes = list(range(axis, 0)) if axis < 0 else list(range(-scale.ndim, 0))  # type: ignore[union-attr]
    write = _Writer(graph, node.output[0])

    def mean(name: str) -> str:
        if graph.opset >= 18:
            axes_name = write.constant(np.array(axes), np.int64)
            return write.add("ReduceMean", name, axes_name, keepdims=1)
        return write.add("ReduceMean", name, axes=axes, keepdims=1)

    centered = write.add("Sub", node.input[0], mean(node.input[0]))
    variance = mean(write.add("Mul", centered, centered))
    deviation = write.add("Sqrt", write.add("Add", variance, write.constant(epsilon)))
    result = write.add("Mul", write.add("Div", centered, deviation), node.input[1])
    if len(node.input) > 2 and node.input[2]:
        result = write.add("Add", result, node.input[2])
    return write.form(result, [node.output[0]])


def _clip(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """Rewrite Min(Max(x, low), high), or Min(Relu(x), high), as Clip(x, low, high), as in ReLU6."""
    if node.op_type != "Min" or len(node.input) != 2:
        return None
    for index in (0, 1):
        high = graph.value(node.input[1 - index])
        inner = graph.node(node.input[index], "Max", "Relu")
        if high is None or high.size != 1 or high.dtype != np.float32 or inner is None:
            continue
        lows = [graph.value(name) for name in inner.input] if inner.op_type == "Max" else []
        low = next((value for value in lows if value is not None and value.size == 1), None)
        x = next((n for n, v in zip(inner.input, lows, strict=False) if v is None), inner.input[0])
        if inner.op_type == "Max" and (low is None or len(inner.input) != 2):
            continue
        write = _Writer(graph, node.output[0])
        least = write.constant(0.0 if low is None else float(low.reshape(())))
        result = write.add("Clip", x, least, write.constant(float(high.reshape(()))))
        return write.form(result, [inner.output[0], node.output[0]])
    return None


def _resize(**changes: Any) -> Find:
    """Return a rewrite of Resize with other attributes, which some exporters write incorrectly."""
    encoded = {key: v.encode() if isinstance(v, str) else v for key, v in changes.items()}

    def find(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
        if node.op_type != "Resize":
            return None
        settings = attributes(node)
        mode = settings.get("mode", b"nearest").decode()
        if ("nearest_mode" in changes) != (mode == "nearest") or (
            "cubic_coeff_a" in changes and mode != "cubic"
        ):
            return None
        if settings == settings | encoded:
            return None
        write = _Writer(graph, node.output[0])
        result = write.add("Resize", *node.input, **settings | encoded)
        return write.form(result, [node.output[0]])

    return find


_DOUBLE = frozenset(
    (
        "Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Exp", "Log", "Pow", "Softmax", "LogSoftmax",
        "ReduceSum", "ReduceMean", "ReduceLogSumExp", "MatMul", "Gemm", "Abs", "Tanh", "Sigmoid",
        "CumSum",
    )
)  # fmt: skip
"""Operators that ONNX Runtime's CPU provider supports in float64 from version 1.18 on."""


def _double(graph: Graph, node: onnx.NodeProto) -> EquivalentForm | None:
    """An operator in float64, rounded to float32 at the end. It costs time."""
    if node.op_type not in _DOUBLE or len(node.output) != 1 or not graph.is_float32(node.output[0]):
        return None
    write = _Writer(graph, node.output[0])
    inputs = [
        write.add("Cast", name, to=onnx.TensorProto.DOUBLE) if graph.is_float32(name) else name
        for name in node.input
    ]
    inner = write.add(node.op_type, *inputs, **attributes(node))
    return write.form(write.add("Cast", inner, to=onnx.TensorProto.FLOAT), [node.output[0]])


REWRITES: dict[str, Find] = {
    "log_softmax": _log_softmax,
    "log_sum_exp": _log_sum_exp,
    "log_sigmoid": _log_sigmoid,
    "log_sigmoid_exp": _log_sigmoid_exp,
    "softplus": _softplus,
    "log_add_exp": _log_add_exp,
    "log1p": _log1p,
    "expm1": _expm1,
    "variance": _variance,
    "layer_norm": _layer_norm,
    "clip": _clip,
    "resize_half_pixel": _resize(coordinate_transformation_mode="half_pixel"),
    "resize_pytorch": _resize(coordinate_transformation_mode="pytorch_half_pixel"),
    "resize_align_corners": _resize(coordinate_transformation_mode="align_corners"),
    "resize_asymmetric": _resize(coordinate_transformation_mode="asymmetric"),
    "resize_nearest": _resize(coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    "resize_nearest_exact": _resize(
        coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil"
    ),
    "resize_cubic": _resize(coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75),
    "float64": _double,
}
"""Rewrites by name, in the order in which they are tried. recipe.yaml lists them under `edits`."""


def forms(graph: Graph, rewrite: str) -> Iterator[EquivalentForm]:
    """Yield the forms of one rewrite, in the order of the graph."""
    find = REWRITES[rewrite]
    for node in graph.model.graph.node:
        if node.input and not node.domain and (form := find(graph, node)) is not None:
            yield form


def edit(path: Path, edits: Sequence[GraphEdit]) -> tuple[GraphEdit, ...]:
    """Write the edits into the file at `path`; return them with the digests of the file.

    Raises ExportError if the file lacks the tensor, or its digest differs from the recipe.
    """
    applied = []
    for requested in edits:
        before = Digest.from_file(path)
        graph = Graph.load(path)
        by_name = {form.at: form for form in forms(graph, requested.rewrite)}
        missing = [name for name in requested.at if name not in by_name]
        if missing or (requested.before is not None and requested.before != before):
            raise ExportError(
                f"the edit '{requested.rewrite}' does not fit the file with the SHA-256 "
                f"{before.hex}{', which has no place at ' + missing[0] if missing else ''}. "
                "Export with the versions that recipe.yaml names, or run gate mend again."
            )
        for name in requested.at:
            _apply(graph.model.graph, by_name[name])
        try:
            onnx.checker.check_model(graph.model)
        except onnx.checker.ValidationError as error:
            raise ExportError(
                f"the edit '{requested.rewrite}' makes no valid file: {first_line(error)}."
            ) from error
        save_model(graph.model, path)
        after = Digest.from_file(path)
        applied.append(requested.model_copy(update={"before": before, "after": after}))
    return tuple(applied)


def _apply(graph: onnx.GraphProto, form: EquivalentForm) -> None:
    """Replace the node that computes the form's tensor; remove nodes that are then unused."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += form.nodes if form.at in node.output else [node]
    graph.initializer.extend(form.constants)
    unused = set(form.replaced) - {form.at}
    read = _read(nodes) | {value.name for value in graph.output}
    for name in reversed(form.replaced):
        if name in unused - read:
            nodes = [node for node in nodes if name not in node.output]
            read = _read(nodes) | {value.name for value in graph.output}
    replace_messages(graph.node, nodes)


def _read(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Return the tensors that these nodes and their subgraphs read."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for inner in subgraphs(node):
            names |= _read(inner.node) | {value.name for value in inner.output}
    return names


# Replacements of torch functions that exporters lack or convert badly. They are active while a copy
# of the model is exported; the user's source is not changed.


def _attention(  # noqa: PLR0913, PLR0917 - the parameters are those of torch
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - a model in eval mode has none
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention by two products and a softmax."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1)
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value


_HEADS = inspect.signature(functional.multi_head_attention_forward)


def _multi_head_attention(*arguments: Any, **options: Any) -> Any:
    """Compute nn.MultiheadAttention with products and a softmax, one projection at a time.

    PyTorch's combined operators are avoided, because exporters lack them for a traced graph.
    """
    bound = _HEADS.bind(*arguments, **options)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    unsupported = (a.bias_k, a.bias_v, a.static_k, a.static_v)
    if a.query.dim() != 3 or a.add_zero_attn or any(tensor is not None for tensor in unsupported):
        return functional.multi_head_attention_forward(*arguments, **options)
    weights = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    weights = weights if a.use_separate_proj_weight else a.in_proj_weight.chunk(3)
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)

    def projected(x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the projection, shape (batch, heads, length, width)."""
        projection = functional.linear(x, weights[index], biases[index])
        projection = projection.reshape(x.shape[0], x.shape[1], a.num_heads, -1)
        return projection.permute(1, 2, 0, 3)

    query, key, value = (projected(x, at) for at, x in enumerate((a.query, a.key, a.value)))
    scores = query @ key.permute(0, 1, 3, 2) * (1.0 / math.sqrt(query.shape[-1]))
    if a.attn_mask is not None:
        mask = _added(a.attn_mask, scores)
        scores = scores + (mask if mask.dim() == 2 else mask.reshape(scores.shape))
    if a.key_padding_mask is not None:
        scores = scores + _added(a.key_padding_mask, scores)[:, None, None, :]
    shares = torch.softmax(scores, -1)
    joined = (shares @ value).permute(2, 0, 1, 3).reshape(a.query.shape)
    output = functional.linear(joined, a.out_proj_weight, a.out_proj_bias)
    if not a.need_weights:
        return output, None
    return output, shares.mean(1) if a.average_attn_weights else shares


def _added(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return what a mask adds to the scores; for bools, -inf where they are True."""
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(
        mask, -math.inf
    )


def _avg_pool2d(  # noqa: PLR0913, PLR0917 - the parameters are those of torch
    x: torch.Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Compute pooling with `divisor_override`, which exporters ignore, from means of whole
    windows."""
    if divisor_override is None or ceil_mode:
        return functional.avg_pool2d(
            x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )
    sizes = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
    means = functional.avg_pool2d(x, kernel_size, stride, padding)
    return means * (math.prod(sizes * (2 // len(sizes))) / divisor_override)


def _scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Compute the mean, which ONNX lacks, by sums and counts."""
    if reduce != "mean" or not x.is_floating_point():
        return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)
    sums = torch.zeros_like(x).scatter_add(dim, index, src)
    counts = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(src))
    if include_self:
        return (x + sums) / (1.0 + counts)
    return torch.where(counts > 0.0, sums / counts.clamp(min=1.0), x)


def _cdist(
    x: torch.Tensor,
    y: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = "",  # noqa: ARG001 - the parameters are those of torch
) -> torch.Tensor:
    """Compute distances of any order, for which exporters omit the absolute value."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    distances: torch.Tensor = torch.linalg.vector_norm(difference, ord=p, dim=-1)
    return distances


def _log1p_of(x: torch.Tensor) -> torch.Tensor:
    is_small = x.abs() < _SMALL
    within = torch.where(is_small, x, torch.zeros_like(x))
    return torch.where(is_small, 2.0 * torch.atanh(within / (within + 2.0)), torch.log(1.0 + x))


FUNCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "scaled_dot_product_attention": ((functional.scaled_dot_product_attention,), _attention),
    "multi_head_attention": ((functional.multi_head_attention_forward,), _multi_head_attention),
    "avg_pool2d": ((functional.avg_pool2d,), _avg_pool2d),
    "scatter_reduce": ((torch.scatter_reduce, torch.Tensor.scatter_reduce), _scatter_reduce),
    "cdist": ((torch.cdist,), _cdist),
    "logaddexp": (
        (torch.logaddexp, torch.Tensor.logaddexp),
        lambda a, b: torch.maximum(a, b) + functional.softplus(-(a - b).abs()),
    ),
    "logsigmoid": ((functional.logsigmoid,), lambda x: -functional.softplus(-x)),
    "log1p": ((torch.log1p, torch.Tensor.log1p, torch.special.log1p), _log1p_of),
    "expm1": (
        (torch.expm1, torch.Tensor.expm1, torch.special.expm1),
        lambda x: torch.tanh(0.5 * x) * (torch.exp(x) + 1.0),
    ),
}
"""Replaced functions by name, with their replacements. recipe.yaml lists them under `functions`."""


class _Replaced(TorchFunctionMode):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        entries = [FUNCTIONS[name] for name in names]
        self._forms = {f: form for functions, form in entries for f in functions}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._forms.get(func, func)(*args, **(kwargs or {}))


def replaced_functions(names: Collection[str]) -> AbstractContextManager[Any]:
    """Return a context in which the replacements of these torch functions are used."""
    return _Replaced(names) if names else nullcontext()


def find_functions(
    model: nn.Module, example: Mapping[str, NDArray[Any]]
) -> dict[str, tuple[str, ...]]:
    """Return the functions of `FUNCTIONS` that the model calls on the example.

    By name, with the paths of the calling modules. Raises the exceptions of the model.
    """
    by_function = {f: name for name, (functions, _) in FUNCTIONS.items() for f in functions}
    callers: dict[str, dict[str, None]] = {}
    module_stack: list[str] = []

    class _CallRecorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if (name := by_function.get(func)) is not None:
                callers.setdefault(name, {})[module_stack[-1] if module_stack else ""] = None
            return func(*args, **(kwargs or {}))

    def leave(*_: Any) -> None:
        module_stack.pop()

    copied = copy.deepcopy(model).cpu().eval()
    for path, module in copied.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: module_stack.append(path))
        module.register_forward_hook(leave)
    arrays = [torch.from_numpy(np.ascontiguousarray(array)) for array in example.values()]
    call = ForwardSignature(copied, tuple(example))
    with torch.no_grad(), _CallRecorder():
        call(copied, arrays)
    return {name: tuple(callers[name]) for name in FUNCTIONS if name in callers}
