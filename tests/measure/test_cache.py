"""Reference outputs are cached by batch, and in float64 by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import EvidenceError
from gate.reference.cache import OutputCache, ReferenceCache, SampleTruths, agree
from gate.runtimes.recording_format import row_digests
from tests.probes import benches

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
DIGESTS = row_digests({"x": X})
R = [X * 2, X.argmax(1)]
R64 = [X.astype(np.float64) * 2, X.argmax(1)]
NAN, INF = math.nan, math.inf


def make_truths(reference=R, truth=R64, *, room=2**10):
    truths = SampleTruths(room=room)
    truths.note(DIGESTS, reference, truth)
    return truths


def test_batch_of_stored_samples_is_joined():
    indices = [4, 0, 4, 2]
    truths = make_truths()
    assert truths.holds(DIGESTS[indices])
    assert not truths.holds(row_digests({"x": np.concatenate([X[:2], X[:1] + 1])}))
    for joined, expected in zip(
        truths.join(DIGESTS[indices], [r[indices] for r in R]), R64, strict=True
    ):
        assert np.array_equal(joined, expected[indices])


@pytest.mark.parametrize("other", [
    [R[0] * (1 + 1e-4), R[1]],
    [R[0], R[1] + 1],
    [R[0]],
    [R[0][:, :2], R[1]],
    [np.where(R[0] == R[0][0, 0], NAN, R[0]).astype(np.float32), R[1]],
], ids=["moved", "another class", "one output less", "another shape", "NaN"])  # fmt: skip
def test_join_needs_equal_float32_answers(other):
    assert make_truths().join(DIGESTS, other) is None


@pytest.mark.parametrize(("one", "other", "same"), [
    ([1.0, 2.0], [1.0, 2.0], True),
    ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
    ([1.0, 2.0], [1.0, 2.0 + 1e-4], False),
    ([NAN, 2.0], [NAN, 2.0], True),
    ([NAN, 2.0], [INF, 2.0], False),
    ([INF, 2.0], [-INF, 2.0], False),
    ([1.0, 2.0], [NAN, 2.0], False),
    ([0.0, 0.0], [0.0, 0.0], True),
    ([1e-30, 0.0], [0.0, 0.0], False),
    ([], [], True),
])  # fmt: skip
def test_agree_within_rounding(one, other, same):
    assert agree(np.array(one), np.array(other)) is same
    assert agree(np.array(one), np.array(other, np.float32)) is same


ROOM = 2**10


class Counting:
    """A function that doubles its input and counts its calls; it refuses odd batch sizes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        if len(batch["x"]) % 2:
            raise EvidenceError("an odd number")
        return [batch["x"] * 2]


def get(cache, batch, compute):
    return cache.get_or_compute(row_digests(batch), lambda: compute(batch))


def test_equal_batch_is_computed_once():
    cache, compute = OutputCache(room=ROOM), Counting()
    for _ in range(3):
        assert np.array_equal(get(cache, {"x": np.arange(4.0)}, compute)[0], np.arange(4.0) * 2)
    assert compute.calls == 1


@pytest.mark.parametrize("other", [
    {"x": np.arange(4.0) + 1},
    {"x": np.arange(4.0)[::-1]},
    {"x": np.arange(4.0).astype(np.float32)},
    {"x": np.arange(4.0).reshape(2, 2)},
    {"x": np.arange(4.0), "y": np.arange(4.0)},
], ids=["values", "order", "dtype", "shape", "names"])  # fmt: skip
def test_different_batch_is_computed(other):
    cache, compute = OutputCache(room=ROOM), Counting()
    get(cache, {"x": np.arange(4.0)}, compute)
    get(cache, other, compute)
    assert compute.calls == 2


VECTORS = benches.vectors()
ROWS = {"x": VECTORS[:8]}
MIXED = {"x": VECTORS[[3, 1, 7, 4, 0]]}
SINGLES = [{"x": VECTORS[:1] * factor} for factor in (1, -1, 3)]


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


class Layer(nn.Module):
    def __init__(self, after=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.after = nn.Linear(6, 3), after

    def forward(self, x):
        y = self.layer(x)
        return y if self.after is None else self.after(y)


class WatchedCache:
    """A cache that records the sizes of the batches computed in float64."""

    def __init__(self, model, **options):
        context = benches.create_context(model, {"x": VECTORS}, **options)
        self.computed, self.compute_uncached = [], context.truth.extra_outputs
        context.truth.extra_outputs = lambda b: (
            self.computed.append(len(b["x"])) or self.compute_uncached(b)
        )
        self.answers = context.answers


def are_equal(one, other):
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("after", [
    lambda y: y * len(y),
    lambda y: y - y.mean(0),
    lambda y: y.sum(),
    lambda y: y.sum(0),
    lambda y: (y, y[:1].sum()),
    lambda y: y.cumsum(0).argmax(1),
    lambda y: y * (float("nan") if len(y) == 5 else 1.0),
    lambda y: y.repeat(2, 1),
])  # fmt: skip
def test_batch_dependent_truth_is_computed(after):
    watched = WatchedCache(Layer(after))
    watched.answers.truth(ROWS)
    assert are_equal(watched.answers.truth(MIXED), watched.compute_uncached(MIXED))
    assert watched.computed == [8, 5]


@pytest.mark.parametrize("after", [
    lambda y: y * len(y),
    lambda y: y - y.mean(0),
    lambda y: y.sum(0, keepdim=True),
    lambda y: y.sum(),
    lambda y: y * (float("nan") if len(y) > 1 else 1.0),
    lambda y: y if y.max() < 1.0 else y.exp(),
])  # fmt: skip
def test_batch_dependent_single_samples_are_computed_alone(after):
    watched = WatchedCache(Layer(after))
    watched.answers.compute_together(SINGLES, most=8)
    for batch in SINGLES:
        assert are_equal(watched.answers.truth(batch), watched.compute_uncached(batch))


def test_batch_refused_by_the_model_is_computed_alone():
    def refuse_batches(y):
        if len(y) > 1:
            raise ValueError("one at a time")
        return y

    watched = WatchedCache(Layer(refuse_batches))
    watched.answers.compute_together(SINGLES, most=8)
    assert are_equal(watched.answers.truth(SINGLES[1]), watched.compute_uncached(SINGLES[1]))


def test_no_truth_without_float64_reference():
    answers = WatchedCache(Layer(), noise_samples=0).answers
    answers.compute_together(SINGLES, most=8)
    assert answers.truth(MIXED) is None


def test_reference_without_answer_is_an_error():
    with pytest.raises(AssertionError):
        ReferenceCache(lambda _batch: None, lambda _batch: None).reference(MIXED)
