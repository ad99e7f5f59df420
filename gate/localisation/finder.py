"""Matching by running: the file is cut where it is known, until all that can be told is told."""

from __future__ import annotations

import math
from collections.abc import Set

from gate.errors import GateError
from gate.localisation.bench import Bench
from gate.localisation.layout import Layout, Matching, Tensor
from gate.localisation.matching import ValueMatcher
from gate.localisation.runs import PieceSession
from gate.localisation.values import ComputedValue, Survey
from gate.policy.runtimes import plain_setup

_ROUNDS = 12
"""Runs of the first batch, at most. Without a gross fault there are two."""
_INNER = 4
"""Bytes of the file's tensors for each byte of the model's values, by experience: at most."""


class Finder:
    """Matches on the first batch, on the CPU with optimisations off.

    A fault spoils all values behind it. Cut there, they are right again and can be told by. From
    front to back, each value that still differs from its tensor is tried without one: where a
    node is missing, its readers read the tensor before.
    """

    def __init__(self, bench: Bench, survey: Survey, matcher: ValueMatcher) -> None:
        self._bench = bench
        self._survey = survey
        self._matcher = matcher

    def find(self, start: Layout | None = None) -> Layout:
        """The layout. `start`: what is known already, which stays where nothing equals a value.
        Raises EvidenceError, and what ONNX Runtime raises."""
        layout = self._matched(start or Layout())
        tried = set(start.matching.tensors) if start else set()
        for _ in range(_ROUNDS):
            better = self._matched(layout)
            misplaced = self._misplaced(layout, better)
            if misplaced:
                layout = _absent(layout, misplaced)
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
        return layout

    def _tried(self, layout: Layout, value: ComputedValue) -> Layout:
        """The layout without a tensor for the value, if that is the better one."""
        stand_in = self._stand_in(layout, value)
        if stand_in is None:
            trial = self._matched(_absent(layout, {value.number}))
            return trial if trial.matching.equal >= layout.matching.equal else layout
        trial = self._matched(_without(layout, value, stand_in))
        # The first value on which they disagree decides: further behind, what is still off in one
        # of them had right inputs in the other.
        differing = trial.matching.equal ^ layout.matching.equal
        return trial if min(differing, default=math.inf) in trial.matching.equal else layout

    def _matched(self, layout: Layout) -> Layout:
        """Run the first batch with the file cut, and match again. Where the cut file can't run, a
        tensor is no such value: those that were taken by name only are left out."""
        try:
            return self._matched_again(layout)
        except GateError:
            raise
        except Exception:  # of ONNX Runtime, without a common base
            narrower = _narrower(layout, self._survey)
            if narrower is None:
                raise
            return self._matched(narrower)

    def _matched_again(self, layout: Layout) -> Layout:
        bench, survey = self._bench, self._survey
        batch, names = bench.batches[0], bench.graph.tensors
        values = bench.side.values(batch, survey, set(layout.put_in.values()))
        size = _INNER * sum(value.nbytes for value in survey.values)
        tensors: list[Tensor] = []
        for part in bench.parts(names, size=size):
            piece = bench.graph.cut(part, layout.cuts)
            run = PieceSession(piece, plain_setup("ort-cpu"))
            arrays = run(bench.feed(batch), layout.references(piece.cuts, values))
            tensors += self._matcher.tensors(arrays)
        without = {*layout.missing, *layout.absent}
        matching = self._matcher.match(tensors, layout.matching.names, without=without)
        return Layout(matching, layout.missing, layout.absent)

    def _misplaced(self, layout: Layout, better: Layout) -> set[int]:
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

    def _doubtful(self, layout: Layout, tried: set[int]) -> ComputedValue | None:
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
            if self._stand_in(layout, value) is not None or self._may_be_unused(layout, value):
                return value
        return None

    def _may_be_unused(self, layout: Layout, value: ComputedValue) -> bool:
        """True if it has a tensor, and another output of the same call has one too: exporters leave
        out the outputs that nothing uses."""
        survey, matched = self._survey, layout.matching.tensors
        returned = {n for at in survey.outputs for n in (at, survey.values[at].repeats)}
        return value.number in matched.keys() - returned and any(
            (other.path, other.call) == (value.path, value.call)
            for other in survey.values
            if other.number in matched.keys() - {value.number, *survey.inputs}
            and not other.functional
        )

    def _stand_in(self, layout: Layout, value: ComputedValue) -> str | None:
        """The tensor that readers of the value would read if no node computed it."""
        names = layout.names
        for number in self._matcher.before(value, names) or ():
            if self._survey.values[number].shape == value.shape:
                return names[number]
        return None


def _without(layout: Layout, value: ComputedValue, stand_in: str) -> Layout:
    """The tensor before in the place of this one; all that is not sure behind is open again."""
    missing = {**layout.missing, value.number: stand_in}
    return Layout(layout.matching.sure(), missing, layout.absent)


def _narrower(layout: Layout, survey: Survey) -> Layout | None:
    """The layout without the tensors of another shape or, if there are none, without all that don't
    equal their values; None if there are none either."""
    matching = layout.matching
    unsure = [n for n in matching.tensors if n not in matching.equal]
    resized = [n for n in unsure if matching.tensors[n].shape != survey.values[n].shape]
    lost = frozenset(resized or unsure)
    return _absent(layout, lost) if lost else None


def _absent(layout: Layout, lost: Set[int]) -> Layout:
    """No tensor for these values; all others keep theirs."""
    tensors = {n: one for n, one in layout.matching.tensors.items() if n not in lost}
    matching = Matching(tensors, layout.matching.equal)
    return Layout(matching, layout.missing, layout.absent | lost)
