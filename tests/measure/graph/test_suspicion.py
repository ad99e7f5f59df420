"""What a report says of a constant that surely is a tensor of the model, and differs."""

from __future__ import annotations

import numpy as np
import pytest

from gate.weights.findings import suspicion

TABLE = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def one_off(table: np.ndarray) -> np.ndarray:
    changed = table.copy()
    changed[1, 2] += 0.5
    return changed


_DIFFERS = {"wrong": 1, "size": 12, "first": [1, 2], "largest": 0.5}


def halved(table: np.ndarray) -> np.ndarray:
    return table.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("place", "change", "code", "params"),
    [
        ("a.weight", one_off, "differs", {"name": "", **_DIFFERS}),
        ("onnx::MatMul_7", one_off, "differs", {"name": "a.weight", **_DIFFERS}),
        (
            "a.weight",
            lambda table: table + np.float32(2.0),
            "differs",
            {"name": "", "wrong": 12, "size": 12, "first": [0, 0], "largest": 2.0},
        ),
        ("a.weight", halved, "rounded", {"name": "", "format": "float16"}),
        ("onnx::MatMul_7", halved, "rounded", {"name": "a.weight", "format": "float16"}),
        ("a.weight", lambda table: table * np.float32(1.01), "moved", {"name": ""}),
    ],
)
def test_a_mismatch_has_a_code_and_its_numbers(place, change, code, params):
    found = suspicion(place, "a.weight", change(TABLE), TABLE).finding()
    assert (found.place, found.detail_code) == (place, code)
    measured = dict(found.detail_params)
    if code == "moved":
        assert measured.pop("share") == pytest.approx(0.01, rel=1e-3)
    if "largest" in params:
        params = {**params, "largest": pytest.approx(params["largest"], rel=1e-5)}
    assert measured == params
