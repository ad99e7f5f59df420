"""Match tensors of the file with values of the model: match, cut the file, rerun, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gate.errors import GateError
from gate.localize.file_graph import FileGraph, SubgraphSession
from gate.localize.model_runner import ComputedValue, LocalizationContext, ValueSurvey, sketch
from gate.localize.module_paths import EXACT, UNKNOWN, ModulePaths, ModuleScope, NameHints
from gate.policy.runtime_options import plain_setup
from gate.storage.arrays import OutputArray


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file as computed by one run."""

    name: str
    node_index: int
    """Index of its node."""
    op: str
    scope: ModuleScope | None
    shape: tuple[int, ...]
    sketch: OutputArray


@dataclass(frozen=True)
class Matching:
    """Tensors by value index, in the order of the values."""

    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    equal: frozenset[int] = frozenset()
    """Values that are equal to their tensor."""

    @property
    def names(self) -> dict[int, str]:
        """Return the names of the tensors by value index."""
        return {number: tensor.name for number, tensor in self.tensors.items()}

    @property
    def differing(self) -> frozenset[int]:
        """Values that differ from their tensor."""
        return frozenset(self.tensors) - self.equal

    def equal_only(self) -> Matching:
        """Return only the equal pairs."""
        kept = {n: tensor for n, tensor in self.tensors.items() if n in self.equal}
        return Matching(kept, self.equal)


@dataclass(frozen=True)
class ValueLayout:
    """The assignment of the file's tensors to the model's values."""

    matching: Matching = field(default_factory=Matching)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Values that no node computes, with the tensor that is read in their place."""

    absent: frozenset[int] = frozenset()
    """Values that the file lacks and that nothing in it reads."""

    @property
    def names(self) -> dict[int, str]:
        """Return the names of tensors by value index, in the order of the values."""
        return dict(sorted({**self.missing, **self.matching.names}.items()))

    @property
    def cuts(self) -> dict[str, np.dtype[np.generic]]:
        """Return the tensors at which the file is cut, with their dtypes.

        Tensors of strings are compared by digests (uint64), so the file is not cut there."""
        dtypes = {tensor.name: tensor.sketch.dtype for tensor in self.matching.tensors.values()}
        return {name: dtype for name, dtype in dtypes.items() if dtype != np.uint64}

    def renumbered(self, numbers: Mapping[int, int]) -> ValueLayout:
        """Return the layout restricted to these values, with their numbers in another survey."""
        tensors = self.matching.tensors.items()
        return ValueLayout(Matching({numbers[n]: tensor for n, tensor in tensors if n in numbers}))

    def without(self, numbers: Set[int]) -> ValueLayout:
        """Return the layout in which these values have no tensor."""
        kept = {n: tensor for n, tensor in self.matching.tensors.items() if n not in numbers}
        return ValueLayout(Matching(kept, self.matching.equal), self.missing, self.absent | numbers)

    @property
    def value_at_cut(self) -> dict[str, int]:
        """Last value that the tensor represents, by cut; its reference is used there."""
        return {name: number for number, name in self.names.items()}

    def references(
        self, cuts: Iterable[str], values: Mapping[int, OutputArray]
    ) -> dict[str, OutputArray]:
        """Return the input arrays for these cuts, in the file's dtypes."""
        numbers, dtypes = self.value_at_cut, self.cuts
        with np.errstate(over="ignore"):  # masks become infinite in float16
            return {cut: values[numbers[cut]].astype(dtypes[cut], copy=False) for cut in cuts}


def returned_values(
    outputs: Sequence[str], survey: ValueSurvey, names: Mapping[int, str]
) -> dict[str, int]:
    """Return the value of each output of the file.

    They are in the order of the model's outputs. If the number differs, the value is that of the
    output's tensor.
    """
    if len(outputs) == len(survey.outputs):
        return dict(zip(outputs, survey.outputs, strict=True))
    by_tensor = {}
    for number in survey.outputs:
        repeats = survey.values[number].repeats
        by_tensor[names.get(number if repeats is None else repeats)] = number
    return {name: by_tensor[name] for name in outputs if name in by_tensor}


class UnmatchedTensors:
    """The tensors that are not yet assigned to a value, and the assigned ones by value."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.assigned: dict[int, Tensor] = {}
        self.names: set[str] = set()
        """Names of the assigned tensors."""
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def like(self, value: ComputedValue, *, any_size: bool = False) -> list[Tensor]:
        """Return the tensors with the value's dtype kind and shape; `any_size`: with its rank."""
        kind, axes = value.sketch.dtype.kind, len(value.shape)
        return [
            tensor
            for tensor in self._by_name.values()
            if (tensor.shape == value.shape or (any_size and len(tensor.shape) == axes))
            and tensor.sketch.dtype.kind == kind
        ]

    def find(self, name: str) -> Tensor | None:
        """Return the unassigned tensor of this name, or None."""
        return self._by_name.get(name)

    def take(self, number: int, tensor: Tensor | None) -> None:
        """Assign the tensor to the value."""
        if tensor is not None:
            self.assigned[number] = tensor
            self.names.add(tensor.name)
            self._by_name.pop(tensor.name, None)

    def neighbors(self, value: ComputedValue) -> tuple[int, float]:
        """Return the node indices of the tensors of the previous and next assigned values."""
        earlier = [t.node_index for number, t in self.assigned.items() if number < value.number]
        later = [t.node_index for number, t in self.assigned.items() if number > value.number]
        return max(earlier, default=-1), min(later, default=math.inf)


def difference(value: OutputArray, tensor: OutputArray) -> float:
    """Return rms(tensor - value) / rms(value) over the elements that are finite in both.

    0 if all of these are equal or there are none; infinite if the other elements differ.
    """
    r, c = value.astype(np.float64), tensor.astype(np.float64)
    finite = np.isfinite(r) & np.isfinite(c)
    if not np.array_equal(r[~finite], c[~finite], equal_nan=True):
        return math.inf
    scale = float(np.linalg.norm(r[finite]))
    distance = float(np.linalg.norm(c[finite] - r[finite]))
    if distance == 0.0:
        return 0.0
    return distance / scale if scale > 0.0 else math.inf


def is_equal(value: OutputArray, array: OutputArray) -> bool:
    """Return True if the arrays are equal up to rounding and small faults."""
    return value.shape == array.shape and difference(value, array) <= _MAX_DIFFERENCE


# All constants but the unit roundoff were chosen by hand on the half `tune` of the corpora
# (benchmarks/world); no single one has a recorded measurement.
_MAX_DIFFERENCE = 1e-3
"""Largest relative RMS difference at which tensor and value count as equal, including rounding and
small faults."""

_UNIT_ROUNDOFF = 2.0**-24
"""Relative RMS difference caused by one rounding to float32."""

_NEAR_FACTOR = 16.0
"""Factor by which the nearer of two tensors must be nearer: blocks that hardly change their input
return nearly the same values."""

_MAX_MODULE_NODES = 12
"""Largest number of nodes that compute one module."""

_INPUT_SCORE = 3.0
"""Score if a tensor is computed from the module's inputs."""

_LEAVE_SCORE = 4.0
"""Score if nodes of other modules read a tensor named after the module. It outweighs similarity,
because tensors before the module's last node are mostly similar to its output."""

_CODE_SCORE = 1.0
"""The same for code between modules, whose results are read in many places."""

_SHAPE_PENALTY = 4.0
"""Penalty if the tensor has another shape, which only a fault explains."""

_MAX_SCORED_DIFFERENCE = 0.5
"""Relative difference from which similarity is not scored."""


class ValueMatcher:
    """Pairs the values of a survey with the tensors of a file.

    Equality has priority: a value is assigned the tensor of its shape that equals it up to
    rounding. After a fault, values differ; then names, operators and order decide, until the rerun
    of the cut file gives every layer correct inputs and values decide again.
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
        """inputs: names of the file's inputs in the order of the model's arguments.
        constants: returns the values that are equal for all samples; called only if needed."""
        self._values = survey.values
        self.constants = cache(constants)
        """Cached `constants`."""
        complete = len(survey.outputs) == len(graph.outputs)
        self._returned = dict(zip(survey.outputs, graph.outputs, strict=True)) if complete else {}
        self._input_names = dict(zip(survey.inputs, inputs, strict=False))
        self._graph = graph
        self._scopes = [paths.scope(node) for node in graph.nodes]
        operators = [node.op_type for node in graph.nodes]
        received = {path: survey.received(path) for path in paths.norms}
        self._hints = NameHints(
            survey.values,
            list(zip(operators, self._scopes, strict=True)),
            norms={path: numbers[0] for path, numbers in received.items() if numbers},
        )

    @property
    def folded(self) -> Mapping[int, int]:
        """Values of layers, with the values of the BatchNorm folded into them."""
        return self._hints.folded

    def name(self, value: ComputedValue, tensor: Tensor) -> float:
        """Return the score of `NameHints.name` for this tensor."""
        return self._hints.name_score(value, tensor.node_index, tensor.scope)

    def is_named_after(self, value: ComputedValue, nodes: Iterable[int]) -> bool:
        """Return True if the names of all nodes that depend on the inputs refer to the module."""
        return all(
            self._hints.name_score(value, index, self._scopes[index]) >= EXACT
            for index in nodes
            if not self._graph.varying.isdisjoint(self._graph.nodes[index].output)
        )

    def tensors(self, arrays: Mapping[str, OutputArray]) -> list[Tensor]:
        """Return the tensors that a run returned, in the order of the nodes."""
        producer = self._graph.producer
        indices = {name: producer[name] for name in arrays if name in producer}
        return [
            Tensor(
                name=name,
                node_index=index,
                op=self._graph.nodes[index].op_type,
                scope=self._scopes[index],
                shape=arrays[name].shape,
                sketch=sketch(arrays[name]),
            )
            for name, index in sorted(indices.items(), key=lambda item: item[1])
        ]

    def match(
        self,
        tensors: Sequence[Tensor],
        before: Mapping[int, str] | None = None,
        *,
        without: Container[int] = (),
    ) -> Matching:
        """Assign tensors to values.

        before: an earlier matching, which is kept unless a tensor equals the value. without: values
        that get no tensor unless one equals them.
        """
        free = UnmatchedTensors(tensors)
        for number, name in self._input_names.items():
            value = self._values[number]
            free.take(number, Tensor(name, -1, "", None, value.shape, value.sketch))
        for value in self._values:
            if value.number not in free.assigned:
                free.take(value.number, self._equal(value, free, (before or {}).get(value.number)))
        equal = frozenset(free.assigned)
        for number, name in (before or {}).items():
            if number not in free.assigned and number not in without:
                free.take(number, free.find(name))
        for value in self._values:
            number = value.number
            if number not in free.assigned and number not in without and number not in self.folded:
                free.take(number, self._most_likely(value, free))
        return Matching(dict(sorted(free.assigned.items())), equal)

    def before(self, value: ComputedValue, paired: Container[int]) -> list[int] | None:
        """Return the values from which a value was computed, through values without a node.

        None if either is unknown.
        """
        sources = [self._paired_source(number, paired) for number in value.inputs]
        paired_sources = [number for number in sources if number is not None]
        return paired_sources if len(paired_sources) == len(sources) else None

    def _paired_source(self, number: int, paired: Container[int]) -> int | None:
        """Return the nearest of the `paired` values that a value repeats, or from which it is
        computed before it is folded; None if there is none."""
        source: int | None = number
        while source is not None and source not in paired:
            value = self._values[source]
            source = value.inputs[0] if value.number in self.folded else value.repeats
        return source

    def _equal(
        self, value: ComputedValue, free: UnmatchedTensors, before: str | None
    ) -> Tensor | None:
        """Return the unassigned tensor that equals the value; if there are several, the one whose
        name fits.

        before: the tensor of an earlier matching. The file is cut there, so a tensor that passes it
        on unchanged equals the value too. If both are equal and the earlier name is the module's,
        the earlier one is kept.
        """
        earliest = self._last_input_node(value, free)
        distances = [
            (difference(value.sketch, tensor.sketch), tensor)
            for tensor in free.like(value)
            if tensor.node_index > earliest
        ]
        nearest = min((distance for distance, _ in distances), default=math.inf)
        if not nearest <= _MAX_DIFFERENCE:
            return None
        near = [
            tensor
            for distance, tensor in distances
            if distance <= _NEAR_FACTOR * nearest
            or (
                tensor.name == before
                and distance <= _MAX_DIFFERENCE
                and self._is_named(value, tensor)
            )
        ]
        near = [tensor for tensor in near if not self._may_be_folded_norm(value, tensor)]
        if not near:
            return None
        best = max(near, key=lambda tensor: self._preference(value, tensor))
        return None if self._belongs_elsewhere(best, value, free) else best

    def _preference(self, value: ComputedValue, tensor: Tensor) -> tuple[float, int]:
        """Return the sort key for choosing among equal tensors.

        The best name comes first. Then the last tensor of a module, because a bias near zero hardly
        changes the value that it is added to; otherwise the first tensor.
        """
        last = self._is_named(value, tensor)
        return self.name(value, tensor), tensor.node_index if last else -tensor.node_index

    def _is_named(self, value: ComputedValue, tensor: Tensor) -> bool:
        """Return True if a module returned the value and the tensor is named after it."""
        return not value.functional and self.name(value, tensor) >= EXACT

    def _last_input_node(self, value: ComputedValue, free: UnmatchedTensors) -> int:
        """Return the index of the last node that computes an input of the value."""
        sources = (self._paired_source(number, free.assigned) for number in value.inputs)
        indices = (free.assigned[number].node_index for number in sources if number is not None)
        return max(indices, default=-1)

    def _belongs_elsewhere(
        self, tensor: Tensor, value: ComputedValue, free: UnmatchedTensors
    ) -> bool:
        """Return True if the tensor also equals another unassigned value and is named after that
        one.

        After a fault, the output of a layer that hardly changes its input equals what the previous
        layer should have returned.
        """
        return self.name(value, tensor) < EXACT and any(
            self.name(candidate, tensor) >= EXACT
            and difference(candidate.sketch, tensor.sketch) <= _MAX_DIFFERENCE
            for candidate in self._values
            if candidate.shape == tensor.shape
            and candidate.number != value.number
            and candidate.number not in free.assigned
            and not candidate.functional
        )

    def _may_be_folded_norm(self, value: ComputedValue, tensor: Tensor) -> bool:
        """Return True if the tensor may be that of the BatchNorm folded into the value's weights.

        A hardly trained BatchNorm changes almost nothing.
        """
        after = self.folded.get(value.number)
        if after is None:
            return False
        folded = difference(self._values[after].sketch, tensor.sketch)
        return folded <= _NEAR_FACTOR * difference(value.sketch, tensor.sketch)

    def _most_likely(self, value: ComputedValue, free: UnmatchedTensors) -> Tensor | None:
        """Return the unassigned tensor with the highest score, if one is above 0."""
        best, best_score = None, 0.0
        after, until = free.neighbors(value)
        predecessors = self.before(value, free.assigned)
        source_names = {free.assigned[number].name for number in predecessors or ()}
        constant = value.number in self.constants()
        resized = not constant and not self._has_several_outputs(value)
        reader = self._first_reader(value)
        for tensor in free.like(value, any_size=resized):
            name = self.name(value, tensor)
            if tensor.node_index >= reader:
                continue
            if not (resized or constant) and self._graph.is_constant(tensor.name):
                continue  # the file may lack the output, and an initial state has its shape
            unchanged = value.repeats is not None
            if ((unchanged or constant) and name < EXACT) or (
                unchanged and not self._passes_on(value, tensor, free)
            ):
                continue  # unchanged values and constants mostly have no node
            is_own_code = value.functional and name >= EXACT  # whose operator may be any
            score = name + (0.0 if is_own_code else self._hints.kind_score(value, tensor.op))
            if tensor.shape != value.shape:
                score -= _SHAPE_PENALTY
            if self._returned.get(value.number) == tensor.name:
                score += EXACT
            if source_names:
                reads = self._graph.sources(tensor.name, free.names, steps=_MAX_MODULE_NODES)
                score += _INPUT_SCORE if source_names <= reads else -_INPUT_SCORE
            if tensor.shape == value.shape:
                distance = difference(value.sketch, tensor.sketch)
                score += 3.0 * max(0.0, 1.0 - distance / _MAX_SCORED_DIFFERENCE)
            score += 0.5 if after < tensor.node_index < until else -1.0
            leaves = name >= EXACT and self._is_read_outside(tensor)
            score += (_CODE_SCORE if value.functional else _LEAVE_SCORE) if leaves else 0.0
            # The last node of a module computes its output.
            if score > best_score or (score == best_score and name >= EXACT):
                best, best_score = tensor, score
        return best

    def _passes_on(self, value: ComputedValue, tensor: Tensor, free: UnmatchedTensors) -> bool:
        """Return True if nodes of the value's name compute the tensor from equal values alone.

        Also True if none of these has a tensor."""
        equal = {
            earlier.name
            for number, earlier in free.assigned.items()
            if value.repeats in (number, self._values[number].repeats)
        }
        nodes, reads = self._graph.segment(tensor.name, free.names)
        return not equal or ({*reads} <= equal and self.is_named_after(value, nodes))

    def _first_reader(self, value: ComputedValue) -> float:
        """Return the index of the first node of the module to which code passes the value; infinite
        if there is none. No tensor from there on has the value."""
        if not value.functional:
            return math.inf
        nodes = (
            [
                i
                for i, scope in enumerate(self._scopes)
                if self._hints.name_score(v, i, scope) >= EXACT
                and not self._graph.varying.isdisjoint(self._graph.nodes[i].output)
            ]
            for v in self._values
            if value.number in v.inputs and not v.functional
        )
        return min((indices[0] for indices in nodes if indices), default=math.inf)

    def _has_several_outputs(self, value: ComputedValue) -> bool:
        """Return True if the module returned several tensors; the file may lack some."""
        return any(
            (candidate.path, candidate.call) == (value.path, value.call)
            and not candidate.functional
            for candidate in self._values
            if candidate.number != value.number
        )

    def _is_read_outside(self, tensor: Tensor) -> bool:
        """Return True if nodes of other modules read the tensor, or it is an output of the file."""
        readers = self._graph.readers.get(tensor.name, ())
        is_read_elsewhere = any(self._scopes[index] != tensor.scope for index in readers)
        return is_read_elsewhere or tensor.name in self._graph.outputs


_MAX_RUNS = 12
"""Largest number of runs of the first batch; two without a gross fault."""

_MAX_FAULTS = 5
"""Largest number of faults that are identified by trying pairs of values and tensors."""

_NEXT_VALUES = 12
"""Number of values that are tried after the last one that equals its tensor."""

_MAX_TRIALS = 24
"""Largest number of pairs that are tried for one fault."""

_MAX_REMAINING_SHARE = 0.9
"""Largest share of its difference that a wrong value keeps if an earlier fault is repaired."""

_MAX_DOUBLE_TRIALS = 8
"""Largest number of pairs of which two are tried together."""

_TENSOR_BYTE_RATIO = 4
"""Bytes of the file's tensors per byte of the model's values: the largest ratio observed."""


class IterativeMatcher:
    """Matches on the first batch, on the CPU with optimizations off.

    A fault changes all values after it. If the file is cut there, they are correct again and can be
    identified. From front to back, each value that still differs from its tensor is tried without a
    tensor: if a node is missing, its readers read the previous tensor.
    """

    def __init__(
        self, context: LocalizationContext, survey: ValueSurvey, matcher: ValueMatcher
    ) -> None:
        self._context = context
        self._survey = survey
        self._matcher = matcher

    def find(self, start: ValueLayout | None = None) -> ValueLayout:
        """Return the layout. Raises EvidenceError and errors of ONNX Runtime.

        start: an earlier layout, which is kept unless a tensor equals the value.
        """
        layout = self._match_again(start or ValueLayout())
        tried = set(start.matching.tensors) if start else set()
        for _ in range(_MAX_RUNS):
            better = self._match_again(layout)
            misplaced = self._misplaced_values(layout, better)
            if misplaced:
                layout = layout.without(misplaced)
                continue
            if better.names != layout.names:
                layout = better
                continue
            layout = better
            doubtful = self._doubtful_value(layout, tried)
            if doubtful is None:
                break
            tried.add(doubtful.number)
            layout = self._drop_if_better(layout, doubtful)
        return self._fewer_faults(layout) if self._is_doubtful(layout) else layout

    def _is_doubtful(self, layout: ValueLayout) -> bool:
        """Return True if values differ from their tensors while earlier modules have none.

        If the file fuses modules, one fault may assign all later values to wrong tensors or none.
        In a quantized file no value equals its tensor, which proves nothing.
        """
        if self._context.policy.precision == "quantized":
            return False
        reached = layout.matching.tensors.keys() - self._before_faults(layout.matching).equal
        differing = reached | layout.missing.keys()
        return len(differing) > (0 if layout.absent else 1) and any(
            not (value.functional or value.repeats is not None or value.number in layout.names)
            and value.number not in self._matcher.folded
            for value in self._survey.values[: max(differing)]
        )

    def _fewer_faults(self, layout: ValueLayout) -> ValueLayout:
        """Return the layout in which the most values equal their tensors.

        Starting at values that are equal in the whole file, each of the next tensors is tried for
        each of the next values. With the correct pair, values computed from it become equal.
        """
        settled = ValueLayout(self._before_faults(self._match_again(ValueLayout()).matching))
        for _ in range(_MAX_FAULTS):
            extended = self._add_next_pair(settled)
            if extended is None:
                break
            settled = self._drop_reached(extended, settled)
        # Prefer more equal values, then fewer others.
        return max(
            layout,
            self._match_again(settled),
            key=lambda o: (len(o.matching.equal), -len(o.matching.differing) - len(o.missing)),
        )

    def _drop_reached(self, layout: ValueLayout, settled: ValueLayout) -> ValueLayout:
        """Return the layout without nearly equal values that the next fault changes.

        If no value differs that did not in `settled`, the first of them is the fault that was
        found.
        """
        matching, earlier = layout.matching, settled.matching.tensors.keys()
        reached = matching.equal - self._before_faults(matching).equal - earlier
        first = min(reached, default=-1) if matching.differing <= earlier else -1
        lost = reached - {first}
        kept = {n: tensor for n, tensor in matching.tensors.items() if n not in lost}
        return _mark_absent(Matching(kept, matching.equal - lost))

    def _before_faults(self, matching: Matching) -> Matching:
        """Return the equal values, without those that a small fault changes.

        These differ by much more than all earlier values.
        """
        kept: dict[int, Tensor] = {}
        largest = _UNIT_ROUNDOFF
        for number, tensor in matching.equal_only().tensors.items():
            distance = difference(self._survey.values[number].sketch, tensor.sketch)
            if distance <= _NEAR_FACTOR * largest:
                kept[number] = tensor
                largest = max(largest, distance)
        return Matching(kept, frozenset(kept))

    def _add_next_pair(self, settled: ValueLayout) -> ValueLayout | None:
        """Return the layout with the pair that makes the earliest value equal; None if no pair
        does.

        Two consecutive faults leave no equal value in between: if the names of earlier pairs fit,
        two of them are tried in place of a later one.
        """
        equal = settled.matching.equal

        def progress(trial: ValueLayout) -> tuple[float, int]:
            return min(trial.matching.equal - equal, default=math.inf), -len(trial.matching.equal)

        pairs = self._next_pairs(settled.matching, max(equal, default=-1))[:_MAX_TRIALS]
        trials = [(pair, self._add_pair(settled, pair)) for pair in pairs]
        best = min((trial for _, trial in trials), key=progress, default=settled)
        until = max(best.matching.differing, default=math.inf)
        for pair, first in trials[:_MAX_DOUBLE_TRIALS]:
            if self._matcher.name(*pair) < EXACT or not pair[0].number < until:
                continue
            for second in self._next_pairs(first.matching, pair[0].number)[:_MAX_DOUBLE_TRIALS]:
                best = min(best, self._add_pair(first, second), key=progress)
        if progress(best)[0] == math.inf:
            return None
        for pair, _ in trials[:_MAX_DOUBLE_TRIALS]:
            best = self._with_earlier(best, settled, pair)
        return best

    def _with_earlier(
        self, layout: ValueLayout, settled: ValueLayout, pair: tuple[ComputedValue, Tensor]
    ) -> ValueLayout:
        """Return the layout with an earlier pair if it reduces the difference of the one found."""
        number = max(layout.matching.differing - settled.matching.differing, default=-1)
        assigned = {tensor.name for tensor in layout.matching.tensors.values()}
        is_earlier = pair[0].number < number and pair[0].number not in layout.matching.tensors
        if not is_earlier or pair[1].name in assigned or self._matcher.name(*pair) < EXACT:
            return layout
        trial = self._add_pair(layout, pair)
        is_closer = self._is_less_wrong(trial, layout, behind=number - 1)
        return trial if is_closer and trial.matching.equal >= layout.matching.equal else layout

    def _is_less_wrong(self, trial: ValueLayout, layout: ValueLayout, *, behind: int) -> bool:
        """Return True if the first later value that differs from its tensor differs by less."""
        differing = trial.matching.differing & layout.matching.differing
        number = min((n for n in differing if n > behind), default=None)
        if number is None:
            return False
        value = self._survey.values[number].sketch
        after, before = (
            difference(value, candidate.matching.tensors[number].sketch)
            if candidate.matching.tensors[number].shape == self._survey.values[number].shape
            else math.inf
            for candidate in (trial, layout)
        )
        return after < _MAX_REMAINING_SHARE * before

    def _add_pair(self, layout: ValueLayout, pair: tuple[ComputedValue, Tensor]) -> ValueLayout:
        """Return the layout with the tensor for the value, and all tensors that then equal their
        values.

        Other earlier values have no tensor.
        """
        tensors = {**layout.matching.tensors, pair[0].number: pair[1]}
        matching = self._match_again(ValueLayout(Matching(tensors, layout.matching.equal))).matching
        kept = {
            n: tensor
            for n, tensor in matching.tensors.items()
            if n in matching.equal or (n in tensors and tensor.name == tensors[n].name)
        }
        return _mark_absent(Matching(kept, matching.equal))

    def _next_pairs(self, settled: Matching, last: int) -> list[tuple[ComputedValue, Tensor]]:
        """Return pairs of values after `last` and later tensors of equal shape, best names
        first."""
        assigned = {tensor.name for tensor in settled.tensors.values()}
        values = [
            value
            for value in self._survey.values
            if value.number > last and value.repeats is None and value.number not in settled.tensors
        ]
        after = settled.tensors[last].node_index if last in settled.tensors else -1
        tensors = [
            tensor
            for tensor in self._run(ValueLayout(settled))
            if tensor.name not in assigned and tensor.node_index > after
        ]
        pairs = [
            (skipped + steps - name, value, tensor)
            for skipped, value in enumerate(values[:_NEXT_VALUES])
            for steps, tensor in enumerate(tensors)
            if tensor.shape == value.shape
            and tensor.sketch.dtype.kind == value.sketch.dtype.kind
            and (name := self._matcher.name(value, tensor)) >= UNKNOWN
        ]
        pairs.sort(key=lambda pair: (pair[0], pair[1].number))
        return [pair[1:] for pair in pairs]

    def _drop_if_better(self, layout: ValueLayout, value: ComputedValue) -> ValueLayout:
        """Return the layout without a tensor for the value if that is better."""
        stand_in = self._substitute_tensor(layout, value)
        if stand_in is None or self._may_be_unused(layout, value):
            trial = self._match_again(layout.without({value.number}))
            if trial.matching.equal >= layout.matching.equal:
                return trial
        if stand_in is None:
            return layout
        if self._has_node(layout, value, stand_in):
            return layout
        trial = self._match_again(_replace_tensor(layout, value, stand_in))
        # The first later value on which they disagree decides: values after it had correct inputs
        # in one of the two layouts only. A copy of `stand_in` equals the value itself in `trial`.
        differing = (trial.matching.equal ^ layout.matching.equal) - {value.number}
        if not differing and self._is_less_wrong(trial, layout, behind=value.number):
            return trial
        return trial if min(differing, default=math.inf) in trial.matching.equal else layout

    def _has_node(self, layout: ValueLayout, value: ComputedValue, stand_in: str) -> bool:
        """Return True if nodes of the module's name, and no others, compute its tensor from
        `stand_in`.

        Otherwise an idempotent layer (ReLU, LayerNorm) would appear to have no node.
        """
        tensor = layout.matching.tensors.get(value.number)
        if tensor is None:
            return False
        nodes, read = self._context.graph.segment(tensor.name, layout.value_at_cut)
        return stand_in in read and self._matcher.is_named_after(value, nodes)

    def _match_again(self, layout: ValueLayout) -> ValueLayout:
        """Run the first batch with the file cut, and match again.

        If the cut file can't run, tensors that were assigned by name only are left out.
        """
        try:
            tensors = self._run(layout)
        except GateError:
            raise
        except Exception:  # ONNX Runtime's errors have no common base
            narrower = _drop_unsure(layout, self._survey)
            if narrower is None:
                raise
            return self._match_again(narrower)
        without = {*layout.missing, *layout.absent}
        matching = self._matcher.match(tensors, layout.matching.names, without=without)
        return ValueLayout(matching, layout.missing, layout.absent)

    def _run(self, layout: ValueLayout) -> list[Tensor]:
        """Return the tensors of the first batch, each computed from the nearest cut before it."""
        context, survey = self._context, self._survey
        batch, names = context.batches[0], context.graph.tensors
        values = context.runner.values(batch, survey, set(layout.value_at_cut.values()))
        size = _TENSOR_BYTE_RATIO * sum(value.nbytes for value in survey.values)
        tensors: list[Tensor] = []
        for part in context.parts(names, size=size):
            piece = context.graph.cut(part, layout.cuts)
            run = SubgraphSession(piece, plain_setup("ort-cpu"))
            arrays = run(context.feed(batch), layout.references(piece.cuts, values))
            tensors += self._matcher.tensors(arrays)
        return tensors

    def _misplaced_values(self, layout: ValueLayout, better: ValueLayout) -> set[int]:
        """Return values whose tensor, since it is cut, breaks values that were equal before.

        The file has no such tensor, for example if an exporter merges two reshapes or moves a
        factor.
        """
        tensors, equal = layout.matching.tensors, layout.matching.equal
        unsure = {tensors[n].name: n for n in tensors if n not in equal}
        broken = [
            n for n in equal - better.matching.equal if better.names.get(n) == layout.names[n]
        ]
        read = {
            name
            for n in broken
            for name in self._context.graph.segment(layout.names[n], layout.cuts)[1]
        }
        return {unsure[name] for name in read if name in unsure}

    def _doubtful_value(self, layout: ValueLayout, tried: set[int]) -> ComputedValue | None:
        """Return the first value of a module that may have no tensor, if a later value differs."""
        differing = set(layout.matching.tensors) - layout.matching.equal
        for value in self._survey.values:
            if value.number > max(differing, default=-1):
                break
            is_settled = value.number in tried or value.number in layout.matching.equal
            needs_no_tensor = value.functional or value.repeats is not None
            is_folded = value.number in self._matcher.folded
            if is_settled or needs_no_tensor or is_folded:
                continue
            if self._substitute_tensor(layout, value) is not None or self._may_be_unused(
                layout, value
            ):
                return value
        return None

    def _may_be_unused(self, layout: ValueLayout, value: ComputedValue) -> bool:
        """Return True if it and another output of the same call have tensors.

        Exporters omit unused outputs.
        """
        survey, matched = self._survey, layout.matching.tensors
        returned = {n for output in survey.outputs for n in (output, survey.values[output].repeats)}
        return value.number in matched.keys() - returned and any(
            (candidate.path, candidate.call) == (value.path, value.call)
            for candidate in survey.values
            if candidate.number in matched.keys() - {value.number, *survey.inputs}
            and not candidate.functional
        )

    def _substitute_tensor(self, layout: ValueLayout, value: ComputedValue) -> str | None:
        """Return the tensor that readers of the value would read if no node computed it."""
        names = layout.names
        for number in self._matcher.before(value, names) or ():
            if self._survey.values[number].shape == value.shape:
                return names[number]
        return None


def _mark_absent(matching: Matching) -> ValueLayout:
    """Return the layout in which, up to the last equal value, only equal values have a tensor."""
    absent = set(range(max(matching.equal, default=0))) - matching.tensors.keys()
    return ValueLayout(matching, absent=frozenset(absent))


def _replace_tensor(layout: ValueLayout, value: ComputedValue, stand_in: str) -> ValueLayout:
    """Replace the tensor by the previous one; later pairs that are not certain are dropped."""
    missing, matching = {**layout.missing, value.number: stand_in}, layout.matching
    kept = {
        n: tensor
        for n, tensor in matching.tensors.items()
        if n < value.number or n in matching.equal
    }
    return ValueLayout(Matching(kept, matching.equal), missing, layout.absent)


def _drop_unsure(layout: ValueLayout, survey: ValueSurvey) -> ValueLayout | None:
    """Return the layout without tensors of another shape, which may belong to later values.

    If there are none, without all pairs that are not equal; None if there are none either.
    """
    matching = layout.matching
    unsure = [n for n in matching.tensors if n not in matching.equal]
    resized = [n for n in unsure if matching.tensors[n].shape != survey.values[n].shape]
    if not unsure:
        return None
    return ValueLayout(
        matching.equal_only(), layout.missing, layout.absent | frozenset(resized or unsure)
    )
