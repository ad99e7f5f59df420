"""Results equal those of the crate `image` 0.24.3, stored in `rust_image/vectors.json`.

`rust_image/main.rs` wrote them; both sides compute the pixels by the same formula.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gate.preprocess import resample

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "rust_image" / "vectors.json").read_text()
)


def source(height: int, width: int) -> NDArray[np.uint8]:
    y, x, c = np.mgrid[:height, :width, :3].astype(np.int64)
    mixed = (x * 73 + y * 151 + c * 37 + x * y * (c + 3)) % 256
    chosen = np.where((x // 5 + y // 7) % 3 == 0, 255 - mixed // 8, mixed // (c + 1))
    return chosen.astype(np.uint8)


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda v: f"{v['mode']}-{v['from']}-{v['to']}".replace(" ", "")
)
def test_resize_equals_vectors_of_the_crate(vector: dict[str, Any]) -> None:
    expected = np.array(vector["pixels"], np.uint8).reshape(*vector["to"], 3)
    observed = resample.resize(source(*vector["from"]), tuple(vector["to"]), vector["mode"])
    np.testing.assert_array_equal(observed, expected)
