"""A statement: in-toto's, version 1. What is said (the predicate) of which bytes (the subjects).

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from gate.storage.digest import Digest
from gate.storage.record import Record, later

STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"


class Worded(Record):
    """A record whose names are in camelCase on paper, as in-toto and SLSA write them."""

    model_config = ConfigDict(
        alias_generator=to_camel, serialize_by_alias=True, validate_by_name=True
    )


class Resource(Worded):
    """in-toto's ResourceDescriptor: something by name or address, and its digest."""

    name: str | None = later(None)
    uri: str | None = later(None)
    digests: Annotated[dict[str, str], Field(alias="digest")]
    """By algorithm, in hexadecimal."""

    @classmethod
    def of(cls, digest: Digest, *, name: str | None = None, uri: str | None = None) -> Resource:
        """With a SHA-256 digest."""
        return cls(name=name, uri=uri, digests={"sha256": digest.hex})

    @property
    def sha256(self) -> str | None:
        """In hexadecimal; None where only other digests are given."""
        return self.digests.get("sha256")


class Statement(Worded):
    """What a key signs."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")] = (
        STATEMENT_TYPE
    )
    subject: Annotated[tuple[Resource, ...], Field(min_length=1)]
    predicate_type: str
    predicate: dict[str, Any]

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        names = [each.name for each in self.subject if each.name is not None]
        if len(set(names)) < len(names):
            raise ValueError("two subjects have one name")
        return self

    def names(self, digest: Digest) -> bool:
        """Whether one of the subjects has this digest."""
        return any(subject.sha256 == digest.hex for subject in self.subject)

    def digest_of(self, name: str) -> str | None:
        """The SHA-256 digest of the subject of this name, in hexadecimal; None: it has none."""
        return next((each.sha256 for each in self.subject if each.name == name), None)


def resources(digests: Mapping[str, Digest]) -> tuple[Resource, ...]:
    """Subjects by name."""
    return tuple(Resource.of(digest, name=name) for name, digest in digests.items())
