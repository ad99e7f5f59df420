"""A model with passed versions, in a simulated registry or a real MLflow database."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gate import Digest, Policy
from gate.deploy.store import EXACT, ModelStore
from gate.errors import ResourceGone
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.registered_model import Reading, RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.reviews import ReviewSettings
from gate.service.monitoring import Failed
from gate.service.reconciler import Reconciler
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, onnx_file, release, twin_file, twin_of
from tests.registry.servers import make_run
from tests.registry.simulator import Simulator

AUTOMATIC = builders.policy()
STRICT = builders.policy(min_samples=500)
"""A policy that no release of this setup passes, because they have 400 samples."""
ALLOWS_OLD_EVIDENCE = builders.policy(max_age_days=365.0)
REVIEWED = builders.policy(review="required")
SIGNED = builders.policy(review="signed")


def failing(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises the error whatever its arguments are."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    return fail


class RegistrySetup:
    """A simulated registry, a ledger, and releases with fresh evidence."""

    def __init__(self, folder: Path, policy: Policy = AUTOMATIC) -> None:
        self.folder = folder
        self.policy = policy
        self.registry = Simulator()
        self.ledger = Ledger(folder / "state.db")
        self.created_at = datetime.now(
            UTC
        )  # one time per setup, so that the same file always gets the same evidence

    def model(self, cause: str = "delivery 1") -> RegisteredModel:
        settings = ReviewSettings.from_policy(self.policy)
        return RegisteredModel(self.registry, self.ledger, NAME, cause=cause, reviews=settings)

    def release(self, seed: int, *, days: float = 0.0, policy: Policy | None = None) -> Release:
        path = onnx_file(self.folder / f"{seed}.onnx", seed=seed)
        at = (self.created_at - timedelta(days=days)).isoformat(timespec="seconds")
        policy = policy or self.policy
        created = release(path, evidence=evidence(path, measured_at=at), policy=policy)
        if policy.twin is None:
            return created
        quantized = twin_file(
            self.folder / f"twin-{seed}" / "model.onnx", of=path, seed=seed + 1000
        )
        twin = twin_of(quantized, policy=policy.twin, evidence=evidence(quantized, measured_at=at))
        return replace(created, twin=twin)

    def promote(
        self, seed: int, *, days: float = 0.0, policy: Policy | None = None
    ) -> PromotionResult:
        policy = policy or self.policy
        release = self.release(seed, days=days, policy=policy)
        return promote(self.registry, release, policy=policy, ledger=self.ledger)

    def deployed(self, number: str) -> None:
        """Record a deployment, as the service does."""
        about = self.model().history().approving_entry(number)
        self.model().write("deployed", "it serves", version=number, about=about)

    def tag(self, number: str, value: str, key: str = Tag.REVIEW) -> None:
        self.registry.set_tag(NAME, number, key=key, value=value)

    def move_champion(self, number: str) -> None:
        """Move `champion` by hand, as in MLflow's web interface."""
        self.registry.set_alias(NAME, CHAMPION, number)

    @property
    def champion(self) -> str | None:
        return self.registry.alias(NAME, CHAMPION)

    def lines(self) -> list[tuple[str, str | None]]:
        return [(entry.action, entry.version) for entry in self.ledger.entries()]

    def stored(self, number: str) -> Any:
        return self.registry.versions[int(number) - 1]

    def register_by_hand(self, seed: int) -> str:
        """Register a version with the tags of a passed one, without the gate."""
        draft = self.release(seed).draft()
        return self.registry.create_version(NAME, replace(draft))


class Model:
    """A registered model with its own ledger and store, in a real MLflow database or server."""

    def __init__(self, folder: Path, uri: str, name: str) -> None:
        self.name = name
        self.setup = RegistrySetup(folder / name, REVIEWED)
        self.setup.folder.mkdir()
        self.registry = MlflowRegistry(uri)
        self.store = ModelStore(folder / name / "store")
        self.policy = REVIEWED
        self.trust: TrustFile | None = None
        self.reading: Reading | None = None
        """The state a service keeps between passes; None: each pass starts without one."""
        self.run_id = make_run(
            uri, artifacts=None if uri.startswith("http") else folder / "artifacts"
        )

    def submit_version(self, seed: int) -> str:
        new_release = replace(self.setup.release(seed), model_name=self.name, run_id=self.run_id)
        created = promote(self.registry, new_release, policy=self.policy, ledger=self.setup.ledger)
        assert created.version is not None
        return created.version

    def approve(self, number: str) -> None:
        self.registry.set_tag(self.name, number, key=Tag.REVIEW, value="approved")

    def reconcile_once(self) -> int:
        """Reconcile as after an event and return the number of steps that did something."""
        reconcile = Reconciler(
            self.registry,
            self.setup.ledger,
            self.policy,
            store=self.store,
            trust=self.trust,
            reading=self.reading,
        )
        return len(reconcile(self.name, cause="delivery 1"))

    def state(self) -> dict[str, Any]:
        live = self.store.live(self.name)
        return {
            "lines": [
                (e.action, e.version, e.previous_version, e.operation is None)
                for e in self.setup.ledger.entries()
                if e.action != "conflict"  # of a move that a kill prevented
            ],
            "champion": self.registry.alias(self.name, CHAMPION),
            "candidate": self.registry.alias(self.name, CANDIDATE),
            "live": live and live.slots[EXACT].sha256,
            "pages": [self._page(str(number)) for number in (1, 2, 3)],
            "kept": sorted(path.name for path in (self.setup.folder / "store" / "store").iterdir()),
        }

    def _page(self, number: str) -> dict[str, str] | None:
        """Return the texts that the version page shows, without times."""
        try:
            version = self.registry.version(self.name, number)
        except ResourceGone:
            return None
        texts = {
            "status": version.description.partition("\n")[0],
            **{
                key: version.tags.get(key, "")
                for key in (Tag.VERDICT, Tag.REVIEW_RESULT, Tag.REFUSED)
            },
        }
        return {
            key: re.sub(r"20\d\d-[-+T:0-9]+( \d\d:\d\d)?", "then", text)
            for key, text in texts.items()
        }


class Service:
    """A registry setup with a reconciler and a store."""

    def __init__(self, folder: Path, policy: Policy = AUTOMATIC) -> None:
        self.setup = RegistrySetup(folder, policy)
        self.store = ModelStore(folder / "store")
        self.trust: Path | None = None
        self.reading: Reading | None = None
        self.restart()

    def restart(self) -> None:
        setup, trust = self.setup, self.trust
        self.reconcile = Reconciler(
            setup.registry, setup.ledger, setup.policy, store=self.store,
            trust=None if trust is None else TrustFile(trust), reading=self.reading,
        )  # fmt: skip

    def reconcile_once(self, cause: str = "delivery 1") -> list[tuple[str, str, str | None]]:
        return [
            (item.kind, type(item.error).__name__, None)
            if isinstance(item, Failed)
            else (item.kind, item.outcome, item.version)
            for item in self.reconcile(NAME, cause=cause)
        ]

    @property
    def live(self) -> str | None:
        """The number of the version whose bytes are deployed."""
        manifest = self.store.live(NAME)
        if manifest is None:
            return None
        return next(
            str(number)
            for number, stored in enumerate(self.setup.registry.versions, start=1)
            if Digest.from_bytes(stored.data) == manifest.slots[EXACT].sha256
        )
