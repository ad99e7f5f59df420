"""Outputs of one runtime: units that are merged are the stream that they were cut from."""

from __future__ import annotations

import numpy as np
import pytest

from gate.measure.runtime_measurement import OutputComparison
from gate.measure.session_runner import OutputCheck
from gate.measure.work_units import split_into_units
from gate.records.outputs import OutputParity
from gate.statistics.output import MOST, IntegerMismatches, Span
from gate.statistics.serialization import PairwiseMerge

SAMPLES, BATCH, LEAD = 700, 16, 64
NAMES = ("logits", "labels")
COUNTED = {"samples", "elements", "unequal", "max_abs_diff", "max_abs_diff_sample", "differences",
           "worst", "near_ties", "l2_max"}  # fmt: skip
OF_CLASSES = {"top1_agreement", "top1_disagreements", "disagreeing", "top5_agreement", "sure",
              "unsure", "nan_rows", "predicted_classes"}  # fmt: skip


@pytest.fixture(scope="module")
def sides() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truth, reference, candidate: rounding, and a few rows that are plainly off."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(SAMPLES, 7))
    reference, candidate = (
        (truth + rng.normal(size=truth.shape) * 1e-7).astype(np.float32) for _ in range(2)
    )
    candidate[[100, 350, 699]] = -candidate[[100, 350, 699]]
    return truth, reference, candidate


def compared(sides: tuple[np.ndarray, ...], edges: list[tuple[int, int]]) -> OutputComparison:
    """`edges`: the units."""
    comparison = OutputComparison(OutputCheck("ort-cpu", NAMES))
    fold = PairwiseMerge(OutputComparison.merge)
    for start, stop in edges:
        for at in range(start, stop, BATCH):
            rows = slice(at, min(at + BATCH, stop))
            truth, reference, candidate = (side[rows] for side in sides)
            answers = [side.argmax(axis=1) for side in (reference, candidate)]
            r, c = [reference, answers[0]], [candidate, answers[1]]
            comparison.update(r, c, Span(at, len(truth)))
            if at < LEAD:
                comparison.update_noise([truth, answers[0]], r, c, samples=len(truth))
            else:
                comparison.update_outliers(r, c, Span(at, len(truth)))
        fold.add(comparison)
        comparison = comparison.successor()
    return fold.result()


def picked(output: OutputParity) -> dict[str, object]:
    return output.model_dump(include=COUNTED)


def test_counts_do_not_depend_on_where_it_is_cut(sides) -> None:
    units = split_into_units(SAMPLES, batch_size=BATCH, lead=LEAD)
    assert len(units) > 8
    one = compared(sides, [(0, SAMPLES)])
    many = compared(sides, [(unit.start, unit.stop) for unit in units])
    assert many.outliers == one.outliers
    assert {100, 350, 699} <= set(many.outliers)
    assert many.mismatched_integers == one.mismatched_integers == [100, 350, 699]
    for whole, merged in zip(one.result(), many.result(), strict=True):
        assert picked(merged) == picked(whole)
        assert merged.mean_abs_diff == pytest.approx(whole.mean_abs_diff, rel=1e-12)
        assert merged.reference_std == pytest.approx(whole.reference_std, rel=1e-12)
    whole, merged = one.result()[0], many.result()[0]
    assert merged.noise == whole.noise
    assert merged.noise is not None
    assert merged.noise.diff > 1000.0
    assert merged.noise.samples == LEAD
    classes = [output.classification for output in (whole, merged)]
    assert classes[0].model_dump(include=OF_CLASSES) == classes[1].model_dump(include=OF_CLASSES)


def test_the_table_of_samples_is_whole_and_in_order(sides) -> None:
    whole = compared(sides, [(0, 64), (64, 128), (128, SAMPLES)])
    assert whole.drain_rows()["logits"]["index"].tolist() == list(range(SAMPLES))
    assert not len(whole.drain_rows()["logits"])  # each row is given once


def test_a_unit_without_samples_changes_nothing(sides) -> None:
    whole = compared(sides, [(0, SAMPLES)])
    empty = whole.successor()
    for merged in (whole.merge(empty), empty.merge(whole)):
        assert merged.result() == whole.result()


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_axis_of_samples_is_the_same_in_a_last_batch_of_any_size(last: int) -> None:
    """Two layers, then samples: as the states of an LSTM."""
    rng = np.random.default_rng(0)
    comparison = OutputComparison(OutputCheck("ort-cpu", ("states",)))
    comparison.note_example([np.zeros((2, 1, 4), np.float32)])
    truth = rng.normal(size=(2, 8, 4))
    r = c = truth.astype(np.float32)
    comparison.update([r], [c], Span(0, 8))
    comparison.update_noise([truth], [r], [c], samples=8)
    comparison.update_outliers([r], [c], Span(8, 8))
    unit = comparison.successor()
    r = rng.normal(size=(2, last, 4)).astype(np.float32)
    c = r.copy()
    c[:, -1] *= -1.0
    unit.update([r], [c], Span(16, last))
    unit.update_outliers([r], [c], Span(16, last))
    assert comparison.merge(unit).outliers == [16 + last - 1]


def test_units_with_too_many_differences_keep_none() -> None:
    merged = IntegerMismatches()
    for unit in range(3):
        part = IntegerMismatches()
        part.update(np.ones((1, MOST // 2 + 1)), np.ones((1, MOST // 2 + 1)), start=unit)
        merged = merged.merge(part)
    assert merged.doubtful == []
    assert merged._kept == {}
