"""Records of single samples."""

from __future__ import annotations

from gate.records.outputs import Crossing, Histogram, SideAnswer, WorstSample


def test_they_are_exact_through_json() -> None:
    side = SideAnswer(top1=3, probability=0.5, margin=float("nan"))
    for record in (
        Histogram(zeros=1, first=-80, counts=(1, 0, 2)),
        WorstSample(sample=4, max_abs_diff=float("inf"), reference=side, candidate=side),
        Crossing(threshold=0.5, samples=9, reference_above=3, candidate_above=4, crossed=1),
    ):
        assert type(record).from_json(record.to_json()).to_json() == record.to_json()
