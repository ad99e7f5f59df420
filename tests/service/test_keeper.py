"""Where the ledger ended is kept in the store; the real service refuses another past."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gate import cli
from gate.deploy.store import EXACT, ModelStore
from gate.errors import EvidenceError
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.service import app
from gate.service.monitoring import Failed, StepResult
from gate.service.reconciler import reconciler, stored_head
from gate.service.settings import ServiceSettings
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.ledger.rows import put, rows
from tests.ledger.test_head import removed
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import make_run
from tests.service.deliveries import running, settings, until
from tests.service.places import AUTOMATIC


class Place:
    """A real MLflow database with two versions of a model, of which the first serves."""

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
        made = release(path, policy=AUTOMATIC, run_id=self.run_id)
        assert promote(self.registry, made, policy=AUTOMATIC, ledger=self.ledger).version

    def reconcile(self) -> list[StepResult | Failed]:
        """As `gate reconcile`, in a process of its own."""
        return list(reconciler(self.settings)(NAME, cause="timer"))

    @property
    def live(self) -> Digest | None:
        manifest = self.store.live(NAME)
        return manifest and manifest.slots[EXACT].sha256

    def digest(self, seed: int) -> Digest:
        return Digest.from_file(self.folder / f"{seed}.onnx")

    @contextmanager
    def served(self) -> Iterator[Callable[[], dict[str, object]]]:
        """The whole service; gives what `/readyz` says. At least one look was begun."""
        with running(self.settings, reconciler(self.settings)) as service:  # type: ignore[arg-type]

            def ready() -> dict[str, object]:
                answer = service.get("/readyz")
                said: dict[str, object] = answer.json()
                assert answer.status_code == (200 if said["ready"] else 503)
                return said

            until(lambda: service.parts.worker.registry_silence_s() is not None)
            yield ready


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_FRESH_S", 0.0)


def two_served(folder: Path) -> Place:
    """Version 2 is deployed; the ledger's last line is about that."""
    place = Place(folder)
    for seed in (1, 2):
        place.promote(seed)
        assert not [one for one in place.reconcile() if isinstance(one, Failed)]
    assert place.live == place.digest(2)
    return place


@pytest.fixture(scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("DVC_EXP_NAME", raising=False)
        return two_served(tmp_path_factory.mktemp("place"))


@pytest.fixture
def place(_place: Place) -> Iterator[Place]:
    """For tests in which nothing is done: it is as it was for the next one."""
    settings, good = _place.settings, rows(_place.settings.state)
    kept = stored_head(settings.store).head()
    yield _place
    _place.settings = settings
    put(settings.state, good)
    stored_head(settings.store).replace(kept)


def older(path: Path) -> None:
    """Of when version 1 served: taken by itself, `champion` would have to go back."""
    newest = rows(path)
    assert len(newest) == 4
    put(path, newest[:2])


def edited(path: Path) -> None:
    *before, last = rows(path)
    put(path, [*before, last._replace(line=last.line.replace(b'"deployed"', b'"rejected"'))])


SPOILED = [older, edited, removed]


@pytest.mark.rows(3)
@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.proof
def test_another_past_under_the_running_service_and_after_a_stop(
    place: Place, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    ledger = place.settings.state
    good = rows(ledger)

    def nothing_was_done() -> None:
        assert rows(ledger) == spoiled
        assert place.registry.alias(NAME, CHAMPION) == "2"
        assert place.live == place.digest(2)

    with place.served() as ready:
        until(lambda: ready()["ready"])
        spoil(ledger)
        spoiled = rows(ledger)
        until(lambda: not ready()["ready"])
        assert ready()["ledger"] == "is not the one it was"
        caplog.clear()
        until(lambda: "failed, will retry" in caplog.text)  # another look
        nothing_was_done()
    caplog.clear()
    with place.served() as ready:
        assert ready()["ledger"] == "is not the one it was"
        until(lambda: "failed, will retry" in caplog.text)
        nothing_was_done()
        assert "gate accept-ledger" in caplog.text
        assert str(place.settings.store) in caplog.text
        put(ledger, good)  # the newest copy is restored
        until(lambda: ready()["ready"])
    assert place.reconcile() == []


@exhaustive
@pytest.mark.proof
def test_what_a_person_accepts_is_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two_served(tmp_path)
    ledger = place.settings.state
    with place.served() as ready:
        until(lambda: ready()["ready"])
        older(ledger)
        until(lambda: not ready()["ready"])
        given = ["--store", str(place.settings.store)]
        accept = ["accept-ledger", *given, "--state", ledger, "--json", "--reason", "a fire"]
        assert cli.main(accept) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["accepted"]
        assert len(said["lost"]) == 1  # the store had seen it
        until(lambda: ready()["ready"])
        # By this ledger version 1 served, and somebody pointed at 2, of which it knows nothing.
        until(lambda: place.live == place.digest(1))
        assert place.registry.alias(NAME, CHAMPION) == "1"
    lines = Ledger(ledger).entries()
    assert lines[2].action == "ledger_accepted"
    assert "a fire" in lines[2].reason


def _failures(place: Place) -> list[str]:
    try:
        done = place.reconcile()
    except EvidenceError as error:
        return [str(error)]
    return [str(one.error) for one in done if isinstance(one, Failed)]


def test_two_replicas_with_stores_of_their_own_share_a_ledger(
    tmp_path: Path, database: str
) -> None:
    """Whoever is a line behind for a moment is not refused: it reads again."""
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
    kept = [head.head() for head in heads]
    assert [head and head.lines for head in kept] == [8, 8]


def _line(**fields: str) -> LedgerEntry:
    return LedgerEntry.model_validate(fields)


@pytest.mark.further
def test_a_store_that_belongs_to_another_ledger(place: Place, tmp_path: Path) -> None:
    """The same command with a mistyped ledger changes nothing."""
    other = tmp_path / "other.db"
    for reason in ("one", "two", "three", "four", "five"):
        Ledger(other).append(_line(action="conflict", registry="here", model=NAME, reason=reason))
    place.settings = place.settings.model_copy(update={"state": f"sqlite:///{other}"})
    (failed,) = _failures(place)
    assert "replaced by another" in failed
    assert place.live == place.digest(2)
