"""Deploy: what `champion` rightly points at is what the store serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gate.deploy.deploy import deploy, serves
from gate.deploy.manifest import EXACT, QUANTIZED
from gate.deploy.source import SlotSource
from gate.deploy.store import Store
from gate.errors import EvidenceError
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import History
from gate.policy.policy import Policy
from gate.registry.may_serve import veto
from gate.registry.port import CHAMPION
from gate.registry.proof import ExpectedFiles
from gate.registry.registered_model import RegisteredModel
from gate.registry.terms import ReadTrust, Terms, judge, nobody
from gate.registry.twin import QUANTIZED as BESIDE
from gate.registry.twin import twin_file
from gate.service.port import Taken
from gate.storage.digest import Digest
from gate.storage.quota import MAX_BYTES


def deploy_champion(
    model: RegisteredModel,
    store: Store,
    policy: Policy,
    *,
    thoroughly: bool = False,
    trust: ReadTrust = nobody,
) -> list[Taken]:
    """Deploy the champion, if the ledger put it there and it does not serve yet. What was not
    deployed before must pass by this policy and this trust.

    `thoroughly`: hash what serves, and bring it anew where it is damaged; try a file that was
    refused here once more. Raises the RegistryErrors, EvidenceError and StorageError.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    terms = None if champion is None else Terms.of(policy, history, champion, trust=trust)
    vouched = _rightful(model, champion, history, terms=terms)
    if champion is None or vouched is None:
        return []
    last, slots = history.deployment_of(vouched), _slots(model, vouched, terms)
    refused = last is not None and last.action == "not_deployed"
    if refused and not thoroughly:
        return []
    if last and not refused and serves(store, model.name, slots, thoroughly=thoroughly):
        return []
    reason = _unsigned(vouched, history, terms)
    if reason is None:
        done = deploy(store, model.name, slots)
        if done.outcome != "refused":
            return [_tell(model, vouched, action="deployed", reason=done.reason)]
        reason = done.reason
    if refused and last is not None and last.reason == reason:
        return []
    return [_tell(model, vouched, action="not_deployed", reason=reason)]


def _unsigned(vouched: LedgerEntry, history: History, terms: Terms | None) -> str | None:
    """Why nothing is deployed that was promoted before anybody signed; None where it was not, or
    may go without."""
    assert vouched.version is not None
    refuses = terms is not None and terms.trust is not None and terms.trust.unsigned == "refuse"
    if not refuses or not history.predates_signing(vouched.version):
        return None
    return (
        f"nobody signed version {vouched.version}: hand in a signed one, or let the service take "
        "what it finds (trust: unsigned: accept_existing)"
    )


def _rightful(
    model: RegisteredModel, champion: str | None, history: History, *, terms: Terms | None
) -> LedgerEntry | None:
    """The line that vouches for the champion; None where it is not there rightly."""
    if champion is None or champion != history.serving:
        return None
    examined = veto(model, champion, history=history, terms=terms)
    return examined.vouched if examined.problem is None else None


class _Download:
    """One download of a version, proven and then judged by the terms before anything else reads it,
    of which every slot takes its files."""

    def __init__(self, model: RegisteredModel, vouched: LedgerEntry, terms: Terms | None) -> None:
        self._model = model
        self._vouched = vouched
        self._terms = terms
        self._path: Path | None = None
        """The exact file, in the folder of whoever came first."""

    def exact(self, folder: Path) -> Path:
        """Download into `folder`. Raises the RegistryErrors, DigestMismatch, StorageError;
        EvidenceError where the terms do not allow it."""
        vouched = self._vouched
        assert vouched.version is not None
        path, problem = self._model.read(
            vouched.version, ExpectedFiles.of(vouched), self._judged, into=folder
        )
        if problem is not None:
            raise EvidenceError(f"version {vouched.version} is not deployed: {problem}")
        self._path = path
        return path

    def _judged(self, path: Path) -> tuple[Path, str | None]:
        """With what the terms have against it."""
        if self._terms is None:
            return path, None
        return path, judge(path, self._model, vouched=self._vouched, terms=self._terms)

    def twin(self, folder: Path) -> Path:
        """Move what is beside the exact file into `folder`, which is on the same file system.

        Raises EvidenceError where it is not whole.
        """
        path = self._path or self.exact(folder)
        beside = path.parent / BESIDE
        name = twin_file(beside).relative_to(beside)
        return beside.rename(folder / BESIDE) / name


def _slots(
    model: RegisteredModel, vouched: LedgerEntry, terms: Terms | None
) -> dict[str, SlotSource]:
    """What the line vouches for; the exact file comes first."""
    assert vouched.sha256 is not None
    download = _Download(model, vouched, terms)
    exact = _source(vouched.sha256, download.exact, golden=vouched.golden_sha256)
    exact = replace(exact, preprocess_sha256=vouched.preprocess_sha256)
    slots = {EXACT: exact}
    if vouched.twin is not None:
        golden = vouched.twin.golden_sha256
        slots[QUANTIZED] = _source(vouched.twin.sha256, download.twin, golden=golden)
    return {slot: replace(source, limits=model.reading.limits) for slot, source in slots.items()}


def _source(sha256: Digest, fetch: Callable[[Path], Path], *, golden: Digest | None) -> SlotSource:
    # Each download has its own limit; one that passed it is a mismatch like others.
    return SlotSource(
        sha256,
        fetch,
        golden_sha256=golden,
        golden_required=golden is not None,
        max_bytes=2 * MAX_BYTES,
    )


def _tell(model: RegisteredModel, vouched: LedgerEntry, *, action: Action, reason: str) -> Taken:
    model.write(action, reason, version=vouched.version, about=vouched)
    outcome = "deployed" if action == "deployed" else "refused"
    return Taken("deploy", outcome, vouched.version, reason)
