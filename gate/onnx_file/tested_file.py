"""The file that is measured, bound to its digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.errors import StorageError
from gate.records.evidence import Subject
from gate.storage.digest import Digest


@dataclass(frozen=True)
class WithData:
    """A model and its data files, in memory."""

    model: bytes
    data: dict[str, bytes]
    """By name relative to the model's folder."""


@dataclass(frozen=True)
class Candidate:
    """The file that is measured, and what was read from it."""

    path: Path
    subject: Subject

    def verified(self) -> bytes | str:
        """What ONNX Runtime loads: the very bytes that have the digest, so that a file that is
        exchanged for a moment is seen; with external data only the path. Raises DigestMismatch."""
        if self.subject.external_data:
            self.verify()
            return str(self.path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        self.subject.sha256.verify(Digest.of_bytes(data), what=self.path.name)
        return data

    def loadable(self) -> bytes | str | WithData:
        """The same, but for data behind links, as the caches of model hubs have it: ONNX Runtime
        refuses links that leave the folder, so all of it is read here. Raises DigestMismatch."""
        files = self.subject.external_data
        if not any((self.path.parent / name).is_symlink() for name in files):
            return self.verified()
        names = (self.path.name, *files)
        try:
            read = {name: (self.path.parent / name).read_bytes() for name in names}
        except (OSError, MemoryError) as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        actual = Digest.of_json({name: Digest.of_bytes(data).hex for name, data in read.items()})
        self.subject.sha256.verify(actual, what=self.path.name)
        return WithData(read[self.path.name], {name: read[name] for name in files})

    def verify(self) -> None:
        """Hash the file (with external data: all its files) again. Raises DigestMismatch."""
        if self.subject.external_data:
            files = [self.path.name, *self.subject.external_data]
            actual = Digest.of_manifest(self.path.parent, files)
        else:
            actual = Digest.of_file(self.path)
        self.subject.sha256.verify(actual, what=self.path.name)
