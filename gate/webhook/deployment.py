"""Deploy: what `champion` rightly points at is what the store serves."""

from __future__ import annotations

from collections.abc import Sequence

from gate.deploy.deploy import Deployment, deploy
from gate.deploy.manifest import EXACT
from gate.deploy.source import Source
from gate.deploy.store import Store
from gate.errors import DigestMismatch
from gate.registry.desk import Desk
from gate.registry.examination import vouching
from gate.registry.ledger import Action, LedgerEntry
from gate.registry.port import CHAMPION, TAG_GOLDEN
from gate.webhook.guard import serving
from gate.webhook.port import Taken

_SAID = ("deployed", "not_deployed")


def deploy_champion(desk: Desk, store: Store) -> list[Taken]:
    """Deploy the champion, if the ledger put it there and it does not serve yet.

    A file that was refused is not fetched again for the same version; a fetch that broke off is.
    Raises the RegistryErrors and StorageError.
    """
    history, champion = desk.history(), desk.alias(CHAMPION)
    if champion is None or champion != serving(history):
        return []
    vouched = vouching(history, champion)
    if vouched is None or _settled(desk, store, history, vouched):
        return []
    try:
        done = _deploy(desk, store, vouched)
    except DigestMismatch as error:  # the violation is written down already
        return [_tell(desk, vouched, "refused", str(error))]
    return [_tell(desk, vouched, done.outcome, done.reason)]


def _settled(
    desk: Desk, store: Store, history: Sequence[LedgerEntry], vouched: LedgerEntry
) -> bool:
    """True if the store serves it and the ledger says so, or if it was refused."""
    about = (vouched.version, vouched.sha256)
    said = [entry for entry in history if entry.action in _SAID]
    if said and said[-1].action == "not_deployed" and (said[-1].version, said[-1].sha256) == about:
        return True
    deployed = [entry for entry in said if entry.action == "deployed"]
    if not deployed or (deployed[-1].version, deployed[-1].sha256) != about:
        return False
    live = store.live(desk.model)
    return live is not None and live.slots[EXACT].sha256 == vouched.sha256


def _deploy(desk: Desk, store: Store, vouched: LedgerEntry) -> Deployment:
    number, expected = vouched.version, vouched.sha256
    assert number is not None
    assert expected is not None
    golden = desk.registry.version(desk.model, number).tags.get(TAG_GOLDEN)
    source = Source(
        sha256=expected,
        fetch=lambda folder: desk.download(number, expected, folder, golden=golden),
        golden_required=golden is not None,
    )
    return deploy(store, desk.model, {EXACT: source})


def _tell(desk: Desk, vouched: LedgerEntry, outcome: str, reason: str) -> Taken:
    refused = outcome == "refused"
    action: Action = "not_deployed" if refused else "deployed"
    desk.write(action, reason, version=vouched.version, about=vouched)
    return Taken("deploy", "refused" if refused else "deployed", vouched.version, reason)
