"""Samples are cut into units, whose results are sent as JSON and merged."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gate.errors import EvidenceError
from gate.measure.runtime_measurement import OutputComparison
from gate.measure.session_runner import OutputCheck
from gate.measure.work_units import split_into_units
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


def round_trip(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


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


SAMPLES, BATCH, LEAD = 700, 16, 64


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
