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


@pytest.mark.parametrize(
    ("place", "change", "detail"),
    [
        ("a.weight", one_off,
         "is the model's, but 1 of its 12 elements differ, the first at [1, 2], by 0.5 at most"),
        ("onnx::MatMul_7", one_off,
         "is the model's `a.weight`, but 1 of its 12 elements differ, the first at [1, 2], by 0.5 "
         "at most"),
        ("a.weight", lambda table: table + np.float32(2.0),
         "is not the model's: 12 of its 12 elements differ, the first at [0, 0], by 2 at most"),
        ("a.weight", lambda table: table.astype(np.float16).astype(np.float32),
         "is the model's, rounded to float16"),
        ("onnx::MatMul_7", lambda table: table.astype(np.float16).astype(np.float32),
         "is the model's `a.weight`, rounded to float16"),
    ],
)  # fmt: skip
def test_the_detail(place, change, detail):
    assert suspicion(place, "a.weight", change(TABLE), TABLE).finding().detail == detail
