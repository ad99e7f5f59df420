"""A lock file that no other user of the machine can hold."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from gate import GateError
from gate.errors import StorageError
from gate.storage import files
from gate.storage.files import private_lock

NOBODY = 65_534
BUSY = GateError("busy")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "locks" / "one.lock"


def test_lock_file_and_folder_are_private(path: Path) -> None:
    previous = os.umask(0)
    try:
        with private_lock(path, timeout_s=0.0, busy=BUSY):
            assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    finally:
        os.umask(previous)


def test_lock_is_exclusive(path: Path) -> None:
    with private_lock(path, timeout_s=0.0, busy=BUSY), pytest.raises(GateError, match="busy"):
        private_lock(path, timeout_s=0.0, busy=BUSY).__enter__()
    with private_lock(path, timeout_s=0.0, busy=BUSY):
        pass


def test_open_permissions_are_tightened(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    path.parent.chmod(0o777)
    path.chmod(0o666)
    with private_lock(path, timeout_s=0.0, busy=BUSY):
        assert (mode(path.parent), mode(path)) == (0o700, 0o600)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("flock") is None, reason="takes root, and flock"
)
def test_other_user_cannot_hold_the_lock() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as created:
        folder = Path(created)
        folder.chmod(0o755)  # like the folder of a ledger
        (folder / "open.lock").touch(mode=0o644)
        private = folder / "locks" / "one.lock"
        with private_lock(private, timeout_s=0.0, busy=BUSY):
            pass
        held = [
            subprocess.run(
                ["flock", "--nonblock", path, "true"], user=NOBODY, cwd="/", check=False,
                capture_output=True,
            ).returncode == 0
            for path in (folder / "open.lock", private)
        ]  # fmt: skip
    assert held == [True, False]


def link_folder(path: Path) -> None:
    (path.parents[1] / "elsewhere").mkdir(parents=True)
    path.parent.symlink_to("elsewhere")


def link_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("elsewhere")


def create_pipe(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def replace_folder_by_file(path: Path) -> None:
    path.parents[1].mkdir()
    path.parent.touch()


def replace_parent_by_file(path: Path) -> None:
    path.parents[1].touch()


TAMPERED = [link_folder, link_file, create_pipe, replace_folder_by_file, replace_parent_by_file]


@pytest.mark.parametrize("tamper", TAMPERED)
def test_invalid_lock_path_is_refused(path: Path, tamper) -> None:
    tamper(path)
    with pytest.raises(StorageError, match=r"Remove it|Fix|fix"):
        private_lock(path, timeout_s=0.0, busy=BUSY).__enter__()
    assert not (path.parents[1] / "elsewhere").is_file()


def test_lock_of_another_owner_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_lock(path, timeout_s=0.0, busy=BUSY):
        pass
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="can lock it forever"):
        private_lock(path, timeout_s=0.0, busy=BUSY).__enter__()
