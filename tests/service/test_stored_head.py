"""The service refuses a ledger that does not contain the head recorded in the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gate import Digest
from gate.deploy.store import EXACT, ModelStore
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.service import app
from gate.service.monitoring import Failed, StepResult
from gate.service.reconciler import reconciler, stored_head
from gate.service.settings import ServiceSettings
from tests.ledger.rows import replace_rows, rows
from tests.ledger.test_stored_head import remove_file
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import make_run
from tests.service.deliveries import run_service, settings, wait_until
from tests.service.registry_setup import AUTOMATIC


class DeployedModel:
    """A model in a real MLflow database; its first version serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.registry = MlflowRegistry(self.uri)
        self.run_id = make_run(self.uri, artifacts=folder / "artifacts")
        self.settings: ServiceSettings = settings(
            folder, models=(NAME,), tracking_uri=self.uri, interval_s=0.2, policy=self._policy()
        )
        self.ledger = Ledger(self.settings.state)
        self.store = ModelStore(self.settings.store)

    def _policy(self) -> Path:
        path = self.folder / "policy.yaml"
        path.write_text(json.dumps({"gate": AUTOMATIC.to_plain()}))
        return path

    def promote(self, seed: int) -> None:
        path = onnx_file(self.folder / f"{seed}.onnx", seed=seed)
        created = release(path, policy=AUTOMATIC, run_id=self.run_id)
        assert promote(self.registry, created, policy=AUTOMATIC, ledger=self.ledger).version

    def reconcile(self) -> list[StepResult | Failed]:
        """Reconcile as `gate reconcile` does, without state from earlier passes."""
        return list(reconciler(self.settings)(NAME, cause="timer"))

    @property
    def live(self) -> Digest | None:
        manifest = self.store.live(NAME)
        return manifest and manifest.slots[EXACT].sha256

    def digest(self, seed: int) -> Digest:
        return Digest.from_file(self.folder / f"{seed}.onnx")

    @contextmanager
    def running_service(self) -> Iterator[Callable[[], dict[str, object]]]:
        """Run the service and yield a function that returns `/readyz`."""
        with run_service(self.settings, reconciler(self.settings)) as service:  # type: ignore[arg-type]

            def read_readiness() -> dict[str, object]:
                response = service.get("/readyz")
                report: dict[str, object] = response.json()
                assert response.status_code == (200 if report["ready"] else 503)
                return report

            yield read_readiness


@pytest.fixture(autouse=True)
def _no_readiness_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_CACHE_S", 0.0)


def deploy_two_versions(folder: Path) -> DeployedModel:
    """Deploy versions 1 and 2; the last ledger entry is the deployment of version 2."""
    deployed = DeployedModel(folder)
    for seed in (1, 2):
        deployed.promote(seed)
        assert not [item for item in deployed.reconcile() if isinstance(item, Failed)]
    assert deployed.live == deployed.digest(2)
    return deployed


@pytest.fixture(scope="module")
def _deployed(tmp_path_factory: pytest.TempPathFactory) -> DeployedModel:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("DVC_EXP_NAME", raising=False)
        return deploy_two_versions(tmp_path_factory.mktemp("place"))


@pytest.fixture
def deployed(_deployed: DeployedModel) -> Iterator[DeployedModel]:
    """The shared model, whose ledger, head and settings are restored after the test."""
    settings, original_rows = _deployed.settings, rows(_deployed.settings.state)
    head = stored_head(settings.store).head()
    yield _deployed
    _deployed.settings = settings
    replace_rows(settings.state, original_rows)
    stored_head(settings.store).replace(head)


def restore_older_copy(path: Path) -> None:
    """Restore the rows of when version 1 served, by which `champion` would have to move back."""
    newest = rows(path)
    assert len(newest) == 4
    replace_rows(path, newest[:2])


def edit_last_entry(path: Path) -> None:
    *before, last = rows(path)
    replace_rows(
        path, [*before, last._replace(line=last.line.replace(b'"deployed"', b'"rejected"'))]
    )


TAMPERED = [restore_older_copy, edit_last_entry, remove_file]


@pytest.mark.rows(3)
@pytest.mark.parametrize("tamper", TAMPERED)
@pytest.mark.proof
def test_changed_ledger_stops_a_running_and_a_restarted_service(
    deployed: DeployedModel, caplog: pytest.LogCaptureFixture, tamper: Callable[[Path], None]
) -> None:
    ledger = deployed.settings.state
    original_rows = rows(ledger)

    def assert_unchanged() -> None:
        assert rows(ledger) == changed_rows
        assert deployed.registry.alias(NAME, CHAMPION) == "2"
        assert deployed.live == deployed.digest(2)

    with deployed.running_service() as ready:
        wait_until(lambda: ready()["ready"])
        tamper(ledger)
        changed_rows = rows(ledger)
        wait_until(lambda: not ready()["ready"])
        assert ready()["ledger"] == "was shortened or edited"
        caplog.clear()
        wait_until(lambda: "failed, will retry" in caplog.text)  # another pass
        assert_unchanged()
    caplog.clear()
    with deployed.running_service() as ready:
        assert ready()["ledger"] == "was shortened or edited"
        wait_until(lambda: "failed, will retry" in caplog.text)
        assert_unchanged()
        assert "gate accept-ledger" in caplog.text
        assert str(deployed.settings.store) in caplog.text
        replace_rows(ledger, original_rows)  # the newest copy is restored
        wait_until(lambda: ready()["ready"])
    assert deployed.reconcile() == []


def test_two_replicas_with_separate_stores_share_a_ledger(tmp_path: Path, database: str) -> None:
    """A replica whose cached ledger is behind reads again and is not refused."""
    heads = [stored_head(tmp_path / store) for store in ("one", "two")]
    replicas = [Ledger(database, stored_head=head) for head in heads]
    entry = {"action": "conflict", "registry": "here", "model": NAME}

    def work(number: int) -> None:
        ledger = replicas[number]
        for count in range(4):
            ledger.append(_line(**entry, reason=f"{number}-{count}"))
            ledger.verify()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert [len(ledger.entries()) for ledger in replicas] == [8, 8]
    stored = [head.head() for head in heads]
    assert [head and head.lines for head in stored] == [8, 8]


def _line(**fields: str) -> LedgerEntry:
    return LedgerEntry.model_validate(fields)
