"""The ledger of the project, as `make repro` writes it: in `.gate/state.db`."""

from __future__ import annotations

from gate.ledger.ledger import Ledger, require_writable, verify_writer
from pipelines import paths, signing


def project_ledger(*, is_written: bool) -> Ledger:
    """With the key that signs what was measured, believed as `believe` says.

    Raises KeyUnusable, PolicyError, StorageError; if it `is_written`, Untrusted where nobody
    would believe the key.
    """
    keys = signing.local_keys()
    key = keys.signing_key()
    ledger = verify_writer(Ledger(paths.database(), key=key if is_written else None), keys)
    ledger.key = key
    if is_written:
        require_writable(ledger)
    return ledger
