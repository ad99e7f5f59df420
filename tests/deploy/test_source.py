"""Too many bytes are stopped while they come, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.deploy.deploy import SlotSource, copy_at_most, deploy, fetched
from gate.deploy.store import ModelStore
from gate.errors import DigestMismatch, OnnxFileError, StorageError, TooLarge
from gate.storage.digest import Digest
from tests.deploy.models import NAME
from tests.golden_vectors import vectors

DIGEST = Digest.of_bytes(b"")


def test_a_copy_stops_at_the_limit(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(3 << 20))
    with pytest.raises(TooLarge):
        copy_at_most(1 << 20, source=big, target=tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size <= 1 << 20
    assert copy_at_most(3 << 20, source=big, target=tmp_path / "copy") == 3 << 20
    with pytest.raises(StorageError):
        copy_at_most(1, source=tmp_path / "nothing", target=tmp_path / "copy")


def test_the_files_of_a_source_count_together(tmp_path: Path) -> None:
    path, golden = vectors.made(tmp_path)
    total = path.stat().st_size + sum(file.stat().st_size for file in golden.iterdir())
    store = ModelStore(tmp_path / "srv")
    small = SlotSource.local(path, golden=golden, max_bytes=total - 1)
    refused = deploy(store, NAME, {"exact": small})
    assert refused.outcome == "refused"
    assert "bytes that are allowed" in refused.reason
    enough = SlotSource.local(path, golden=golden, max_bytes=total)
    assert deploy(store, NAME, {"exact": enough}).outcome == "deployed"


def test_what_is_fetched_is_limited_too(tmp_path: Path) -> None:
    def burst(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(bytes(1001))
        return folder / "model.onnx"

    source = SlotSource(DIGEST, burst, max_bytes=1000)
    with pytest.raises(TooLarge):
        fetched(source, tmp_path / "in")
    assert deploy(ModelStore(tmp_path / "srv"), NAME, {"exact": source}).outcome == "refused"


def test_a_local_file_must_be_what_was_named(tmp_path: Path) -> None:
    path, golden = vectors.made(tmp_path)
    store = ModelStore(tmp_path / "srv")
    refused = deploy(store, NAME, {"exact": SlotSource.local(path, golden=golden, sha256=DIGEST)})
    assert refused.outcome == "refused"
    assert "expected" in refused.reason
    with pytest.raises(OnnxFileError):
        SlotSource.local(tmp_path / "nothing.onnx")
    next(golden.glob("*.bin")).write_bytes(b"")
    with pytest.raises(DigestMismatch):
        SlotSource.local(path, golden=golden)
