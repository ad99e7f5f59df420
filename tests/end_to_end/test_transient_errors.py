"""Transient errors between gate and a real MLflow server during each move of the champion: after two reconciles the right version serves."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from gate.deploy.store import EXACT
from gate.errors import GateError
from gate.registry.interface import CHAMPION
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading, RegisteredModel
from tests.end_to_end.faulty_proxy import FAULTS, Fault, Proxy, proxy
from tests.exhaustive import some
from tests.registry.folder_snapshot import FolderSnapshot
from tests.registry.servers import Server
from tests.sandbox.in_process import read_in_process
from tests.service.registry_setup import Model

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def faulty_proxy(server: Server) -> Iterator[Proxy]:
    """The weather over the server of these tests; its clients lose patience soon."""
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        impatient.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
        impatient.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        impatient.setattr("gate.registry.registered_model.PAUSE_S", 0.0)
        with proxy(server.uri) as created:
            yield created


@pytest.fixture(scope="module")
def initial_state(
    server: Server, faulty_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, FolderSnapshot]:
    """Two versions served; a third waits for its review."""
    created = Model(tmp_path_factory.mktemp("weather"), faulty_proxy.address, "weather")
    for seed in (1, 2, 3):
        number = created.submit_version(seed)
        if seed < 3:
            created.approve(number)
            created.reconcile_once()
    return created, FolderSnapshot(created.setup.folder, server.artifacts.with_name("mlflow.db"))


@pytest.fixture
def model(initial_state: tuple[Model, FolderSnapshot], monkeypatch: pytest.MonkeyPatch) -> Model:
    """Before a service that was just started, and that is sure of a mismatch at the next look."""
    read_in_process(monkeypatch)
    created, beginning = initial_state
    beginning.restore()
    created.reading = Reading(mismatches=MismatchMemory(0.0, wait=None))
    return created


def promotion(model: Model) -> Callable[[], object]:
    """A fourth is handed in, which somebody does again when it did not work."""
    return lambda: model.submit_version(4)


def review(model: Model) -> Callable[[], object]:
    """The third was approved."""
    model.approve("3")
    return model.reconcile_once


def revert(model: Model) -> Callable[[], object]:
    """Somebody pointed `champion` at the third, which nobody approved."""
    model.registry.set_alias(model.name, CHAMPION, "3")
    return model.reconcile_once


def deployment(model: Model) -> Callable[[], object]:
    """The store was lost."""
    shutil.rmtree(model.setup.folder / "store")
    return model.reconcile_once


def manual_rollback(model: Model) -> Callable[[], object]:
    """A rollback, which somebody does again when it did not work."""

    def roll_back() -> None:
        registered = RegisteredModel(model.registry, model.setup.ledger, model.name)
        if registered.history().serving != "1":
            rollback(model.registry, model.name, ledger=model.setup.ledger, reason="worse")

    return roll_back


OPERATIONS = {
    "promotion": (promotion, "2"),
    "review": (review, "3"),
    "revert": (revert, "2"),
    "deployment": (deployment, "2"),
    "rollback": (manual_rollback, "1"),
}
"""What is done, and the champion afterwards."""


AT_ONCE: tuple[Fault, ...] = ("503", "hang", "page", "lost")
"""One of each sort also strikes the very first request."""


CASES = some(
    {
        f"{name}-{fault}-{spared}": (*done, fault, spared)
        for fault, spared in [*((f, 1) for f in FAULTS), *((f, 0) for f in AT_ONCE)]
        for name, done in OPERATIONS.items()
    },
    80,
)


@pytest.mark.parametrize(("begin", "champion", "fault", "spared"), CASES.values(), ids=list(CASES))
def test_state_is_right_two_reconciles_after_transient_errors(
    model: Model, faulty_proxy: Proxy, begin: Callable[[Model], Callable[[], object]], champion: str,
    fault: Fault, spared: int,
) -> None:  # fmt: skip
    do = begin(model)
    with faulty_proxy.injecting(fault, spared=spared):
        for act in (do, model.reconcile_once):
            with contextlib.suppress(GateError):
                act()
    do()
    for _ in range(2):
        model.reconcile_once()
    assert model.reconcile_once() == 0
    assert model.registry.alias(model.name, CHAMPION) == champion
    lines = model.setup.ledger.entries()
    (expected,) = {line.sha256 for line in lines if line.version == champion and line.sha256}
    live = model.store.live(model.name)
    assert live is not None
    assert live.slots[EXACT].sha256 == expected
