import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gate.errors import StorageError
from gate.storage import files


def test_file_appears_complete(tmp_path):
    target = tmp_path / "new" / "file"
    files.write_text(target, "ä")
    assert target.read_bytes() == "ä".encode()
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failure_keeps_the_old_file(tmp_path, error):
    target = tmp_path / "file"
    files.write_text(target, "old")
    with pytest.raises(type(error)), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_full_disk_is_reported_and_keeps_the_old_file(tmp_path, monkeypatch, code):
    target = tmp_path / "file"
    files.write_text(target, "old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=f"cannot write .*{os.strerror(code)}.*is unchanged"):
        files.write_text(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_read_only_file_system_is_reported(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:  # also the removal of an absent file
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    for write in (files.write_bytes, files.write_new):
        with pytest.raises(StorageError, match=os.strerror(errno.EROFS)):
            write(tmp_path / "file", b"new")


def test_full_device_is_reported(tmp_path):
    with pytest.raises(StorageError, match="No space left"), files.replacing(tmp_path / "f"):
        Path("/dev/full").write_bytes(b"x" * 100_000)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", [".", "..", "/", "here", "here/."])
def test_folder_as_target_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(StorageError, match=r"it is a folder. Name a file in it"):
        files.write_text(Path(name), "text")
    assert os.listdir(tmp_path) == ["here"]


def test_temporary_files_of_dead_writers_are_removed(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from gate.storage import files as atomic\n"
        "with atomic.replacing(Path(sys.argv[1])) as t:\n"
        "    t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    target = tmp_path / "file"
    files.write_text(target, "old")
    subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert len(os.listdir(tmp_path)) == 2
    assert target.read_text() == "old"
    living = tmp_path / f".file.{os.getppid()}.tmp"
    living.write_text("half")
    files.write_text(target, "new")
    assert sorted(os.listdir(tmp_path)) == [living.name, "file"]


def test_concurrent_writers_each_write_a_complete_file(tmp_path):
    target = tmp_path / "file"
    with files.replacing(target) as first, files.replacing(target) as second:
        first.write_text("one")
        second.write_text("other")
    assert target.read_text() == "one"
    assert os.listdir(tmp_path) == ["file"]


def test_file_and_folder_are_synced_in_order(tmp_path, monkeypatch):
    steps = []
    sync, replace = files.sync, Path.replace
    monkeypatch.setattr(
        files, "sync", lambda path: (steps.append(f"sync {path.name[-4:]}"), sync(path))
    )
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (steps.append("replace"), replace(self, to))
    )
    folder = tmp_path / "here"
    files.write_text(folder / "file", "text")
    assert steps == ["sync .tmp", "replace", "sync here"]
