"""Localization with optimizations on and off, the memory budget, and changing forward paths."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from gate import Localization
from gate.localize import layer_deviations
from gate.localize.file_graph import SubgraphSession
from tests.localize import nets
from tests.localize.nets import IMAGES, TOKENS, VECTORS, change, found, layers, middle, node
from tests.measure import tiny

ROOT = 1.414225
"""ONNX Runtime takes it for the square root of 2 where it fuses GELU."""


class Erf(nn.Module):
    """A module of its own: its output, marked, keeps the optimiser from fusing around it."""

    def forward(self, x):
        return torch.erf(x)


class OpenGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.erf = Erf()

    def forward(self, x):
        return x * 0.5 * (1 + self.erf(x / ROOT))


class ClosedGelu(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1 + torch.erf(x / ROOT))


def fused(activation: nn.Module, tmp_path):
    """A net whose activation the optimiser computes in another way, and its file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), activation, nn.Linear(6, 64)).eval()
    return model, nets.export(model, tmp_path / "m.onnx", VECTORS)


def whole_output_verdicts(told: Localization) -> dict[str, str]:
    """Verdicts of the unmarked outputs by level."""
    kind = "output of the whole file, "
    return {
        row.kind.removeprefix(kind): row.verdict for row in told.layers if row.kind.startswith(kind)
    }


class TestOptimizer:
    @pytest.mark.further
    def test_fusion_prevented_by_marking_is_found(self, tmp_path):
        reported = found(*fused(OpenGelu(), tmp_path), VECTORS, runtime="ort-cpu-optimized")
        assert {row.verdict for row in layers(reported).values()} == {"ok"}
        assert whole_output_verdicts(reported) == {"optimized": "source", "not optimized": "ok"}
        assert (reported.first_divergence, reported.diverges) == (None, True)
        assert reported.outcome[0]["code"] == "fused"
        assert reported.blame.names == ("GeluFusionL2",)
        assert 'disabled_optimizers=["GeluFusionL2"]' in reported.remedy
        assert reported.whole_ratio > 8

    @pytest.mark.proof
    def test_completely_fused_module_is_a_source(self, tmp_path):
        model, candidate = fused(ClosedGelu(), tmp_path)
        reported = found(model, candidate, VECTORS, runtime="ort-cpu-optimized")
        assert reported.first_divergence == "1"
        assert "With optimizations off, the file agrees. With GeluFusion" in reported.cause
        assert "disabled_optimizers" in reported.remedy
        plain = found(model, candidate, VECTORS, runtime="ort-cpu")
        assert plain.first_divergence is None
        assert whole_output_verdicts(plain) == {"optimized": "source", "not optimized": "ok"}

    def test_fault_of_the_file_is_not_an_optimizer_fault(self, tmp_path):
        model, candidate = fused(nn.GELU(), tmp_path)
        bad = tiny.edit(candidate, tmp_path / "b.onnx", lambda p: change(p, "2.weight", middle))
        reported = found(model, bad, VECTORS, runtime="ort-cpu-optimized")
        assert reported.first_divergence == "2"
        assert "optimiz" not in reported.cause
        assert reported.blame is None

    def test_runtime_wrong_only_without_optimizations(self, tmp_path, monkeypatch):
        class Spoils(SubgraphSession):
            """Stands for a fault of a plain kernel."""

            def __init__(self, piece, setup):
                super().__init__(piece, setup)
                self._off = setup.optimization == "ORT_DISABLE_ALL" and len(piece.outputs) == 1

            def __call__(self, *arguments, **options):
                arrays = super().__call__(*arguments, **options)
                return {name: a * 1.01 if self._off else a for name, a in arrays.items()}

        monkeypatch.setattr(layer_deviations, "SubgraphSession", Spoils)
        model, candidate = fused(nn.GELU(), tmp_path)
        reported = found(model, candidate, VECTORS, runtime="ort-cpu-optimized")
        assert whole_output_verdicts(reported) == {"optimized": "ok", "not optimized": "source"}
        assert reported.outcome[0]["code"] == "only_unoptimized"
        assert "optimizations on" in reported.remedy


def test_accumulated_errors_without_a_source(tmp_path):
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(24))).eval()
    for layer in chain:
        nn.init.orthogonal_(layer.weight)
    candidate = nets.export(chain, tmp_path / "m.onnx", VECTORS)

    def all_a_little(proto: onnx.ModelProto) -> None:
        for tensor in list(proto.graph.initializer):
            change(proto, tensor.name, lambda w: w * np.float32(1 + 3e-7))

    reported = found(chain, tiny.edit(candidate, tmp_path / "bad.onnx", all_a_little), VECTORS)
    assert (reported.first_divergence, reported.diverges) == (None, True)
    assert [item["code"] for item in reported.outcome] == ["grown", "grown_at"]
    assert "amplifies rounding" in reported.remedy
    assert whole_output_verdicts(reported) == {
        "optimized": "propagated",
        "not optimized": "propagated",
    }
    assert not found(chain, candidate, VECTORS).diverges


class TestBudget:
    """Bytes of tensors at a time: however few, the result is the same."""

    CASES = (
        (nets.Residual, IMAGES, lambda p: change(p, node(p, "Conv", 1).input[1], middle)),
        (nets.Tokens, TOKENS, lambda p: change(p, "layer.fc1.bias", middle)),
    )

    @pytest.mark.further
    @pytest.mark.rows(2)
    @pytest.mark.parametrize("budget", [1])
    @pytest.mark.parametrize(("kind", "inputs", "spoil"), CASES)
    def test_budget_does_not_change_the_result(self, tmp_path, budget, kind, inputs, spoil):
        model = nets.made(kind)
        candidate = nets.export(model, tmp_path / "m.onnx", inputs)
        candidate = tiny.edit(candidate, tmp_path / "bad.onnx", spoil)
        full, small = (found(model, candidate, inputs, budget=b) for b in (1 << 30, budget))
        keep = ("first_divergence", "cause", "remedy", "samples")
        assert [getattr(small, name) for name in keep] == [getattr(full, name) for name in keep]
        for item, second in zip(small.layers, full.layers, strict=True):
            same = ("module", "call", "kind", "tensor", "verdict", "detail")
            assert [getattr(item, name) for name in same] == [
                getattr(second, name) for name in same
            ]
            # Batches of another size are summed in another order; the float64 reference sees the first.
            assert item.noise_ratio == pytest.approx(second.noise_ratio, rel=0.1, abs=0.5)
            scale = 1e-5 if second.verdict == "ok" else max(1e-5, 0.01 * second.max_abs_diff)
            assert item.max_abs_diff == pytest.approx(second.max_abs_diff, abs=scale)

    def test_budget_limits_returned_bytes(self, tmp_path, monkeypatch):
        returned, sessions = [], []

        class Counts(SubgraphSession):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                sessions.append(self)

            def __call__(self, *arguments, **options):
                arrays = super().__call__(*arguments, **options)
                returned.append(sum(array.nbytes for array in arrays.values()))
                return arrays

        monkeypatch.setattr("gate.localize.layer_deviations.SubgraphSession", Counts)
        monkeypatch.setattr("gate.localize.value_matching.SubgraphSession", Counts)
        model = nets.made(nets.Residual)
        candidate = nets.export(model, tmp_path / "m.onnx", IMAGES)
        found(model, candidate, IMAGES)
        most, number = max(returned), len(sessions)
        returned.clear(), sessions.clear()
        found(model, candidate, IMAGES, budget=12_000)
        assert len(sessions) > 2 * number
        assert max(returned) <= 12_000 < most

    def test_unused_weights_do_not_count(self, tmp_path):
        model = nets.made(nets.Shared)
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, outputs=("a", "b", "c"))

        def unread(proto: onnx.ModelProto) -> None:
            large = np.ones((40, 40), np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(large, "left over"))

        more = tiny.edit(candidate, tmp_path / "more.onnx", unread)
        assert not found(model, more, VECTORS).diverges


class _Branch(nn.Module):
    """One call more for batches that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.more, self.head = nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return self.head(self.more(y) if x[0, 0] > 0 else y)


@pytest.mark.parametrize(("signs", "samples"), [([1, 1, 1, 1, 1, 1], 6), ([1, 1, -1, 1, 1, 1], 2)])
def test_batches_with_another_forward_path_are_skipped(tmp_path, signs, samples):
    model = _Branch().eval()
    inputs = VECTORS.copy()
    inputs[:, 0] = signs
    candidate = nets.export(model, tmp_path / "m.onnx", inputs)
    reported = found(model, candidate, inputs)
    assert (reported.samples, reported.diverges) == (samples, False)
    assert reported.cause == f"No layer diverges on {samples} samples."


class _ChangingPath(nn.Module):
    """Another way at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.calls):
            y = self.layer(x)
        return y


def test_changing_forward_path_is_an_error(tmp_path):
    torch.manual_seed(0)
    model = _ChangingPath().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    with pytest.raises(
        layer_deviations.ForwardPathChanged, match="Pass samples that take the same branches"
    ):
        found(model, candidate, VECTORS)


class _Narrow(nn.Module):
    """Computes in float32 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("only float32")
        return self.head(self.layer(x))


def test_unit_without_float64_reference_is_one_rounding(tmp_path):
    model = _Narrow().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = found(model, candidate, VECTORS)
    assert not reported.diverges
    reason = "The unit is one float32 rounding, because the model can't run in float64"
    assert reason in reported.cause
    bad = tiny.edit(candidate, tmp_path / "bad.onnx", lambda p: change(p, "head.weight", middle))
    reported = found(model, bad, VECTORS)
    assert reported.first_divergence == "head"
    assert reason in reported.cause


def test_precomputed_module_is_unmapped(tmp_path):
    """The exporter computes what does not depend on the samples beforehand."""
    model = _Table().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = found(model, candidate, VECTORS)
    assert reported.unmapped == ("table",)
    assert (reported.first_divergence, reported.diverges) == (None, False)
    row = layers(reported)["table"]
    assert (row.tensor, row.max_abs_diff, row.noise_ratio, row.detail) == (None, None, None, None)


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.table(torch.ones(4)))


def test_unmapped_module_before_a_wrong_tensor_is_the_source(tmp_path):
    model = _Table().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    second = _Table().eval()
    with torch.no_grad():
        second.table.weight.mul_(2)
    reported = found(second, candidate, VECTORS)
    assert reported.first_divergence == "table"
