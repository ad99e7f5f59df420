from __future__ import annotations

from fnmatch import fnmatch

import pytest

from benchmarks import torchvision_models
from benchmarks.torchvision_models import architectures
from benchmarks.torchvision_sweep import PARAMETERS, trial
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
