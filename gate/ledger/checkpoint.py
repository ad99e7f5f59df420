"""Checkpoint: where the ledger ended at a time, signed, for an auditor who keeps it.

Law: a ledger that holds a checkpoint's line with its digest holds all lines before it as they were
then; nothing was removed or rewritten since.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, ValidationError

from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey, SigningKey
from gate.attestation.statement import Statement, Worded, resources
from gate.attestation.trust import Trust, time_of
from gate.errors import EvidenceError, PastChanged, Untrusted, first_line
from gate.ledger.ledger import Ledger
from gate.storage.digest import canonical_json
from gate.storage.record import Sha256

CHECKPOINT_TYPE = "urn:parity-gate:checkpoint:v1"


class Checkpoint(Worded):
    """The predicate."""

    lines: Annotated[int, Field(ge=1)]
    head: Sha256
    """Of the last of these lines; through the chain, of all."""
    at: str
    """UTC, ISO 8601."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """Where a ledger ends now. Raises as `Ledger.entries`; EvidenceError for an empty one."""
        ledger.entries()
        head = ledger.head()
        if head is None:
            raise EvidenceError(
                f"there is no line in the ledger {ledger.place}, so there is nothing to keep. Name "
                "the right one."
            )
        return cls(lines=head.lines, head=head.sha256, at=head.at)

    @classmethod
    def read(cls, signed: SignedStatement) -> Self:
        """What a statement says; believed by nobody yet. Raises Untrusted."""
        statement = signed.statement
        if statement.predicate_type != CHECKPOINT_TYPE:
            raise Untrusted(
                f"the statement is of type {statement.predicate_type}, expected {CHECKPOINT_TYPE}: "
                "it is no checkpoint."
            )
        try:
            return cls.model_validate_json(canonical_json(statement.predicate))
        except ValidationError as error:
            raise Untrusted(f"the checkpoint is not whole: {first_line(error)}") from error

    def signed(self, key: SigningKey) -> SignedStatement:
        """The statement. Raises KeyUnusable."""
        statement = Statement(
            subject=resources({"ledger": self.head}),
            predicate_type=CHECKPOINT_TYPE,
            predicate=self.to_plain(),
        )
        return SignedStatement.sign(statement, key)

    def verify(self, ledger: Ledger) -> int:
        """Prove that the ledger holds all that it held then; gives how many lines came since.

        Raises PastChanged where it does not; else as `Ledger.verify`.
        """
        ledger.verify()
        fresh = Ledger(ledger.state)  # whoever read lines long ago does not look at them now
        fresh.verify()
        now, digest = fresh.head(), fresh.digest(self.lines)
        count = 0 if now is None else now.lines
        if digest == self.head:
            return count - self.lines
        what = (
            f"it ends at line {count}: lines were removed"
            if digest is None
            else f"that line has digest {digest}: it, or one before it, was rewritten or removed"
        )
        raise PastChanged(
            f"the checkpoint of {self.at} saw the ledger {ledger.place} with {self.lines} lines, "
            f"the last with digest {self.head}; now {what}. Restore the newest copy, and find out "
            "who writes there."
        )


def checkpoint_signers(signed: SignedStatement, *, trust: Trust) -> tuple[PublicKey, ...]:
    """Which trusted writers signed a checkpoint, however old it is. Raises Untrusted where none
    did that was trusted at its time and is not revoked."""
    at = Checkpoint.read(signed).at
    time = time_of(at)
    signers = () if time is None else signed.signers(trust.keys("writers", at=time))
    if not signers:
        raise Untrusted(
            f"the checkpoint of {at} is not signed by a key that was trusted as a writer then. "
            "Trust its key, if it is the right one: gate keys trust."
        )
    return signers
