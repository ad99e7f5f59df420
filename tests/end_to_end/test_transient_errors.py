"""Transient errors between gate and a real MLflow server during each move of the champion: after two reconciles the right version serves."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from gate import GateError
from gate.deploy.store import EXACT
from gate.registry.interface import CHAMPION
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading, RegisteredModel
from tests.end_to_end.faulty_proxy import FAULTS, Fault, Proxy, run_proxy
from tests.exhaustive import select_rows
from tests.registry.folder_snapshot import FolderSnapshot
from tests.registry.servers import Server
from tests.sandbox.in_process import read_in_process
from tests.service.registry_setup import Model

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def faulty_proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server of these tests, whose clients have short timeouts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        patched.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        patched.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        patched.setattr("gate.registry.registered_model.PAUSE_S", 0.0)
        with run_proxy(server.uri) as created:
            yield created


@pytest.fixture(scope="module")
def initial_state(
    server: Server, faulty_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, FolderSnapshot]:
    """A model with two former champions and a third version that waits for review."""
    created = Model(tmp_path_factory.mktemp("weather"), faulty_proxy.address, "weather")
    for seed in (1, 2, 3):
        number = created.submit_version(seed)
        if seed < 3:
            created.approve(number)
            created.reconcile_once()
    return created, FolderSnapshot(created.setup.folder, server.artifacts.with_name("mlflow.db"))


@pytest.fixture
def model(initial_state: tuple[Model, FolderSnapshot], monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model in its initial state, for a new service that confirms a mismatch in the next pass."""
    read_in_process(monkeypatch)
    created, snapshot = initial_state
    snapshot.restore()
    created.reading = Reading(mismatches=MismatchMemory(0.0, wait=None))
    return created


def submit_fourth_version(model: Model) -> Callable[[], object]:
    """Submit a fourth version; the test repeats a failed submission."""
    return lambda: model.submit_version(4)


def approve_third_version(model: Model) -> Callable[[], object]:
    """Approve the third version."""
    model.approve("3")
    return model.reconcile_once


def serve_unapproved_version(model: Model) -> Callable[[], object]:
    """Move `champion` by hand to the third version, which was not approved."""
    model.registry.set_alias(model.name, CHAMPION, "3")
    return model.reconcile_once


def delete_store(model: Model) -> Callable[[], object]:
    """Delete the store."""
    shutil.rmtree(model.setup.folder / "store")
    return model.reconcile_once


def roll_back_manually(model: Model) -> Callable[[], object]:
    """Roll back; the test repeats a failed rollback."""

    def roll_back() -> None:
        registered = RegisteredModel(model.registry, model.setup.ledger, model.name)
        if registered.history().serving != "1":
            rollback(model.registry, model.name, ledger=model.setup.ledger, reason="worse")

    return roll_back


OPERATIONS = {
    "promotion": (submit_fourth_version, "2"),
    "review": (approve_third_version, "3"),
    "revert": (serve_unapproved_version, "2"),
    "deployment": (delete_store, "2"),
    "rollback": (roll_back_manually, "1"),
}
"""The operation, and the champion afterwards."""


FIRST_REQUEST_FAULTS: tuple[Fault, ...] = ("503", "hang", "page", "lost")
"""Faults that also apply to the very first request, one of each kind."""


CASES = select_rows(
    {
        f"{name}-{fault}-{spared}": (*done, fault, spared)
        for fault, spared in [*((f, 1) for f in FAULTS), *((f, 0) for f in FIRST_REQUEST_FAULTS)]
        for name, done in OPERATIONS.items()
    },
    80,
)


@pytest.mark.parametrize(("begin", "champion", "fault", "spared"), CASES.values(), ids=list(CASES))
def test_state_is_right_two_reconciles_after_transient_errors(
    model: Model, faulty_proxy: Proxy, begin: Callable[[Model], Callable[[], object]], champion: str,
    fault: Fault, spared: int,
) -> None:  # fmt: skip
    operation = begin(model)
    with faulty_proxy.inject(fault, spared=spared):
        for act in (operation, model.reconcile_once):
            with contextlib.suppress(GateError):
                act()
    operation()
    for _ in range(2):
        model.reconcile_once()
    assert model.reconcile_once() == 0
    assert model.registry.alias(model.name, CHAMPION) == champion
    lines = model.setup.ledger.entries()
    (expected,) = {line.sha256 for line in lines if line.version == champion and line.sha256}
    live = model.store.live(model.name)
    assert live is not None
    assert live.slots[EXACT].sha256 == expected
