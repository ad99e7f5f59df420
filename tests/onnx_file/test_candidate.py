"""Only files with the recorded digest are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import TestedFile
from gate.errors import DigestMismatch, StorageError
from gate.onnx_file.reading import WithData, read_subject
from tests.export.graphs import create_adder, write_external_adder, write_model


def create_tested_file(path: Path) -> TestedFile:
    return TestedFile(path, read_subject(path))


def test_single_file_is_loaded_as_bytes(tmp_path: Path) -> None:
    path = write_model(create_adder(), tmp_path / "model.onnx")
    assert create_tested_file(path).verified() == path.read_bytes()
    assert create_tested_file(path).loadable() == path.read_bytes()


def test_linked_external_data_is_loaded(tmp_path: Path) -> None:
    """Model hubs use links in their caches."""
    path = write_external_adder(tmp_path / "model.onnx")
    data = tmp_path / "w.bin"
    data.rename(tmp_path / "blob")
    data.symlink_to(tmp_path / "blob")
    loaded = create_tested_file(path).loadable()
    assert loaded == WithData(path.read_bytes(), {"w.bin": data.read_bytes()})


@pytest.mark.parametrize("changed", ["model.onnx", "w.bin"])
@pytest.mark.parametrize("linked", [False, True])
def test_replaced_file_is_refused(tmp_path: Path, changed: str, linked: bool) -> None:
    path = write_external_adder(tmp_path / "model.onnx")
    if linked:
        (tmp_path / "w.bin").rename(tmp_path / "blob")
        (tmp_path / "w.bin").symlink_to(tmp_path / "blob")
    used = create_tested_file(path)
    second = tmp_path / changed
    second.write_bytes(second.read_bytes()[:-1] + b"\7")
    for look in (used.verified, used.loadable, used.verify):
        with pytest.raises(DigestMismatch, match="model.onnx"):
            look()


def test_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    used = create_tested_file(write_model(create_adder(), tmp_path / "model.onnx"))
    used.path.unlink()
    with pytest.raises(StorageError, match="cannot read .*model.onnx to measure it"):
        used.verified()
