"""One fresh download of a version, and what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gate.errors import DigestMismatch, StorageError
from gate.registry.answers import answer_in
from gate.registry.doubts import digest_of_folder
from gate.registry.port import Registry
from gate.registry.proof import ExpectedFiles, prove
from gate.storage.digest import Digest
from gate.storage.quota import MAX_EXTENT, TooLarge, limited

_TOO_LARGE = Digest.of_bytes(b"more than is allowed")
"""For what was cut off here, by us, wherever that was."""


@dataclass(frozen=True)
class Stated:
    """Of a version for which no line vouches: what is expected of it, its own statements say.
    All are alike, so that two downloads of one version are compared."""

    read: Callable[[Path], ExpectedFiles] = field(compare=False)
    """From the place of the file, beside which nothing else may be read yet. Raises EvidenceError
    where nobody who is trusted says it."""


Expected = ExpectedFiles | Stated


@dataclass
class Download:
    """A version that comes into a folder of its own."""

    registry: Registry
    name: str
    number: str
    expected: Expected
    folder: Path
    is_proven: bool = field(default=False, init=False)
    """Its bytes are the expected ones; what people read of them may be no good all the same."""
    _too_large: bool = field(default=False, init=False)

    @classmethod
    def into(cls, parent: Path, registry: Registry, *, of: tuple[str, str, Expected]) -> Download:
        """`of`: model, version, and what is expected. Raises StorageError."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="version-", dir=parent))
        except OSError as error:
            raise StorageError(
                f"cannot make a folder in {parent}: {error.strerror or error}. Free space or fix "
                "permissions there."
            ) from error
        return cls(registry, *of, folder)

    @property
    def what(self) -> str:
        """For messages."""
        return f"version {self.number} of {self.name} in the registry"

    def proven(self) -> Path:
        """The file, with all that is to be beside it. Raises DigestMismatch, whatever is wrong with
        what came; EvidenceError where nobody states what it should be; the RegistryErrors,
        StorageError."""
        extent = MAX_EXTENT if isinstance(self.expected, Stated) else self.expected.extent
        try:
            with limited(self.folder, extent.most_bytes):
                path = self.registry.download(self.name, self.number, self.folder, extent=extent)
        except TooLarge as error:
            self._too_large = True
            raise DigestMismatch(
                f"{self.what}: {error}. It was exchanged: promote it anew."
            ) from error
        if isinstance(self.expected, Stated):
            self.expected = self.expected.read(path)
        prove(path, self.expected, what=self.what)
        self.is_proven = True
        return path

    @property
    def answer(self) -> str | None:
        """Which file is an answer of the store, and not the version's. Raises StorageError."""
        if self._too_large:
            return None
        expected = None if isinstance(self.expected, Stated) else self.expected
        return answer_in(self.folder, expected)

    @property
    def digest(self) -> Digest | None:
        """Of all that came; None: it was an answer of the store. Raises StorageError."""
        if self._too_large:
            return _TOO_LARGE
        return None if self.answer else digest_of_folder(self.folder)
