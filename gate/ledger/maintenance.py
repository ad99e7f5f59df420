"""Audit, checkpoints, acceptance of a rewrite, addresses of one registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Self

from pydantic import Field

from gate.errors import EvidenceError, GateError, PastChanged, Untrusted
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.ledger import (
    UNTRUSTED_ENTRY,
    Ledger,
    StoredHead,
    check_writer,
    promotion_lock,
    verify,
    verify_rows,
)
from gate.ledger.lock import LOCK_TIMEOUT_S
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.statement import Predicate, SignedStatement
from gate.signing.trust import Trust, parse_time
from gate.storage.digest import Digest
from gate.storage.record import Sha256
from gate.storage.workspace import in_workspace, split_identity


# A server and its database, or the old and the new name of a server, are the same registry with two
# identities. The operator declares that once (`gate serve --same-registry`). The ledger stores it,
# so that promotions, rollbacks and the service agree. A declaration can't be removed: the rollbacks
# under the other address would then be ignored.
def registry_identities(ledger: Ledger, identity: str) -> frozenset[str]:
    """Return all identities of this registry, as `plain` writes them. Raises the exceptions of
    `Ledger.entries`."""
    name, workspace = split_identity(plain(identity))
    groups = [group for group in _declared(ledger) if name in group]
    return frozenset(in_workspace(each, workspace) for each in {name}.union(*groups))


def declare_addresses(ledger: Ledger, identity: str, aliases: Iterable[str]) -> None:
    """Declare in the ledger that these are the same registry, unless an entry already does. Raises
    the exceptions of `Ledger.append`."""
    # Without the workspace: a declaration applies to the server with all its workspaces.
    group = frozenset(split_identity(plain(each))[0] for each in (identity, *aliases))
    if len(group) > 1 and not any(group <= each for each in _declared(ledger)):
        addresses = tuple(sorted(group))
        ledger.append(
            LedgerEntry(
                action="same_registry",
                registry=split_identity(plain(identity))[0],
                model="",
                addresses=addresses,
                reason=f"these are one registry: {', '.join(addresses)}",
            )
        )


def _declared(ledger: Ledger) -> list[frozenset[str]]:
    """Return the groups of addresses that entries declare to be the same registry. Groups with a
    common address are joined."""
    groups: list[frozenset[str]] = []
    for entry in ledger.entries():
        if entry.action == "same_registry":
            group = frozenset(entry.addresses)
            joined = [each for each in groups if each & group]
            groups = [each for each in groups if not each & group] + [group.union(*joined)]
    return groups


# Invariant: each entry is signed by a writer who was trusted at its time and is not revoked, or a
# later entry of such a writer approves the past (`ledger_accepted`, `ledger_imported`). So entries
# without a signature or with one of a revoked key are trusted only after a person approved them.
_APPROVING: tuple[Action, ...] = ("ledger_accepted", "ledger_imported")


@dataclass(frozen=True)
class Audit:
    """The result of verifying a ledger."""

    lines: int
    head: Digest | None
    """Digest of the last entry; None for an empty ledger."""
    by_key: dict[str, int]
    """Number of signed entries by the ID of a trusted writer; empty without trusted writers."""
    accepted: tuple[int, ...]
    """Numbers of the entries that only a later entry approves."""


def audit_ledger(ledger: Ledger) -> Audit:
    """Verify the chain, the signatures of all entries, and the stored head.

    Raises the exceptions of `Ledger.verify`, and Untrusted for the first entry without a trusted
    signature.
    """
    ledger.verify()
    rows = ledger.rows()
    chain, entries = verify_rows(rows, location=ledger.location)
    by_key: Counter[str] = Counter()
    accepted: list[int] = []
    unapproved: dict[int, Untrusted] = {}
    trust = ledger.trust
    for row, entry in zip(rows, entries, strict=True):
        if trust is None or not trust.writers:
            break
        try:
            key = verify(row.line, row.signature, trust=trust, at=entry.at)
        except Untrusted as error:
            unapproved[row.number] = error
            continue
        by_key[key.key_id] += 1
        if entry.action in _APPROVING:
            accepted += unapproved
            unapproved.clear()
    for number, reason in unapproved.items():
        raise Untrusted(
            f"{ledger.location}:{number}: this entry {reason}. {UNTRUSTED_ENTRY}"
        ) from reason
    return Audit(chain.lines, chain.head, dict(by_key), tuple(accepted))


def accept_rewrite(ledger: Ledger, stored: StoredHead, *, reason: str) -> tuple[str, ...]:
    """Accept the current content of the ledger: append an entry, and store the current head.

    The entry is signed by a trusted writer and so approves all entries before it. `ledger` must
    have no stored head. Returns the problems that are accepted: the first entry that is not
    trusted, and a stored head that is not in the ledger. Empty: nothing was wrong or changed.

    Raises EvidenceError if the chain is broken, Untrusted and KeyUnusable if the ledger's key is
    not a trusted writer's, StorageError and StateUnavailable if the ledger or the stored head can't
    be reached, PromotionConflict during a promotion.
    """
    check_writer(ledger.key, ledger.trust, location=ledger.location)
    unverified = Ledger(ledger.state, key=ledger.key)
    with promotion_lock(unverified, timeout_s=LOCK_TIMEOUT_S):
        checks: tuple[tuple[Callable[[], object], type[GateError]], ...] = (
            (partial(audit_ledger, ledger), Untrusted),
            (Ledger(ledger.state, stored_head=stored).verify, EvidenceError),
        )
        problems = []
        for check, error_type in checks:
            try:
                check()
            except error_type as error:
                problems.append(str(error))
        if not problems:
            return ()
        count = len(unverified.entries())
        why = f"{reason} (the ledger ended at line {count}; {'; '.join(problems)})"
        unverified.append(LedgerEntry(action="ledger_accepted", registry="", model="", reason=why))
        stored.replace(unverified.head())
    return tuple(problems)


# Invariant: if the ledger contains the checkpoint's last entry with the same digest, then no entry
# before it was removed or rewritten since the checkpoint.
class Checkpoint(Predicate):
    """The end of a ledger at one time."""

    type_uri: ClassVar[str] = "urn:parity-gate:checkpoint:v1"

    lines: Annotated[int, Field(ge=1)]
    head: Sha256
    """Digest of the last of these entries; through the chain, of all of them."""
    at: str
    """UTC, ISO 8601."""

    @classmethod
    def from_ledger(cls, ledger: Ledger) -> Self:
        """Create a checkpoint of the current end of a ledger.

        Raises the exceptions of `Ledger.entries`, and EvidenceError for an empty one.
        """
        ledger.entries()
        head = ledger.head()
        if head is None:
            raise EvidenceError(
                f"the ledger {ledger.location} is empty, so a checkpoint is not possible. Check "
                "its path or URL."
            )
        return cls(lines=head.lines, head=head.sha256, at=head.at)

    def sign(self, key: SigningKey) -> SignedStatement:
        """Sign the checkpoint as a statement. Raises KeyUnusable."""
        return SignedStatement.sign(self.about({"ledger": self.head}), key)

    def verify(self, ledger: Ledger) -> int:
        """Verify that the ledger still has all entries; return how many were added since.

        Raises PastChanged if it does not, and the exceptions of `Ledger.verify`.
        """
        ledger.verify()
        fresh = Ledger(ledger.state)  # `ledger` may have read the entries long ago.
        fresh.verify()
        now, digest = fresh.head(), fresh.digest(self.lines)
        count = 0 if now is None else now.lines
        if digest == self.head:
            return count - self.lines
        change = (
            f"it ends at entry {count}: entries were removed"
            if digest is None
            else f"that entry has digest {digest}: it or an earlier one was rewritten or removed"
        )
        raise PastChanged(
            f"at the checkpoint of {self.at} the ledger {ledger.location} had {self.lines} "
            f"entries, the last with digest {self.head}; now {change}. Restore the newest copy, "
            "and find out who can write to the database."
        )


def checkpoint_signers(signed: SignedStatement, *, trust: Trust) -> tuple[PublicKey, ...]:
    """Return the trusted writers that signed a checkpoint of any age. Raises Untrusted if none of
    them was trusted at its time and is not revoked."""
    at = Checkpoint.from_statement(signed, label="the checkpoint").at
    time = parse_time(at)
    signers = () if time is None else signed.signers(trust.keys("writers", at=time))
    if not signers:
        raise Untrusted(
            f"the checkpoint of {at} is not signed by a key that was trusted as a writer then. "
            "If its key is a writer of yours, trust it: gate keys trust."
        )
    return signers
