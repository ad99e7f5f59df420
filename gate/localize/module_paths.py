"""What speaks for a tensor where its values can't: names of modules and kinds of operators."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gate.localisation.names import ModuleScope
from gate.localisation.values import ComputedValue

EXACT, RELATED, UNKNOWN, UNRELATED = 4.0, 1.0, 0.0, -4.0
"""What a name is worth: it leads to the module; to one around or inside it; nowhere; elsewhere."""
_OPERATORS = {
    "linear": ("gemm", "matmul", "add"),
    "adaptiveavgpool": ("globalaveragepool", "reducemean", "averagepool"),
    "avgpool": ("averagepool",),
    "adaptivemaxpool": ("globalmaxpool", "reducemax", "maxpool"),
    "batchnorm": ("batchnormalization",),
    "layernorm": ("layernormalization",),
    "groupnorm": ("groupnormalization", "instancenormalization"),
    "upsample": ("resize",),
    "embedding": ("gather",),
    "silu": ("swish",),
    "relu6": ("clip",),
}
"""Operators that compute a module and are called otherwise than it."""
_WEIGHING = re.compile("conv|gemm|matmul|einsum")
"""Operators of layers into which a BatchNorm is folded."""


class Clues:
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
        """What the name of the node at `place` says about the value."""
        if scope is None:
            return UNKNOWN
        score = self._name(value, place, scope)
        inner = self._unfolded.get(value.number)
        return score if inner is None else max(score, self._name(inner, place, scope))

    def kind(self, value: ComputedValue, op: str) -> float:
        """What the operator says: 2 for a module's own, -3 for one of other modules."""
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
    """What each BatchNorm got, and what it made of it; of those that call modules, their own code's
    first value."""
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


def _computes(operator: str, kind: str) -> bool:
    return operator == kind or operator in _OPERATORS.get(kind, ())


def _plain(kind: str) -> str:
    """`Conv2d` becomes `conv`."""
    return re.sub(r"[123]d$", "", kind).lower()
