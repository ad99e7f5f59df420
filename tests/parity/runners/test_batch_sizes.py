"""What a failure says of the batch sizes that a runtime computes."""

from __future__ import annotations

import numpy as np
import pytest

from gate.errors import OutputMismatch
from gate.measure.session_runner import failure_of

BATCH = {"x": np.zeros((3, 2), np.float32), "y": np.zeros((3,), np.int64)}
SHAPES = ValueError("shapes do not fit")


def taking(condition):
    def compute(batch):
        sizes = {len(array) for array in batch.values()}
        assert len(sizes) == 1
        if not condition(sizes.pop()):
            raise SHAPES

    return compute


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (lambda size: size == 2, "It computes batches of 2."),
        (lambda size: size == 1, "It computes batches of 1."),
        (lambda size: size % 8 == 0, "It computes batches of 8, 16, 24, 32, ..."),
        (lambda _size: False, None),
        (lambda _size: True, None),
        (lambda size: size < 5, None),
    ],
)
def test_sizes_are_named_where_some_break_that_are_smaller_than_others(condition, says):
    said = failure_of(SHAPES, BATCH, taking(condition))
    assert said.startswith("ValueError: shapes do not fit")
    assert said.rstrip(".").endswith(says.rstrip(".")) if says else "batches of" not in said


@pytest.mark.parametrize("error", [OutputMismatch("another shape"), MemoryError("no memory")])
def test_what_says_its_cause_itself_is_not_tried_again(error):
    assert "batches of" not in failure_of(error, BATCH, taking(lambda size: size == 2))
