"""The real thing: MLflow on a database file, and behind a server."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
from ruamel.yaml import YAML

from gate.errors import (
    DigestMismatch,
    PromotionConflict,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import lent
from gate.mlflow_client.registry import MlflowRegistry
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.registry import alias
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.release import PromotionResult, Release
from gate.storage.digest import Digest
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import onnx_file, onnx_file_with_data, release
from tests.registry.servers import ADMIN, add_user, make_run
from tests.registry.simulator import Crash, Watched

POLICY = builders.policy()
_names = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Place:
    """A registry to promote into, under a model name of the test's own."""

    uri: str
    run_id: str
    name: str
    artifacts: Path

    @property
    def registry(self) -> MlflowRegistry:
        return MlflowRegistry(self.uri)

    def here(self, of: Release) -> Release:
        return dataclasses.replace(of, model_name=self.name, run_id=self.run_id)

    def promote(self, of: Release, ledger: Ledger) -> PromotionResult:
        return promote(self.registry, self.here(of), policy=POLICY, ledger=ledger)

    def aliases(self) -> dict[str, str | None]:
        registry = self.registry
        return {a: registry.alias(self.name, a) for a in (CANDIDATE, CHAMPION, PREVIOUS)}

    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("database")
    return f"sqlite:///{folder}/mlflow.db", folder / "artifacts"


@pytest.fixture(
    params=["database", pytest.param("server", marks=[pytest.mark.slow, pytest.mark.proof])]
)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "server":
        server = request.getfixturevalue("server")
        uri, artifacts, run = server.uri, server.artifacts, make_run(server.uri)
    else:
        uri, artifacts = request.getfixturevalue("database")
        run = make_run(uri, artifacts=artifacts)
    return Place(uri, run, f"digits-{next(_names)}", artifacts)


@pytest.fixture(autouse=True)
def _nothing_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test may leave an active run, another tracking URI, or a stray database behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = mlflow.get_tracking_uri()
    yield
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert not list(tmp_path.glob("**/mlflow.db"))
    assert not list(tmp_path.glob("**/mlruns"))


@pytest.mark.rows(2)
@pytest.mark.proof
def test_a_promoted_file_is_the_measured_file(
    place: Place, ledger: Ledger, first: Release, second: Release, tmp_path: Path
) -> None:
    """Registry, file, tag and ledger: one digest."""
    assert place.promote(first, ledger).outcome == "promoted"
    outcome = place.promote(second, ledger)
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "2", "1")
    assert place.aliases() == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    want = Digest.of_file(second.onnx_path)
    path = place.registry.download(place.name, "2", tmp_path / "back")
    assert Digest.of_file(path) == want
    version = place.registry.version(place.name, "2")
    assert version.tags[Tag.SHA256] == want.hex
    assert version.run_id == place.run_id
    status, _, body = version.description.partition("\n\n")
    assert status.startswith("Status: champion since ")
    assert body == second.description
    before = place.registry.version(place.name, "1").description
    assert before.startswith("Status: was champion until ")
    assert "replaced by version 2." in before
    assert ledger.entries()[-1].sha256 == want
    (found,) = place.registry.find(place.name, want)
    assert found.number == "2"
    assert place.promote(second, ledger).outcome == "unchanged"

    back = rollback(place.registry, place.name, ledger=ledger, reason="test")
    assert (back.version, place.aliases()[CHAMPION]) == ("1", "1")
    assert place.promote(second, ledger).outcome == "refused"


def test_the_run_stays_finished_and_knows_its_model(
    place: Place, ledger: Ledger, first: Release
) -> None:
    place.promote(first, ledger)
    with lent(place.uri):
        client = place.client()
        run = client.get_run(place.run_id)
        source = client.get_model_version(place.name, "1").source
        model = client.get_logged_model(source.removeprefix("models:/"))
        runs = client.search_runs([run.info.experiment_id], "status = 'RUNNING'")
    assert run.info.status == "FINISHED"
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert model.source_run_id == place.run_id
    assert str(model.status) == "READY"
    assert not [r for r in runs if r.info.run_id == place.run_id]


def test_an_active_run_and_its_environment_are_left_alone(
    place: Place, ledger: Ledger, first: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap of `mlflow run`: MLFLOW_RUN_ID of a run, and another tracking URI, are about."""
    other = f"sqlite:///{tmp_path}/other.db"
    run_id = make_run(other, artifacts=tmp_path / "other")
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    with lent(other), mlflow.start_run(run_id=run_id) as active:
        assert place.promote(first, ledger).outcome == "promoted"
        assert mlflow.active_run() is active
        assert mlflow.get_tracking_uri() == other
        assert os.environ["MLFLOW_TRACKING_URI"] == other
        assert os.environ["MLFLOW_RUN_ID"] == run_id
        run = mlflow.MlflowClient().get_run(run_id)
        assert run.info.status == "RUNNING"
        assert not run.outputs.model_outputs
    (tmp_path / "other.db").unlink()


@pytest.mark.parametrize("make", [onnx_file, onnx_file_with_data])
def test_mlflow_loads_what_was_promoted(
    place: Place, ledger: Ledger, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    import mlflow.onnx
    import numpy as np

    of = release(make(tmp_path / "model with data.onnx"))
    assert bool(of.evidence.subject.external_data) == (make is onnx_file_with_data)
    outcome = place.promote(of, ledger)
    sha256 = of.evidence.subject.sha256
    folder = tmp_path / "back"
    path = place.registry.download(place.name, str(outcome.version), folder)
    names = of.evidence.subject.external_data
    assert digest_of_model(path, external_data=names) == sha256
    inputs = {"input": np.ones((2, 3), np.float32)}
    with lent(place.uri):
        loaded = mlflow.onnx.load_model(f"models:/{place.name}/1")
        served = mlflow.pyfunc.load_model(f"models:/{place.name}@{CHAMPION}")
        logits = served.predict(inputs)["logits"]
    assert [i.name for i in loaded.graph.input] == ["input"]
    assert logits.shape == (2, 10)
    assert served.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 3)


def test_an_unusual_serialisation_keeps_its_bytes(
    place: Place, ledger: Ledger, tmp_path: Path
) -> None:
    """A field given twice: valid protobuf, and written once when it is serialised again."""
    path = onnx_file(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes() + path.read_bytes()[:2])
    of = release(path)
    assert place.promote(of, ledger).outcome == "promoted"
    back = place.registry.download(place.name, "1", tmp_path / "back")
    assert back.read_bytes() == path.read_bytes()


def test_overwritten_artifacts_are_not_promoted(
    place: Place, ledger: Ledger, first: Release, second: Release, tmp_path: Path
) -> None:
    """An interrupted promotion left version 2; before the next one its file is changed."""
    place.promote(first, ledger)
    watched = Watched(place.registry)

    def crash(call: str, _: int) -> None:
        if call == "set_alias candidate":
            raise Crash

    watched.before = crash
    with pytest.raises(Crash):
        promote(watched, place.here(second), policy=POLICY, ledger=ledger)
    _overwrite(place, "2", tmp_path)
    outcome = place.promote(second, ledger)
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "3", "1")
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted"]
    assert place.aliases() == {CANDIDATE: "3", CHAMPION: "3", PREVIOUS: "1"}


def test_rollback_to_overwritten_artifacts_is_refused(
    place: Place, ledger: Ledger, first: Release, second: Release, tmp_path: Path
) -> None:
    place.promote(first, ledger)
    place.promote(second, ledger)
    _overwrite(place, "1", tmp_path)
    with pytest.raises(DigestMismatch, match="version 1"):
        rollback(place.registry, place.name, ledger=ledger, reason="test")
    assert place.aliases()[CHAMPION] == "2"


@pytest.mark.rows(5)
@pytest.mark.parametrize("gone", ["MLmodel", "model.onnx", "*"])
def test_missing_artifacts_are_made_anew(
    place: Place, ledger: Ledger, first: Release, gone: str
) -> None:
    place.promote(first, ledger)
    _delete(place, "1", gone)
    outcome = place.promote(first, ledger)
    assert (outcome.outcome, outcome.version) == ("promoted", "2")
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted"]


@pytest.mark.rows(4)
@pytest.mark.parametrize("text", ["[" * 20000, "flavors: {onnx: {data: " + "x" * 300 + "}}"])
def test_an_mlmodel_that_can_not_be_read_is_made_anew(
    place: Place, ledger: Ledger, first: Release, tmp_path: Path, text: str
) -> None:
    place.promote(first, ledger)
    file = place.registry.download(place.name, "1", tmp_path).with_name("MLmodel")
    file.write_text(text)
    with lent(place.uri):
        client = place.client()
        model_id = client.get_model_version(place.name, "1").source.removeprefix("models:/")
        client.log_model_artifact(model_id, str(file))
    assert place.promote(first, ledger).version == "2"
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted"]


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("entry", "value"),
    [("data", "evil.onnx"), ("loader_module", "mlflow.sklearn"), ("code", "code"), (None, [])],
)
def test_an_mlmodel_that_would_serve_something_else_is_made_anew(
    place: Place, ledger: Ledger, first: Release, tmp_path: Path, entry: str | None, value: object
) -> None:
    place.promote(first, ledger)
    file = place.registry.download(place.name, "1", tmp_path).with_name("MLmodel")
    described = YAML(typ="safe").load(file)
    if entry:
        described["flavors"]["python_function"][entry] = value
    else:
        described["flavors"] = value
    YAML(typ="safe").dump(described, file)
    with lent(place.uri):
        client = place.client()
        model_id = client.get_model_version(place.name, "1").source.removeprefix("models:/")
        client.log_model_artifact(model_id, str(file))
    outcome = place.promote(first, ledger)
    assert (outcome.outcome, outcome.version) == ("promoted", "2")
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted"]


def _overwrite(place: Place, number: str, tmp_path: Path) -> None:
    """As anyone may who may write the run: through MLflow itself."""
    evil = onnx_file(tmp_path / "evil" / "model.onnx", seed=666)
    with lent(place.uri):
        client = place.client()
        model_id = client.get_model_version(place.name, number).source.removeprefix("models:/")
        client.log_model_artifact(model_id, str(evil))


def _delete(place: Place, number: str, pattern: str) -> None:
    with lent(place.uri):
        client = place.client()
        model_id = client.get_model_version(place.name, number).source.removeprefix("models:/")
    found = [path for path in place.artifacts.rglob(pattern) if model_id in str(path)]
    assert found
    for path in found:
        if path.is_file():
            path.unlink()
    for path in sorted(found, reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def test_a_model_name_of_all_that_is_allowed(place: Place, ledger: Ledger, first: Release) -> None:
    odd = dataclasses.replace(place, name=f"{place.name}_O-clock.v1")
    assert odd.promote(first, ledger).outcome == "promoted"
    assert odd.promote(first, ledger).outcome == "unchanged"


def test_a_deleted_run_is_a_clear_error(place: Place, ledger: Ledger, first: Release) -> None:
    lost = dataclasses.replace(place, run_id="0" * 32)
    with pytest.raises(RegistryError, match="deleted, or belongs to another server"):
        lost.promote(first, ledger)
    assert place.aliases()[CHAMPION] is None
    assert place.promote(first, ledger).outcome == "promoted"


def test_a_full_disk_is_a_storage_error(
    database: tuple[str, Path], ledger: Ledger, first: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    place = Place(database[0], make_run(database[0], artifacts=database[1]), "full", database[1])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalArtifactRepository, "log_artifacts", full)
        with pytest.raises(StorageError, match="the disk is full"):
            place.promote(first, ledger)
    assert place.aliases()[CHAMPION] is None
    assert place.promote(first, ledger).outcome == "promoted"


def _promote_in_process(place: Place, folder: Path, seed: int, queue: Any) -> None:
    of = release(onnx_file(folder / f"{seed}.onnx", seed=seed))
    registry = Watched(place.registry)
    barrier, queue = queue
    waited: list[bool] = []

    def meet(call: str, _: int) -> None:
        """The winner keeps the lock until the other has been turned away."""
        if call == "create_version" and not waited:
            waited.append(True)
            barrier.wait(240)

    registry.before = meet
    alias.PATIENCE_S = 0.0
    try:
        made = promote(registry, place.here(of), policy=POLICY, ledger=Ledger(folder / "ledger.db"))
        queue.put((made.outcome, seed, os.getpid(), ""))
    except PromotionConflict as error:
        barrier.wait(240)
        queue.put(("conflict", seed, os.getpid(), str(error)))


@pytest.mark.rows(2)
@pytest.mark.proof
def test_of_two_processes_at_once_exactly_one_wins(place: Place, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(2)
    processes = [
        context.Process(target=_promote_in_process, args=(place, tmp_path, seed, (barrier, queue)))
        for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    results = sorted(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    (lost, _, _, told), (won, seed, pid, _) = results
    assert (lost, won) == ("conflict", "promoted")
    assert f"process {pid} on " in told
    ledger = Ledger(tmp_path / "ledger.db")
    assert sorted(e.action for e in ledger.entries()) == ["conflict", "promoted"]
    path = place.registry.download(place.name, "1", tmp_path / "back")
    assert path.read_bytes() == (tmp_path / f"{seed}.onnx").read_bytes()
    assert place.aliases() == {CANDIDATE: "1", CHAMPION: "1", PREVIOUS: None}


def test_a_dead_server_is_told_soon(ledger: Ledger, first: Release) -> None:
    registry = MlflowRegistry("http://127.0.0.1:9")
    with pytest.raises(RegistryUnavailable, match=r"no answer from http://127\.0\.0\.1:9"):
        promote(registry, first, policy=POLICY, ledger=ledger)


def test_what_is_gone_is_told_from_what_can_not_be_reached(
    place: Place, ledger: Ledger, first: Release
) -> None:
    assert not place.registry.has_model(place.name)
    with pytest.raises(ResourceGone):
        place.registry.version(place.name, "1")
    place.promote(first, ledger)
    assert place.registry.has_model(place.name)
    place.client().delete_model_version(place.name, "1")
    with pytest.raises(ResourceGone):
        place.registry.version(place.name, "1")
    assert place.registry.has_model(place.name)
    assert place.aliases() == dict.fromkeys((CANDIDATE, CHAMPION, PREVIOUS))


PAGES = [(404, "<html>not found</html>"), (404, '{"detail": "no such page"}'), (410, ""), (500, "")]


@pytest.mark.rows(5)
@pytest.mark.parametrize(("status", "page"), PAGES)
def test_a_page_of_a_proxy_says_of_nothing_that_it_is_gone(status: int, page: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        registry = MlflowRegistry(f"http://127.0.0.1:{proxy.server_port}")
        try:
            for read in (
                lambda: registry.has_model("digits"),
                lambda: registry.version("digits", "1"),
                lambda: registry.alias("digits", CHAMPION),
            ):
                with pytest.raises(RegistryError) as caught:
                    read()
                assert not isinstance(caught.value, ResourceGone)
        finally:
            proxy.shutdown()
            thread.join()


@pytest.fixture
def guarded(guarded_server: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The admin's champion on a server where the user of this process may only read."""
    uri = guarded_server.uri
    for name, value in zip(("USERNAME", "PASSWORD"), ADMIN, strict=True):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    run_id = make_run(uri)
    return Place(uri, run_id, f"digits-{next(_names)}", guarded_server.artifacts)


def _become_reader(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    user, password = f"reader-{next(_names)}", "password-of-the-test-reader"
    add_user(place.uri, user, password)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


@pytest.mark.slow
def test_a_user_without_permission_is_denied_and_nothing_moves(
    guarded: Place, ledger: Ledger, first: Release, second: Release, monkeypatch
) -> None:
    assert guarded.promote(first, ledger).outcome == "promoted"
    _become_reader(guarded, monkeypatch)
    registry, name = guarded.registry, guarded.name
    for write in (
        lambda: guarded.promote(second, ledger),
        lambda: registry.create_version(name, guarded.here(first).draft()),
        lambda: registry.set_alias(name, CANDIDATE, "1"),
        lambda: registry.set_tag(name, "1", key="gate.rolled_back", value="x"),
        lambda: registry.set_description(name, "1", "x"),
    ):
        with pytest.raises(RegistryDenied, match="needs EDIT on the registered model"):
            write()
    assert guarded.aliases() == {CANDIDATE: "1", CHAMPION: "1", PREVIOUS: None}
    assert [e.action for e in ledger.entries()] == ["promoted"]


@pytest.mark.slow
def test_a_wrong_password_is_denied(guarded: Place, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(RegistryDenied, match="MLFLOW_TRACKING_PASSWORD"):
        guarded.registry.ensure_model(guarded.name)
