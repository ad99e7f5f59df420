"""A session is run on samples, and its failures are classified."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("error", [OutputMismatch("another shape"), MemoryError("no memory")])
def test_error_with_known_cause_is_not_retried(error):
    assert find_batch_sizes(error, BATCH, accept_sizes(lambda size: size == 2)) == ()


@pytest.mark.parametrize(("error", "code"), [
    (ModelMismatch("it returned 2 outputs", "number", {"got": 2}), "wrong_outputs"),
    (OutputMismatch("the page returned an invalid frame"), None),
    (MemoryError("no memory"), "out_of_memory"),
    (RuntimeError("Failed to allocate memory for requested buffer of size 9"), "out_of_memory"),
    (RuntimeError("cannot be reshaped to the requested shape. Input shape:{1,8}"), "reshape"),
    (RuntimeError("com.acme:Relu(-1) is not a registered function/op"), "unregistered_operator"),
    (RuntimeError("dimensions must match"), None),
])  # fmt: skip
def test_failure_is_classified(error, code):
    assert classify_failure(error)[0] == code


class Clocked(Session):
    def __init__(self, said: Any) -> None:
        self.seconds = said

    def run(self, batch: Any) -> list[Any]:
        return list(batch.values())

    def proof(self) -> Proof:
        return Proof()


def run_seconds(said: Any) -> float:
    runner = SessionRunner(Clocked(said), builders.evidence().subject, None)
    runner.run({"input": np.zeros((2, 3), np.float32)})
    return runner.seconds


@pytest.mark.parametrize("said", [None, 0.0, -1.0, math.nan, math.inf, "0.1"])
def test_invalid_session_time_is_replaced(said):
    assert 0 < run_seconds(said) < 60


def test_session_time_is_used():
    result = run_seconds(np.float32(0.5))
    assert (result, type(result)) == (0.5, float)


class Counted(Session):
    """A session that counts its runs."""

    runs = 0

    def run(self, batch: Any) -> list[Any]:
        self.runs += 1
        return [array * 2 for array in batch.values()]

    def proof(self) -> Proof:
        return Proof()


def test_probe_answer_is_cached():
    session = Counted()
    runner = SessionRunner(session, builders.evidence().subject, None)
    batch = {"input": np.ones((2, 3), np.float32)}
    probed = runner.run_probe(batch)
    assert np.array_equal(runner.answer({"input": np.ones((2, 3), np.float32)})[0], probed[0])
    assert session.runs == 1
    runner.answer({"input": np.zeros((2, 3), np.float32)})
    assert session.runs == 2


def test_runs_are_never_cached():
    """Run again for each request outside of `answer`: repeatability needs new runs."""
    session = Counted()
    runner = SessionRunner(session, builders.evidence().subject, None)
    batch = {"input": np.ones((2, 3), np.float32)}
    for compute in (runner.run_probe, runner.run_probe, runner.run, runner.run):
        compute(batch)
    assert session.runs == 4
