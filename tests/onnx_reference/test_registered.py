"""`gate check new.onnx --reference models:/NAME@ALIAS` uses a registered version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from mlflow import MlflowClient

from gate.mlflow_client.registry import MlflowRegistry
from gate.onnx_file.reading import read_subject
from gate.registry.interface import Draft, Tag
from gate.storage.digest import Digest
from tests.commands.running import create_runner
from tests.onnx_reference.test_check import SAMPLES, network
from tests.registry.servers import empty_database

_, check_json = create_runner("check")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowRegistry:
    """A registry with version 1 of `net` as champion; samples and a new file are in the folder."""
    monkeypatch.chdir(tmp_path)
    empty_database(tmp_path / "mlflow.db")
    np.save("x.npy", SAMPLES)
    onnx.save(network(), "old.onnx")
    onnx.save(network(opset=14), "new.onnx")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    created = MlflowRegistry(uri)
    created.ensure_model("net")
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "store").as_uri())
    run = client.create_run(experiment).info.run_id
    subject = read_subject(Path("old.onnx"))
    tags = {Tag.SHA256: subject.sha256.hex}
    number = created.create_version("net", Draft(Path("old.onnx"), subject, run, tags, ""))
    created.set_alias("net", "champion", number)
    return created


@pytest.mark.slow
@pytest.mark.proof
def test_a_registered_version_is_the_reference(
    registry: MlflowRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(reference: str) -> tuple[int, dict[str, object]]:
        return check_json(capsys, "new.onnx", "--reference", reference, "--inputs", "x.npy")

    code, result = check("models:/net@champion")
    assert code == 0
    source = result["evidence"]["source"]
    assert source["factory"] == "models:/net/1"
    assert source["onnx_sha256"] == str(Digest.from_file(Path("old.onnx")))

    for reference, kind in (("models:/net@none", "ModelError"), ("models:/net", "ModelError")):
        code, result = check(reference)
        assert (code, result["error"]["type"]) == (2, kind)
        assert reference in result["error"]["message"]

    registry.set_tag("net", "1", key=Tag.SHA256, value="0" * 64)
    code, result = check("models:/net/1")
    assert (code, result["error"]["type"]) == (2, "DigestMismatch")
