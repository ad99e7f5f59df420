"""The search for inputs on which the trace of the model and the model itself disagree.

A trace keeps each Python branch as its example took it. So the search watches which values the
model's code takes out of tensors (`Watch`), and how near each comparison is to flip: it looks for
inputs that take another path, along families of inputs, first coarsely, then around the value
that comes nearest. It needs no ONNX.

Cost: at most `instruments.search_inputs` inputs, nearly all of the smallest batch; each is one
forward of the model and, where it may make a difference, one more and one of the trace. A model
whose code reads no value out of its tensors can only have baked in a size or a constant: there,
a few inputs are tried and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gate.errors import ModelError
from gate.instruments import TraceSearch
from gate.parity.probes.families import Family, families, mixtures
from gate.parity.probes.observed import Observed, Probe
from gate.parity.probes.traced import Traced, disagree
from gate.parity.runner import Batch
from gate.parity.stand import Stand

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


@dataclass(frozen=True)
class _Trial:
    """One input that was tried."""

    name: str
    path: tuple[bool, ...]
    margins: tuple[float | None, ...]
    """Of the branches of the path."""
    reads: int
    """Values that the model's code took out of tensors."""
    differs: bool
    batch: Batch | None
    """The input; None where it is a known probe's, or shows nothing."""


class Search:
    """One search in the stand; `run` is called once."""

    def __init__(self, stand: Stand, observed: Observed, known: Sequence[Probe]) -> None:
        """`known`: the probes that are computed anyway."""
        self._stand = stand
        self._observed = observed
        self._known = {probe.name: probe for probe in known}
        self._trials: list[_Trial] = []
        self._tried = 0
        self._budget = stand.policy.instruments.search_inputs

    def run(self) -> tuple[TraceSearch, list[Probe]]:
        """What was found, and the further probes that it became."""
        example = self._observed.batch(self._observed.small)
        try:
            self._traced = Traced(self._stand, example)
        except ModelError as error:
            return TraceSearch(tried=0, reason=str(error)), []
        base = self._try("example", example)
        if base is None or base.differs:
            reason = (
                "the trace gives another answer than the model on its own input: the model is "
                "random, or keeps something from one call to the next"
            )
            return TraceSearch(tried=self._tried, reason=reason), []
        self._base = base
        self._look()
        return self._result()

    def _look(self) -> None:
        for probe in self._suspects():
            self._try(probe.name, probe.batch)
        if self._silent:
            if not self._traced.warned:
                return
            self._budget = min(self._budget, _WARNED)
        coarse = int(self._budget * _COARSE_SHARE)
        along = families(self._observed)
        for family, at in _in_turns(along):
            if self._tried >= coarse or self._done():
                break
            self._try(family.title(at), family.build(at))
        for name, batch in mixtures(self._observed):
            if self._tried >= coarse or self._done():
                break
            self._try(name, batch)
        for branch in range(len(self._base.path)):
            if not self._flipped(branch):
                self._refine(branch, along)

    def _suspects(self) -> list[Probe]:
        """The known probes of the smallest batch, and of others; few where nothing hints."""
        small = self._observed.small
        batches = [p for p in self._known.values() if p.kind == "batch" and p.size != small]
        values = [p for p in self._known.values() if p.kind == "value" and p.size == small]
        suspects = [*batches[-1:], *values, *batches[:-1]]
        return suspects[:_UNSUSPECTED] if self._silent and not self._traced.warned else suspects

    def _refine(self, branch: int, along: list[Family]) -> None:
        """Look between the inputs that come nearest to flipping the branch."""
        curves = [(family, self._curve(family, branch)) for family in along]
        curves = [(family, curve) for family, curve in curves if curve]
        if not curves:
            return
        family, curve = min(curves, key=lambda pair: min(map(abs, pair[1].values())))
        for _ in range(_REFINEMENTS):
            at = _between(curve)
            if at is None or self._tried >= self._budget:
                return
            trial = self._try(family.title(at), family.build(at))
            if trial is None or self._flipped(branch):
                return
            margin = self._margin(trial, branch)
            curve[at] = math.inf if margin is None else margin

    def _curve(self, family: Family, branch: int) -> dict[float, float]:
        """The branch's margin along the family, where it was tried."""
        trials = {trial.name: trial for trial in self._trials}
        known = {}
        for at in family.grid:
            trial = trials.get(family.title(at))
            margin = self._margin(trial, branch) if trial is not None else None
            if margin is not None and math.isfinite(margin):
                known[at] = margin
        return known

    def _margin(self, trial: _Trial, branch: int) -> float | None:
        """None where the path came not to this branch as the example's did."""
        before = self._base.path[:branch]
        return (
            trial.margins[branch]
            if trial.path[:branch] == before and len(trial.path) > branch
            else None
        )

    def _try(self, name: str, batch: Batch) -> _Trial | None:
        """Run the model and, unless its path is the example's, the trace. None without budget."""
        if self._tried >= self._budget or any(trial.name == name for trial in self._trials):
            return None
        self._tried += 1
        watch, computed = self._traced.watched(batch)
        branches = [read for read in watch.reads if read.branch is not None]
        path = tuple(bool(read.branch) for read in branches)
        differs = (
            computed and self._suspicious(name, path, len(watch.reads)) and self._differs(batch)
        )
        kept = batch if differs and name not in self._known else None
        margins = tuple(read.margin for read in branches)
        trial = _Trial(name, path, margins, len(watch.reads), differs, kept)
        self._trials.append(trial)
        return trial

    def _suspicious(self, name: str, path: tuple[bool, ...], reads: int) -> bool:
        """False where only branches could make a difference, and all are as in the example."""
        if not self._trials or name in self._known or reads > len(path) or not reads:
            return True
        return path != self._trials[0].path

    def _differs(self, batch: Batch) -> bool:
        """True if the trace gives another answer. The model runs without the watch, under which
        some of PyTorch's modules take a slower way with other roundings."""
        eager = self._stand.reference.run(batch)
        try:
            return disagree(eager, self._traced.run(batch))
        except Exception:  # whatever the trace can't compute and the model can
            return True

    @property
    def _silent(self) -> bool:
        return not any(trial.reads for trial in self._trials)

    def _flipped(self, branch: int) -> bool:
        before = self._base.path[:branch]
        return any(
            trial.path[:branch] == before
            and len(trial.path) > branch
            and trial.path[branch] != self._base.path[branch]
            for trial in self._trials
        )

    def _done(self) -> bool:
        """True if every branch flipped, and some of it made a difference."""
        return any(trial.differs for trial in self._trials) and all(
            self._flipped(branch) for branch in range(len(self._base.path))
        )

    def _result(self) -> tuple[TraceSearch, list[Probe]]:
        """One probe for each path that no known probe takes."""
        different = [trial for trial in self._trials if trial.differs]
        found = [trial.name for trial in different if trial.batch is None]
        covered = {trial.path for trial in different if trial.batch is None}
        probes: list[Probe] = []
        for trial in different:
            if trial.batch is None or trial.path in covered or len(probes) == _MOST_PROBES:
                continue
            covered.add(trial.path)
            probes.append(_probe(trial.name, trial.batch, self._observed.small))
        found += [probe.name for probe in probes]
        return TraceSearch(tried=self._tried, found=tuple(found)), probes


def _probe(name: str, batch: Batch, size: int) -> Probe:
    return Probe(f"search_{name}", "search", size, lambda: batch)


def _in_turns(along: list[Family]) -> Iterator[tuple[Family, float]]:
    """The grids of all families together, each from its ends and its middle first."""
    queues = [(family, _spread(family.grid)) for family in along]
    for turn in range(max((len(queue) for _, queue in queues), default=0)):
        for family, queue in queues:
            if turn < len(queue):
                yield family, queue[turn]


def _spread(grid: tuple[float, ...]) -> list[float]:
    """The last, the first, the middle, and then the others."""
    first = dict.fromkeys([grid[-1], grid[0], grid[len(grid) // 2]])
    return list(dict.fromkeys([*first, *grid]))


def _between(curve: dict[float, float]) -> float | None:
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
