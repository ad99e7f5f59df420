"""List what changed against the champion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from gate.decision.champion import Champion
from gate.decision.decide import Decision
from gate.records.champion_comparison import ChampionComparison, TrendRow
from gate.records.evidence import Environment, Evidence, differences, fields_of
from gate.storage.safe_text import make_printable, shorten
from gate.summary.render import allowed, format_number
from gate.summary.summary import Change, ChangeRow

_PLAIN = ("processor", "instruction sets", "operating system", "kernel")
"""Fields whose values need no name."""


def machines_sentence(old: Environment, new: Environment, *, baseline: str) -> str | None:
    """Describe how the two machines differ, apart from libraries, or return None.

    `baseline`: the label of the old machine.
    """
    changed = [each for each in differences(old, new) if not each.name.startswith("version of ")]
    if not changed:
        return None
    names = ["" if each.name in _PLAIN else f"{each.name} " for each in changed]
    now = ", ".join(f"{name}{each.now}" for name, each in zip(names, changed, strict=True))
    before = ", ".join(f"{name}{each.before}" for name, each in zip(names, changed, strict=True))
    return make_printable(f"measured on: {now} | {baseline}: {before}")


# This module decides nothing. A number counts as better or worse only if its direction is certain.
# Rows on how the files were made are informative.


Sense = Literal["better", "worse"]

UNRECORDED = "not recorded"

_NO_BOUND = "no bound"

_FILE_CHECKS = ("probe_", "graph_", "near_ties")

_SAME_LATENCY = 0.05
"""Relative difference of medians between runs of the same file."""

_MAX_LENGTH = 200
"""Longest value in characters: settings may be lists."""


def no_comparison() -> Change:
    """Return a change without a comparison, because none was requested."""
    return Change(absent="--against was not given")


def compare_with_champion(
    decision: Decision, evidence: Evidence, champion: Champion | None
) -> Change:
    """Return the changes from the champion.

    `champion`: None if not requested. Its `incumbent` holds the result of running both files.
    """
    if champion is None:
        return no_comparison()
    incumbent = decision.incumbent or champion.incumbent
    change = Change(
        version=champion.version,
        sha256=champion.sha256,
        trend=champion.trend.followed_by(evidence).rows,
    )
    old = champion.evidence
    if old is None:
        reason = make_printable(champion.absent or "its evidence is not there")
        return change.model_copy(update={"absent": reason})
    if champion.sha256 == evidence.subject.sha256:
        return change.model_copy(update={"absent": "it is this very file"})
    rows = [
        *_output_rows(incumbent),
        *_measured_rows(old, evidence, incumbent),
        *_provenance_rows(old, evidence),
        *_bound_rows(champion.decision, decision),
    ]
    machines = machines_sentence(old.environment, evidence.environment, baseline="champion")
    return change.model_copy(
        update={"rows": tuple(sorted(rows, key=lambda row: not row.changed)), "machines": machines}
    )


def change_between(
    before: tuple[Decision, Evidence], decision: Decision, evidence: Evidence
) -> Change:
    """Return the changes between two judgments according to their records.

    The two files were not run together.
    """
    old_decision, old = before
    rows = [
        _text_row("verdict", old_decision.verdict, decision.verdict),
        *_measured_rows(old, evidence, None),
        *_provenance_rows(old, evidence),
        *_bound_rows(old_decision, decision),
    ]
    return Change(
        sha256=old_decision.subject_sha256,
        rows=tuple(sorted(rows, key=lambda row: not row.changed)),
        machines=machines_sentence(old.environment, evidence.environment, baseline="before"),
    )


def _output_rows(incumbent: ChampionComparison | None) -> Iterator[ChangeRow]:
    """Yield the rows on the outputs of both files for the same samples."""
    if incumbent is None or incumbent.state != "compared":
        why = incumbent.absent if incumbent is not None else None
        yield ChangeRow(
            name="answers to these samples",
            before="not compared",
            now=make_printable(why or "the two files were not run in the same session"),
            changed=True,
        )
        return
    several = len(incumbent.outputs) > 1
    for answers in incumbent.outputs:
        suffix = f" of {make_printable(answers.name)}" if several else ""
        if answers.champion_accuracy is not None and answers.accuracy is not None:
            yield _number_row(
                f"accuracy{suffix}", answers.champion_accuracy, answers.accuracy, more_is="better"
            )
        if answers.disagreements is None:
            continue
        equal = answers.samples - answers.disagreements
        yield ChangeRow(
            name=f"same answers{suffix}",
            before=f"{answers.samples} of {answers.samples}",
            now=f"{equal} of {answers.samples}",
            changed=answers.disagreements > 0,
        )
    if incumbent.champion_latency is not None and incumbent.latency is not None:
        old, new = incumbent.champion_latency, incumbent.latency
        unit = f"ms for {new.batch_size} samples, side by side"
        row = _number_row("latency", old.median_ms, new.median_ms, more_is="worse", unit=unit)
        same = math.isclose(old.median_ms, new.median_ms, rel_tol=_SAME_LATENCY)
        yield row.model_copy(update={"changed": False, "sense": None}) if same else row


def _measured_rows(
    old: Evidence, new: Evidence, incumbent: ChampionComparison | None
) -> Iterator[ChangeRow]:
    """Yield the rows on numbers that each evidence holds."""
    before, now = TrendRow.from_evidence(old), TrendRow.from_evidence(new)
    agreements = (before.agreement, now.agreement)
    rows = (
        _number_row("noise ratio", before.noise_ratio, now.noise_ratio, more_is="worse"),
        _number_row("agreement with its own model", *agreements, more_is="better"),
    )
    if old.dataset.sha256 == new.dataset.sha256:
        yield from rows
    else:  # neither better nor worse
        for row in rows:
            earlier = f"{row.before} (not comparable: other samples)"
            update = {"before": earlier, "changed": True, "sense": None}
            yield row.model_copy(update=update)
    if incumbent is None or incumbent.latency is None:
        # Measured on different machines or at different times: neither better nor worse.
        yield _number_row(
            "latency", before.latency_ms, now.latency_ms, more_is=None, unit="ms, measured apart"
        )
    sizes = [float(each.subject.size_bytes) for each in (old, new)]
    yield ChangeRow(
        name="size",
        before=_format_size(old.subject.size_bytes),
        now=_format_size(new.subject.size_bytes),
        changed=sizes[0] != sizes[1],
        sense=_sense(sizes[0], sizes[1], "worse"),
    )


def _provenance_rows(old: Evidence, new: Evidence) -> Iterator[ChangeRow]:
    """Yield the rows on how the two files were made, and on machines and libraries."""
    before, now = _provenance(old), _provenance(new)
    for name in dict.fromkeys((*now, *before)):
        if before.get(name) is not None or now.get(name) is not None or name not in _OPTIONAL:
            yield _text_row(name, before.get(name), now.get(name))
    differing = {each.name: each for each in differences(old.environment, new.environment)}
    fields = fields_of(old.environment)
    for name, text in fields_of(new.environment).items():
        if name not in differing and None not in (text, fields.get(name)):
            yield _text_row(name, text, text)
    for each in differing.values():
        yield _text_row(each.name, each.before, each.now)


_OPTIONAL = ("reference file", "slices")
"""Files that few measurements have."""


def _provenance(evidence: Evidence) -> dict[str, str | None]:
    """Return what a file was made from, and the samples, by name."""
    source, dataset, export = evidence.source, evidence.dataset, evidence.export
    settings = {}
    if export is not None:
        settings = {"strategy": export.strategy} | {
            name: "none" if value is None else str(value) for name, value in export.settings.items()
        }
    digests = {
        "checkpoint": source.checkpoint_sha256,
        "reference file": source.onnx_sha256,
        "code of the model": None if source.code is None else source.code.digest(),
        "preprocessing": source.preprocess_sha256,
        "data": dataset.sha256,
        "slices": source.slices_sha256,
    }
    return {
        "opset": str(evidence.subject.opset),
        "exporter": evidence.subject.producer,
        **{f"export {name}": value for name, value in settings.items()},
        "model": source.factory,
        **{name: each.short if each else None for name, each in digests.items()},
        "samples": str(dataset.samples),
    }


def _bound_rows(old: Decision | None, new: Decision) -> Iterator[ChangeRow]:
    """Yield the applied bounds of the policy that were changed, added or removed."""
    policy = None if old is None else old.policy_sha256
    yield _text_row("policy", policy.short if policy else None, new.policy_sha256.short)
    if old is None or policy == new.policy_sha256:
        return
    before, now = _bounds_by_check(old), _bounds_by_check(new)
    for title in dict.fromkeys((*now, *before)):
        earlier, applied = before.get(title, _NO_BOUND), now.get(title, _NO_BOUND)
        if earlier != applied:
            yield _text_row(f"bound of {title}", earlier, applied)


def _bounds_by_check(decision: Decision) -> dict[str, str]:
    """Return bounds by check, without those of probes and the graph, which depend on the file."""
    return {
        check.title: allowed(check)
        for check in decision.checks
        if check.bound is not None and not check.name.startswith(_FILE_CHECKS)
    }


def _number_row(
    name: str, before: float | None, now: float | None, *, more_is: Sense | None, unit: str = ""
) -> ChangeRow:
    texts = [
        UNRECORDED if x is None else f"{format_number(x)} {unit}".strip() for x in (before, now)
    ]
    changed = texts[0] != texts[1]  # values that agree in four digits look the same to a reader
    sense = None
    if changed and before is not None and now is not None and more_is is not None:
        sense = _sense(before, now, more_is)
    return ChangeRow(name=name, before=texts[0], now=texts[1], changed=changed, sense=sense)


def _sense(before: float, now: float, more_is: Sense) -> Sense | None:
    """Return the side of the change; NaN is worse than every number."""
    if math.isnan(before) and math.isnan(now):
        return None
    if math.isnan(before) or math.isnan(now):
        return "worse" if math.isnan(now) else "better"
    if before == now:
        return None
    opposite: Sense = "worse" if more_is == "better" else "better"
    return more_is if now > before else opposite


def _text_row(name: str, before: str | None, now: str | None) -> ChangeRow:
    return ChangeRow(
        name=make_printable(name),
        before=_cell(before),
        now=_cell(now),
        changed=before != now,
    )


def _cell(text: str | None) -> str:
    text = UNRECORDED if text is None or not text.strip() else text
    return shorten(make_printable(text), _MAX_LENGTH)


def _format_size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 10**6 else f"{size} bytes"
