"""Files outside a folder, links, private files and size limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gate import Digest
from gate.errors import RegistryUnavailable, StorageError, TooLarge
from gate.sandbox.limits import limit_folder_size
from gate.storage.files import is_inside, open_inside, open_plain, read_private, wrong_name


@pytest.mark.parametrize("name", ["w.bin", "data/w.bin", "ü" * 127, "a..b"])
def test_relative_names_are_accepted(name: str) -> None:
    assert wrong_name(name) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/w", "a/../../w", "a\\w", "w\0", "w" * 256, "ü" * 128]
)
def test_names_outside_are_refused(name: str) -> None:
    assert wrong_name(name) is not None


def test_symlink_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "fine").symlink_to("other")
    assert not is_inside(tmp_path / "in", "link")
    assert is_inside(tmp_path / "in", "fine")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "null byte", "missing"])
def test_digest_requires_a_regular_file(tmp_path: Path, kind: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    paths = {"pipe": pipe, "device": Path("/dev/zero"), "folder": tmp_path}
    path = paths.get(kind, tmp_path / ("x\0y" if kind == "null byte" else "missing"))
    with pytest.raises(OSError):
        open_plain(path)
    with pytest.raises(StorageError, match="cannot read"):
        Digest.from_file(path)


def test_file_is_opened_without_following_symlinks(tmp_path: Path) -> None:
    """Links above the folder belong to its owner."""
    real = tmp_path / "real"
    (real / "a" / "b").mkdir(parents=True)
    (real / "a" / "b" / "w").write_bytes(b"data")
    (tmp_path / "folder").symlink_to(real)
    with open_inside(tmp_path / "folder", "a/b/w") as stream:
        assert stream.read() == b"data"
    (real / "file").symlink_to(real / "a" / "b" / "w")
    (real / "c").symlink_to("a")
    os.mkfifo(real / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("file", "c/b/w", "pipe", "a", "a/b/w/x", "missing", "../w", "/etc/passwd", "w\0"):
        with pytest.raises(OSError, match=r".+"):
            open_inside(tmp_path / "folder", name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def read(path: Path) -> str:
    return read_private(path, kind="key", missing="Make it.")


def test_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a secret\n")
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert read(path) == "a secret\n"
    for mode in (0o644, 0o640, 0o604, 0o620, 0o700):
        path.chmod(mode)
        with pytest.raises(StorageError, match=f"the key .* has mode {mode:04o}.*chmod 600"):
            read(path)


def test_unreadable_private_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read the key .*No such file.* Make it\."):
        read(tmp_path / "missing")
    with pytest.raises(StorageError, match="is a directory|Is a directory"):
        read(tmp_path)
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(StorageError, match="not UTF-8"):
        read(tmp_path / "key")


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
