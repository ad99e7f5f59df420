"""Audit, checkpoints, acceptance of a rewrite, addresses of one registry."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Self
from weakref import WeakKeyDictionary

from pydantic import Field, ValidationError

from gate.errors import EvidenceError, PastChanged, Untrusted, first_line
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.ledger import (
    UNVOUCHED,
    Keeper,
    Ledger,
    check_writer,
    promotion_lock,
    proven,
    verify,
)
from gate.ledger.lock import PATIENCE_S
from gate.ledger.notes import Notes
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.statement import CamelCaseRecord, SignedStatement, Statement, resources
from gate.signing.trust import Trust, time_of
from gate.storage.digest import Digest, canonical_json
from gate.storage.record import Sha256
from gate.storage.workspace import in_workspace, split_identity

# A server and the database behind it, or a server's old and new name, are the same registry under
# two identities. Whoever knows says so once (`gate serve --same-registry`); the ledger has a line
# of it, so that promotions, rollbacks and the service agree, and nobody takes it back unseen: what
# was rolled back under the other address would be forgotten with it.


NOTE = "same registry"
"""What an older version's note is called: groups of addresses. It counts until a line says them."""

_Group = frozenset[str]


def same(ledger: Ledger, identity: str) -> frozenset[str]:
    """All identities of this registry, as `plain` writes them. Raises as `Ledger.entries`;
    EvidenceError and Untrusted for an older version's note, too."""
    name, workspace = split_identity(plain(identity))
    groups = [group for group in _groups(ledger) if name in group]
    return frozenset(in_workspace(each, workspace) for each in {name}.union(*groups))


def declare_addresses(ledger: Ledger, identity: str, others: Iterable[str]) -> None:
    """Write down that these are the same registry, if no line says so. What an older version kept
    goes with it, and is forgotten where it is damaged, or not believed. Raises as
    `Ledger.append`."""
    # Whole servers are the same; their workspaces are, too.
    wanted = frozenset(split_identity(plain(each))[0] for each in (identity, *others))
    written, groups = _written(ledger), [wanted]
    if not written:
        with contextlib.suppress(EvidenceError, Untrusted):
            groups += _kept(ledger)
    for group in _joined(groups):
        if len(group) > 1 and not any(group <= each for each in written):
            ledger.append(_line(identity, group))


def _line(identity: str, group: _Group) -> LedgerEntry:
    addresses = tuple(sorted(group))
    reason = f"these are one registry: {', '.join(addresses)}"
    return LedgerEntry(
        action="same_registry",
        registry=split_identity(plain(identity))[0],
        model="",
        addresses=addresses,
        reason=reason,
    )


def _groups(ledger: Ledger) -> Sequence[_Group]:
    return _written(ledger) or _kept(ledger)


_LOOKED_AT: WeakKeyDictionary[Ledger, tuple[tuple[LedgerEntry, ...], Sequence[_Group]]] = (
    WeakKeyDictionary()
)
"""By ledger: the lines that were looked through, and what they say."""


def _written(ledger: Ledger) -> Sequence[_Group]:
    """What lines say."""
    entries = ledger.entries()
    before, groups = _LOOKED_AT.get(ledger, ((), ()))
    if entries is before:
        return groups
    # Lines are objects of their own: others than those that were looked through were read anew.
    if len(before) > len(entries) or (before and entries[len(before) - 1] is not before[-1]):
        before, groups = (), ()
    found = [e.addresses for e in entries[len(before) :] if e.action == "same_registry"]
    if found:
        groups = _joined([*groups, *map(frozenset, found)])
    _LOOKED_AT[ledger] = (entries, groups)
    return groups


def _joined(groups: Iterable[_Group]) -> list[_Group]:
    """Those that have an address in common are one."""
    joined: list[_Group] = []
    for group in groups:
        others = [each for each in joined if not each & group]
        joined = [*others, group.union(*(each for each in joined if each & group))]
    return joined


def _kept(ledger: Ledger) -> Sequence[_Group]:
    again = "Say it again where it is needed: gate serve --same-registry."
    try:
        text = Notes(ledger).read(NOTE)
        return [frozenset(map(str, group)) for group in json.loads(text or "[]")]
    except Untrusted as error:
        raise Untrusted(f"{error} It says which addresses are one registry. {again}") from error
    except (ValueError, TypeError) as error:
        raise EvidenceError(
            f"the note {NOTE} in {ledger.place} is damaged: {error}. {again}"
        ) from error


# Law: each line is signed by a writer who was trusted at its time and is not revoked; or a later
# line of such a writer says that the past is right (`ledger_accepted`, `ledger_imported`). So lines
# of before there were keys, lines of a revoked key, and lines whose signature was lost count once a
# person has vouched for them, and not before.


_VOUCHING: tuple[Action, ...] = ("ledger_accepted", "ledger_imported")


@dataclass(frozen=True)
class Audit:
    """What was proven."""

    lines: int
    head: Digest | None
    """Of the last line; None: there is no line."""
    by_key: dict[str, int]
    """By the id of a trusted writer: how many lines it signed; nothing where nobody is trusted."""
    accepted: tuple[int, ...]
    """Numbers of the lines that only a later line vouches for."""


def audit_ledger(ledger: Ledger) -> Audit:
    """Prove chain and signatures of all lines, and that the keepers saw no other past.

    Raises as `Ledger.verify`; Untrusted for the first line that nobody vouches for.
    """
    ledger.verify()
    rows = ledger.rows()
    chain, entries = proven(rows, place=ledger.place)
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
        raise Untrusted(f"{ledger.place}:{number}: this line {doubt}. {UNVOUCHED}") from doubt
    return Audit(chain.lines, chain.digest(chain.lines), dict(by_key), tuple(accepted))


# It leaves a line in the ledger that names what was lost, or not believed. Signed by a trusted
# writer, it vouches for all lines before it.


def accept_rewrite(ledger: Ledger, keepers: Sequence[Keeper], *, reason: str) -> tuple[str, ...]:
    """Have all keepers keep where this ledger, which has none of its own, ends now, whatever they
    kept. Gives what some of them had kept that is not in it, and why one of its lines was not
    believed; nothing: all agreed, and nothing was changed.

    Raises EvidenceError where its own chain is broken, Untrusted and KeyUnusable where its key is
    no trusted writer's, StorageError and StateUnavailable where it, or a keeper, can't be asked
    now, PromotionConflict while a promotion is under way.
    """
    check_writer(ledger.key, ledger.trust, place=ledger.place)
    believing = Ledger(ledger.state, key=ledger.key)
    with promotion_lock(believing, patience_s=PATIENCE_S):
        found = (_doubt(ledger), *(_contradiction(believing, keeper) for keeper in keepers))
        lost = tuple(filter(None, found))
        if not lost:
            return ()
        count = len(believing.entries())
        why = f"{reason} (the ledger ended at line {count}; {'; '.join(lost)})"
        believing.append(LedgerEntry(action="ledger_accepted", registry="", model="", reason=why))
        for keeper in keepers:
            keeper.replace(believing.head())
    return lost


def _doubt(ledger: Ledger) -> str | None:
    """Why its lines are not believed; None: they are."""
    try:
        audit_ledger(ledger)
    except Untrusted as error:
        return str(error)
    return None


def _contradiction(ledger: Ledger, keeper: Keeper) -> str | None:
    try:
        kept = keeper.head()
    except EvidenceError as error:
        return str(error)
    ledger.entries()  # after the answer: what a running service added until then is no loss
    if kept is None or ledger.digest(kept.lines) == kept.sha256:
        return None
    return f"{keeper.place} saw {kept.lines} lines on {kept.at}, the last with {kept.sha256}"


# Law: a ledger that holds a checkpoint's line with its digest holds all lines before it as they
# were then; nothing was removed or rewritten since.


CHECKPOINT_TYPE = "urn:parity-gate:checkpoint:v1"


class Checkpoint(CamelCaseRecord):
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
