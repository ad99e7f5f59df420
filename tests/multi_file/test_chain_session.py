"""The chain with runtime sessions: mismatched connections are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gate.errors import InputMismatch, OutputMismatch
from gate.multi_file.chain_model import Parameters, PartInterface
from gate.multi_file.chain_session import ChainSession, OpenPart
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.runtime import Proof, Session
from gate.storage.arrays import Batch
from gate.storage.digest import Digest

X = TensorSpec(name="x", dtype="float32", shape=("n", 3))
Y = TensorSpec(name="y", dtype="float32", shape=("n", 3))


PLACES = ("first", "second")


class Doubles(Session):
    def __init__(self, proof: Proof | None = None, *, outputs: int = 1) -> None:
        self._proof, self._outputs, self.closed = proof or Proof(), outputs, False

    def run(self, batch: Batch) -> Sequence[Any]:
        return [batch["x"] * 2] * self._outputs

    def proof(self) -> Proof:
        return self._proof

    def close(self) -> None:
        self.closed = True


def part(name: str = "one", *, session: Session | None = None, form: Any = None) -> OpenPart:
    subject = Subject(
        sha256=Digest.from_bytes(b""),
        size_bytes=1,
        opset=17,
        producer="",
        inputs=(X,),
        outputs=(Y,),
    )
    form = torch.zeros(1) if form is None else form
    return OpenPart(
        name, session or Doubles(), subject, PartInterface(Parameters(PLACES, PLACES), form)
    )


def chained(function: Any, *parts: OpenPart) -> ChainSession:
    return ChainSession(function, parts, [Y.model_copy(update={"name": "output"})], ended=list)


def test_parts_run_in_order() -> None:
    session = chained(
        lambda parts, batch: parts["two"](parts["one"](batch["x"]) + 1), part(), part("two")
    )
    (result,) = session.run({"x": np.ones((2, 3), np.float32)})
    assert (result == 6).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: (x.double(),), "float64 2×3 as 'x', its file expects float32 n×3"),
        (lambda x: (x.T,), "float32 3×2 as 'x'"),
        (lambda x: (x[0],), "float32 3 as 'x'"),
        (lambda x: (x, x), "2 tensors to the part one, its file has 1 inputs: x"),
    ],
)
def test_mismatched_connection_is_named(given: Any, text: str) -> None:
    session = chained(lambda parts, batch: parts["one"](*given(batch["x"])), part())
    with pytest.raises(InputMismatch, match=text):
        session.run({"x": np.ones((2, 3), np.float32)})


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ((torch.zeros(1), torch.zeros(1)), lambda out: out[1]),
        (Pair(torch.zeros(1), torch.zeros(1)), lambda out: out.second),
        ({"a": torch.zeros(1), "none": None, "b": torch.zeros(1)}, lambda out: out["b"]),
    ],
)
def test_part_returns_the_structure_of_its_module(form: Any, read: Any) -> None:
    two = part(session=Doubles(outputs=2), form=form)
    session = chained(lambda parts, batch: read(parts["one"](batch["x"])), two)
    (result,) = session.run({"x": np.ones((2, 3), np.float32)})
    assert (result == 2).all()


def test_different_outputs_are_refused() -> None:
    session = chained(lambda parts, batch: {"other": parts["one"](batch["x"])}, part())
    with pytest.raises(
        OutputMismatch, match="returns other with these files, but output with the modules"
    ):
        session.run({"x": np.ones((2, 3), np.float32)})


def test_provider_fallback_of_a_part_is_in_the_proof() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    good = Proof((cuda, cpu), {cuda: 3}, (), {"a": "1"}, {"onnxruntime": "1"}, "gpu", "float32")
    bad = Proof((cpu,), {cpu: 2}, ("Add:n",), {"a": "2"}, {"onnxruntime": "1"}, "cpu", "int8")
    first, two = part(session=Doubles(good)), part("two", session=Doubles(bad))
    proof = chained(lambda parts, _: parts, first, two).proof()
    assert proof.providers_active == (cpu,)
    assert proof.nodes_per_provider == {cuda: 3, cpu: 2}
    assert proof.fallback_nodes == ("two: Add:n",)
    assert (proof.session_options, proof.versions) == ({}, {"onnxruntime": "1"})
    assert (proof.device, proof.precision) == ("cpu", "int8")


def test_all_sessions_are_closed() -> None:
    first, two = Doubles(), Doubles()
    chained(lambda parts, _: parts, part(session=first), part("two", session=two)).close()
    assert first.closed
    assert two.closed


class Subtracts(Doubles):
    def run(self, batch: Batch) -> Sequence[Any]:
        return [batch["second"] - batch["first"]]


@pytest.mark.parametrize(
    "call",
    [
        lambda part, x: part(x, x * 3),
        lambda part, x: part(x, second=x * 3),
        lambda part, x: part(second=x * 3, first=x),
    ],
)
def test_file_inputs_are_passed_by_name(call: Any) -> None:
    """Whatever the order of its inputs, and of the call."""
    first = part(session=Subtracts())
    inputs = (X.model_copy(update={"name": "second"}), X.model_copy(update={"name": "first"}))
    named = dataclasses.replace(first, subject=first.subject.model_copy(update={"inputs": inputs}))
    (result,) = chained(lambda parts, batch: call(parts["one"], batch["x"]), named).run(
        {"x": np.ones((2, 3), np.float32)}
    )
    assert (result == 2).all()


def test_scalar_has_no_batch_axis() -> None:
    inputs = (X.model_copy(update={"shape": ()}),)
    first = part()
    scalar = dataclasses.replace(first, subject=first.subject.model_copy(update={"inputs": inputs}))
    session = chained(lambda parts, batch: parts["one"](batch["x"].mean()).sum(), scalar)
    (result,) = session.run({"x": np.ones((2, 3), np.float32)})
    assert (result.shape, float(result)) == ((), 2.0)
