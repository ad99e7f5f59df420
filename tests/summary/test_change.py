"""The comparison of a summary with the champion."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gate import Decision, Evidence, Policy, decide
from gate.decision.champion import Champion
from gate.records.champion_comparison import Trend
from gate.records.evidence import Environment, differences
from gate.report.markdown import summary_markdown
from gate.report.terminal import print_summary
from gate.summary.champion_changes import UNRECORDED, compare_with_champion
from gate.summary.summarize import summarize
from gate.summary.summary import Change, ChangeRow
from tests import builders

CHAMPION, FILE = builders.digest("champion.onnx"), builders.digest("model.onnx")


def old_evidence(**overrides: Any) -> Evidence:
    good = builders.evidence()
    subject = good.subject.model_copy(update={"sha256": CHAMPION})
    return good.model_copy(update={"subject": subject, **overrides})


def decide_now(policy: Policy, evidence: Evidence) -> Decision:
    return decide(policy, evidence, decided_at="2026-01-01T00:00:00+00:00")


def champion(evidence: Evidence | None = None, **overrides: Any) -> Champion:
    evidence = evidence or old_evidence()
    fields: dict[str, Any] = {
        "state": "proven",
        "version": "3",
        "sha256": CHAMPION,
        "evidence": evidence,
        "decision": decide_now(builders.policy(), evidence),
        "trend": Trend().followed_by(evidence),
        "incumbent": builders.incumbent(),
    }
    return Champion(**fields | overrides)


def compare(
    old: Champion | None, new: Evidence | None = None, policy: Policy | None = None
) -> Change:
    new = new or builders.evidence()
    return compare_with_champion(decide_now(policy or builders.policy(), new), new, old)


def row(made: Change, name: str) -> ChangeRow:
    return next(row for row in made.rows if row.name == name)


def test_changed_rows_come_first():
    comparison = compare(champion())
    assert (comparison.version, comparison.sha256, comparison.absent) == ("3", CHAMPION, None)
    order = [row.changed for row in comparison.rows]
    assert order == sorted(order, reverse=True)
    assert {row.name for row in comparison.changed_rows} == {"accuracy", "same answers", "latency"}
    assert row(comparison, "accuracy").model_dump() == {
        "name": "accuracy", "before": "0.97", "now": "0.965", "changed": True, "sense": "worse",
    }  # fmt: skip
    assert row(comparison, "same answers").now == "396 of 400"
    assert row(comparison, "latency").sense == "worse"
    assert "side by side" in row(comparison, "latency").now
    assert comparison.machines is None
    assert [each.sha256 for each in comparison.trend] == [CHAMPION, FILE]


@pytest.mark.parametrize(
    ("before", "comparable", "sense", "changed"),
    [
        (1.4, True, "better", True),
        (0.9, True, "worse", True),
        (1.1, True, None, False),
        (math.nan, True, "better", True),
        (0.9, False, None, True),
    ],
)
def test_sense_of_a_changed_metric(before, comparable, sense, changed):
    output = builders.output_parity(noise=builders.noise_parity(ratio=before))
    old = old_evidence(runtimes=(builders.runtime_evidence("ort-cpu", outputs=(output,)),))
    if not comparable:
        dataset = old.dataset.model_copy(update={"sha256": builders.digest("other samples")})
        old = old.model_copy(update={"dataset": dataset})
    comparison = compare(champion(old))
    observed = row(comparison, "noise ratio")
    assert (observed.sense, observed.changed) == (sense, changed)
    for each in (observed, row(comparison, "agreement with its own model")):
        assert ("not comparable: other samples" in each.before) is not comparable


@pytest.mark.parametrize(
    ("now", "sense"), [(20.5, None), (19.5, None), (22.0, "worse"), (18.0, "better")]
)
def test_small_latency_difference_is_no_change(now, sense):
    incumbent = builders.incumbent()
    assert incumbent.latency is not None
    slow = incumbent.latency.model_copy(update={"median_ms": now})
    comparison = compare(champion(incumbent=incumbent.model_copy(update={"latency": slow})))
    latency = row(comparison, "latency")
    assert (latency.changed, latency.sense) == (sense is not None, sense)


def test_export_and_file_differences_are_listed():
    good = old_evidence()
    assert good.export is not None
    versions = {"torch": "2.14.0", "onnxruntime": "1.31.1", "torchvision": "0.29"}
    old = good.model_copy(
        update={
            "export": good.export.model_copy(
                update={"strategy": "dynamo", "settings": {"opset": 12}}
            ),
            "subject": good.subject.model_copy(update={"opset": 12, "size_bytes": 40_000_000}),
            "environment": good.environment.model_copy(update={"versions": versions}),
            "source": good.source.model_copy(update={"onnx_sha256": builders.digest("a")}),
        }
    )
    comparison = compare(champion(old))
    for name, before, now in (
        ("opset", "12", "13"),
        ("export strategy", "dynamo", "traced"),
        ("export opset", "12", "13"),
        ("export dynamo", UNRECORDED, "False"),
        ("version of torch", "2.14.0", "2.15.0"),
        ("version of torchvision", "0.29", "none"),
        ("size", "40.00 MB", "44.00 MB"),
        ("reference file", builders.digest("a").short, UNRECORDED),
    ):
        observed = row(comparison, name)
        assert (observed.before, observed.now, observed.changed) == (before, now, True), name
    assert not row(comparison, "version of onnxruntime").changed
    assert {"reference file", "slices"}.isdisjoint(each.name for each in compare(champion()).rows)


def test_changed_bounds_are_listed():
    looser = builders.policy()
    cpu = looser.runtimes["ort-cpu"]
    bounds = cpu.bounds.model_copy(update={"max_abs_diff": 9.0, "l2_logits": None})
    runtimes = looser.runtimes | {"ort-cpu": cpu.model_copy(update={"bounds": bounds})}
    comparison = compare(champion(), policy=looser.model_copy(update={"runtimes": runtimes}))
    moved = [each for each in comparison.rows if each.name.startswith("bound of")]
    assert [(each.name, each.before, each.now) for each in moved] == [
        ("bound of ort-cpu / logits / max_abs_diff", "≤ 0.0001", "≤ 9"),
        ("bound of ort-cpu / logits / l2_logits", "≤ 0.001", "no bound"),
    ]
    assert row(comparison, "policy").changed


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (None, "--against"),
        (Champion(state="first", absent="no version of digits serves yet"), "serves yet"),
        (Champion.unavailable("RegistryUnavailable: nothing answers"), "nothing answers"),
        (champion(sha256=FILE), "this very file"),
    ],
)  # fmt: skip
def test_missing_champion_has_a_reason(old, reason):
    comparison = compare(old)
    assert reason in str(comparison.absent)
    assert comparison.rows == ()
    assert reason in comparison.unmoved


def test_incomparable_champion_is_compared_by_evidence():
    apart = builders.incumbent(state="incomparable", absent="other inputs", latency=None)
    comparison = compare(champion(incumbent=apart))
    assert row(comparison, "answers to these samples").now == "other inputs"
    assert "measured apart" in row(comparison, "latency").now
    assert row(comparison, "latency").sense is None


def test_rows_are_printable_and_never_none():
    good = old_evidence(export=None)
    hostile = good.subject.model_copy(update={"producer": "\x1b[2Jpytorch\n" + "x" * 1000})
    old = good.model_copy(update={"subject": hostile})
    comparison = compare(champion(old, decision=None, incumbent=None))
    for text in (text for each in comparison.rows for text in (each.name, each.before, each.now)):
        assert "None" not in text
        assert text.isprintable()
        assert 0 < len(text) <= 200
    assert row(comparison, "policy").before == UNRECORDED


def test_different_file_with_equal_metrics_is_stated():
    same = tuple(row.model_copy(update={"changed": False}) for row in compare(champion()).rows)
    change = compare(champion()).model_copy(update={"rows": same})
    evidence = builders.evidence()
    summary = summarize(decide_now(builders.policy(), evidence), evidence, change=change)
    expected = f"another file, and equal in all {len(same)} things"
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=200))
    assert f"champion is version 3: {expected}" in stream.getvalue()
    assert f"- {expected}" in summary_markdown(summary, {})


AMD = {"cpu": "AMD EPYC 9R14", "cpu_flags": ("avx2", "avx512f"), "cores": 8,
       "os": "Debian 13", "kernel": "Linux 6.12 x86_64"}  # fmt: skip
INTEL = AMD | {"cpu": "Intel Xeon", "cpu_flags": ("amx_int8", "avx2")}


def environment(**fields: Any) -> Environment:
    return builders.evidence().environment.model_copy(update=fields)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {}, None),
        (INTEL, {}, "measured on: AMD EPYC 9R14, avx512f, no amx_int8 | champion: Intel Xeon, amx_int8, no avx512f"),
        # A field that an old record lacks is not a difference.
        ({"cpu_flags": None, "os": None, "kernel": None, "cores": None}, {}, None),
        ({"cores": 2}, {}, "measured on: cores 8 | champion: cores 2"),
        ({"gpu": "H200"}, {}, "measured on: GPU none | champion: GPU H200"),
        ({"cpu_flags": ()}, {}, "measured on: avx2, avx512f | champion: no avx2, avx512f"),
        ({"versions": {"torch": "2.14"}}, {}, None),
    ],
)  # fmt: skip
def test_machines_sentence_lists_differences(old, new, expected):
    before = old_evidence(environment=environment(**AMD | old))
    now = builders.evidence(environment=environment(**AMD | new))
    assert compare(champion(before), now).machines == expected


FLAGS = st.sets(st.sampled_from(["avx2", "avx512f", "amx_tile", "sve"])).map(
    lambda flags: tuple(sorted(flags))
)


@given(FLAGS, FLAGS)
def test_differences_are_reflexive_and_symmetric(one, other):
    old, new = environment(cpu_flags=one), environment(cpu_flags=other)
    assert not list(differences(old, old))
    there, back = list(differences(old, new)), list(differences(new, old))
    assert [(d.before, d.now) for d in there] == [(d.now, d.before) for d in back]
    assert bool(there) == (one != other)
