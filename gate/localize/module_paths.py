"""Module paths of nodes, and scores from names and operators."""

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

_SCOPES_KEY = "pkg.torch.onnx.name_scopes"

_INDEXED_PART = re.compile(r"(.+)_(\d+)")


@dataclass(frozen=True)
class ModuleScope:
    """The innermost module that a node's name refers to."""

    path: str
    call: int | None
    """Index of the module's call; None if the name does not contain it."""


class ModulePaths:
    """The module tree of a model, for finding modules by the names of nodes.

    The TorchScript-based exporter names nodes `/layer1/layer1.0/relu_1/Relu`, or
    `/layer1/0/relu/Relu` for a model traced earlier; dynamo writes the path into the node's
    metadata. Neither is reliable: the second call of a traced module and the second module of a
    scripted class have the name of the enclosing module.
    """

    def __init__(self, model: nn.Module) -> None:
        first = {id(module): path for path, module in model.named_modules()}
        self._canonical = {
            path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)
        }
        """Each module path with its first one; shared modules have several."""
        self._by_name: dict[str, list[str]] = {}
        """Paths that end with a name."""
        self._nodes = model.node_paths() if isinstance(model, OnnxReference) else {}
        """Module paths by node name, for a reference that is an ONNX file."""
        for path in self._canonical:
            self._by_name.setdefault(path.rpartition(".")[2], []).append(path)
        self.norms = tuple(
            path
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and any(True for _ in module.children())
        )
        """Paths of BatchNorms that call modules, such as timm's, which include their activation."""

    def scope(self, node: onnx.NodeProto) -> ModuleScope | None:
        """Return the module that a node's name refers to; None if there is none."""
        for name in (*node.output, node.name):
            if name in self._nodes:
                return ModuleScope(self._nodes[name], None)
        for entry in node.metadata_props:
            if entry.key == _SCOPES_KEY:
                return self._scope_of_metadata(entry.value)
        # An optimizer renames a fused node, but keeps the name of the last node's output.
        for name in (node.name, *node.output[:1]):
            parts = name.split("/")
            if len(parts) > 1 and not parts[0]:
                return self._scope_of_name(parts[1:-1])
        return None

    def _scope_of_metadata(self, text: str) -> ModuleScope | None:
        try:
            paths = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return None
        if not isinstance(paths, list):
            return None
        modules = [path for path in paths if path in self._canonical]
        return ModuleScope(self._canonical[modules[-1]], None) if modules else None

    def _scope_of_name(self, parts: Sequence[str]) -> ModuleScope:
        """Follow the segments down the tree as far as possible."""
        path, calls = "", [0]
        for part in parts:
            child, times = self._find_child(path, part)
            if child is None:
                return ModuleScope(self._canonical[path], None)
            path, calls = child, [*calls, times]
        # In the second call of a parent, calls of the child are counted from 0 again.
        return ModuleScope(self._canonical[path], None if any(calls[:-1]) else calls[-1])

    def _find_child(self, path: str, part: str) -> tuple[str | None, int]:
        for name, times in ((part, 0), *_with_index(part)):
            for last in (name, name.rpartition(".")[2]):
                child = f"{path}.{last}" if path else last
                if child in self._canonical:
                    return child, times
        return self._find_descendant(path, part)

    def _find_descendant(self, path: str, part: str) -> tuple[str | None, int]:
        """Return the only nearest module of that name farther down.

        If code calls a method other than forward (`self.vae.decode(x)`), names omit the module.
        """
        prefix = f"{path}." if path else ""
        for name, times in ((part, 0), *_with_index(part)):
            last = name.rpartition(".")[2]
            paths = [inner for inner in self._by_name.get(last, ()) if inner.startswith(prefix)]
            depths = [inner.count(".") for inner in paths]
            nearest = [i for i, depth in zip(paths, depths, strict=True) if depth == min(depths)]
            if len(nearest) == 1 and not last.isdigit():
                return nearest[0], times
        return None, 0


def _with_index(part: str) -> list[tuple[str, int]]:
    match = _INDEXED_PART.fullmatch(part)
    return [(match[1], int(match[2]))] if match else []


EXACT, RELATED, UNKNOWN, UNRELATED = 4.0, 1.0, 0.0, -4.0
"""Scores of a name: it refers to the module; to one around or inside it; to none; to another."""

_OPERATORS = {
    "linear": ("gemm", "matmul", "add"),
    "adaptiveavgpool": ("globalaveragepool", "reducemean", "averagepool"),
    "avgpool": ("averagepool",),
    "adaptivemaxpool": ("globalmaxpool", "reducemax", "maxpool"),
    "batchnorm": ("batchnormalization",),
    "layernorm": ("layernormalization", "skiplayernormalization"),
    "groupnorm": ("groupnormalization", "instancenormalization"),
    "instancenorm": ("instancenormalization",),
    "rmsnorm": ("rmsnormalization", "simplifiedlayernormalization"),
    "upsample": ("resize",),
    "embedding": ("gather",),
    "gelu": ("biasgelu", "fastgelu"),
    "silu": ("swish",),
    "relu6": ("clip",),
    "hardtanh": ("clip",),
}
"""Operators of modules with another name."""

_FOLDABLE = re.compile("conv|gemm|matmul|einsum")
"""Operators of layers into which a BatchNorm can be folded."""


class NameHints:
    """Scores of pairs of value and node; higher is likelier, 0 is neutral."""

    def __init__(
        self,
        values: Sequence[ComputedValue],
        nodes: Sequence[tuple[str, ModuleScope | None]],
        *,
        norms: Mapping[str, int] | None = None,
    ) -> None:
        """nodes: operator and scope of each node.
        norms: values received by BatchNorms that call modules, such as an activation, by path."""
        scopes = [scope for _, scope in nodes]
        calls: dict[str, int] = defaultdict(int)
        for value in values:
            calls[value.path] = max(calls[value.path], value.call + 1)
        self._kinds = {_base_kind(value.kind) for value in values if value.kind}
        self._call_of = dict(_count_calls(scopes, calls))
        pairs = list(_norm_values(values, norms or {}))
        self.folded = dict(_folded_pairs(pairs, nodes))
        """Maps the value of a convolution or similar layer to that of the BatchNorm probably folded
        into it. The file computes only the latter."""
        self._unfolded = {after: values[before] for before, after in self.folded.items()}

    def name_score(self, value: ComputedValue, node_index: int, scope: ModuleScope | None) -> float:
        """Return a score of how well the node's name fits the value."""
        if scope is None:
            return UNKNOWN
        score = self._score_path(value, node_index, scope)
        inner = self._unfolded.get(value.number)
        return score if inner is None else max(score, self._score_path(inner, node_index, scope))

    def kind_score(self, value: ComputedValue, op: str) -> float:
        """Return a score of the operator: 2 if it is the module's, -3 if another module's, else
        0."""
        inner = self._unfolded.get(value.number)
        kinds = {_base_kind(v.kind) for v in (value, inner) if v is not None and v.kind}
        operator = op.lower()
        if any(_computes(operator, kind) for kind in kinds):
            return 2.0
        return -3.0 if any(_computes(operator, kind) for kind in self._kinds - kinds) else 0.0

    def _score_path(self, value: ComputedValue, node_index: int, scope: ModuleScope) -> float:
        if scope.path == value.path:
            call = self._call_of.get(node_index, scope.call)
            return EXACT if value.functional or call in (None, value.call) else RELATED
        if not scope.path:
            return UNKNOWN
        inside = not value.path or scope.path.startswith(f"{value.path}.")
        return RELATED if inside or value.path.startswith(f"{scope.path}.") else UNRELATED


def _norm_values(
    values: Sequence[ComputedValue], norms: Mapping[str, int]
) -> Iterable[tuple[ComputedValue, ComputedValue]]:
    """Yield the input and the output of each BatchNorm.

    For a BatchNorm that calls modules itself, yield the first value of its own code instead.
    """
    visited: set[str] = set()
    for value in values:
        if _base_kind(value.kind) == "batchnorm":
            yield values[value.inputs[0]], value
        elif value.functional and value.path in norms and value.path not in visited:
            visited.add(value.path)
            yield values[norms[value.path]], value


def _folded_pairs(
    norms: Sequence[tuple[ComputedValue, ComputedValue]],
    nodes: Sequence[tuple[str, ModuleScope | None]],
) -> Iterable[tuple[int, int]]:
    """Yield pairs of a layer and the BatchNorm that alone reads it, if only one has a node.

    Names or the number of operators decide this. A node that pads the layer's input does not count.
    """
    missing = Counter(op for op, _ in nodes)["BatchNormalization"] < len(norms)
    named = {scope.path for _, scope in nodes if scope is not None}
    weighing = {
        scope.path for op, scope in nodes if scope is not None and _FOLDABLE.search(op.lower())
    }
    for layer, value in norms:
        if _base_kind(layer.kind) in ("conv", "convtranspose", "linear"):
            has_name = {value.path in named, layer.path in weighing}
            if has_name == {True, False} or (has_name == {False} and missing):
                yield layer.number, value.number


def _count_calls(
    scopes: Sequence[ModuleScope | None], calls: dict[str, int]
) -> Iterable[tuple[int, int]]:
    """Yield the call index of nodes whose names do not contain it; each call is a run of nodes."""
    runs: dict[str, list[list[int]]] = defaultdict(list)
    last: str | None = None
    for index, scope in enumerate(scopes):
        path = scope.path if scope is not None and scope.call is None else None
        if path is not None:
            if path != last:
                runs[path].append([])
            runs[path][-1].append(index)
        last = path
    for path, path_runs in runs.items():
        if len(path_runs) == calls.get(path):
            yield from ((index, call) for call, run in enumerate(path_runs) for index in run)


def computes(op: str, kind: str) -> bool:
    """Return True if the operator computes a module of this kind, as `Conv` does `Conv2d`."""
    return _computes(op.lower(), _base_kind(kind))


def _computes(operator: str, kind: str) -> bool:
    return operator == kind or operator in _OPERATORS.get(kind, ())


def _base_kind(kind: str) -> str:
    """Return a kind without dimension in lower case: `Conv2d` becomes `conv`."""
    return re.sub(r"[123]d$", "", kind).lower()
