from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks import torchvision_models
from benchmarks.torchvision_models import architectures
from benchmarks.torchvision_sweep import ENTRIES, PARAMETERS, main
from tests.exhaustive import exhaustive


def test_all_below_the_limit_and_no_others() -> None:
    chosen = architectures(below=PARAMETERS)
    assert len(chosen) == len(ENTRIES) > 60
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
    name: str, side: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(torchvision_models.SIDE, name, side)
    file = tmp_path / "sweep.json"
    pattern = f"correct/{name.replace('_', '-')}/*"
    assert main(["--only", pattern, "--jobs", "1", "--json", str(file)]) == 0
    (outcome,) = json.loads(file.read_text())["outcomes"]
    assert outcome["recipe"] == "traced-13"
    assert outcome["top1"] == "passes"
    assert 0.0 < outcome["ruling"]["numbers"]["noise_ratio"] < 2.0
