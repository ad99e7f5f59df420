"""in-toto statement in a DSSE envelope; sign and verify."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from gate.errors import EvidenceError, KeyUnusable, Untrusted, first_line
from gate.signing.keys import PublicKey, SigningKey
from gate.storage.digest import Digest, canonical_json
from gate.storage.record import Record, added_field
from gate.storage.untrusted_files import parse_strict_json

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope


# https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"


class CamelCaseRecord(Record):
    """A record whose JSON names are in camelCase, as in in-toto and SLSA."""

    model_config = ConfigDict(
        alias_generator=to_camel, serialize_by_alias=True, validate_by_name=True
    )


class Resource(CamelCaseRecord):
    """in-toto's ResourceDescriptor: the name or URI of a resource, and its digest."""

    name: str | None = added_field(None)
    uri: str | None = added_field(None)
    digests: Annotated[dict[str, str], Field(alias="digest")]
    """Hexadecimal digests by algorithm."""

    @classmethod
    def from_digest(
        cls, digest: Digest, *, name: str | None = None, uri: str | None = None
    ) -> Resource:
        """Create a resource with a SHA-256 digest."""
        return cls(name=name, uri=uri, digests={"sha256": digest.hex})

    @property
    def sha256(self) -> str | None:
        """Return the SHA-256 digest in hexadecimal, or None where only other digests are listed."""
        return self.digests.get("sha256")


class Statement(CamelCaseRecord):
    """An in-toto statement: the payload that a key signs."""

    type: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")] = (
        STATEMENT_TYPE
    )
    subject: Annotated[tuple[Resource, ...], Field(min_length=1)]
    predicate_type: str
    predicate: dict[str, Any]

    @model_validator(mode="after")
    def _has_unique_names(self) -> Self:
        names = [each.name for each in self.subject if each.name is not None]
        if len(set(names)) < len(names):
            raise ValueError("two subjects have the same name")
        return self

    def names(self, digest: Digest) -> bool:
        """Return whether one of the subjects has this digest."""
        return any(subject.sha256 == digest.hex for subject in self.subject)

    def digest_of(self, name: str) -> str | None:
        """Return the hexadecimal SHA-256 digest of the subject with this name, or None."""
        return next((each.sha256 for each in self.subject if each.name == name), None)


def resources(digests: Mapping[str, Digest]) -> tuple[Resource, ...]:
    """Return the subjects with these names and digests."""
    return tuple(Resource.from_digest(digest, name=name) for name, digest in digests.items())


class Predicate(CamelCaseRecord):
    """The content of a statement about its subjects."""

    type_uri: ClassVar[str]

    def about(self, subjects: Mapping[str, Digest]) -> Statement:
        """Return the statement about these subjects, by name."""
        return Statement(
            subject=resources(subjects), predicate_type=self.type_uri, predicate=self.to_plain()
        )

    @classmethod
    def from_statement(cls, signed: SignedStatement, *, label: str = "the statement") -> Self:
        """Return the predicate of a statement without verifying signatures. Raises Untrusted for
        another type or an incomplete predicate."""
        statement = signed.statement
        if statement.predicate_type != cls.type_uri:
            raise Untrusted(
                f"{label} is of type {statement.predicate_type[:200]}, expected {cls.type_uri}. "
                "It is a different statement: sign again."
            )
        try:
            return cls.model_validate_json(canonical_json(statement.predicate))
        except ValueError as error:
            raise Untrusted(
                f"the predicate of {label} is not valid: {first_line(error)[:300]}"
            ) from error


# https://github.com/secure-systems-lab/dsse/blob/master/envelope.md
PAYLOAD_TYPE = "application/vnd.in-toto+json"

ENVELOPE_LIMIT = 1 << 22
"""Maximum size of an envelope, in bytes."""

_MAX_SIGNATURES = 16


@dataclass(frozen=True)
class SignedStatement:
    """A statement in its DSSE envelope. Parsing verifies no signature; `signers` does."""

    data: bytes
    """The bytes of the envelope's file."""
    statement: Statement
    _envelope: Envelope
    _verified: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)
    """Cached results of signature checks by public key: key and envelope never change."""

    @classmethod
    def from_bytes(cls, data: bytes, *, label: str = "the statement") -> Self:
        """Parse an envelope. Raises Untrusted if it is not valid or contains no statement."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import FormatError

        try:
            if len(data) > ENVELOPE_LIMIT:
                raise EvidenceError(f"more than {ENVELOPE_LIMIT} bytes")
            plain = parse_strict_json(data, label=label)
            if "payloadType" not in plain:
                raise EvidenceError("it has no payloadType; statement files end in .dsse.json")
            if plain["payloadType"] != PAYLOAD_TYPE:
                raise EvidenceError(f"its payloadType is {str(plain['payloadType'])[:100]!r}")
            if not 0 < len(plain["signatures"]) <= _MAX_SIGNATURES:
                raise EvidenceError(
                    f"it has {len(plain['signatures'])} signatures, expected 1 to {_MAX_SIGNATURES}"
                )
            if not all(isinstance(each["keyid"], str) for each in plain["signatures"]):
                raise EvidenceError("the keyid of a signature is not a string")
            envelope = Envelope.from_dict(plain)
            parse_strict_json(envelope.payload, label=label)
            statement = Statement.from_json(envelope.payload)
        except (
            EvidenceError, FormatError, KeyError, TypeError, AttributeError, ValueError,
            binascii.Error,
        ) as error:  # fmt: skip
            raise Untrusted(
                f"{label} is not an in-toto statement in a signed DSSE envelope ({PAYLOAD_TYPE}): "
                f"{first_line(error)[:300].rstrip('.')}. Sign the verdict again: gate check "
                "--report."
            ) from error
        return cls(data, statement, envelope)

    @classmethod
    def sign(cls, statement: Statement, key: SigningKey) -> Self:
        """Sign a statement. Raises KeyUnusable if the key can't sign now."""
        from securesystemslib.dsse import Envelope

        envelope = Envelope(canonical_json(statement.to_plain()), PAYLOAD_TYPE, {})
        signature = key.sign(envelope.pae())
        envelope.signatures[signature.keyid] = signature
        data = json.dumps(envelope.to_dict(), indent=1).encode() + b"\n"
        signed = cls(data, statement, envelope)
        if not signed.signers([key.public]):
            raise KeyUnusable(
                f"a signature by the key {key.public.label} does not verify with its public key: "
                "its vault uses another algorithm than it reports. Use another key."
            )
        return signed

    def signers(self, keys: Iterable[PublicKey]) -> tuple[PublicKey, ...]:
        """Return the keys that signed the envelope, each once."""
        return tuple({key.key_id: key for key in keys if self._is_signed_by(key)}.values())

    def _is_signed_by(self, key: PublicKey) -> bool:
        from securesystemslib.exceptions import VerificationError

        if key.public not in self._verified:
            try:
                self._envelope.verify([key.verifier], 1)
                self._verified[key.public] = True
            except VerificationError:
                self._verified[key.public] = False
        return self._verified[key.public]

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Return the key IDs that the envelope claims, without verification."""
        return tuple(self._envelope.signatures)

    @property
    def digest(self) -> Digest:
        """Return the digest of the envelope's bytes."""
        return Digest.from_bytes(self.data)

    @property
    def compact(self) -> str:
        """Return the envelope as compact ASCII JSON."""
        return canonical_json(self._envelope.to_dict()).decode()
