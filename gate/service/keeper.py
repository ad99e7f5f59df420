"""Where the service keeps the head of its ledger: beside what is deployed.

In a place of its own, so that whoever can write the ledger's database does not write there, too.
One store belongs to one ledger; replicas may have a store each. Whoever read more lines than are
kept there has its word, and nobody takes it back.
"""

from __future__ import annotations

from pathlib import Path

from gate.attestation.keys import SigningKey
from gate.attestation.trust import Trust
from gate.ledger.head import HeadFile, Keeper
from gate.ledger.ledger import Ledger
from gate.ledger.opening import believe_by_default, require_writable
from gate.service.settings import Settings

HEAD_FILE = "ledger-head.json"


def kept_ledger(settings: Settings) -> Ledger:
    """The ledger of a service, with its keepers, to read. Raises ServiceError."""
    return Ledger(settings.state, keepers=keepers(settings.store))


def written_ledger(settings: Settings, trust: Trust | None) -> Ledger:
    """The same, to write as well. Without a trust it is believed by that of `settings.writers`.
    Raises KeyUnusable, PolicyError, and as `require_writable`."""
    ledger = kept_ledger(settings)
    ledger.key = SigningKey.load(settings.key) if settings.key is not None else None
    ledger.trust = trust
    if trust is None and settings.writers is not None:
        believe_by_default(ledger, Trust.of_file(settings.writers))
    require_writable(ledger)
    return ledger


def keepers(store: Path) -> tuple[Keeper, ...]:
    """The keepers of the ledger that belongs to this store."""
    return (HeadFile(store / HEAD_FILE, place=f"the store {store}"),)
