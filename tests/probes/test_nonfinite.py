from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.probes.probe import SampleProfile
from gate.probes.value_probes import nonfinite_probes
from tests.probes import benches

X = benches.vectors()
NAMES = ["nan", "inf", "minus_inf"]


class By(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def found(model, arrays=None):
    with torch.inference_mode():
        stand = benches.stand(model, arrays or {"x": X})
        return {probe.name: probe for probe in nonfinite_probes(stand, SampleProfile.of(stand))}


@pytest.mark.parametrize(
    "function",
    [
        torch.nan_to_num,
        lambda x: torch.where(torch.isnan(x), 0.0, x),
        lambda x: x.masked_fill(x.isinf(), 0.0),
        lambda x: x * x.isfinite(),
        lambda x: torch.where(x != x, 0.0, x),  # noqa: PLR0124
        lambda x: torch.where(x == x, x, 0.0),  # noqa: PLR0124
        lambda x: x.clone().nan_to_num_(),
        lambda x: x.nanmean(1),
        torch.nansum,
    ],
)
def test_of_models_that_treat_them(function):
    seen = found(By(function))
    assert list(seen) == NAMES
    for probe, value in zip(seen.values(), (np.nan, np.inf, -np.inf), strict=True):
        x = probe.batch["x"]
        assert probe.finite
        assert x.shape == (1, 6)
        assert np.array_equal(x[0, 3], np.float32(value), equal_nan=True)
        assert np.isfinite(np.delete(x, 3, axis=1)).all()


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        lambda x: x.max(1),
        lambda x: x == x.clone(),
        lambda x: torch.where(x > 0, x, 0.0),
    ],
)
def test_of_others_nothing_is_asked(function):
    assert found(By(function)) == {}


def test_of_models_that_break_or_take_no_floats_nothing_is_asked():
    def breaks(x):
        raise ValueError

    assert found(By(breaks)) == {}
    assert found(By(lambda x: x.isnan()), {"x": benches.tokens()}) == {}


def test_each_input_of_floats_alone():
    class Both(nn.Module):
        def forward(self, one, other, tokens):
            return one.nan_to_num() + other + tokens.sum()

    seen = found(Both(), {"one": X, "other": X + 1, "tokens": benches.tokens()})
    assert list(seen) == [f"{name}_{of}" for of in ("one", "other") for name in NAMES]
    assert np.isfinite(seen["nan_one"].batch["other"]).all()
