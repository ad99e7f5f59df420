"""A release of several files and its quantized twin on a real MLflow server: quantized, judged,
promoted, deployed and rolled back as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gate import cli
from gate.deploy.store import EXACT, QUANTIZED, ModelStore
from gate.records.evidence import Evidence
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.multi_file import tiny
from tests.multi_file.exports import export
from tests.registry.servers import Server
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]
pytestmark = [
    pytest.mark.proof,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
TWIN = """precision: quantized
task: tensors
instruments: {noise_samples: 0, stability_samples: 0, probes: false, search_inputs: 0}
runtimes: {ort-cpu-optimized: {required: always, bounds: {scaled_diff: 0.3}}}
"""
EXACT_POLICY = (
    """task: tensors
instruments: {probes: false, search_inputs: 0}
runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 0.001}}}
twin:
  """
    + TWIN.strip().replace("\n", "\n  ")
    + "\n"
)
FACTORY = "tests.multi_file.tiny:build"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, reused_charts: None
) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(EXACT_POLICY)
    (tmp_path / "twin.yaml").write_text(TWIN)
    rows = np.random.default_rng(0).normal(size=(24, 2, 5, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    return tmp_path


def made(folder: Path, *, opset: int = 17) -> Path:
    """The exact release with its report, its twin in `twin/` with its own."""
    folder.mkdir()
    model = tiny.build()
    assert isinstance(model, tiny.Detector)
    export(model.encoder, folder / "encoder.onnx", torch.zeros(2, 2, 5, 5), opset=opset)
    export(model.head, folder / "head.onnx", torch.zeros(2, 4), opset=opset)
    path = tiny.release(folder, encoder="encoder.onnx", head="head.onnx")
    assert judged(path, "policy.yaml") == 0
    asked = ["--reference", FACTORY, "--calibration", "x.npy"]
    assert (
        cli.main(["quantize", str(path), *asked, "--output", str(folder / "twin" / path.name)]) == 0
    )
    return path


def judged(release: Path, policy: str) -> int:
    asked = ["--reference", FACTORY, "--inputs", "x.npy", "--batch-size", "8"]
    report = str(release.with_name("report"))
    return cli.main(["check", str(release), *asked, "--policy", policy, "--report", report])


def promoted(release: Path, name: str, capsys: Capture, twin: Path | None = None) -> Any:
    twin = twin or release.parent / "twin" / release.name
    capsys.readouterr()
    code = cli.main([
        "promote", str(release), "--name", name, "--report", str(release.with_name("report")),
        "--policy", "policy.yaml", "--twin", str(twin),
        "--twin-report", str(twin.with_name("report")), "--json",
    ])  # fmt: skip
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def look(name: str) -> dict[str, Digest]:
    """What the service does after an event; what serves then."""
    assert cli.main(["reconcile", name, "--store", "store", "--policy", "policy.yaml"]) == 0
    live = ModelStore(Path("store")).live(name)
    assert live is not None
    assert all(set(slot.parts) == {"encoder", "head"} for slot in live.slots.values())
    return {label: slot.sha256 for label, slot in live.slots.items()}


@exhaustive
def test_both_go_the_whole_way_and_back_as_one(place: Path, capsys: Capture) -> None:
    seen = []
    for number, opset in enumerate((17, 16), start=1):
        release = made(place / f"release-{number}", opset=opset)
        twin = release.parent / "twin" / release.name
        assert judged(twin, "twin.yaml") == 0, capsys.readouterr()
        code, told, _ = promoted(release, "twins", capsys)
        assert (code, told["outcome"], told["version"]) == (0, "promoted", str(number)), told
        seen.append(look("twins"))
        its = Evidence.load(twin.with_name("report") / "evidence.json").subject.sha256
        assert seen[-1] == {EXACT: Digest.parse(told["digest"].split(":")[1]), QUANTIZED: its}
    assert cli.main(["rollback", "twins", "--yes", "--reason", "a test"]) == 0
    assert look("twins") == seen[0]
    files = ["--file", str(release), "--golden", str(release.with_name("report") / "golden")]
    files += ["--twin", str(twin), "--twin-golden", str(twin.with_name("report") / "golden")]
    assert cli.main(["deploy", "by-hand", "--store", "store", *files]) == 0
    live = ModelStore(Path("store")).live("by-hand")
    assert live is not None
    assert {label: slot.sha256 for label, slot in live.slots.items()} == seen[1]
    single = ["--file", str(release), "--twin", str(twin.with_name("head.onnx"))]
    assert cli.main(["deploy", "by-hand", "--store", "store", *single]) == 1
