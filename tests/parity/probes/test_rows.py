"""The float64 answers of a batch, put together from those to its samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.parity.probes.observed import Observed, Probe
from gate.parity.probes.rows import Rows
from tests.parity.probes import benches

X = benches.vectors()
PLACES = (3, 1, 9, 20, 0)


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


def truth(model, places=PLACES):
    """The truth of the probe, the same computed at once, and how many batches went to float64."""
    stand = benches.stand(model, {"x": X})
    observed, computed = Observed.of(stand), []
    probe = Probe("batch_5", "batch", 5, lambda: observed.taken(PLACES), places=places)
    aside = stand.truth.aside
    stand.truth.aside = lambda batch: computed.append(len(batch["x"])) or aside(batch)
    rows = Rows(stand, observed)
    seen = rows.truth(probe, stand.reference.run(probe.batch))
    return seen, aside(probe.batch), computed


def test_what_each_sample_gives_alone_is_put_together():
    seen, whole, computed = truth(Layer())
    assert computed == [8]
    assert np.allclose(seen[0], whole[0], rtol=0, atol=1e-15)


def test_other_samples_are_computed_themselves():
    seen, whole, computed = truth(Layer(), places=None)
    assert computed == [5]
    assert np.array_equal(seen[0], whole[0])


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
    seen, whole, computed = truth(Layer(after))
    assert computed == [8, 5]
    for one, other in zip(seen, whole, strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def test_samples_that_the_model_refuses_together_are_no_reason_to_give_up():
    def few(y):
        if len(y) > 5:
            raise ValueError("too many")
        return y

    seen, whole, computed = truth(Layer(few))
    assert computed == [5]
    assert np.array_equal(seen[0], whole[0])


def test_without_a_float64_reference_there_is_no_truth():
    stand = benches.stand(Layer(), {"x": X}, noise_samples=0)
    observed = Observed.of(stand)
    probe = Probe("batch_2", "batch", 2, lambda: observed.batch(2), places=(0, 1))
    assert Rows(stand, observed).truth(probe, stand.reference.run(probe.batch)) is None
