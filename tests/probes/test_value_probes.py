"""Value probes: the values of floats, columns and single elements."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch import nn

from gate.probes.probe import SampleProfile
from gate.probes.value_probes import column_probes, nonfinite_probes, value_probes, within
from tests.modules import Function
from tests.probes import benches

X = benches.images()


def probes(arrays, **options):
    observed = benches.create_profile(nn.Identity(), arrays, **options)
    return {probe.name: probe.batch for probe in value_probes(observed)}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_finite_samples_give_finite_probes(dtype):
    x = np.full((4, 3), np.finfo(dtype).max / 2, dtype)
    for batch in probes({"x": x}).values():
        assert np.isfinite(batch["x"]).all()
        assert batch["x"].dtype == dtype


@given(
    arrays_of.arrays(
        st.sampled_from([np.int64, np.int32, np.uint8]),
        st.tuples(st.integers(1, 5), st.integers(1, 4)),
        elements=st.integers(0, 100),
    )
)
def test_integer_probes_stay_within_the_range_of_the_samples(x):
    observed = probes({"x": x})
    assert {"noise", "mirrored"} <= set(observed)
    assert ({"min", "max"} & set(observed) == {"min", "max"}) == (x.dtype == np.uint8)
    assert not {"zeros", "negated", "scaled_10", "bright"} & set(observed)
    for batch in observed.values():
        assert batch["x"].dtype == x.dtype
        assert x.min() <= batch["x"].min() <= batch["x"].max() <= x.max()


def test_float_masks_are_not_scaled_next_to_other_floats():
    arrays = {"x": X, "mask": np.ones((12, 5), np.float32)}
    observed = probes(arrays)["magnitudes"]
    assert (observed["mask"] == 1).all()
    assert observed["x"].max() > 50
    alone = probes({"mask": arrays["mask"]})["magnitudes"]["mask"]
    assert alone.max() == 100


def test_several_inputs_are_probed_together_and_separately():
    arrays = {"image": X, "tokens": benches.tokens(), "mask": benches.vectors() > 0.5}
    observed = probes(arrays)
    alone = {name for name in observed if name.endswith(("_image", "_tokens", "_mask"))}
    assert alone == {
        "zeros_image", "max_image", "negated_image", "scaled_10_image",
        "zeros_mask", "negated_mask",
    }  # fmt: skip
    assert not observed["zeros"]["image"].any()
    assert np.array_equal(observed["zeros"]["tokens"], arrays["tokens"][:1])
    assert not observed["zeros_image"]["image"].any()
    assert np.array_equal(observed["zeros_image"]["mask"], arrays["mask"][:1])


def test_fixed_batch_size_is_filled():
    observed = probes({"x": X}, fixed=6)
    assert all(len(batch["x"]) == 6 for batch in observed.values())
    assert np.array_equal(observed["reversed"]["x"], X[5::-1])


def test_mirrored_needs_two_dimensions_and_reversed_two_samples():
    assert "mirrored" not in probes({"x": np.arange(4, dtype=np.float32)})
    assert "reversed" not in probes({"x": X}, fixed=1)


def test_probes_of_equal_samples_are_equal():
    for item, second in zip(probes({"x": X}).values(), probes({"x": X}).values(), strict=True):
        assert np.array_equal(item["x"], second["x"])


def test_values_beyond_the_dtype_are_clipped_to_its_range():
    cut = within(np.array([1e300, -1e300, 1.0]), np.zeros(1, np.float32))
    assert np.isfinite(cut).all()
    assert cut[2] == 1.0


TABLE = np.abs(benches.vectors(width=3)) + np.float32(0.5)


def create_column_probes(arrays, **options):
    return list(column_probes(benches.create_profile(nn.Identity(), arrays, **options)))


def test_fixed_batch_size_has_no_column_probe():
    assert create_column_probes({"x": TABLE}, fixed=4) == []


def test_column_probe_finds_a_changed_missing_value(tmp_path):
    class Filled(nn.Module):
        """Replace -999, which means missing, unless the exporter lost the replacement."""

        def __init__(self, missing):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.missing = nn.Linear(3, 2), missing

        def forward(self, x):
            return self.fc(torch.where(x == self.missing, torch.ones_like(x), x))

    candidate = benches.export(Filled(-998.0).eval(), tmp_path / "model.onnx", {"x": TABLE})
    measurement = benches.measured(Filled(-999.0).eval(), candidate, {"x": TABLE}, search_inputs=0)
    failing = {
        p.name for r in measurement.runtimes for p in r.probes if (p.noise_ratio or 0) > 32.0
    }
    assert failing == {"columns_x"}


def test_probe_of_missing_values_finds_a_changed_column(tmp_path):
    class Imputed(nn.Module):
        """Replace NaN by a value per column, that of the middle column always by 0."""

        def __init__(self, first):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.values = nn.Linear(3, 2), (first, 0.0, 1.0)

        def forward(self, x):
            return self.fc(torch.where(x.isnan(), torch.tensor(self.values), x))

    candidate = benches.export(Imputed(0.0).eval(), tmp_path / "model.onnx", {"x": TABLE})
    measurement = benches.measured(Imputed(-1.0).eval(), candidate, {"x": TABLE}, search_inputs=0)
    failing = {
        p.name for r in measurement.runtimes for p in r.probes if (p.noise_ratio or 0) > 32.0
    }
    assert failing == {"nan_columns"}


VECTORS = benches.vectors()
NAMES = ["nan", "inf", "minus_inf"]


def create_nonfinite_probes(model, arrays=None):
    with torch.inference_mode():
        context = benches.create_context(model, arrays or {"x": VECTORS})
        return {
            probe.name: probe
            for probe in nonfinite_probes(context, SampleProfile.from_source(context))
        }


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
def test_models_handling_nan_or_infinity_get_nonfinite_probes(function):
    observed = create_nonfinite_probes(Function(function))
    columns = observed.pop("nan_columns")
    assert np.array_equal(np.isnan(columns.batch["x"]), np.eye(6, dtype=bool))
    assert list(observed) == NAMES
    for probe, value in zip(observed.values(), (np.nan, np.inf, -np.inf), strict=True):
        x = probe.batch["x"]
        assert probe.finite
        assert x.shape == (1, 6)
        assert np.array_equal(x[0, 3], np.float32(value), equal_nan=True)
        assert np.isfinite(np.delete(x, 3, axis=1)).all()
