"""Two judgements side by side: what changed from one to the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from gate.records.evidence import Evidence
from gate.report.records import JudgedRecords
from gate.story.story import Change, ChangeRow
from gate.story.wording import number, printable


def compare(before: JudgedRecords, now: JudgedRecords) -> Change:
    """The change; what changed first."""
    old, new = before.evidence, now.evidence
    rows = [
        _row("verdict", before.decision.verdict, now.decision.verdict),
        *_numbers(old, new),
        _row("file", old.subject.sha256.short, new.subject.sha256.short),
        _row("bytes", str(old.subject.size_bytes), str(new.subject.size_bytes)),
        _row("opset", str(old.subject.opset), str(new.subject.opset)),
        _row("producer", old.subject.producer, new.subject.producer),
        _row("samples", _samples(old), _samples(new)),
        _row("policy", before.decision.policy_sha256.short, now.decision.policy_sha256.short),
        _row("versions", _versions(old), _versions(new)),
        _row("machine", old.environment.cpu, new.environment.cpu),
    ]
    return Change(
        sha256=before.decision.subject_sha256,
        rows=tuple(sorted(rows, key=lambda row: not row.changed)),
    )


def _numbers(old: Evidence, new: Evidence) -> Iterator[ChangeRow]:
    """What both measured in a runtime: the worst of the outputs, and the time of a batch."""
    for runtime in new.runtimes:
        other = old.runtime(runtime.runtime)
        if other is None or not (other.measured and runtime.measured):
            continue
        outputs = other.outputs, runtime.outputs
        ratios = [_largest(o.noise.ratio for o in side if o.noise) for side in outputs]
        yield from _measured(f"noise_ratio, {runtime.runtime}", *ratios, less=True)
        agreements = [
            _smallest(o.classification.top1_agreement for o in side if o.classification)
            for side in outputs
        ]
        yield from _measured(f"agreement, {runtime.runtime}", *agreements, less=False)
        times = [side.latency.median_ms if side.latency else None for side in (other, runtime)]
        yield from _measured(f"ms a batch, {runtime.runtime}", *times, less=True)


def _measured(
    name: str, before: float | None, now: float | None, *, less: bool
) -> Iterator[ChangeRow]:
    if before is None or now is None:
        return
    row = _row(name, number(before), number(now))
    better = (now < before) is less
    sense = ("better" if better else "worse") if row.changed else None
    yield row.model_copy(update={"sense": sense if math.isfinite(before + now) else None})


def _row(name: str, before: str, now: str) -> ChangeRow:
    texts = printable(before), printable(now)
    return ChangeRow(name=name, before=texts[0], now=texts[1], changed=texts[0] != texts[1])


def _samples(evidence: Evidence) -> str:
    return f"{evidence.dataset.samples}, {evidence.dataset.sha256.short}"


def _versions(evidence: Evidence) -> str:
    return ", ".join(f"{key} {value}" for key, value in evidence.environment.versions.items())


def _largest(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=None)


def _smallest(values: Iterable[float]) -> float | None:
    largest = _largest(-value for value in values)
    return None if largest is None else -largest
