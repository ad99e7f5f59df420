from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import StorageError
from gate.storage.files import read_private


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
