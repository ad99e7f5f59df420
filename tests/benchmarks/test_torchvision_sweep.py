from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import torchvision_models, torchvision_sweep
from benchmarks.torchvision_models import architectures
from benchmarks.torchvision_sweep import OPSETS, PARAMETERS, sweep, table, trial
from gate.errors import ExportError
from tests.exhaustive import exhaustive


def test_all_below_the_limit_and_no_others() -> None:
    chosen = architectures(below=PARAMETERS)
    assert len(chosen) > 60
    assert list(chosen.values()) == sorted(chosen.values())
    assert {"resnet18", "vit_b_32", "maxvit_t", "swin_v2_b", "inception_v3"} < set(chosen)
    assert not any(fnmatch(name, "*quantized*") for name in chosen)
    assert "vgg11" not in chosen
    assert "vit_l_16" not in chosen


@pytest.mark.parametrize(
    ("name", "side"),
    [
        pytest.param("shufflenet_v2_x0_5", 224, marks=[pytest.mark.proof, exhaustive]),
        pytest.param("squeezenet1_1", 128, marks=pytest.mark.proof),
    ],
)
def test_a_correct_export_passes_the_default_policy(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torchvision_models.SIDE, name, side)
    row = trial(name)
    assert row["verdict"] == "PASS", row["problems"]
    assert (row["strategy"], row["opset"]) == ("traced", 13)
    assert row["classes"] >= 4
    assert 0.0 < row["noise_ratio"]["ort-cpu"] < 2.0
    assert 0.0 < row["noise_ratio"]["ort-cpu-optimized"] < 2.0
    assert row["probes"] > 5
    assert row["parameters"] > 1_000_000


def test_what_no_opset_can_write_is_a_row_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Unexportable(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svd(super().forward(input)[:, None]).S

    monkeypatch.setattr(torchvision_models, "build", lambda name: Unexportable(nn.Flatten()))
    monkeypatch.setattr(torchvision_sweep, "OPSETS", OPSETS[:1])
    row = trial("squeezenet1_1")
    assert row["verdict"] == "ERROR"
    assert ExportError.__name__ in row["problems"][0]
    assert table([row]).row_count == 1


def test_a_run_goes_on_where_it_was_broken_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[str] = []

    def in_own_process(name: str, runtimes: Sequence[str]) -> torchvision_sweep.Row:
        measured.append(name)
        verdict = "FAIL" if name == "mnasnet0_75" else "PASS"
        return {"name": name, "verdict": verdict, "problems": []}

    monkeypatch.setattr(torchvision_sweep, "in_own_process", in_own_process)
    file = tmp_path / "rows.json"
    sweep("mnasnet0_*", file)
    assert measured == ["mnasnet0_5", "mnasnet0_75"]
    rows = sweep("mnasnet*", file)
    assert measured[2:] == ["mnasnet0_75", "mnasnet1_0", "mnasnet1_3"]
    assert [row["name"] for row in rows] == ["mnasnet0_5", *measured[2:]]
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == measured[:2] + measured[
        3:
    ]
