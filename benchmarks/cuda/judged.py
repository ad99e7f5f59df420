"""The cells, judged: by the built-in bounds, or by others. Nothing is measured again for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.corpus.judge import numbers
from benchmarks.corpus.registry import ENTRIES
from benchmarks.cuda.cell import Cell, setting_of
from benchmarks.cuda.device import BASELINE, Device
from benchmarks.cuda.store import Kept
from gate.decision.check_result import CheckResult
from gate.decision.decide import decide
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence

_ENTRIES = {entry.name: entry for entry in ENTRIES}
_WHENEVER = "1970-01-01T00:00:00+00:00"
Proposed = tuple[Bounds, float]
"""Of the runtimes on CUDA, and of probes."""


@dataclass(frozen=True)
class Judged:
    """One cell that was measured, refused, or failed."""

    cell: Cell
    kept: Kept
    problems: tuple[CheckResult, ...] = ()
    """Of this runtime, and of the file itself."""

    @property
    def runtime(self) -> RuntimeEvidence | None:
        """Its evidence; None where there is none."""
        runtimes = self.kept.evidence.runtimes if self.kept.evidence else ()
        return runtimes[0] if runtimes else None

    @property
    def computed(self) -> bool:
        """Whether it has numbers."""
        return self.runtime is not None and self.runtime.measured

    @property
    def passes(self) -> bool:
        """Whether nothing refuses it."""
        return self.computed and not self.problems

    @property
    def refused(self) -> bool:
        """Whether something does: a cell that failed or has no file is neither."""
        return not self.passes and self.kept.status in ("measured", "refused")

    @property
    def proven(self) -> bool:
        """Whether it ran where its name says, so that its numbers are those of its runtime."""
        return self.computed and all(one.name != "provider" for one in self.problems)

    @property
    def faulty(self) -> bool:
        """Whether its file must not pass."""
        return self.cell.part == "corpus" and _ENTRIES[self.cell.subject].faulty

    @property
    def tf32(self) -> bool:
        """Whether it was computed with fewer bits on purpose."""
        return setting_of(self.cell.part, self.cell.setting).tf32

    @property
    def calibrates(self) -> bool:
        """Whether bounds on CUDA must let it pass."""
        return self.proven and not (self.faulty or self.tf32 or self.cell.role == BASELINE)

    @property
    def why(self) -> str:
        """Why it does not pass, in words; empty: it does."""
        if self.problems:
            return "; ".join(dict.fromkeys(one.label for one in self.problems))
        return self.kept.reason

    def numbers(self) -> dict[str, float]:
        """Metric to its worst value over the outputs and probes."""
        return numbers(self.kept.evidence) if self.kept.evidence else {}


def judged(
    kept: Mapping[Cell, Kept], device: Device, proposed: Proposed | None = None
) -> list[Judged]:
    """All cells, in their order. Cells of one measurement are decided together, and of others
    apart: two exports of a scripted model are unlike files, whose probes have other sizes."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell, one in kept.items():
        measurement = "" if one.evidence is None else _measurement(one.evidence)
        key = (cell.part, cell.subject, cell.setting, measurement)
        groups.setdefault(key, []).append(cell)
    found = {
        cell: one
        for cells in groups.values()
        for cell, one in _group(cells, kept, device, proposed)
    }
    return [found[cell] for cell in kept]


def rejudged(cells: Iterable[Judged], device: Device, proposed: Proposed) -> list[Judged]:
    """The same cells by other bounds."""
    return judged({one.cell: one.kept for one in cells}, device, proposed)


def _group(
    cells: Sequence[Cell], kept: Mapping[Cell, Kept], device: Device, proposed: Proposed | None
) -> Iterable[tuple[Cell, Judged]]:
    evidence = _together([one for cell in cells if (one := kept[cell].evidence) is not None])
    with_evidence = [cell for cell in cells if kept[cell].evidence is not None]
    problems: tuple[CheckResult, ...] = ()
    if evidence is not None:
        first = with_evidence[0]
        gaps = first.part == "corpus" and _ENTRIES[first.subject].architecture.gaps
        policy = setting_of(first.part, first.setting).policy(
            device, [cell.role for cell in with_evidence], gaps=gaps, proposed=proposed
        )
        problems = decide(policy, evidence, decided_at=_WHENEVER).problems
    for cell in cells:
        own = Judged(cell, kept[cell])
        if cell in with_evidence:
            places = (None, device.name(cell.role))
            own = replace(own, problems=tuple(p for p in problems if p.runtime in places))
        yield cell, own


def _measurement(evidence: Evidence) -> str:
    return f"{evidence.measured_at} {evidence.subject.sha256.hex}"


def _together(evidences: Sequence[Evidence]) -> Evidence | None:
    """One evidence of all their runtimes."""
    if not evidences:
        return None
    runtimes = tuple(runtime for one in evidences for runtime in one.runtimes)
    return evidences[0].model_copy(update={"runtimes": runtimes})
