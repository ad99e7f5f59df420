"""SHA-256 digests of files, manifests and canonical JSON."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.errors import DigestMismatch, StorageError
from gate.storage.files import open_plain

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A SHA-256 digest, written `sha256:<64 hex digits>`."""

    hex: str
    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        if self.algorithm != "sha256" or not _HEX.fullmatch(self.hex):
            raise ValueError(f"not a SHA-256 digest: {self.algorithm}:{self.hex}")

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"

    @property
    def short(self) -> str:
        """Return the first twelve hex digits, for display."""
        return self.hex[:12]

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse `sha256:<hex>` or bare hex. Raises ValueError for anything else."""
        algorithm, _, hexdigits = text.rpartition(":")
        return cls(hexdigits, algorithm or "sha256")

    @classmethod
    def from_bytes(cls, data: bytes) -> Digest:
        """Compute the digest of bytes in memory."""
        return cls(hashlib.sha256(data).hexdigest())

    @classmethod
    def from_file(cls, path: Path) -> Digest:
        """Compute the digest of a file, read in chunks.

        Raises StorageError if it can't be read, or is a device, a pipe or a folder.
        """
        try:
            with open_plain(path) as stream:
                return cls.from_stream(stream)
        except OSError as error:
            raise StorageError(f"cannot read {path} to compute its digest: {error}") from error

    @classmethod
    def from_stream(cls, stream: io.BufferedReader | io.FileIO) -> Digest:
        """Compute the digest of the rest of an open file, read in chunks. Raises OSError."""
        return cls(hashlib.file_digest(stream, "sha256").hexdigest())

    @classmethod
    def from_manifest(cls, root: Path, files: Iterable[str]) -> Digest:
        """Compute the digest of files below `root`: of the canonical JSON {relative path: hex}."""
        return cls.from_json({name: cls.from_file(root / name).hex for name in files})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Digest:
        """Compute the digest of `canonical_json(value)`."""
        return cls.from_bytes(canonical_json(value))

    def verify(self, actual: Digest, *, label: str) -> None:
        """Raise DigestMismatch unless `actual` is this digest."""
        if actual != self:
            raise DigestMismatch(
                f"{label} has digest {actual}, expected {self}. "
                "The bytes changed since they were measured: measure and decide again."
            )


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Return UTF-8 JSON with sorted keys, without white space. Raises ValueError for NaN, inf."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()
