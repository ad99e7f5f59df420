"""Deploy: what `champion` rightly points at is what the store serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gate.deploy.deploy import Deployment, deploy
from gate.deploy.manifest import EXACT, QUANTIZED, Slot
from gate.deploy.source import SlotSource
from gate.deploy.staging import prove
from gate.deploy.store import Store
from gate.errors import DigestMismatch
from gate.registry.ledger import Action, LedgerEntry
from gate.registry.may_serve import veto
from gate.registry.port import CHAMPION
from gate.registry.proof import Beside
from gate.registry.registered_model import RegisteredModel
from gate.registry.twin import QUANTIZED as BESIDE
from gate.registry.twin import twin_file
from gate.service.port import Taken
from gate.storage.digest import Digest


def deploy_champion(
    model: RegisteredModel, store: Store, *, thoroughly: bool = False
) -> list[Taken]:
    """Deploy the champion, if the ledger put it there and it does not serve yet.

    `thoroughly`: hash what serves, and bring it anew where it is damaged; try a file that was
    refused here once more. Raises the RegistryErrors and StorageError.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    if champion is None or champion != history.serving:
        return []
    vouched = history.vouching_for(champion)
    if vouched is None or veto(model, champion, history=history).problem is not None:
        return []
    last = history.deployment_of(vouched)
    refused = last is not None and last.action == "not_deployed"
    waits = refused and not thoroughly
    if waits or (last and not refused and _serves(model, store, vouched, thoroughly=thoroughly)):
        return []
    done = _deploy(model, store, vouched)
    if done.outcome != "refused":
        return [_tell(model, vouched, "deployed", done.reason)]
    with contextlib.suppress(DigestMismatch):  # which is written down as a violation
        _prove(model, vouched)
    if refused and last is not None and last.reason == done.reason:
        return []
    return [_tell(model, vouched, "not_deployed", done.reason)]


def _serves(
    model: RegisteredModel, store: Store, vouched: LedgerEntry, *, thoroughly: bool
) -> bool:
    live = store.live(model.name)
    wanted = {EXACT: (vouched.sha256, vouched.golden_sha256)}
    if vouched.twin is not None:
        wanted[QUANTIZED] = (vouched.twin.sha256, vouched.twin.golden_sha256)
    if live is None or live.slots.keys() != wanted.keys():
        return False
    spec = live.slots[EXACT].preprocessing
    if vouched.preprocess_sha256 not in (None, spec and spec.digest()):
        return False
    if not all(_is(live.slots[slot], *digests) for slot, digests in wanted.items()):
        return False
    return not thoroughly or all(prove(store, slot) is None for slot in live.slots.values())


def _is(slot: Slot, sha256: Digest | None, golden: Digest | None) -> bool:
    seen = slot.golden.sha256 if slot.golden is not None else None
    return slot.sha256 == sha256 and golden in (None, seen)


def _deploy(model: RegisteredModel, store: Store, vouched: LedgerEntry) -> Deployment:
    number, expected = vouched.version, vouched.sha256
    assert number is not None
    assert expected is not None

    def fetch(folder: Path) -> Path:
        return model.registry.download(model.name, number, folder)

    def fetch_twin(folder: Path) -> Path:
        return twin_file(fetch(folder).parent / BESIDE)

    exact = _source(expected, vouched.golden_sha256, fetch)
    slots = {EXACT: replace(exact, preprocess_sha256=vouched.preprocess_sha256)}
    if vouched.twin is not None:
        slots[QUANTIZED] = _source(vouched.twin.sha256, vouched.twin.golden_sha256, fetch_twin)
    return deploy(store, model.name, slots)


def _source(sha256: Digest, golden: Digest | None, fetch: Callable[[Path], Path]) -> SlotSource:
    return SlotSource(sha256, fetch, golden_sha256=golden, golden_required=golden is not None)


def _prove(model: RegisteredModel, vouched: LedgerEntry) -> None:
    assert vouched.version is not None
    assert vouched.sha256 is not None
    model.prove(vouched.version, vouched.sha256, beside=Beside.of(vouched))


def _tell(model: RegisteredModel, vouched: LedgerEntry, action: Action, reason: str) -> Taken:
    model.write(action, reason, version=vouched.version, about=vouched)
    outcome = "deployed" if action == "deployed" else "refused"
    return Taken("deploy", outcome, vouched.version, reason)
