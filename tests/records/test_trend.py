"""The trend has one row per release, at most twenty, with the worst values of each evidence."""

from __future__ import annotations

import math

from gate.records.champion_comparison import MAX_ROWS, Trend, TrendRow
from tests import builders
from tests.builders import absent, class_parity, output_parity, runtime_evidence


def test_a_row_is_of_the_runtime_that_serves() -> None:
    slow = runtime_evidence("ort-cpu", outputs=(output_parity(noise=None),))
    row = TrendRow.from_evidence(
        builders.evidence(runtimes=(slow, runtime_evidence("ort-cpu-optimized")))
    )
    assert (row.noise_ratio, row.agreement, row.accuracy, row.latency_ms) == (1.1, 1.0, 0.97, 20.0)
    assert TrendRow.from_evidence(builders.evidence(runtimes=(slow,))).noise_ratio is None


def test_the_worst_output_counts_and_nan_is_worse_than_all() -> None:
    outputs = (
        output_parity(classification=class_parity(top1_agreement=math.nan)),
        output_parity(noise=builders.noise_parity(ratio=2.0)),
    )
    row = TrendRow.from_evidence(
        builders.evidence(runtimes=(runtime_evidence("ort-cpu", outputs=outputs),))
    )
    assert row.noise_ratio == 2.0
    assert row.agreement is not None
    assert math.isnan(row.agreement)
    assert Trend.from_json(Trend(rows=(row,)).to_json()).to_json() == Trend(rows=(row,)).to_json()


def test_what_was_not_measured_is_not_there() -> None:
    row = TrendRow.from_evidence(builders.evidence(runtimes=(absent("ort-cuda"),)))
    assert (row.noise_ratio, row.agreement, row.accuracy, row.latency_ms) == (None,) * 4


def test_the_oldest_go_and_a_release_is_there_once() -> None:
    trend = Trend()
    for number in range(MAX_ROWS + 5):
        good = builders.evidence()
        digest = builders.digest(str(number))
        subject = good.subject.model_copy(update={"sha256": digest})
        evidence = good.model_copy(update={"subject": subject})
        trend = trend.followed_by(evidence).followed_by(evidence)
    assert len(trend.rows) == MAX_ROWS
    assert trend.rows[-1].sha256 == builders.digest(str(MAX_ROWS + 4))
    assert trend.rows[0].sha256 == builders.digest("5")
