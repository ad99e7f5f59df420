"""Where the ledger ended is kept in store and inbox; the real service refuses another past."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from gate import cli
from gate.deploy.manifest import EXACT
from gate.deploy.store import Store
from gate.errors import EvidenceError, InboxUnavailable, ServiceError
from gate.registry.head import Head
from gate.registry.ledger import Ledger, LedgerEntry
from gate.registry.mlflow.registry import MlflowRegistry
from gate.registry.port import CHAMPION
from gate.registry.promotion import promote
from gate.service import database, readiness
from gate.service.inbox import Inbox
from gate.service.keeper import HEAD_FILE, InboxKeeper, keepers
from gate.service.port import Failed, Taken
from gate.service.reconciler import reconciler
from gate.service.settings import Settings
from gate.storage.digest import Digest
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import make_run
from tests.registry.test_head import head, removed
from tests.service.deliveries import running, settings, until
from tests.service.places import AUTOMATIC


class TestInbox:
    def test_only_a_longer_head_is_kept_whoever_comes_last(self, database: str) -> None:
        Inbox(database).close()
        replicas = [InboxKeeper(database) for _ in range(4)]
        assert replicas[0].head() is None
        with ThreadPoolExecutor(4) as pool:
            lines = [5, 31, 7, 30, 2, 31, 1, 12]
            list(pool.map(lambda n: replicas[n % 4].keep(head(n)), lines))
        assert [replica.head() for replica in replicas] == [head(31)] * 4
        replicas[1].replace(head(4))
        assert InboxKeeper(database).head() == head(4)
        replicas[1].replace(None)
        assert replicas[0].head() is None

    def test_a_file_that_is_not_there_is_not_made(self, tmp_path: Path) -> None:
        """`gate reconcile` may come before the service."""
        path = tmp_path / "inbox.db"
        keeper = InboxKeeper(f"sqlite:///{path}")
        keeper.keep(head(3))
        keeper.replace(head(3))
        assert keeper.head() is None
        assert not path.exists()

    def test_a_damaged_head(self, database: str) -> None:
        Inbox(database).close()
        keeper = InboxKeeper(database)
        keeper.keep(head(3))
        with keeper._writing() as connection:
            connection.exec_driver_sql("UPDATE gate_ledger_head SET head = '{'")
        with pytest.raises(EvidenceError, match=r"is damaged.*gate accept-ledger"):
            keeper.head()
        keeper.replace(head(3))
        assert keeper.head() == head(3)

    def test_a_database_that_is_away(self) -> None:
        url = "postgresql://gate:hidden@127.0.0.1:1/gate"
        keeper = InboxKeeper(url)
        for use in (keeper.head, lambda: keeper.keep(head(3))):
            with pytest.raises(InboxUnavailable) as caught:
                use()
            assert "hidden" not in f"{caught.value} {keeper.place}"

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://gate:hunter2@db/gate",
            "postgresql://db/gate?user=gate&password=hunter2",
            "postgresql://db/gate?user=gate&pass%77ord=hunter2",
        ],
    )
    def test_a_password_is_not_shown(self, url: str) -> None:
        place = InboxKeeper(url).place
        assert place.startswith("the inbox postgresql://db/gate")
        assert "hunter2" not in place

    def test_a_url_that_can_not_be_read(self) -> None:
        with pytest.raises(ServiceError, match="can't be read"):
            InboxKeeper("postgresql://db:port/gate")

    def test_locked_by_another_program(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(database, "_PATIENCE_S", 0.1)
        keeper = InboxKeeper(f"sqlite:///{tmp_path}/inbox.db")
        Inbox(f"sqlite:///{tmp_path}/inbox.db").close()
        with (
            closing(sqlite3.connect(tmp_path / "inbox.db", isolation_level=None)) as other,
            pytest.raises(InboxUnavailable, match="head of the ledger.*locked.*nothing is damaged"),
        ):
            other.execute("BEGIN IMMEDIATE")
            keeper.keep(head(3))
        keeper.keep(head(3))
        assert keeper.head() == head(3)

    def test_what_the_database_says_has_no_password(self, tmp_path: Path, monkeypatch) -> None:
        """PostgreSQL's driver may repeat what it was given."""
        (tmp_path / "inbox.db").touch()
        keeper = InboxKeeper(f"sqlite:///{tmp_path}/inbox.db")

        def failing(_connection: object, _name: str) -> None:
            raise OperationalError("", None, Exception("no postgresql://gate:hunter2@db/gate"))

        monkeypatch.setattr("gate.service.keeper.wait_for_turn", failing)
        with pytest.raises(InboxUnavailable, match="postgresql://db/gate") as caught:
            keeper.keep(head(3))
        assert "hunter2" not in str(caught.value)


class Place:
    """A real MLflow database with two versions of a model, of which the first serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.registry = MlflowRegistry(self.uri)
        self.run_id = make_run(self.uri, artifacts=folder / "artifacts")
        self.settings: Settings = settings(
            folder, models=(NAME,), tracking_uri=self.uri, interval_s=0.2, policy=self._policy()
        )
        self.ledger = Ledger(self.settings.ledger)
        self.store = Store(self.settings.store)

    def _policy(self) -> Path:
        path = self.folder / "policy.yaml"
        path.write_text(json.dumps({"gate": AUTOMATIC.to_plain()}))
        return path

    def promote(self, seed: int) -> None:
        path = onnx_file(self.folder / f"{seed}.onnx", seed=seed)
        made = release(path, policy=AUTOMATIC, run_id=self.run_id)
        assert promote(self.registry, made, policy=AUTOMATIC, ledger=self.ledger).version

    def reconcile(self) -> list[Taken | Failed]:
        """As `gate reconcile`, in a process of its own."""
        return list(reconciler(self.settings)(NAME, cause="timer"))

    @property
    def live(self) -> Digest | None:
        manifest = self.store.live(NAME)
        return manifest and manifest.slots[EXACT].sha256

    def digest(self, seed: int) -> Digest:
        return Digest.of_file(self.folder / f"{seed}.onnx")

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
    monkeypatch.setattr(readiness, "_FRESH_S", 0.0)


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
    settings, good = _place.settings, _place.settings.ledger.read_bytes()
    kept = [keeper.head() for keeper in keepers(settings.store, settings.inbox_url)]
    yield _place
    _place.settings = settings
    settings.ledger.write_bytes(good)
    for keeper, was in zip(keepers(settings.store, settings.inbox_url), kept, strict=True):
        keeper.replace(was)


def older(path: Path) -> None:
    """Of when version 1 served: taken by itself, `champion` would have to go back."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    path.write_bytes(b"".join(lines[:2]))


def edited(path: Path) -> None:
    first, _, last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    path.write_bytes(first + b"\n" + last.replace(b'"deployed"', b'"rejected"') + b"\n")


SPOILED = [older, edited, removed]


@pytest.mark.parametrize("spoil", SPOILED)
def test_another_past_under_the_running_service_and_after_a_stop(
    place: Place, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    ledger = place.settings.ledger
    good = ledger.read_bytes()

    def nothing_was_done() -> None:
        assert (ledger.read_bytes() if ledger.exists() else None) == spoiled
        assert place.registry.alias(NAME, CHAMPION) == "2"
        assert place.live == place.digest(2)

    with place.served() as ready:
        until(lambda: ready()["ready"])
        spoil(ledger)
        spoiled = ledger.read_bytes() if ledger.exists() else None
        until(lambda: not ready()["ready"])
        assert ready()["ledger"] == "is not the one it was"
        caplog.clear()
        until(lambda: "not done now" in caplog.text)  # another look
        nothing_was_done()
    caplog.clear()
    with place.served() as ready:
        assert ready()["ledger"] == "is not the one it was"
        until(lambda: "not done now" in caplog.text)
        nothing_was_done()
        assert "gate accept-ledger" in caplog.text
        assert str(place.settings.store) in caplog.text
        ledger.write_bytes(good)  # the newest copy is restored
        until(lambda: ready()["ready"])
    assert place.reconcile() == []


def test_what_a_person_accepts_is_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two_served(tmp_path)
    ledger = place.settings.ledger
    with place.served() as ready:
        until(lambda: ready()["ready"])
        older(ledger)
        until(lambda: not ready()["ready"])
        given = ["--store", str(place.settings.store), "--inbox", place.settings.inbox_url]
        accept = ["accept-ledger", *given, "--ledger", str(ledger), "--json", "--reason", "a fire"]
        assert cli.main(accept) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["accepted"]
        assert len(said["lost"]) == 2  # store and inbox had seen it
        until(lambda: ready()["ready"])
        # By this ledger version 1 served, and somebody pointed at 2, of which it knows nothing.
        until(lambda: place.live == place.digest(1))
        assert place.registry.alias(NAME, CHAMPION) == "1"
    lines = Ledger(ledger).entries()
    assert lines[2].action == "ledger_accepted"
    assert "a fire" in lines[2].reason


@pytest.mark.parametrize("left", ["store", "inbox"])
def test_one_place_is_enough(place: Place, left: str) -> None:
    """The other was lost: its head is taken on trust, and the one that is left has its word."""
    with place.served() as ready:
        until(lambda: ready()["ready"])
    in_store, in_inbox = keepers(place.settings.store, place.settings.inbox_url)
    until(lambda: in_inbox.head() is not None)
    lost = in_inbox if left == "store" else in_store
    lost.replace(None)
    older(place.settings.ledger)
    (failed,) = _failures(place)
    assert f"the {left}" in failed
    assert lost.head() is None


def _failures(place: Place) -> list[str]:
    try:
        done = place.reconcile()
    except EvidenceError as error:
        return [str(error)]
    return [str(one.error) for one in done if isinstance(one, Failed)]


def test_two_replicas_with_stores_of_their_own_share_a_ledger_and_an_inbox(
    tmp_path: Path, database: str
) -> None:
    """Whoever is a line behind for a moment is not refused: it reads again."""
    Inbox(database).close()
    path = tmp_path / "ledger.jsonl"
    replicas = [
        Ledger(path, keepers=keepers(tmp_path / store, database)) for store in ("one", "two")
    ]
    entry = {"action": "conflict", "registry": "here", "model": NAME}

    def work(number: int) -> None:
        ledger = replicas[number]
        for count in range(4):
            ledger.append(_line(**entry, reason=f"{number}-{count}"))
            ledger.verify()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert [len(ledger.entries()) for ledger in replicas] == [8, 8]
    kept = InboxKeeper(database).head()
    assert isinstance(kept, Head)
    assert kept.lines == 8
    assert (tmp_path / "one" / HEAD_FILE).exists()


def _line(**fields: str) -> LedgerEntry:
    return LedgerEntry.model_validate(fields)


def test_a_store_that_belongs_to_another_ledger(place: Place, tmp_path: Path) -> None:
    """The same command with a mistyped ledger changes nothing."""
    other = tmp_path / "other.jsonl"
    for reason in ("one", "two", "three", "four", "five"):
        Ledger(other).append(_line(action="conflict", registry="here", model=NAME, reason=reason))
    place.settings = place.settings.model_copy(update={"ledger": other})
    (failed,) = _failures(place)
    assert "another ledger" in failed
    assert place.live == place.digest(2)


def test_reconcile_shows_the_head_to_the_inbox_that_is_named_and_to_no_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The folder is that of another service, with an inbox in the place of the default."""
    monkeypatch.chdir(tmp_path)
    theirs, ours = "sqlite:///.gate/inbox.db", f"sqlite:///{tmp_path}/named.db"
    for url in (theirs, ours):
        Inbox(url).close()
    (tmp_path / "address").write_text(ours)
    (tmp_path / "address").chmod(0o600)
    monkeypatch.setenv("GATE_STORE", str(place.settings.store))
    command = ["reconcile", NAME, "--tracking-uri", place.uri, "--json"]
    command += ["--ledger", str(place.settings.ledger), "--policy", str(place.settings.policy)]
    for keepers_named, lines in (([], [None, None]), (["--inbox", "@address"], [None, 4])):
        assert cli.main([*command, *keepers_named]) == 0
        assert json.loads(capsys.readouterr().out)["models"] == {NAME: []}  # their store is ours
        kept = [InboxKeeper(url).head() for url in (theirs, ours)]
        assert [one and one.lines for one in kept] == lines
    assert not (tmp_path / ".gate" / "store").exists()
    monkeypatch.setenv("GATE_INBOX", "@address")
    older(place.settings.ledger)
    (place.settings.store / HEAD_FILE).unlink()
    assert cli.main(command) == 2
    assert f"the inbox {ours} saw it" in capsys.readouterr().out
