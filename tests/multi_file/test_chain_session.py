"""The chain runs with runtime sessions, and mismatched connections are named."""

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


ARGUMENTS = ("first", "second")


class Doubles(Session):
    def __init__(self, proof: Proof | None = None, *, outputs: int = 1) -> None:
        self._proof, self._outputs, self.closed = proof or Proof(), outputs, False

    def run(self, batch: Batch) -> Sequence[Any]:
        return [batch["x"] * 2] * self._outputs

    def proof(self) -> Proof:
        return self._proof

    def close(self) -> None:
        self.closed = True


def open_part(name: str = "one", *, session: Session | None = None, form: Any = None) -> OpenPart:
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
        name, session or Doubles(), subject, PartInterface(Parameters(ARGUMENTS, ARGUMENTS), form)
    )


def make_session(function: Any, *parts: OpenPart) -> ChainSession:
    return ChainSession(function, parts, [Y.model_copy(update={"name": "output"})], ended=list)


def test_parts_run_in_order() -> None:
    session = make_session(
        lambda parts, batch: parts["two"](parts["one"](batch["x"]) + 1),
        open_part(),
        open_part("two"),
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
    session = make_session(lambda parts, batch: parts["one"](*given(batch["x"])), open_part())
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
    two_outputs = open_part(session=Doubles(outputs=2), form=form)
    session = make_session(lambda parts, batch: read(parts["one"](batch["x"])), two_outputs)
    (result,) = session.run({"x": np.ones((2, 3), np.float32)})
    assert (result == 2).all()


def test_different_outputs_are_refused() -> None:
    session = make_session(lambda parts, batch: {"other": parts["one"](batch["x"])}, open_part())
    with pytest.raises(
        OutputMismatch, match="returns other with these files, but output with the modules"
    ):
        session.run({"x": np.ones((2, 3), np.float32)})


def test_provider_fallback_of_a_part_is_in_the_proof() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    good = Proof((cuda, cpu), {cuda: 3}, (), {"a": "1"}, {"onnxruntime": "1"}, "gpu", "float32")
    bad = Proof((cpu,), {cpu: 2}, ("Add:n",), {"a": "2"}, {"onnxruntime": "1"}, "cpu", "int8")
    first, second = open_part(session=Doubles(good)), open_part("two", session=Doubles(bad))
    proof = make_session(lambda parts, _: parts, first, second).proof()
    assert proof.providers_active == (cpu,)
    assert proof.nodes_per_provider == {cuda: 3, cpu: 2}
    assert proof.fallback_nodes == ("two: Add:n",)
    assert (proof.session_options, proof.versions) == ({}, {"onnxruntime": "1"})
    assert (proof.device, proof.precision) == ("cpu", "int8")


def test_all_sessions_are_closed() -> None:
    first, second = Doubles(), Doubles()
    make_session(
        lambda parts, _: parts, open_part(session=first), open_part("two", session=second)
    ).close()
    assert first.closed
    assert second.closed


class Subtracts(Doubles):
    def run(self, batch: Batch) -> Sequence[Any]:
        return [batch["second"] - batch["first"]]


@pytest.mark.parametrize(
    "call",
    [
        lambda open_part, x: open_part(x, x * 3),
        lambda open_part, x: open_part(x, second=x * 3),
        lambda open_part, x: open_part(second=x * 3, first=x),
    ],
)
def test_file_inputs_are_passed_by_name(call: Any) -> None:
    """The order of the inputs in the file and in the call does not matter."""
    first = open_part(session=Subtracts())
    inputs = (X.model_copy(update={"name": "second"}), X.model_copy(update={"name": "first"}))
    reversed_inputs = dataclasses.replace(
        first, subject=first.subject.model_copy(update={"inputs": inputs})
    )
    (result,) = make_session(
        lambda parts, batch: call(parts["one"], batch["x"]), reversed_inputs
    ).run({"x": np.ones((2, 3), np.float32)})
    assert (result == 2).all()


def test_scalar_has_no_batch_axis() -> None:
    inputs = (X.model_copy(update={"shape": ()}),)
    first = open_part()
    scalar_input = dataclasses.replace(
        first, subject=first.subject.model_copy(update={"inputs": inputs})
    )
    session = make_session(lambda parts, batch: parts["one"](batch["x"].mean()).sum(), scalar_input)
    (result,) = session.run({"x": np.ones((2, 3), np.float32)})
    assert (result.shape, float(result)) == ((), 2.0)
