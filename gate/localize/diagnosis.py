"""Why a layer diverges, as far as the file and the numbers tell, and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import onnx
from torch import nn

from gate.localisation import settings
from gate.localisation.graph import FileGraph
from gate.localisation.layout import Layout
from gate.localisation.rows import Deviation
from gate.localisation.tensors import folded, weights
from gate.localisation.tensors.counterparts import Floats
from gate.localisation.tensors.loose import tensor_names, tensors_around
from gate.localisation.values import ComputedValue
from gate.records.localisation import listed

_TF32 = 2.0**-12
"""Typical relative error (rms) of rounding to 10 bits of mantissa."""
_SHOWN = 4
"""Nodes."""
_NAMES = 6
"""Tensors and settings."""
_RECURRENT = ("LSTM", "GRU", "RNN")
_EVAL = "Export in eval mode: model.eval(), training=TrainingMode.EVAL."
WEIGHTS = (
    "Export again from the checkpoint of the reference; if it stays, try "
    "export.do_constant_folding: false."
)
_ROUNDED = (
    "Export in float32, and convert nothing afterwards; or judge what is so on purpose by "
    "--precision reduced."
)
_BFLOAT16 = (
    "Convert to float16, which keeps 11 bits where bfloat16 keeps 8, as --precision reduced "
    "allows; or judge by a policy of your own."
)
_OTHER_MODEL = (
    "Export again from the code and checkpoint of the reference: the file is of another model."
)
_OUTPUTS = "Export with export.output_names as the model returns them, and nothing behind them."
_OPERATOR = (
    "Export again from the code of the reference; if it stays, with another opset, or by another "
    "exporter (torch.onnx.export(..., dynamo=True)); update ONNX Runtime."
)
_QUANTIZED = re.compile(r"QuantizeLinear$|^DequantizeLinear$|Integer$|^QLinear|^MatMulNBits$")
_EIGHT_BITS = "Quantize nothing; or say precision: quantized, as for a quantized twin."
_UNFOUND = (
    "Export again from the code and checkpoint of the reference; if it stays, with another opset, "
    "or by another exporter (torch.onnx.export(..., dynamo=True))."
)
_IN_PLACE = (
    "Export again by PyTorch's own exporter, which follows operations in place; or do without: "
    "nn.ReLU(inplace=False), x = x + y in the place of x += y, clone() before it."
)
_CODE = (
    "Export again, if the file is of other code than the reference. If it stays, look at the "
    "functions that forward calls there (F.interpolate, indexing, integer arithmetic, in-place "
    "changes): write them with operators that the exporter knows, or export with another opset or "
    "exporter."
)


@dataclass(frozen=True)
class Suspect:
    """A value that is wrong although what it was computed from is right."""

    value: ComputedValue
    tensor: str
    missing: bool
    """True if no node computes it, and its readers read `tensor` instead."""
    folded: ComputedValue | None
    """The layer whose BatchNorm this is, where one node computes both."""
    alone: Deviation
    overwritten: Mapping[str, str] = field(default_factory=dict)
    """Tensors with what PyTorch has overwritten in place by then, and who did it."""
    got: ComputedValue | None = None
    """What code between modules computed and it was computed from, if no tensor has that value."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the modules that it may be, the likeliest first."""
        own = (self.value.path,)
        return (self.folded.path, *own) if self.folded else own


@dataclass(frozen=True)
class Cause:
    """What is known about one source."""

    module: str
    """Path of the module at fault."""
    text: str
    """What is wrong, without a full stop."""
    remedy: str


class Detective:
    """Looks for the cause of a source in the file and in the model."""

    def __init__(
        self,
        model: nn.Module,
        graph: FileGraph,
        layout: Layout,
        *,
        cuda: bool,
        reduced: bool = False,
        loose: Callable[[], Mapping[str, Floats]] = dict,
    ) -> None:
        """`cuda`: the file ran there. `reduced`: what 16 bits lose is no cause. `loose`: finds the
        tensors that code may use anywhere, where that is asked."""
        self._model = model
        self._loose = cache(loose)
        self._names = tensor_names(model)
        self._graph = graph
        self._cuts = layout.cuts
        self._cuda = cuda
        self._reduced = reduced

    def cause(self, suspect: Suspect) -> Cause:
        """The first explanation that the evidence gives, from the most certain to the least."""
        if suspect.missing:
            text = f"no node of the file computes it: what follows reads {suspect.tensor}"
            return Cause(suspect.value.path, text, _OTHER_MODEL)
        places, met = self._graph.segment(suspect.tensor, self._cuts)
        nodes = [self._graph.nodes[place] for place in places]
        for evidence in (
            self._training(suspect, nodes),
            self._weights(suspect, places, nodes),
            self._settings(suspect, nodes),
            self._shape(suspect, nodes),
            self._precision(suspect, nodes),
            self._in_place(suspect, met),
            self._code(suspect, nodes, met),
        ):
            if evidence is not None:
                return evidence
        path, shown = suspect.paths[0], _operators(nodes)
        module = self._model.get_submodule(path)
        text = f"{shown} computes something else than {type(module).__name__}"
        another = settings.another_function(module, nodes)
        if another is not None:
            return Cause(path, f"{text}: these are the operators of {another}", _OTHER_MODEL)
        same, unfound = self._compared(suspect, places, nodes)
        if same:
            are = "is" if len(same) == 1 else "are"
            text = f"{listed(same, most=_NAMES)} {are} the model's, but {text}"
        if unfound and not same:
            text += f", and the file has none of its tensors: {listed(unfound, most=_NAMES)}"
        elif unfound:
            text += f" (not compared: {listed(unfound, most=_NAMES)})"
        return Cause(path, text, _UNFOUND if unfound else _OPERATOR)

    def nowhere(self, value: ComputedValue, behind: str) -> Cause:
        """The cause where no tensor has the value, and the first one behind is wrong."""
        text = f"no tensor of the file has its values, and {behind}, which follows, is wrong"
        return Cause(value.path, text, _OTHER_MODEL)

    def output(self, name: str, right: str) -> Cause:
        """The cause where an output of the file is another tensor than the right one, although
        all layers are right."""
        if right in self._graph.outputs:
            text = (
                f"output {name} is what the model returns elsewhere, and {right} is what it returns"
            )
            return Cause("", f"{text} there: the outputs are in another order", _OUTPUTS)
        places, _ = self._graph.segment(name, self._cuts)
        nodes = _operators([self._graph.nodes[place] for place in places])
        text = f"output {name} is not what the model returns, which is {right} in the file"
        return Cause("", f"{text}: {nodes}" if nodes else text, _OUTPUTS)

    def _training(self, suspect: Suspect, nodes: Sequence[onnx.NodeProto]) -> Cause | None:
        if not settings.training(nodes):
            return None
        return Cause(suspect.value.path, "its nodes compute as in training", _EVAL)

    def _weights(
        self, suspect: Suspect, places: Sequence[int], nodes: Sequence[onnx.NodeProto]
    ) -> Cause | None:
        found = self._graph.constants(places)
        value, layer = suspect.value, suspect.folded
        module = self._model.get_submodule(value.path)
        if layer is None:
            differences = [*self._comparison(suspect, places).differences]
            differences += folded.affine_differences(
                module, value.path, found, format_=self._format
            )
            turned = weights.transposed(module, value.path, nodes, found)
            moved = weights.moved(module, value.path, found)
            differences += [one for one in (turned, moved) if one is not None]
            # its own ones first
            differences.sort(key=lambda difference: difference.module != value.path)
        else:
            pair = (self._model.get_submodule(layer.path), module)
            differences = folded.folded_differences(
                pair, (layer.path, value.path), found, format_=self._format
            )
        if self._reduced:
            differences = [one for one in differences if not one.in_16_bits]
        if not differences:
            return None
        # Another number is more than one that was rounded.
        first = min(differences, key=lambda difference: difference.rounded_to is not None)
        rounded = _BFLOAT16 if self._reduced else _ROUNDED
        remedy = rounded if first.rounded_to else _UNFOUND if first.by_code else WEIGHTS
        return Cause(first.module, first.text, remedy)

    @property
    def _format(self) -> str | None:
        return "float16" if self._reduced else None

    def _comparison(self, suspect: Suspect, places: Sequence[int]) -> weights.WeightComparison:
        """Of the module's tensors; where code computed the value, also of what it may have used:
        parameters first, and where none of them differs, constants that modules returned."""
        value, found = suspect.value, self._graph.constants(places)
        compare = partial(
            weights.comparison,
            self._model.get_submodule(value.path),
            value.path,
            found,
            others=self._names,
        )
        if not value.functional:
            gates = any(self._graph.nodes[at].op_type in _RECURRENT for at in places)
            return compare(reordered=gates)
        loose = {**self._loose(), **tensors_around(self._model, value.path)}
        comparison = compare(loose={name: loose[name] for name in loose if name in self._names})
        if comparison.differences:
            return comparison
        # What a module returned may have been turned before it was stored.
        return replace(comparison, differences=compare(loose=loose, reordered=True).differences)

    def _compared(
        self, suspect: Suspect, places: Sequence[int], nodes: Sequence[onnx.NodeProto]
    ) -> tuple[list[str], list[str]]:
        """What of the module is as in the file, and what could not be compared."""
        if suspect.folded is not None:
            return [], []
        comparison = self._comparison(suspect, places)
        cut = len(suspect.value.path) + 1 if suspect.value.path else 0
        module = self._model.get_submodule(suspect.value.path)
        same = [f"`{name[cut:]}`" for name in comparison.same] + settings.compared(module, nodes)
        return same, [f"`{name[cut:]}`" for name in comparison.unfound]

    def _settings(self, suspect: Suspect, nodes: Sequence[onnx.NodeProto]) -> Cause | None:
        if suspect.value.functional and suspect.folded is None:
            return None
        for path in suspect.paths:
            differences = list(settings.differing(self._model.get_submodule(path), nodes))
            if differences:
                return Cause(path, "; ".join(differences), _OTHER_MODEL)
        return None

    def _shape(self, suspect: Suspect, nodes: Sequence[onnx.NodeProto]) -> Cause | None:
        if suspect.alone.mismatch is None:
            return None
        text = f"its shape is {suspect.alone.mismatch}; it comes from {_operators(nodes)}"
        return Cause(suspect.paths[0], text, _OTHER_MODEL)

    def _precision(self, suspect: Suspect, nodes: Sequence[onnx.NodeProto]) -> Cause | None:
        narrow = {onnx.TensorProto.BFLOAT16: "bfloat16"}
        if not self._reduced:
            narrow[onnx.TensorProto.FLOAT16] = "float16"
        for node in nodes:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i in narrow:
                    text = f"the file casts to {narrow[attribute.i]} in it ({_operators([node])})"
                    return Cause(suspect.paths[0], text, _BFLOAT16 if self._reduced else _ROUNDED)
        eight_bits = [node for node in nodes if _QUANTIZED.search(node.op_type)]
        if eight_bits:
            text = f"the file computes it from eight bits ({_operators(eight_bits)})"
            return Cause(suspect.paths[0], text, _EIGHT_BITS)
        size = suspect.alone.relative
        if self._cuda and not self._reduced and _TF32 / 8 <= size <= _TF32 * 8:
            text = f"its relative error, {size:.2g}, is that of TF32"
            remedy = "Set determinism.tf32: false, which sets use_tf32 of the CUDA provider."
            return Cause(suspect.paths[0], text, remedy)
        return None

    def _in_place(self, suspect: Suspect, met: Sequence[str]) -> Cause | None:
        for tensor in met:
            if tensor in suspect.overwritten:
                who = suspect.overwritten[tensor]
                text = (
                    f"the file reads {tensor} as it was before {who} overwrote it in place, the "
                    f"model what was left there"
                )
                return Cause(suspect.paths[0], text, _IN_PLACE)
        return None

    def _code(
        self, suspect: Suspect, nodes: Sequence[onnx.NodeProto], met: Sequence[str]
    ) -> Cause | None:
        value = suspect.value if suspect.value.functional else suspect.got
        if value is None:
            return None
        forward = f"the forward of {value.path}" if value.path else "the model's own forward"
        place = f" before {value.before}" if value.before != value.path else ""
        between = f"between {', '.join(met) or 'the inputs'} and {suspect.tensor}"
        text = f"code in {forward}{place} is another in the file: {_operators(nodes)}, {between}"
        return Cause(value.path, text, _CODE)


def _operators(nodes: Sequence[onnx.NodeProto]) -> str:
    """The last nodes, with their names."""
    names = [f"{node.op_type} {node.name}".strip() for node in nodes if node.op_type != "Constant"]
    more = len(names) - _SHOWN
    before = "" if more <= 0 else "1 node and " if more == 1 else f"{more} nodes and "
    return before + ", ".join(names[-_SHOWN:])
