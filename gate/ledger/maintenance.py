"""Audit, checkpoints, acceptance of a rewrite, addresses of one registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self
from weakref import WeakKeyDictionary

from pydantic import Field

from gate.errors import EvidenceError, PastChanged, Untrusted
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.ledger import (
    UNVOUCHED,
    Ledger,
    StoredHead,
    check_writer,
    promotion_lock,
    proven,
    verify,
)
from gate.ledger.lock import PATIENCE_S
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.statement import Predicate, SignedStatement
from gate.signing.trust import Trust, time_of
from gate.storage.digest import Digest
from gate.storage.record import Sha256
from gate.storage.workspace import in_workspace, split_identity

# A server and the database behind it, or a server's old and new name, are the same registry under
# two identities. The operator declares that once (`gate serve --same-registry`), and the ledger has
# a line of it. So promotions, rollbacks and the service agree. It can't be withdrawn silently,
# because rollbacks under the other address would be forgotten.
_Group = frozenset[str]


def same(ledger: Ledger, identity: str) -> frozenset[str]:
    """Return all identities of this registry, as `plain` writes them. Raises what `Ledger.entries`
    raises."""
    name, workspace = split_identity(plain(identity))
    groups = [group for group in _declared(ledger) if name in group]
    return frozenset(in_workspace(each, workspace) for each in {name}.union(*groups))


def declare_addresses(ledger: Ledger, identity: str, others: Iterable[str]) -> None:
    """Write down that these are the same registry, if no entry says so. Raises what `Ledger.append`
    raises."""
    # Whole servers are the same; their workspaces are, too.
    wanted = frozenset(split_identity(plain(each))[0] for each in (identity, *others))
    if len(wanted) > 1 and not any(wanted <= each for each in _declared(ledger)):
        addresses = tuple(sorted(wanted))
        ledger.append(
            LedgerEntry(
                action="same_registry",
                registry=split_identity(plain(identity))[0],
                model="",
                addresses=addresses,
                reason=f"these are one registry: {', '.join(addresses)}",
            )
        )


_GROUPS: WeakKeyDictionary[Ledger, tuple[tuple[LedgerEntry, ...], list[_Group]]] = (
    WeakKeyDictionary()
)
"""By ledger: the lines that were read, and the groups in them."""


def _declared(ledger: Ledger) -> list[_Group]:
    """Return the groups of addresses that ledger lines declare to be one registry. Groups that have
    an address in common are one."""
    entries = ledger.entries()
    before, groups = _GROUPS.get(ledger, ((), []))
    if entries is not before:
        groups = []
        for entry in entries:
            if entry.action == "same_registry":
                group = frozenset(entry.addresses)
                joined = [each for each in groups if each & group]
                groups = [each for each in groups if not each & group] + [group.union(*joined)]
        _GROUPS[ledger] = entries, groups
    return groups


# Invariant: each line is signed by a writer who was trusted at its time and is not revoked, or a
# later line of such a writer approves the past (`ledger_accepted`, `ledger_imported`). So lines
# from before there were keys, lines of a revoked key, and lines whose signature was lost count only
# once a person has approved them.
_VOUCHING: tuple[Action, ...] = ("ledger_accepted", "ledger_imported")


@dataclass(frozen=True)
class Audit:
    """The result of verifying a ledger."""

    lines: int
    head: Digest | None
    """Of the last line; None: there is no line."""
    by_key: dict[str, int]
    """Number of lines signed, by the ID of a trusted writer; empty without trusted writers."""
    accepted: tuple[int, ...]
    """Numbers of the lines that only a later line approves."""


def audit_ledger(ledger: Ledger) -> Audit:
    """Verify the chain, the signatures of all lines, and the stored head.

    Raises the exceptions of `Ledger.verify`, and Untrusted for the first line without a trusted
    signature.
    """
    ledger.verify()
    rows = ledger.rows()
    chain, entries = proven(rows, place=ledger.location)
    by_key: Counter[str] = Counter()
    accepted: list[int] = []
    doubtful: dict[int, Untrusted] = {}
    trust = ledger.trust
    for row, entry in zip(rows, entries, strict=True):
        if trust is None or not trust.writers:
            break
        try:
            key = verify(row.line, row.signature, trust=trust, at=entry.at)
        except Untrusted as error:
            doubtful[row.number] = error
            continue
        by_key[key.key_id] += 1
        if entry.action in _VOUCHING:
            accepted += doubtful
            doubtful.clear()
    for number, doubt in doubtful.items():
        raise Untrusted(f"{ledger.location}:{number}: this line {doubt}. {UNVOUCHED}") from doubt
    return Audit(chain.lines, chain.digest(chain.lines), dict(by_key), tuple(accepted))


# A line is added that names what was lost, or not trusted. Signed by a trusted writer, it approves
# all lines before it.
def accept_rewrite(ledger: Ledger, stored: StoredHead, *, reason: str) -> tuple[str, ...]:
    """Accept the ledger as it is: write a line, and store its current head.

    `ledger` must have no stored head of its own. Returns the contradictions that are accepted: the
    first line that is not trusted, and a stored head that is not in the ledger. Empty: all agreed,
    and nothing was changed.

    Raises EvidenceError where its own chain is broken, Untrusted and KeyUnusable where its key is
    not a trusted writer's, StorageError and StateUnavailable where the ledger or the stored head
    can't be reached, PromotionConflict while a promotion is under way.
    """
    check_writer(ledger.key, ledger.trust, place=ledger.location)
    believing = Ledger(ledger.state, key=ledger.key)
    with promotion_lock(believing, patience_s=PATIENCE_S):
        found = (_audit_problem(ledger), _contradiction(believing, stored))
        lost = tuple(filter(None, found))
        if not lost:
            return ()
        count = len(believing.entries())
        why = f"{reason} (the ledger ended at line {count}; {'; '.join(lost)})"
        believing.append(LedgerEntry(action="ledger_accepted", registry="", model="", reason=why))
        stored.replace(believing.head())
    return lost


def _audit_problem(ledger: Ledger) -> str | None:
    """Return why its lines are not trusted, or None."""
    try:
        audit_ledger(ledger)
    except Untrusted as error:
        return str(error)
    return None


def _contradiction(ledger: Ledger, stored: StoredHead) -> str | None:
    try:
        kept = stored.head()
    except EvidenceError as error:
        return str(error)
    ledger.entries()  # after the answer: what a running service added until then is no loss
    if kept is None or ledger.digest(kept.lines) == kept.sha256:
        return None
    return f"{stored.location} saw {kept.lines} lines on {kept.at}, the last with {kept.sha256}"


# Law: a ledger that holds a checkpoint's line with its digest holds all lines before it as they
# were then; nothing was removed or rewritten since.
class Checkpoint(Predicate):
    """The end of a ledger at one time."""

    type_uri: ClassVar[str] = "urn:parity-gate:checkpoint:v1"

    lines: Annotated[int, Field(ge=1)]
    head: Sha256
    """Of the last of these lines; through the chain, of all."""
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
                f"there is no line in the ledger {ledger.location}, so there is nothing to keep. "
                "Name the right one."
            )
        return cls(lines=head.lines, head=head.sha256, at=head.at)

    def signed(self, key: SigningKey) -> SignedStatement:
        """The statement. Raises KeyUnusable."""
        return SignedStatement.sign(self.about({"ledger": self.head}), key)

    def verify(self, ledger: Ledger) -> int:
        """Prove that the ledger holds all that it held then; gives how many lines came since.

        Raises PastChanged where it does not; else as `Ledger.verify`.
        """
        ledger.verify()
        fresh = Ledger(ledger.state)  # `ledger` may have read the lines long ago
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
            f"the checkpoint of {self.at} saw the ledger {ledger.location} with {self.lines} "
            f"lines, the last with digest {self.head}; now {what}. Restore the newest copy, and "
            "find out who writes there."
        )


def checkpoint_signers(signed: SignedStatement, *, trust: Trust) -> tuple[PublicKey, ...]:
    """Which trusted writers signed a checkpoint, however old it is. Raises Untrusted where none
    did that was trusted at its time and is not revoked."""
    at = Checkpoint.from_statement(signed, what="the checkpoint").at
    time = time_of(at)
    signers = () if time is None else signed.signers(trust.keys("writers", at=time))
    if not signers:
        raise Untrusted(
            f"the checkpoint of {at} is not signed by a key that was trusted as a writer then. "
            "Trust its key, if it is the right one: gate keys trust."
        )
    return signers
