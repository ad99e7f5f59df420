"""List what changed against the champion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from gate.decision.champion import Champion
from gate.decision.decide import Decision
from gate.records.champion_comparison import ChampionComparison, TrendRow
from gate.records.evidence import Environment, Evidence, differences, fields_of
from gate.storage.digest import Digest
from gate.storage.safe_text import make_printable, shorten
from gate.summary.render import allowed, format_number
from gate.summary.summary import Change, ChangeRow

if TYPE_CHECKING:
    from gate.records.evidence import Difference


def machines_sentence(old: Environment, new: Environment, *, baseline: str) -> str | None:
    """Describe how the two machines differ, apart from libraries, or return None.

    `baseline`: the label of the old machine.
    """
    changed = [each for each in differences(old, new) if not each.name.startswith("version of ")]
    if not changed:
        return None
    now = ", ".join(_difference_text(each, each.now) for each in changed)
    before = ", ".join(_difference_text(each, each.before) for each in changed)
    return make_printable(f"measured on: {now} | {baseline}: {before}")


def _difference_text(difference: Difference, text: str) -> str:
    plain = difference.name in ("processor", "instruction sets", "operating system", "kernel")
    return text if plain else f"{difference.name} {text}"


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
    rows.sort(key=lambda row: not row.changed)
    return change.model_copy(update={"rows": tuple(rows), "machines": machines})


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
    for row in rows:
        yield row if old.dataset.sha256 == new.dataset.sha256 else _mark_incomparable(row)
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
    """Yield the rows on how the two files were made."""
    yield _text_row("opset", str(old.subject.opset), str(new.subject.opset))
    yield _text_row("exporter", old.subject.producer, new.subject.producer)
    settings, new_settings = _settings(old), _settings(new)
    for name in dict.fromkeys((*new_settings, *settings)):
        yield _text_row(f"export {name}", settings.get(name), new_settings.get(name))
    yield _text_row("model", old.source.factory, new.source.factory)
    before, now = old.source, new.source
    yield _digest_row("checkpoint", before.checkpoint_sha256, now.checkpoint_sha256)
    if before.is_onnx or now.is_onnx:
        yield _digest_row("reference file", before.onnx_sha256, now.onnx_sha256)
    codes = [None if each.code is None else each.code.digest() for each in (before, now)]
    yield _digest_row("code of the model", *codes)
    yield _digest_row("preprocessing", before.preprocess_sha256, now.preprocess_sha256)
    yield _digest_row("data", old.dataset.sha256, new.dataset.sha256)
    if before.slices_sha256 or now.slices_sha256:
        yield _digest_row("slices", before.slices_sha256, now.slices_sha256)
    yield _text_row("samples", str(old.dataset.samples), str(new.dataset.samples))
    yield from _machine_rows(old.environment, new.environment)


def _machine_rows(old: Environment, new: Environment) -> Iterator[ChangeRow]:
    """Yield the rows on machines and libraries: equal fields first, then those that differ."""
    differing = {each.name: each for each in differences(old, new)}
    before = fields_of(old)
    for name, now in fields_of(new).items():
        if name not in differing and None not in (now, before.get(name)):
            yield _text_row(name, now, now)
    for each in differing.values():
        yield _text_row(each.name, each.before, each.now)


def _bound_rows(old: Decision | None, new: Decision) -> Iterator[ChangeRow]:
    """Yield the applied bounds of the policy that were changed, added or removed."""
    yield _digest_row("policy", None if old is None else old.policy_sha256, new.policy_sha256)
    if old is None or old.policy_sha256 == new.policy_sha256:
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


def _settings(evidence: Evidence) -> dict[str, str]:
    if evidence.export is None:
        return {}
    settings = {name: str(value) for name, value in evidence.export.settings.items()}
    return {"strategy": evidence.export.strategy} | {
        name: "none" if value == "None" else value for name, value in settings.items()
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


def _mark_incomparable(row: ChangeRow) -> ChangeRow:
    """Return the row of a number from different samples: neither better nor worse."""
    before = f"{row.before} (not comparable: other samples)"
    return row.model_copy(update={"before": before, "changed": True, "sense": None})


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


def _digest_row(name: str, before: Digest | None, now: Digest | None) -> ChangeRow:
    return _text_row(name, *(None if each is None else each.short for each in (before, now)))


def _format_size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 10**6 else f"{size} bytes"
