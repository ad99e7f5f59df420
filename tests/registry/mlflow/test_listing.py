"""How much a version is is known before any of it is downloaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import mlflow.artifacts
import pytest

from gate.errors import DigestMismatch
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_files import ExpectedDigests
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file_with_data, release
from tests.registry.servers import make_run

GIB = 1 << 30


@pytest.fixture
def promoted(tmp_path: Path, ledger: Ledger) -> tuple[RegisteredModel, Path]:
    """Version 1, whose weights lie beside its file; and the folder of its files in the store."""
    policy = builders.policy()
    instruments = policy.instruments.model_copy(update={"graph_forbid": ()})
    policy = policy.model_copy(update={"instruments": instruments})
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    of = release(onnx_file_with_data(tmp_path / "model.onnx"), policy=policy)
    of = replace(of, run_id=make_run(uri, artifacts=tmp_path / "artifacts"))
    registry = MlflowRegistry(uri)
    assert promote(registry, of, policy=policy, ledger=ledger).outcome == "promoted"
    (data,) = (tmp_path / "artifacts").rglob("weights.data")
    return RegisteredModel(registry, ledger, NAME), data.parent


def vouched(model: RegisteredModel) -> LedgerEntry:
    line = model.history().approving_entry("1")
    assert line is not None
    return line


def test_the_ledger_says_how_much_it_was(promoted: tuple[RegisteredModel, Path]) -> None:
    model, folder = promoted
    extent = vouched(model).extent
    assert extent is not None
    sizes = [(folder / name).stat().st_size for name in ("model.onnx", "weights.data")]
    assert (extent.size_bytes, extent.files) == (sum(sizes), 2)
    model.prove("1", ExpectedDigests.from_entry(vouched(model)))


def endless(folder: Path) -> None:
    os.truncate(folder / "weights.data", 40 * GIB)


def many(folder: Path) -> None:
    for number in range(300):
        (folder / str(number)).touch()


def deep(folder: Path) -> None:
    (folder / "/".join(["d"] * 300)).mkdir(parents=True)


def endless_beside(folder: Path) -> None:
    (folder / "more").touch()
    os.truncate(folder / "more", 1 << 40)


@pytest.mark.rows(3)
@pytest.mark.parametrize("spoil", [endless, many, deep, endless_beside])
def test_what_is_far_more_is_not_downloaded(
    promoted: tuple[RegisteredModel, Path], monkeypatch: pytest.MonkeyPatch, spoil
) -> None:
    model, folder = promoted
    spoil(folder)
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", lambda **_: pytest.fail("too much"))
    with pytest.raises(DigestMismatch, match="or more, expected|64 deep"):
        model.prove("1", ExpectedDigests.from_entry(vouched(model)))


def test_a_line_of_an_older_gate_allows_what_was_allowed_then(
    promoted: tuple[RegisteredModel, Path],
) -> None:
    model, folder = promoted
    older = vouched(model).model_copy(update={"extent": None})
    many(folder)
    model.prove("1", ExpectedDigests.from_entry(older))
    endless(folder)
    with pytest.raises(DigestMismatch, match=r"42949672960|bytes or more"):
        model.prove("1", ExpectedDigests.from_entry(older))
