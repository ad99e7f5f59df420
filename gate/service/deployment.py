"""Deploy: what `champion` rightly points at is what the store serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gate.deploy.deploy import deploy, serves
from gate.deploy.manifest import EXACT, QUANTIZED
from gate.deploy.source import SlotSource
from gate.deploy.store import Store
from gate.errors import DigestMismatch
from gate.registry.history import History
from gate.registry.ledger import Action, LedgerEntry
from gate.registry.may_serve import veto
from gate.registry.port import CHAMPION
from gate.registry.proof import ExpectedFiles, prove
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
    refused here once more. Raises the RegistryErrors, EvidenceError and StorageError.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    vouched = _rightful(model, champion, history)
    if champion is None or vouched is None:
        return []
    last, slots = history.deployment_of(vouched), _slots(model, champion, vouched)
    refused = last is not None and last.action == "not_deployed"
    if refused and not thoroughly:
        return []
    if last and not refused and serves(store, model.name, slots, thoroughly=thoroughly):
        return []
    done = deploy(store, model.name, slots)
    if done.outcome != "refused":
        return [_tell(model, vouched, action="deployed", reason=done.reason)]
    with contextlib.suppress(DigestMismatch):  # which is written down as a violation
        model.prove(champion, ExpectedFiles.of(vouched))
    if refused and last is not None and last.reason == done.reason:
        return []
    return [_tell(model, vouched, action="not_deployed", reason=done.reason)]


def _rightful(model: RegisteredModel, champion: str | None, history: History) -> LedgerEntry | None:
    """The line that vouches for the champion; None where it is not there rightly."""
    if champion is None or champion != history.serving:
        return None
    examined = veto(model, champion, history=history)
    return examined.vouched if examined.problem is None else None


class _Download:
    """One download of a version, proven before it is read, of which every slot takes its files."""

    def __init__(self, model: RegisteredModel, vouched: LedgerEntry, *, number: str) -> None:
        self._model = model
        self._number = number
        self._expected = ExpectedFiles.of(vouched)
        self._path: Path | None = None
        """The exact file, in the folder of whoever came first."""

    def exact(self, folder: Path) -> Path:
        """Download into `folder`. Raises the RegistryErrors, DigestMismatch, StorageError."""
        registry, name = self._model.registry, self._model.name
        self._path = registry.download(name, self._number, folder)
        prove(self._path, self._expected, what=f"version {self._number} of {name}")
        return self._path

    def twin(self, folder: Path) -> Path:
        """Move what is beside the exact file into `folder`, which is on the same file system.

        Raises EvidenceError where it is not whole.
        """
        path = self._path or self.exact(folder)
        beside = path.parent / BESIDE
        name = twin_file(beside).relative_to(beside)
        return beside.rename(folder / BESIDE) / name


def _slots(model: RegisteredModel, number: str, vouched: LedgerEntry) -> dict[str, SlotSource]:
    """What the line vouches for; the exact file comes first."""
    assert vouched.sha256 is not None
    download = _Download(model, vouched, number=number)
    exact = _source(vouched.sha256, download.exact, golden=vouched.golden_sha256)
    slots = {EXACT: replace(exact, preprocess_sha256=vouched.preprocess_sha256)}
    if vouched.twin is not None:
        golden = vouched.twin.golden_sha256
        slots[QUANTIZED] = _source(vouched.twin.sha256, download.twin, golden=golden)
    return slots


def _source(sha256: Digest, fetch: Callable[[Path], Path], *, golden: Digest | None) -> SlotSource:
    return SlotSource(sha256, fetch, golden_sha256=golden, golden_required=golden is not None)


def _tell(model: RegisteredModel, vouched: LedgerEntry, *, action: Action, reason: str) -> Taken:
    model.write(action, reason, version=vouched.version, about=vouched)
    outcome = "deployed" if action == "deployed" else "refused"
    return Taken("deploy", outcome, vouched.version, reason)
