"""Samples with NaN that the model itself treats, as tables have it, and exact ties of top-k."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gate.api import EvaluationResult, check
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.errors import DataError
from gate.export.export_warnings import captured
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy
from gate.records.evidence import Source


class Imputing(nn.Module):
    """Missing numbers become `value`, and are known as missing."""

    def __init__(self, value: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.value = nn.Linear(12, 3), value

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        missing = torch.isnan(input)
        filled = torch.where(missing, torch.full((), self.value), input)
        return self.fc(torch.cat([filled, missing.float()], 1))


class Ranked(nn.Module):
    """The best of scores of which many are exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 40, bias=False)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.relu(self.fc(input)).topk(5, dim=1)
        return values, places


def judged(model: nn.Module, exported: nn.Module, path: Path, rows: np.ndarray) -> EvaluationResult:
    policy = Policy.default().model_copy(update={"nonfinite": "same_places"})
    return check(
        written(exported, path), reference=Reference(model.eval(), Source(factory="tests")),
        data=EvaluationData(SampleSet.from_arrays({"input": rows})), policy=policy,
    )  # fmt: skip


def written(model: nn.Module, path: Path) -> Path:
    with captured():
        torch.onnx.export(
            model.eval(), (torch.randn(2, 6),), str(path), dynamo=False, input_names=["input"],
            dynamic_axes={"input": {0: "batch"}}, opset_version=17,
        )  # fmt: skip
    return path


def rows(*, gaps: bool) -> np.ndarray:
    random = np.random.default_rng(0)
    made = random.normal(size=(64, 6)).astype(np.float32)
    made[random.random(made.shape) < 0.2 * gaps] = np.nan
    return made


def test_a_model_that_treats_nan_passes_where_the_policy_says_so(tmp_path: Path) -> None:
    seen = judged(Imputing(), Imputing(), tmp_path / "model.onnx", rows(gaps=True))
    assert seen.decision.verdict is Verdict.PASS, seen.decision.problems


def test_one_that_treats_it_otherwise_fails(tmp_path: Path) -> None:
    seen = judged(Imputing(), Imputing(0.31), tmp_path / "model.onnx", rows(gaps=True))
    assert seen.decision.verdict is Verdict.FAIL


def test_without_the_policy_the_way_out_is_named(tmp_path: Path) -> None:
    path = written(Imputing(), tmp_path / "model.onnx")
    with pytest.raises(DataError, match="nonfinite: same_places"):
        check(path, reference=Reference(Imputing().eval(), Source(factory="tests")),
              data=EvaluationData(SampleSet.from_arrays({"input": rows(gaps=True)})))  # fmt: skip


def test_the_order_of_what_is_equal_is_nobodys_promise(tmp_path: Path) -> None:
    """On zeros all scores are zero, and a runtime may list others of them first."""
    seen = judged(Ranked(), Ranked(), tmp_path / "model.onnx", rows(gaps=False))
    assert seen.decision.verdict is Verdict.PASS, seen.decision.problems
