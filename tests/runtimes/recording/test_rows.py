"""A sample's digest is that of its inputs, whatever batch it is in."""

from __future__ import annotations

import numpy as np
import pytest

from gate.runtimes.recording_format import row_digests

X = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(4)


def test_a_batch_has_the_digests_of_its_parts():
    whole = row_digests({"x": X, "ids": IDS})
    parts = [row_digests({"ids": IDS[s : s + 3], "x": X[s : s + 3]}) for s in (0, 3)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert len({row.tobytes() for row in whole}) == 4


def test_byte_order_and_layout_do_not_matter():
    plain = row_digests({"x": X})
    assert np.array_equal(plain, row_digests({"x": X.astype(">f4")}))
    assert np.array_equal(plain, row_digests({"x": np.asfortranarray(X)}))


@pytest.mark.parametrize(
    "other",
    [{"y": X}, {"x": X.view(np.int32)}, {"x": X.reshape(4, 3, 1)}, {"x": -X}, {"x": X, "y": IDS}],
)
def test_everything_else_does(other):
    assert not (row_digests({"x": X}) == row_digests(other)).all(axis=1).any()
