"""Which batch sizes a runtime computes, and what kind of failure it has."""

from __future__ import annotations

import numpy as np
import pytest

from gate.errors import ModelMismatch, OutputMismatch
from gate.measure.session_runner import batch_sizes_of, classify_failure

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
    ("condition", "sizes"),
    [
        (lambda size: size == 2, (2,)),
        (lambda size: size == 1, (1,)),
        (lambda size: size % 8 == 0, (8, 16, 24, 32, 48, 64)),
        (lambda _size: False, ()),
        (lambda _size: True, ()),
        (lambda size: size < 5, ()),
    ],
)
def test_sizes_are_named_where_some_break_that_are_smaller_than_others(condition, sizes):
    assert batch_sizes_of(SHAPES, BATCH, taking(condition)) == sizes


@pytest.mark.parametrize("error", [OutputMismatch("another shape"), MemoryError("no memory")])
def test_what_says_its_cause_itself_is_not_tried_again(error):
    assert batch_sizes_of(error, BATCH, taking(lambda size: size == 2)) == ()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelMismatch("it returned 2 outputs", "number", {"got": 2}), "wrong_outputs"),
        (OutputMismatch("the page answered with nonsense"), None),
        (MemoryError("no memory"), "out_of_memory"),
        (RuntimeError("Failed to allocate memory for requested buffer of size 9"), "out_of_memory"),
        (RuntimeError("cannot be reshaped to the requested shape. Input shape:{1,8}"), "reshape"),
        (
            RuntimeError("com.acme:Relu(-1) is not a registered function/op"),
            "unregistered_operator",
        ),
        (RuntimeError("dimensions must match"), None),
    ],
)
def test_a_failure_has_a_kind(error, code):
    assert classify_failure(error)[0] == code
