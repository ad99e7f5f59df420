"""The file that is measured, bound to its digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.digest import Digest
from gate.errors import StorageError
from gate.evidence import Subject


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

    def verify(self) -> None:
        """Hash the file (with external data: all its files) again. Raises DigestMismatch."""
        if self.subject.external_data:
            files = [self.path.name, *self.subject.external_data]
            seen = Digest.of_manifest(self.path.parent, files)
        else:
            seen = Digest.of_file(self.path)
        self.subject.sha256.verify(seen, what=self.path.name)
