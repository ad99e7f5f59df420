"""Localization works with optimizations on and off, within a memory budget, and on changing forward
paths.
"""

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
from tests.localize.nets import (
    IMAGES,
    TOKENS,
    VECTORS,
    change_weight,
    edit_input,
    edit_weight,
    layer_rows,
    localize_file,
)
from tests.measure import tiny
from tests.modules import Function, Layers

ROOT = 1.414225
"""The value that ONNX Runtime accepts as the square root of 2 when it fuses GELU."""


OPEN_GELU = Layers(lambda m, x: x * 0.5 * (1 + m.erf(x / ROOT)), erf=lambda: Function(torch.erf))
"""GELU with a module whose output, when marked, keeps the optimizer from fusing it."""


CLOSED_GELU = Function(lambda x: x * 0.5 * (1 + torch.erf(x / ROOT)))


def export_fusible(activation: nn.Module, tmp_path):
    """Return a network with an activation that the optimizer fuses, and its file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), activation, nn.Linear(6, 64)).eval()
    return model, nets.export(model, tmp_path / "m.onnx", VECTORS)


def whole_output_verdicts(record: Localization) -> dict[str, str]:
    """Return the verdicts of the outputs of the whole file by optimization level."""
    kind = "output of the whole file, "
    return {
        row.kind.removeprefix(kind): row.verdict
        for row in record.layers
        if row.kind.startswith(kind)
    }


class TestOptimizer:
    @pytest.mark.further
    def test_fusion_prevented_by_marking_is_found(self, tmp_path):
        reported = localize_file(
            *export_fusible(OPEN_GELU, tmp_path), VECTORS, runtime="ort-cpu-optimized"
        )
        assert {row.verdict for row in layer_rows(reported).values()} == {"ok"}
        assert whole_output_verdicts(reported) == {"optimized": "source", "not optimized": "ok"}
        assert (reported.first_divergence, reported.diverges) == (None, True)
        assert reported.outcome[0]["code"] == "fused"
        assert reported.blame.names == ("GeluFusionL2",)
        assert 'disabled_optimizers=["GeluFusionL2"]' in reported.remedy
        assert reported.whole_ratio > 8

    @pytest.mark.proof
    def test_completely_fused_module_is_a_source(self, tmp_path):
        model, candidate = export_fusible(CLOSED_GELU, tmp_path)
        reported = localize_file(model, candidate, VECTORS, runtime="ort-cpu-optimized")
        assert reported.first_divergence == "1"
        assert "With optimizations off, the file agrees. With GeluFusion" in reported.cause
        assert "disabled_optimizers" in reported.remedy
        plain = localize_file(model, candidate, VECTORS, runtime="ort-cpu")
        assert plain.first_divergence is None
        assert whole_output_verdicts(plain) == {"optimized": "source", "not optimized": "ok"}

    def test_fault_of_the_file_is_not_an_optimizer_fault(self, tmp_path):
        model, candidate = export_fusible(nn.GELU(), tmp_path)
        reported = localize_file(
            model, candidate, VECTORS, runtime="ort-cpu-optimized", edit=edit_weight("2.weight")
        )
        assert reported.first_divergence == "2"
        assert "optimiz" not in reported.cause
        assert reported.blame is None

    def test_runtime_wrong_only_without_optimizations(self, tmp_path, monkeypatch):
        class FaultyPlainSession(SubgraphSession):
            """A session with a fault in kernels without optimizations."""

            def __init__(self, piece, setup):
                super().__init__(piece, setup)
                self._off = setup.optimization == "ORT_DISABLE_ALL" and len(piece.outputs) == 1

            def __call__(self, *arguments, **options):
                arrays = super().__call__(*arguments, **options)
                return {name: a * 1.01 if self._off else a for name, a in arrays.items()}

        monkeypatch.setattr(layer_deviations, "SubgraphSession", FaultyPlainSession)
        model, candidate = export_fusible(nn.GELU(), tmp_path)
        reported = localize_file(model, candidate, VECTORS, runtime="ort-cpu-optimized")
        assert whole_output_verdicts(reported) == {"optimized": "ok", "not optimized": "source"}
        assert reported.outcome[0]["code"] == "only_unoptimized"
        assert "optimizations on" in reported.remedy


def test_accumulated_errors_without_a_source(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(24))).eval()
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)

    def scale_all_weights(proto: onnx.ModelProto) -> None:
        for tensor in list(proto.graph.initializer):
            change_weight(proto, tensor.name, lambda w: w * np.float32(1 + 3e-7))

    reported = localize_file(model, candidate, VECTORS, edit=scale_all_weights)
    assert (reported.first_divergence, reported.diverges) == (None, True)
    assert [item["code"] for item in reported.outcome] == ["grown", "grown_at"]
    assert "amplifies rounding" in reported.remedy
    assert whole_output_verdicts(reported) == {
        "optimized": "propagated",
        "not optimized": "propagated",
    }
    assert not localize_file(model, candidate, VECTORS).diverges


class TestBudget:
    """The memory budget for tensors does not change the result."""

    CASES = (
        (
            nets.Residual,
            IMAGES,
            edit_input("Conv", 1),
        ),
        (nets.Tokens, TOKENS, edit_weight("layer.fc1.bias")),
    )

    @pytest.mark.further
    @pytest.mark.rows(2)
    @pytest.mark.parametrize("budget", [1])
    @pytest.mark.parametrize(("kind", "inputs", "spoil"), CASES)
    def test_budget_does_not_change_the_result(self, tmp_path, budget, kind, inputs, spoil):
        model = nets.build(kind)
        candidate = nets.export(model, tmp_path / "m.onnx", inputs)
        candidate = tiny.edit(candidate, tmp_path / "bad.onnx", spoil)
        full, small = (localize_file(model, candidate, inputs, budget=b) for b in (1 << 30, budget))
        fields = ("first_divergence", "cause", "remedy", "samples")
        assert [getattr(small, name) for name in fields] == [getattr(full, name) for name in fields]
        for row, expected in zip(small.layers, full.layers, strict=True):
            exact_fields = ("module", "call", "kind", "tensor", "verdict", "detail")
            assert [getattr(row, name) for name in exact_fields] == [
                getattr(expected, name) for name in exact_fields
            ]
            # The noise ratio differs with the batch size, because the float64 reference covers the
            # first batch.
            assert row.noise_ratio == pytest.approx(expected.noise_ratio, rel=0.1, abs=0.5)
            scale = 1e-5 if expected.verdict == "ok" else max(1e-5, 0.01 * expected.max_abs_diff)
            assert row.max_abs_diff == pytest.approx(expected.max_abs_diff, abs=scale)

    def test_budget_limits_returned_bytes(self, tmp_path, monkeypatch):
        returned, sessions = [], []

        class CountingSession(SubgraphSession):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                sessions.append(self)

            def __call__(self, *arguments, **options):
                arrays = super().__call__(*arguments, **options)
                returned.append(sum(array.nbytes for array in arrays.values()))
                return arrays

        monkeypatch.setattr("gate.localize.layer_deviations.SubgraphSession", CountingSession)
        monkeypatch.setattr("gate.localize.value_matching.SubgraphSession", CountingSession)
        model = nets.build(nets.Residual)
        candidate = nets.export(model, tmp_path / "m.onnx", IMAGES)
        localize_file(model, candidate, IMAGES)
        most, number = max(returned), len(sessions)
        returned.clear(), sessions.clear()
        localize_file(model, candidate, IMAGES, budget=12_000)
        assert len(sessions) > 2 * number
        assert max(returned) <= 12_000 < most

    def test_unused_weights_do_not_count(self, tmp_path):
        model = nets.build(nets.Shared)
        candidate = nets.export(model, tmp_path / "m.onnx", VECTORS, outputs=("a", "b", "c"))

        def add_unused_weight(proto: onnx.ModelProto) -> None:
            large = np.ones((40, 40), np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(large, "left over"))

        assert not localize_file(model, candidate, VECTORS, edit=add_unused_weight).diverges


def _branch() -> nn.Module:
    """Return a model with an additional call for batches that begin with a positive number."""
    return Layers(
        lambda m, x: m.head(m.more(m.layer(x)) if x[0, 0] > 0 else m.layer(x)),
        layer=lambda: nn.Linear(6, 6),
        more=nn.Identity,
        head=lambda: nn.Linear(6, 3),
    )


@pytest.mark.parametrize(("signs", "samples"), [([1, 1, 1, 1, 1, 1], 6), ([1, 1, -1, 1, 1, 1], 2)])
def test_batches_with_another_forward_path_are_skipped(tmp_path, signs, samples):
    model = _branch().eval()
    inputs = VECTORS.copy()
    inputs[:, 0] = signs
    candidate = nets.export(model, tmp_path / "m.onnx", inputs)
    reported = localize_file(model, candidate, inputs)
    assert (reported.samples, reported.diverges) == (samples, False)
    assert reported.cause == f"No layer diverges on {samples} samples."


class _ChangingPath(nn.Module):
    """A model whose forward path changes with every call."""

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
        localize_file(model, candidate, VECTORS)


class _Narrow(nn.Module):
    """A model that runs only in float32."""

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
    reported = localize_file(model, candidate, VECTORS)
    assert not reported.diverges
    reason = "The unit is one float32 rounding, because the model can't run in float64"
    assert reason in reported.cause
    reported = localize_file(model, candidate, VECTORS, edit=edit_weight("head.weight"))
    assert reported.first_divergence == "head"
    assert reason in reported.cause


def test_precomputed_module_is_unmapped(tmp_path):
    """Leave a module unmapped whose output does not depend on the samples; the exporter computes
    it.
    """
    model = _table().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS)
    assert reported.unmapped == ("table",)
    assert (reported.first_divergence, reported.diverges) == (None, False)
    row = layer_rows(reported)["table"]
    assert (row.tensor, row.max_abs_diff, row.noise_ratio, row.detail) == (None, None, None, None)


def _table() -> nn.Module:
    return Layers(
        lambda m, x: m.head(x + m.table(torch.ones(4))),
        table=lambda: nn.Linear(4, 6),
        head=lambda: nn.Linear(6, 3),
    )


def test_unmapped_module_before_a_wrong_tensor_is_the_source(tmp_path):
    model = _table().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    other_weights = _table().eval()
    with torch.no_grad():
        other_weights.table.weight.mul_(2)
    reported = localize_file(other_weights, candidate, VECTORS)
    assert reported.first_divergence == "table"


def _with_gradients(m: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():  # the session then starts forward again
        return m.head(m.same(torch.tanh(hidden)))


def _in_bfloat16(m: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return m.head(m.same(hidden.bfloat16()).float())


@pytest.mark.parametrize("rest", [_with_gradients, _in_bfloat16])
def test_values_that_numpy_refuses_are_localized(tmp_path, rest):
    """NumPy refuses tensors with gradients and bfloat16."""
    model = Layers(
        lambda m, x: rest(m, m.layer(x)),
        layer=lambda: nn.Linear(6, 6),
        same=nn.Identity,
        head=lambda: nn.Linear(6, 3),
    ).eval()
    candidate = nets.export(model, tmp_path / "m.onnx", VECTORS)
    reported = localize_file(model, candidate, VECTORS, edit=edit_weight("layer.weight"))
    assert (reported.first_divergence, reported.fault_code) == ("layer", "weights")
    assert [item["code"] for item in reported.outcome] == ["source"]  # float64 was measured
