"""Reconcile one model: guard, submission, reviews, deployment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gate.deploy.deploy import SlotSource, deploy, serves
from gate.deploy.store import EXACT, QUANTIZED, ModelStore
from gate.errors import EvidenceError, GateError, ResourceGone, Untrusted
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Keeper, Ledger, StoredHead, believe_by_default, require_writable
from gate.ledger.maintenance import declare_addresses
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.policy import Policy
from gate.records.layout import MAX_BYTES
from gate.records.layout import QUANTIZED as BESIDE
from gate.registry.alias import model_lock
from gate.registry.doubts import MismatchMemory
from gate.registry.eligibility import TrustFile, veto
from gate.registry.interface import CHAMPION, Registry
from gate.registry.registered_model import Reading, RegisteredModel
from gate.registry.reviews import ReviewSettings
from gate.registry.verify_release import ReadTrust, Terms, nobody, verify_release
from gate.registry.version_files import ExpectedDigests, twin_file
from gate.registry.version_page import Pages
from gate.sandbox.limits import SandboxLimits
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed, Kind, StepResult
from gate.service.settings import ServiceSettings
from gate.service.submissions import process_reviews, process_submission
from gate.signing.keys import SigningKey
from gate.signing.trust import Trust
from gate.storage.digest import Digest
from gate.storage.workspace import DEFAULT, ModelKey


def deploy_champion(
    model: RegisteredModel,
    store: ModelStore,
    policy: Policy,
    *,
    thoroughly: bool = False,
    trust: ReadTrust = nobody,
) -> list[StepResult]:
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
    if last and not refused and serves(store, model.key, slots, thoroughly=thoroughly):
        return []
    reason = _unsigned(vouched, history, terms)
    if reason is None:
        done = deploy(store, model.key, slots)
        if done.outcome != "refused":
            return [_tell(model, vouched, action="deployed", reason=done.reason)]
        reason = done.reason
    if refused and last is not None and last.reason == reason:
        return []
    return [_tell(model, vouched, action="not_deployed", reason=reason)]


def _unsigned(vouched: LedgerEntry, history: ModelHistory, terms: Terms | None) -> str | None:
    """Why nothing is deployed that was promoted before anybody signed; None where it was not, or
    may go without."""
    assert vouched.version is not None
    refuses = terms is not None and terms.trust is not None and terms.trust.unsigned == "refuse"
    if not refuses or not history.passed_before_signing(vouched.version):
        return None
    return (
        f"nobody signed version {vouched.version}: hand in a signed one, or let the service take "
        "what it finds (trust: unsigned: accept_existing)"
    )


def _rightful(
    model: RegisteredModel, champion: str | None, history: ModelHistory, *, terms: Terms | None
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
            vouched.version, ExpectedDigests.from_entry(vouched), self._judged, into=folder
        )
        if problem is not None:
            raise EvidenceError(f"version {vouched.version} is not deployed: {problem}")
        self._path = path
        return path

    def _judged(self, path: Path) -> tuple[Path, str | None]:
        """With what the terms have against it."""
        if self._terms is None:
            return path, None
        return path, verify_release(path, self._model, vouched=self._vouched, terms=self._terms)

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


def _tell(
    model: RegisteredModel, vouched: LedgerEntry, *, action: Action, reason: str
) -> StepResult:
    model.write(action, reason, version=vouched.version, about=vouched)
    outcome = "deployed" if action == "deployed" else "refused"
    return StepResult("deploy", outcome, vouched.version, reason)


# In a place of its own, so that whoever can write the ledger's database does not write there, too.
# One store belongs to one ledger; replicas may have a store each. Whoever read more lines than are
# kept there has its word, and nobody takes it back.


HEAD_FILE = "ledger-head.json"


def kept_ledger(settings: ServiceSettings) -> Ledger:
    """The ledger of a service, with its keepers, to read. Raises ServiceError."""
    return Ledger(settings.state, keepers=keepers(settings.store))


def written_ledger(settings: ServiceSettings, trust: Trust | None) -> Ledger:
    """The same, to write as well. Without a trust it is believed by that of `settings.writers`.
    Raises KeyUnusable, PolicyError, and as `require_writable`."""
    ledger = kept_ledger(settings)
    ledger.key = SigningKey.load(settings.key) if settings.key is not None else None
    ledger.trust = trust
    if trust is None and settings.writers is not None:
        believe_by_default(ledger, Trust.from_file(settings.writers))
    require_writable(ledger)
    return ledger


def keepers(store: Path) -> tuple[Keeper, ...]:
    """The keepers of the ledger that belongs to this store."""
    return (StoredHead(store / HEAD_FILE, place=f"the store {store}"),)


# One step that fails keeps no other from its work. Nothing here depends on what an event said. The
# registry and the ledger are read anew, so that lost, doubled, reordered and forged events end in
# the same state.


_log = logging.getLogger(__name__)

_RECHECK_S = 600.0
"""After which the bytes behind `champion` are downloaded and hashed anew, without any event."""


class Reconciler:
    """Implements `gate.service.monitoring.Reconcile`."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        policy: Policy,
        *,
        store: ModelStore,
        trust: TrustFile | None = None,
        reading: Reading | None = None,
    ) -> None:
        """`trust`: whose word counts; None: nobody's, and what was handed in is not judged.
        `reading`: of a service, in all looks; None: each look is on its own, and confirms what
        came wrong, or does not, by itself."""
        self._registry = registry
        self._ledger = ledger
        self._policy = policy
        self._store = store
        self._trust = trust or TrustFile(None)
        self._reading = reading
        self._proven: dict[str, tuple[str | None, float]] = {}
        """By model: the champion whose bytes were looked at, and when."""
        self._workspaces: dict[str, Registry] = {}
        self._pages = Pages()
        self._doubts: Counter[str] = Counter()
        """By model: how often what is deployed was found damaged."""

    def __call__(self, model: str, *, cause: str) -> Sequence[StepResult | Failed]:
        """As `Reconcile`. Every action is a line in the ledger, with `cause`. `model`: as the
        settings name it, with its workspace.

        Raises ResourceGone where the gate passed something of a model that is no more.
        """
        reading, key = self._reading or Reading(), ModelKey.parse(model)
        registry = self._registry
        if key.workspace is not None:
            registry = self._workspaces.setdefault(
                key.workspace, registry.in_workspace(key.workspace)
            )
        registered = RegisteredModel(
            registry,
            self._ledger,
            key.name,
            cause=cause,
            reviews=ReviewSettings.of(self._policy),
            reading=reading,
        )
        self._trust.follow(self._ledger)
        history = registered.history()
        self._ledger.verify()  # also where it did not change: others may have seen more of it
        if history.passed_any and not registry.has_model(key.name):
            raise ResourceGone(
                f"{registry.identity} has no registered model {key.name} any more, and the "
                f"ledger {self._ledger.place} tells of it: it was deleted or renamed. What is "
                "deployed stays. Give it its name back, or take it off the service's models."
            )
        with model_lock(registered, quietly=True):
            thoroughly = self._is_due(model, registered.alias(CHAMPION))
            doubts, policy, trust = self._doubts[model], self._policy, self._trust
            done = [
                *_step(
                    "guard",
                    lambda: guard_champion(registered, policy, thoroughly=thoroughly, trust=trust),
                ),
                *_step("hand_in", lambda: process_submission(registered, policy, trust=trust)),
                *_step("review", lambda: process_reviews(registered, policy, trust=trust)),
                *_step(
                    "deploy",
                    lambda: deploy_champion(
                        registered, self._store, policy, thoroughly=thoroughly, trust=trust
                    ),
                ),
            ]
            failed = {one.kind for one in done if isinstance(one, Failed)}
            # What was found damaged meanwhile is for the next look.
            if thoroughly and failed <= {"hand_in", "review"} and doubts == self._doubts[model]:
                self._proven[model] = (registered.alias(CHAMPION), time.monotonic())
            with contextlib.suppress(GateError):  # of the ledger: the steps above tell of it
                self._pages.follow(registered, thoroughly=thoroughly)
                trust.warn_of(model, registered.history())
        return done

    def doubt(self, model: str) -> None:
        """What is deployed was found damaged: the next look is thorough. From any thread."""
        self._doubts[model] += 1
        self._proven.pop(model, None)

    def _is_due(self, model: str, champion: str | None) -> bool:
        proven, at = self._proven.get(model, (None, 0.0))
        return proven != champion or time.monotonic() - at > _RECHECK_S


def _step(
    kind: Kind, step: Callable[[], Iterable[StepResult | Failed]]
) -> Iterator[StepResult | Failed]:
    try:
        yield from step()
    except Exception as error:
        yield Failed(kind, error)


def reconciler(settings: ServiceSettings, *, comes_again: bool = False) -> Reconciler:
    """The reconciler of a command; of a service if it `comes_again`: that waits for nothing under
    the lock, and remembers. Raises PolicyError, and as `written_ledger`."""
    policy = settings.policy_in_force()
    # The names of models say which workspace, and those of `default` do not.
    registry = MlflowRegistry(settings.tracking_uri, workspace=DEFAULT)
    trust = TrustFile.named(settings.trust, policy=settings.policy)
    # A service does not start with a trust that can't be read.
    ledger = written_ledger(settings, trust())
    if settings.same_registry:
        try:
            declare_addresses(ledger, registry.identity, settings.same_registry)
        except (EvidenceError, Untrusted) as error:
            # Each look says so, too; what is deployed is served meanwhile.
            _log.warning("not written down, say it again later: --same-registry: %s", error)
    limits = SandboxLimits.of_service(settings.time_limit_s, settings.memory_limit)
    doubts = MismatchMemory(settings.confirm_s, wait=None) if comes_again else MismatchMemory()
    reading = Reading(limits, doubts)
    store = ModelStore(settings.store)
    return Reconciler(registry, ledger, policy, store=store, trust=trust, reading=reading)
