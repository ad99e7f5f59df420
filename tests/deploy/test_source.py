"""Too many bytes are stopped while they come, whoever writes them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gate.deploy.deploy import deploy
from gate.deploy.source import Source, TooLarge, copy_at_most, fetched
from gate.deploy.store import Store
from gate.digest import Digest
from gate.errors import DigestMismatch, OnnxFileError, RegistryUnavailable, StorageError
from tests.deploy.models import NAME
from tests.golden_vectors import vectors

DIGEST = Digest.of_bytes(b"")


def test_a_copy_stops_at_the_limit(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(3 << 20))
    with pytest.raises(TooLarge):
        copy_at_most(1 << 20, big, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size <= 1 << 20
    assert copy_at_most(3 << 20, big, tmp_path / "copy") == 3 << 20
    with pytest.raises(StorageError):
        copy_at_most(1, tmp_path / "nothing", tmp_path / "copy")


def test_the_files_of_a_source_count_together(tmp_path: Path) -> None:
    path, golden = vectors.made(tmp_path)
    total = path.stat().st_size + sum(file.stat().st_size for file in golden.iterdir())
    store = Store(tmp_path / "srv")
    small = Source.local(path, golden=golden, max_bytes=total - 1)
    refused = deploy(store, NAME, {"exact": small})
    assert refused.outcome == "refused"
    assert "bytes that are allowed" in refused.reason
    enough = Source.local(path, golden=golden, max_bytes=total)
    assert deploy(store, NAME, {"exact": enough}).outcome == "deployed"


def test_a_writer_that_goes_on_does_not_fill_the_disk(tmp_path: Path) -> None:
    """A foreign download can't be stopped in the middle; what it writes is thrown away."""
    most = [0]

    def flood(folder: Path) -> Path:
        with (folder / "model.onnx").open("wb") as stream:
            for _ in range(200):
                stream.write(bytes(1 << 16))
                stream.flush()
                time.sleep(0.002)
                used = os.fstat(stream.fileno()).st_blocks * 512
                most[0] = max(most[0], used)
        return folder / "model.onnx"

    with pytest.raises(TooLarge):
        fetched(Source(DIGEST, flood, max_bytes=1 << 20), tmp_path / "in")
    assert 0 < most[0] < 8 << 20  # of 12.5 MiB
    refused = deploy(
        Store(tmp_path / "srv"), NAME, {"exact": Source(DIGEST, flood, max_bytes=1 << 20)}
    )
    assert refused.outcome == "refused"


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_burst_is_seen_at_the_end(tmp_path: Path, how: str) -> None:
    def burst(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(bytes(1001))
        if how == "raise":
            raise RegistryUnavailable("went away")
        return folder / "model.onnx"

    with pytest.raises(TooLarge):
        fetched(Source(DIGEST, burst, max_bytes=1000), tmp_path / "in")


def test_a_link_in_the_folder_costs_nobody_his_file(tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_bytes(bytes(5000))

    def fetch(folder: Path) -> Path:
        (folder / "link").symlink_to(other)
        (folder / "model.onnx").write_bytes(bytes(2000))
        time.sleep(0.1)
        return folder / "model.onnx"

    with pytest.raises(TooLarge):
        fetched(Source(DIGEST, fetch, max_bytes=1000), tmp_path / "in")
    assert other.read_bytes() == bytes(5000)


def test_a_local_file_must_be_what_was_named(tmp_path: Path) -> None:
    path, golden = vectors.made(tmp_path)
    store = Store(tmp_path / "srv")
    refused = deploy(store, NAME, {"exact": Source.local(path, golden=golden, sha256=DIGEST)})
    assert refused.outcome == "refused"
    assert "expected" in refused.reason
    with pytest.raises(OnnxFileError):
        Source.local(tmp_path / "nothing.onnx")
    next(golden.glob("*.bin")).write_bytes(b"")
    with pytest.raises(DigestMismatch):
        Source.local(path, golden=golden)
