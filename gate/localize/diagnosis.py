"""Diagnosis of a divergent value: from the value to a fault code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from gate.localize import layer_weights
from gate.localize.file_graph import STEPPED, FileGraph
from gate.localize.layer_deviations import Deviation
from gate.localize.layer_weights import Detail, Floats, all_tensors, tensors_around, tensors_of
from gate.localize.model_runner import ComputedValue, class_name
from gate.localize.module_paths import computes
from gate.localize.node_differences import format_value, node_differences, setting
from gate.localize.trial_runs import TrialRuns
from gate.localize.value_matching import ValueLayout
from gate.onnx_file.reading import attributes
from gate.records.localization import FaultCode, LayerFault
from gate.reference.onnx_reference import OnnxNode, OnnxReference
from gate.storage.arrays import OutputArray

_WINDOW = {"strides": ("stride", 1), "pads": ("padding", 0), "dilations": ("dilation", 1)}

_POOL = {**_WINDOW, "kernel_shape": ("kernel_size", None), "ceil_mode": ("ceil_mode", 0)}

_NORMS = ("BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization")

_SETTINGS: dict[str, Mapping[str, tuple[str, Any]]] = {
    **{name: {**_WINDOW, "group": ("groups", 1)} for name in ("Conv", "ConvTranspose")},
    "MaxPool": _POOL,
    "AveragePool": {**_POOL, "count_include_pad": ("count_include_pad", 0)},
    **{name: {"epsilon": ("eps", 1e-5)} for name in _NORMS},
    "LeakyRelu": {"alpha": ("negative_slope", 0.01)},
    "Elu": {"alpha": ("alpha", 1.0)},
    "Gelu": {"approximate": ("approximate", "none")},
}
"""For each operator, its attributes with (attribute of the module, default of the operator)."""

_CONSTANTS = (
    ("eps", ("Add",), (0, 1)),
    ("variance_epsilon", ("Add",), (0, 1)),
    ("min_val", ("Clip",), (1,)),
    ("max_val", ("Clip",), (2,)),
    ("scale", STEPPED, (1,)),
    ("zero_point", STEPPED, (2,)),
)
"""Attributes of modules, with the operators that read them as a constant and its input. An Add
reads an epsilon if a Sqrt follows, and no other Sqrt follows an Add."""

_PADDING_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}
"""`padding_mode` of a convolution to `mode` of Pad."""

_MEANS = ("ReduceMean", "GlobalAveragePool")
"""Operators that compute batch statistics. Exporters write a BatchNorm without running statistics
as a BatchNormalization that reads their results."""

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
"""Activation modules by the sorted operators that exporters write for them, without constants."""

_ACTIVATIONS = {*_FUNCTIONS.values(), "ReLU6", "Hardtanh", "GELU", "Softmin"}


def mismatched_activation(module: nn.Module, nodes: Iterable[onnx.NodeProto]) -> str | None:
    """Return the activation that the nodes compute, if the module is a different activation."""
    operators = sorted(node.op_type for node in nodes if node.op_type != "Constant")
    kind = class_name(module)
    if kind not in _ACTIVATIONS:
        return None
    function = _FUNCTIONS.get(tuple(operators)) or _gelu_variant(operators)
    if kind == "GELU":
        kind = "GELU" if getattr(module, "approximate", "none") == "none" else "GELU by tanh"
    return None if function == kind else function


def _gelu_variant(operators: list[str]) -> str | None:
    kinds = set(operators)
    if "Erf" in kinds and kinds <= {"Erf", "Mul", "Add", "Div"}:
        return "GELU"
    return "GELU by tanh" if {"Tanh", "Add"} <= kinds <= {"Tanh", "Add", "Mul", "Pow"} else None


def differing_settings(module: nn.Module, nodes: Sequence[onnx.NodeProto]) -> Iterator[Detail]:
    """Yield the settings in which a node differs from the module."""
    yield from _padding_mode(module, nodes)
    yield from _reset_gate(module, nodes)
    padded = any(node.op_type == "Pad" for node in nodes)  # then `pads` is only a part of it
    for node in nodes:
        node_attributes = attributes(node)
        for name, (attribute, default) in _SETTINGS.get(node.op_type, {}).items():
            if not hasattr(module, attribute) or (name == "pads" and padded):
                continue
            actual, want = node_attributes.get(name, default), getattr(module, attribute)
            if actual is not None and not _is_equal_setting(actual, want, name):
                text = actual.decode() if isinstance(actual, bytes) else actual
                yield setting(name, format_value(text), want, attribute)


def compared_settings(module: nn.Module, nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """Return the attributes of the module that were compared with those of the nodes."""
    names = (name for node in nodes for name, _ in _SETTINGS.get(node.op_type, {}).values())
    return [name for name in dict.fromkeys(names) if hasattr(module, name)]


def has_training_mode(
    nodes: Sequence[onnx.NodeProto], constant: Callable[[str], bool] = lambda _: False
) -> bool:
    """Return whether a BatchNorm uses batch statistics or a Dropout is random.

    constant: returns whether a tensor is constant; its statistics are no batch statistics, such as
    those of a standardized weight.
    """
    means = {name for node in nodes if node.op_type in _MEANS for name in node.output}
    for node in nodes:
        training_mode = attributes(node).get("training_mode")
        by_batch = training_mode == 1 or bool(means & set(node.input[3:5]))
        if node.op_type == "BatchNormalization" and by_batch and not constant(node.input[0]):
            return True
        if node.op_type == "Dropout" and len(node.input) > 2:
            return True
    return False


def _padding_mode(module: nn.Module, nodes: Sequence[onnx.NodeProto]) -> Iterator[Detail]:
    want = getattr(module, "padding_mode", None)
    if want not in _PADDING_MODES:
        return
    pads = [node for node in nodes if node.op_type == "Pad"]
    modes = [mode.decode() for node in pads if (mode := attributes(node).get("mode"))]
    actual = set(modes or ["constant"])
    if _PADDING_MODES[want] not in actual:
        yield setting("padding mode", ", ".join(actual), want, "padding_mode")


def _reset_gate(module: nn.Module, nodes: Sequence[onnx.NodeProto]) -> Iterator[Detail]:
    """Yield the difference if a GRU applies the reset gate before the hidden weights.

    PyTorch applies it after the product with them."""
    cells = [node for node in nodes if node.op_type == "GRU" and isinstance(module, nn.GRU)]
    if not all(attributes(node).get("linear_before_reset") for node in cells):
        yield {"code": "reset_gate"}


def _is_equal_setting(actual: Any, want: Any, name: str) -> bool:
    if isinstance(actual, bytes):
        return bool(actual.decode() == want)
    if isinstance(actual, float):
        return isinstance(want, float | int) and math.isclose(actual, want, rel_tol=1e-6)
    actual_sizes = [actual] if isinstance(actual, int) else list(actual)
    try:
        expected_sizes = [int(size) for size in ([want] if isinstance(want, bool | int) else want)]
    except (TypeError, ValueError):  # padding='same', stride=None, or another meaning of the name
        return True
    if name == "pads" and len(expected_sizes) > 1:
        expected_sizes = expected_sizes * 2
    if 1 in (len(actual_sizes), len(expected_sizes)):
        return len({*actual_sizes, *expected_sizes}) == 1
    return actual_sizes == expected_sizes


_TF32_ERROR = 2.0**-12
"""Typical relative error (rms) of rounding to a 10-bit mantissa."""

_MAX_NODES = 4
"""Maximum number of nodes that a fault names."""

_KEY_MASKS = {"Attention": 3, "QAttention": 5, "MultiHeadAttention": 4}
"""Index of the mask input (a mask or key lengths) of ONNX Runtime's fused operators."""

_RECURRENT = ("LSTM", "GRU", "RNN")

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Exp", "Log", "Sqrt", "Clip", "Where", "Softmax")
"""Operators that exporters do not write between a layer's input and its product."""

_QUANTIZED = re.compile(
    r"uantizeLinear$|Integer(ToFloat)?$|^QLinear|^Q(Gemm|Attention|MoE|Embed|Ordered)|"
    r"^DynamicQuantize|^MatMul(NBits|Bnb4)$|^GatherBlockQuantized$"
)

_FLOAT_OPERANDS = {"DynamicQuantizeMatMul": 4, "MatMulNBits": 5, "QAttention": 2}
"""Index of the float bias of quantized operators. Their other constants are integers, scales and
zero points."""

_MAX_QUANTIZATION_ERROR = 0.25
"""Relative error (rms) of a layer that 8-bit or 4-bit quantization can explain. Well calibrated
layers have 0.005 to 0.03 with 8 bits and 0.1 with 4 bits."""


@dataclass(frozen=True)
class DivergentValue:
    """A value that is wrong although the values from which it is computed are right."""

    value: ComputedValue
    tensor: str
    missing: bool
    """True if no node computes the value, and its consumers read `tensor` instead."""
    folded: ComputedValue | None
    """The layer before this BatchNorm, if one node computes both."""
    alone: Deviation
    overwritten: Mapping[str, str] = field(default_factory=dict)
    """Tensors of values that PyTorch has already overwritten in place, with the writer."""
    got: ComputedValue | None = None
    """A source value that was computed by code between modules and has no tensor in the file."""
    unmatched: tuple[ComputedValue, ...] = ()
    """Source values of modules without a tensor: they are folded or fused, or the file computes
    them differently."""
    exchanged: Mapping[str, str] = field(default_factory=dict)
    """Inputs that the file reads, with the right ones, if exchanging them makes the value right."""
    depends_on: tuple[str, ...] = ()
    """Inputs on which the value depends without another matched value in between."""

    @property
    def code(self) -> ComputedValue:
        """Return the value of the code or module that is likeliest at fault."""
        return self.got or self.value

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of the modules that may be at fault, the likeliest first."""
        paths = (self.value.path,)
        return (self.folded.path, *paths) if self.folded else paths


@dataclass(frozen=True)
class _Segment:
    """The nodes that compute a divergent value from the nearest cuts of the graph."""

    indices: Sequence[int]
    nodes: Sequence[onnx.NodeProto]
    sources: Sequence[str]
    """The cuts."""


def _fault(path: str, code: FaultCode, **params: Any) -> LayerFault:
    present = {name: value for name, value in params.items() if value is not None}
    return LayerFault(module=path, code=code, params=present)


class Diagnoser:
    """Finds the cause of a divergent value in the file and in the model."""

    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        graph: FileGraph,
        layout: ValueLayout,
        *,
        cuda: bool,
        reduced: bool = False,
        quantized: bool = False,
        fake_quantized: bool = False,
        loose: Callable[[], Mapping[str, Floats]] = dict,
        computed: Callable[[], Iterable[Floats]] = tuple,
        trials: TrialRuns | None = None,
    ) -> None:
        """cuda: the file ran on CUDA. reduced: rounding to 16 bits is not a cause. quantized: the
        policy allows quantization. fake_quantized: the model itself rounds to the steps of a
        quantized type, which is then not a cause. loose: returns the tensors that code outside of
        modules may use. computed: returns those that forward computes without the inputs. trials:
        finds causes by runs with other settings or axes."""
        self._model = model
        self._trials = trials
        self._loose = cache(loose)
        self._computed = cache(lambda: tuple(computed()))
        self._named = all_tensors(model)
        self._graph = graph
        self._cuts = layout.cuts
        self._tensors = layout.names
        self._cuda = cuda
        self._reduced = reduced
        self._quantized = quantized
        self._fake_quantized = fake_quantized

    def cause(self, suspect: DivergentValue) -> LayerFault:
        """Return the most certain fault that explains a divergent value."""
        if suspect.missing:
            return _fault(suspect.value.path, "missing_value", tensor=suspect.tensor)
        segment = self._segment(suspect.tensor)
        for find_fault in (
            self._training_fault,
            self._weight_fault,
            self._node_fault,
            self._settings_fault,
            self._trial_fault,
            self._shape_fault,
            self._precision_fault,
            self._quantization_fault,
            self._overwrite_fault,
            self._unread_input_fault,
            self._changed_file_fault,
            self._code_fault,
        ):
            fault = find_fault(suspect, segment)
            if fault is not None:
                return fault
        return self._operators_fault(suspect, segment)

    def _segment(self, tensor: str) -> _Segment:
        indices, cuts = self._graph.segment(tensor, self._cuts)
        return _Segment(indices, [self._graph.nodes[index] for index in indices], cuts)

    def _training_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        is_training = has_training_mode(segment.nodes, self._graph.is_constant)
        return _fault(suspect.value.path, "training_mode") if is_training else None

    def _operators_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault:
        nodes = segment.nodes
        module = self._model.get_submodule(suspect.paths[0])
        function = mismatched_activation(module, nodes)
        if isinstance(module, OnnxNode) and len(nodes) == 1 and not suspect.unmatched:
            operator = nodes[0].op_type
            function = None if operator == module.call.operator else operator
        params: Detail = {"nodes": _operators(nodes), "kind": class_name(module)}
        if function is not None:
            params |= {"variant": "of", "function": function}
        else:
            params |= self._excluded_causes(suspect, segment)
        return _fault(suspect.paths[0], "operators", **params)

    def _excluded_causes(self, suspect: DivergentValue, segment: _Segment) -> Detail:
        """Return the causes that are excluded, and why.

        The details name the module's tensors that match the file and those that could not be
        compared.
        """
        same, uncompared = self._compared_tensors(suspect, segment)
        details: list[Detail] = [{"code": "same", "names": same}] if same else []
        if suspect.unmatched:
            upstream = list(dict.fromkeys(value.path for value in suspect.unmatched))
            if isinstance(self._model, OnnxReference):
                count, last = len(upstream) + 1, suspect.value.path
                details.append(
                    {"code": "replaces", "count": count, "first": upstream[0], "last": last}
                )
            else:
                details.append({"code": "precedes", "names": upstream})
        elif uncompared:
            details.append({"code": "not_compared" if same else "no_tensors", "names": uncompared})
        excluded = ["training mode", "shape", *([] if self._reduced else ["16 bits"])]
        excluded += ["weights"] if same and not uncompared else []
        return {
            "details": details,
            "excluded": excluded,
            "variant": "uncompared" if uncompared else None,
        }

    def reads_other_output(self, suspect: DivergentValue, faulty: Iterable[DivergentValue]) -> bool:
        """Return whether the suspect is computed from another output of a faulty node.

        That output is not a value of the model, so it can't be replaced by a right one."""
        indices, _ = self._graph.segment(suspect.tensor, self._cuts)
        nodes = {self._graph.producer.get(fault.tensor) for fault in faulty}
        producer = self._graph.producer.get(suspect.tensor)
        return any(index in nodes for index in indices if index != producer)

    def missing_module(self, suspect: DivergentValue) -> ComputedValue | None:
        """Return the first unmatched value that the file does not compute, or computes differently
        in separate nodes; None if all unmatched values are folded or fused into the suspect.

        A value has separate nodes if the file has at least as many operators of its kind as the
        model has modules. It is not computed if no node reads the inputs of its module.
        """
        if not suspect.unmatched:
            return None
        indices, sources = self._graph.segment(suspect.tensor, self._cuts)
        for value in suspect.unmatched:
            read = [self._tensors.get(number) for number in value.inputs]
            if read and None not in read and not set(read) & set(sources):
                return value
            if self._is_in_file(value, indices) and not self._differing_settings(value, indices):
                continue
            modules = [*suspect.unmatched, *([] if suspect.value.functional else [suspect.value])]
            required = len({(v.path, v.call) for v in modules if v.kind == value.kind})
            weight = getattr(self._model.get_submodule(value.path), "weight", None)
            axes = weight.dim() if isinstance(weight, torch.Tensor) else 0
            if sum(self._computes_kind(index, value.kind, axes) for index in indices) >= required:
                return value
        return None

    def _is_in_file(self, value: ComputedValue, indices: Sequence[int]) -> bool:
        """Return whether the nodes read all parameters of the value's module unchanged."""
        comparison = self._compare_module(value, indices)
        return bool(comparison.same) and not (comparison.differences or comparison.unpaired)

    def _compare_module(
        self, value: ComputedValue, indices: Sequence[int]
    ) -> layer_weights.WeightComparison:
        """Compare the tensors of the value's module with nodes that also compute other modules."""
        module, constants = self._model.get_submodule(value.path), self._graph.constants(indices)
        comparison = layer_weights.comparison(
            module,
            value.path,
            constants,
            model_tensors=self._named,
            folded=True,
            reordered=self._has_gates(indices),
            computed=self._computed,
        )
        differences = layer_weights.with_recurrent_differences(
            comparison.differences, module, value.path, constants
        )
        return replace(comparison, differences=tuple(differences))

    def _has_gates(self, indices: Sequence[int]) -> bool:
        """Return whether there is a recurrent operator, which reorders the rows of its weights."""
        return any(self._graph.nodes[index].op_type in _RECURRENT for index in indices)

    def _differing_settings(self, value: ComputedValue, indices: Sequence[int]) -> list[Detail]:
        """Return the settings in which the nodes of a value's module differ from it.

        They are those of its kind that read its tensors, or the only one of its kind."""
        module, nodes = self._model.get_submodule(value.path), self._graph.nodes
        same_kind = [index for index in indices if computes(nodes[index].op_type, value.kind)]
        if len(same_kind) != 1:
            same_kind = [i for i in same_kind if self._compare_module(value, [i]).same]
        return list(differing_settings(module, [nodes[index] for index in same_kind]))

    def _computes_kind(self, index: int, kind: str, axes: int) -> bool:
        """Return whether a node computes a module of this kind, with a weight of `axes` axes."""
        if not computes(self._graph.nodes[index].op_type, kind):
            return False
        constants = self._graph.constants([index]).values()
        return not axes or any(array.ndim == axes for array in constants)

    def unmatched_fault(self, value: ComputedValue, behind: str) -> LayerFault:
        """Return the fault if no tensor has a value and the next tensor `behind` is wrong."""
        indices, _ = self._graph.segment(behind, self._cuts)
        for difference in self._compare_module(value, indices).differences:
            return _fault(difference.module, "weights", details=[difference.detail])
        if settings := self._differing_settings(value, indices):
            return _fault(value.path, "settings", details=settings)
        return _fault(value.path, "missing_value", variant="unmatched", tensor=behind)

    def missing_outputs(self, positions: Sequence[str]) -> LayerFault:
        """Return the fault if the model returns more outputs than the file.

        positions: those of the missing outputs, from 1; empty if unknown."""
        params = {"variant": "places", "places": positions} if positions else {}
        return _fault("", "not_returned", **params)

    def wrong_output(self, name: str, right: str) -> LayerFault:
        """Return the fault if an output is the wrong tensor although all layers are right."""
        if right in self._graph.outputs:
            return _fault("", "output_order", name=name, right=right)
        nodes = _operators(self._segment(name).nodes)
        variant = "followed" if nodes else "tensor"
        return _fault("", "output_order", variant=variant, name=name, right=right, nodes=nodes)

    def early_output(self, name: str, returned: ComputedValue) -> LayerFault:
        """Return the fault if an output has the values of a layer, and no node computes what the
        model's code makes of them."""
        layer = returned.path or name
        return _fault("", "missing_value", variant="output", name=name, layer=layer)

    def constant_output(self, name: str) -> LayerFault | None:
        """Return the fault if an output that the inputs do not change has wrong values."""
        return _fault("", "constant_output", name=name) if self._graph.is_constant(name) else None

    def unread_inputs(self, inputs: Sequence[str]) -> LayerFault:
        """Return the fault if the file lacks inputs that change the model's outputs."""
        return _fault("", "unread_input", inputs=inputs)

    def exchanged_inputs(self, exchanged: Mapping[str, str]) -> LayerFault:
        """Return the fault if the file exchanges inputs."""
        inputs = sorted({*exchanged, *exchanged.values()})
        return _fault("", "input_order", inputs=inputs, pairs=sorted(exchanged.items()))

    def _unread_input_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        path, nodes = suspect.paths[0], segment.nodes
        if unread := [name for name in suspect.depends_on if name not in segment.sources]:
            return _fault(path, "unread_input", inputs=unread)
        sums = {name for node in nodes if node.op_type == "ReduceSum" for name in node.output}
        for node in nodes:
            index = _KEY_MASKS.get(node.op_type) if node.domain == "com.microsoft" else None
            if index is not None and index < len(node.input) and node.input[index] in sums:
                return _fault(path, "unread_input", variant="mask", nodes=_operators([node]))
        return None

    def _weight_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        constants, nodes = self._constants(suspect, segment.indices), segment.nodes
        value, layer = suspect.value, suspect.folded
        module = self._model.get_submodule(value.path)
        if layer is not None and any(_QUANTIZED.search(node.op_type) for node in nodes):
            return None  # scaled, then rounded, so that no number equals one of the model
        if layer is None:
            differences = [*self._compare_tensors(suspect, segment.indices).differences]
            differences += layer_weights.affine_differences(
                module, value.path, constants, format_=self._format
            )
            transposed = layer_weights.transposed_weight(module, value.path, nodes, constants)
            differences += [] if transposed is None else [transposed]
            differences = layer_weights.with_recurrent_differences(
                differences, module, value.path, constants
            )
            # Differences of the module itself come first.
            differences.sort(key=lambda difference: difference.module != value.path)
        else:
            pair = (self._model.get_submodule(layer.path), module)
            differences = layer_weights.folded_differences(
                pair, (layer.path, value.path), constants, format_=self._format
            )
        if self._reduced:
            differences = [each for each in differences if not each.in_16_bits]
        if not differences:
            return None
        # Prefer different numbers to rounded ones, and a reordered weight to its bias.
        first = min(differences, key=lambda each: (each.rounded_to is not None, -each.reordered))
        variant = "by_code" if first.by_code else None
        if first.rounded_to:
            variant = "rounded_reduced" if self._reduced else "rounded"
        details = [first.detail, *_related_details(first, differences)]
        return _fault(first.module, "weights", variant=variant, details=details)

    @property
    def _format(self) -> str | None:
        return "float16" if self._reduced else None

    def _compare_tensors(
        self, suspect: DivergentValue, indices: Sequence[int]
    ) -> layer_weights.WeightComparison:
        """Compare the module's tensors with the constants that nodes read.

        If code between two calls computed the value, the tensors that this code may have used are
        compared as well: parameters first and, if none of them differs, constants that modules
        returned.
        """
        value, constants = suspect.value, self._constants(suspect, indices)
        compare = partial(
            layer_weights.comparison,
            self._model.get_submodule(value.path),
            value.path,
            constants,
            model_tensors=self._named,
            folded=not all(self._is_in_file(upstream, indices) for upstream in suspect.unmatched),
            computed=self._computed,
        )
        fused: dict[str, Floats] = {}
        for upstream in suspect.unmatched:
            fused |= tensors_of(self._model.get_submodule(upstream.path), upstream.path)
        if not value.functional:
            return compare(loose=fused or None, reordered=self._has_gates(indices))
        loose = {**fused, **self._loose(), **tensors_around(self._model, value.path)}
        comparison = compare(loose={name: loose[name] for name in loose if name in self._named})
        if not (differences := self._certain(comparison.differences)):
            # A constant that a module returned may have been transposed before it was stored.
            differences = self._certain(compare(loose=loose, reordered=True).differences)
        return replace(comparison, differences=differences)

    def _certain(
        self, differences: Iterable[layer_weights.WeightDifference]
    ) -> tuple[layer_weights.WeightDifference, ...]:
        """Return the differences without those of numbers that the file has under their names.

        Code reads many numbers, such as an epsilon or a length. None is the counterpart of a
        parameter that other nodes read.
        """
        numbers = {name for name, array in self._graph.weights.items() if array.size == 1}
        return tuple(
            difference
            for difference in differences
            if difference.detail["code"] != "not_computed"
            or difference.detail["name"] not in numbers
        )

    def _compared_tensors(
        self, suspect: DivergentValue, segment: _Segment
    ) -> tuple[list[str], list[str]]:
        """Return the names of the module's matching tensors, and of those not compared."""
        if suspect.folded is not None:
            return [], []
        comparison = self._compare_tensors(suspect, segment.indices)
        prefix_length = len(suspect.value.path) + 1 if suspect.value.path else 0
        module = self._model.get_submodule(suspect.value.path)
        same = [name[prefix_length:] for name in comparison.same]
        same += compared_settings(module, segment.nodes)
        return same, [name[prefix_length:] for name in comparison.unpaired]

    def _node_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        if not isinstance(self._model, OnnxReference):
            return None
        path, rank = suspect.value.path, len(suspect.value.shape)
        differences = list(
            node_differences(
                self._model, self._graph, path, segment.nodes, rank, reduced=self._reduced
            )
        )
        if not differences:
            return None
        code = differences[0][0]
        return _fault(path, code, details=[detail for kind, detail in differences if kind == code])

    def _settings_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        if suspect.value.functional and suspect.folded is None:
            return None
        for path in suspect.paths:
            module = self._model.get_submodule(path)
            differences = list(differing_settings(module, segment.nodes))
            differences += self._differing_constants(module, segment.nodes)
            if differences:
                return _fault(path, "settings", details=differences)
        return None

    def _trial_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        """Return the fault if one other setting of the model, or other axes in the file, explain
        the value."""
        if (trials := self._trials_of(segment)) is None:
            return None
        number, path = suspect.value.number, suspect.value.path
        before = [value.path for value in suspect.unmatched]
        paths = [*suspect.paths, *before, path.rpartition(".")[0]]
        if detail := trials.changed_setting(number, paths, self._numbers(segment.indices)):
            path = detail["setting"].rpartition(".")[0]
        elif (detail := trials.lost_input(number)) is None:
            detail = trials.changed_axes(number)
            path = suspect.code.path
        return _fault(path, "settings", variant="trial", details=[detail]) if detail else None

    def _changed_file_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        """Return the fault if the nodes are right with another tensor than the model's code passes
        on, or with one change of a node."""
        if (trials := self._trials_of(segment)) is None:
            return None
        value, path = suspect.value, suspect.code.path
        if (detail := trials.changed_input(value.number)) is not None:
            path = value.path if value.functional else value.path.rpartition(".")[0]
        elif not mismatched_activation(self._model.get_submodule(value.path), segment.nodes):
            detail = trials.changed_node(value.number)
        return _fault(path, "settings", variant="trial", details=[detail]) if detail else None

    def _trials_of(self, segment: _Segment) -> TrialRuns | None:
        """Return the runs if a change that makes the nodes right shows what is wrong with them."""
        quantized = any(_QUANTIZED.search(node.op_type) for node in segment.nodes)
        return None if quantized or isinstance(self._model, OnnxReference) else self._trials

    def _numbers(self, indices: Sequence[int]) -> list[float]:
        """Return the numbers in the attributes and small constants of nodes, with 0 and 1."""
        arrays = [array for array in self._graph.constants(indices).values() if array.size <= 8]
        for index in indices:
            for value in attributes(self._graph.nodes[index]).values():
                arrays += [np.array(value)] if isinstance(value, int | float | list) else []
        numbers = [0, 1, *(n for a in arrays if a.dtype.kind in "if" for n in a.ravel().tolist())]
        return list(dict.fromkeys(numbers))

    def _differing_constants(
        self, module: nn.Module, nodes: Sequence[onnx.NodeProto]
    ) -> Iterator[Detail]:
        """Yield the constants that nodes read in which they differ from the module: epsilon of a
        norm, limits of a Clip, scale and zero point of a fake quantization."""
        under_roots = {name for node in nodes if node.op_type == "Sqrt" for name in node.input}
        sums = [node for node in nodes if node.op_type == "Add" and node.output[0] in under_roots]
        readers = [node for node in nodes if node.op_type != "Add"] + sums * (len(sums) == 1)
        for name, operators, indices in _CONSTANTS:
            want = getattr(module, name, None)
            if not isinstance(want, torch.Tensor | float | int):
                continue
            expected = np.ravel(torch.as_tensor(want).detach().numpy()).astype(np.float64)
            for node in readers:
                if node.op_type not in operators:
                    continue
                read = [self._graph.constant(node.input[i]) for i in indices if i < len(node.input)]
                got = next((array for array in read if array is not None), None)
                if got is None or got.size != expected.size:
                    continue
                pairs = zip(got.ravel().tolist(), expected.tolist(), strict=True)
                unequal = [pair for pair in pairs if not math.isclose(*pair, rel_tol=1e-6)]
                if unequal:
                    actual, required = map(format_value, unequal[0])
                    yield setting(f"{name} of {node.op_type}", actual, required, name)
                    break

    def _shape_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        mismatch = suspect.alone.mismatch
        if mismatch is None:
            return None
        shapes = {name: value for name, value in mismatch.items() if name != "code"}
        params = {"variant": None if shapes else "unrun", "nodes": _operators(segment.nodes)}
        return _fault(suspect.paths[0], "shape", **params, **shapes)

    def _precision_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        path = suspect.paths[0]
        narrow = {onnx.TensorProto.BFLOAT16: "bfloat16"}
        if not self._reduced:
            narrow[onnx.TensorProto.FLOAT16] = "float16"
        for node in segment.nodes:
            to = attributes(node).get("to") if node.op_type == "Cast" else None
            if to in narrow:
                return _fault(
                    path,
                    "precision_cast",
                    variant="reduced" if self._reduced else None,
                    format=narrow[to],
                    nodes=_operators([node]),
                )
        error = suspect.alone.relative
        if self._cuda and not self._reduced and _TF32_ERROR / 8 <= error <= _TF32_ERROR * 8:
            return _fault(path, "tf32", error=error)
        return None

    def _quantization_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        quantized = [node for node in segment.nodes if _QUANTIZED.search(node.op_type)]
        has_integers = any(map(self._has_integers_only, segment.nodes))
        if not quantized or (self._fake_quantized and not has_integers):
            return None
        if any(_QUANTIZED.search(class_name(module)) for module in self._model.modules()):
            return None  # the reference is a quantized file
        few = any("Bits" in node.op_type or "Bnb" in node.op_type for node in quantized)
        error = suspect.alone.relative
        is_integer = suspect.value.sketch.dtype.kind != "f"  # a choice between rounded values
        is_lossy = not (is_integer or error <= _MAX_QUANTIZATION_ERROR)  # also for NaN
        variant = "lossy" if is_lossy else "allowed" if self._quantized else None
        return _fault(
            suspect.paths[0],
            "int8",
            variant=variant,
            bits="a few" if few else "8",
            nodes=_operators(quantized),
            error=None if is_integer else error,
        )

    def _constants(self, suspect: DivergentValue, indices: Sequence[int]) -> dict[str, OutputArray]:
        """Return the constants that nodes read, by name.

        A constant that is only the quantized form of a model tensor is replaced by that tensor.
        """
        constants = self._graph.constants(
            index for index in indices if not self._has_integers_only(self._graph.nodes[index])
        )
        for index in indices:
            node = self._graph.nodes[index]
            bias = _FLOAT_OPERANDS.get(node.op_type, len(node.input))
            for name in node.input[bias : bias + 1]:
                if name in self._graph.weights:
                    constants[name] = self._graph.weights[name]
        modules = {*suspect.paths, *(value.path for value in suspect.unmatched)}
        tensors = [
            tensor
            for path in modules
            for tensor in tensors_of(self._model.get_submodule(path), path).values()
        ]
        for name in constants:
            stored = self._graph.dequantized(name)
            if stored is None:
                continue
            for tensor in tensors:
                original = layer_weights.rounded_to_steps(tensor, stored)
                if original is not None:
                    constants[name] = original
                    break
        return constants

    def _has_integers_only(self, node: onnx.NodeProto) -> bool:
        quantized = _QUANTIZED.search(node.op_type) is not None
        return quantized and node.op_type not in ("QuantizeLinear", "DequantizeLinear")

    def _overwrite_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        for tensor in segment.sources:
            if tensor in suspect.overwritten:
                writer = suspect.overwritten[tensor]
                return _fault(suspect.paths[0], "in_place", tensor=tensor, writer=writer)
        return None

    def _code_fault(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        value = suspect.code
        if not value.functional:
            return self._code_before(suspect, segment)
        if self._trials is not None and suspect.got is None:
            value = self._trials.lost_value(value.number) or value
        return _fault(
            value.path,
            "code",
            code_of=value.path,
            before=value.before if value.before != value.path else "",
            nodes=_operators(segment.nodes),
            inputs=segment.sources,
            tensor=suspect.tensor,
        )

    def _code_before(self, suspect: DivergentValue, segment: _Segment) -> LayerFault | None:
        """Return the fault if the file changes the input of a layer whose own node is right."""
        value, nodes = suspect.value, self._graph.nodes
        own = [i for i in segment.indices if computes(nodes[i].op_type, value.kind)]
        own = [i for i in own if self._compare_module(value, [i]).same]
        if suspect.unmatched or not own or self._compare_module(value, own).unpaired:
            return None
        tensor = nodes[own[0]].input[0]
        indices, sources = self._graph.segment(tensor, self._cuts)
        before = [nodes[index] for index in indices]
        if not any(node.op_type in _ARITHMETIC for node in before):
            return None
        container = value.path.rpartition(".")[0]
        params: Detail = {"before": value.path, "nodes": _operators(before), "inputs": sources}
        return _fault(container, "code", code_of=container, tensor=tensor, **params)


def _related_details(
    first: layer_weights.WeightDifference, differences: Sequence[layer_weights.WeightDifference]
) -> list[Detail]:
    """Return the details of other tensors of the same module that differ by more than rounding."""
    if not first.tensor or first.rounded_to:
        return []
    details = {
        each.tensor: each.detail
        for each in reversed(differences)
        if each.module == first.module and each.tensor and not each.rounded_to
    }
    details.pop(first.tensor, None)
    return list(reversed(details.values()))


def _operators(nodes: Sequence[onnx.NodeProto]) -> str:
    """Return the last nodes with their names, as a text."""
    names = [f"{node.op_type} {node.name}".strip() for node in nodes if node.op_type != "Constant"]
    more = len(names) - _MAX_NODES
    before = "" if more <= 0 else "1 node and " if more == 1 else f"{more} nodes and "
    return before + ", ".join(names[-_MAX_NODES:])
