"""A copy of the file, for libraries that open paths: nobody else writes it, it has the digest."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from gate.errors import StorageError
from gate.onnxfile.candidate import Candidate
from gate.runtimes.runtime import RunnableFile
from gate.storage.temporary import temporary_folder


@contextlib.contextmanager
def private_copy(file: RunnableFile) -> Iterator[Path]:
    """The path of the copy, with its external data beside it, for as long as it is loaded.

    The digest is taken of the copy, so what is loaded is what has it, whatever becomes of the
    original. Raises DigestMismatch, StorageError.
    """
    with temporary_folder() as folder:
        copied = folder / file.path.name
        try:
            for name in (file.path.name, *file.subject.external_data):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.path.parent / name, target)
        except OSError as error:
            raise StorageError(
                f"cannot copy {file.path.name} to measure it: {error.strerror or error}. It needs "
                "its external data beside it, and room for a copy where TMPDIR points to."
            ) from error
        Candidate(copied, file.subject).verify()
        yield copied
