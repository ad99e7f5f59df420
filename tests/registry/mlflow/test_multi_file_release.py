"""A multi-file release in a real MLflow store: exported, checked, promoted, deployed, rolled back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.exceptions import MlflowException

from gate import cli
from gate.deploy.store import EXACT, ModelStore, Slot
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.storage.digest import Digest
from tests.multi_file import tiny
from tests.multi_file.exports import export_module
from tests.registry.servers import empty_database
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]
pytestmark = [
    pytest.mark.proof,
    pytest.mark.slow,
]
COUNT = 12
POLICY = (
    "task: auto\ninstruments: {probes: false, search_inputs: 0}\n"
    "runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 0.001, top1_agreement: 0.9}}}\n"
)
"""One runtime is enough for the path through export, check, promotion and deployment."""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reused_charts: None) -> Path:
    empty_database(tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


def export_release(folder: Path, opset: int) -> Path:
    """Return a release file of two parts, next to its samples."""
    folder.mkdir()
    model = tiny.build()
    assert isinstance(model, tiny.Detector)
    export_module(model.encoder, folder / "encoder.onnx", torch.zeros(2, 2, 5, 5), opset=opset)
    export_module(model.head, folder / "head.onnx", torch.zeros(2, 4), opset=opset)
    samples = np.random.default_rng(0).normal(size=(COUNT, 2, 5, 5)).astype(np.float32)
    np.savez(folder / "x.npz", input=samples)
    path = folder / "release.yaml"
    parts = "parts: {encoder: {file: encoder.onnx}, head: {file: head.onnx}}"
    path.write_text(f"chain: tests.multi_file.tiny:run\n{parts}\n")
    return path


def check_release(release: Path) -> int:
    inputs, report = str(release.with_name("x.npz")), str(release.with_name("report"))
    options = [
        "--reference",
        "tests.multi_file.tiny:build",
        "--inputs",
        inputs,
        "--report",
        report,
        "--overwrite",
    ]
    options += ["--batch-size", "4", "--policy", "policy.yaml"]
    return cli.main(["check", str(release), *options])


def promote_release(release: Path, name: str, capsys: Capture) -> tuple[int, dict[str, Any]]:
    report = str(release.with_name("report"))
    capsys.readouterr()
    code = cli.main(["promote", str(release), "--name", name, "--report", report, "--json"])
    return code, json.loads(capsys.readouterr().out)


def reconcile(name: str) -> Slot:
    """Run `gate reconcile` once and return what is deployed then."""
    assert cli.main(["reconcile", name, "--store", "store", "--policy", "policy.yaml"]) == 0
    live = ModelStore(Path("store")).live(name)
    assert live is not None
    return live.slots[EXACT]


def test_multi_file_release_is_promoted_deployed_and_rolled_back_as_one(
    project: Path, capsys: Capture
) -> None:
    name, observed = "parts", []
    for number, opset in enumerate((17, 16), start=1):
        release = export_release(project / f"release-{number}", opset)
        assert check_release(release) == 0, capsys.readouterr()
        code, reported = promote_release(release, name, capsys)
        assert (code, reported["outcome"], reported["version"]) == (0, "promoted", str(number)), (
            reported
        )
        slot = reconcile(name)
        assert str(slot.sha256) == reported["digest"]
        assert len(slot.parts) == 2
        for file in slot.parts.values():
            assert file.sha256 == Digest.from_file(release.parent / file.name)
        observed.append(slot)
        golden = ModelStore(Path("store")).content(slot.golden_sha256)  # type: ignore[arg-type]
        served = (ModelStore(Path("store")).live_link(name) / "exact").resolve() / "release.yaml"
        assert cli.main(["verify-release", str(served), "--golden", str(golden)]) == 0
    lines = [e.action for e in Ledger(Path(".gate/state.db")).entries() if e.model == name]
    assert lines.count("promoted") == 2
    assert cli.main(["rollback", name, "--yes", "--reason", "a test"]) == 0
    assert reconcile(name) == observed[0]
    registry = MlflowRegistry(f"sqlite:///{project}/mlflow.db")
    assert registry.alias(name, CHAMPION) == "1"
    assert_mlflow_refuses_to_load(f"models:/{name}/1")
    (project / "back").mkdir()
    back = registry.download(name, "2", project / "back")
    assert back.name == "release.yaml"
    assert (
        Digest.from_manifest(
            back.parent, ("release.yaml", *(file.name for file in observed[1].external_data))
        )
        == observed[1].sha256
    )


def assert_mlflow_refuses_to_load(uri: str) -> None:
    """Assert that MLflow, which cannot run the chain, raises an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns about its own code
        with pytest.raises(MlflowException, match="flavor"):
            mlflow.pyfunc.load_model(uri)
