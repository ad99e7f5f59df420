from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch import nn

from gate.probes.value_probes import value_probes, within
from tests.probes import benches

X = benches.images()


def probes(arrays, **options):
    seen = benches.observed(nn.Identity(), arrays, **options)
    return {probe.name: probe.batch for probe in value_probes(seen)}


FACTORS = np.reshape([1, 3, 10, 30, 100, -10, 0.01, 0.1], (8, 1, 1, 1))
EVERYWHERE = [0, 1, 3, 4, 6, 7, 9, 11]
FLOATS = {
    "zeros": lambda x: (x == 0).all(),
    "ones": lambda x: (x == 1).all(),
    "min": lambda x: (x == X.min()).all(),
    "max": lambda x: (x == X.max()).all(),
    "noise": lambda x: X.min() <= x.min() < x.max() <= X.max() and x.std() > 0.2,
    "negated": lambda x: np.array_equal(x, -X[:1]),
    "mirrored": lambda x: np.array_equal(x, X[:1, :, :, ::-1]),
    "scaled_10": lambda x: np.allclose(x, X[:1] * 10),
    "scaled_0.1": lambda x: np.allclose(x, X[:1] / 10),
    "bright": lambda x: (x != X[:1]).sum() == 1 and np.isclose(x.max(), 10 * X.max()),
    "magnitudes": lambda x: np.allclose(x / FACTORS, X[EVERYWHERE]),
}


def test_floats():
    seen = probes({"x": X})
    assert list(seen) == list(FLOATS)
    for name, batch in seen.items():
        assert FLOATS[name](batch["x"]), name
        assert batch["x"].dtype == np.float32
        assert batch["x"].shape[1:] == X.shape[1:]
        assert batch["x"].flags["C_CONTIGUOUS"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_no_probe_of_finite_samples_is_infinite(dtype):
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
def test_integers_stay_within_the_range_of_the_samples_here(x):
    seen = probes({"x": x})
    assert {"noise", "mirrored"} <= set(seen)
    assert ({"min", "max"} & set(seen) == {"min", "max"}) == (x.dtype == np.uint8)
    assert not {"zeros", "negated", "scaled_10", "bright"} & set(seen)
    for batch in seen.values():
        assert batch["x"].dtype == x.dtype
        assert x.min() <= batch["x"].min() <= batch["x"].max() <= x.max()


def test_masks_of_floats_keep_their_magnitude_beside_other_floats():
    arrays = {"x": X, "mask": np.ones((12, 5), np.float32)}
    seen = probes(arrays)["magnitudes"]
    assert (seen["mask"] == 1).all()
    assert seen["x"].max() > 50
    alone = probes({"mask": arrays["mask"]})["magnitudes"]["mask"]
    assert alone.max() == 100


def test_bools():
    x = benches.vectors() > 0.5
    seen = probes({"x": x})
    assert not seen["zeros"]["x"].any()
    assert seen["ones"]["x"].all()
    assert np.array_equal(seen["negated"]["x"], ~x[:1])
    assert all(batch["x"].dtype == np.bool_ for batch in seen.values())


def test_several_inputs_change_together_and_alone():
    arrays = {"image": X, "tokens": benches.tokens(), "mask": benches.vectors() > 0.5}
    seen = probes(arrays)
    alone = {name for name in seen if name.endswith(("_image", "_tokens", "_mask"))}
    assert alone == {
        "zeros_image", "max_image", "negated_image", "scaled_10_image",
        "zeros_mask", "negated_mask",
    }  # fmt: skip
    assert not seen["zeros"]["image"].any()
    assert np.array_equal(seen["zeros"]["tokens"], arrays["tokens"][:1])
    assert not seen["zeros_image"]["image"].any()
    assert np.array_equal(seen["zeros_image"]["mask"], arrays["mask"][:1])


def test_a_fixed_batch_is_filled():
    seen = probes({"x": X}, fixed=6)
    assert all(len(batch["x"]) == 6 for batch in seen.values())
    assert np.array_equal(seen["reversed"]["x"], X[5::-1])


def test_one_dimension_has_nothing_to_mirror_and_one_sample_no_order():
    assert "mirrored" not in probes({"x": np.arange(4, dtype=np.float32)})
    assert "reversed" not in probes({"x": X}, fixed=1)


def test_the_same_samples_give_the_same_probes():
    for one, other in zip(probes({"x": X}).values(), probes({"x": X}).values(), strict=True):
        assert np.array_equal(one["x"], other["x"])


def test_within_cuts_off_what_the_dtype_does_not_hold():
    cut = within(np.array([1e300, -1e300, 1.0]), np.zeros(1, np.float32))
    assert np.isfinite(cut).all()
    assert cut[2] == 1.0
