"""Search for inputs on which traced and eager model disagree."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gate.data.reader import length
from gate.errors import GateError, ModelError
from gate.measure.context import MeasurementContext
from gate.probes.branches import BranchRecorder, TracedReference, disagree
from gate.probes.probe import Probe, SampleProfile
from gate.probes.size_probes import DynamicAxes, inputs_beyond_edges
from gate.probes.value_probes import within
from gate.records.instruments import TraceSearch
from gate.storage.arrays import Batch, OutputArray

_MIXED_SAMPLES = 4


@dataclass(frozen=True)
class ProbeFamily:
    """A family of inputs with one parameter: all floats scaled by it, shifted by it or equal to
    it."""

    name: str
    grid: tuple[float, ...]
    """Initial parameter values of the search, ascending."""
    build: Callable[[float], Batch] = field(repr=False)

    def title(self, parameter: float) -> str:
        """Return the name of one input, for example `scale_1e+03`."""
        return f"{self.name}_{parameter:.4g}"


def families(profile: SampleProfile) -> list[ProbeFamily]:
    """Return the families that change all float inputs together, then each one alone."""
    names = [name for name, array in profile.rows.items() if array.dtype.kind == "f"]
    groups = [tuple(names)] if names else []
    if len(names) > 1:
        groups += [(name,) for name in names]
    result: list[ProbeFamily] = []
    for group in groups:
        low = min(float(profile.low[name]) for name in group)
        high = max(float(profile.high[name]) for name in group)
        span = (high - low) or abs(high) or 1.0
        suffix = "" if group == tuple(names) else f"_{group[0]}"
        offsets = tuple(span * k for k in (-100, -10, -1, -0.3, 0.3, 1, 10, 100))
        changes: list[tuple[str, Change, tuple[float, ...]]] = [
            ("scale", operator.mul, (-1e3, -10.0, -0.1, 1e-3, 1e-2, 1.0, 1e2, 1e3)),
            ("constant", np.full_like, _spread_around(low, high, span)),
            ("offset", operator.add, offsets),
            ("spike", _set_spike, tuple(high + span * k for k in (-101, -11, 1, 10, 100))),
        ]
        for title, change, grid in changes:
            build = partial(_changed_batch, profile, change, group)
            result.append(ProbeFamily(f"{title}{suffix}", grid, build))
    return result


def mixtures(profile: SampleProfile) -> Iterator[tuple[str, Batch]]:
    """Yield integers that are all equal, other samples, mixes of two samples with random signs, and
    integers drawn from their range."""
    for title, limits in (("lowest", profile.low), ("highest", profile.high)):
        if profile.integers:
            filled = profile.batch(profile.small)
            for name in profile.integers:
                filled[name][...] = limits[name]
            yield title, filled
    for index in range(1, min(_MIXED_SAMPLES + 1, len(next(iter(profile.rows.values()))))):
        yield f"sample_{index}", profile.batch(profile.small, start=index)
    for index in range(_MIXED_SAMPLES):
        title = f"mix_{index}"
        pairs = zip(
            profile.batch(profile.small, start=index).items(),
            profile.batch(profile.small, start=index + 1).values(),
            strict=True,
        )
        random = profile.random(title)
        yield title, {name: _mix(first, second, random) for (name, first), second in pairs}


def _mix(first: OutputArray, second: OutputArray, random: np.random.Generator) -> OutputArray:
    """Return a random mix of two samples.

    Floats: a convex combination with random signs. Others: each element comes from one of the two,
    so it stays in their range.
    """
    if first.dtype.kind == "U":
        return first
    if first.dtype.kind != "f":
        return np.where(random.random(first.shape) < 0.5, first, second)
    share = random.random()
    signs = random.choice([-1.0, 1.0], first.shape)
    mixed = share * first.astype(np.float64) + (1.0 - share) * second.astype(np.float64)
    return within(signs * mixed, first)


def _spread_around(low: float, high: float, span: float) -> tuple[float, ...]:
    inside = [low + span * k / 8 for k in range(1, 8)]
    return (low - 100 * span, low - 10 * span, *inside, high + 10 * span, high + 100 * span)


Floats = NDArray[np.float64]

Change = Callable[[Floats, float], Floats]


def _changed_batch(
    profile: SampleProfile, change: Change, group: tuple[str, ...], parameter: float
) -> Batch:
    batch = profile.batch(profile.small)
    for name in group:
        with np.errstate(over="ignore"):  # `within` cuts it off
            batch[name] = within(change(batch[name].astype(np.float64), parameter), batch[name])
    return batch


def _set_spike(array: Floats, value: float) -> Floats:
    changed = array.reshape(len(array), -1)
    changed[:, changed.shape[1] // 2] = value
    return changed.reshape(array.shape)


@dataclass(frozen=True)
class InputTrial:
    """One input of the search, with the branches that the model took on it."""

    name: str
    path: tuple[bool, ...]
    """The outcomes of the branches of the model's code."""
    margins: tuple[float | None, ...]
    """Distance of each branch from flipping; None if unknown."""
    reads: int
    """Number of values that the code read from tensors, including those of branches."""
    shapes: tuple[tuple[int, ...], ...]
    differs: bool
    batch: Batch | None
    """The input if the trace disagrees on it and it is not already a probe."""


class SearchTrials:
    """Runs inputs within a budget. The first one is the example of the trace."""

    def __init__(
        self,
        context: MeasurementContext,
        traced: TracedReference,
        *,
        computed: Collection[str],
        budget: int,
    ) -> None:
        """computed: names of probes that are run in any case.

        budget: largest number of inputs.
        """
        self._context = context
        self._traced = traced
        self._computed = computed
        self._by_name: dict[str, InputTrial] = {}
        self.budget = budget

    def attempt(self, name: str, batch: Batch) -> InputTrial | None:
        """Run the model and, unless it can't differ, the trace.

        None if the budget is used up or an input of this name was run before.
        """
        if len(self._by_name) >= self.budget or name in self._by_name:
            return None
        shapes = tuple(array.shape for array in batch.values())
        if self._can_skip_recording(shapes):
            recorder, is_accepted = BranchRecorder(), True
        else:
            recorder, is_accepted = self._traced.record_reads(batch)
        branches = [read for read in recorder.reads if read.branch is not None]
        path, reads = recorder.path, len(recorder.reads)
        cannot_differ = name not in self._computed and self._same_path(path, reads, shapes)
        differs = is_accepted and not cannot_differ and self._differs(batch)
        kept_batch = batch if differs and name not in self._computed else None
        margins = tuple(read.margin for read in branches)
        self._by_name[name] = InputTrial(name, path, margins, reads, shapes, differs, kept_batch)
        return self._by_name[name]

    def __len__(self) -> int:
        """Return the number of inputs that were run."""
        return len(self._by_name)

    @property
    def example(self) -> InputTrial:
        """Return the first input."""
        return next(iter(self._by_name.values()))

    @property
    def differing(self) -> list[InputTrial]:
        """Return the inputs on which model and trace disagree."""
        return [trial for trial in self._by_name.values() if trial.differs]

    @property
    def has_no_reads(self) -> bool:
        """Return whether the model's code has read no value from its tensors so far."""
        return not any(trial.reads for trial in self._by_name.values())

    def is_flipped(self, branch: int) -> bool:
        """Return True if some input took a branch of the example the other way."""
        outcome = self.example.path[branch]
        return any(
            trial.path[branch] != outcome
            for trial in self._by_name.values()
            if self._reaches(trial, branch)
        )

    def margin(self, name: str, branch: int) -> float | None:
        """Return how close an input came to flipping the branch; None if it did not reach it."""
        trial = self._by_name.get(name)
        return trial.margins[branch] if trial and self._reaches(trial, branch) else None

    def _reaches(self, trial: InputTrial, branch: int) -> bool:
        previous = self.example.path[:branch]
        return trial.path[:branch] == previous and len(trial.path) > branch

    def _same_path(
        self, path: tuple[bool, ...], reads: int, shapes: tuple[tuple[int, ...], ...]
    ) -> bool:
        """Return True if only branches could differ, and all are taken as in the example."""
        if not self._by_name or reads != len(path) or not reads:
            return False
        return (path, shapes) == (self.example.path, self.example.shapes)

    def _can_skip_recording(self, shapes: tuple[tuple[int, ...], ...]) -> bool:
        """Return True if recording reads is pointless.

        Code that read no value from tensors of these shapes can't branch on the values of others.
        """
        if not self._by_name:
            return False
        example = self.example
        return not example.reads and shapes == example.shapes and not self._traced.has_warnings

    def _differs(self, batch: Batch) -> bool:
        """Return True if the trace returns something else than the model, unless the model rejects
        the input.

        The model runs without the recorder, because some of PyTorch's modules round differently
        under it.
        """
        try:
            eager = self._context.answers.reference(batch)
        except GateError:
            return False
        try:
            return disagree(eager, self._traced.run(batch))
        except Exception:  # the trace may fail where the model does not
            return True


# A trace keeps each Python branch as its example took it. The search therefore records which values
# the model's code reads from tensors (`BranchRecorder`), and how close each comparison is to
# flipping. It looks for inputs that take another path along families of inputs, first coarsely,
# then around the value that comes closest, and beyond the edges of conditions on sizes
# (`inputs_beyond_edges`). It does not use ONNX.
#
# Cost: at most `instruments.search_inputs` inputs, nearly all of the smallest batch. Each costs one
# forward pass of the model and, if the trace may differ, one more and one of the trace. If sizes
# are compared, two more traces are made, and one for each dynamic axis. A model whose code reads no
# value from its tensors can only have baked in a size or a constant, so only a few inputs are run.


_MAX_PROBES = 5
"""Largest number of probes that the search returns."""

_UNSUSPECTED_RUNS = 6
"""Number of inputs that are run if nothing indicates a branch."""

_WARNED_RUNS = 24
"""Number of inputs that are run if only the tracer's warnings indicate a branch."""

_COARSE_SHARE = 0.6
"""Share of the budget that is used before the refinement."""

_REFINEMENTS = 12
"""Largest number of inputs for one branch that does not flip."""


class TraceSearcher:
    """One search for inputs on which trace and model disagree; call `run` once."""

    def __init__(
        self, context: MeasurementContext, axes: DynamicAxes, computed: Sequence[Probe]
    ) -> None:
        """`computed`: the probes that are run in any case."""
        self._context = context
        self._axes = axes
        self._profile = axes.profile
        self._computed = computed

    def run(self) -> tuple[TraceSearch, list[Probe]]:
        """Run the search. Return its record, and further probes."""
        example = self._profile.batch(self._profile.small)
        try:
            self._traced = TracedReference(self._context, example)
        except ModelError as error:
            return TraceSearch(tried=0, reason=str(error)), []
        self._trials = SearchTrials(
            self._context,
            self._traced,
            computed={probe.name for probe in self._computed},
            budget=self._context.policy.instruments.search_inputs,
        )
        base = self._trials.attempt("example", example)
        if base is None or base.differs:
            return TraceSearch(tried=1, reason="trace_differs_on_example"), []
        self._search()
        return self._result()

    def _search(self) -> None:
        for probe in self._suspects():
            self._trials.attempt(probe.name, probe.batch)
        if self._traced.has_warnings and len(self._trials) < self._trials.budget:
            for name, batch in inputs_beyond_edges(self._traced, self._axes):
                self._trials.attempt(name, batch)
        if self._trials.has_no_reads and not self._traced.has_warnings:
            return
        if self._trials.has_no_reads:
            self._trials.budget = min(self._trials.budget, _WARNED_RUNS)
        probe_families = families(self._profile)
        allowed = int(self._trials.budget * _COARSE_SHARE)
        for name, batch in self._coarse_inputs(probe_families):
            self._trials.attempt(name, batch)
            if len(self._trials) >= allowed or self._is_complete():
                break
        for branch in range(len(self._trials.example.path)):
            if not self._trials.is_flipped(branch):
                self._refine(branch, probe_families)

    def _suspects(self) -> list[Probe]:
        """Return existing probes to run first; only a few if nothing indicates a branch."""
        small = self._profile.small
        batches = [p for p in self._computed if p.kind == "batch" and p.size != small]
        values = [p for p in self._computed if p.kind == "value" and p.size == small]
        suspects = [*batches[:1], *values, *batches[1:]]
        hint = not self._trials.has_no_reads or self._traced.has_warnings
        return suspects if hint else suspects[:_UNSUSPECTED_RUNS]

    def _coarse_inputs(self, probe_families: Sequence[ProbeFamily]) -> Iterator[tuple[str, Batch]]:
        """Yield the grids of all families in turns, then mixtures."""
        grids = [(family, _ends_first(family.grid)) for family in probe_families]
        for turn in range(max((len(grid) for _, grid in grids), default=0)):
            for family, grid in grids:
                if turn < len(grid):
                    yield family.title(grid[turn]), family.build(grid[turn])
        yield from mixtures(self._profile)

    def _is_complete(self) -> bool:
        """Return True if every branch flipped, and trace and model disagreed at least once."""
        branches = range(len(self._trials.example.path))
        return bool(self._trials.differing) and all(map(self._trials.is_flipped, branches))

    def _refine(self, branch: int, probe_families: Sequence[ProbeFamily]) -> None:
        """Search around the input that came closest to flipping the branch."""
        curves = [(family, self._measure_curve(family, branch)) for family in probe_families]
        curves = [(family, curve) for family, curve in curves if curve]
        if not curves:
            return
        family, curve = min(curves, key=lambda pair: min(map(abs, pair[1].values())))
        for _ in range(_REFINEMENTS):
            parameter = _next_parameter(curve)
            if parameter is None:
                return
            name = family.title(parameter)
            trial = self._trials.attempt(name, family.build(parameter))
            if trial is None or self._trials.is_flipped(branch):
                return
            margin = self._trials.margin(name, branch)
            curve[parameter] = math.inf if margin is None else margin

    def _measure_curve(self, family: ProbeFamily, branch: int) -> dict[float, float]:
        """Return the finite margins of the branch, by the family's parameter."""
        margins = {p: self._trials.margin(family.title(p), branch) for p in family.grid}
        return {p: m for p, m in margins.items() if m is not None and math.isfinite(m)}

    def _result(self) -> tuple[TraceSearch, list[Probe]]:
        """Return one probe per path and shape on which no existing probe disagrees."""
        different = self._trials.differing
        names_before = [trial.name for trial in different if trial.batch is None]
        covered = {(trial.path, trial.shapes) for trial in different if trial.batch is None}
        probes: list[Probe] = []
        for trial in different:
            key = (trial.path, trial.shapes)
            if trial.batch is None or key in covered or len(probes) == _MAX_PROBES:
                continue
            covered.add(key)
            probes.append(_probe(trial.name, trial.batch))
        names = (*names_before, *(probe.name for probe in probes))
        return TraceSearch(tried=len(self._trials), found=names), probes


def _probe(name: str, batch: Batch) -> Probe:
    return Probe(f"search_{name}", "search", length(batch), lambda: batch)


def _ends_first(grid: tuple[float, ...]) -> list[float]:
    """Return the last, the first and the middle value, then the others."""
    return list(dict.fromkeys([grid[-1], grid[0], grid[len(grid) // 2], *grid]))


def _next_parameter(curve: dict[float, float]) -> float | None:
    """Return the next parameter to try; None if there is none.

    It is halfway from the point with the smallest margin to its farther neighbor. If that point is
    the first or the last, it is ten times the last step beyond.
    """
    points = sorted(curve)
    if len(points) < 2:
        return None
    nearest = min(range(len(points)), key=lambda index: abs(curve[points[index]]))
    point = points[nearest]
    if nearest in (0, len(points) - 1):
        inner = points[1] if nearest == 0 else points[-2]
        return point + 10 * (point - inner)
    neighbor = max(points[nearest - 1], points[nearest + 1], key=lambda p: abs(p - point))
    same = point * neighbor > 0 and max(point / neighbor, neighbor / point) > 8
    middle = math.copysign(math.sqrt(point * neighbor), point) if same else (point + neighbor) / 2
    return middle if middle not in curve else None
