"""Samples are cut into units, whose results are sent as JSON and merged."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gate.errors import EvidenceError
from gate.measure.runtime_measurement import OutputComparison
from gate.measure.session_runner import OutputCheck
from gate.measure.work_units import MAX_UNITS, split_into_units
from gate.records.outputs import OutputParity
from gate.statistics.accumulators import Moments
from gate.statistics.output import MAX_KEPT, IntegerMismatches, Span
from gate.statistics.serialization import InOrder, PairwiseMerge, from_plain, to_plain

SIZES = st.integers(1, 70_000)


@given(SIZES, st.integers(1, 300), st.integers(0, 500), st.integers(1, 400))
def test_units_cover_all_samples_in_whole_batches(samples, batch_size, lead, most):
    units = split_into_units(samples, batch_size=batch_size, lead=lead, most=most)
    assert [unit.index for unit in units] == list(range(len(units)))
    assert units[0].start == 0
    assert units[-1].stop == samples
    assert all(item.stop == next_unit.start for item, next_unit in itertools.pairwise(units))
    assert all(len(unit) > 0 and unit.start % batch_size == 0 for unit in units)
    assert len(units) <= most + 1


@given(SIZES, st.integers(1, 300), st.integers(1, 500))
def test_first_unit_has_the_batches_with_float64_reference(samples, batch_size, lead):
    first = split_into_units(samples, batch_size=batch_size, lead=lead)[0]
    assert len(first) == min(math.ceil(lead / batch_size) * batch_size, samples)


@pytest.mark.parametrize(("samples", "lead", "lengths"), [
    (64, 64, [64]),
    (20, 64, [20]),
    (65, 64, [64, 1]),
    (64 + 128 + 5, 64, [64, 128, 5]),
    (300, 0, [128, 128, 44]),
])  # fmt: skip
def test_unit_lengths(samples, lead, lengths):
    assert [len(unit) for unit in split_into_units(samples, batch_size=32, lead=lead)] == lengths


def test_number_of_units_is_limited():
    units = split_into_units(1_000_000, batch_size=32, lead=64)
    assert MAX_UNITS / 2 < len(units) <= MAX_UNITS + 1
    assert {len(unit) for unit in units[1:-1]} == {math.ceil(999_936 / 32 / MAX_UNITS) * 32}


def fold_letters(values: list[str]) -> str:
    fold = PairwiseMerge(lambda left, right: f"({left}{right})")
    for value in values:
        fold.add(value)
    return fold.result()


@pytest.mark.parametrize(("letters", "tree"), [
    ("a", "a"),
    ("ab", "(ab)"),
    ("abc", "((ab)c)"),
    ("abcd", "((ab)(cd))"),
    ("abcdefg", "(((ab)(cd))((ef)g))"),
])  # fmt: skip
def test_pairwise_merge_builds_a_binary_tree(letters, tree):
    assert fold_letters(list(letters)) == tree


@given(st.integers(1, 500))
def test_pairwise_merge_keeps_logarithmically_many_parts(count):
    fold = PairwiseMerge(lambda left, right: left + right)
    for value in range(count):
        fold.add(value)
        assert len(fold._waiting) <= math.log2(value + 1) + 1
    assert fold.result() == count * (count - 1) // 2


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_order_and_duplicates_do_not_change_the_result(count, chance):
    values = [chance.uniform(-1, 1) * 10.0 ** chance.randrange(-8, 8) for _ in range(count)]
    expected = PairwiseMerge(lambda left, right: left + right)
    for value in values:
        expected.add(value)
    received = [*range(count), *(chance.randrange(count) for _ in range(count // 2))]
    chance.shuffle(received)
    fold = PairwiseMerge(lambda left, right: left + right)
    ordered = InOrder(fold.add)
    for index in received:
        ordered.add(index, values[index])
    assert ordered.next == count
    assert fold.result().hex() == expected.result().hex()


def test_missing_part_delays_later_parts():
    used: list[str] = []
    ordered = InOrder(used.append)
    for index, value in enumerate("abcd"):
        if value != "b":
            ordered.add(index, value)
    assert (used, ordered.next) == (["a"], 1)
    ordered.add(1, "b")
    assert (used, ordered.next) == (list("abcd"), 4)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=20,
)  # fmt: skip


def round_trip(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


@given(PLAIN)
def test_python_values_survive_json(value):
    assert repr(round_trip(value)) == repr(value)


@given(st.sets(st.integers()))
def test_sets_survive_json(value):
    assert round_trip(value) == value


@given(
    arrays.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]),
        arrays.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_survive_json(array):
    restored = round_trip(array)
    assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
    assert restored.tobytes() == array.tobytes()
    if restored.size:
        restored.reshape(-1)[0] = restored.reshape(-1)[0]  # the array is a writable copy


def compare(seed: int, start: int) -> OutputComparison:
    rng = np.random.default_rng(seed)
    comparison = OutputComparison(OutputCheck("ort-cpu", ("logits", "labels")))
    truth = rng.normal(size=(64, 5))
    sides = [(truth + rng.normal(size=truth.shape) * 1e-7).astype(np.float32) for _ in range(2)]
    sides[1][3] = -sides[1][3]
    r, c = ([side, side.argmax(axis=1)] for side in sides)
    comparison.update(r, c, Span(start, 64, np.zeros(64, np.int64)))
    comparison.update_noise([truth, r[1]], r, c, samples=64)
    return comparison


def test_comparison_continues_after_json():
    lead = compare(0, 0)
    rng = np.random.default_rng(1)
    local, remote = lead.successor(), lead.successor()
    reference = rng.normal(size=(40, 5)).astype(np.float32)
    sides = reference, reference * np.float32(1 + 1e-4)
    for comparison in (local, remote):
        comparison.floor = round_trip(lead.floor) if comparison is remote else lead.floor
        r, c = ([side, side.argmax(axis=1)] for side in sides)
        comparison.update(r, c, Span(64, 40, np.ones(40, np.int64)))
        comparison.update_outliers(r, c, Span(64, 40))
    restored = lead.successor()
    restored.take(json.loads(json.dumps(remote.state(), allow_nan=False)))
    assert restored.outliers == local.outliers != []
    expected, merged = lead.merge(local), lead.merge(restored)
    assert merged.result() == expected.result()
    assert merged.drain_rows()["logits"].tobytes() == expected.drain_rows()["logits"].tobytes()


INVALID_JSON = {
    "no kind": {"v": 1},
    "another class": {"$": "Popen", "v": {"args": "true"}},
    "a field too many": {"$": "Moments", "v": {"count": 1, "secret": 2}},
    "objects": {"$": "array", "v": ["|O", [1], "AAAA"]},
    "a bomb": {"$": "array", "v": ["<f8", [1 << 40], "AAAAAAAAAAA="]},
    "too few bytes": {"$": "array", "v": ["<f8", [4], "AAAAAAAAAAA="]},
    "no base64": {"$": "array", "v": ["<f8", [1], "?"]},
    "a negative length": {"$": "array", "v": ["<f8", [-1], "AAAAAAAAAAA="]},
    "no dtype": {"$": "array", "v": ["zzz", [1], "AAAAAAAAAAA="]},
    "a list for a dict": {"$": "dict", "v": [[1]]},
    "no float": {"$": "float", "v": "many"},
}


@pytest.mark.parametrize("plain", INVALID_JSON.values(), ids=INVALID_JSON)
def test_invalid_json_is_refused(plain):
    with pytest.raises(EvidenceError, match="again"):
        from_plain(plain)


def test_unregistered_object_is_refused():
    with pytest.raises(TypeError, match="object is not a registered"):
        to_plain([object()])


def test_registered_class_survives_json():
    assert round_trip(Moments(3, 0.1, math.inf)) == Moments(3, 0.1, math.inf)


SAMPLES, BATCH, LEAD = 700, 16, 64
NAMES = ("logits", "labels")
COUNT_FIELDS = {"samples", "elements", "unequal", "max_abs_diff", "max_abs_diff_sample", "differences",
           "worst", "near_ties", "l2_max"}  # fmt: skip
CLASS_FIELDS = {"top1_agreement", "top1_disagreements", "disagreeing", "top5_agreement", "sure",
              "unsure", "nan_rows", "predicted_classes"}  # fmt: skip


@pytest.fixture(scope="module")
def sides():
    """Truth, reference and candidate; three rows of the candidate are wrong."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(SAMPLES, 7))
    reference, candidate = (
        (truth + rng.normal(size=truth.shape) * 1e-7).astype(np.float32) for _ in range(2)
    )
    candidate[[100, 350, 699]] = -candidate[[100, 350, 699]]
    return truth, reference, candidate


def compare_in_units(sides, edges):
    """Compare the samples in units given by `edges` and merge the results."""
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


def select_counts(output: OutputParity) -> dict[str, object]:
    return output.model_dump(include=COUNT_FIELDS)


def test_counts_do_not_depend_on_the_units(sides):
    units = split_into_units(SAMPLES, batch_size=BATCH, lead=LEAD)
    assert len(units) > 8
    in_one_unit = compare_in_units(sides, [(0, SAMPLES)])
    in_many_units = compare_in_units(sides, [(unit.start, unit.stop) for unit in units])
    assert in_many_units.outliers == in_one_unit.outliers
    assert {100, 350, 699} <= set(in_many_units.outliers)
    assert in_many_units.mismatched_integers == in_one_unit.mismatched_integers == [100, 350, 699]
    for expected, merged in zip(in_one_unit.result(), in_many_units.result(), strict=True):
        assert select_counts(merged) == select_counts(expected)
        assert merged.mean_abs_diff == pytest.approx(expected.mean_abs_diff, rel=1e-12)
        assert merged.reference_std == pytest.approx(expected.reference_std, rel=1e-12)
    expected, merged = in_one_unit.result()[0], in_many_units.result()[0]
    assert merged.noise == expected.noise
    assert merged.noise is not None
    assert merged.noise.diff > 1000.0
    assert merged.noise.samples == LEAD
    classes = [output.classification for output in (expected, merged)]
    assert classes[0].model_dump(include=CLASS_FIELDS) == classes[1].model_dump(
        include=CLASS_FIELDS
    )


def test_sample_rows_are_complete_and_ordered(sides):
    comparison = compare_in_units(sides, [(0, 64), (64, 128), (128, SAMPLES)])
    assert comparison.drain_rows()["logits"]["index"].tolist() == list(range(SAMPLES))
    assert not len(comparison.drain_rows()["logits"])  # each row is returned once


def test_empty_unit_changes_nothing(sides):
    comparison = compare_in_units(sides, [(0, SAMPLES)])
    empty = comparison.successor()
    for merged in (comparison.merge(empty), empty.merge(comparison)):
        assert merged.result() == comparison.result()


@pytest.mark.parametrize("last", [1, 2, 3])
def test_batch_axis_is_the_same_in_a_smaller_last_batch(last):
    """Keep the batch axis 1, as in the states of a two-layer LSTM."""
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


def test_too_many_differences_are_not_kept():
    merged = IntegerMismatches()
    for unit in range(3):
        part = IntegerMismatches()
        part.update(
            np.ones((1, MAX_KEPT // 2 + 1)),
            np.ones((1, MAX_KEPT // 2 + 1)),
            start=unit,
        )
        merged = merged.merge(part)
    assert merged.doubtful == []
    assert merged._kept == {}
