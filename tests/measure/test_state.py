"""References may change buffers in forward; each run starts from the same state."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

from gate import EvaluationData, EvaluationResult, Policy, Reference, SampleSet, Verdict, check
from gate.data.input_binding import InputBinding
from gate.export.export_warnings import captured
from gate.policy.sections import Instruments
from gate.probes.branches import TracedReference
from gate.records.evidence import Source
from gate.reference.torch_session import TorchSession
from gate.summary.render import render_check
from tests.probes import benches

pytestmark = pytest.mark.filterwarnings("ignore")
POLICY = Policy.default(task="tensors").model_copy(
    update={"instruments": Instruments(noise_samples=8, stability_samples=4, search_inputs=4)}
)


class Limited(nn.Module):
    """An embedding with `max_norm`: ids (batch, 5) to (batch, 3). Most rows exceed the norm."""

    def __init__(self, max_norm: float | None = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.h = nn.Embedding(12, 6, max_norm=max_norm), nn.Linear(6, 3)

    def forward(self, x):
        return self.h(self.e(x)).mean(1)


class Counting(nn.Module):
    """A model that counts its calls and adds `by` times the count to its outputs."""

    def __init__(self, by: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.h = by, nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(()))

    def count(self) -> None:
        self.seen += 1

    def forward(self, x):
        self.count()
        self.scale.mul_(1.0)
        return self.h(x) * self.scale + self.by * self.seen


class Assigning(Counting):
    """A counter that assigns a new tensor to its buffer."""

    def count(self) -> None:
        self.seen = self.seen + 1


class ThroughData(Counting):
    """A counter that writes through `.data`, which the version counter of a tensor does not see."""

    def count(self) -> None:
        self.seen.data.add_(1)


class Tracking(nn.Module):
    """A model that updates running statistics in eval mode. With `used` they change the output."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.h = used, nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x):
        pairs = x.unsqueeze(2).expand(-1, -1, 2)
        functional.batch_norm(pairs, self.mean, self.var, training=True, momentum=0.5)
        return self.h((x - self.mean) if self.used else x)


class Cached(nn.Module):
    """A model that builds a table in its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h, self.rows = nn.Linear(6, 3), 0
        self.register_buffer("table", torch.zeros(0, 6), persistent=False)

    def forward(self, x):
        if self.rows < 6:
            self.rows, self.table = 6, torch.linspace(0, 1, 36).reshape(6, 6)
        return self.h(x @ self.table[: self.rows])


class Returned(Counting):
    """A counter that returns the buffer it changes."""

    def forward(self, x):
        self.seen += 1
        return self.h(x), self.seen


def ids(rows: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 12, (rows, 5))


def numbers(rows: int = 24) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)


def export(model: nn.Module, path: Path, x: np.ndarray, *, dynamo: bool = False) -> Path:
    """Export a copy of the model."""
    options: dict[str, Any] = (
        {"dynamo": True, "dynamic_shapes": ({0: "batch"},), "external_data": False}
        if dynamo
        else {"dynamo": False, "opset_version": 17, "dynamic_axes": {"x": {0: "batch"}}}
    )
    with captured(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(copy.deepcopy(model).eval(), (torch.from_numpy(x),), str(path),
                          input_names=["x"], output_names=["y"], **options)  # fmt: skip
    return path


def check_file(path: Path, model: nn.Module, x: np.ndarray) -> EvaluationResult:
    """Run gate check and assert that it leaves the model's state unchanged."""
    before = copy.deepcopy(model.state_dict())
    result = check(
        path,
        reference=Reference(model, Source(factory="tests")),
        data=EvaluationData(SampleSet.from_arrays({"x": x}), batch_size=8),
        policy=POLICY,
    )
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return result


def failed_checks(result: EvaluationResult) -> set[str]:
    return {c.name for c in result.decision.checks if c.verdict in (Verdict.FAIL, Verdict.ERROR)}


def call_once(model: nn.Module, x: np.ndarray) -> nn.Module:
    """Call the model once and return it."""
    with torch.no_grad():
        model(torch.from_numpy(x))
    return model


@pytest.mark.further
def test_file_that_renormalizes_the_embedding_passes(tmp_path):
    model = call_once(Limited(), ids(1))
    result = check_file(
        export(model, tmp_path / "m.onnx", ids(4), dynamo=True), Limited().eval(), ids()
    )
    assert not failed_checks(result), result.decision.problems
    assert result.evidence.state_spread["e.weight"] < 1e-6


def test_torchscript_with_renormalized_rows_passes(tmp_path):
    """Pass a TorchScript export without `max_norm` whose rows are all renormalized."""
    all_ids = np.resize(np.arange(12), (3, 5))
    model = Limited().eval()
    result = check_file(export(model, tmp_path / "m.onnx", all_ids), model, ids())
    assert not failed_checks(result), result.decision.problems
    assert result.evidence.graph.weights.matched["renormalized"] == 1


def test_file_without_renormalization_fails(tmp_path):
    model = Limited().eval()
    result = check_file(export(model, tmp_path / "m.onnx", ids(1)), model, ids())
    assert result.decision.verdict is Verdict.FAIL
    assert "graph_other_weights" not in failed_checks(
        result
    )  # The weights are right, the graph is not.


def test_changed_unused_embedding_row_is_found(tmp_path):
    model = Limited().eval()
    path = export(model, tmp_path / "m.onnx", np.resize(np.arange(12), (3, 5)))
    proto = onnx.load(path)
    (table,) = [t for t in proto.graph.initializer if t.name == "e.weight"]
    values = numpy_helper.to_array(table).copy()
    values[11] *= 1.01
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    onnx.save(proto, path)
    result = check_file(path, model, ids() % 11)
    assert "graph_other_weights" in failed_checks(result)


@pytest.mark.parametrize("kind", [Counting, ThroughData])
def test_changing_buffer_used_in_the_output_is_an_error(kind, tmp_path):
    model = kind(by=0.5).eval()
    result = check_file(export(model, tmp_path / "m.onnx", numbers(2)), model, numbers())
    (repeats,) = [c for c in result.decision.checks if c.name == "repeats"]
    assert repeats.verdict is Verdict.ERROR
    assert "changes seen and" in render_check(repeats)
    spread = result.evidence.state_spread
    assert spread["seen"] > 0.1
    assert spread.get("scale", 0.0) == 0.0


@pytest.mark.parametrize("kind", [Assigning, ThroughData])
def test_changing_buffer_without_effect_passes(kind, tmp_path):
    model = kind().eval()
    result = check_file(export(model, tmp_path / "m.onnx", numbers(2)), model, numbers())
    assert not failed_checks(result), result.decision.problems
    assert result.evidence.state_spread["seen"] == 0.0


@pytest.mark.parametrize("used", [False, True])
def test_running_statistics_updated_in_eval_mode(used, tmp_path):
    model = Tracking(used=used).eval()
    # Neither exporter keeps the update, so the same function is written by hand.
    stateless = nn.Sequential(model.h)
    result = check_file(export(stateless, tmp_path / "m.onnx", numbers(2)), model, numbers())
    assert set(result.evidence.state_spread) == {"mean", "var"}
    assert ("repeats" in failed_checks(result)) is used
    assert used or not failed_checks(result)


def test_table_built_by_the_first_call_passes(tmp_path):
    x = np.random.default_rng(0).normal(size=(24, 6, 6)).astype(np.float32)
    model = Cached().eval()
    result = check_file(export(call_once(Cached(), x[:2]), tmp_path / "m.onnx", x[:2]), model, x)
    assert not failed_checks(result), result.decision.problems
    assert result.evidence.state_spread == {"table": 0.0}


@pytest.mark.parametrize("kind", [Returned, Counting, Assigning])
def test_each_run_starts_with_the_same_state(kind):
    model = kind(by=1.0).eval()
    working_copy = copy.deepcopy(model)
    binding = InputBinding((("x", "x"),), 8, fixed=False)
    session = TorchSession(working_copy, binding, device="cpu", original=model)
    first, repeated = (session.run({"x": numbers(3)}) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert int(working_copy.seen) == 0
    if kind is Returned:
        assert int(first[1]) == 1


def test_traced_reference_starts_with_the_same_state():
    context = benches.create_context(Counting(by=1.0).eval(), {"x": numbers()})
    traced = TracedReference(context, {"x": numbers(2)})
    expected = context.reference.run({"x": numbers(3)})
    for _ in range(2):
        assert traced.record_reads({"x": numbers(3)})[1]
        assert np.array_equal(traced.run({"x": numbers(3)})[0], expected[0])
    assert int(context.model.module.seen) == 0
