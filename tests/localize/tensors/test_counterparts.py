"""Tensors of a model are found in the constants of a file, whatever the exporter made of them."""

from __future__ import annotations

import numpy as np
import pytest

from gate.localize.layer_weights import counterparts

RNG = np.random.default_rng(0)
TABLE, GATES, HIDDEN = (RNG.normal(size=size) for size in ((12, 4), (8, 3), (8, 2)))
BIAS = RNG.normal(size=5)


def spoiled(array, *places):
    changed = array.copy()
    for place in places:
        changed.reshape(-1)[place] += 1.0
    return changed


def float32(**arrays):
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


MODEL = {
    name: array.astype(np.float32).astype(np.float64)
    for name, array in {"table": TABLE, "gates": GATES, "hidden": HIDDEN, "bias": BIAS}.items()
}


def packed(gates, hidden):
    """As LSTM has them: both of one direction in one constant, the gates in another order."""
    return np.concatenate([np.roll(gates, 2, 0).ravel(), np.roll(hidden, 2, 0).ravel()])


@pytest.mark.parametrize(
    ("constant", "differing", "same"),
    [
        (TABLE, {}, {"table"}),
        (TABLE.T, {}, {"table"}),
        (TABLE.reshape(1, 12, 4, 1), {}, {"table"}),
        (TABLE[[3, 3, 0, 7]][None], {}, {"table"}),
        (packed(GATES, HIDDEN), {}, {"gates", "hidden"}),
        (spoiled(TABLE, 5), {"table": (1, 48)}, set()),
        (spoiled(TABLE, 5, 6).T[None], {"table": (2, 48)}, set()),
        (spoiled(TABLE, 5)[[1, 1, 2]], {"table": (2, 12)}, set()),
        (packed(spoiled(GATES, 0), HIDDEN), {"gates": (1, 24)}, {"hidden"}),
        (packed(GATES, spoiled(HIDDEN, 3, 4)), {"hidden": (2, 16)}, {"gates"}),
        (np.ones(5), {"bias": (5, 5)}, set()),
        (np.ones(7), {}, set()),
    ],
)
def test_a_constant_stands_for(constant, differing, same):
    told = counterparts(MODEL, float32(constant=constant))
    assert {pair.name: (pair.changed, pair.of) for pair in told.differing} == differing
    assert set(told.same) == same
    assert set(told.unfound) == MODEL.keys() - differing.keys() - same


def test_a_part_of_a_tensor_is_no_other_tensor_of_the_shape_of_the_part():
    """A row of a table that was computed beforehand, beside a token that nothing uses."""
    model = {**MODEL, "token": np.zeros(4)}
    paired = counterparts(model, float32(constant=TABLE[3]))
    assert paired.differing == []
    assert paired.same == ["table"]
    assert "token" in paired.unfound


@pytest.mark.parametrize(
    ("constant", "differing", "same"),
    [
        (np.roll(GATES, 2, 0)[None], {}, {"gates"}),
        (np.roll(spoiled(GATES, 0), 2, 0)[None], {"gates": (1, 24)}, set()),
        (GATES * 1.1, {"gates": (24, 24)}, set()),
    ],
)
def test_gates_may_be_in_another_order(constant, differing, same):
    told = counterparts(MODEL, float32(constant=constant), reordered=True)
    assert {pair.name: (pair.changed, pair.of) for pair in told.differing} == differing
    assert set(told.same) == same


def test_rows_in_another_order_are_a_difference():
    (pair,) = counterparts(MODEL, float32(constant=np.roll(TABLE, 1, 0))).differing
    assert (pair.name, pair.changed) == ("table", 48)


def test_what_was_computed_beforehand_may_be_rounded_otherwise():
    anew = float32(constant=BIAS * (1 + 2.0**-23))
    model = {"bias": MODEL["bias"]}
    assert counterparts(model, anew, loose={"bias"}).same == ["bias"]
    assert counterparts(model, anew).differing


def test_a_name_comes_first_and_anothers_name_is_no_counterpart():
    found = float32(bias=spoiled(BIAS, 1), other=BIAS)
    (pair,) = counterparts({"bias": MODEL["bias"]}, found).differing
    assert (pair.name, pair.changed) == ("bias", 1)
    left = counterparts({"bias": MODEL["bias"]}, float32(gamma=BIAS + 1), others={"gamma"})
    assert (left.differing, left.unfound) == ([], ["bias"])


@pytest.mark.parametrize(
    ("constant", "named"),
    [(spoiled(BIAS, 1), True), (BIAS * 1.02, True), (np.ones(5), False), (BIAS[::-1] + 3, False)],
)
def test_what_may_belong_elsewhere_needs_evidence(constant, named):
    told = counterparts({"bias": MODEL["bias"]}, float32(constant=constant), loose={"bias"})
    assert bool(told.differing) == named


def test_equal_tensors_share_a_constant():
    biases = {"a": MODEL["bias"], "b": MODEL["bias"]}
    assert counterparts(biases, float32(constant=BIAS)).same == ["a", "b"]
