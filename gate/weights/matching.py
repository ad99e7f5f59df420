"""Match each constant: equal, folded, joined, narrowed or mismatched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from gate.records.instruments import GraphFinding, WeightsReport
from gate.weights.findings import (
    HALF,
    WeightMismatch,
    finding,
    mismatch_at,
    named,
    nearest,
    rounded,
    telling,
)
from gate.weights.folding import WeightLayer, folded_bias, layers, likeliest
from gate.weights.layouts import Lines, arrangements, equal, match_packed_rnn, same
from gate.weights.model_tensors import (
    CONVERSIONS,
    DerivedConstants,
    Leeway,
    ModelTensor,
    Norm,
    ReferenceObserver,
    TensorIndex,
    Values,
    canonical,
    leeway,
    norms,
    renormalized_embeddings,
    stored_tensors,
)
from gate.weights.value_graph import FLOATS, INTEGERS, DroppedContents, ValueGraph, is_dropped

_ROUNDING = 2.0**-20
"""Relative difference of a computed constant that another order of operations may cause."""

_FAR = 0.01
"""Difference relative to the constant's size (rms) that rounding can't cause."""


class Match(NamedTuple):
    """The way in which a constant matches, and the matching tensors of the model."""

    way: str
    names: tuple[str, ...]


@dataclass
class Constant:
    """A constant of the file and the state of its matching."""

    name: str
    values: Values | None
    """float32 or int64. None if no further comparison is needed."""
    format: str | None = None
    """Narrow format in which the file stores the constant."""
    match: Match | None = None
    suspicion: WeightMismatch | None = None
    """The most likely mismatch, which is reported if nothing matches."""
    excused: bool = False
    """True for a tensor of the model in a form that can't be compared."""

    @property
    def open(self) -> bool:
        """Return whether no match was found yet."""
        return self.match is None and self.values is not None

    def suspect(self, suspected: WeightMismatch | None) -> None:
        """Store the mismatch with the fewest wrong elements."""
        if suspected is not None and (
            self.suspicion is None or suspected.wrong < self.suspicion.wrong
        ):
            self.suspicion = suspected


class Fold(NamedTuple):
    """A layer with the candidates for the BatchNorm that was folded into it."""

    layer: WeightLayer
    norms: tuple[Norm, ...]


class WeightMatcher:
    """Matches constants with the tensors of the model."""

    def __init__(self, observer: ReferenceObserver) -> None:
        self.pool = TensorIndex(
            (*stored_tensors(observer.held()), *match_packed_rnn(observer.model))
        )
        self.folds: list[Fold] = []
        self.scaled: set[str] = set()
        """Paths of the layers with a folded factor."""
        self._lines = Lines(self.pool.all)
        self._norms = cache(lambda arithmetic: tuple(norms(observer.model, arithmetic)))
        self._layers: defaultdict[tuple[int, ...], list[WeightLayer]] = defaultdict(list)
        for layer in layers(observer.model):
            self._layers[tuple(layer.weight.shape)].append(layer)
        self._renormalized = dict(renormalized_embeddings(observer.model))

    def exact(self, constant: Constant) -> Match | None:
        """Match a constant with a tensor of equal elements, possibly packed for a recurrent
        operator. Integers match only under the same name."""
        values, namesake = constant.values, self.pool.by_name.get(constant.name)
        assert values is not None
        if namesake is not None and equal(values, namesake.values):
            return Match("as it is", namesake.names)
        if values.dtype.kind != "f":
            way = None if namesake is None else same(values, namesake.values)
            return None if namesake is None or way is None else Match(way, namesake.names)
        if values.size == 1:
            return None
        for stored in self.pool.alike(values):
            way = same(values, stored.values)
            if way is not None:
                return Match("packed" if stored.parts else way, stored.names)
        return None

    def narrow(self, constant: Constant) -> None:
        """Match a constant in a narrow format with the tensors rounded to that format."""
        values, name = constant.values, constant.format
        if values is None or name is None:
            return
        for stored in _rounded(self.pool.with_dims(values), name):
            if any(equal(values, way) for way in arrangements(values, stored.values)):
                constant.match = Match(f"rounded to {name}", stored.names)
                return
        candidates = _rounded(self.pool.with_dims(values), name)
        constant.suspect(nearest(constant.name, values, candidates))

    def renormalized(self, constant: Constant) -> None:
        """Match an embedding with `max_norm`, whose rows are unchanged or renormalized.

        A forward before the export renormalizes the rows that it looks up."""
        values, kept = constant.values, leeway(constant.format)
        assert values is not None
        for name, limited in self._renormalized.items():
            stored = self.pool.by_name[name]
            if values.shape != stored.shape:
                continue
            right = _near(values, stored.values, kept=kept).all(1)
            wrong = np.asarray(~(right | _near(values, limited, kept=kept).all(1)))
            if not wrong.any():
                constant.match = Match("renormalized", stored.names)
                if self.pool.by_name.get(constant.name) in (None, stored):
                    constant.values = None
                return
            if wrong.mean() <= HALF:
                mask = wrong[:, None] & (values != stored.values)
                constant.suspect(mismatch_at(constant.name, name, (values, stored.values), mask))

    def is_renormalized(self, stored: ModelTensor) -> bool:
        """Return whether a tensor is an embedding with `max_norm`; its valid values are known."""
        return not self._renormalized.keys().isdisjoint(stored.names)

    def joined(self, constant: Constant) -> None:
        """Match a constant with a slice of a tensor, or with several slices in a row."""
        values = constant.values
        assert values is not None
        slices = self._lines.read(values)
        if slices is None or not slices.ordered:
            return
        wrong = values != slices.expected
        if not wrong.any():
            constant.match = Match(slices.way, slices.names)
            return
        certain = not (wrong & slices.doubtful).any() and telling(values[~wrong])
        if certain and wrong.mean() <= HALF:
            owner = slices.owner(int(wrong.argmax()))
            constant.suspect(mismatch_at(constant.name, owner, (values, slices.expected), wrong))

    def folded(self, constant: Constant) -> None:
        """Match a constant with the weight of a layer with a folded BatchNorm."""
        if constant.values is None:
            return
        for shape in dict.fromkeys((constant.values.shape, constant.values.shape[::-1])):
            candidates = self._layers.get(shape, [])
            for index, layer in enumerate(candidates):
                for values in _as_weight(constant.values, shape):
                    if self._fold(constant, layer, values):
                        # Weights are in the model's order, so a matched layer goes to the end.
                        candidates.append(candidates.pop(index))
                        return

    def _fold(self, constant: Constant, layer: WeightLayer, values: Values) -> bool:
        found, wrong = likeliest(values, layer, self._norms, format_=constant.format)
        if found is None:
            return False
        weight = f"{layer.path}.weight" if layer.path else "weight"
        self.scaled.add(layer.path)
        if not found.norms:
            sizes = {len(norm.scale) for norm in self._norms(None)}
            constant.excused = len(found.factor) in sizes
            return False
        self.folds.append(Fold(layer, found.norms))
        if wrong.any():
            constant.match = None
            constant.suspicion = mismatch_at(constant.name, weight, (values, found.expected), wrong)
        else:
            constant.match = Match(found.way, (weight, *(n.parameters for n in found.norms)))
            constant.suspicion = None
        return True

    def folded_bias(self, constant: Constant) -> None:
        """Match a constant with the bias of a layer with a folded BatchNorm."""
        values = constant.values
        if values is None or values.ndim != 1 or values.dtype.kind != "f":
            return
        for fold in self.folds:
            for norm in self._versions(fold.norms, constant.format):
                wrong = folded_bias(values, fold.layer, norm, format_=constant.format)
                if wrong is None or (wrong.any() and wrong.mean() > HALF):
                    continue
                prefix = f"{fold.layer.path}." if fold.layer.path else ""
                if not wrong.any():
                    names = (f"{prefix}bias", norm.parameters)
                    constant.match, constant.suspicion = Match(norm.way, names), None
                    return
                if telling(values[~wrong]):
                    expected = norm.offset(fold.layer.offset())
                    constant.match = None
                    constant.suspect(
                        mismatch_at(constant.name, f"{prefix}bias", (values, expected), wrong)
                    )

    def _versions(self, norms_of_fold: Sequence[Norm], format_: str | None) -> Iterator[Norm]:
        """Yield norms, also in the other arithmetics in which they may have been folded."""
        yield from norms_of_fold
        paths = {norm.path for norm in norms_of_fold if norm.way == "folded"}
        for arithmetic in dict.fromkeys((None, format_)):
            same_norms = (norm for norm in self._norms(arithmetic) if norm.path in paths)
            yield from (n for n in same_norms if n.arithmetic != norms_of_fold[0].arithmetic)

    def may_be_folded(self, constant: Constant, matched: set[str]) -> bool:
        """Return whether a constant is a bias into which a BatchNorm may be folded.

        The factors are unknown, because the weight of the layer is not in the file, for example
        because it was quantized after folding.
        """
        values, (path, _, name) = constant.values, constant.name.rpartition(".")
        if values is None or name != "bias" or f"{path}.weight" in matched:
            return False
        layer = any(one.path == path for group in self._layers.values() for one in group)
        return layer and any(one.scale.shape == values.shape for one in self._norms(None))

    def computed(self, constant: Constant, pool: TensorIndex) -> None:
        """Match a constant with the tensors that forward computes without the inputs.

        They must be equal up to the rounding of float32.
        """
        values = constant.values
        assert values is not None
        for stored in pool.alike(values):
            if same(values, stored.values) is not None:
                constant.match = Match("computed", ())
                return
        for stored in pool.with_dims(values):
            for arranged in arrangements(values, stored.values):
                wrong = _far(values, arranged, kept=leeway(constant.format))
                if wrong is None:
                    continue
                if not wrong.any():
                    constant.match = Match("computed", ())
                    return
                if telling(values[~wrong]):
                    name = f"what {stored.name} gives in forward"
                    constant.suspect(mismatch_at(constant.name, name, (values, arranged), wrong))


def _far(values: Values, arranged: Values, *, kept: Leeway) -> NDArray[np.bool_] | None:
    """Return the mask in which a constant differs from a computed one; None if they are unrelated.

    Exporters round in other places than PyTorch, and the errors may accumulate. The two are related
    only if every element either differs by rounding or clearly, and at least half by rounding.
    """
    near = _near(values, arranged, kept=kept)
    with np.errstate(all="ignore"):
        error = np.abs(values.astype(np.float64) - arranged)
        size = np.sqrt(np.mean(arranged.astype(np.float64) ** 2))
    far = ~near & ~(error <= _FAR * size)
    return far if (near | far).all() and near.mean() >= HALF else None


def _near(values: Values, expected: Values, *, kept: Leeway) -> NDArray[np.bool_]:
    """Return the mask of elements that are equal up to rounding, or both NaN."""
    with np.errstate(all="ignore"):
        error = np.abs(values.astype(np.float64) - expected)
        rounding = (_ROUNDING + kept.relative) * np.abs(expected) + kept.absolute
        near: NDArray[np.bool_] = (error <= rounding) | (values == expected)
    return near | (np.isnan(values) & np.isnan(expected))


def _as_weight(values: Values, shape: tuple[int, ...]) -> Iterable[Values]:
    """Yield a constant in the shape of a weight: unchanged, or transposed if it has two axes."""
    if values.shape == shape:
        yield values
    if len(shape) == 2 and values.T.shape == shape:
        yield values.T


def _rounded(stored: Iterable[ModelTensor], name: str) -> Iterable[ModelTensor]:
    """Yield each tensor converted to a narrow format: first rounded, then clamped and rounded."""
    for tensor in stored:
        rounded, *clamped = (convert(tensor.values) for convert in CONVERSIONS[name])
        for values in (rounded, *(v for v in clamped if not np.array_equal(v, rounded))):
            yield ModelTensor(tensor.names, lambda values=values: values, tensor.shape)  # type: ignore[misc]


_LISTED = 20

_SETTINGS = 8
"""Maximum size of constants of round numbers that are settings of an operator, not weights."""

_TRUST = 0.8
"""Minimum share of names with equal values for names to be trusted more than values."""

_MANY = 4
"""If more tensors than this and most of all differ, the file has another checkpoint."""

_NARROW: dict[int, str] = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}


class Constants:
    """Compares the constants of one file with the reference.

    A constant of floats is compared with the parameters, buffers and attributes of the model:
    unchanged, reordered, sliced or joined, packed for a recurrent operator, with a folded
    BatchNorm, or as computed in forward. If it is certainly a tensor of the model but differs, it
    is a finding. If nothing matches, it is listed and never counts as equal.
    """

    def __init__(self, observer: ReferenceObserver) -> None:
        self._observer = observer
        self._matcher = WeightMatcher(observer)
        self._computed: DerivedConstants | None = None
        self._blind = False
        """True if forward could not be observed, so that computed constants may be missing."""

    def match_constant(self, tensor: TensorProto, array: NDArray[Any]) -> Constant | None:
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
        self, graph: ValueGraph, dropped: DroppedContents
    ) -> tuple[list[GraphFinding], WeightsReport]:
        """The findings on all constants that an output depends on, and a summary of the rest."""
        constants = list(self._live(graph, dropped))
        matcher = self._matcher
        for constant in constants:
            if constant.open and constant.format is not None:
                matcher.narrow(constant)
            if constant.open and _says_something(constant):
                matcher.renormalized(constant)
            if constant.values is not None and constant.values.dtype.kind == "f":
                matcher.folded(constant)
        for constant in constants:
            matcher.folded_bias(constant)
        for constant in constants:
            if constant.open and _says_something(constant):
                matcher.joined(constant)
        waiting = [one for one in constants if one.open and _says_something(one)]
        if waiting:
            pool = self._forward()
            for constant in waiting:
                matcher.computed(constant, pool)
        named_ones = self._suspect(constants)
        found = [one.suspicion for one in constants if one.match is None and one.suspicion]
        return list(_findings(found, named_ones)), self._summary(constants)

    def _live(self, graph: ValueGraph, dropped: DroppedContents) -> Iterator[Constant]:
        """Big constants were looked at before; each tensor once, inlined functions copy them."""
        noted: set[int] = set()
        for _, tensor in graph.live_tensors():
            if tensor.data_type not in (*FLOATS, *INTEGERS):
                continue
            note = dropped.note(tensor)
            if isinstance(note, Constant):
                if id(note) not in noted:
                    noted.add(id(note))
                    yield note
            elif note is None and not is_dropped(tensor):
                constant = self.match_constant(tensor, numpy_helper.to_array(tensor))
                if constant is not None and _is_weight(constant, self._matcher.pool):
                    yield constant

    def _elsewhere(self, constant: Constant) -> bool:
        """Return True if the equal tensor differs from the tensor with the constant's name."""
        own = self._named_tensor(constant)
        return own is not None and constant.match is not None and own.names != constant.match.names

    def _named_tensor(self, constant: Constant) -> ModelTensor | None:
        """The tensor of the model with the name and, up to transposition, the shape."""
        own = self._matcher.pool.by_name.get(constant.name)
        if own is None or constant.values is None:
            return None
        return own if own in self._matcher.pool.with_dims(constant.values) else None

    def _forward(self) -> TensorIndex:
        """Return the tensors that forward computes without the inputs, if it can be observed."""
        self._computed = DerivedConstants(tensor for _, tensor in self._observer.held())
        try:
            with self._computed:
                self._observer.run(self._observer.batch)
        except Exception:  # the model's own code, under a mode that it may not know
            self._blind = True
            return TensorIndex(())
        return TensorIndex(stored_tensors(self._computed.results()))

    def _suspect(self, constants: list[Constant]) -> int:
        """Set the suspicion of each open constant, by its name or by most of its elements.

        Returns how many constants have the name of a tensor of the model.
        """
        right = sum(map(_by_name, constants))
        leading = sum(
            _by_name(constant) or self._named_tensor(constant) is not None for constant in constants
        )
        trusted = right >= _TRUST * max(leading, 1)
        matched = {name for one in constants if one.match for name in one.match.names}
        for constant in constants:
            own = self._named_tensor(constant)
            if constant.values is None:
                continue
            if (own is None and self._blind) or self._moves(own):
                constant.suspicion = None
                continue
            if constant.match is not None:
                if trusted and own is not None and not self._scaled(constant):
                    constant.match = None
                    constant.suspicion = named(constant.name, constant.values, own)
                continue
            alike = self._matcher.pool.with_dims(constant.values)
            constant.suspect(nearest(constant.name, constant.values, alike))
            self._excuse(constant)
            if constant.suspicion is not None or constant.excused:
                continue
            if own is not None and self._matcher.may_be_folded(constant, matched):
                continue
            if own is not None and not self._scaled(constant):
                constant.suspicion = named(constant.name, constant.values, own)
            elif own is None:
                constant.suspicion = rounded(constant.name, constant.values, alike)
        return leading

    def _excuse(self, constant: Constant) -> None:
        """Drop the suspicion if forward itself changes the tensor."""
        suspected = constant.suspicion
        if suspected is not None and self._moves(self._matcher.pool.by_name.get(suspected.name)):
            constant.suspicion = None

    def _scaled(self, constant: Constant) -> bool:
        """Return whether the constant is the weight or bias of a layer with a folded factor."""
        return constant.name.rpartition(".")[0] in self._matcher.scaled

    def _moves(self, stored: ModelTensor | None) -> bool:
        """Return whether forward writes into a tensor, so that other values may be right."""
        if stored is None or self._matcher.is_renormalized(stored):
            return False
        if self._computed is None:
            self._forward()
        assert self._computed is not None
        held = dict(self._observer.held())
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


def _is_weight(constant: Constant, pool: TensorIndex) -> bool:
    """Return False for settings of operators: single numbers, fills, few round numbers."""
    values = constant.values
    if constant.name in pool.by_name or values is None or constant.match is not None:
        return True
    if values.size == 1 or not (values != values.reshape(-1)[0]).any():
        return False
    return values.size > _SETTINGS or telling(values)


def _says_something(constant: Constant) -> bool:
    values = constant.values
    return values is not None and values.dtype.kind == "f" and values.size > 1


def _findings(found: list[WeightMismatch], leading: int) -> Iterator[GraphFinding]:
    """Yield one finding for each mismatch, but a single one for another checkpoint.

    leading: number of constants with a name of the model."""
    others = [one for one in found if one.whole and not one.rounded]
    if len(others) > _MANY and 2 * len(others) >= leading:
        names = [one.name for one in others]
        counts = {"count": len(others), "total": leading}
        yield finding("other_weights", others[0].place, "other_checkpoint", names=names, **counts)
        found = [one for one in found if one not in others]
    findings = [one.finding() for one in found]
    for code in ("other_weights", "rounded_weights"):
        yield from (finding for finding in findings if finding.code == code)
