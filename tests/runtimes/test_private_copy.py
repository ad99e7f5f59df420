"""A library that opens a file by path gets a private copy."""

from __future__ import annotations

import shutil

import pytest

from gate.errors import DigestMismatch, StorageError
from gate.runtimes import RunnableFile
from gate.runtimes.ort import private_copy
from tests.runtimes import strange_files


@pytest.fixture
def candidate(tmp_path):
    return strange_files.create_file(strange_files.external_data, tmp_path)[0]


def test_copy_is_unaffected_by_changes_and_removed(candidate):
    data = candidate.path.with_name("weights.bin")
    expected = data.read_bytes()
    with private_copy(RunnableFile(candidate)) as copied:
        data.write_bytes(b"other")
        assert copied.with_name("weights.bin").read_bytes() == expected
        assert copied.parent != candidate.path.parent
    assert not copied.exists()


def test_digest_of_the_copy_is_verified(candidate, monkeypatch):
    original = shutil.copyfile

    def exchanged_for_a_moment(source, target):
        original(source, target)
        target.write_bytes(target.read_bytes() + b"!")

    monkeypatch.setattr(shutil, "copyfile", exchanged_for_a_moment)
    with pytest.raises(DigestMismatch), private_copy(RunnableFile(candidate)):
        pass


def test_linked_data_is_copied(candidate, tmp_path):
    data = candidate.path.with_name("weights.bin")
    data.rename(tmp_path / "blob")
    data.symlink_to(tmp_path / "blob")
    with private_copy(RunnableFile(candidate)) as copied:
        assert not copied.with_name("weights.bin").is_symlink()


def test_changed_or_missing_data_is_refused(candidate):
    data = candidate.path.with_name("weights.bin")
    data.write_bytes(data.read_bytes() + b"!")
    with pytest.raises(DigestMismatch), private_copy(RunnableFile(candidate)):
        pass
    data.unlink()
    with pytest.raises(StorageError, match="external data must be in the same folder"), private_copy(RunnableFile(candidate)):  # fmt: skip
        pass
