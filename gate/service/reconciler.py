"""Putting one registered model right: guard, hand-in, review, deploy; in this order, alone.

One step that fails keeps no other from its work. Nothing here depends on what an event said. The
registry and the ledger are read anew, so that lost, doubled, reordered and forged events end in the
same state.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gate.bounded.limits import ChildLimits
from gate.deploy.store import Store
from gate.errors import EvidenceError, GateError, ResourceGone, Untrusted
from gate.ledger.addresses import declare
from gate.ledger.ledger import Ledger
from gate.policy.policy import Policy
from gate.registry.champion import alone
from gate.registry.doubts import Doubts, Reading
from gate.registry.mlflow.registry import MlflowRegistry
from gate.registry.page.pages import Pages
from gate.registry.page.reviewer import ReviewRule
from gate.registry.port import CHAMPION, Registry
from gate.registry.registered_model import RegisteredModel
from gate.registry.trusted import TrustFile
from gate.service.deployment import deploy_champion
from gate.service.guard import guard
from gate.service.handed_in import judge_handed_in
from gate.service.keeper import written_ledger
from gate.service.port import Failed, Kind, Taken
from gate.service.review import review
from gate.service.settings import Settings

_log = logging.getLogger(__name__)
_RECHECK_S = 600.0
"""After which the bytes behind `champion` are downloaded and hashed anew, without any event."""


class Reconciler:
    """Implements `gate.service.port.Reconcile`."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        policy: Policy,
        *,
        store: Store,
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
        self._pages = Pages()
        self._doubts: Counter[str] = Counter()
        """By model: how often what is deployed was found damaged."""

    def __call__(self, model: str, *, cause: str) -> Sequence[Taken | Failed]:
        """As `Reconcile`. Every action is a line in the ledger, with `cause`.

        Raises ResourceGone where the gate passed something of a model that is no more.
        """
        reading = self._reading or Reading()
        registered = RegisteredModel(
            self._registry,
            self._ledger,
            model,
            cause=cause,
            reviews=ReviewRule.of(self._policy),
            reading=reading,
        )
        self._trust.follow(self._ledger)
        history = registered.history()
        self._ledger.verify()  # also where it did not change: others may have seen more of it
        if history.passed_any and not self._registry.has_model(model):
            raise ResourceGone(
                f"{self._registry.identity} has no registered model {model} any more, and the "
                f"ledger {self._ledger.place} tells of it: it was deleted or renamed. What is "
                "deployed stays. Give it its name back, or take it off the service's models."
            )
        with alone(registered, quietly=True):
            thoroughly = self._is_due(model, registered.alias(CHAMPION))
            doubts, policy, trust = self._doubts[model], self._policy, self._trust
            done = [
                *_step(
                    "guard", lambda: guard(registered, policy, thoroughly=thoroughly, trust=trust)
                ),
                *_step("hand_in", lambda: judge_handed_in(registered, policy, trust=trust)),
                *_step("review", lambda: review(registered, policy, trust=trust)),
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


def _step(kind: Kind, step: Callable[[], Iterable[Taken | Failed]]) -> Iterator[Taken | Failed]:
    try:
        yield from step()
    except Exception as error:
        yield Failed(kind, error)


def reconciler(settings: Settings, *, comes_again: bool = False) -> Reconciler:
    """The reconciler of a command; of a service if it `comes_again`: that waits for nothing under
    the lock, and remembers. Raises PolicyError, and as `written_ledger`."""
    policy = settings.policy_in_force()
    registry = MlflowRegistry(settings.tracking_uri)
    trust = TrustFile.named(settings.trust, policy=settings.policy)
    # A service does not start with a trust that can't be read.
    ledger = written_ledger(settings, trust())
    if settings.same_registry:
        try:
            declare(ledger, registry.identity, settings.same_registry)
        except (EvidenceError, Untrusted) as error:
            # Each look says so, too; what is deployed is served meanwhile.
            _log.warning("not written down, say it again later: --same-registry: %s", error)
    limits = ChildLimits.of_service(settings.time_limit_s, settings.memory_limit)
    doubts = Doubts(settings.confirm_s, wait=None) if comes_again else Doubts()
    reading = Reading(limits, doubts)
    store = Store(settings.store)
    return Reconciler(registry, ledger, policy, store=store, trust=trust, reading=reading)
