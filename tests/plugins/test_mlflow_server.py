"""Alias moves that bypass gate, on real MLflow servers with the app parity-gate."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from playwright.sync_api import expect

from gate import cli
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.registry.promotion import rollback
from gate.service import settings
from gate.signing.keys import SigningKey
from gate.storage.digest import Digest
from gate.storage.workspace import working_in
from tests import builders
from tests.browser import chromium
from tests.end_to_end.stack import START_S, Stack, until
from tests.exhaustive import exhaustive
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import ADMIN, Server, make_run, serving
from tests.registry.signed import save, trust_in

POLICY = builders.policy()

UVICORN = ("parity-gate", ())
GUNICORN = ("parity-gate", ("--gunicorn-opts", "--timeout 120"))
UVICORN_AUTH = ("parity-gate-basic-auth", ())
GUNICORN_AUTH = ("parity-gate-basic-auth", ("--gunicorn-opts", "--timeout 120"))


class GuardedServer:
    """A server with two promoted versions."""

    def __init__(self, server: Server, folder: Path, state: Path) -> None:
        self.server, self.uri, self.folder, self.state = server, server.uri, folder, state
        uri = server.uri
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.auth = ADMIN if "MLFLOW_TRACKING_USERNAME" in os.environ else None

    def ledger(self) -> Ledger:
        return Ledger(self.state, key=SigningKey.load(str(self.folder / "writer.pem")))

    def promote(self, seed: int) -> str | None:
        path = onnx_file(self.folder / f"{seed}" / "model.onnx", seed=seed)
        created = release(path, run_id=make_run(self.uri))
        registry = MlflowRegistry(self.uri)
        result = promote(registry, created, policy=POLICY, ledger=self.ledger())
        assert result.outcome == "promoted", result.reason
        return result.version

    def champion(self) -> str:
        return self.client.get_registered_model(NAME).aliases[CHAMPION]

    def send(self, method: str, route: str, **fields: Any) -> httpx.Response:
        url = f"{self.uri}/{route}"
        return httpx.request(method, url, json=fields, auth=self.auth, timeout=120)


@contextmanager
def guarded_server(
    folder: Path, mode: tuple[str, tuple[str, ...]], patch: pytest.MonkeyPatch
) -> Iterator[GuardedServer]:
    app, options = mode
    guarded = app.endswith("basic-auth")
    if guarded:
        patch.setenv("MLFLOW_TRACKING_USERNAME", ADMIN[0])
        patch.setenv("MLFLOW_TRACKING_PASSWORD", ADMIN[1])
    key = SigningKey.make(folder / "writer.pem")
    writers = trust_in(key).measurers
    trust = save(trust_in(key, writers=writers), folder / "trust.yaml")
    state = folder / "state.db"
    environment = {"GATE_STATE": str(state), "GATE_TRUST": str(trust)}
    environment["MLFLOW_ENABLE_WORKSPACES"] = "true"
    arguments = {"guarded": guarded, "app": app, "options": options, "environment": environment}
    with serving(folder, **arguments) as server:
        created = GuardedServer(server, folder, state)
        assert created.promote(1) == "1"
        assert created.promote(2) == "2"
        yield created


PROMPT = "mlflow.prompt.is_prompt"
API, AJAX = "api/2.0/mlflow", "ajax-api/2.0/mlflow"

WAYS: dict[str, Callable[[GuardedServer], httpx.Response]] = {
    "REST": lambda s: s.send(
        "POST", f"{API}/registered-models/alias", name=NAME, alias=CHAMPION, version="1"
    ),
    "the UI's route": lambda s: s.send(
        "POST", f"{AJAX}/registered-models/alias", name=NAME, alias=CHAMPION, version="1"
    ),
    "other spellings": lambda s: s.send(
        "POST", f"{API}/registered-models/alias", name=NAME, alias="Champion", version="01"
    ),
    "an accent that MySQL ignores": lambda s: s.send(
        "POST", f"{API}/registered-models/alias", name=NAME, alias="ch\u00e1mpion", version="1"
    ),
    "letters that MySQL takes for others": lambda s: s.send(
        "POST", f"{API}/registered-models/alias", name=NAME, alias="\u2102hampi\u00f8\u0640n",
        version="1",
    ),
    "an encoded path": lambda s: s.send(
        "POST", "api/2.0/mlfl%6fw/registered-models%2falias", name=NAME,
        alias=CHAMPION, version="1",
    ),
    "alias deleted": lambda s: s.send(
        "DELETE", f"{API}/registered-models/alias", name=NAME, alias=CHAMPION
    ),
    "version deleted": lambda s: s.send(
        "DELETE", f"{API}/model-versions/delete", name=NAME, version="2"
    ),
    "model renamed": lambda s: s.send(
        "POST", f"{API}/registered-models/rename", name=NAME, new_name="digits-2"
    ),
    "model deleted, to be created again": lambda s: s.send(
        "DELETE", f"{API}/registered-models/delete", name=NAME
    ),
    "stage": lambda s: s.send(
        "POST", f"{API}/model-versions/transition-stage", name=NAME, version="1", stage="production"
    ),
    "called a prompt": lambda s: s.send(
        "POST", f"{API}/registered-models/set-tag", name=NAME, key=PROMPT, value="true"
    ),
}  # fmt: skip


def assert_prompt_tag_exempts_no_file(place: GuardedServer, copied: dict[str, str]) -> None:
    tag, text = {"key": PROMPT, "value": "true"}, {"key": "mlflow.prompt.text", "value": "Add."}
    place.client.set_registered_model_tag("copied", *tag.values())
    assert place.send("POST", f"{API}/registered-models/alias", **copied).status_code == 403
    prompt = {"name": "copied", "source": "prompt-template", "tags": [tag, text]}
    assert place.send("POST", f"{API}/model-versions/create", **prompt).status_code == 200
    for method in ("POST", "DELETE"):
        answer = place.send(method, f"{API}/registered-models/alias", **copied | {"version": "2"})
        assert answer.status_code == 200, answer.text
    tag = {"name": "copied", "key": PROMPT}
    assert place.send("DELETE", f"{API}/registered-models/delete-tag", **tag).status_code == 200


def assert_alias_dialog_shows_the_refusal(place: GuardedServer) -> None:
    user = (
        None if place.auth is None else dict(zip(("username", "password"), place.auth, strict=True))
    )
    with chromium() as browser:
        page = browser.new_page(http_credentials=user)  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        page.goto(f"{place.uri}/#/models/{NAME}/versions/1?workspace=default")
        page.get_by_text("@ previous").locator("xpath=following::button[1]").click()
        dialog = page.get_by_role("dialog").filter(has_text="alias for model version 1")
        aliases = dialog.get_by_role("combobox")
        aliases.fill(CHAMPION)
        aliases.press("Enter")
        dialog.get_by_role("button", name="Save aliases").click()
        expect(dialog).to_contain_text(f"/#/models/{NAME}/versions/2", timeout=120_000)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.rows(4)
@pytest.mark.parametrize("mode", [UVICORN_AUTH, GUNICORN_AUTH, GUNICORN, UVICORN], ids=str)
def test_unapproved_alias_moves_are_refused(
    mode: tuple[str, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_server(tmp_path, mode, monkeypatch) as location:
        for name, way in WAYS.items():
            response = way(location)
            assert response.status_code == 403, (name, response.text)
            assert response.json()["error_code"] == "PERMISSION_DENIED"
            assert f"/#/models/{NAME}/versions/2" in response.json()["message"]
        with pytest.raises(MlflowException) as refused:  # the client
            location.client.set_registered_model_alias(NAME, CHAMPION, "1")
        assert refused.value.get_http_status_code() == 403
        assert_alias_dialog_shows_the_refusal(location)
        location.client.copy_model_version(f"models:/{NAME}/1", "copied")
        copied = {"name": "copied", "alias": CHAMPION, "version": "1"}
        assert location.send("POST", f"{API}/registered-models/alias", **copied).status_code == 403
        assert_prompt_tag_exempts_no_file(location, copied)
        location.client.create_workspace("team-a")
        with working_in("team-a"):
            location.client.create_registered_model(NAME)
            with pytest.raises(MlflowException, match="names no version"):
                location.client.set_registered_model_alias(NAME, CHAMPION, "1")
        registry = f"{location.uri}#/workspaces/team-a"
        about = {"registry": registry, "model": NAME, "version": "1", "reason": "test"}
        location.ledger().append(LedgerEntry.model_validate({"action": "promoted", **about}))
        for kind in ("CASCADE", "SET_DEFAULT"):
            route = f"api/3.0/mlflow/workspaces/team-a?mode={kind}"
            assert location.send("DELETE", route).status_code == 403
        assert location.champion() == "2"

        # What is right goes through: other aliases, the version that serves, the gate itself.
        location.client.set_registered_model_alias(NAME, "shadow", "1")
        location.client.set_registered_model_alias(NAME, CHAMPION, "2")
        location.client.delete_registered_model("copied")
        if location.auth is not None:
            anonymous = httpx.post(f"{location.uri}/{API}/registered-models/alias", json=copied)
            assert anonymous.status_code == 401
        result = rollback(
            MlflowRegistry(location.uri), NAME, ledger=location.ledger(), reason="wrong"
        )
        assert result.version == location.champion() == "1"

        # An override is a signed entry, and counts until the next one.
        options = ["--state", str(location.state), "--key", str(tmp_path / "writer.pem")]
        options += ["--trust", str(tmp_path / "trust.yaml"), "--tracking-uri", location.uri]
        words = ["override", NAME, "--champion", "2", "--reason", "incident 4711", *options]
        assert CliRunner().invoke(cli.gate, words).exit_code == 0
        assert location.ledger().entries()[-1].action == "overridden"
        location.client.set_registered_model_alias(NAME, CHAMPION, "2")
        with pytest.raises(MlflowException):
            location.client.delete_registered_model_alias(NAME, CHAMPION)
        location.client.set_registered_model_alias(NAME, CHAMPION, "1")

        location.state.rename(tmp_path / "elsewhere.db")
        answer = WAYS["REST"](location)
        assert answer.status_code == 503, answer.text
        assert WAYS["version deleted"](location).status_code == 503
        location.client.set_registered_model_alias(NAME, "shadow", "2")
        assert location.champion() == "1"


@contextmanager
def service(place: GuardedServer) -> Iterator[Stack]:
    """`gate serve` for the server's model; it looks every second, without a webhook."""
    created = Stack(place.folder, place.server)
    (place.folder / "policy.yaml").write_text(json.dumps({"gate": POLICY.to_plain()}))
    settings.write_secrets(place.folder / "secrets", ["s" * 40])
    try:
        created.launch("--key", str(place.folder / "writer.pem"), interval=1)
        yield created
    finally:
        if created.service is not None and created.service.poll() is None:
            created.stop(signal.SIGKILL)


def version_without_entry(place: GuardedServer) -> str:
    """A version that somebody made of the files of version 1, without the gate."""
    source = str(place.client.get_model_version(NAME, "1").source)
    created = place.client.create_model_version(NAME, source, model_id=source.rpartition("/")[2])
    return str(created.version)


@exhaustive
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [GUNICORN_AUTH, UVICORN_AUTH, GUNICORN, UVICORN], ids=str)
def test_service_reverts_moves_in_the_database(
    mode: tuple[str, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_reverted(number: str) -> bool:
        # The entry of the ledger comes first, then the alias.
        return ("reverted", number) in complete.lines() and complete.champion() == number

    with guarded_server(tmp_path, mode, monkeypatch) as location:
        forged = version_without_entry(location)
        with service(location) as complete:
            first, second = complete.digest("1"), complete.digest("2")
            assert until(lambda: complete.deployed() == second, START_S)

            # Direct SQL.
            with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=60)) as database, database:
                moved = "UPDATE registered_model_aliases SET version = ? WHERE alias = ?"
                assert database.execute(moved, (forged, CHAMPION)).rowcount == 1
            assert until(lambda: is_reverted("2"), START_S)
            reverted = len(complete.lines())
            with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=60)) as database, database:
                deleted = "DELETE FROM registered_model_aliases WHERE alias = ?"
                assert database.execute(deleted, (CHAMPION,)).rowcount == 1
            assert until(lambda: len(complete.lines()) > reverted and is_reverted("2"), START_S)
            assert complete.deployed() == second
            assert complete.stop() == 0

        # An overwritten artifact: of the version that serves.
        (path,) = (
            path
            for path in location.server.artifacts.rglob("model.onnx")
            if Digest.from_file(path).hex == second
        )
        path.write_bytes(path.read_bytes() + b"\0")
        with service(location) as complete:
            assert complete.deployed() == second
            assert until(lambda: is_reverted("1"), START_S)
            assert until(lambda: complete.deployed() == first, START_S)
        # The server follows the ledger: the overwritten version is not set again.
        with pytest.raises(MlflowException):
            location.client.set_registered_model_alias(NAME, CHAMPION, "2")


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's tables
def test_workspaces_and_keys_trusted_later(tmp_path: Path) -> None:
    from mlflow.server import app

    from gate.plugins.mlflow_server import AliasGuard

    first, second = (SigningKey.make(tmp_path / f"{name}.pem") for name in ("first", "second"))
    trust = save(trust_in(first, writers=trust_in(first).measurers), tmp_path / "trust.yaml")
    ledger = Ledger(tmp_path / "state.db", key=first)
    about = {"registry": "http://mlflow:5000#/workspaces/team-a", "model": NAME, "reason": "test"}
    ledger.append(LedgerEntry.model_validate({"action": "promoted", "version": "1", **about}))
    environment = {"GATE_REGISTRY": "http://mlflow:5000", "GATE_STATE": str(tmp_path / "state.db")}
    guard = AliasGuard({**environment, "GATE_TRUST": str(trust)})

    def delete(workspace: str, mode: str) -> int | None:
        path = f"/api/3.0/mlflow/workspaces/{workspace}?mode={mode}"
        with app.test_request_context(path, method="DELETE"):
            answer = guard.check()
        return None if answer is None else answer.status_code

    modes = ("RESTRICT", "CASCADE", "SET_DEFAULT")
    assert [delete("team-a", mode) for mode in modes] == [None, 403, 403]
    assert delete("team-b", "CASCADE") is None
    ledger.key = second
    ledger.append(LedgerEntry.model_validate({"action": "overridden", **about}))
    assert delete("team-a", "CASCADE") == 503
    save(trust_in(second, writers=trust_in(second).measurers), trust)
    assert delete("team-a", "CASCADE") is None
