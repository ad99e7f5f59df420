"""Files that an editor of the registry changes are a mismatch of that version alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest

from gate import Digest
from gate.errors import DigestMismatch
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.records.layout import PREPROCESSING, SPEC
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_files import ExpectedDigests, make_download_folder
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import (
    NAME,
    onnx_file,
    onnx_file_with_data,
    policy_with_external_data,
    release,
)
from tests.registry.servers import make_run
from tests.registry.test_preprocessing_spec import make_release
from tests.storage.test_untrusted import DEEP, YAML_BOMB

POLICY = builders.policy()
Tamper = Callable[[Path], object]
SPEC_JSON, GOLDEN_JSON = f"{PREPROCESSING}/{SPEC}", "golden/golden.json"
EXTRA_FILES = {"1": SPEC_JSON, "2": GOLDEN_JSON, "3": "weights.data"}
"""The file that only this version has."""


@dataclass
class StoredVersions:
    """Versions in a real store: 1 has a preprocessing spec, 2 golden vectors, 3 external data."""

    model: RegisteredModel
    artifacts: Path

    def folder(self, number: str) -> Path:
        """Return the artifact folder of a version, which an editor of the registry can change."""
        (result,) = self.artifacts.rglob(EXTRA_FILES[number])
        return result.parents[len(Path(EXTRA_FILES[number]).parts) - 1]

    def verify(self, number: str) -> None:
        line = self.model.history().approving_entry(number)
        assert line is not None
        self.model.verify_version(number, ExpectedDigests.from_entry(line))


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("promoted")
    uri = f"sqlite:///{folder}/mlflow.db"
    registry, ledger = MlflowRegistry(uri), Ledger(folder / "ledger.db")
    path = onnx_file(folder / "golden.onnx", seed=2)
    golden, with_data = (
        vectors.write_golden_of(path, folder / "golden", POLICY),
        policy_with_external_data(),
    )
    releases = (
        (make_release(folder), POLICY),
        (release(path, golden=golden), POLICY),
        (release(onnx_file_with_data(folder / "large/model.onnx"), policy=with_data), with_data),
    )
    for new_release, policy in releases:
        run_id = make_run(uri, artifacts=folder / "artifacts")
        result = promote(
            registry, replace(new_release, run_id=run_id), policy=policy, ledger=ledger
        )
        assert result.outcome == "promoted", result.reason
    return uri, folder


@pytest.fixture
def versions(promoted: tuple[str, Path], tmp_path: Path) -> Iterator[StoredVersions]:
    uri, folder = promoted
    ledger = Ledger(tmp_path / "ledger.db")
    shutil.copy(folder / "ledger.db", ledger.location)
    shutil.copytree(folder / "artifacts", tmp_path / "whole")
    yield StoredVersions(RegisteredModel(MlflowRegistry(uri), ledger, NAME), folder / "artifacts")
    shutil.rmtree(folder / "artifacts")
    shutil.move(tmp_path / "whole", folder / "artifacts")


def overwrite(name: str, data: bytes) -> Tamper:
    return lambda folder: (folder / name).write_bytes(data)


def replace_by_folder(name: str) -> Tamper:
    def tamper(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name / "in").mkdir(parents=True)
        (folder / name / "in" / "file").touch()

    return tamper


def overwrite_with_padding(name: str, size: int) -> Tamper:
    return overwrite(name, b" " * size + b"{}")


TAMPERED: dict[str, tuple[str, Tamper]] = {
    "bomb for a spec": ("1", overwrite(SPEC_JSON, YAML_BOMB)),
    "nested spec": ("1", overwrite(SPEC_JSON, DEEP)),
    "nested objects": ("1", overwrite(SPEC_JSON, b'{"a":' * 20_000)),
    "huge spec": ("1", overwrite_with_padding(SPEC_JSON, 1 << 17)),
    "folder for a spec": ("1", replace_by_folder(SPEC_JSON)),
    "no spec": ("1", lambda folder: (folder / SPEC_JSON).unlink()),
    "bomb for an MLmodel": ("1", overwrite("MLmodel", YAML_BOMB)),
    "nested MLmodel": ("1", overwrite("MLmodel", DEEP)),
    "huge MLmodel": ("1", overwrite("MLmodel", b"# \n" * (1 << 20))),
    "bytes for an MLmodel": ("1", overwrite("MLmodel", b"\xff\0")),
    "nested golden.json": ("2", overwrite(GOLDEN_JSON, DEEP)),
    "bomb for a golden.json": ("2", overwrite(GOLDEN_JSON, YAML_BOMB)),
    "huge golden.json": ("2", overwrite_with_padding(GOLDEN_JSON, 1 << 21)),
    "folder for a golden.json": ("2", replace_by_folder(GOLDEN_JSON)),
    "other golden vectors": ("2", lambda folder: vectors.write_model_vectors(folder / "golden", onnx_file(folder / "x.onnx"))),
    "other data": ("3", overwrite("weights.data", b"\xff" * 120)),
    "no data": ("3", lambda folder: (folder / "weights.data").unlink()),
    "no evidence to name the data": ("3", lambda folder: (folder / "gate/evidence.json").unlink()),
    "nested evidence": ("3", overwrite("gate/evidence.json", DEEP)),
}  # fmt: skip


@pytest.mark.rows(5)
@pytest.mark.parametrize(("number", "tamper"), TAMPERED.values(), ids=list(TAMPERED))
def test_tampered_file_is_a_mismatch_of_its_version_alone(
    versions: StoredVersions, number: str, tamper: Tamper
) -> None:
    tamper(versions.folder(number))
    with pytest.raises(DigestMismatch):
        versions.verify(number)
    assert [line.version for line in versions.model.ledger.entries()][3:] == []
    for other in {"1", "2", "3"} - {number}:
        versions.verify(other)


def test_unverified_bytes_are_never_parsed(
    versions: StoredVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_arguments: object, **_options: object) -> None:
        pytest.fail("bytes were parsed that nobody had proven")

    monkeypatch.setattr("gate.onnx_file.reading.onnx.ModelProto", parse)
    monkeypatch.setattr(onnx, "load", parse)
    for number in ("1", "2", "3"):
        (path,) = versions.folder(number).glob("*.onnx")
        data = path.read_bytes()
        path.write_bytes(data + b"\0")
        with pytest.raises(DigestMismatch, match="has digest"):
            versions.verify(number)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "error", [MemoryError, RecursionError, UnicodeDecodeError("x", b"", 0, 1, "")]
)
def test_any_error_while_reading_is_a_mismatch(
    versions: StoredVersions, monkeypatch, error
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("gate.registry.version_files.verify_spec", fail)
    with pytest.raises(DigestMismatch, match="can't be read"):
        versions.verify("1")
    versions.verify("2")


def test_manifest_text_with_the_digest_of_a_model_is_not_accepted_as_model(tmp_path):
    """An attacker with write access could upload such a text in place of the model."""
    from gate.storage.digest import canonical_json

    path = onnx_file_with_data(tmp_path / "model.onnx")
    digests = {
        name: Digest.from_file(path.parent / name).hex for name in (path.name, "weights.data")
    }
    text = tmp_path / "text"
    for form in (digests, {name: f"sha256:{observed}" for name, observed in digests.items()}):
        text.write_bytes(canonical_json(form))
        with pytest.raises(DigestMismatch, match="not an ONNX model"):
            digest_of_model(text, external_data=())


def test_download_folders_are_new_and_private_after_one_is_removed(tmp_path: Path) -> None:
    first, second = make_download_folder(tmp_path), make_download_folder(tmp_path)
    first.rmdir()
    third = make_download_folder(tmp_path)
    assert third != second
    assert {folder.stat().st_mode & 0o777 for folder in (second, third)} == {0o700}
