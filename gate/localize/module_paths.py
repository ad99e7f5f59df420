"""Module paths of nodes; hints from names and operators."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gate.localize.model_runner import ComputedValue
from gate.reference.onnx_reference import OnnxReference

_SCOPES = "pkg.torch.onnx.name_scopes"

_INDEXED = re.compile(r"(.+)_(\d+)")


@dataclass(frozen=True)
class ModuleScope:
    """The innermost module that a node's name leads to."""

    path: str
    call: int | None
    """Counts the calls of the module, from 0; None where the name does not contain it."""


class ModulePaths:
    """The module tree of a model, to find modules in by the names of nodes.

    The TorchScript-based exporter names nodes `/layer1/layer1.0/relu_1/Relu`, of a module that was
    traced before `/layer1/0/relu/Relu`; dynamo writes the path into the node's metadata. None of
    them is certain: the second call of a traced module and the second module of a scripted class
    only carry the name of the module around them.
    """

    def __init__(self, model: nn.Module) -> None:
        first = {id(module): path for path, module in model.named_modules()}
        self._canonical = {
            path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)
        }
        """Every path of a module to its first: shared modules have several."""
        self._by_name: dict[str, list[str]] = {}
        """The paths that end with a name."""
        self._nodes = model.node_paths() if isinstance(model, OnnxReference) else {}
        """Of a model that is an ONNX file: the modules of its nodes, by names."""
        for path in self._canonical:
            self._by_name.setdefault(path.rpartition(".")[2], []).append(path)
        self.norms = tuple(
            path
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and any(True for _ in module.children())
        )
        """Paths of BatchNorms that call modules, as timm's, which hold their activation."""

    def scope(self, node: onnx.NodeProto) -> ModuleScope | None:
        """None if the name leads nowhere."""
        for name in (*node.output, node.name):
            if name in self._nodes:
                return ModuleScope(self._nodes[name], None)
        for entry in node.metadata_props:
            if entry.key == _SCOPES:
                return self._listed(entry.value)
        # An optimizer renames a fused node, and keeps the name of the last node's output.
        for name in (node.name, *node.output[:1]):
            parts = name.split("/")
            if len(parts) > 1 and not parts[0]:
                return self._walk(parts[1:-1])
        return None

    def _listed(self, text: str) -> ModuleScope | None:
        try:
            listed = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return None
        if not isinstance(listed, list):
            return None
        modules = [path for path in listed if path in self._canonical]
        return ModuleScope(self._canonical[modules[-1]], None) if modules else None

    def _walk(self, parts: Sequence[str]) -> ModuleScope:
        """Follow the segments down the tree as far as they lead."""
        path, calls = "", [0]
        for part in parts:
            child, times = self._child(path, part)
            if child is None:
                return ModuleScope(self._canonical[path], None)
            path, calls = child, [*calls, times]
        # Within the second call of a parent the calls are counted from 0 again.
        return ModuleScope(self._canonical[path], None if any(calls[:-1]) else calls[-1])

    def _child(self, path: str, part: str) -> tuple[str | None, int]:
        for name, times in ((part, 0), *_with_index(part)):
            for last in (name, name.rpartition(".")[2]):
                child = f"{path}.{last}" if path else last
                if child in self._canonical:
                    return child, times
        return self._deeper(path, part)

    def _deeper(self, path: str, part: str) -> tuple[str | None, int]:
        """The only nearest module of that name farther down: where code calls another method of a
        module than its forward (`self.vae.decode(x)`), names leave the module out."""
        around = f"{path}." if path else ""
        for name, times in ((part, 0), *_with_index(part)):
            last = name.rpartition(".")[2]
            found = [inner for inner in self._by_name.get(last, ()) if inner.startswith(around)]
            depths = [inner.count(".") for inner in found]
            nearest = [i for i, depth in zip(found, depths, strict=True) if depth == min(depths)]
            if len(nearest) == 1 and not last.isdigit():
                return nearest[0], times
        return None, 0


def _with_index(part: str) -> list[tuple[str, int]]:
    found = _INDEXED.fullmatch(part)
    return [(found[1], int(found[2]))] if found else []


EXACT, RELATED, UNKNOWN, UNRELATED = 4.0, 1.0, 0.0, -4.0
"""What a name is worth: it leads to the module; to one around or inside it; nowhere; elsewhere."""

_OPERATORS = {
    "linear": ("gemm", "matmul", "add"),
    "adaptiveavgpool": ("globalaveragepool", "reducemean", "averagepool"),
    "avgpool": ("averagepool",),
    "adaptivemaxpool": ("globalmaxpool", "reducemax", "maxpool"),
    "batchnorm": ("batchnormalization",),
    "layernorm": ("layernormalization", "skiplayernormalization"),
    "groupnorm": ("groupnormalization", "instancenormalization"),
    "upsample": ("resize",),
    "embedding": ("gather",),
    "gelu": ("biasgelu", "fastgelu"),
    "silu": ("swish",),
    "relu6": ("clip",),
}
"""Operators that compute a module and are called otherwise than it."""

_WEIGHING = re.compile("conv|gemm|matmul|einsum")
"""Operators of layers into which a BatchNorm is folded."""


class NameHints:
    """Scores of pairs of a value and a node; higher is likelier, 0 says nothing."""

    def __init__(
        self,
        values: Sequence[ComputedValue],
        nodes: Sequence[tuple[str, ModuleScope | None]],
        *,
        norms: Mapping[str, int] | None = None,
    ) -> None:
        """`nodes`: operator and scope of each. `norms`: paths of BatchNorms that call modules of
        their own, as an activation, with the value that each got."""
        scopes = [scope for _, scope in nodes]
        calls: dict[str, int] = defaultdict(int)
        for value in values:
            calls[value.path] = max(calls[value.path], value.call + 1)
        self._kinds = {_plain(value.kind) for value in values if value.kind}
        self._call_of = dict(_calls(scopes, calls))
        pairs = list(_norms(values, norms or {}))
        self.folded = dict(_folded(pairs, nodes))
        """Values of convolutions and their like to those of the BatchNorm that was probably folded
        into their weights: the file computes the second at once."""
        self._unfolded = {after: values[before] for before, after in self.folded.items()}

    def name(self, value: ComputedValue, place: int, scope: ModuleScope | None) -> float:
        """Return how well the name of the node at `place` fits the value, as a score."""
        if scope is None:
            return UNKNOWN
        score = self._name(value, place, scope)
        inner = self._unfolded.get(value.number)
        return score if inner is None else max(score, self._name(inner, place, scope))

    def kind(self, value: ComputedValue, op: str) -> float:
        """Return a score of the operator: 2 if it is the module's own, -3 if another's, else 0."""
        inner = self._unfolded.get(value.number)
        kinds = {_plain(v.kind) for v in (value, inner) if v is not None and v.kind}
        operator = op.lower()
        if any(_computes(operator, kind) for kind in kinds):
            return 2.0
        return -3.0 if any(_computes(operator, kind) for kind in self._kinds - kinds) else 0.0

    def _name(self, value: ComputedValue, place: int, scope: ModuleScope) -> float:
        if scope.path == value.path:
            call = self._call_of.get(place, scope.call)
            return EXACT if value.functional or call in (None, value.call) else RELATED
        if not scope.path:
            return UNKNOWN
        inside = not value.path or scope.path.startswith(f"{value.path}.")
        return RELATED if inside or value.path.startswith(f"{scope.path}.") else UNRELATED


def _norms(
    values: Sequence[ComputedValue], norms: Mapping[str, int]
) -> Iterable[tuple[ComputedValue, ComputedValue]]:
    """Yield the input and the output of each BatchNorm.

    For a BatchNorm that calls modules itself, yield the first value of its own code instead.
    """
    met: set[str] = set()
    for value in values:
        if _plain(value.kind) == "batchnorm":
            yield values[value.inputs[0]], value
        elif value.functional and value.path in norms and value.path not in met:
            met.add(value.path)
            yield values[norms[value.path]], value


def _folded(
    norms: Sequence[tuple[ComputedValue, ComputedValue]],
    nodes: Sequence[tuple[str, ModuleScope | None]],
) -> Iterable[tuple[int, int]]:
    """Pairs of a layer and the BatchNorm that alone reads it, where names or the number of
    operators say that only one of the two has a node. A layer that pads its input by a node of its
    own has none by that."""
    missing = Counter(op for op, _ in nodes)["BatchNormalization"] < len(norms)
    named = {scope.path for _, scope in nodes if scope is not None}
    weighing = {
        scope.path for op, scope in nodes if scope is not None and _WEIGHING.search(op.lower())
    }
    for layer, value in norms:
        if _plain(layer.kind) in ("conv", "convtranspose", "linear"):
            has_name = {value.path in named, layer.path in weighing}
            if has_name == {True, False} or (has_name == {False} and missing):
                yield layer.number, value.number


def _calls(
    scopes: Sequence[ModuleScope | None], calls: dict[str, int]
) -> Iterable[tuple[int, int]]:
    """Number of the call for nodes whose names don't tell, where each call is a run of nodes."""
    runs: dict[str, list[list[int]]] = defaultdict(list)
    last: str | None = None
    for place, scope in enumerate(scopes):
        path = scope.path if scope is not None and scope.call is None else None
        if path is not None:
            if path != last:
                runs[path].append([])
            runs[path][-1].append(place)
        last = path
    for path, found in runs.items():
        if len(found) == calls.get(path):
            yield from ((place, call) for call, run in enumerate(found) for place in run)


def computes(op: str, kind: str) -> bool:
    """Return True if the operator computes a module of this kind, `Conv2d` as `Conv`."""
    return _computes(op.lower(), _plain(kind))


def _computes(operator: str, kind: str) -> bool:
    return operator == kind or operator in _OPERATORS.get(kind, ())


def _plain(kind: str) -> str:
    """`Conv2d` becomes `conv`."""
    return re.sub(r"[123]d$", "", kind).lower()
