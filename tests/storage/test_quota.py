"""Writers that exceed a size limit are stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gate.errors import RegistryUnavailable, TooLarge
from gate.sandbox.limits import limit_folder_size


def test_endless_writer_is_stopped(tmp_path: Path) -> None:
    """A foreign download can't be interrupted; its output is discarded."""
    most = 0
    path = tmp_path / "model.onnx"
    with pytest.raises(TooLarge), limit_folder_size(tmp_path, 1 << 20), path.open("wb") as stream:
        for _ in range(200):
            stream.write(bytes(1 << 16))
            stream.flush()
            time.sleep(0.002)
            most = max(most, os.fstat(stream.fileno()).st_blocks * 512)
    assert 0 < most < 8 << 20  # of 12.5 MiB in total


@pytest.mark.parametrize("how", ["return", "raise"])
def test_fast_writer_is_detected_at_the_end(tmp_path: Path, how: str) -> None:
    with pytest.raises(TooLarge), limit_folder_size(tmp_path, 1000):
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "model.onnx").write_bytes(bytes(1001))
        if how == "raise":
            raise RegistryUnavailable("went away")


def test_files_within_the_limit_are_kept(tmp_path: Path) -> None:
    with limit_folder_size(tmp_path, 1000):
        (tmp_path / "model.onnx").write_bytes(bytes(1000))
    assert (tmp_path / "model.onnx").stat().st_size == 1000


def test_error_of_the_writer_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RegistryUnavailable), limit_folder_size(tmp_path, 1000):
        raise RegistryUnavailable("went away")


def test_symlink_targets_are_not_deleted(tmp_path: Path) -> None:
    second = tmp_path / "precious"
    second.write_bytes(bytes(5000))
    (tmp_path / "in").mkdir()
    with pytest.raises(TooLarge), limit_folder_size(tmp_path / "in", 1000):
        (tmp_path / "in" / "link").symlink_to(second)
        (tmp_path / "in" / "model.onnx").write_bytes(bytes(2000))
        time.sleep(0.1)
    assert second.read_bytes() == bytes(5000)
