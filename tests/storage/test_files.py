from __future__ import annotations

import os
from pathlib import Path

import pytest

from gate.errors import StorageError
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_inside, open_plain, wrong_name


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
