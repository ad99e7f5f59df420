"""Statistics through JSON and back: not a bit changes, and nothing but statistics comes out."""

from __future__ import annotations

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
from gate.statistics.accumulators import Moments
from gate.statistics.output import Span
from gate.statistics.serialization import from_plain, to_plain

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=20,
)  # fmt: skip


def there_and_back(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


@given(PLAIN)
def test_what_python_has(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


@given(st.sets(st.integers()))
def test_sets(value: set[int]) -> None:
    assert there_and_back(value) == value


@given(
    arrays.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]),
        arrays.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays(array: np.ndarray) -> None:
    back = there_and_back(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    if back.size:
        back.reshape(-1)[0] = back.reshape(-1)[0]  # an own copy


def compared(seed: int, start: int) -> OutputComparison:
    rng = np.random.default_rng(seed)
    comparison = OutputComparison(OutputCheck("ort-cpu", ("logits", "labels")))
    truth = rng.normal(size=(64, 5))
    sides = [(truth + rng.normal(size=truth.shape) * 1e-7).astype(np.float32) for _ in range(2)]
    sides[1][3] = -sides[1][3]
    r, c = ([side, side.argmax(axis=1)] for side in sides)
    comparison.update(r, c, Span(start, 64, np.zeros(64, np.int64)))
    comparison.update_noise([truth, r[1]], r, c, samples=64)
    return comparison


def test_a_comparison_goes_on_as_if_it_had_stayed() -> None:
    lead = compared(0, 0)
    rng = np.random.default_rng(1)
    later, there = lead.successor(), lead.successor()
    reference = rng.normal(size=(40, 5)).astype(np.float32)
    sides = reference, reference * np.float32(1 + 1e-4)
    for comparison in (later, there):
        comparison.floor = there_and_back(lead.floor) if comparison is there else lead.floor
        r, c = ([side, side.argmax(axis=1)] for side in sides)
        comparison.update(r, c, Span(64, 40, np.ones(40, np.int64)))
        comparison.update_outliers(r, c, Span(64, 40))
    back = lead.successor()
    back.take(json.loads(json.dumps(there.state(), allow_nan=False)))
    assert back.outliers == later.outliers != []
    here, brought = lead.merge(later), lead.merge(back)
    assert brought.result() == here.result()
    assert brought.drain_rows()["logits"].tobytes() == here.drain_rows()["logits"].tobytes()


HOSTILE = {
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


@pytest.mark.parametrize("plain", HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_is_made(plain: Any) -> None:
    with pytest.raises(EvidenceError, match="again"):
        from_plain(plain)


def test_what_is_no_statistics_is_not_packed() -> None:
    with pytest.raises(TypeError, match="object is no part"):
        to_plain([object()])


def test_a_class_comes_back_as_itself() -> None:
    assert there_and_back(Moments(3, 0.1, math.inf)) == Moments(3, 0.1, math.inf)
