"""A two-stage detector without proposals at many times the samples, by `gate check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gate import cli
from tests.probes import two_stage

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def check(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str, **built: float
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code, and the checks that do not pass on the CPU."""
    two_stage.export(folder / "m.onnx", **built)
    np.savez(folder / "x.npz", image=two_stage.images())
    line = ["--reference", "tests.probes.two_stage:build", "--inputs", folder / "x.npz"]
    capsys.readouterr()
    code = cli.main(["check", *map(str, [folder / "m.onnx", *line]), *options, "--json"])
    checks = json.loads(capsys.readouterr().out)["decision"]["checks"]
    return code, [
        check
        for check in checks
        if check["verdict"] != "PASS" and "cuda" not in (check["runtime"] or "")
    ]


def test_no_proposals_far_beyond_the_samples_are_no_difference(tmp_path, capsys):
    code, rest = check(tmp_path, capsys)
    assert code == 0
    assert {check["code"] for check in rest} == {"beyond_range"}


def test_a_policy_can_refuse_that(tmp_path, capsys):
    code, rest = check(tmp_path, capsys, "--set", "instruments.probe_beyond_range=fail")
    assert code == 1
    assert {check["verdict"] for check in rest} == {"FAIL"}


@pytest.mark.parametrize(
    "built", [{"threshold": 0.31}, {"limit": 0.6}], ids=["threshold", "no proposals nearby"]
)
def test_other_proposals_are_refused(tmp_path, capsys, built):
    code, rest = check(tmp_path, capsys, **built)
    assert code == 1
    assert {check["verdict"] for check in rest} - {"WAIVED"} == {"FAIL"}
