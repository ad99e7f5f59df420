"""Putting one registered model right: guard, review, deploy, in this order, under the lock.

Nothing here depends on what an event said. The registry and the ledger are read anew, so that lost,
doubled, reordered and forged events end in the same state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gate.deploy.store import Store
from gate.policy.policy import Policy
from gate.registry.addresses import declare
from gate.registry.champion import alone
from gate.registry.ledger import Ledger
from gate.registry.mlflow.registry import MlflowRegistry
from gate.registry.port import CHAMPION, Registry
from gate.registry.registered_model import RegisteredModel
from gate.service.deployment import deploy_champion
from gate.service.guard import guard
from gate.service.port import Taken
from gate.service.review import review
from gate.service.settings import Settings

_RECHECK_S = 600.0
"""After which the bytes behind `champion` are downloaded and hashed anew, without any event."""


class Reconciler:
    """Implements `gate.service.port.Reconcile`."""

    def __init__(self, registry: Registry, ledger: Ledger, policy: Policy, *, store: Store) -> None:
        self._registry = registry
        self._ledger = ledger
        self._policy = policy
        self._store = store
        self._proven: dict[str, tuple[str | None, float]] = {}
        """By model: the champion whose bytes were looked at, and when."""

    def __call__(self, model: str, *, cause: str) -> Sequence[Taken]:
        """As `Reconcile`. Every action is a line in the ledger, with `cause`."""
        registered = RegisteredModel(self._registry, self._ledger, model, cause=cause)
        with alone(registered, quietly=True):
            thoroughly = self._is_due(model, registered.alias(CHAMPION))
            taken = guard(registered, self._policy, thoroughly=thoroughly)
            taken += review(registered, self._policy)
            taken += deploy_champion(registered, self._store, thoroughly=thoroughly)
            if thoroughly:
                self._proven[model] = (registered.alias(CHAMPION), time.monotonic())
        return taken

    def _is_due(self, model: str, champion: str | None) -> bool:
        proven, at = self._proven.get(model, (None, 0.0))
        return proven != champion or time.monotonic() - at > _RECHECK_S


def reconciler(settings: Settings) -> Reconciler:
    """The reconciler of a service. Raises PolicyError."""
    policy = Policy.default() if settings.policy is None else Policy.of_file(settings.policy)
    registry = MlflowRegistry(settings.tracking_uri)
    ledger = Ledger(settings.ledger)
    if settings.same_registry:
        declare(ledger, registry.identity, settings.same_registry)
    return Reconciler(registry, ledger, policy, store=Store(settings.store))
