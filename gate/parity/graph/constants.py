"""The file's constants against the model's tensors.

Every constant of floats is found among the parameters, buffers and attributes of the model: as it
is, in another order, cut out or joined, packed for a recurrent operator, with a BatchNorm folded
in, or as forward computes it. One that is surely a tensor of the model and differs is a finding;
what is not found is listed, and never called equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from gate.parity.graph.computed import Computed
from gate.parity.graph.contents import FLOATS, INTEGERS, DroppedContents
from gate.parity.graph.matching import Constant, ConstantMatcher
from gate.parity.graph.pool import Pool, Stored, canonical, stored_tensors
from gate.parity.graph.suspicion import Suspicion, named, nearest, rounded, telling
from gate.parity.graph.values import FlatGraph
from gate.parity.graph.witness import Witness
from gate.records.instruments import GraphFinding, WeightsReport

_LISTED = 20
_SETTINGS = 8
"""Constants of so few round numbers are settings of an operator, no weights."""
_TRUST = 0.8
"""The share of names that must lead to equal values, for a name to say more than a value."""
_MANY = 4
"""More other tensors than these, and most of all, are another checkpoint."""
_NARROW: dict[int, str] = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}


class Constants:
    """Compares the constants of one file with the reference."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._matcher = ConstantMatcher(witness)
        self._computed: Computed | None = None
        self._blind = False
        """Forward could not be watched, so a constant may be computed that is not found."""

    def look(self, tensor: TensorProto, array: NDArray[Any]) -> Constant | None:
        """Compare a constant; its values are kept only if nothing equal is found."""
        values = canonical(array)
        named = tensor.name in self._matcher.pool.by_name
        if values is None or not values.size or (values.dtype.kind != "f" and not named):
            return None
        constant = Constant(tensor.name, values, _NARROW.get(tensor.data_type))
        constant.match = self._matcher.exact(constant)
        if constant.match is not None and not self._elsewhere(constant):
            constant.values = None
        return constant

    def compare(
        self, graph: FlatGraph, ledger: DroppedContents
    ) -> tuple[list[GraphFinding], WeightsReport]:
        """The findings on all constants that an output depends on, and a summary of the rest."""
        constants = list(self._live(graph, ledger))
        matcher = self._matcher
        for constant in constants:
            if constant.open and constant.format is not None:
                matcher.narrow(constant)
            if constant.values is not None and constant.values.dtype.kind == "f":
                matcher.folded(constant)
        for constant in constants:
            matcher.folded_bias(constant)
        for constant in constants:
            if constant.open and _says_something(constant):
                matcher.joined(constant)
        waiting = [
            constant for constant in constants if constant.open and _says_something(constant)
        ]
        if waiting:
            pool = self._forward()
            for constant in waiting:
                matcher.computed(constant, pool)
        named_ones = self._suspect(constants)
        found = [
            constant.suspicion
            for constant in constants
            if constant.match is None and constant.suspicion
        ]
        return list(_findings(found, named_ones)), self._summary(constants)

    def _live(self, graph: FlatGraph, ledger: DroppedContents) -> Iterator[Constant]:
        """Big constants were looked at before; each tensor once, inlined functions copy them."""
        noted: set[int] = set()
        for _, tensor in graph.live_tensors():
            if tensor.data_type not in (*FLOATS, *INTEGERS):
                continue
            note = ledger.note(tensor)
            if isinstance(note, Constant):
                if id(note) not in noted:
                    noted.add(id(note))
                    yield note
            elif note is None and not ledger.dropped(tensor):
                constant = self.look(tensor, numpy_helper.to_array(tensor))
                if constant is not None and _is_weight(constant, self._matcher.pool):
                    yield constant

    def _elsewhere(self, constant: Constant) -> bool:
        """True if the tensor of its name has other values than what it equals."""
        own = self._own(constant)
        return own is not None and constant.match is not None and own.names != constant.match.names

    def _own(self, constant: Constant) -> Stored | None:
        """The tensor of the model with the name and, up to transposition, the shape."""
        own = self._matcher.pool.by_name.get(constant.name)
        if own is None or constant.values is None:
            return None
        return own if own in self._matcher.pool.of_dims(constant.values) else None

    def _forward(self) -> Pool:
        """What forward computes without the inputs; nothing if it can't be watched."""
        self._computed = Computed(tensor for _, tensor in self._witness.held())
        try:
            with self._computed:
                self._witness.run(self._witness.batch)
        except Exception:  # the model's own code, under a mode that it may not know
            self._blind = True
            return Pool(())
        return Pool(stored_tensors(self._computed.results()))

    def _suspect(self, constants: list[Constant]) -> int:
        """What is still open, by its name or by what most of it is. Returns how many constants
        have the name of a tensor of the model."""
        leading = [
            constant
            for constant in constants
            if self._own(constant) is not None or _by_name(constant)
        ]
        right = [constant for constant in leading if _by_name(constant)]
        trusted = len(right) >= _TRUST * max(len(leading), 1)
        matched = {
            name for constant in constants if constant.match for name in constant.match.names
        }
        for constant in constants:
            own = self._own(constant)
            if constant.values is None:
                continue
            if (own is None and self._blind) or (own is not None and self._moves(own)):
                constant.suspicion = None
                continue
            if constant.match is not None:
                if trusted and own is not None and not self._scaled(constant):
                    constant.match = None
                    constant.suspicion = named(constant.name, constant.values, own)
                continue
            alike = self._matcher.pool.of_dims(constant.values)
            constant.suspect(nearest(constant.name, constant.values, alike))
            if constant.suspicion is not None or constant.excused:
                continue
            if own is not None and self._matcher.may_be_folded(constant, matched):
                continue
            if own is not None and not self._scaled(constant):
                constant.suspicion = named(constant.name, constant.values, own)
            elif own is None:
                constant.suspicion = rounded(constant.name, constant.values, alike)
        return len(leading)

    def _scaled(self, constant: Constant) -> bool:
        """True for the weight or bias of a layer that something was folded into."""
        return constant.name.rpartition(".")[0] in self._matcher.scaled

    def _moves(self, stored: Stored) -> bool:
        """True if forward itself writes into the tensor."""
        if self._computed is None:
            self._forward()
        assert self._computed is not None
        held = dict(self._witness.held())
        return any(self._computed.wrote(held[name]) for name in stored.names if name in held)

    def _summary(self, constants: list[Constant]) -> WeightsReport:
        open_ones = [one.name for one in constants if one.match is None and one.suspicion is None]
        accounted = {name for one in constants if one.match for name in one.match.names}
        accounted |= {one.suspicion.name for one in constants if one.suspicion}
        absent = [
            one.name
            for one in self._matcher.pool.all
            if not one.integer
            and not one.parts
            and accounted.isdisjoint(one.names)
            and accounted.isdisjoint(f"{name.rpartition('.')[0]}.*" for name in one.names)
        ]
        return WeightsReport(
            constants=len(constants),
            matched=dict(sorted(Counter(one.match.way for one in constants if one.match).items())),
            unmatched=len(open_ones),
            unmatched_names=tuple(open_ones[:_LISTED]),
            absent=len(absent),
            absent_names=tuple(absent[:_LISTED]),
        )


def _by_name(constant: Constant) -> bool:
    return constant.match is not None and constant.name in constant.match.names


def _is_weight(constant: Constant, pool: Pool) -> bool:
    """False for settings of operators: single numbers, fills, few round numbers."""
    if constant.name in pool.by_name:
        return True
    values = constant.values
    if values is None:
        return True
    if constant.match is not None:
        return True
    if values.size == 1 or not (values != values.reshape(-1)[0]).any():
        return False
    return values.size > _SETTINGS or telling(values)


def _says_something(constant: Constant) -> bool:
    values = constant.values
    return values is not None and values.dtype.kind == "f" and values.size > 1


def _findings(found: list[Suspicion], leading: int) -> Iterator[GraphFinding]:
    """One finding each; of another checkpoint one in all. `leading`: constants with a name of the
    model's."""
    others = [one for one in found if one.whole and one.rounded is None]
    if len(others) > _MANY and 2 * len(others) >= leading:
        names = ", ".join(f"`{one.name}`" for one in others[:3])
        detail = f"{len(others)} of {leading} weights are others ({names}, …): another checkpoint"
        yield GraphFinding(code="other_weights", place=others[0].place, detail=detail)
        found = [one for one in found if one not in others]
    findings = [one.finding() for one in found]
    for code in ("other_weights", "rounded_weights"):
        yield from (finding for finding in findings if finding.code == code)
