"""The size and the MLmodel of a version are checked before its files are used."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest

from gate.errors import DigestMismatch
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry, _onnx_file
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_files import ExpectedDigests
from tests.registry import parts
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file_with_data, policy_with_external_data, release
from tests.registry.servers import make_run

GIB = 1 << 30


@pytest.fixture
def promoted(tmp_path: Path, ledger: Ledger) -> tuple[RegisteredModel, Path]:
    """The promoted version 1, which has external data, and the folder with its stored files."""
    policy = policy_with_external_data()
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    created = release(onnx_file_with_data(tmp_path / "model.onnx"), policy=policy)
    created = replace(created, run_id=make_run(uri, artifacts=tmp_path / "artifacts"))
    registry = MlflowRegistry(uri)
    assert promote(registry, created, policy=policy, ledger=ledger).outcome == "promoted"
    (data,) = (tmp_path / "artifacts").rglob("weights.data")
    return RegisteredModel(registry, ledger, NAME), data.parent


def approving_entry(model: RegisteredModel) -> LedgerEntry:
    line = model.history().approving_entry("1")
    assert line is not None
    return line


def test_ledger_entry_records_size_and_file_count(promoted: tuple[RegisteredModel, Path]) -> None:
    model, folder = promoted
    extent = approving_entry(model).extent
    assert extent is not None
    sizes = [(folder / name).stat().st_size for name in ("model.onnx", "weights.data")]
    assert (extent.size_bytes, extent.files) == (sum(sizes), 2)
    model.verify_version("1", ExpectedDigests.from_entry(approving_entry(model)))


def enlarge_data_file(folder: Path) -> None:
    os.truncate(folder / "weights.data", 40 * GIB)


def add_many_files(folder: Path) -> None:
    for number in range(300):
        (folder / str(number)).touch()


def add_deep_folder(folder: Path) -> None:
    (folder / "/".join(["d"] * 300)).mkdir(parents=True)


def add_huge_file(folder: Path) -> None:
    (folder / "more").touch()
    os.truncate(folder / "more", 1 << 40)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    "tamper", [enlarge_data_file, add_many_files, add_deep_folder, add_huge_file]
)
def test_oversized_version_is_not_downloaded(
    promoted: tuple[RegisteredModel, Path], monkeypatch: pytest.MonkeyPatch, tamper
) -> None:
    model, folder = promoted
    tamper(folder)
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", lambda **_: pytest.fail("too much"))
    with pytest.raises(DigestMismatch, match="or more, expected|64 deep"):
        model.verify_version("1", ExpectedDigests.from_entry(approving_entry(model)))


def test_entry_without_a_size_uses_the_default_limits(
    promoted: tuple[RegisteredModel, Path],
) -> None:
    model, folder = promoted
    older = approving_entry(model).model_copy(update={"extent": None})
    add_many_files(folder)
    model.verify_version("1", ExpectedDigests.from_entry(older))
    enlarge_data_file(folder)
    with pytest.raises(DigestMismatch, match=r"42949672960|bytes or more"):
        model.verify_version("1", ExpectedDigests.from_entry(older))


PARTS = {"data": "release.yaml"}
PYFUNC = {"data": "encoder.onnx", "loader_module": "mlflow.onnx"}
ONNX = {"data": "encoder.onnx"}


def write_mlmodel(folder: Path, flavors: dict[str, Any]) -> None:
    (folder / "MLmodel").write_text(json.dumps({"flavors": flavors}))


def test_multi_file_version_resolves_to_its_release_file(tmp_path: Path) -> None:
    path = parts.write_release(tmp_path)
    write_mlmodel(tmp_path, {"onnx_parts": PARTS})
    assert _onnx_file(tmp_path) == path


@pytest.mark.parametrize(
    "flavors",
    [
        {"onnx_parts": PARTS, "python_function": PYFUNC},
        {"onnx_parts": PARTS, "onnx": ONNX, "python_function": PYFUNC},
        {"onnx_parts": {"data": "encoder.onnx"}},
        {"onnx_parts": {"data": "../release.yaml"}},
        {"onnx_parts": {"data": "other.yaml"}},
        {"onnx_parts": PARTS | {"code": "code"}},
        {"onnx_parts": PARTS | {"parts": {"encoder": "head.onnx", "head": "encoder.onnx"}}},
        {"onnx_parts": {}},
        {"onnx_parts": None},
    ],
)
def test_unexpected_flavors_make_the_version_invalid(
    tmp_path: Path, flavors: dict[str, Any]
) -> None:
    folder = tmp_path / "version"
    parts.write_release(folder)
    parts.write_release(tmp_path)
    write_mlmodel(folder, flavors)
    assert _onnx_file(folder) is None
