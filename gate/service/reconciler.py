"""Reconcile one model: guard, submission, reviews, deployment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gate.deploy.deploy import SlotSource, deploy, is_serving
from gate.deploy.store import EXACT, QUANTIZED, ModelStore
from gate.errors import EvidenceError, GateError, ResourceGone, Untrusted
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger, StoredHead, require_writable, set_default_trust
from gate.ledger.maintenance import declare_addresses
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.policy import Policy
from gate.records.layout import MAX_BYTES
from gate.records.layout import QUANTIZED as TWIN_FOLDER
from gate.registry.alias import model_lock
from gate.registry.eligibility import TrustFile, veto
from gate.registry.interface import CHAMPION, Registry
from gate.registry.registered_model import MismatchMemory, Reading, RegisteredModel
from gate.registry.reviews import ReviewSettings
from gate.registry.verify_release import ReadTrust, Terms, judge_version, no_trust
from gate.registry.version_files import ExpectedDigests, twin_file
from gate.registry.version_page import PageUpdater
from gate.sandbox.limits import SandboxLimits
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed, Kind, StepResult
from gate.service.replay import ReplayState, replay_golden
from gate.service.settings import ServiceSettings
from gate.service.submissions import process_reviews, process_submission
from gate.signing.keys import SigningKey
from gate.signing.trust import Trust
from gate.storage.workspace import DEFAULT, ModelKey


def deploy_champion(
    model: RegisteredModel,
    store: ModelStore,
    policy: Policy,
    *,
    thoroughly: bool = False,
    trust: ReadTrust = no_trust,
) -> list[StepResult]:
    """Deploy the champion, if the gate promoted it and it is not deployed yet.

    A version that was not deployed before must pass this policy and this trust. `thoroughly`: hash
    the deployed files, download damaged ones again, and retry a refused file. Raises RegistryError,
    EvidenceError, StorageError.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    terms = None if champion is None else Terms.from_history(policy, history, champion, trust=trust)
    entry = _approving_entry(model, champion, history, terms=terms)
    if champion is None or entry is None:
        return []
    last, slots = history.deployment_of(entry), _slots(model, entry, terms)
    refused = last is not None and last.action == "not_deployed"
    failed = last is not None and last.action == "replay_failed"  # until the next promotion
    if failed or (refused and not thoroughly):
        return []
    if last and not refused and is_serving(store, model.key, slots, thoroughly=thoroughly):
        return []
    reason = _unsigned_problem(entry, history, terms)
    if reason is None:
        deployment = deploy(store, model.key, slots)
        if deployment.outcome != "refused":
            return [_record_outcome(model, entry, action="deployed", reason=deployment.reason)]
        reason = deployment.reason
    if refused and last is not None and last.reason == reason:
        return []
    return [_record_outcome(model, entry, action="not_deployed", reason=reason)]


def _unsigned_problem(entry: LedgerEntry, history: ModelHistory, terms: Terms | None) -> str | None:
    """Return why an unsigned version is not deployed; None if signed or accepted by the trust."""
    assert entry.version is not None
    refuses = terms is not None and terms.trust is not None and terms.trust.unsigned == "refuse"
    if not refuses or not history.passed_before_signing(entry.version):
        return None
    return (
        f"version {entry.version} is not signed: submit a signed one, or let the service take "
        "what it finds (trust: unsigned: accept_existing)"
    )


def _approving_entry(
    model: RegisteredModel, champion: str | None, history: ModelHistory, *, terms: Terms | None
) -> LedgerEntry | None:
    """Return the entry that approves the champion; None if the ledger does not approve it."""
    if champion is None or champion != history.serving:
        return None
    eligibility = veto(model, champion, history=history, terms=terms)
    return eligibility.entry if eligibility.problem is None else None


class _Download:
    """A shared download of a version for all slots, verified and judged before it is used."""

    def __init__(self, model: RegisteredModel, entry: LedgerEntry, terms: Terms | None) -> None:
        self._model = model
        self._entry = entry
        self._terms = terms
        self._path: Path | None = None
        """The exact file after the download."""

    def exact(self, folder: Path) -> Path:
        """Download into `folder`. Raises RegistryError, DigestMismatch, StorageError, and
        EvidenceError if the terms do not allow the version."""
        entry = self._entry
        assert entry.version is not None
        judge = partial(judge_version, model=self._model, entry=entry, terms=self._terms)
        path, problem = self._model.read(
            entry.version,
            ExpectedDigests.from_entry(entry),
            lambda path: (path, judge(path)),
            into=folder,
        )
        if problem is not None:
            raise EvidenceError(f"version {entry.version} is not deployed: {problem}")
        self._path = path
        return path

    def twin(self, folder: Path) -> Path:
        """Move the twin's files into `folder` on the same file system; return the path of the file.

        Raises EvidenceError if the files are incomplete.
        """
        path = self._path or self.exact(folder)
        source = path.parent / TWIN_FOLDER
        name = twin_file(source).relative_to(source)
        return source.rename(folder / TWIN_FOLDER) / name


def _slots(
    model: RegisteredModel, entry: LedgerEntry, terms: Terms | None
) -> dict[str, SlotSource]:
    """Return the slots that the ledger entry approves, the exact file first."""
    assert entry.sha256 is not None
    download, twin = _Download(model, entry, terms), entry.twin
    # Downloads already have a size limit; exceeding it is a mismatch.
    source = partial(SlotSource, max_bytes=2 * MAX_BYTES, limits=model.reading.limits)
    slots = {
        EXACT: source(
            entry.sha256,
            download.exact,
            golden_sha256=entry.golden_sha256,
            golden_required=entry.golden_sha256 is not None,
            preprocess_sha256=entry.preprocess_sha256,
        )
    }
    if twin is not None:
        slots[QUANTIZED] = source(
            twin.sha256,
            download.twin,
            golden_sha256=twin.golden_sha256,
            golden_required=twin.golden_sha256 is not None,
        )
    return slots


def _record_outcome(
    model: RegisteredModel, entry: LedgerEntry, *, action: Action, reason: str
) -> StepResult:
    model.write(action, reason, version=entry.version, about=entry)
    outcome = "deployed" if action == "deployed" else "refused"
    return StepResult("deploy", outcome, entry.version, reason)


# The head is stored outside the ledger's database, so that a user with write access to the database
# can't change both. A store belongs to one ledger; each replica may have a separate store. Only a
# longer head replaces the stored one.
HEAD_FILE = "ledger-head.json"


def open_ledger(
    settings: ServiceSettings, trust: Trust | None = None, *, key: SigningKey | None = None
) -> Ledger:
    """Return the service's ledger with its stored head. `trust`: None for that of
    `settings.writers`. Raises ServiceError, PolicyError, Untrusted."""
    ledger = Ledger(settings.state, stored_head=stored_head(settings.store), key=key, trust=trust)
    if trust is None and settings.writers is not None:
        set_default_trust(ledger, Trust.from_file(settings.writers))
    return ledger


def stored_head(store: Path) -> StoredHead:
    """Return the stored position of the ledger's end."""
    return StoredHead(store / HEAD_FILE, location=f"the store {store}")


# A failed step does not block the others. Nothing depends on the content of an event: registry and
# ledger are read again, so that lost, repeated, reordered and forged events lead to the same state.
_log = logging.getLogger(__name__)

_RECHECK_S = 600.0
"""Interval for downloading and hashing the champion's file again without an event."""


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
        """Create the reconciler.

        `trust`: reads the trusted keys; None: no key is trusted, and submissions are not judged.
        `reading`: shared by all reconciles of a service; None: each one must confirm a wrong
        download itself.
        """
        self._registry = registry
        self._ledger = ledger
        self._policy = policy
        self._store = store
        self._trust = trust or TrustFile(None)
        self._reading = reading
        self._proven: dict[str, tuple[str | None, float]] = {}
        """By model: the champion with verified bytes, and the time of the verification."""
        self._workspaces: dict[str, Registry] = {}
        self._pages = PageUpdater()
        self._replays: dict[str, ReplayState] = {}
        """By model: the state of replaying the golden vectors of the last release."""
        self._damaged: set[str] = set()
        """The models whose deployed files were reported as damaged since their last reconcile."""

    def __call__(self, model: str, *, cause: str) -> Sequence[StepResult | Failed]:
        """Reconcile one model; see `Reconcile`.

        Every action is written to the ledger, with `cause`. `model`: the name in the settings, with
        its workspace.

        Raises ResourceGone if the ledger has a passed version of a model that no longer exists.
        """
        registered = self._registered_model(model, cause=cause)
        self._trust.follow(self._ledger)
        history = registered.history()
        self._ledger.verify()  # even if unchanged: the stored head may show that it was truncated
        if history.passed_any and not registered.registry.has_model(registered.name):
            raise ResourceGone(
                f"{registered.registry.identity} no longer has a registered model "
                f"{registered.name}, but the ledger {self._ledger.location} has entries about it: "
                "it was deleted or renamed. The deployed release stays. Restore its name or remove "
                "it from the service's models."
            )
        with model_lock(registered, quietly=True):
            champion = registered.alias(CHAMPION)
            proven, proven_at = self._proven.get(model, (None, 0.0))
            is_due = proven != champion or time.monotonic() - proven_at > _RECHECK_S
            thoroughly = is_due or model in self._damaged
            if thoroughly:
                self._proven.pop(model, None)
                self._damaged.discard(model)  # damage that is reported from now on is kept
            results = list(self._run_steps(registered, thoroughly=thoroughly))
            if thoroughly and not any(map(_is_unproven, results)):
                self._proven[model] = (registered.alias(CHAMPION), time.monotonic())
            with contextlib.suppress(GateError):  # the steps above already report ledger errors
                self._pages.follow(registered, thoroughly=thoroughly)
                self._trust.warn_of(model, registered.history())
        return results

    def _registered_model(self, model: str, *, cause: str) -> RegisteredModel:
        """Return the registered model of this key, in the registry of its workspace."""
        key, registry = ModelKey.parse(model), self._registry
        if key.workspace is not None:
            registry = self._workspaces.setdefault(
                key.workspace, registry.in_workspace(key.workspace)
            )
        return RegisteredModel(
            registry,
            self._ledger,
            key.name,
            cause=cause,
            reviews=ReviewSettings.from_policy(self._policy),
            reading=self._reading or Reading(),
        )

    def _run_steps(
        self, model: RegisteredModel, *, thoroughly: bool
    ) -> Iterator[StepResult | Failed]:
        """Run all steps. A step that fails keeps what it yielded before, and the next one runs."""
        policy, store, trust = self._policy, self._store, self._trust
        steps: dict[Kind, Callable[[], Iterable[StepResult | Failed]]] = {
            "guard": partial(guard_champion, model, policy, thoroughly=thoroughly, trust=trust),
            "hand_in": partial(process_submission, model, policy, trust=trust),
            "review": partial(process_reviews, model, policy, trust=trust),
            "deploy": partial(
                deploy_champion, model, store, policy, thoroughly=thoroughly, trust=trust
            ),
            "replay": partial(self._replay, model, thoroughly=thoroughly),
        }
        for kind, step in steps.items():
            try:
                yield from step()
            except Exception as error:
                yield Failed(kind, error)

    def _replay(self, model: RegisteredModel, *, thoroughly: bool) -> list[StepResult | Failed]:
        """Replay the golden vectors of a new release; of an older one only `thoroughly`."""
        if self._policy.after_deploy != "replay_golden":
            return []
        release = self._store.last_release(model.key)
        state = self._replays.get(model.key)
        if state is None or state.release != release:
            state = self._replays[model.key] = ReplayState(release)
        if state.is_complete and not thoroughly and not state.suspects:
            return []
        limits = model.reading.limits
        results = replay_golden(model, self._store, self._policy, state=state, limits=limits)
        state.is_complete |= not results
        return results

    def report_damage(self, model: str) -> None:
        """Report damaged deployed files, so that the next reconcile is thorough.

        Can be called from any thread.
        """
        self._damaged.add(model)


def _is_unproven(result: StepResult | Failed) -> bool:
    """Return whether the champion's or the deployed files were not verified because of a result."""
    if isinstance(result, Failed):
        return result.kind in ("guard", "deploy")
    return (result.kind, result.outcome) == ("deploy", "refused")


def reconciler(settings: ServiceSettings, *, is_service: bool = False) -> Reconciler:
    """Return a reconciler. `is_service`: for a service, which remembers mismatches between calls
    instead of waiting under the lock. Raises KeyUnusable, PolicyError, Untrusted."""
    policy = settings.policy_in_force()
    # Model keys name the workspace, except for `default`.
    registry = MlflowRegistry(settings.tracking_uri, workspace=DEFAULT)
    trust = TrustFile.named(settings.trust, policy=settings.policy)
    # A service does not start with a trust that can't be read.
    key = SigningKey.load(settings.key) if settings.key is not None else None
    ledger = open_ledger(settings, trust(), key=key)
    require_writable(ledger)
    if settings.same_registry:
        try:
            declare_addresses(ledger, registry.identity, settings.same_registry)
        except (EvidenceError, Untrusted) as error:
            # Each reconcile also logs this error; the deployed release is still served.
            _log.warning("--same-registry was not recorded, restart to retry: %s", error)
    limits = SandboxLimits.for_service(settings.time_limit_s, settings.memory_limit)
    memory = MismatchMemory(settings.confirm_s, wait=None) if is_service else MismatchMemory()
    reading = Reading(limits, memory)
    store = ModelStore(settings.store)
    return Reconciler(registry, ledger, policy, store=store, trust=trust, reading=reading)
