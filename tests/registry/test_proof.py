"""Whatever an editor of the registry writes into a version is a mismatch of that version alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest

from gate.errors import DigestMismatch
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.records.layout import PREPROCESSING, SPEC
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import GoldenFolder
from gate.registry.version_files import ExpectedDigests
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, onnx_file_with_data, release
from tests.registry.servers import make_run
from tests.registry.test_preprocessing_beside import made
from tests.storage.test_foreign import DEEP, YAML_BOMB

POLICY = builders.policy()
Spoil = Callable[[Path], object]
SPEC_JSON, GOLDEN_JSON = f"{PREPROCESSING}/{SPEC}", "golden/golden.json"
BESIDE = {"1": SPEC_JSON, "2": GOLDEN_JSON, "3": "weights.data"}
"""What only this version has."""


@dataclass
class Stored:
    """Versions in a real store: 1 has a spec, 2 golden vectors, 3 external data."""

    model: RegisteredModel
    artifacts: Path

    def folder(self, number: str) -> Path:
        """Where the artifacts of a version lie, which its editor may change."""
        (found,) = self.artifacts.rglob(BESIDE[number])
        return found.parents[len(Path(BESIDE[number]).parts) - 1]

    def look(self, number: str) -> None:
        line = self.model.history().approving_entry(number)
        assert line is not None
        self.model.prove(number, ExpectedDigests.from_entry(line))


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("promoted")
    uri = f"sqlite:///{folder}/mlflow.db"
    registry, ledger = MlflowRegistry(uri), Ledger(folder / "ledger.db")
    path = onnx_file(folder / "golden.onnx", seed=2)
    origin = vectors.origin().model_copy(update={"policy_sha256": POLICY.digest()})
    vectors.golden_of(folder / "golden", path, origin=origin)
    instruments = POLICY.instruments.model_copy(update={"graph_forbid": ()})
    loose = POLICY.model_copy(update={"instruments": instruments})
    releases = (
        (made(folder), POLICY),
        (release(path, golden=GoldenFolder.open(folder / "golden")), POLICY),
        (release(onnx_file_with_data(folder / "large" / "model.onnx"), policy=loose), loose),
    )
    for of, policy in releases:
        run_id = make_run(uri, artifacts=folder / "artifacts")
        done = promote(registry, replace(of, run_id=run_id), policy=policy, ledger=ledger)
        assert done.outcome == "promoted", done.reason
    return uri, folder


@pytest.fixture
def stored(promoted: tuple[str, Path], tmp_path: Path) -> Iterator[Stored]:
    uri, folder = promoted
    ledger = Ledger(tmp_path / "ledger.db")
    shutil.copy(folder / "ledger.db", ledger.location)
    shutil.copytree(folder / "artifacts", tmp_path / "whole")
    yield Stored(RegisteredModel(MlflowRegistry(uri), ledger, NAME), folder / "artifacts")
    shutil.rmtree(folder / "artifacts")
    shutil.move(tmp_path / "whole", folder / "artifacts")


def written(name: str, data: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data)


def made_a_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name / "in").mkdir(parents=True)
        (folder / name / "in" / "file").touch()

    return spoil


def filled(name: str, size: int) -> Spoil:
    return written(name, b" " * size + b"{}")


SPOILED: dict[str, tuple[str, Spoil]] = {
    "bomb for a spec": ("1", written(SPEC_JSON, YAML_BOMB)),
    "nested spec": ("1", written(SPEC_JSON, DEEP)),
    "nested objects": ("1", written(SPEC_JSON, b'{"a":' * 20_000)),
    "huge spec": ("1", filled(SPEC_JSON, 1 << 17)),
    "folder for a spec": ("1", made_a_folder(SPEC_JSON)),
    "no spec": ("1", lambda folder: (folder / SPEC_JSON).unlink()),
    "bomb for an MLmodel": ("1", written("MLmodel", YAML_BOMB)),
    "nested MLmodel": ("1", written("MLmodel", DEEP)),
    "huge MLmodel": ("1", written("MLmodel", b"# \n" * (1 << 20))),
    "bytes for an MLmodel": ("1", written("MLmodel", b"\xff\0")),
    "nested golden.json": ("2", written(GOLDEN_JSON, DEEP)),
    "bomb for a golden.json": ("2", written(GOLDEN_JSON, YAML_BOMB)),
    "huge golden.json": ("2", filled(GOLDEN_JSON, 1 << 21)),
    "folder for a golden.json": ("2", made_a_folder(GOLDEN_JSON)),
    "other golden vectors": ("2", lambda folder: vectors.golden_of(folder / "golden", onnx_file(folder / "x.onnx"))),
    "other data": ("3", written("weights.data", b"\xff" * 120)),
    "no data": ("3", lambda folder: (folder / "weights.data").unlink()),
    "no evidence to name the data": ("3", lambda folder: (folder / "gate/evidence.json").unlink()),
    "nested evidence": ("3", written("gate/evidence.json", DEEP)),
}  # fmt: skip


@pytest.mark.rows(5)
@pytest.mark.parametrize(("number", "spoil"), SPOILED.values(), ids=list(SPOILED))
def test_what_an_editor_writes_is_a_mismatch_and_stops_no_look(
    stored: Stored, number: str, spoil: Spoil
) -> None:
    spoil(stored.folder(number))
    with pytest.raises(DigestMismatch):
        stored.look(number)
    assert [line.version for line in stored.model.ledger.entries()][3:] == []
    for other in {"1", "2", "3"} - {number}:
        stored.look(other)


def test_other_bytes_are_never_parsed(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_arguments: object, **_options: object) -> None:
        pytest.fail("bytes were parsed that nobody had proven")

    monkeypatch.setattr("gate.onnx_file.reading.onnx.ModelProto", parse)
    monkeypatch.setattr(onnx, "load", parse)
    for number in ("1", "2", "3"):
        (path,) = stored.folder(number).glob("*.onnx")
        data = path.read_bytes()
        path.write_bytes(data + b"\0")
        with pytest.raises(DigestMismatch, match="has digest"):
            stored.look(number)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "error", [MemoryError, RecursionError, UnicodeDecodeError("x", b"", 0, 1, "")]
)
def test_whatever_reading_raises_is_a_mismatch(stored: Stored, monkeypatch, error) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("gate.registry.version_files.prove_spec", fail)
    with pytest.raises(DigestMismatch, match="can't be read"):
        stored.look("1")
    stored.look("2")
