"""Match each constant: equal, folded, joined, narrowed or mismatched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from gate.records.instruments import GraphFinding, WeightsReport
from gate.weights.findings import (
    HALF,
    WeightMismatch,
    finding,
    is_distinctive,
    mismatch_at,
    named_mismatch,
    nearest_mismatch,
    rounded_mismatch,
)
from gate.weights.folding import (
    WeightLayer,
    folded_bias,
    layers,
    likeliest,
    merged_weights,
    weights_behind_norms,
)
from gate.weights.layouts import Lines, arrangements, equal, match_packed_rnn, same
from gate.weights.model_tensors import (
    CONVERSIONS,
    DerivedConstants,
    FormatTolerance,
    ModelTensor,
    Norm,
    ReferenceObserver,
    TensorIndex,
    Values,
    canonical,
    format_tolerance,
    norms,
    renormalized_embeddings,
    stored_tensors,
)
from gate.weights.value_graph import FLOATS, INTEGERS, DroppedContents, ValueGraph, is_dropped

_ROUNDING = 2.0**-20
"""Relative difference of a computed constant that another order of operations may cause."""

_MIN_FAULT = 0.01
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
    mismatch: WeightMismatch | None = None
    """The most likely mismatch, which is reported if nothing matches."""
    is_incomparable: bool = False
    """True for a tensor of the model in a form that can't be compared."""

    @property
    def is_open(self) -> bool:
        """Return whether no match was found yet."""
        return self.match is None and self.values is not None

    def propose(self, mismatch: WeightMismatch | None) -> None:
        """Store the mismatch if it has the fewest wrong elements."""
        if mismatch and (self.mismatch is None or mismatch.wrong < self.mismatch.wrong):
            self.mismatch = mismatch


class Fold(NamedTuple):
    """A layer with the candidates for the BatchNorm that was folded into it."""

    layer: WeightLayer
    norms: tuple[Norm, ...]


class WeightMatcher:
    """Matches constants with the tensors of the model."""

    def __init__(self, observer: ReferenceObserver) -> None:
        self.index = TensorIndex(
            (*stored_tensors(observer.all_tensors()), *match_packed_rnn(observer.model))
        )
        self.folds: list[Fold] = []
        self.scaled: set[str] = set()
        """Paths of the layers with a folded factor."""
        self._lines = Lines(self.index.all)
        self._is_file = bool(observer.onnx_operators())
        self._norms = cache(lambda arithmetic: tuple(norms(observer.model, arithmetic)))
        self._layers: defaultdict[tuple[int, ...], list[WeightLayer]] = defaultdict(list)
        for layer in layers(observer.model):
            self._layers[tuple(layer.weight.shape)].append(layer)
        self._renormalized = dict(renormalized_embeddings(observer.model))

    def match_exact(self, constant: Constant) -> Match | None:
        """Match a constant with a tensor of equal elements, possibly packed for a recurrent
        operator. Integers match only under the same name."""
        values, namesake = constant.values, self.index.by_name.get(constant.name)
        assert values is not None
        if namesake is not None and equal(values, namesake.values):
            return Match("as it is", namesake.names)
        if values.dtype.kind != "f":
            way = None if namesake is None else same(values, namesake.values)
            return None if namesake is None or way is None else Match(way, namesake.names)
        if values.size == 1:
            return None
        for stored in self.index.alike(values):
            way = same(values, stored.values)
            if way is not None:
                return Match("packed" if stored.parts else way, stored.names)
        return None

    def match_narrow(self, constant: Constant) -> None:
        """Match a constant in a narrow format with the tensors rounded to that format."""
        values, name = constant.values, constant.format
        if values is None or name is None:
            return
        for stored in _convert(self.index.with_dims(values), name):
            if any(equal(values, way) for way in arrangements(values, stored.values)):
                constant.match = Match(f"rounded to {name}", stored.names)
                return
        candidates = _convert(self.index.with_dims(values), name)
        constant.propose(nearest_mismatch(constant.name, values, candidates))

    def match_renormalized(self, constant: Constant) -> None:
        """Match an embedding with `max_norm`, whose rows are unchanged or renormalized.

        A forward before the export renormalizes the rows that it looks up."""
        values, tolerance = constant.values, format_tolerance(constant.format)
        assert values is not None
        for name, renormalized in self._renormalized.items():
            stored = self.index.by_name[name]
            if values.shape != stored.shape:
                continue
            right = _is_close(values, stored.values, tolerance=tolerance).all(1)
            wrong = np.asarray(
                ~(right | _is_close(values, renormalized, tolerance=tolerance).all(1))
            )
            if not wrong.any():
                constant.match = Match("renormalized", stored.names)
                if self.index.by_name.get(constant.name) in (None, stored):
                    constant.values = None
                return
            if wrong.mean() <= HALF:
                mask = wrong[:, None] & (values != stored.values)
                constant.propose(mismatch_at(constant.name, name, (values, stored.values), mask))

    def is_renormalized(self, stored: ModelTensor) -> bool:
        """Return whether a tensor is an embedding with `max_norm`; its valid values are known."""
        return not self._renormalized.keys().isdisjoint(stored.names)

    def match_joined(self, constant: Constant) -> None:
        """Match a constant with a slice of a tensor, or with several slices in a row."""
        values = constant.values
        assert values is not None
        slices = self._lines.read(values)
        if slices is None or not slices.is_ordered:
            return
        wrong = values != slices.expected
        if not wrong.any():
            constant.match = Match(slices.way, slices.names)
            return
        certain = not (wrong & slices.uncertain).any() and is_distinctive(values[~wrong])
        if certain and wrong.mean() <= HALF:
            owner = slices.owner(int(wrong.argmax()))
            constant.propose(mismatch_at(constant.name, owner, (values, slices.expected), wrong))

    def match_folded(self, constant: Constant) -> None:
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
        match, wrong = likeliest(values, layer, self._norms, format_=constant.format)
        if match is None:
            return False
        weight = f"{layer.path}.weight" if layer.path else "weight"
        self.scaled.add(layer.path)
        if not match.norms:
            sizes = {len(norm.scale) for norm in self._norms(None)}
            constant.is_incomparable = len(match.factor) in sizes
            return False
        self.folds.append(Fold(layer, match.norms))
        if wrong.any():
            constant.match = None
            constant.mismatch = mismatch_at(constant.name, weight, (values, match.expected), wrong)
        else:
            constant.match = Match(match.way, (weight, *(n.parameters for n in match.norms)))
            constant.mismatch = None
        return True

    def match_folded_bias(self, constant: Constant) -> None:
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
                    constant.match, constant.mismatch = Match(norm.way, names), None
                    return
                if is_distinctive(values[~wrong]):
                    expected = norm.offset(fold.layer.offset())
                    constant.match = None
                    constant.propose(
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
        is_layer = any(layer.path == path for layer in chain.from_iterable(self._layers.values()))
        return is_layer and any(norm.scale.shape == values.shape for norm in self._norms(None))

    def _match_refolded(self, constant: Constant, values: Values) -> None:
        """Match a constant with a tensor of a reference file, equal up to the rounding of float32.

        Two tools that fold the same constants round differently."""
        tolerance = format_tolerance(constant.format)
        for stored in self.index.with_dims(values) if self._is_file else ():
            for arranged in arrangements(values, stored.values):
                with np.errstate(all="ignore"):
                    size = float(np.sqrt(np.mean(arranged.astype(np.float64) ** 2)))
                absolute = tolerance.absolute + _ROUNDING * size  # a folded bias is a sum
                near = _is_close(values, arranged, tolerance=tolerance._replace(absolute=absolute))
                if near.all():
                    constant.match = Match("computed", stored.names)
                    if self.index.by_name.get(constant.name) in (None, stored):
                        constant.values = None
                    return

    def match_computed(self, constant: Constant, index: TensorIndex) -> None:
        """Match a constant with the tensors that forward computes without the inputs.

        They must be equal up to the rounding of float32.
        """
        values = constant.values
        assert values is not None
        self._match_refolded(constant, values)
        if constant.match is not None:
            return
        for stored in index.alike(values):
            if same(values, stored.values) is not None:
                constant.match = Match("computed", stored.names[1:])
                return
        for stored in index.with_dims(values):
            for arranged in arrangements(values, stored.values):
                wrong = _find_faults(values, arranged, tolerance=format_tolerance(constant.format))
                if wrong is None:
                    continue
                if not wrong.any():
                    constant.match = Match("computed", stored.names[1:])
                    return
                if is_distinctive(values[~wrong]):
                    name = f"what {stored.name} gives in forward"
                    constant.propose(mismatch_at(constant.name, name, (values, arranged), wrong))


def _find_faults(
    values: Values, arranged: Values, *, tolerance: FormatTolerance
) -> NDArray[np.bool_] | None:
    """Return the mask in which a constant differs from a computed one; None if they are unrelated.

    Exporters round in other places than PyTorch, and the errors may accumulate. The two are related
    only if every element either differs by rounding or clearly, and at least half by rounding.
    """
    near = _is_close(values, arranged, tolerance=tolerance)
    with np.errstate(all="ignore"):
        error = np.abs(values.astype(np.float64) - arranged)
        size = np.sqrt(np.mean(arranged.astype(np.float64) ** 2))
    far = ~near & ~(error <= _MIN_FAULT * size)
    return far if (near | far).all() and near.mean() >= HALF else None


def _is_close(values: Values, expected: Values, *, tolerance: FormatTolerance) -> NDArray[np.bool_]:
    """Return the mask of elements that are equal up to rounding, or both NaN."""
    with np.errstate(all="ignore"):
        error = np.abs(values.astype(np.float64) - expected)
        rounding = (_ROUNDING + tolerance.relative) * np.abs(expected) + tolerance.absolute
        near: NDArray[np.bool_] = (error <= rounding) | (values == expected)
    return near | (np.isnan(values) & np.isnan(expected))


def _as_weight(values: Values, shape: tuple[int, ...]) -> Iterable[Values]:
    """Yield a constant in the shape of a weight: unchanged, or transposed if it has two axes."""
    if values.shape == shape:
        yield values
    if len(shape) == 2 and values.T.shape == shape:
        yield values.T


def _convert(stored: Iterable[ModelTensor], name: str) -> Iterable[ModelTensor]:
    """Yield each tensor converted to a narrow format: first rounded, then clamped and rounded."""
    for tensor in stored:
        rounded, *clamped = (convert(tensor.values) for convert in CONVERSIONS[name])
        for values in (rounded, *(v for v in clamped if not np.array_equal(v, rounded))):
            yield ModelTensor(tensor.names, lambda values=values: values, tensor.shape)  # type: ignore[misc]


_MAX_LISTED = 20

_MAX_SETTING_SIZE = 8
"""Maximum size of constants of round numbers that are settings of an operator, not weights."""

_MIN_TRUSTED_SHARE = 0.8
"""Minimum share of names with equal values for names to be trusted more than values."""

_MAX_SINGLE_MISMATCHES = 4
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
        self._is_unobserved = False
        """True if forward could not be observed, so that computed constants may be missing."""

    def match_constant(self, tensor: TensorProto, array: NDArray[Any]) -> Constant | None:
        """Compare a constant; its values are kept only if nothing equal is found."""
        values = canonical(array)
        is_named = tensor.name in self._matcher.index.by_name
        if values is None or not values.size or (values.dtype.kind != "f" and not is_named):
            return None
        constant = Constant(tensor.name, values, _NARROW.get(tensor.data_type))
        constant.match = self._matcher.match_exact(constant)
        if constant.match is not None and not self._matches_other_name(constant):
            constant.values = None
        return constant

    def compare(
        self, graph: ValueGraph, dropped: DroppedContents
    ) -> tuple[list[GraphFinding], WeightsReport]:
        """Return the findings on all constants on which an output depends, and a summary."""
        constants = list(self._live_constants(graph, dropped))
        matcher = self._matcher
        for constant in constants:
            if constant.is_open and constant.format is not None:
                matcher.match_narrow(constant)
            if constant.is_open and _is_comparable(constant):
                matcher.match_renormalized(constant)
            if constant.values is not None and constant.values.dtype.kind == "f":
                matcher.match_folded(constant)
        for constant in constants:
            matcher.match_folded_bias(constant)
        for constant in constants:
            if constant.is_open and _is_comparable(constant):
                matcher.match_joined(constant)
        unmatched = [c for c in constants if c.is_open and _is_comparable(c)]
        if unmatched:
            index = self._observe_computed()
            for constant in unmatched:
                matcher.match_computed(constant, index)
            self._match_merged([c for c in unmatched if c.is_open and self._named_tensor(c)])
        named_count = self._set_mismatches(constants)
        mismatches = [c.mismatch for c in constants if c.match is None and c.mismatch]
        return list(_findings(mismatches, named_count)), self._summarize(constants)

    def _live_constants(self, graph: ValueGraph, dropped: DroppedContents) -> Iterator[Constant]:
        """Yield the constants on which an output depends; each copy of inlined functions once.

        Large constants were matched before their values were dropped.
        """
        yielded: set[int] = set()
        for _, tensor in graph.live_tensors():
            if tensor.data_type not in (*FLOATS, *INTEGERS):
                continue
            note = dropped.note(tensor)
            if isinstance(note, Constant):
                if id(note) not in yielded:
                    yielded.add(id(note))
                    yield note
            elif note is None and not is_dropped(tensor):
                constant = self.match_constant(tensor, numpy_helper.to_array(tensor))
                if constant is not None and _is_weight(constant, self._matcher.index):
                    yield constant

    def _matches_other_name(self, constant: Constant) -> bool:
        """Return True if the equal tensor differs from the tensor with the constant's name."""
        namesake, match = self._named_tensor(constant), constant.match
        return namesake is not None and match is not None and namesake.names != match.names

    def _named_tensor(self, constant: Constant) -> ModelTensor | None:
        """Return the model's tensor with the name and, up to transposition, the shape, or None."""
        index = self._matcher.index
        namesake = index.by_name.get(constant.name)
        if namesake is None or constant.values is None:
            return None
        return namesake if namesake in index.with_dims(constant.values) else None

    def _observe_computed(self) -> TensorIndex:
        """Return the tensors that forward computes without the inputs, if it can be observed."""
        self._computed = DerivedConstants(self._observer.all_tensors())
        try:
            with self._computed:
                self._observer.run(self._observer.batch)
        except Exception:  # the model's own code, under a mode that it may not know
            self._is_unobserved = True
            return TensorIndex(())
        return TensorIndex(stored_tensors((*self._computed.results(), *self._computed.sources())))

    def _match_merged(self, named: list[Constant]) -> None:
        """Match weights and biases into which an adapter, a factor of forward or a norm was
        merged."""
        by_name = {c.name: c for c in named}
        weights = {
            name: (c.values, format_tolerance(c.format))
            for name, c in by_name.items()
            if c.values is not None
        }
        by_norms = dict(weights_behind_norms(self._observer.model, weights))
        others = {name: pair for name, pair in weights.items() if name not in by_norms}
        for name, path in [*by_norms.items(), *merged_weights(self._observer, others)]:
            prefix = f"{path}." if path else ""
            names = tuple(n for n in self._matcher.index.by_name if n.startswith(prefix))
            by_name[name].match, by_name[name].mismatch = Match("computed", (name, *names)), None

    def _set_mismatches(self, constants: list[Constant]) -> int:
        """Set the mismatch of each open constant, by its name or by most of its elements.

        Returns the number of constants with the name of a tensor of the model.
        """
        right_count = sum(map(_is_named_as_its_match, constants))
        named_count = sum(
            _is_named_as_its_match(c) or self._named_tensor(c) is not None for c in constants
        )
        trusted = right_count >= _MIN_TRUSTED_SHARE * max(named_count, 1)
        matched = {name for c in constants if c.match for name in c.match.names}
        for constant in constants:
            namesake = self._named_tensor(constant)
            if constant.values is None:
                continue
            if (namesake is None and self._is_unobserved) or self._is_written(namesake):
                constant.mismatch = None
                continue
            if constant.match is not None:
                is_right = _is_named_as_its_match(constant) or self._has_folded_factor(constant)
                if trusted and namesake is not None and not is_right:
                    constant.match = None
                    constant.mismatch = named_mismatch(constant.name, constant.values, namesake)
                continue
            candidates = self._matcher.index.with_dims(constant.values)
            constant.propose(nearest_mismatch(constant.name, constant.values, candidates))
            self._drop_if_written(constant)
            if constant.mismatch is not None or constant.is_incomparable:
                continue
            if namesake is not None and self._matcher.may_be_folded(constant, matched):
                continue
            if namesake is not None and not self._has_folded_factor(constant):
                constant.mismatch = named_mismatch(constant.name, constant.values, namesake)
            elif namesake is None:
                constant.mismatch = rounded_mismatch(constant.name, constant.values, candidates)
        return named_count

    def _drop_if_written(self, constant: Constant) -> None:
        """Drop the mismatch if forward itself changes the tensor."""
        by_name, mismatch = self._matcher.index.by_name, constant.mismatch
        if mismatch is not None and self._is_written(by_name.get(mismatch.name)):
            constant.mismatch = None

    def _has_folded_factor(self, constant: Constant) -> bool:
        """Return whether the constant is the weight or bias of a layer with a folded factor."""
        return constant.name.rpartition(".")[0] in self._matcher.scaled

    def _is_written(self, stored: ModelTensor | None) -> bool:
        """Return whether forward writes into a tensor, so that other values may be right."""
        if stored is None or self._matcher.is_renormalized(stored):
            return False
        if self._computed is None:
            self._observe_computed()
        assert self._computed is not None
        tensors = dict(self._observer.all_tensors())
        written = self._computed.is_written
        return any(written(tensors[name]) for name in stored.names if name in tensors)

    def _summarize(self, constants: list[Constant]) -> WeightsReport:
        unmatched = [c.name for c in constants if c.match is None and c.mismatch is None]
        explained = {name for c in constants if c.match for name in c.match.names}
        explained |= {c.mismatch.name for c in constants if c.mismatch}
        absent = [
            c.name
            for c in self._matcher.index.all
            if not c.integer
            and not c.parts
            and explained.isdisjoint(c.names)
            and explained.isdisjoint(f"{name.rpartition('.')[0]}.*" for name in c.names)
        ]
        return WeightsReport(
            constants=len(constants),
            matched=dict(sorted(Counter(c.match.way for c in constants if c.match).items())),
            unmatched=len(unmatched),
            unmatched_names=tuple(unmatched[:_MAX_LISTED]),
            absent=len(absent),
            absent_names=tuple(absent[:_MAX_LISTED]),
        )


def _is_named_as_its_match(constant: Constant) -> bool:
    return constant.match is not None and constant.name in constant.match.names


def _is_weight(constant: Constant, index: TensorIndex) -> bool:
    """Return False for settings of operators: single numbers, fills, few round numbers."""
    values = constant.values
    if constant.name in index.by_name or values is None or constant.match is not None:
        return True
    if values.size == 1 or not (values != values.reshape(-1)[0]).any():
        return False
    return values.size > _MAX_SETTING_SIZE or is_distinctive(values)


def _is_comparable(constant: Constant) -> bool:
    values = constant.values
    return values is not None and values.dtype.kind == "f" and values.size > 1


def _findings(mismatches: list[WeightMismatch], named_count: int) -> Iterator[GraphFinding]:
    """Yield one finding for each mismatch, but a single one for another checkpoint.

    leading: number of constants with a name of the model."""
    mostly_wrong = [m for m in mismatches if m.is_mostly_wrong and not m.is_rounded]
    if len(mostly_wrong) > _MAX_SINGLE_MISMATCHES and 2 * len(mostly_wrong) >= named_count:
        names = [mismatch.name for mismatch in mostly_wrong]
        counts = {"count": len(mostly_wrong), "total": named_count}
        location = mostly_wrong[0].constant
        yield finding("other_weights", location, "other_checkpoint", names=names, **counts)
        mismatches = [mismatch for mismatch in mismatches if mismatch not in mostly_wrong]
    findings = [mismatch.finding() for mismatch in mismatches]
    for code in ("other_weights", "rounded_weights"):
        yield from (finding for finding in findings if finding.code == code)
