from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from gate.commands.export_compare import compare_exports
from gate.commands.options import STRATEGIES
from gate.errors import ExportError, ModelError
from gate.export import export as trials
from gate.measure.job import Reference
from gate.onnx_file.reading import read_subject
from gate.records.evidence import Source
from gate.records.export import ExportSettings, ExportTrialRecord, Trials


class BatchDependentMean(nn.Module):
    """Divides by `len(x)`, which the tracer records as a constant, and averages over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / len(x) + self.body(x).mean(0, keepdim=True)


class TwoLinear(nn.Module):
    """A small model whose exports are all correct."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def reference(model: nn.Module) -> Reference:
    return Reference(model.eval(), Source(factory="tests:model"))


def example(count: int = 8) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(count, 16)).astype(np.float32)}


ALL_EXPORTS = [
    *((strategy, 18, True) for strategy in STRATEGIES),
    ("traced", 13, True),
    ("traced", 13, False),
    ("dynamo", 13, True),
]


def compare(
    model: nn.Module,
    exports: list[tuple[str, int, bool]],
    *,
    count: int = 8,
    settings: ExportSettings | None = None,
    **more: Any,
) -> Trials:
    settings = settings or ExportSettings()
    return compare_exports(reference(model), example(count), exports, settings=settings, **more)


def trials_by_title(result) -> dict[str, ExportTrialRecord]:
    return {trial.title: trial for trial in result.trials}


@pytest.fixture(scope="module")
def plain():
    return compare(TwoLinear(), ALL_EXPORTS)


@pytest.mark.proof
def test_each_strategy_is_a_row_with_all_columns(plain) -> None:
    assert len(plain.trials) == len(ALL_EXPORTS)
    row = trials_by_title(plain)["traced, opset 13, folded"]
    assert (row.verdict, row.opset, row.failure) == ("PASS", 13, None)
    assert row.nodes == 3
    assert row.size_bytes is not None
    assert row.size_bytes > 2000
    assert math.isfinite(row.seconds)
    assert [parity.runtime for parity in row.parities] == ["ort-cpu", "ort-cpu-optimized"]
    for parity in row.parities:
        for field in ("max_abs_diff", "l2_logits", "l2_probabilities", "noise_ratio", "latency_ms"):
            assert math.isfinite(getattr(parity, field)), field
        assert parity.top1_agreement == 1.0


@pytest.mark.further
def test_opset_is_read_from_the_file(plain) -> None:
    requested = trials_by_title(plain)["dynamo, opset 13, folded"]
    got = trials_by_title(plain)["dynamo, opset 18, folded"]
    assert (got.opset, got.verdict) == (18, "PASS")
    assert requested.opset == 13 or "opset 18" in str(requested.failure)


def test_identical_files_are_measured_once(plain) -> None:
    same = [trial for trial in plain.trials if trial.same_as is not None]
    assert same
    for trial in same:
        assert trial.parities == trials_by_title(plain)[str(trial.same_as)].parities


def test_exporter_that_fixes_a_size_is_detected() -> None:
    result = trials_by_title(
        compare(BatchDependentMean(), [("traced", 13, True), ("scripted", 13, True)])
    )
    assert result["traced, opset 13, folded"].verdict == "FAIL"
    assert any(
        "TracerWarning" in w or "len" in w for w in result["traced, opset 13, folded"].warnings
    )
    assert result["scripted, opset 13, folded"].verdict == "PASS"


def test_precision_loss_of_an_exporter_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale one weight by 1.001: no class changes, but the rounding error grows."""
    export = trials.export_model

    def losing(*arguments: Any, output: Path, **keywords: Any) -> Any:
        exported = export(*arguments, output=output, **keywords)
        proto = onnx.load(str(output))
        weight = next(t for t in proto.graph.initializer if len(t.dims) == 2)
        values = numpy_helper.to_array(weight).copy()
        values.flat[0] *= 1.001
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))
        output.write_bytes(proto.SerializeToString())
        return dataclasses.replace(exported, subject=read_subject(output))

    monkeypatch.setattr(trials, "export_model", losing)
    (trial,) = compare(TwoLinear(), [("direct", 13, True)]).trials
    assert trial.verdict == "FAIL"
    assert all(parity.top1_agreement == 1.0 for parity in trial.parities)


class Unscriptable(TwoLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = {"x": x}
        return super().forward(**named)


def test_failed_export_is_a_row_with_the_reason() -> None:
    exports = list(itertools.product(("scripted", "direct"), (13, 99), (False,)))
    result = compare(Unscriptable(), exports)
    assert {trial.verdict for trial in result.trials} == {"PASS", "not exported"}
    for trial in result.trials:
        assert (trial.failure is None) == (trial.verdict == "PASS")
        assert "\n" not in (trial.failure or "")
    impossible = trials_by_title(result)["direct, opset 99, not folded"]
    assert impossible.failure == "opset: expected auto, or a number from 9 to 23 (seen: 99)."


def test_no_successful_export_is_an_error() -> None:
    exports = [("scripted", 13, folding) for folding in (True, False)]
    with pytest.raises(ExportError, match="all 2 exports"):
        compare(Unscriptable(), exports)


class Broken(TwoLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no weights here")


def test_failing_model_is_an_error() -> None:
    with pytest.raises((ExportError, ModelError), match="no weights here"):
        compare(Broken(), [("traced", 13, True), ("dynamo", 13, False)])


@pytest.mark.parametrize("count", [1, 3, 12])
def test_few_samples_are_repeated(count: int) -> None:
    result = compare(TwoLinear(), [("direct", 13, True)], count=count)
    assert result.samples == max(count, 8)
    assert [trial.verdict for trial in result.trials] == ["PASS"]


def test_progress_and_settings() -> None:
    observed: list[tuple[int, int]] = []
    settings = ExportSettings(dynamic_batch=False, batch_size=4, output_names=("scores",))
    result = compare(
        TwoLinear(),
        [("direct", 13, True), ("direct", 17, True)],
        settings=settings,
        progress=lambda done, total: observed.append((done, total)),
    )
    assert observed == [(0, 2), (1, 2), (2, 2)]
    assert [trial.verdict for trial in result.trials] == ["PASS", "PASS"]
