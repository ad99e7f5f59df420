"""Putting one registered model right: guard, review, deploy, in this order, under the lock.

One step that fails keeps no other from its work. Nothing here depends on what an event said. The
registry and the ledger are read anew, so that lost, doubled, reordered and forged events end in the
same state.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gate.bounded.limits import ChildLimits
from gate.deploy.store import Store
from gate.errors import GateError, ResourceGone
from gate.policy.policy import Policy
from gate.registry.addresses import declare
from gate.registry.champion import alone
from gate.registry.doubts import Doubts
from gate.registry.ledger import Ledger
from gate.registry.mlflow.registry import MlflowRegistry
from gate.registry.page.pages import Pages
from gate.registry.port import CHAMPION, Registry
from gate.registry.reading import Reading
from gate.registry.registered_model import RegisteredModel
from gate.service.deployment import deploy_champion
from gate.service.guard import guard
from gate.service.keeper import kept_ledger
from gate.service.port import Failed, Kind, Taken
from gate.service.review import review
from gate.service.settings import Settings

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
        reading: Reading | None = None,
    ) -> None:
        """`reading`: of a service, in all looks; None: each look is on its own, and confirms what
        came wrong, or does not, by itself."""
        self._registry = registry
        self._ledger = ledger
        self._policy = policy
        self._store = store
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
            self._registry, self._ledger, model, cause=cause, reading=reading
        )
        history = registered.history()
        self._ledger.verify()  # also where it did not change: others may have seen more of it
        if history.passed_any and not self._registry.has_model(model):
            raise ResourceGone(
                f"{self._registry.identity} has no registered model {model} any more, and the "
                f"ledger {self._ledger.path} tells of it: it was deleted or renamed. What is "
                "deployed stays. Give it its name back, or take it off the service's models."
            )
        with alone(registered, quietly=True):
            thoroughly = self._is_due(model, registered.alias(CHAMPION))
            doubts = self._doubts[model]
            done = [
                *_step("guard", lambda: guard(registered, self._policy, thoroughly=thoroughly)),
                *_step("review", lambda: review(registered, self._policy)),
                *_step(
                    "deploy",
                    lambda: deploy_champion(
                        registered, self._store, self._policy, thoroughly=thoroughly
                    ),
                ),
            ]
            failed = {one.kind for one in done if isinstance(one, Failed)}
            # What was found damaged meanwhile is for the next look.
            if thoroughly and failed <= {"review"} and doubts == self._doubts[model]:
                self._proven[model] = (registered.alias(CHAMPION), time.monotonic())
            with contextlib.suppress(GateError):  # of the ledger: the steps above tell of it
                self._pages.follow(registered, thoroughly=thoroughly)
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


def reconciler(
    settings: Settings, *, comes_again: bool = False, ledger: Ledger | None = None
) -> Reconciler:
    """The reconciler of a command; of a service if it `comes_again`: that waits for nothing under
    the lock, and remembers. `ledger`: with keepers of its own; None: with the service's. Raises
    PolicyError, and ServiceError for an inbox whose URL can't be read."""
    policy = Policy.default() if settings.policy is None else Policy.of_file(settings.policy)
    registry = MlflowRegistry(settings.tracking_uri)
    ledger = ledger or kept_ledger(settings)
    if settings.same_registry:
        declare(ledger, registry.identity, settings.same_registry)
    limits = ChildLimits.of_service(settings.time_limit_s, settings.memory_limit)
    doubts = Doubts(settings.confirm_s, wait=None) if comes_again else Doubts()
    reading = Reading(limits, doubts)
    return Reconciler(registry, ledger, policy, store=Store(settings.store), reading=reading)
