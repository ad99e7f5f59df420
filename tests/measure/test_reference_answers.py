"""The answers of the reference: each batch once, in float64 put together from samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import EvidenceError
from gate.reference.cache import ReferenceCache
from tests.probes import benches

X = benches.vectors()
ROWS = {"x": X[:8]}
MIXED = {"x": X[[3, 1, 7, 4, 0]]}
SINGLES = [{"x": X[:1] * factor} for factor in (1, -1, 3)]


@pytest.fixture(autouse=True)
def _inference():
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


class Watched:
    """The answers of a model, the sizes of batches that went to float64, and its truth alone."""

    def __init__(self, model, **options):
        stand = benches.stand(model, {"x": X}, **options)
        self.computed, self.alone = [], stand.truth.aside
        stand.truth.aside = lambda b: self.computed.append(len(b["x"])) or self.alone(b)
        self.answers = stand.answers


def same(one, other):
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True)
    )


def test_each_side_computes_a_batch_once():
    watched = Watched(Layer())
    for _ in range(2):
        watched.answers.reference(MIXED)
        assert same(watched.answers.truth(MIXED), watched.alone(MIXED))
    assert watched.computed == [5]


def test_what_a_sample_got_in_one_batch_it_gets_in_another():
    watched = Watched(Layer())
    watched.answers.truth(ROWS)
    made = watched.answers.truth(MIXED)
    assert watched.computed == [8]
    assert np.allclose(made[0], watched.alone(MIXED)[0], rtol=0, atol=1e-15)


def test_what_the_samples_pass_computed_anyway_counts():
    watched, model = Watched(Layer()), Layer().double()
    truth = [model(torch.from_numpy(X).double()).numpy()]
    watched.answers.note({"x": X}, [truth[0].astype(np.float32)], truth)
    watched.answers.truth(MIXED)
    assert watched.computed == []


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y * len(y),
        lambda y: y - y.mean(0),
        lambda y: y.sum(),
        lambda y: y.sum(0),
        lambda y: (y, y[:1].sum()),
        lambda y: y.cumsum(0).argmax(1),
        lambda y: y * (float("nan") if len(y) == 5 else 1.0),
        lambda y: y.repeat(2, 1),
    ],
)
def test_a_batch_that_matters_is_computed_itself(after):
    watched = Watched(Layer(after))
    watched.answers.truth(ROWS)
    assert same(watched.answers.truth(MIXED), watched.alone(MIXED))
    assert watched.computed == [8, 5]


def test_lone_samples_are_computed_together():
    watched = Watched(Layer())
    watched.answers.ask_together(SINGLES, most=2)
    assert watched.computed == [2, 1]
    for batch in SINGLES:
        made = watched.answers.truth(batch)
        assert np.allclose(made[0], watched.alone(batch)[0], rtol=0, atol=1e-15)
    assert watched.computed == [2, 1]


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y * len(y),
        lambda y: y - y.mean(0),
        lambda y: y.sum(0, keepdim=True),
        lambda y: y.sum(),
        lambda y: y * (float("nan") if len(y) > 1 else 1.0),
        lambda y: y if y.max() < 1.0 else y.exp(),
    ],
)
def test_those_to_whom_company_matters_are_computed_alone(after):
    watched = Watched(Layer(after))
    watched.answers.ask_together(SINGLES, most=8)
    for batch in SINGLES:
        assert same(watched.answers.truth(batch), watched.alone(batch))


def test_what_the_model_refuses_together_it_may_take_alone():
    def lonely(y):
        if len(y) > 1:
            raise ValueError("one at a time")
        return y

    watched = Watched(Layer(lonely))
    watched.answers.ask_together(SINGLES, most=8)
    assert same(watched.answers.truth(SINGLES[1]), watched.alone(SINGLES[1]))


def test_what_the_model_refuses_alone_does_not_stop_the_others():
    def positive(y):
        if (y < 0).all():
            raise ValueError("negative")
        return y

    samples = [{"x": np.full((1, 6), value, np.float32)} for value in (50.0, -50.0, 2.0)]
    model = Layer(positive)
    model.layer.weight.data.abs_()
    watched = Watched(model)
    watched.answers.ask_together(samples, most=8)
    assert same(watched.answers.truth(samples[2]), watched.alone(samples[2]))
    assert watched.computed == [3]
    with pytest.raises(EvidenceError):
        watched.answers.reference(samples[1])


def test_without_a_float64_reference_there_is_no_truth():
    answers = Watched(Layer(), noise_samples=0).answers
    answers.ask_together(SINGLES, most=8)
    assert answers.truth(MIXED) is None


def test_a_reference_without_any_answer_is_a_defect():
    with pytest.raises(AssertionError):
        ReferenceCache(lambda _batch: None, lambda _batch: None).reference(MIXED)
