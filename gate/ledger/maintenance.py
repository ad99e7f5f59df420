"""Which addresses are one registry: version numbers mean nothing without the registry.

A server and the database behind it, or a server's old and new name, are the same registry under two
identities. Whoever knows says so once (`gate serve --same-registry`); the ledger has a line of it,
so that promotions, rollbacks and the service agree, and nobody takes it back unseen: what was
rolled back under the other address would be forgotten with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from gate.errors import EvidenceError, Untrusted
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.ledger.notes import Notes
from gate.storage.redaction import redacted

NOTE = "same registry"
"""What an older version's note is called: groups of addresses. It counts until a line says them."""
_PORTS = {"http": 80, "https": 443}
_Group = frozenset[str]


@functools.lru_cache(maxsize=256)
def plain(address: str) -> str:
    """An identity without what makes no difference: user, trailing slash, case of the host."""
    text = redacted(address).rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        return text
    port = f":{parts.port}" if parts.port not in (None, _PORTS[parts.scheme]) else ""
    return f"{parts.scheme}://{parts.hostname.lower()}{port}{parts.path}"


def same(ledger: Ledger, identity: str) -> frozenset[str]:
    """All identities of this registry, as `plain` writes them. Raises as `Ledger.entries`;
    EvidenceError and Untrusted for an older version's note, too."""
    name = plain(identity)
    groups = [group for group in _groups(ledger) if name in group]
    return frozenset({name}.union(*groups))


def declare(ledger: Ledger, identity: str, others: Iterable[str]) -> None:
    """Write down that these are the same registry, if no line says so. What an older version kept
    goes with it, and is forgotten where it is damaged, or not believed. Raises as
    `Ledger.append`."""
    wanted = frozenset({plain(identity), *(plain(other) for other in others)})
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
        action="same_registry", registry=plain(identity), model="", addresses=addresses,
        reason=reason,
    )  # fmt: skip


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
