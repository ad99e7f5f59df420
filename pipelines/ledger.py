"""The project's ledger in `.gate/state.db`, which `make repro` writes."""

from __future__ import annotations

from gate.ledger.ledger import Ledger, require_writable, verify_writer
from pipelines import paths, signing


def project_ledger(*, is_written: bool) -> Ledger:
    """Open the ledger with the key that signs measurements; the project's own key is trusted.

    Raises KeyUnusable, PolicyError, StorageError; if `is_written`, also Untrusted if the trust does
    not accept the key.
    """
    keys = signing.local_keys()
    key = keys.signing_key()
    ledger = verify_writer(Ledger(paths.database(), key=key if is_written else None), keys)
    ledger.key = key
    if is_written:
        require_writable(ledger)
    return ledger
