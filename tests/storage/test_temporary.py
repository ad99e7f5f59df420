from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gate.errors import StorageError
from gate.storage import files
from gate.storage.files import temporary_folder

_WORKER_CODE = """
import sys
from pathlib import Path
from gate.storage.files import temporary_folder
with temporary_folder() as folder:
    Path(folder, "deep").mkdir()
    Path(folder, "deep", "gigabytes").write_bytes(b"x" * 1000)
    if len(sys.argv) > 1:
        Path(folder, "link").symlink_to(sys.argv[1])
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the temporary folders of this process and its children."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@contextmanager
def run_worker(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER_CODE, *arguments],
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def kill_worker(*arguments: str) -> Path:
    with run_worker(*arguments) as (process, folder):
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    return folder


def test_folder_is_empty_private_and_removed(temporary_root: Path) -> None:
    with temporary_folder() as folder:
        assert folder.is_relative_to(temporary_root)
        assert list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.parent.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
        with temporary_folder() as second:
            assert second != folder
        assert (folder / "file").exists()
    assert list(temporary_root.iterdir()) == []


def test_next_folder_removes_leftovers_of_killed_processes(
    temporary_root: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    left = kill_worker(str(precious))
    assert (left / "deep" / "gigabytes").is_file()
    with temporary_folder():
        assert not left.parent.exists()
    assert list(temporary_root.iterdir()) == []
    assert (precious / "file").exists()


def test_folders_in_use_are_kept(temporary_root: Path) -> None:
    dead = kill_worker()
    with run_worker() as (process, folder):
        with temporary_folder():
            assert (folder / "deep" / "gigabytes").is_file()
            assert not dead.parent.exists()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    assert list(temporary_root.iterdir()) == []


def test_killed_cleanup_is_finished_by_others(temporary_root: Path) -> None:
    left = kill_worker()
    shutil.rmtree(left)  # the folder is removed before its lock
    with temporary_folder():
        assert not left.parent.exists()


def test_threads_keep_each_others_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on NFS, where this process owns all of its locks.
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: None)
    missing_folders: list[Path] = []

    def work() -> None:
        for _ in range(20):
            with temporary_folder() as folder:
                (folder / "file").touch()
                if not (folder / "file").exists():
                    missing_folders.append(folder)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing_folders == []


def test_other_files_are_kept(temporary_root: Path, tmp_path: Path) -> None:
    elsewhere = kill_worker().parent.rename(tmp_path / "elsewhere")
    (temporary_root / "parity-gate-link").symlink_to(elsewhere)
    (temporary_root / "parity-gate-file").touch()
    (temporary_root / "parity-gate-no-lock").mkdir()
    (temporary_root / "gate-of-somebody").mkdir()
    names = {path.name for path in temporary_root.iterdir()}
    if os.geteuid() == 0:
        theirs = kill_worker().parent
        os.chown(theirs, 12345, 12345)
        names.add(theirs.name)
    with temporary_folder():
        pass
    assert {path.name for path in temporary_root.iterdir()} == names
    assert (elsewhere / "lock").exists()


def test_without_locks_nothing_is_cleaned_up(
    temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", refuse)
        with temporary_folder() as folder:
            assert not (folder.parent / "lock").exists()
            patch.undo()
            files._ACTIVE.clear()
            files.sweep()
            assert folder.is_dir()
    assert list(temporary_root.iterdir()) == []


def test_uncreatable_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/place")
    with pytest.raises(StorageError, match="TMPDIR"), temporary_folder():
        pass
