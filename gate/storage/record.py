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


# Law: `R.from_json(r.to_json()) == r` for every record, NaN and infinity included.
def _as_digest(value: Any) -> Digest:
    return value if isinstance(value, Digest) else _parsed(str(value))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Digest:
    # The lines of a ledger name the same few again and again.
    return Digest.parse(text)


Sha256 = Annotated[
    Digest,
    PlainValidator(_as_digest),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}),
]
"""A `Digest` that is written into JSON as `sha256:<hex>`."""


def encodable(text: str) -> str:
    """The text without what UTF-8 and databases can't hold: names of files may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


Prose = Annotated[str, BeforeValidator(encodable)]
"""A text for people, which may repeat what a stranger wrote."""


Count = Annotated[int, Field(ge=0)]


Measured = Annotated[float, Field(strict=False)]
"""A measured float64: may be NaN or infinite, because that is evidence too."""


def as_json(value: Any) -> JsonValue:
    """Return the value as JSON has it: lists for sequences, words for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if isinstance(value, str) else value


Params = Annotated[dict[str, Any], BeforeValidator(as_json)]
"""The values that the text of a code names."""


def added_field(default: Any) -> Any:
    """The default of a field that came after version 1 of its record.

    At its default it is not written, so old records keep their text and their digest.
    """
    return Field(default=default, exclude_if=lambda value: value == default)


class Record(BaseModel):
    """A frozen pydantic model: unknown fields are refused, JSON keeps NaN and ±inf as words."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")

    def to_json(self, *, indent: int | None = None) -> str:
        """JSON text."""
        return self.model_dump_json(indent=indent)

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict; NaN and infinity are the words `NaN`, `Infinity`, `-Infinity`."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read JSON text. Raises EvidenceError if it is not a whole record of this kind."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "(top)"
            raise EvidenceError(
                f"not a whole {cls.__name__} record: {place}: {first['msg']}. "
                "Write it again by repeating the measurement."
            ) from error

    @classmethod
    def from_untrusted(cls, data: bytes, *, what: str, sha256: Digest | None = None) -> Self:
        """Read JSON text that a stranger may have written (`gate.storage.untrusted_files`):
        strictly, and only if its canonical JSON has the digest `sha256`, where one is pinned.

        Raises EvidenceError where it is no such record, DigestMismatch where it is another.
        """
        with as_mismatch(what):
            plain = parse_strict_json(data, what=what)
            if sha256 is not None:
                check_digest(Digest.of_json(plain), sha256, what=what)
            return cls.from_json(data)

    def digest(self) -> Digest:
        """Digest of the record's canonical JSON."""
        return Digest.of_json(self.to_plain())

    def save(self, path: Path) -> None:
        """Write the record as indented JSON, atomically. Raises StorageError."""
        files.write_bytes(path, self.file_bytes())

    def file_bytes(self) -> bytes:
        """Return the bytes that `save` writes, so that the signer takes the digest from memory."""
        return f"{self.to_json(indent=2)}\n".encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record from a file. Raises EvidenceError if it is missing or not whole."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise EvidenceError(
                f"cannot read {path}: {error.strerror}. Run the stage that writes it first."
            ) from error
        return cls.from_json(text)
