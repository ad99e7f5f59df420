"""The file that is measured, bound to its digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.digest import Digest
from gate.evidence import Subject


@dataclass(frozen=True)
class Candidate:
    """The file that is measured, and what was read from it."""

    path: Path
    subject: Subject

    def verify(self) -> None:
        """Hash the file (with external data: all its files) again. Raises DigestMismatch."""
        if self.subject.external_data:
            files = [self.path.name, *self.subject.external_data]
            seen = Digest.of_manifest(self.path.parent, files)
        else:
            seen = Digest.of_file(self.path)
        self.subject.sha256.verify(seen, what=self.path.name)
