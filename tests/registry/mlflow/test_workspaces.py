"""Registered models of one name in several workspaces of a server."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from cryptography.fernet import Fernet

from gate import Digest, cli
from gate.commands.click_types import ModelName
from gate.deploy.store import EXACT, ModelStore
from gate.errors import MismatchUnconfirmed, RegistryError, StorageError
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses, registry_identities
from gate.mlflow_client.connection import check_server, using_tracking_uri
from gate.mlflow_client.registry import MlflowRegistry
from gate.mlflow_client.webhooks import WebhookSubscription
from gate.registry.interface import CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading, RegisteredModel
from gate.registry.release import Release
from gate.service.app import WEBHOOK_PATH
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import StepResult
from gate.service.reconciler import Reconciler
from gate.signing.keys import SigningKey
from gate.signing.subjects import parse_resource_uri, resource_uri
from gate.storage.workspace import VARIABLE, current_workspace, working_in
from tests import builders, plain_http
from tests.registry.promoting import promote, submit
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import Server, make_run, run_mlflow_server
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Simulator
from tests.service.deliveries import SECRET, run_service, settings, wait_until

POLICY = builders.policy()
TEAM = "team-a"
KEY = f"{TEAM}:{NAME}"

pytestmark = pytest.mark.usefixtures("_no_workspace")


@pytest.fixture
def _no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # monkeypatch then restores the variable, whatever a test sets
    monkeypatch.delenv(VARIABLE)


@pytest.mark.parametrize(
    ("registry", "resource"),
    [
        ("https://a/x", "https://a/x#/models/my%20model"),
        ("https://a#/workspaces/team-a", "https://a#/workspaces/team-a/models/my%20model"),
        ("sqlite:///m.db#/workspaces/b2", "sqlite:///m.db#/workspaces/b2/models/my%20model"),
    ],
)
def test_resource_uri_contains_the_workspace(registry: str, resource: str) -> None:
    assert resource_uri(registry, "my model") == resource
    assert parse_resource_uri(resource) == (registry, "my model")


def test_default_workspace_model_uri_is_unambiguous() -> None:
    assert parse_resource_uri("https://a#/workspaces/default/models/digits") is None
    assert parse_resource_uri("https://a/workspaces/team-a/models/digits") is None
    name = "workspaces/team-a/models/digits"
    assert parse_resource_uri(resource_uri("https://a", name)) == ("https://a", name)


@pytest.mark.parametrize(
    ("variable", "given", "suffix"),
    [
        (None, None, ""),
        ("", None, ""),
        ("default", None, ""),
        (TEAM, None, "#/workspaces/team-a"),
        (TEAM, "default", ""),
        ("team-b", TEAM, "#/workspaces/team-a"),
    ],
)
def test_workspace_is_part_of_the_registry_identity(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str | None, suffix: str
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    registry = MlflowRegistry("http://user:secret@a.example:5000", workspace=given)
    assert registry.identity == f"http://a.example:5000{suffix}"
    assert registry.in_workspace("team-b").identity == "http://a.example:5000#/workspaces/team-b"


@pytest.mark.parametrize("name", ["Team", "a", "a/b", "../x", "-a", "a b", "x" * 64])
def test_invalid_workspace_name_is_refused(name: str) -> None:
    with pytest.raises(StorageError):
        MlflowRegistry("http://a.example", workspace=name)


def test_tracking_uri_with_a_workspace_is_refused() -> None:
    with pytest.raises(RegistryError):
        MlflowRegistry("http://a.example#/workspaces/team-a")


def test_database_without_workspaces_refuses_a_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow ignores the workspace there, so models of `default` would be taken for the team's."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    make_run(uri, artifacts=tmp_path / "artifacts")
    MlflowRegistry(uri).ensure_model(NAME)
    with pytest.raises(RegistryError, match="MLFLOW_ENABLE_WORKSPACES"):
        MlflowRegistry(uri, workspace=TEAM).has_model(NAME)
    monkeypatch.setenv(VARIABLE, TEAM)
    with pytest.raises(RegistryError, match="MLFLOW_ENABLE_WORKSPACES"):
        check_server(uri)


def test_server_without_workspaces_refuses_a_workspace() -> None:
    """MLflow before 3.10 ignores the header of the workspace."""
    model = json.dumps({"registered_model": {"name": NAME}}).encode()
    missing = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST"}).encode()

    def answer(path: str) -> tuple[int, bytes]:
        return (200, model) if path.endswith("registered-models/get") else (404, missing)

    with plain_http.serve_answers(answer) as uri:
        assert MlflowRegistry(uri).has_model(NAME)  # this call opens the client's stores
        with pytest.raises(RegistryError, match="enable-workspaces"):
            MlflowRegistry(uri, workspace=TEAM).has_model(NAME)


def test_each_workspace_exists_at_every_address_of_a_server(ledger: Ledger) -> None:
    declare_addresses(ledger, "http://a", ["http://b/", f"http://c#/workspaces/{TEAM}"])
    addresses = frozenset({"http://a", "http://b", "http://c"})
    assert registry_identities(ledger, "http://a") == addresses
    team = frozenset(f"{address}#/workspaces/{TEAM}" for address in addresses)
    assert registry_identities(ledger, f"http://B/#/workspaces/{TEAM}") == team
    assert not team & registry_identities(ledger, "http://a#/workspaces/team-b")


def test_promotion_in_one_workspace_does_not_affect_another(ledger: Ledger, tmp_path: Path) -> None:
    """Ledger entries, pending moves and mismatches of the workspaces are separate."""
    plain = RegisteredModel(Simulator(identity="http://a"), ledger, NAME)
    team = RegisteredModel(Simulator(identity=f"http://a#/workspaces/{TEAM}"), ledger, NAME)
    for model, seeds in ((plain, (1,)), (team, (2, 3))):
        for seed in seeds:
            created = release(onnx_file(tmp_path / f"{seed}.onnx", seed=seed))
            assert promote(model.registry, created, ledger=ledger).version == (
                "1" if seed < 3 else "2"
            )
    assert (plain.history().serving, team.history().serving) == ("1", "2")
    assert (plain.key, team.key) == (NAME, KEY)
    assert guard_champion(plain, POLICY, thoroughly=True) == []
    assert guard_champion(team, POLICY, thoroughly=True) == []
    assert rollback(team.registry, NAME, ledger=ledger, reason="test").version == "1"
    assert (plain.alias(CHAMPION), team.alias(CHAMPION)) == ("1", "1")
    with pytest.raises(RegistryError):
        rollback(plain.registry, NAME, ledger=ledger, reason="test")
    assert {line.key for line in ledger.entries()} == {NAME, KEY}


def test_mismatch_in_one_workspace_does_not_confirm_one_in_another(
    ledger: Ledger, first: Release
) -> None:
    clock = [0.0]
    reading = Reading(mismatches=MismatchMemory(60.0, wait=None, clock=lambda: clock[0]))
    models = []
    for identity in ("http://a", f"http://a#/workspaces/{TEAM}"):
        registry = Simulator(identity=identity)
        promote(registry, first, ledger=ledger)
        registry.versions[0].data += b"\0"
        models.append(RegisteredModel(registry, ledger, NAME, reading=reading))
    for clock[0], model in zip((0.0, 60.0), models, strict=True):
        with pytest.raises(MismatchUnconfirmed):
            guard_champion(model, POLICY, thoroughly=True)
    assert [entry.action for entry in ledger.entries()] == ["promoted", "promoted"]


def test_signed_verdict_is_valid_for_its_workspace_only(
    ledger: Ledger, first: Release, tmp_path: Path
) -> None:
    key = SigningKey.make(tmp_path / "ci.pem")
    options: dict[str, Any] = {"policy": POLICY, "trust": trust_in(key)}
    registries = {"": "http://a", **{w: f"http://a#/workspaces/{w}" for w in (TEAM, "team-b")}}
    for signed_for, other_registry in itertools.product(registries.values(), repeat=2):
        signed = Signing(key, registry=signed_for).signed(first, POLICY)
        result = submit(Simulator(identity=other_registry), signed, **options)
        assert (result.outcome == "handed_in") is (signed_for == other_registry), result.reason
        assert "same-registry" not in result.reason


def test_each_workspace_has_a_separate_deployment_folder(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    assert store.live_link(KEY) != store.live_link(NAME)
    assert store.live_link(KEY).parent == store.live_link(NAME).parent
    for name in ("../x:digits", "team-a:../x", ":digits", "team-a:", "a:b:digits", "Team:digits"):
        with pytest.raises(StorageError):
            store.live(name)


@pytest.fixture
def command() -> click.Command:
    @click.command()
    @click.argument("model", type=ModelName())
    @click.option("--against", type=ModelName())
    def show(model: str, against: str | None) -> None:
        click.echo(f"{model} {against} {current_workspace()}")

    return show


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [
        (None, ["digits"], "digits None None"),
        (None, ["team-a:digits"], "digits None team-a"),
        (TEAM, ["digits"], "digits None team-a"),
        (TEAM, ["default:digits"], "digits None None"),
        (None, ["team-a:digits", "--against", "team-a:other"], "digits other team-a"),
        (TEAM, ["team-b:digits", "--against", "team-b:other"], "digits other team-b"),
        (None, ["team-a:digits", "--against", "team-b:other"], None),
        (None, ["team-a:digits", "--against", "default:other"], None),
        (None, ["default:digits", "--against", "team-a:other"], None),
    ],
)
def test_command_runs_in_the_workspace_of_its_model(
    command: click.Command,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    arguments: list[str],
    expected: str | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == (2 if expected is None else 0)
    assert expected is None or result.output.strip() == expected
    assert expected is None or os.environ.get(VARIABLE) == variable


def test_failed_command_does_not_reset_the_workspace_later(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished generator of a failed command can be garbage-collected at any time."""
    gc.disable()
    try:
        wrong = ["team-a:digits", "--against", "team-b:other"]
        assert CliRunner().invoke(command, wrong).exit_code == 2
        monkeypatch.setenv(VARIABLE, "team-c")
        gc.collect()
        assert current_workspace() == "team-c"
    finally:
        gc.enable()


def test_failed_command_restores_the_workspace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["rollback", KEY, "--policy", "nosuch.yaml"]) == 2
    assert "nosuch.yaml" in capsys.readouterr().err
    assert VARIABLE not in os.environ


@dataclass(frozen=True)
class WorkspaceRegistry:
    """A workspace of the server, and the run for its releases."""

    workspace: str
    registry: MlflowRegistry
    run_id: str

    @property
    def key(self) -> str:
        return NAME if self.workspace == "default" else f"{self.workspace}:{NAME}"

    def with_run(self, new_release: Release) -> Release:
        return replace(new_release, run_id=self.run_id)

    @property
    def champion(self) -> str | None:
        return self.registry.alias(NAME, CHAMPION)


@pytest.fixture(scope="module")
def workspace_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "MLFLOW_ENABLE_WORKSPACES": "true",
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
        # The webhook cache is keyed by event only: it would keep the webhooks of the first
        # workspace.
        "MLFLOW_WEBHOOK_CACHE_TTL": "0",
    }
    with run_mlflow_server(
        tmp_path_factory.mktemp("workspaces"), environment=environment
    ) as server:
        with using_tracking_uri(server.uri):
            from mlflow import MlflowClient

            MlflowClient(server.uri).create_workspace(TEAM)
        yield server


@pytest.fixture
def two_workspaces(workspace_server: Server) -> tuple[WorkspaceRegistry, WorkspaceRegistry]:
    created = []
    for workspace in ("default", TEAM):
        with working_in(None if workspace == "default" else workspace):
            run = make_run(workspace_server.uri)
            with using_tracking_uri(workspace_server.uri):
                from mlflow import MlflowClient
                from mlflow.exceptions import MlflowException

                with suppress(MlflowException):
                    MlflowClient(
                        workspace_server.uri, workspace_server.uri
                    ).delete_registered_model(NAME)
        created.append(
            WorkspaceRegistry(
                workspace, MlflowRegistry(workspace_server.uri, workspace=workspace), run
            )
        )
    return created[0], created[1]


def _outcomes(results: Any) -> list[tuple[str, str, str | None]]:
    assert all(isinstance(item, StepResult) for item in results), results
    return [(item.kind, item.outcome, item.version) for item in results]


@pytest.mark.slow
@pytest.mark.proof
def test_same_model_name_in_two_workspaces_is_two_models(
    two_workspaces: tuple[WorkspaceRegistry, WorkspaceRegistry],
    ledger: Ledger,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, team = two_workspaces
    first, second, third = (release(onnx_file(tmp_path / f"{n}.onnx", seed=n)) for n in (1, 2, 3))
    for side, created in ((plain, first), (team, second), (team, third)):
        result = promote(side.registry, side.with_run(created), ledger=ledger)
        assert result.outcome == "promoted", result.reason
    assert (plain.champion, team.champion) == ("1", "2")

    store = ModelStore(tmp_path / "store")
    reconcile = Reconciler(plain.registry, ledger, POLICY, store=store)
    assert _outcomes(reconcile(NAME, cause="test")) == [("deploy", "deployed", "1")]
    assert _outcomes(reconcile(KEY, cause="test")) == [("deploy", "deployed", "2")]
    served = {name: store.live(name) for name in store.names()}
    assert {name: live.slots[EXACT].sha256 for name, live in served.items() if live} == {
        NAME: Digest.from_file(first.onnx_path),
        KEY: Digest.from_file(third.onnx_path),
    }
    for _ in range(2):  # a promotion in one workspace does not change the champion of the other
        assert _outcomes(reconcile(NAME, cause="test")) == []
        assert _outcomes(reconcile(KEY, cause="test")) == []
    assert (plain.champion, team.champion) == ("1", "2")

    # The guard reads the tags of its workspace's versions only.
    team.registry.set_tag(NAME, "2", key=Tag.REVIEW, value="rejected")
    assert _outcomes(reconcile(NAME, cause="test")) == []
    assert _outcomes(reconcile(KEY, cause="test"))[0] == ("guard", "reverted", "1")
    assert (plain.champion, team.champion) == ("1", "1")

    with pytest.raises(RegistryError):  # the workspace had only one promotion
        rollback(plain.registry, NAME, ledger=ledger, reason="test")

    registries = {entry.registry.partition("#")[2] for entry in ledger.entries()}
    assert registries == {"", "/workspaces/team-a"}
    shown = {}
    for name in (NAME, KEY):
        arguments = ["history", "--model", name, "--state", str(tmp_path / "gate" / "ledger.db")]
        assert cli.main([*arguments, "--json"]) == 0
        entries = json.loads(capsys.readouterr().out)["entries"]
        shown[name] = [(item["action"], item["version"]) for item in entries]
    assert ("promoted", "2") in shown[KEY]
    assert ("promoted", "2") not in shown[NAME]
    assert ("promoted", "1") in shown[NAME]


@pytest.mark.slow
@pytest.mark.proof
def test_webhook_reports_the_workspace_where_it_is_registered(
    workspace_server: Server,
    two_workspaces: tuple[WorkspaceRegistry, WorkspaceRegistry],
    tmp_path: Path,
) -> None:
    plain, team = two_workspaces
    hooks = WebhookSubscription(workspace_server.uri)
    service_settings = settings(tmp_path, tracking_uri=workspace_server.uri, models=(NAME, KEY))
    with run_service(service_settings) as service:
        with working_in(TEAM):
            url = service.address + WEBHOOK_PATH
            created = hooks.register("gate", url, secret=SECRET)[1]
            assert [hook.name for hook in hooks.all()] == ["gate"]
            assert {trial.answer for trial in hooks.test(created)} == {'{"outcome":"test"}'}
        assert hooks.all() == ()
        plain.registry.ensure_model(NAME)
        team.registry.ensure_model(NAME)
        wait_until(lambda: service.recorder.causes)
        time.sleep(1)
        reported = {model for model, cause in service.recorder.calls if cause != "timer"}
        assert reported == {KEY}


@pytest.mark.slow
@pytest.mark.proof
def test_missing_workspace_is_reported(
    workspace_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "team-z")
    with pytest.raises(RegistryError, match="team-z"):
        check_server(workspace_server.uri)
