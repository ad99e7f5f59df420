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
from gate.ledger.ledger import Ledger, StoredHead, believe_by_default, require_writable
from gate.ledger.maintenance import declare_addresses
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.policy import Policy
from gate.records.layout import MAX_BYTES
from gate.records.layout import QUANTIZED as BESIDE
from gate.registry.alias import model_lock
from gate.registry.eligibility import TrustFile, veto
from gate.registry.interface import CHAMPION, Registry
from gate.registry.registered_model import MismatchMemory, Reading, RegisteredModel
from gate.registry.reviews import ReviewSettings
from gate.registry.verify_release import ReadTrust, Terms, judge_version, no_trust
from gate.registry.version_files import ExpectedDigests, twin_file
from gate.registry.version_page import Pages
from gate.sandbox.limits import SandboxLimits
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed, Kind, StepResult
from gate.service.replay import ReplayState, replay_golden
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
    trust: ReadTrust = no_trust,
) -> list[StepResult]:
    """Deploy the champion, if the gate promoted it and it is not deployed yet.

    A version that was not deployed before must pass by this policy and this trust. `thoroughly`:
    hash the deployed files, and fetch them again where they are damaged; retry a file that was
    refused here. Raises the RegistryErrors, EvidenceError and StorageError.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    terms = None if champion is None else Terms.of(policy, history, champion, trust=trust)
    vouched = _rightful(model, champion, history, terms=terms)
    if champion is None or vouched is None:
        return []
    last, slots = history.deployment_of(vouched), _slots(model, vouched, terms)
    refused = last is not None and last.action == "not_deployed"
    failed = last is not None and last.action == "replay_failed"  # until it is promoted again
    if failed or (refused and not thoroughly):
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
    """Return why an unsigned earlier promotion is not deployed.

    None where it was signed, or where the trust accepts unsigned versions.
    """
    assert vouched.version is not None
    refuses = terms is not None and terms.trust is not None and terms.trust.unsigned == "refuse"
    if not refuses or not history.passed_before_signing(vouched.version):
        return None
    return (
        f"version {vouched.version} is not signed: submit a signed one, or let the service take "
        "what it finds (trust: unsigned: accept_existing)"
    )


def _rightful(
    model: RegisteredModel, champion: str | None, history: ModelHistory, *, terms: Terms | None
) -> LedgerEntry | None:
    """Return the line that approves the champion; None where it did not get there by the ledger."""
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
        """The exact file, in the folder of the first caller."""

    def exact(self, folder: Path) -> Path:
        """Download into `folder`. Raises the RegistryErrors, DigestMismatch, StorageError;
        EvidenceError where the terms do not allow it."""
        vouched = self._vouched
        assert vouched.version is not None

        def with_objection(path: Path) -> tuple[Path, str | None]:
            if self._terms is None:
                return path, None
            return path, judge_version(path, self._model, vouched=vouched, terms=self._terms)

        path, problem = self._model.read(
            vouched.version, ExpectedDigests.from_entry(vouched), with_objection, into=folder
        )
        if problem is not None:
            raise EvidenceError(f"version {vouched.version} is not deployed: {problem}")
        self._path = path
        return path

    def twin(self, folder: Path) -> Path:
        """Move the twin's files into `folder`, and return the path of its file.

        The folder must be on the same file system. Raises EvidenceError where they are not whole.
        """
        path = self._path or self.exact(folder)
        beside = path.parent / BESIDE
        name = twin_file(beside).relative_to(beside)
        return beside.rename(folder / BESIDE) / name


def _slots(
    model: RegisteredModel, vouched: LedgerEntry, terms: Terms | None
) -> dict[str, SlotSource]:
    """Return the slots that the line approves; the exact file comes first."""
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


# The head is kept apart from the ledger's database, so that a user with write access to that can't
# change both. One store belongs to one ledger; replicas may have a store each. A longer head
# replaces a shorter one, never the reverse.
HEAD_FILE = "ledger-head.json"


def kept_ledger(settings: ServiceSettings) -> Ledger:
    """The ledger of a service, with its stored head, to read. Raises ServiceError."""
    return Ledger(settings.state, stored_head=stored_head(settings.store))


def written_ledger(settings: ServiceSettings, trust: Trust | None) -> Ledger:
    """Return `kept_ledger` for writing as well.

    Without a trust, that of `settings.writers` is used. Raises KeyUnusable, PolicyError, and the
    exceptions of `require_writable`.
    """
    key = SigningKey.load(settings.key) if settings.key is not None else None
    ledger = _believing(settings, trust, key=key)
    require_writable(ledger)
    return ledger


def read_ledger(settings: ServiceSettings) -> Ledger:
    """Return `kept_ledger` with the service's trust, for another thread. Raises PolicyError."""
    return _believing(settings, TrustFile.named(settings.trust, policy=settings.policy)())


def _believing(
    settings: ServiceSettings, trust: Trust | None, *, key: SigningKey | None = None
) -> Ledger:
    ledger = kept_ledger(settings)
    ledger.key, ledger.trust = key, trust
    if trust is None and settings.writers is not None:
        believe_by_default(ledger, Trust.from_file(settings.writers))
    return ledger


def stored_head(store: Path) -> StoredHead:
    """Return where the store keeps the end of its ledger."""
    return StoredHead(store / HEAD_FILE, place=f"the store {store}")


# A step that fails does not block the others. Nothing here depends on the content of an event. The
# registry and the ledger are read again, so that lost, doubled, reordered and forged events end in
# the same state.
_log = logging.getLogger(__name__)

_RECHECK_S = 600.0
"""Interval after which the bytes behind `champion` are downloaded and hashed again without an
event."""


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
        `reading`: shared by all reconciliations of a service; None: each one is independent and
        must confirm a wrong download itself.
        """
        self._registry = registry
        self._ledger = ledger
        self._policy = policy
        self._store = store
        self._trust = trust or TrustFile(None)
        self._reading = reading
        self._proven: dict[str, tuple[str | None, float]] = {}
        """By model: the champion whose bytes were verified, and when."""
        self._workspaces: dict[str, Registry] = {}
        self._pages = Pages()
        self._replays: dict[str, ReplayState] = {}
        """By model: how far the golden vectors of its last release were replayed."""
        self._damages: Counter[str] = Counter()
        """By model: how often what is deployed was found damaged."""

    def __call__(self, model: str, *, cause: str) -> Sequence[StepResult | Failed]:
        """Reconcile one model; see `Reconcile`.

        Every action is written to the ledger, with `cause`. `model`: the name in the settings, with
        its workspace.

        Raises ResourceGone where the ledger has a passed version of a model that no longer exists.
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
                f"ledger {self._ledger.location} has entries about it: it was deleted or "
                "renamed. What is deployed stays. Give it its name back, or take it off the "
                "service's models."
            )
        with model_lock(registered, quietly=True):
            thoroughly = self._is_due(model, registered.alias(CHAMPION))
            damages, policy, trust = self._damages[model], self._policy, self._trust
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
            done += self._replay(registered, thoroughly=thoroughly)
            failed = {one.kind for one in done if isinstance(one, Failed)}
            refused = any(
                isinstance(one, StepResult) and (one.kind, one.outcome) == ("deploy", "refused")
                for one in done
            )
            # Damage or a refusal during this reconciliation is handled by the next one.
            proven = not refused and failed <= {"hand_in", "review", "replay"}
            if thoroughly and proven and damages == self._damages[model]:
                self._proven[model] = (registered.alias(CHAMPION), time.monotonic())
            with contextlib.suppress(GateError):  # of the ledger: the steps above tell of it
                self._pages.follow(registered, thoroughly=thoroughly)
                trust.warn_of(model, registered.history())
        return done

    def _replay(self, model: RegisteredModel, *, thoroughly: bool) -> Sequence[StepResult | Failed]:
        """Replay the golden vectors of a release that was not replayed yet, or `thoroughly`."""
        if self._policy.after_deploy != "replay_golden":
            return []
        release = self._store.last_release(model.key)
        state = self._replays.get(model.key)
        if state is None or state.release != release:
            state = self._replays[model.key] = ReplayState(release)
        if state.is_done and not thoroughly and not state.suspects:
            return []
        limits = model.reading.limits
        done = list(
            _step(
                "replay",
                lambda: replay_golden(model, self._store, self._policy, state=state, limits=limits),
            )
        )
        state.is_done = state.is_done or not done
        return done

    def report_damage(self, model: str) -> None:
        """Report that the deployed files are damaged, so that the next reconciliation is thorough.

        May be called from any thread.
        """
        self._damages[model] += 1
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
            # Each reconciliation logs it, too; the deployed release is served meanwhile.
            _log.warning("not written down, say it again later: --same-registry: %s", error)
    limits = SandboxLimits.of_service(settings.time_limit_s, settings.memory_limit)
    memory = MismatchMemory(settings.confirm_s, wait=None) if comes_again else MismatchMemory()
    reading = Reading(limits, memory)
    store = ModelStore(settings.store)
    return Reconciler(registry, ledger, policy, store=store, trust=trust, reading=reading)
