from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.statistics.accumulators import KEPT
from gate.statistics.classification import ClassAnswers, WorstSamples

NAN = math.nan


def kept(values, *, start=0, **more):
    samples = WorstSamples()
    samples.update(np.array(values, float), start=start, **more)
    return samples


def places(samples):
    return [one.sample for one in samples.result(classes=False)]


def test_nan_first_then_the_largest_and_of_equals_the_first():
    assert places(kept([1, 5, NAN, 5, 0, 2, NAN])) == [2, 6, 1, 3, 5, 0]
    assert places(kept([0.0] * 20)) == []
    assert places(kept([7.0] * 20)) == list(range(KEPT))


def test_an_equal_sample_that_comes_later_but_stands_before_takes_its_place():
    late = kept([7.0] * 20, start=100)
    late.update(np.array([7.0]), start=3)
    assert places(late) == [3, *range(100, 107)]


def test_what_both_sides_answer_is_kept():
    r, c = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, 1.0], [0.0, 3.0]])
    samples = kept([0.0, 3.0], answers=(ClassAnswers.of(r), ClassAnswers.of(c)),
                   labels=np.array([1, 0]))  # fmt: skip
    (worst,) = samples.result(classes=True)
    assert (worst.sample, worst.label, worst.max_abs_diff) == (1, 0, 3.0)
    assert (worst.reference.top1, worst.candidate.top1) == (0, 1)
    assert (worst.reference.margin, worst.candidate.margin) == (2.0, 3.0)
    (bare,) = samples.result(classes=False)
    assert bare.reference is bare.candidate is bare.label is None


VALUES = hnp.arrays(
    np.float64,
    st.integers(0, 30),
    elements=st.sampled_from([0.0, 1.0, 2.0, NAN]) | st.floats(0, 9),
)


@given(VALUES, st.data())
def test_neither_batches_nor_order_matter(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, len(values)], strict=True))
    stream, parts = WorstSamples(), []
    for start, stop in data.draw(st.permutations(bounds)):
        stream.update(values[start:stop], start=start)
        parts.append(kept(values[start:stop], start=start))
    left = WorstSamples()
    for part in parts:
        left = left.merge(part)
    right = WorstSamples()
    for part in parts:
        right = part.merge(right)
    whole = sorted(
        (place for place, value in enumerate(values) if value != 0),
        key=lambda p: (not math.isnan(values[p]), -np.nan_to_num(values[p]), p),
    )[:KEPT]
    assert places(stream) == places(left) == places(right) == whole
