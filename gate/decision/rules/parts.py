"""Parts of a release: each was measured, as the file that belongs to it. A rule of its own, because
a part that nobody measured has no checks that could fail."""

from __future__ import annotations

from gate.decision.checks import CheckResult, Verdict
from gate.records.evidence import Evidence, SubjectPart


def whole(part: SubjectPart, measured: Evidence | None, name: str) -> CheckResult:
    """`part`: the evidence is there, and about this file."""
    if measured is None:
        found = "nobody measured it"
    elif measured.subject.sha256 != part.sha256:
        found = f"what was measured is {measured.subject.sha256.short}"
    else:
        return CheckResult(
            name="part", part=name, verdict=Verdict.PASS, explanation=f"measured: {part.file}"
        )
    return CheckResult(
        name="part",
        part=name,
        verdict=Verdict.ERROR,
        explanation=f"the part {name} is {part.file}, {part.sha256.short}, and {found}.",
        remedy="Measure the release again.",
    )
