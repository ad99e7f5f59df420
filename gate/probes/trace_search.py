"""The search for inputs on which the trace of the model and the model itself disagree.

A trace keeps each Python branch as its example took it. So the search watches which values the
model's code takes out of tensors (`Watch`), and how near each comparison is to flip: it looks for
inputs that take another path, along families of inputs, first coarsely, then around the value
that comes nearest, and beyond the edges of conditions on sizes (`edges`). It needs no ONNX.

Cost: at most `instruments.search_inputs` inputs, nearly all of the smallest batch; each is one
forward of the model and, where it may make a difference, one more and one of the trace. Where
sizes are compared, two more traces and one for each dynamic axis. A model whose code reads no
value out of its tensors can only have baked in a size or a constant: there, a few inputs are
tried and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gate.errors import ModelError
from gate.parity.probes.edges import inputs_beyond_edges
from gate.parity.probes.families import ProbeFamily, families, mixtures
from gate.parity.probes.observed import Probe
from gate.parity.probes.sizes import Axes
from gate.parity.probes.traced import Traced
from gate.parity.probes.trials import InputTrials
from gate.parity.stand import Stand, length
from gate.records.instruments import TraceSearch
from gate.runtimes.runtime import Batch

_MOST_PROBES = 5
"""Probes that are made of what was found."""
_UNSUSPECTED = 6
"""Inputs that are tried where nothing hints at a branch."""
_WARNED = 24
"""Inputs that are tried where only the tracer saw that something is taken out of tensors."""
_COARSE_SHARE = 0.6
"""Of the inputs that may be tried: those before the refinement."""
_REFINEMENTS = 12
"""Inputs for one branch that does not flip."""


class Search:
    """One search in the stand; `run` is called once."""

    def __init__(self, stand: Stand, axes: Axes, computed: Sequence[Probe]) -> None:
        """`computed`: the probes that are computed anyway."""
        self._stand = stand
        self._axes = axes
        self._observed = axes.observed
        self._computed = computed

    def run(self) -> tuple[TraceSearch, list[Probe]]:
        """What was found, and the further probes that it became."""
        example = self._observed.batch(self._observed.small)
        try:
            self._traced = Traced(self._stand, example)
        except ModelError as error:
            return TraceSearch(tried=0, reason=str(error)), []
        self._trials = InputTrials(
            self._stand,
            self._traced,
            computed={probe.name for probe in self._computed},
            budget=self._stand.policy.instruments.search_inputs,
        )
        base = self._trials.attempt("example", example)
        if base is None or base.differs:
            reason = (
                "the trace gives another answer than the model on its own input: the model is "
                "random, or keeps something from one call to the next"
            )
            return TraceSearch(tried=1, reason=reason), []
        self._look()
        return self._result()

    def _look(self) -> None:
        for probe in self._suspects():
            self._trials.attempt(probe.name, probe.batch)
        if self._traced.warned and len(self._trials) < self._trials.budget:
            for name, batch in inputs_beyond_edges(self._traced, self._axes):
                self._trials.attempt(name, batch)
        if self._trials.silent and not self._traced.warned:
            return
        if self._trials.silent:
            self._trials.budget = min(self._trials.budget, _WARNED)
        along = families(self._observed)
        allowed = int(self._trials.budget * _COARSE_SHARE)
        for name, batch in self._coarse(along):
            self._trials.attempt(name, batch)
            if len(self._trials) >= allowed or self._done():
                break
        for branch in range(len(self._trials.example.path)):
            if not self._trials.flipped(branch):
                self._refine(branch, along)

    def _suspects(self) -> list[Probe]:
        """The known probes of the smallest batch, and of others; few where nothing hints."""
        small = self._observed.small
        batches = [p for p in self._computed if p.kind == "batch" and p.size != small]
        values = [p for p in self._computed if p.kind == "value" and p.size == small]
        suspects = [*batches[:1], *values, *batches[1:]]
        hint = not self._trials.silent or self._traced.warned
        return suspects if hint else suspects[:_UNSUSPECTED]

    def _coarse(self, along: Sequence[ProbeFamily]) -> Iterator[tuple[str, Batch]]:
        """The grids of all families in turns, then mixtures."""
        grids = [(family, _ends_first(family.grid)) for family in along]
        for turn in range(max((len(grid) for _, grid in grids), default=0)):
            for family, grid in grids:
                if turn < len(grid):
                    yield family.title(grid[turn]), family.build(grid[turn])
        yield from mixtures(self._observed)

    def _done(self) -> bool:
        """True if every branch flipped, and some of it made a difference."""
        branches = range(len(self._trials.example.path))
        return bool(self._trials.different) and all(map(self._trials.flipped, branches))

    def _refine(self, branch: int, along: Sequence[ProbeFamily]) -> None:
        """Look around the input that came nearest to flipping the branch."""
        curves = [(family, self._curve(family, branch)) for family in along]
        curves = [(family, curve) for family, curve in curves if curve]
        if not curves:
            return
        family, curve = min(curves, key=lambda pair: min(map(abs, pair[1].values())))
        for _ in range(_REFINEMENTS):
            at = _next(curve)
            if at is None:
                return
            name = family.title(at)
            tried = self._trials.attempt(name, family.build(at))
            if tried is None or self._trials.flipped(branch):
                return
            margin = self._trials.margin(name, branch)
            curve[at] = math.inf if margin is None else margin

    def _curve(self, family: ProbeFamily, branch: int) -> dict[float, float]:
        """The branch's margin along the family, where it is known."""
        margins = {at: self._trials.margin(family.title(at), branch) for at in family.grid}
        return {at: m for at, m in margins.items() if m is not None and math.isfinite(m)}

    def _result(self) -> tuple[TraceSearch, list[Probe]]:
        """One probe for each path and shape that no known probe has."""
        different = self._trials.different
        found = [trial.name for trial in different if trial.batch is None]
        covered = {(trial.path, trial.shapes) for trial in different if trial.batch is None}
        probes: list[Probe] = []
        for trial in different:
            way = (trial.path, trial.shapes)
            if trial.batch is None or way in covered or len(probes) == _MOST_PROBES:
                continue
            covered.add(way)
            probes.append(_probe(trial.name, trial.batch))
        names = (*found, *(probe.name for probe in probes))
        return TraceSearch(tried=len(self._trials), found=names), probes


def _probe(name: str, batch: Batch) -> Probe:
    return Probe(f"search_{name}", "search", length(batch), lambda: batch)


def _ends_first(grid: tuple[float, ...]) -> list[float]:
    """The last, the first, the middle, and then the others."""
    return list(dict.fromkeys([grid[-1], grid[0], grid[len(grid) // 2], *grid]))


def _next(curve: dict[float, float]) -> float | None:
    """Half way from the point nearest to zero to the farther one of its neighbours; beyond it,
    ten times as far as the last step, where it is the first or last point."""
    points = sorted(curve)
    if len(points) < 2:
        return None
    nearest = min(range(len(points)), key=lambda index: abs(curve[points[index]]))
    here = points[nearest]
    if nearest in (0, len(points) - 1):
        inner = points[1] if nearest == 0 else points[-2]
        return here + 10 * (here - inner)
    there = max(points[nearest - 1], points[nearest + 1], key=lambda at: abs(at - here))
    same = here * there > 0 and max(here / there, there / here) > 8
    middle = math.copysign(math.sqrt(here * there), here) if same else (here + there) / 2
    return middle if middle not in curve else None
