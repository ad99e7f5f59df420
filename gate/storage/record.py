"""Base of all records: frozen, strict, exact JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)

from gate.errors import EvidenceError
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.untrusted_files import as_mismatch, check_digest, parse_strict_json


def _as_digest(value: Any) -> Digest:
    return value if isinstance(value, Digest) else _parsed(str(value))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Digest:
    # Cached: ledger entries repeat the same digests.
    return Digest.parse(text)


Sha256 = Annotated[
    Digest,
    PlainValidator(_as_digest),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}),
]
"""A `Digest`, written as `sha256:<hex>` in JSON."""


def encodable(text: str) -> str:
    """Escape characters that UTF-8 and databases can't store: file names may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


Prose = Annotated[str, BeforeValidator(encodable)]
"""A text for display, which may contain untrusted input."""


Count = Annotated[int, Field(ge=0)]


Measured = Annotated[float, Field(strict=False)]
"""A measured float64. NaN and infinity are valid, because they are evidence, too."""


def as_json(value: Any) -> JsonValue:
    """Convert a value to JSON types: lists for sequences, strings for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if isinstance(value, str) else value


Params = Annotated[dict[str, Any], BeforeValidator(as_json)]
"""The parameters of a code's text."""


def added_field(default: Any, *, json_name: str | None = None) -> Any:
    """Return a field that was added after version 1 of its record.

    It is not written at its default, so that older records keep their JSON and their digest.
    `json_name`: its older name in JSON.
    """
    return Field(
        default=default,
        exclude_if=lambda value: value == default,
        validation_alias=json_name,
        serialization_alias=json_name,
    )


def renamed_field(default: Any, *, json_name: str) -> Any:
    """Return a field that has an older name in JSON."""
    return Field(default=default, validation_alias=json_name, serialization_alias=json_name)


class Record(BaseModel):
    """A frozen pydantic model. Unknown fields are refused; NaN and ±inf are strings in JSON.

    `R.from_json(r.to_json()) == r` holds for every record.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        ser_json_inf_nan="strings",
        serialize_by_alias=True,  # `renamed_field`
        validate_by_name=True,
    )

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the record as JSON text."""
        return self.model_dump_json(indent=indent)

    def to_plain(self) -> dict[str, Any]:
        """Return a JSON-compatible dict, with the strings `NaN`, `Infinity` and `-Infinity`."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse JSON text. Raises EvidenceError if it is not a complete record of this type."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"]) or "(top)"
            raise EvidenceError(
                f"not a valid {cls.__name__} record: {path}: {first['msg']}. "
                "Repeat the measurement to write it again."
            ) from error

    @classmethod
    def from_untrusted(cls, data: bytes, *, label: str, sha256: Digest | None = None) -> Self:
        """Parse untrusted JSON text strictly (`gate.storage.untrusted_files`).

        sha256: expected digest of its canonical JSON. Raises EvidenceError if it is not a record of
        this type, DigestMismatch if the digest differs.
        """
        with as_mismatch(label):
            plain = parse_strict_json(data, label=label)
            if sha256 is not None:
                check_digest(Digest.from_json(plain), sha256, label=label)
            try:
                return cls.from_json(data)
            except EvidenceError as error:
                raise EvidenceError(f"{label} is {error}") from error

    def digest(self) -> Digest:
        """Return the digest of the record's canonical JSON."""
        return Digest.from_json(self.to_plain())

    def save(self, path: Path) -> None:
        """Write the record as indented JSON, atomically. Raises StorageError."""
        files.write_bytes(path, self.file_bytes())

    def file_bytes(self) -> bytes:
        """Return the bytes that `save` writes. The signer computes the digest from these."""
        return f"{self.to_json(indent=2)}\n".encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record from a file. Raises EvidenceError if it is missing or not valid."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise EvidenceError(
                f"cannot read {path}: {error.strerror}. Run the stage that writes it first."
            ) from error
        try:
            return cls.from_json(text)
        except EvidenceError as error:
            raise EvidenceError(f"{path} is {error}") from error
