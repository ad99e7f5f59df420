"""What changes against the champion: what changed first, better or worse where that is clear."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from gate.decision.champion import Champion
from gate.decision.decide import Decision, decide
from gate.policy.policy import Policy
from gate.records.champion_comparison import Trend
from gate.records.evidence import Evidence
from gate.report.markdown import summary_markdown
from gate.report.terminal import print_summary
from gate.summary.champion_changes import UNRECORDED, compare_with_champion, unasked
from gate.summary.summarize import summarize
from gate.summary.summary import Change, ChangeRow
from tests import builders

AT = "2026-01-01T00:00:00+00:00"


def old_evidence(**overrides: Any) -> Evidence:
    good = builders.evidence()
    subject = good.subject.model_copy(update={"sha256": builders.digest("champion.onnx")})
    return good.model_copy(update={"subject": subject, **overrides})


def of(policy: Policy, evidence: Evidence) -> Decision:
    return decide(policy, evidence, decided_at=AT)


def champion(evidence: Evidence | None = None, **overrides: Any) -> Champion:
    evidence = evidence or old_evidence()
    fields: dict[str, Any] = {
        "state": "proven",
        "version": "3",
        "sha256": builders.digest("champion.onnx"),
        "evidence": evidence,
        "decision": of(builders.policy(), evidence),
        "trend": Trend().followed_by(evidence),
        "incumbent": builders.incumbent(),
    }
    return Champion(**fields | overrides)


def change(
    old: Champion | None, new: Evidence | None = None, policy: Policy | None = None
) -> Change:
    new = new or builders.evidence()
    return compare_with_champion(of(policy or builders.policy(), new), new, old)


def row(made: Change, name: str) -> ChangeRow:
    return next(row for row in made.rows if row.name == name)


def test_what_changed_comes_first() -> None:
    made = change(champion())
    assert (made.version, made.sha256, made.absent) == ("3", builders.digest("champion.onnx"), None)
    order = [row.changed for row in made.rows]
    assert order == sorted(order, reverse=True)
    assert {row.name for row in made.rows if row.changed} == {"accuracy", "same answers", "latency"}
    assert row(made, "accuracy").model_dump() == {
        "name": "accuracy", "before": "0.97", "now": "0.965", "changed": True, "sense": "worse",
    }  # fmt: skip
    assert row(made, "same answers").now == "396 of 400"
    assert row(made, "latency").sense == "worse"
    assert "side by side" in row(made, "latency").now
    assert [each.sha256 for each in made.trend] == [
        builders.digest("champion.onnx"), builders.digest("model.onnx"),
    ]  # fmt: skip


def test_another_reference_file_is_a_change() -> None:
    def measured(name: str) -> Evidence:
        source = builders.evidence().source
        update = {"factory": "old.onnx", "onnx_sha256": builders.digest(name)}
        return builders.evidence(source=source.model_copy(update=update))

    old, new = measured("a"), measured("b")
    assert row(change(champion(old), new), "reference file").changed
    assert not row(change(champion(old), old), "reference file").changed
    assert "reference file" not in {each.name for each in change(champion()).rows}


def test_numbers_of_other_samples_are_not_compared() -> None:
    old = old_evidence()
    dataset = old.dataset.model_copy(update={"sha256": builders.digest("other samples")})
    noise = builders.noise_parity(ratio=0.5)
    output = builders.output_parity(noise=noise)
    runtimes = tuple(
        builders.runtime_evidence(each.runtime, outputs=(output,)) if each.outputs else each
        for each in old.runtimes
    )
    other = old.model_copy(update={"dataset": dataset, "runtimes": runtimes})
    for data, sense in ((old.dataset, "worse"), (dataset, None)):
        before = other.model_copy(update={"dataset": data})
        made = row(change(champion(before)), "noise ratio")
        assert made.sense == sense
        assert made.changed
        assert ("not comparable: other samples" in made.before) is (sense is None)
    made = row(change(champion(other)), "agreement with its own model")
    assert (made.changed, made.sense) == (True, None)


@pytest.mark.parametrize(
    ("now", "sense"), [(20.5, None), (19.5, None), (22.0, "worse"), (18.0, "better")]
)
def test_a_latency_that_only_wavers_is_no_change(now: float, sense: str | None) -> None:
    beside = builders.incumbent()
    assert beside.latency is not None
    slow = beside.latency.model_copy(update={"median_ms": now})
    made = change(champion(incumbent=beside.model_copy(update={"latency": slow})))
    assert (row(made, "latency").changed, row(made, "latency").sense) == (sense is not None, sense)


def with_noise(ratio: float) -> Evidence:
    output = builders.output_parity(noise=builders.noise_parity(ratio=ratio))
    return old_evidence(runtimes=(builders.runtime_evidence("ort-cpu", outputs=(output,)),))


@pytest.mark.parametrize(
    ("before", "sense", "changed"),
    [(1.4, "better", True), (0.9, "worse", True), (1.1, None, False), (math.nan, "better", True)],
)
def test_the_sense_of_a_number(before: float, sense: str | None, changed: bool) -> None:
    seen = row(change(champion(with_noise(before))), "noise ratio")
    assert (seen.sense, seen.changed) == (sense, changed)


def test_how_the_files_were_made_is_beside_each_other() -> None:
    good = old_evidence()
    assert good.export is not None
    export = good.export.model_copy(update={"strategy": "dynamo", "settings": {"opset": 12}})
    subject = good.subject.model_copy(update={"opset": 12, "size_bytes": 40_000_000})
    versions = {"torch": "2.14.0", "onnxruntime": "1.31.1"}
    environment = good.environment.model_copy(update={"versions": versions})
    old = good.model_copy(update={"export": export, "subject": subject, "environment": environment})
    made = change(champion(old))
    for name, before, now in (
        ("opset", "12", "13"),
        ("export strategy", "dynamo", "traced"),
        ("export opset", "12", "13"),
        ("export dynamo", UNRECORDED, "False"),
        ("version of torch", "2.14.0", "2.15.0"),
        ("size", "40.00 MB", "44.00 MB"),
    ):
        seen = row(made, name)
        assert (seen.before, seen.now, seen.changed) == (before, now, True), name
    assert not row(made, "version of onnxruntime").changed


def test_which_bounds_moved() -> None:
    looser = builders.policy()
    cpu = looser.runtimes["ort-cpu"]
    bounds = cpu.bounds.model_copy(update={"max_abs_diff": 9.0, "l2_logits": None})
    runtimes = looser.runtimes | {"ort-cpu": cpu.model_copy(update={"bounds": bounds})}
    made = change(champion(), policy=looser.model_copy(update={"runtimes": runtimes}))
    moved = [each for each in made.rows if each.name.startswith("bound of")]
    assert [(each.name, each.before, each.now) for each in moved] == [
        ("bound of ort-cpu / logits / max_abs_diff", "≤ 0.0001", "≤ 9"),
        ("bound of ort-cpu / logits / l2_logits", "≤ 0.001", "not asked"),
    ]
    assert row(made, "policy").changed


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (None, "--against"),
        (Champion(state="first", absent="no version of digits serves yet"), "serves yet"),
        (Champion(state="unvouched", version="3", absent="no line of the ledger"), "no line"),
        (Champion(state="unrecorded", version="3", absent="it has none"), "none"),
        (Champion.unavailable("RegistryUnavailable: nothing answers"), "nothing answers"),
        (champion(sha256=builders.digest("model.onnx")), "this very file"),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_compare_with_it_is_said(
    old: Champion | None, reason: str
) -> None:
    made = change(old)
    assert reason in str(made.absent)
    assert made.rows == ()
    assert reason in made.unmoved


def test_two_files_that_were_not_run_beside_each_other_are_compared_by_their_evidence() -> None:
    apart = builders.incumbent(state="incomparable", absent="other inputs", latency=None)
    made = change(champion(incumbent=apart))
    assert row(made, "answers to these samples").now == "other inputs"
    assert "measured apart" in row(made, "latency").now
    assert row(made, "latency").sense is None


def test_nothing_shows_none_or_steers_a_terminal() -> None:
    good = old_evidence(export=None)
    hostile = good.subject.model_copy(update={"producer": "\x1b[2Jpytorch\n" + "x" * 1000})
    old = good.model_copy(update={"subject": hostile})
    made = change(champion(old, decision=None, incumbent=None))
    for each in made.rows:
        for text in (each.name, each.before, each.now):
            assert "None" not in text
            assert text.isprintable()
            assert 0 < len(text) <= 200
    assert row(made, "policy").before == UNRECORDED


def test_who_did_not_ask_is_told_so() -> None:
    assert unasked() == change(None)


def test_another_file_with_the_same_numbers_is_not_called_unchanged() -> None:
    compared = change(champion()).rows
    same = tuple(row.model_copy(update={"changed": False}) for row in compared)
    made = change(champion()).model_copy(update={"rows": same})
    expected = f"another file, and equal in all {len(same)} things"
    assert made.unmoved.startswith(expected)
    story = summarize(of(builders.policy(), builders.evidence()), builders.evidence())
    story = story.model_copy(update={"change": made})
    stream = io.StringIO()
    print_summary(story, Console(file=stream, width=200))
    assert f"champion is version 3: {expected}" in stream.getvalue()
    assert f"- {expected}" in summary_markdown(story, {})


def test_where_the_two_were_measured_is_said_if_the_machines_differ() -> None:
    new = builders.evidence()
    other = new.environment.model_copy(update={"cpu": "Intel Xeon", "cpu_flags": ("avx512f",)})
    new = new.model_copy(
        update={"environment": new.environment.model_copy(update={"cpu_flags": ()})}
    )
    made = change(champion(old_evidence(environment=other)), new)
    assert made.machines == "measured on: test, no avx512f | champion: Intel Xeon, avx512f"
    assert row(made, "processor").changed
    assert not row(made, "threads").changed
    story = summarize(of(builders.policy(), new), new, change=made)
    stream = io.StringIO()
    print_summary(story, Console(file=stream, width=120))
    assert made.machines in stream.getvalue()
    assert "champion: Intel Xeon, avx512f" in summary_markdown(story, {})


def test_of_one_machine_nothing_is_said() -> None:
    assert change(champion()).machines is None
