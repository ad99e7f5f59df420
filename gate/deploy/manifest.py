"""What is deployed: the manifest that consumers read, and where its files are found."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import quote

from pydantic import Field, model_validator

from gate.errors import StorageError
from gate.preprocess.spec import PreprocessSpec
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256, later

MANIFEST = "manifest.json"
EXACT = "exact"
"""The slot of the model itself; the stable name `model.onnx` is this one's."""
QUANTIZED = "quantized"
"""The slot of its quantized twin, where the release has one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Size = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]


class StoredFile(Record):
    """A file of the store."""

    name: str
    """Relative to the model's folder."""
    sha256: Sha256
    """Of the file's bytes."""
    size_bytes: Size
    url: str
    """Relative to the manifest's; it holds the digest, so that what it gives never changes."""


class Slot(Record):
    """One model of a release."""

    sha256: Sha256
    """As evidence counts it: of the file; with external data, of the manifest of all files."""
    size_bytes: Size
    model: StoredFile
    external_data: tuple[StoredFile, ...] = ()
    golden: StoredFile | None = None
    """golden.json, with whose digest its folder in the store is called."""
    preprocessing: PreprocessSpec | None = later(None)
    """How a picture becomes the model's input."""
    parts: dict[str, StoredFile] = later({})
    """The ONNX file of each part of a release, by name; then `model` is the release file. Empty:
    `model` is the one ONNX file."""

    @model_validator(mode="after")
    def _holds_its_parts(self) -> Self:
        lost = [name for name, file in self.parts.items() if file not in self.external_data]
        if lost:
            raise ValueError(f"the part {lost[0]} is none of the files")
        return self

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The model and its data; of a release its own file, and those of its parts."""
        return (self.model, *self.external_data)

    @property
    def golden_sha256(self) -> Digest | None:
        """Digest of the golden vectors, if there are any."""
        return None if self.golden is None else self.golden.sha256


class Earlier(Record):
    """A release that a rollback can go back to."""

    release: Number
    slots: dict[str, Sha256]


class Manifest(Record):
    """`manifest.json`: one release."""

    schema_version: Literal[1] = 1
    name: str
    release: Number
    """Counts up with every change of what serves, rollbacks included."""
    slots: dict[str, Slot]
    rolled_back_to: Number | None = None
    """The release whose slots these are again; None: deployed anew."""
    deployed_at: str
    """UTC, ISO 8601."""
    previous: tuple[Earlier, ...] = ()
    """Newest first."""

    @model_validator(mode="after")
    def _has_exact(self) -> Self:
        if EXACT not in self.slots:
            raise ValueError(f"there is no slot '{EXACT}'")
        return self

    def earlier(self) -> Earlier:
        """This release as one to go back to."""
        slots = {slot: entry.sha256 for slot, entry in self.slots.items()}
        return Earlier(release=self.release, slots=slots)

    @property
    def digests(self) -> frozenset[str]:
        """Names of all folders of the store that this release needs."""
        slots = self.slots.values()
        needed = (digest for slot in slots for digest in (slot.sha256, slot.golden_sha256))
        return frozenset(digest.hex for digest in needed if digest is not None)


def url_of(folder: Digest, name: str) -> str:
    """The address of a file of the store, relative to the manifest's."""
    return f"sha256/{folder.hex}/{quote(name)}"


def check_name(name: str, *, what: str) -> str:
    """`name`, if it is safe as a file name and in a URL. Raises StorageError."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{name!r} can't be the name of a {what}: letters, digits, '.', '_' and '-' are "
            "allowed, at most 100, a letter or digit first. Choose another name."
        )
    return name
