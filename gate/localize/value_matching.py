"""Match file tensors to model values; cut, rerun, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gate.errors import GateError
from gate.localize.file_graph import FileGraph, SubgraphSession
from gate.localize.model_runner import ComputedValue, LocalizationContext, ValueSurvey, sketch
from gate.localize.module_paths import (
    EXACT,
    UNKNOWN,
    ModulePaths,
    ModuleScope,
    NameHints,
    computes,
)
from gate.policy.runtime_options import plain_setup
from gate.storage.arrays import OutputArray


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file, as one run computed it."""

    name: str
    place: int
    """Of its node."""
    op: str
    scope: ModuleScope | None
    shape: tuple[int, ...]
    sketch: OutputArray


@dataclass(frozen=True)
class Matching:
    """Tensors by the numbers of values, in the order of the values."""

    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    equal: frozenset[int] = frozenset()
    """The values that their tensor equals."""

    @property
    def names(self) -> dict[int, str]:
        """Names of the tensors."""
        return {number: tensor.name for number, tensor in self.tensors.items()}

    @property
    def off(self) -> frozenset[int]:
        """The values that their tensor differs from."""
        return frozenset(self.tensors) - self.equal

    def sure(self) -> Matching:
        """Only what equals its value."""
        kept = {n: tensor for n, tensor in self.tensors.items() if n in self.equal}
        return Matching(kept, self.equal)


@dataclass(frozen=True)
class ValueLayout:
    """Which tensor of the file is which value of the model."""

    matching: Matching = field(default_factory=Matching)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Values that no node computes, to the tensor that is read in their place."""

    absent: frozenset[int] = frozenset()
    """Values that the file does not have, and nothing in it reads."""

    @property
    def names(self) -> dict[int, str]:
        """Names of tensors by the numbers of values, in the order of the values."""
        return dict(sorted({**self.missing, **self.matching.names}.items()))

    @property
    def cuts(self) -> dict[str, np.dtype[np.generic]]:
        """The tensors at which the file is cut, with their dtypes."""
        return {tensor.name: tensor.sketch.dtype for tensor in self.matching.tensors.values()}

    def only(self, numbers: Container[int]) -> ValueLayout:
        """Return the layout restricted to these values."""
        kept = {n: tensor for n, tensor in self.matching.tensors.items() if n in numbers}
        return ValueLayout(Matching(kept))

    def without(self, numbers: Set[int]) -> ValueLayout:
        """Return the layout in which these values have no tensor."""
        kept = {n: tensor for n, tensor in self.matching.tensors.items() if n not in numbers}
        return ValueLayout(Matching(kept, self.matching.equal), self.missing, self.absent | numbers)

    @property
    def put_in(self) -> dict[str, int]:
        """Which value goes in at each cut: the last one that the tensor stands for."""
        return {name: number for number, name in self.names.items()}

    def references(
        self, cuts: Iterable[str], values: Mapping[int, OutputArray]
    ) -> dict[str, OutputArray]:
        """Return the arrays to feed at these cuts, in the file's dtypes."""
        numbers, dtypes = self.put_in, self.cuts
        return {cut: values[numbers[cut]].astype(dtypes[cut], copy=False) for cut in cuts}


def returned_values(
    outputs: Sequence[str], survey: ValueSurvey, names: Mapping[int, str]
) -> dict[str, int]:
    """Return which value each output of the file should be: in the order of what the model
    returns; where the file has another number of outputs, the one whose tensor it is."""
    if len(outputs) == len(survey.outputs):
        return dict(zip(outputs, survey.outputs, strict=True))
    by_tensor = {}
    for number in survey.outputs:
        repeats = survey.values[number].repeats
        by_tensor[names.get(number if repeats is None else repeats)] = number
    return {name: by_tensor[name] for name in outputs if name in by_tensor}


class UnmatchedTensors:
    """The tensors that no value has taken yet, and by which value the others are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.taken: dict[int, Tensor] = {}
        self.names: set[str] = set()
        """Of the tensors that are taken."""
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def like(self, value: ComputedValue, *, any_size: bool = False) -> list[Tensor]:
        """Return the tensors of the dtype kind and shape of the value; `any_size`: of its rank."""
        kind, axes = value.sketch.dtype.kind, len(value.shape)
        return [
            tensor
            for tensor in self._by_name.values()
            if (tensor.shape == value.shape or (any_size and len(tensor.shape) == axes))
            and tensor.sketch.dtype.kind == kind
        ]

    def named(self, name: str) -> Tensor | None:
        """The tensor of this name, if it is free."""
        return self._by_name.get(name)

    def take(self, number: int, tensor: Tensor | None) -> None:
        """Give the tensor to the value."""
        if tensor is not None:
            self.taken[number] = tensor
            self.names.add(tensor.name)
            self._by_name.pop(tensor.name, None)

    def neighbors(self, value: ComputedValue) -> tuple[int, float]:
        """Places of the tensors of the values before and behind."""
        before = [t.place for number, t in self.taken.items() if number < value.number]
        behind = [t.place for number, t in self.taken.items() if number > value.number]
        return max(before, default=-1), min(behind, default=math.inf)


def difference(value: OutputArray, tensor: OutputArray) -> float:
    """rms(tensor - value) / rms(value) over the elements that are finite in both.

    0 where all of these are equal, also if there are none; infinite where other elements are finite
    in one than in the other, or are other infinities.
    """
    r, c = value.astype(np.float64), tensor.astype(np.float64)
    finite = np.isfinite(r) & np.isfinite(c)
    if not np.array_equal(r[~finite], c[~finite], equal_nan=True):
        return math.inf
    scale = float(np.linalg.norm(r[finite]))
    apart = float(np.linalg.norm(c[finite] - r[finite]))
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0.0 else math.inf


def is_equal(value: OutputArray, array: OutputArray) -> bool:
    """Return True if they are equal up to rounding and small faults."""
    return value.shape == array.shape and difference(value, array) <= _EQUAL


# All but the unit roundoff were set by hand on the half `tune` of the corpora
# (benchmarks/world): no measurement of a single one is written down.
_EQUAL = 1e-3
"""Relative difference (rms) up to which a tensor can be a value, rounding and small faults
included."""

_ROUNDING = 2.0**-24
"""Relative difference (rms) of one rounding to float32."""

_AS_NEAR = 16.0
"""Of two tensors the nearer one is the value only if it is nearer by this factor: blocks that
hardly change their input return nearly what they got."""

_STEPS = 12
"""Nodes that compute one module, at most."""

_READS = 3.0
"""What it is worth that a tensor is computed from what the module got."""

_LEAVES = 4.0
"""What it is worth that nodes of other modules read a tensor that is named after the module: more
than nearness, because before its last node a module is mostly near what it returns."""

_CODE_LEAVES = 1.0
"""The same for code between modules, which leaves at many places."""

_SHAPE = 4.0
"""Penalty of a tensor of another shape: only a fault makes it the value."""

_NEAR = 0.5
"""Relative difference from which nearness does not count."""


class ValueMatcher:
    """Pairs the values of one survey with the tensors of one file.

    Values decide where they agree: of all tensors of its shape a value is the one that it equals,
    up to rounding. Behind a fault they don't; there names, operators and the order decide, until
    the cut run gives every layer right inputs and values can decide again.
    """

    def __init__(
        self,
        survey: ValueSurvey,
        graph: FileGraph,
        paths: ModulePaths,
        *,
        inputs: Sequence[str],
        constants: Callable[[], Container[int]] = frozenset,
    ) -> None:
        """`inputs`: names of the file's inputs in the order of the model's arguments.
        `constants`: finds the values that are the same for all samples, where that is asked."""
        self._values = survey.values
        self.constants = cache(constants)
        """As given, asked once."""
        whole = len(survey.outputs) == len(graph.outputs)
        self._returned = dict(zip(survey.outputs, graph.outputs, strict=True)) if whole else {}
        self._given = dict(zip(survey.inputs, inputs, strict=False))
        self._graph = graph
        self._scopes = [paths.scope(node) for node in graph.nodes]
        operators = [node.op_type for node in graph.nodes]
        got = {path: survey.got(path) for path in paths.norms}
        self._clues = NameHints(
            survey.values,
            list(zip(operators, self._scopes, strict=True)),
            norms={path: numbers[0] for path, numbers in got.items() if numbers},
        )

    @property
    def folded(self) -> Mapping[int, int]:
        """Return the values of layers, mapped to those of the BatchNorm folded into them."""
        return self._clues.folded

    def name(self, value: ComputedValue, tensor: Tensor) -> float:
        """Return the score of `NameHints.name` for this tensor."""
        return self._clues.name(value, tensor.place, tensor.scope)

    def tensors(self, arrays: Mapping[str, OutputArray]) -> list[Tensor]:
        """Return the tensors that a run returned, in the order of the nodes."""
        producer = self._graph.producer
        places = {name: producer[name] for name in arrays if name in producer}
        return [
            Tensor(
                name=name,
                place=place,
                op=self._graph.nodes[place].op_type,
                scope=self._scopes[place],
                shape=arrays[name].shape,
                sketch=sketch(arrays[name]),
            )
            for name, place in sorted(places.items(), key=lambda item: item[1])
        ]

    def match(
        self,
        tensors: Sequence[Tensor],
        before: Mapping[int, str] | None = None,
        *,
        without: Container[int] = (),
    ) -> Matching:
        """`before`: an earlier matching, which stays where nothing equals the value. `without`:
        values that no tensor has, unless one equals them."""
        free = UnmatchedTensors(tensors)
        for number, name in self._given.items():
            value = self._values[number]
            free.take(number, Tensor(name, -1, "", None, value.shape, value.sketch))
        for value in self._values:
            if value.number not in free.taken:
                free.take(value.number, self._equal(value, free, (before or {}).get(value.number)))
        equal = frozenset(free.taken)
        for number, name in (before or {}).items():
            if number not in free.taken and number not in without:
                free.take(number, free.named(name))
        for value in self._values:
            number = value.number
            if number not in free.taken and number not in without and number not in self.folded:
                free.take(number, self._likely(value, free))
        return Matching(dict(sorted(free.taken.items())), equal)

    def before(self, value: ComputedValue, paired: Container[int]) -> list[int] | None:
        """The values that it was computed from, as far as others only hand them on or were
        folded into it; None if one of them is not known."""
        found = []
        for got in value.inputs:
            number: int | None = got
            while number is not None and number not in paired:
                number = self._handed_on(self._values[number])
            if number is None:
                return None
            found.append(number)
        return found

    def _handed_on(self, value: ComputedValue) -> int | None:
        """The value that this one only repeats, or is computed from before it is folded."""
        return value.inputs[0] if value.number in self.folded else value.repeats

    def _equal(
        self, value: ComputedValue, free: UnmatchedTensors, before: str | None
    ) -> Tensor | None:
        """The free tensor that equals the value; of several the one that names speak for.

        `before`: the tensor of an earlier matching. The file is cut there, so that what only hands
        it on is the value without a fault; as long as both are equal and the name of the earlier
        one is the module's, that is no reason to prefer the other.
        """
        earliest = self._behind(value, free)
        distances = [
            (difference(value.sketch, tensor.sketch), tensor)
            for tensor in free.like(value)
            if tensor.place > earliest
        ]
        nearest = min((distance for distance, _ in distances), default=math.inf)
        if not nearest <= _EQUAL:
            return None
        near = [
            tensor
            for distance, tensor in distances
            if distance <= _AS_NEAR * nearest
            or (tensor.name == before and distance <= _EQUAL and self._is_named(value, tensor))
        ]
        near = [tensor for tensor in near if not self._belongs_behind(value, tensor)]
        if not near:
            return None
        best = max(near, key=lambda tensor: self._preference(value, tensor))
        return None if self._is_anothers(best, value, free) else best

    def _preference(self, value: ComputedValue, tensor: Tensor) -> tuple[float, int]:
        """Return the sort key by which one of several equal tensors is chosen.

        The tensor whose name fits best wins. Among those, the last one of a module wins, because a
        bias near zero hardly changes the value that it is added to; otherwise the first.
        """
        last = self._is_named(value, tensor)
        return self.name(value, tensor), tensor.place if last else -tensor.place

    def _is_named(self, value: ComputedValue, tensor: Tensor) -> bool:
        """Return True if a module returned the value, and the tensor is named after it."""
        return not value.functional and self.name(value, tensor) >= EXACT

    def _behind(self, value: ComputedValue, free: UnmatchedTensors) -> int:
        """Place of the last node that computes what the value was computed from."""
        earliest = -1
        for got in value.inputs:
            number: int | None = got
            while number is not None and number not in free.taken:
                number = self._handed_on(self._values[number])
            if number is not None:
                earliest = max(earliest, free.taken[number].place)
        return earliest

    def _is_anothers(self, tensor: Tensor, value: ComputedValue, free: UnmatchedTensors) -> bool:
        """Return True if it equals another free value too, and by name is that one: behind a fault,
        what a layer gives that hardly changes its input is what the layer before should have
        given."""
        clues, place, scope = self._clues, tensor.place, tensor.scope
        return clues.name(value, place, scope) < EXACT and any(
            clues.name(other, place, scope) >= EXACT
            and difference(other.sketch, tensor.sketch) <= _EQUAL
            for other in self._values
            if other.shape == tensor.shape
            and other.number != value.number
            and other.number not in free.taken
            and not other.functional
        )

    def _belongs_behind(self, value: ComputedValue, tensor: Tensor) -> bool:
        """Return True if the tensor may as well be the BatchNorm that is folded into the value's
        weights: one that was hardly trained changes next to nothing."""
        after = self.folded.get(value.number)
        if after is None:
            return False
        folded = difference(self._values[after].sketch, tensor.sketch)
        return folded <= _AS_NEAR * difference(value.sketch, tensor.sketch)

    def _likely(self, value: ComputedValue, free: UnmatchedTensors) -> Tensor | None:
        """Return the free tensor with the highest score, if one is above 0."""
        best, most = None, 0.0
        after, until = free.neighbors(value)
        predecessors = self.before(value, free.taken)
        got = {free.taken[number].name for number in predecessors or ()}
        constant = value.number in self.constants()
        resized = not constant and not self._has_several_outputs(value)
        for tensor in free.like(value, any_size=resized):
            name = self._clues.name(value, tensor.place, tensor.scope)
            if (value.repeats is not None or constant) and name < EXACT:
                continue  # what only hands on a value, or is a constant, mostly has no node
            own_code = value.functional and name >= EXACT  # of which every operator may be
            score = name + (0.0 if own_code else self._clues.kind(value, tensor.op))
            if tensor.shape != value.shape:
                score -= _SHAPE
            if self._returned.get(value.number) == tensor.name:
                score += EXACT
            if got:
                reads = self._graph.sources(tensor.name, free.names, steps=_STEPS)
                score += _READS if got <= reads else -_READS
            if tensor.shape == value.shape:
                distance = difference(value.sketch, tensor.sketch)
                score += 3.0 * max(0.0, 1.0 - distance / _NEAR)
            score += 0.5 if after < tensor.place < until else -1.0
            leaves = name >= EXACT and self._leaves(tensor)
            score += (_CODE_LEAVES if value.functional else _LEAVES) if leaves else 0.0
            # Of the nodes of one module the last one gives its output.
            if score > most or (score == most and name >= EXACT):
                best, most = tensor, score
        return best

    def _has_several_outputs(self, value: ComputedValue) -> bool:
        """Return True if the module returned several tensors: one of them may not be in the
        file."""
        return any(
            (other.path, other.call) == (value.path, value.call) and not other.functional
            for other in self._values
            if other.number != value.number
        )

    def _leaves(self, tensor: Tensor) -> bool:
        """Return True if nodes of other modules read it, or it is an output of the file."""
        readers = self._graph.readers.get(tensor.name, ())
        elsewhere = any(self._scopes[place] != tensor.scope for place in readers)
        return elsewhere or tensor.name in self._graph.outputs


_ROUNDS = 12
"""Runs of the first batch, at most. Without a gross fault there are two."""

_FAULTS = 5
"""Largest number of faults that are identified by trying pairs of values and tensors."""

_NEXT = 12
"""Values that are tried behind the last one that equals its tensor."""

_TRIALS = 24
"""Pairs that are tried for one fault, at most."""

_LESS_WRONG = 0.9
"""Share of its difference that a wrong value keeps at most where an earlier fault is made right."""

_DOUBLE = 8
"""Pairs of which two together are tried, at most."""

_INNER = 4
"""Bytes of the file's tensors for each byte of the model's values, by experience: at most."""


class IterativeMatcher:
    """Matches on the first batch, on the CPU with optimizations off.

    A fault spoils all values behind it. Cut there, they are right again and can be told by. From
    front to back, each value that still differs from its tensor is tried without one: where a node
    is missing, its readers read the tensor before.
    """

    def __init__(
        self, bench: LocalizationContext, survey: ValueSurvey, matcher: ValueMatcher
    ) -> None:
        self._bench = bench
        self._survey = survey
        self._matcher = matcher

    def find(self, start: ValueLayout | None = None) -> ValueLayout:
        """The layout. `start`: what is known already, which stays where nothing equals a value.
        Raises EvidenceError, and what ONNX Runtime raises."""
        layout = self._matched(start or ValueLayout())
        tried = set(start.matching.tensors) if start else set()
        for _ in range(_ROUNDS):
            better = self._matched(layout)
            misplaced = self._misplaced(layout, better)
            if misplaced:
                layout = layout.without(misplaced)
                continue
            if better.names != layout.names:
                layout = better
                continue
            layout = better
            doubtful = self._doubtful(layout, tried)
            if doubtful is None:
                break
            tried.add(doubtful.number)
            layout = self._tried(layout, doubtful)
        return self._fewer_faults(layout) if self._is_doubtful(layout) else layout

    def _is_doubtful(self, layout: ValueLayout) -> bool:
        """Return True if values differ from their tensors while modules before them have none:
        where the file fuses modules, one fault can lead all values behind it to wrong tensors, or
        to none. In a quantized file no value equals its tensor, which says nothing."""
        if self._bench.policy.precision == "quantized":
            return False
        reached = layout.matching.tensors.keys() - self._before_faults(layout.matching).equal
        off = reached | layout.missing.keys()
        return len(off) > (0 if layout.absent else 1) and any(
            not (value.functional or value.repeats is not None or value.number in layout.names)
            and value.number not in self._matcher.folded
            for value in self._survey.values[: max(off)]
        )

    def _fewer_faults(self, layout: ValueLayout) -> ValueLayout:
        """Return the layout in which the most values equal their tensors.

        From what equals its value in the whole file, front to back: each of the next tensors is
        tried as each of the next values. The right pair makes equal what is computed from it.
        """
        settled = ValueLayout(self._before_faults(self._matched(ValueLayout()).matching))
        for _ in range(_FAULTS):
            found = self._next_settled(settled)
            if found is None:
                break
            settled = self._without_reached(found, settled)
        # More values that equal their tensors, then fewer others.
        return max(
            layout,
            self._matched(settled),
            key=lambda one: (len(one.matching.equal), -len(one.matching.off) - len(one.missing)),
        )

    def _without_reached(self, found: ValueLayout, settled: ValueLayout) -> ValueLayout:
        """The layout without the values that the next fault reaches, although they nearly equal
        their tensors. If no value differs that did not in `settled`, the first of them is the fault
        that was found."""
        matching, earlier = found.matching, settled.matching.tensors.keys()
        reached = matching.equal - self._before_faults(matching).equal - earlier
        first = min(reached, default=-1) if matching.off <= earlier else -1
        lost = reached - {first}
        kept = {n: tensor for n, tensor in matching.tensors.items() if n not in lost}
        return _only(Matching(kept, matching.equal - lost))

    def _before_faults(self, matching: Matching) -> Matching:
        """Return the values that equal their tensors, without those that a small fault reaches:
        they differ by much more than all values before them."""
        kept: dict[int, Tensor] = {}
        largest = _ROUNDING
        for number, tensor in matching.sure().tensors.items():
            distance = difference(self._survey.values[number].sketch, tensor.sketch)
            if distance <= _AS_NEAR * largest:
                kept[number] = tensor
                largest = max(largest, distance)
        return Matching(kept, frozenset(kept))

    def _next_settled(self, settled: ValueLayout) -> ValueLayout | None:
        """The layout with the pair that makes the earliest value equal; None if no pair does.

        Two faults in a row leave nothing equal between them: where the names of earlier pairs fit,
        two of them are tried in the place of a later one.
        """
        equal = settled.matching.equal

        def progress(trial: ValueLayout) -> tuple[float, int]:
            return min(trial.matching.equal - equal, default=math.inf), -len(trial.matching.equal)

        pairs = self._next_pairs(settled.matching, max(equal, default=-1))[:_TRIALS]
        trials = [(pair, self._settled(settled, pair)) for pair in pairs]
        best = min((trial for _, trial in trials), key=progress, default=settled)
        until = max(best.matching.off, default=math.inf)
        for pair, first in trials[:_DOUBLE]:
            if self._matcher.name(*pair) < EXACT or not pair[0].number < until:
                continue
            for second in self._next_pairs(first.matching, pair[0].number)[:_DOUBLE]:
                best = min(best, self._settled(first, second), key=progress)
        if progress(best)[0] == math.inf:
            return None
        for pair, _ in trials[:_DOUBLE]:
            best = self._with_earlier(best, settled, pair)
        return best

    def _with_earlier(
        self, found: ValueLayout, settled: ValueLayout, pair: tuple[ComputedValue, Tensor]
    ) -> ValueLayout:
        """The layout with an earlier pair if that makes the one found less wrong: then both are."""
        number = max(found.matching.off - settled.matching.off, default=-1)
        taken = {tensor.name for tensor in found.matching.tensors.values()}
        earlier = pair[0].number < number and pair[0].number not in found.matching.tensors
        if not earlier or pair[1].name in taken or self._matcher.name(*pair) < EXACT:
            return found
        both = self._settled(found, pair)
        less = self._is_less_wrong(both, found, behind=number - 1)
        return both if less and both.matching.equal >= found.matching.equal else found

    def _is_less_wrong(self, trial: ValueLayout, layout: ValueLayout, *, behind: int) -> bool:
        """Return True if the first value behind that differs from its tensor differs by less."""
        off = trial.matching.off & layout.matching.off
        number = min((n for n in off if n > behind), default=None)
        if number is None:
            return False
        value = self._survey.values[number].sketch
        after, before = (
            difference(value, one.matching.tensors[number].sketch)
            if one.matching.tensors[number].shape == self._survey.values[number].shape
            else math.inf
            for one in (trial, layout)
        )
        return after < _LESS_WRONG * before

    def _settled(self, layout: ValueLayout, pair: tuple[ComputedValue, Tensor]) -> ValueLayout:
        """The layout with the tensor for the value and all that equals its value then; no tensor
        for any other value before."""
        tensors = {**layout.matching.tensors, pair[0].number: pair[1]}
        matching = self._matched(ValueLayout(Matching(tensors, layout.matching.equal))).matching
        kept = {
            n: one
            for n, one in matching.tensors.items()
            if n in matching.equal or (n in tensors and one.name == tensors[n].name)
        }
        return _only(Matching(kept, matching.equal))

    def _next_pairs(self, settled: Matching, last: int) -> list[tuple[ComputedValue, Tensor]]:
        """Values behind `last` and tensors behind its own, of one shape: first those for which
        their names speak, and the nearest ones."""
        taken = {tensor.name for tensor in settled.tensors.values()}
        values = [
            value
            for value in self._survey.values
            if value.number > last and value.repeats is None and value.number not in settled.tensors
        ]
        after = settled.tensors[last].place if last in settled.tensors else -1
        tensors = [
            tensor
            for tensor in self._run(ValueLayout(settled))
            if tensor.name not in taken and tensor.place > after
        ]
        pairs = [
            (behind + ahead - name, value, tensor)
            for behind, value in enumerate(values[:_NEXT])
            for ahead, tensor in enumerate(tensors)
            if tensor.shape == value.shape
            and tensor.sketch.dtype.kind == value.sketch.dtype.kind
            and (name := self._matcher.name(value, tensor)) >= UNKNOWN
        ]
        pairs.sort(key=lambda pair: (pair[0], pair[1].number))
        return [pair[1:] for pair in pairs]

    def _tried(self, layout: ValueLayout, value: ComputedValue) -> ValueLayout:
        """The layout without a tensor for the value, if that is the better one."""
        stand_in = self._substitute_tensor(layout, value)
        if stand_in is None:
            trial = self._matched(layout.without({value.number}))
            return trial if trial.matching.equal >= layout.matching.equal else layout
        if self._has_node(layout, value, stand_in):
            return layout
        trial = self._matched(_without(layout, value, stand_in))
        # The first value on which they disagree decides: further behind, what is still off in one
        # of them had right inputs in the other.
        differing = trial.matching.equal ^ layout.matching.equal
        if not differing and self._is_less_wrong(trial, layout, behind=value.number):
            return trial
        return trial if min(differing, default=math.inf) in trial.matching.equal else layout

    def _has_node(self, layout: ValueLayout, value: ComputedValue, stand_in: str) -> bool:
        """Return True if a node of the module's name and kind computes its tensor from `stand_in`.

        Without it a layer that changes nothing when it is applied twice (ReLU, LayerNorm) would
        look as if no node computed it.
        """
        tensor = layout.matching.tensors.get(value.number)
        return (
            tensor is not None
            and computes(tensor.op, value.kind)
            and self._matcher.name(value, tensor) >= EXACT
            and stand_in in self._bench.graph.nodes[tensor.place].input
        )

    def _matched(self, layout: ValueLayout) -> ValueLayout:
        """Run the first batch with the file cut, and match again. Where the cut file can't run, a
        tensor is no such value: those that were taken by name only are left out."""
        try:
            tensors = self._run(layout)
        except GateError:
            raise
        except Exception:  # of ONNX Runtime, without a common base
            narrower = _narrower(layout, self._survey)
            if narrower is None:
                raise
            return self._matched(narrower)
        without = {*layout.missing, *layout.absent}
        matching = self._matcher.match(tensors, layout.matching.names, without=without)
        return ValueLayout(matching, layout.missing, layout.absent)

    def _run(self, layout: ValueLayout) -> list[Tensor]:
        """Return the tensors of the first batch, each from the nearest cut before it."""
        bench, survey = self._bench, self._survey
        batch, names = bench.batches[0], bench.graph.tensors
        values = bench.side.values(batch, survey, set(layout.put_in.values()))
        size = _INNER * sum(value.nbytes for value in survey.values)
        tensors: list[Tensor] = []
        for part in bench.parts(names, size=size):
            piece = bench.graph.cut(part, layout.cuts)
            run = SubgraphSession(piece, plain_setup("ort-cpu"))
            arrays = run(bench.feed(batch), layout.references(piece.cuts, values))
            tensors += self._matcher.tensors(arrays)
        return tensors

    def _misplaced(self, layout: ValueLayout, better: ValueLayout) -> set[int]:
        """Values whose tensor, since it is cut, spoils what equalled its value before: the file has
        no such tensor, as where an exporter joins two reshapes or moves a factor."""
        tensors, equal = layout.matching.tensors, layout.matching.equal
        unsure = {tensors[n].name: n for n in tensors if n not in equal}
        spoiled = [
            n for n in equal - better.matching.equal if better.names.get(n) == layout.names[n]
        ]
        met = {
            name
            for n in spoiled
            for name in self._bench.graph.segment(layout.names[n], layout.cuts)[1]
        }
        return {unsure[name] for name in met if name in unsure}

    def _doubtful(self, layout: ValueLayout, tried: set[int]) -> ComputedValue | None:
        """The first value of a module that may have no tensor, where something behind is off."""
        off = set(layout.matching.tensors) - layout.matching.equal
        for value in self._survey.values:
            if value.number > max(off, default=-1):
                break
            settled = value.number in tried or value.number in layout.matching.equal
            silent = value.functional or value.repeats is not None
            folded = value.number in self._matcher.folded
            if settled or silent or folded:
                continue
            if self._substitute_tensor(layout, value) is not None or self._may_be_unused(
                layout, value
            ):
                return value
        return None

    def _may_be_unused(self, layout: ValueLayout, value: ComputedValue) -> bool:
        """Return True if it has a tensor, and another output of the same call has one too:
        exporters leave out the outputs that nothing uses."""
        survey, matched = self._survey, layout.matching.tensors
        returned = {n for at in survey.outputs for n in (at, survey.values[at].repeats)}
        return value.number in matched.keys() - returned and any(
            (other.path, other.call) == (value.path, value.call)
            for other in survey.values
            if other.number in matched.keys() - {value.number, *survey.inputs}
            and not other.functional
        )

    def _substitute_tensor(self, layout: ValueLayout, value: ComputedValue) -> str | None:
        """The tensor that readers of the value would read if no node computed it."""
        names = layout.names
        for number in self._matcher.before(value, names) or ():
            if self._survey.values[number].shape == value.shape:
                return names[number]
        return None


def _only(matching: Matching) -> ValueLayout:
    """The layout in which no other value up to the last that equals its tensor has one."""
    absent = set(range(max(matching.equal, default=0))) - matching.tensors.keys()
    return ValueLayout(matching, absent=frozenset(absent))


def _without(layout: ValueLayout, value: ComputedValue, stand_in: str) -> ValueLayout:
    """The tensor before in the place of this one; all that is not sure behind is open again."""
    missing, matching = {**layout.missing, value.number: stand_in}, layout.matching
    kept = {
        n: one for n, one in matching.tensors.items() if n < value.number or n in matching.equal
    }
    return ValueLayout(Matching(kept, matching.equal), missing, layout.absent)


def _narrower(layout: ValueLayout, survey: ValueSurvey) -> ValueLayout | None:
    """The layout without the tensors of another shape, which may be those of the values behind, or
    if there are none, without all that don't equal their values; None if there are none either."""
    matching = layout.matching
    unsure = [n for n in matching.tensors if n not in matching.equal]
    resized = [n for n in unsure if matching.tensors[n].shape != survey.values[n].shape]
    if not unsure:
        return None
    return ValueLayout(
        matching.sure(), layout.missing, layout.absent | frozenset(resized or unsure)
    )
