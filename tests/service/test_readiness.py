"""/readyz reports each failing dependency, over real HTTP with real disks and databases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.deploy.deploy import deploy
from gate.deploy.store import ModelStore
from gate.errors import RegistryUnavailable
from gate.ledger import entry
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import reach
from gate.service import app
from gate.service.app import ReadinessCheck, RegistryCheck
from tests.deploy import models
from tests.ledger.rows import replace_text
from tests.service.deliveries import Service, event_body, run_service, settings, wait_until


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache, and allow 30 s so that a busy machine causes no timeout."""
    monkeypatch.setattr(app, "_CACHE_S", 0.0)
    monkeypatch.setattr(app, "_TIMEOUT_S", 30.0)


@pytest.fixture
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_TIMEOUT_S", 0.5)


@contextmanager
def run_ready_service(folder: Path, **options: Any) -> Iterator[Service]:
    """Run a service until it is ready."""
    with run_service(settings(folder, **options)) as service:
        wait_until(lambda: service.get("/readyz").status_code == 200)
        yield service


def failing_checks(service: Service) -> dict[str, str]:
    """Return the failing checks of `/readyz`, and assert that `/healthz` still answers."""
    response = service.get("/readyz")
    states: dict[str, Any] = response.json()
    is_ready = states.pop("ready")
    matches = {name: state for name, state in states.items() if state != "ok"}
    assert (response.status_code, is_ready) == ((503, False) if matches else (200, True))
    assert service.get("/healthz").json() == {"status": "alive"}
    return matches


def edit_entry(path: Path) -> None:
    replace_text(path, b"the first", b"the worst")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "problem"), [(edit_entry, "is broken"), (replace_by_folder, "can't be read")]
)
def test_damaged_ledger_makes_the_service_unready(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    problem: str,
) -> None:
    monkeypatch.setattr(entry, "_REHASH_S", -1.0)  # older entries are hashed again periodically
    ledger = Ledger(tmp_path / "state.db")
    for reason in ("the first", "the second"):
        line = LedgerEntry(action="conflict", registry="r", model="digits", reason=reason)
        ledger.append(line)
    with run_ready_service(tmp_path) as service:
        damage(Path(ledger.location))
        assert failing_checks(service) == {"ledger": problem}
        assert service.send(event_body()).status_code == 202  # it triggers the next pass
    assert ledger.location in caplog.text


def test_damaged_store_makes_the_service_unready(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    source = models.source(tmp_path)
    deploy(store, "digits", {"exact": source})
    with run_ready_service(tmp_path) as service:
        (store.live_link("digits") / "manifest.json").unlink()
        assert failing_checks(service) == {"store": "is damaged"}
        deploy(store, "digits", {"exact": source})
        assert failing_checks(service) == {}


def test_registry_answer_is_valid_for_ten_seconds() -> None:
    now, up = 100.0, False

    def reach() -> None:
        if not up:
            raise RegistryUnavailable("no answer")

    check = RegistryCheck(reach, clock=lambda: now)
    assert check.problem() == "does not answer"
    up = True
    assert check.problem() is None
    up, now = False, 110.0
    assert check.problem() is None
    now = 110.1
    assert check.problem() == "does not answer"


def test_unreachable_registry_makes_the_service_unready(tmp_path: Path) -> None:
    uri = "http://127.0.0.1:1"
    with run_service(settings(tmp_path), reach=lambda: reach(uri)) as service:
        assert failing_checks(service) == {"registry": "does not answer"}


@pytest.mark.usefixtures("_short_timeout")
def test_concurrent_requests_share_one_readiness_check(monkeypatch: pytest.MonkeyPatch) -> None:
    resume, started = threading.Event(), []

    def attempt() -> str | None:
        started.append(threading.current_thread())
        resume.wait(10)
        return None

    async def check_concurrently() -> None:
        check = ReadinessCheck(attempt)
        answers = await asyncio.gather(*(check.problem() for _ in range(200)))
        assert len(started) == 1
        assert all(response is not None and "has not answered" in response for response in answers)
        resume.set()
        while await check.problem() is not None:
            await asyncio.sleep(0.01)

    asyncio.run(check_concurrently())


def test_readiness_result_is_cached_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_CACHE_S", 3600.0)
    answers = iter(["one", "two"])

    async def ask() -> None:
        check = ReadinessCheck(lambda: next(answers))
        assert [await check.problem() for _ in range(50)] == ["one"] * 50
        monkeypatch.setattr(app, "_CACHE_S", -1.0)
        assert await check.problem() == "two"

    asyncio.run(ask())
