"""The outcome of one entry, and the rates over all entries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.corpus.entry import Entry

Top1 = Literal["passes", "refuses", "silent"]
"""`silent`: the model has no classes, so agreement says nothing and stops nothing."""


@dataclass(frozen=True)
class Ruling:
    """What a gate said of a pair."""

    passed: bool
    caught_by: tuple[str, ...] = ()
    """Names of the checks that failed, in the gate's order, or the type of its error."""
    told: str = ""
    """What the first of them said."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Metric to its worst value over all runtimes, outputs and probes."""
    located: str | None = None
    """The layer that was named as the first to diverge."""
    explained: str = ""
    """What localisation said, or why it could say nothing."""
    results: tuple[str, ...] = ()
    """Of each check that failed: where, verdict, observed value and bound."""
    cause: str = ""
    """Title of the main cause; empty if it passed."""


@dataclass(frozen=True)
class Outcome:
    """One entry, judged."""

    name: str
    kind: str
    faulty: bool
    architecture: str
    recipe: str
    summary: str
    refused: str | None = None
    """Why the exporter wrote no file; then nothing was judged."""
    ruling: Ruling | None = None
    top1: Top1 | None = None
    """What a script that compares winning classes would have said."""
    effect: float | None = None
    """rms(e64 - r64) / rms(r32 - r64) on the samples, in the output, sample, channel or column
    where it is largest; e is the model that was exported instead of r: the size of the fault in
    units of rounding, without ONNX and without the gate."""
    layer: str | None = None
    located_right: bool | None = None
    """Whether localisation named `layer`; None where there is none, or the file passed."""
    seconds: float = 0.0

    @classmethod
    def from_entry(cls, entry: Entry, **seen: Any) -> Outcome:
        """The outcome of an entry."""
        return cls(
            name=entry.name,
            kind=entry.kind,
            faulty=entry.faulty,
            architecture=entry.architecture.name,
            recipe=entry.recipe.name,
            summary=entry.summary,
            layer=entry.layer,
            **seen,
        )

    @property
    def escaped(self) -> bool:
        """A faulty file passed."""
        return self.faulty and self.ruling is not None and self.ruling.passed

    @property
    def blocked(self) -> bool:
        """A correct file was refused."""
        return not self.faulty and self.ruling is not None and not self.ruling.passed

    def plain(self) -> dict[str, Any]:
        """For JSON: NaN and infinities as words."""
        return _plain(asdict(self))


@dataclass(frozen=True)
class Rates:
    """Counts over outcomes that were judged."""

    faults: int
    escaped: int
    correct: int
    blocked: int
    refused: int
    """Entries that no exporter wrote a file for."""
    lost: int
    """Faults among them: their class is not covered."""
    top1_passes: int
    """Faults that agreement of the winning class alone would let pass."""
    layers: int
    """Faults of a single layer that were refused, so that there was something to localise."""
    located: int

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[Outcome]) -> Rates:
        """Count."""
        seen = list(outcomes)
        judged = [one for one in seen if one.ruling is not None]
        faults = [one for one in judged if one.faulty]
        layers = [one for one in faults if one.located_right is not None]
        return cls(
            faults=len(faults),
            escaped=sum(one.escaped for one in faults),
            correct=len(judged) - len(faults),
            blocked=sum(one.blocked for one in judged),
            refused=sum(one.refused is not None for one in seen),
            lost=sum(one.faulty and one.refused is not None for one in seen),
            top1_passes=sum(one.top1 in ("passes", "silent") for one in faults),
            layers=len(layers),
            located=sum(bool(one.located_right) for one in layers),
        )

    @property
    def green(self) -> bool:
        """Something was judged, and nothing escaped, was blocked, misplaced or lost."""
        wrong = self.escaped + self.blocked + self.layers - self.located + self.lost
        return self.faults + self.correct > 0 and wrong == 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
