"""The outcome of one entry, and the rates over all entries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.corpus.entry import Entry

Top1 = Literal["passes", "refuses", "silent"]
"""`silent`: the first output has no classes, so top-1 agreement can't refuse the file."""


@dataclass(frozen=True)
class Ruling:
    """The decision of a gate about a pair."""

    passed: bool
    failed_checks: tuple[str, ...] = ()
    """Names of the failed checks in the gate's order, or the type of the gate's error."""
    explanation: str = ""
    """Message of the first failed check."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Worst value of each metric over all runtimes, outputs and probes."""
    located: str | None = None
    """The layer that was reported as the first to diverge."""
    explained: str = ""
    """The cause that localization reported, or why it failed."""
    results: tuple[str, ...] = ()
    """Title, verdict, observed value and bound of each failed check."""
    cause: str = ""
    """Title of the main cause; empty if the file passed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one entry."""

    name: str
    kind: str
    faulty: bool
    architecture: str
    recipe: str
    summary: str
    refused: str | None = None
    """Why the exporter wrote no file, in which case nothing was judged."""
    ruling: Ruling | None = None
    top1: Top1 | None = None
    """The verdict of a script that compares top-1 classes."""
    effect: float | None = None
    """Size of the fault in units of float32 rounding, without ONNX and the gate: rms(e64 - r64) /
    rms(r32 - r64) in the output, sample, channel or column where it is largest. e is the edited
    model and r the reference.
    """
    layer: str | None = None
    located_right: bool | None = None
    """Whether localization reported `layer`; None if there is none or the file passed."""
    seconds: float = 0.0

    @classmethod
    def from_entry(cls, entry: Entry, **fields: Any) -> Outcome:
        """Return the outcome of an entry."""
        return cls(
            name=entry.name,
            kind=entry.kind,
            faulty=entry.faulty,
            architecture=entry.architecture.name,
            recipe=entry.recipe.name,
            summary=entry.summary,
            layer=entry.layer,
            **fields,
        )

    @property
    def escaped(self) -> bool:
        """Return True if a faulty file passed."""
        return self.faulty and self.ruling is not None and self.ruling.passed

    @property
    def blocked(self) -> bool:
        """Return True if a correct file was refused."""
        return not self.faulty and self.ruling is not None and not self.ruling.passed

    def plain(self) -> dict[str, Any]:
        """Return the outcome for JSON, with NaN and infinity as strings."""
        return to_json(asdict(self))


@dataclass(frozen=True)
class Rates:
    """Counts over the judged outcomes."""

    faults: int
    escaped: int
    correct: int
    blocked: int
    refused: int
    """Entries for which the exporter wrote no file."""
    lost: int
    """Faults for which the exporter wrote no file, so their class is not covered."""
    top1_passes: int
    """Faults that top-1 agreement alone would accept."""
    layers: int
    """Refused faults of a single layer, which localization should report."""
    located: int

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[Outcome]) -> Rates:
        """Count the outcomes."""
        all_outcomes = list(outcomes)
        judged = [outcome for outcome in all_outcomes if outcome.ruling is not None]
        faults = [outcome for outcome in judged if outcome.faulty]
        layers = [outcome for outcome in faults if outcome.located_right is not None]
        return cls(
            faults=len(faults),
            escaped=sum(outcome.escaped for outcome in faults),
            correct=len(judged) - len(faults),
            blocked=sum(outcome.blocked for outcome in judged),
            refused=sum(outcome.refused is not None for outcome in all_outcomes),
            lost=sum(outcome.faulty and outcome.refused is not None for outcome in all_outcomes),
            top1_passes=sum(outcome.top1 in ("passes", "silent") for outcome in faults),
            layers=len(layers),
            located=sum(bool(outcome.located_right) for outcome in layers),
        )

    @property
    def green(self) -> bool:
        """Return True if entries were judged and no outcome is wrong, mislocated or lost."""
        wrong = self.escaped + self.blocked + self.layers - self.located + self.lost
        return self.faults + self.correct > 0 and wrong == 0


def to_json(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by strings."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
