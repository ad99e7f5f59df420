"""May a version serve? Asked of a real MLflow database, after what an editor of it can do."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.deploy.store import ModelStore
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.policy import Policy
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.release import PromotionResult
from gate.service.reconciler import Reconciler
from tests import builders
from tests.registry.kept_folder import KeptFolder
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, onnx_file, release
from tests.registry.servers import make_run

POLICY = builders.policy()
REVIEWED = builders.policy(review="required")
STRICT = builders.policy(min_samples=500)
"""None of these releases passes by it: they have 400 samples."""


class Shop:
    """A registry in a database file, a promoter, and the service with its own policy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.run = make_run(self.uri, artifacts=folder / "artifacts")
        self.registry = MlflowRegistry(self.uri)
        self.ledger = Ledger(folder / "ledger.db")
        self.store = ModelStore(folder / "store")

    def promote(self, seed: int, policy: Policy = POLICY, **ago: float) -> PromotionResult:
        path = onnx_file(self.folder / f"{seed}.onnx", seed=seed)
        at = (datetime.now(UTC) - timedelta(**ago)).isoformat(timespec="seconds")
        handed = release(path, evidence=evidence(path, measured_at=at), policy=policy)
        handed = dataclasses.replace(handed, run_id=self.run)
        return promote(self.registry, handed, policy=policy, ledger=self.ledger)

    def look(self, policy: Policy = POLICY) -> list[tuple[str, str, str | None]]:
        """A service that was just started, so that it looks at the bytes, too."""
        reconcile = Reconciler(self.registry, self.ledger, policy, store=self.store)
        return [(t.kind, t.outcome, t.version) for t in reconcile(NAME, cause="timer")]

    @property
    def champion(self) -> str | None:
        return self.registry.alias(NAME, CHAMPION)

    @property
    def editor(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @property
    def reason(self) -> str:
        return self.ledger.entries()[-1].reason


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> KeptFolder:
    folder = tmp_path_factory.mktemp("shop")
    made = Shop(folder)
    for seed in (1, 2):
        made.promote(seed)
        assert made.look() == [("deploy", "deployed", str(seed))]
    return KeptFolder(folder)


@pytest.fixture
def shop(kept: KeptFolder) -> Shop:
    """Versions 1 and 2 were promoted and deployed; 2 serves."""
    return Shop(kept.again())


def test_an_editor_who_deletes_the_tag_of_a_rollback_brings_nothing_back(shop: Shop) -> None:
    rollback(shop.registry, NAME, ledger=shop.ledger, reason="sevens read as ones")
    assert shop.look() == [("deploy", "deployed", "1")]
    for tag in shop.editor.get_model_version(NAME, "2").tags:
        shop.editor.delete_model_version_tag(NAME, "2", tag)
    shop.editor.set_registered_model_alias(NAME, CHAMPION, "2")
    assert shop.look() == [("guard", "reverted", "1")]
    assert "sevens read as ones" in shop.reason
    assert shop.champion == "1"


@pytest.mark.further
def test_who_deletes_the_tag_and_hands_the_file_in_again_brings_it_back(shop: Shop) -> None:
    """As it always was: the one has the registry's rights, the other the ledger's."""
    rollback(shop.registry, NAME, ledger=shop.ledger, reason="a mistake")
    shop.look()
    assert shop.promote(2).outcome == "refused"
    shop.editor.delete_model_version_tag(NAME, "2", Tag.ROLLED_BACK)
    again = shop.promote(2, hours=1)
    assert (again.outcome, shop.champion) == ("promoted", again.version)
    assert shop.look() == [("deploy", "deployed", again.version)]
    shop.editor.set_registered_model_alias(NAME, CHAMPION, "1")
    assert ("guard", "accepted", "1") in shop.look()


@pytest.mark.rows(4)
@pytest.mark.parametrize("tag", [Tag.ROLLED_BACK, Tag.REVERTED, Tag.VERDICT, Tag.SHA256])
def test_an_editor_s_tag_takes_no_model_down(
    shop: Shop, caplog: pytest.LogCaptureFixture, tag: str
) -> None:
    shop.editor.set_model_version_tag(NAME, "2", tag, f"{tag} by an editor of {shop.folder}")
    assert shop.look() == shop.look() == []
    assert shop.champion == "2"
    strange = [r for r in caplog.records if r.name == "gate.registry.eligibility"]
    assert len(strange) == (tag == Tag.ROLLED_BACK)


def test_a_reviewer_s_tag_is_heard(shop: Shop) -> None:
    shop.editor.set_model_version_tag(NAME, "2", Tag.REVIEW, "rejected")
    assert shop.look() == [("guard", "reverted", "1"), ("deploy", "deployed", "1")]


def test_a_policy_that_is_weaker_than_the_service_s_deploys_nothing(shop: Shop) -> None:
    shop.promote(3)
    assert shop.look(STRICT) == [("guard", "reverted", "2")]
    assert "judged by another policy" in shop.reason
    assert "400 samples were measured, at least 500 are required" in shop.reason
    assert shop.look(STRICT) == []
    assert shop.champion == "2"


def test_a_promoter_without_review_deploys_nothing_where_the_service_asks_for_it(
    shop: Shop,
) -> None:
    shop.promote(3)
    assert shop.look(REVIEWED) == [("guard", "reverted", "2")]
    assert "waits for review" in shop.reason
    assert shop.registry.alias(NAME, CANDIDATE) == "3"
    assert shop.look(REVIEWED) == []
    shop.editor.set_model_version_tag(NAME, "3", Tag.REVIEW, "approved")
    assert shop.look(REVIEWED) == [("review", "promoted", "3"), ("deploy", "deployed", "3")]


@pytest.mark.further
def test_evidence_of_200_days_deploys_nothing_whatever_the_promoter_allows(shop: Shop) -> None:
    assert shop.promote(3, days=200).outcome == "refused"
    patient = builders.policy(max_age_days=365.0)
    assert shop.promote(3, patient, days=200).outcome == "promoted"
    assert shop.look() == [("guard", "reverted", "2")]
    assert "200.0 days old, the policy allows 90 (max_age_days)" in shop.reason
    assert shop.look(patient) == []


@pytest.mark.rows(2)
@pytest.mark.parametrize("policy", [STRICT, REVIEWED])
def test_what_serves_rightly_stands_a_new_policy(shop: Shop, policy: Policy) -> None:
    assert shop.look(policy) == []
    assert shop.champion == "2"
    rollback(shop.registry, NAME, ledger=shop.ledger, reason="worse")
    assert shop.look(policy) == [("deploy", "deployed", "1")]


def test_a_new_service_takes_over_what_was_promoted_by_its_policy(tmp_path: Path) -> None:
    fresh = Shop(tmp_path)
    fresh.promote(1, days=89)
    assert fresh.look() == [("deploy", "deployed", "1")]
