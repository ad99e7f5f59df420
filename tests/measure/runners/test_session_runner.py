"""A session is run on samples, and its failures are classified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gate.errors import ModelMismatch, OutputMismatch
from gate.measure.session_runner import SessionRunner, classify_failure, find_batch_sizes
from gate.runtimes.runtime import Proof, Session
from tests import builders

BATCH = {"x": np.zeros((3, 2), np.float32), "y": np.zeros((3,), np.int64)}
SHAPES = ValueError("shapes do not fit")


def accept_sizes(condition):
    def compute(batch):
        sizes = {len(array) for array in batch.values()}
        assert len(sizes) == 1
        if not condition(sizes.pop()):
            raise SHAPES

    return compute


@pytest.mark.parametrize(("condition", "sizes"), [
    (lambda size: size == 2, (2,)),
    (lambda size: size == 1, (1,)),
    (lambda size: size % 8 == 0, (8, 16, 24, 32, 48, 64)),
    (lambda _size: False, ()),
    (lambda _size: True, ()),
    (lambda size: size < 5, ()),
])  # fmt: skip
def test_supported_batch_sizes_are_found(condition, sizes):
    assert find_batch_sizes(SHAPES, BATCH, accept_sizes(condition)) == sizes


@pytest.mark.parametrize(("error", "code"), [
    (ModelMismatch("it returned 2 outputs", "number", {"got": 2}), "wrong_outputs"),
    (OutputMismatch("the page returned an invalid frame"), None),
    (MemoryError("no memory"), "out_of_memory"),
    (RuntimeError("Failed to allocate memory for requested buffer of size 9"), "out_of_memory"),
    (RuntimeError("cannot be reshaped to the requested shape. Input shape:{1,8}"), "reshape"),
    (RuntimeError("com.acme:Relu(-1) is not a registered function/op"), "unregistered_operator"),
    (RuntimeError("Load model from a.onnx failed:Type Error: Type (tensor(int64))"), "invalid_graph"),
    (RuntimeError("Load model from a.onnx failed:This is an invalid model. In"), "invalid_graph"),
    (RuntimeError("Load model from a.onnx failed:Node (m) Op (MatMul) [ShapeInferenceError] I"),
     "invalid_graph"),
    (RuntimeError("Load model from a.onnx failed:Node (t) Op (Transpose) [TypeInferenceError] I"),
     "invalid_graph"),
    (RuntimeError("Non-zero status code returned while running MatMul node. Name:'m' dimension mis"),
     "invalid_graph"),
    (RuntimeError("Non-zero status code returned while running Conv node. Name:'c' CUDNN failure 4"),
     None),
    (RuntimeError("Load model from a.onnx failed:Unsupported model IR version: 99"), None),
    (RuntimeError("dimensions must match"), None),
])  # fmt: skip
def test_failure_is_classified(error, code):
    assert classify_failure(error)[0] == code


class Counted(Session):
    """A session that counts its runs."""

    runs = 0

    def run(self, batch: Any) -> list[Any]:
        self.runs += 1
        return [array * 2 for array in batch.values()]

    def proof(self) -> Proof:
        return Proof()


def test_runs_are_never_cached():
    """Run again for each request outside of `answer`: repeatability needs new runs."""
    session = Counted()
    runner = SessionRunner(session, builders.evidence().subject, None)
    batch = {"input": np.ones((2, 3), np.float32)}
    for compute in (runner.run_probe, runner.run_probe, runner.run, runner.run):
        compute(batch)
    assert session.runs == 4
