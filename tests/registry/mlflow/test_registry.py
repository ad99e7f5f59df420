"""MlflowRegistry on a SQLite file and against a real MLflow server."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from ruamel.yaml import YAML

from gate import Digest
from gate.deploy.store import ModelStore
from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    PromotionConflict,
    RegistryDenied,
    RegistryError,
    ResourceGone,
    StorageError,
)
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import using_tracking_uri
from gate.mlflow_client.registry import MlflowRegistry
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.registry import alias
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.release import PromotionResult, Release
from gate.service.reconciler import Reconciler
from gate.signing.keys import SigningKey
from tests import builders, plain_http
from tests.registry.promoting import promote, submit
from tests.registry.releases import onnx_file, onnx_file_with_data, release
from tests.registry.servers import ADMIN, add_user, grant_edit, make_run
from tests.registry.signed import Signing, save_trust, trust_in
from tests.registry.simulator import Watched

POLICY = builders.policy()
_names = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class RegistryAccess:
    """A registry, and a model name that no other test uses."""

    uri: str
    run_id: str
    name: str
    artifacts: Path

    @property
    def registry(self) -> MlflowRegistry:
        return MlflowRegistry(self.uri)

    def with_run(self, new_release: Release) -> Release:
        return dataclasses.replace(new_release, model_name=self.name, run_id=self.run_id)

    def promote(self, new_release: Release, ledger: Ledger) -> PromotionResult:
        return promote(self.registry, self.with_run(new_release), ledger=ledger)

    def aliases(self) -> dict[str, str | None]:
        registry = self.registry
        return {a: registry.alias(self.name, a) for a in (CANDIDATE, CHAMPION, PREVIOUS)}

    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("database")
    return f"sqlite:///{folder}/mlflow.db", folder / "artifacts"


@pytest.fixture
def sqlite_registry(database: tuple[str, Path]) -> RegistryAccess:
    uri, artifacts = database
    return RegistryAccess(
        uri, make_run(uri, artifacts=artifacts), f"digits-{next(_names)}", artifacts
    )


@pytest.fixture(
    params=["database", pytest.param("server", marks=[pytest.mark.slow, pytest.mark.proof])]
)
def registry_access(request: pytest.FixtureRequest) -> RegistryAccess:
    if request.param == "database":
        return request.getfixturevalue("sqlite_registry")
    server = request.getfixturevalue("server")
    return RegistryAccess(
        server.uri, make_run(server.uri), f"digits-{next(_names)}", server.artifacts
    )


@pytest.fixture(autouse=True)
def _no_mlflow_state_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Assert that no test leaves an active run, another tracking URI or a database file."""
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
def test_promoted_version_holds_exactly_the_measured_file(
    registry_access: RegistryAccess, ledger: Ledger, first: Release, second: Release, tmp_path: Path
) -> None:
    """Registry, file, tag and ledger have the same digest."""
    assert registry_access.promote(first, ledger).outcome == "promoted"
    outcome = registry_access.promote(second, ledger)
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "2", "1")
    assert registry_access.aliases() == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    want = Digest.from_file(second.onnx_path)
    path = registry_access.registry.download(registry_access.name, "2", tmp_path / "back")
    assert Digest.from_file(path) == want
    version = registry_access.registry.version(registry_access.name, "2")
    assert version.tags[Tag.SHA256] == want.hex
    assert version.run_id == registry_access.run_id
    status, _, body = version.description.partition("\n\n")
    assert status.startswith("Status: champion since ")
    assert body == second.description
    before = registry_access.registry.version(registry_access.name, "1").description
    assert before.startswith("Status: was champion until ")
    assert "replaced by version 2." in before
    assert ledger.entries()[-1].sha256 == want
    (result,) = registry_access.registry.find(registry_access.name, want)
    assert result.number == "2"
    assert registry_access.promote(second, ledger).outcome == "unchanged"

    back = rollback(registry_access.registry, registry_access.name, ledger=ledger, reason="test")
    assert (back.version, registry_access.aliases()[CHAMPION]) == ("1", "1")
    assert registry_access.promote(second, ledger).outcome == "refused"


def test_run_stays_finished_and_links_its_logged_model(
    registry_access: RegistryAccess, ledger: Ledger, first: Release
) -> None:
    registry_access.promote(first, ledger)
    with using_tracking_uri(registry_access.uri):
        client = registry_access.client()
        run = client.get_run(registry_access.run_id)
        source = client.get_model_version(registry_access.name, "1").source
        model = client.get_logged_model(source.removeprefix("models:/"))
        runs = client.search_runs([run.info.experiment_id], "status = 'RUNNING'")
    assert run.info.status == "FINISHED"
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert model.source_run_id == registry_access.run_id
    assert str(model.status) == "READY"
    assert not [r for r in runs if r.info.run_id == registry_access.run_id]


def test_active_run_and_environment_of_the_caller_stay_unchanged(
    sqlite_registry: RegistryAccess,
    ledger: Ledger,
    first: Release,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mlflow run` sets MLFLOW_RUN_ID, and the caller may use another tracking URI."""
    second = f"sqlite:///{tmp_path}/other.db"
    run_id = make_run(second, artifacts=tmp_path / "other")
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    with using_tracking_uri(second), mlflow.start_run(run_id=run_id) as active:
        assert sqlite_registry.promote(first, ledger).outcome == "promoted"
        assert mlflow.active_run() is active
        assert mlflow.get_tracking_uri() == second
        assert os.environ["MLFLOW_TRACKING_URI"] == second
        assert os.environ["MLFLOW_RUN_ID"] == run_id
        run = mlflow.MlflowClient().get_run(run_id)
        assert run.info.status == "RUNNING"
        assert not run.outputs.model_outputs
    (tmp_path / "other.db").unlink()


@pytest.mark.parametrize("make", [onnx_file, onnx_file_with_data])
def test_mlflow_loads_the_promoted_model(
    registry_access: RegistryAccess, ledger: Ledger, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    import mlflow.onnx
    import numpy as np

    new_release = release(make(tmp_path / "model with data.onnx"))
    assert bool(new_release.evidence.subject.external_data) == (make is onnx_file_with_data)
    outcome = registry_access.promote(new_release, ledger)
    sha256 = new_release.evidence.subject.sha256
    folder = tmp_path / "back"
    path = registry_access.registry.download(registry_access.name, str(outcome.version), folder)
    names = new_release.evidence.subject.external_data
    assert digest_of_model(path, external_data=names) == sha256
    inputs = {"input": np.ones((2, 3), np.float32)}
    with using_tracking_uri(registry_access.uri):
        loaded = mlflow.onnx.load_model(f"models:/{registry_access.name}/1")
        served = mlflow.pyfunc.load_model(f"models:/{registry_access.name}@{CHAMPION}")
        logits = served.predict(inputs)["logits"]
    assert [i.name for i in loaded.graph.input] == ["input"]
    assert logits.shape == (2, 10)
    assert served.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 3)


def test_non_canonical_protobuf_is_stored_byte_for_byte(
    sqlite_registry: RegistryAccess, ledger: Ledger, tmp_path: Path
) -> None:
    """The file has a field twice, which protobuf serializes only once."""
    path = onnx_file(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes() + path.read_bytes()[:2])
    new_release = release(path)
    assert sqlite_registry.promote(new_release, ledger).outcome == "promoted"
    back = sqlite_registry.registry.download(sqlite_registry.name, "1", tmp_path / "back")
    assert back.read_bytes() == path.read_bytes()


Tamper = Callable[[RegistryAccess, Path], None]


def _upload_file(registry_access: RegistryAccess, file: Path) -> None:
    """Upload a file with the MLflow client, as anyone with write access to the run can."""
    with using_tracking_uri(registry_access.uri):
        client = registry_access.client()
        client.log_model_artifact(_model_id(registry_access), str(file))


def _model_id(registry_access: RegistryAccess) -> str:
    with using_tracking_uri(registry_access.uri):
        source: str = registry_access.client().get_model_version(registry_access.name, "1").source
        return source.removeprefix("models:/")


def _overwrite_model(registry_access: RegistryAccess, folder: Path) -> None:
    _upload_file(registry_access, onnx_file(folder / "evil" / "model.onnx", seed=666))


def _delete_files(pattern: str) -> Tamper:
    def tamper(registry_access: RegistryAccess, _folder: Path) -> None:
        model_id = _model_id(registry_access)
        matches = [
            path for path in registry_access.artifacts.rglob(pattern) if model_id in str(path)
        ]
        assert matches
        for path in matches:
            if path.is_file():
                path.unlink()

    return tamper


def _edit_mlmodel(text: str = "", **flavor: object) -> Tamper:
    """Replace the MLmodel by `text`, or set entries of its pyfunc flavor."""

    def tamper(registry_access: RegistryAccess, folder: Path) -> None:
        file = registry_access.registry.download(registry_access.name, "1", folder).with_name(
            "MLmodel"
        )
        described = YAML(typ="safe").load(file)
        described["flavors"]["python_function"] |= flavor
        YAML(typ="safe").dump(described, file)
        _upload_file(registry_access, Path(file.write_text(text) and file) if text else file)

    return tamper


DAMAGED: dict[str, Tamper] = {
    "no MLmodel": _delete_files("MLmodel"),
    "no model": _delete_files("model.onnx"),
    "another file": _overwrite_model,
    "a nested MLmodel": _edit_mlmodel("[" * 20000),
    "no flavors": _edit_mlmodel("flavors: []"),
    "another file is served": _edit_mlmodel(data="evil.onnx"),
    "another module loads it": _edit_mlmodel(loader_module="mlflow.sklearn"),
    "code is loaded": _edit_mlmodel(code="code"),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_version_is_recreated_and_never_a_rollback_target(
    sqlite_registry: RegistryAccess,
    ledger: Ledger,
    first: Release,
    second: Release,
    tmp_path: Path,
    damage: str,
) -> None:
    sqlite_registry.promote(first, ledger)
    DAMAGED[damage](sqlite_registry, tmp_path)
    outcome = sqlite_registry.promote(first, ledger)
    assert (outcome.outcome, outcome.version) == ("promoted", "2")
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted"]
    with pytest.raises((DigestMismatch, ArtifactMissing), match="version 1"):
        rollback(sqlite_registry.registry, sqlite_registry.name, ledger=ledger, reason="test")
    assert sqlite_registry.aliases()[CHAMPION] == "2"


def test_deleted_run_is_reported(
    registry_access: RegistryAccess, ledger: Ledger, first: Release
) -> None:
    access_without_run = dataclasses.replace(registry_access, run_id="0" * 32)
    with pytest.raises(RegistryError, match="deleted, or belongs to another server"):
        access_without_run.promote(first, ledger)
    assert registry_access.aliases()[CHAMPION] is None
    assert registry_access.promote(first, ledger).outcome == "promoted"


def test_full_disk_is_a_storage_error(
    sqlite_registry: RegistryAccess, ledger: Ledger, first: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalArtifactRepository, "log_artifacts", raise_disk_full)
        with pytest.raises(StorageError, match="the disk is full"):
            sqlite_registry.promote(first, ledger)
    assert sqlite_registry.aliases()[CHAMPION] is None
    assert sqlite_registry.promote(first, ledger).outcome == "promoted"


def _promote_in_process(
    registry_access: RegistryAccess, folder: Path, seed: int, queue: Any
) -> None:
    new_release = release(onnx_file(folder / f"{seed}.onnx", seed=seed))
    registry = Watched(registry_access.registry)
    barrier, queue = queue
    waited: list[bool] = []

    def wait_at_barrier(call: str, _: int) -> None:
        """Let the winner keep the lock until the other process has failed to take it."""
        if call == "create_version" and not waited:
            waited.append(True)
            barrier.wait(240)

    registry.before = wait_at_barrier
    alias.LOCK_TIMEOUT_S = 0.0
    try:
        created = promote(
            registry,
            registry_access.with_run(new_release),
            policy=POLICY,
            ledger=Ledger(folder / "ledger.db"),
        )
        queue.put((created.outcome, seed, os.getpid(), ""))
    except PromotionConflict as error:
        barrier.wait(240)
        queue.put(("conflict", seed, os.getpid(), str(error)))


@pytest.mark.proof
def test_exactly_one_of_two_concurrent_processes_promotes(
    sqlite_registry: RegistryAccess, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(2)
    processes = [
        context.Process(
            target=_promote_in_process, args=(sqlite_registry, tmp_path, seed, (barrier, queue))
        )
        for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    results = sorted(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    (loser_outcome, _, _, reported), (winner_outcome, seed, pid, _) = results
    assert (loser_outcome, winner_outcome) == ("conflict", "promoted")
    assert f"process {pid} on " in reported
    ledger = Ledger(tmp_path / "ledger.db")
    assert sorted(e.action for e in ledger.entries()) == ["conflict", "promoted"]
    path = sqlite_registry.registry.download(sqlite_registry.name, "1", tmp_path / "back")
    assert path.read_bytes() == (tmp_path / f"{seed}.onnx").read_bytes()
    assert sqlite_registry.aliases() == {CANDIDATE: "1", CHAMPION: "1", PREVIOUS: None}


def test_deleted_version_raises_resource_gone(
    sqlite_registry: RegistryAccess, ledger: Ledger, first: Release
) -> None:
    assert not sqlite_registry.registry.has_model(sqlite_registry.name)
    with pytest.raises(ResourceGone):
        sqlite_registry.registry.version(sqlite_registry.name, "1")
    sqlite_registry.promote(first, ledger)
    assert sqlite_registry.registry.has_model(sqlite_registry.name)
    sqlite_registry.client().delete_model_version(sqlite_registry.name, "1")
    with pytest.raises(ResourceGone):
        sqlite_registry.registry.version(sqlite_registry.name, "1")
    assert sqlite_registry.registry.has_model(sqlite_registry.name)
    assert sqlite_registry.aliases() == dict.fromkeys((CANDIDATE, CHAMPION, PREVIOUS))


PAGES = [(404, "<html>not found</html>"), (404, '{"detail": "no such page"}'), (410, ""), (500, "")]


@pytest.mark.rows(5)
@pytest.mark.parametrize(("status", "page"), PAGES)
def test_proxy_error_page_is_not_resource_gone(status: int, page: str) -> None:
    with plain_http.serve_answers(lambda _path: (status, page.encode())) as address:
        registry = MlflowRegistry(address)
        for read in (
            lambda: registry.has_model("digits"),
            lambda: registry.version("digits", "1"),
            lambda: registry.alias("digits", CHAMPION),
        ):
            with pytest.raises(RegistryError) as caught:
                read()
            assert not isinstance(caught.value, ResourceGone)


@pytest.fixture
def admin_access(guarded_server: Any, monkeypatch: pytest.MonkeyPatch) -> RegistryAccess:
    """A registry whose server checks permissions, used as the administrator."""
    uri = guarded_server.uri
    _log_in(monkeypatch, *ADMIN)
    return RegistryAccess(uri, make_run(uri), f"digits-{next(_names)}", guarded_server.artifacts)


def _log_in(monkeypatch: pytest.MonkeyPatch, user: str, password: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


def _log_in_as_new_user(uri: str, monkeypatch: pytest.MonkeyPatch) -> str:
    user, password = f"user-{next(_names)}", "password-of-a-test-user"
    add_user(uri, user, password)
    _log_in(monkeypatch, user, password)
    return user


@pytest.mark.slow
@pytest.mark.proof
def test_user_without_edit_permission_is_denied(
    admin_access: RegistryAccess, ledger: Ledger, first: Release, second: Release, monkeypatch
) -> None:
    assert admin_access.promote(first, ledger).outcome == "promoted"
    _log_in_as_new_user(admin_access.uri, monkeypatch)
    registry, name = admin_access.registry, admin_access.name
    for write in (
        lambda: admin_access.promote(second, ledger),
        lambda: registry.create_version(name, admin_access.with_run(first).draft()),
        lambda: registry.set_alias(name, CANDIDATE, "1"),
        lambda: registry.set_tag(name, "1", key="gate.rolled_back", value="x"),
        lambda: registry.set_description(name, "1", "x"),
    ):
        with pytest.raises(RegistryDenied, match="needs EDIT on the registered model"):
            write()
    assert admin_access.aliases() == {CANDIDATE: "1", CHAMPION: "1", PREVIOUS: None}
    assert [e.action for e in ledger.entries()] == ["promoted"]


@pytest.mark.slow
@pytest.mark.proof
def test_wrong_password_is_denied(admin_access: RegistryAccess, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(RegistryDenied, match="MLFLOW_TRACKING_PASSWORD"):
        admin_access.registry.ensure_model(admin_access.name)


@pytest.mark.slow
@pytest.mark.proof
def test_submitter_needs_only_edit_permission_on_the_model(
    admin_access: RegistryAccess, first: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI has EDIT on the model but no ledger and no store; the service is the administrator."""
    uri, name, ci = admin_access.uri, admin_access.name, SigningKey.make(tmp_path / "ci.pem")
    admin_access.registry.ensure_model(name)
    grant_edit(uri, _log_in_as_new_user(uri, monkeypatch), model=name)
    with using_tracking_uri(uri):  # by default users may only read the experiments of other users
        experiment = admin_access.client().create_experiment(name)
        run_id = str(admin_access.client().create_run(experiment).info.run_id)
    release_of_run = dataclasses.replace(first, model_name=name, run_id=run_id)
    signed = Signing(ci, registry=uri, model=name).signed(release_of_run, POLICY)
    result = submit(admin_access.registry, signed)
    assert (result.outcome, result.version) == ("handed_in", "1")

    _log_in(monkeypatch, *ADMIN)
    trust = TrustFile(save_trust(trust_in(ci), tmp_path / "trust.yaml"))
    ledger = Ledger(tmp_path / "service" / "ledger.jsonl")
    store = ModelStore(tmp_path / "store")
    reconcile = Reconciler(admin_access.registry, ledger, POLICY, store=store, trust=trust)
    outcomes = [getattr(item, "outcome", item) for item in reconcile(name, cause="timer")]
    assert outcomes == ["promoted", "deployed"]
    assert admin_access.aliases() == {CANDIDATE: "1", CHAMPION: "1", PREVIOUS: None}
    (line, _) = ledger.entries()
    assert line.made_at == admin_access.registry.version(name, "1").created_at
    assert line.made_at is not None
    assert list(reconcile(name, cause="timer")) == []
