"""Real MLflow servers with the app parity-gate refuse alias moves that bypass gate."""

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

from gate import Digest, cli
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.registry.promotion import rollback
from gate.service import settings
from gate.signing.keys import SigningKey
from gate.storage.workspace import working_in
from tests import builders
from tests.browser import chromium
from tests.end_to_end.stack import START_S, Stack, wait_for
from tests.exhaustive import exhaustive
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.servers import ADMIN, Server, make_run, run_mlflow_server
from tests.registry.signed import save_trust, trust_in

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
    has_basic_auth = app.endswith("basic-auth")
    if has_basic_auth:
        patch.setenv("MLFLOW_TRACKING_USERNAME", ADMIN[0])
        patch.setenv("MLFLOW_TRACKING_PASSWORD", ADMIN[1])
    key = SigningKey.make(folder / "writer.pem")
    writers = trust_in(key).measurers
    trust = save_trust(trust_in(key, writers=writers), folder / "trust.yaml")
    state = folder / "state.db"
    environment = {"GATE_STATE": str(state), "GATE_TRUST": str(trust)}
    environment["MLFLOW_ENABLE_WORKSPACES"] = "true"
    arguments = {
        "guarded": has_basic_auth,
        "app": app,
        "options": options,
        "environment": environment,
    }
    with run_mlflow_server(folder, **arguments) as server:
        created = GuardedServer(server, folder, state)
        assert created.promote(1) == "1"
        assert created.promote(2) == "2"
        yield created


PROMPT = "mlflow.prompt.is_prompt"
API, AJAX = "api/2.0/mlflow", "ajax-api/2.0/mlflow"

REQUESTS: dict[str, Callable[[GuardedServer], httpx.Response]] = {
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


def assert_prompt_tag_exempts_no_file(guarded: GuardedServer, copied: dict[str, str]) -> None:
    tag, text = {"key": PROMPT, "value": "true"}, {"key": "mlflow.prompt.text", "value": "Add."}
    guarded.client.set_registered_model_tag("copied", *tag.values())
    assert guarded.send("POST", f"{API}/registered-models/alias", **copied).status_code == 403
    prompt = {"name": "copied", "source": "prompt-template", "tags": [tag, text]}
    assert guarded.send("POST", f"{API}/model-versions/create", **prompt).status_code == 200
    for method in ("POST", "DELETE"):
        response = guarded.send(
            method, f"{API}/registered-models/alias", **copied | {"version": "2"}
        )
        assert response.status_code == 200, response.text
    tag = {"name": "copied", "key": PROMPT}
    assert guarded.send("DELETE", f"{API}/registered-models/delete-tag", **tag).status_code == 200


def assert_alias_dialog_shows_the_refusal(guarded: GuardedServer) -> None:
    user = (
        None
        if guarded.auth is None
        else dict(zip(("username", "password"), guarded.auth, strict=True))
    )
    with chromium() as browser:
        page = browser.new_page(http_credentials=user)  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        page.goto(f"{guarded.uri}/#/models/{NAME}/versions/1?workspace=default")
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
    with guarded_server(tmp_path, mode, monkeypatch) as server:
        for name, send_request in REQUESTS.items():
            response = send_request(server)
            assert response.status_code == 403, (name, response.text)
            assert response.json()["error_code"] == "PERMISSION_DENIED"
            assert f"/#/models/{NAME}/versions/2" in response.json()["message"]
        with pytest.raises(MlflowException) as refused:  # the client
            server.client.set_registered_model_alias(NAME, CHAMPION, "1")
        assert refused.value.get_http_status_code() == 403
        assert_alias_dialog_shows_the_refusal(server)
        server.client.copy_model_version(f"models:/{NAME}/1", "copied")
        copied = {"name": "copied", "alias": CHAMPION, "version": "1"}
        assert server.send("POST", f"{API}/registered-models/alias", **copied).status_code == 403
        assert_prompt_tag_exempts_no_file(server, copied)
        server.client.create_workspace("team-a")
        with working_in("team-a"):
            server.client.create_registered_model(NAME)
            with pytest.raises(MlflowException, match="names no version"):
                server.client.set_registered_model_alias(NAME, CHAMPION, "1")
        registry = f"{server.uri}#/workspaces/team-a"
        about = {"registry": registry, "model": NAME, "version": "1", "reason": "test"}
        server.ledger().append(LedgerEntry.model_validate({"action": "promoted", **about}))
        for kind in ("CASCADE", "SET_DEFAULT"):
            route = f"api/3.0/mlflow/workspaces/team-a?mode={kind}"
            assert server.send("DELETE", route).status_code == 403
        assert server.champion() == "2"

        # Valid moves are accepted: other aliases, the current champion, and moves by gate itself.
        server.client.set_registered_model_alias(NAME, "shadow", "1")
        server.client.set_registered_model_alias(NAME, CHAMPION, "2")
        server.client.delete_registered_model("copied")
        if server.auth is not None:
            anonymous = httpx.post(f"{server.uri}/{API}/registered-models/alias", json=copied)
            assert anonymous.status_code == 401
        result = rollback(MlflowRegistry(server.uri), NAME, ledger=server.ledger(), reason="wrong")
        assert result.version == server.champion() == "1"

        # An override is a signed entry and is valid until the next one.
        options = ["--state", str(server.state), "--key", str(tmp_path / "writer.pem")]
        options += ["--trust", str(tmp_path / "trust.yaml"), "--tracking-uri", server.uri]
        arguments = ["override", NAME, "--champion", "2", "--reason", "incident 4711", *options]
        assert CliRunner().invoke(cli.gate, arguments).exit_code == 0
        assert server.ledger().entries()[-1].action == "overridden"
        server.client.set_registered_model_alias(NAME, CHAMPION, "2")
        with pytest.raises(MlflowException):
            server.client.delete_registered_model_alias(NAME, CHAMPION)
        server.client.set_registered_model_alias(NAME, CHAMPION, "1")

        server.state.rename(tmp_path / "elsewhere.db")
        response = REQUESTS["REST"](server)
        assert response.status_code == 503, response.text
        assert REQUESTS["version deleted"](server).status_code == 503
        server.client.set_registered_model_alias(NAME, "shadow", "2")
        assert server.champion() == "1"


@contextmanager
def run_service(guarded: GuardedServer) -> Iterator[Stack]:
    """Run `gate serve` for the server's model with an interval of one second and no webhook."""
    created = Stack(guarded.folder, guarded.server)
    (guarded.folder / "policy.yaml").write_text(json.dumps({"gate": POLICY.to_plain()}))
    settings.write_secrets(guarded.folder / "secrets", ["s" * 40])
    try:
        created.launch("--key", str(guarded.folder / "writer.pem"), interval=1)
        yield created
    finally:
        if created.service is not None and created.service.poll() is None:
            created.stop(signal.SIGKILL)


def create_version_without_entry(guarded: GuardedServer) -> str:
    """Create a version with the files of version 1, without the gate."""
    source = str(guarded.client.get_model_version(NAME, "1").source)
    created = guarded.client.create_model_version(NAME, source, model_id=source.rpartition("/")[2])
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
        # The ledger entry is written before the alias moves.
        return ("reverted", number) in stack.lines() and stack.champion() == number

    with guarded_server(tmp_path, mode, monkeypatch) as server:
        forged = create_version_without_entry(server)
        with run_service(server) as stack:
            first, second = stack.digest("1"), stack.digest("2")
            assert wait_for(lambda: stack.deployed() == second, START_S)

            # Move and delete the alias with SQL.
            with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=60)) as database, database:
                moved = "UPDATE registered_model_aliases SET version = ? WHERE alias = ?"
                assert database.execute(moved, (forged, CHAMPION)).rowcount == 1
            assert wait_for(lambda: is_reverted("2"), START_S)
            reverted = len(stack.lines())
            with closing(sqlite3.connect(tmp_path / "mlflow.db", timeout=60)) as database, database:
                deleted = "DELETE FROM registered_model_aliases WHERE alias = ?"
                assert database.execute(deleted, (CHAMPION,)).rowcount == 1
            assert wait_for(lambda: len(stack.lines()) > reverted and is_reverted("2"), START_S)
            assert stack.deployed() == second
            assert stack.stop() == 0

        # Overwrite the model file of the champion.
        (path,) = (
            path
            for path in server.server.artifacts.rglob("model.onnx")
            if Digest.from_file(path).hex == second
        )
        path.write_bytes(path.read_bytes() + b"\0")
        with run_service(server) as stack:
            assert stack.deployed() == second
            assert wait_for(lambda: is_reverted("1"), START_S)
            assert wait_for(lambda: stack.deployed() == first, START_S)
        # The server follows the ledger: it refuses to make the overwritten version champion again.
        with pytest.raises(MlflowException):
            server.client.set_registered_model_alias(NAME, CHAMPION, "2")


def test_workspaces_and_keys_trusted_later(tmp_path: Path) -> None:
    from mlflow.server import app

    from gate.plugins.mlflow_server import AliasGuard

    first, second = (SigningKey.make(tmp_path / f"{name}.pem") for name in ("first", "second"))
    trust = save_trust(trust_in(first, writers=trust_in(first).measurers), tmp_path / "trust.yaml")
    ledger = Ledger(tmp_path / "state.db", key=first)
    about = {"registry": "http://mlflow:5000#/workspaces/team-a", "model": NAME, "reason": "test"}
    ledger.append(LedgerEntry.model_validate({"action": "promoted", "version": "1", **about}))
    environment = {"GATE_REGISTRY": "http://mlflow:5000", "GATE_STATE": str(tmp_path / "state.db")}
    guard = AliasGuard({**environment, "GATE_TRUST": str(trust)})

    def delete(workspace: str, mode: str) -> int | None:
        path = f"/api/3.0/mlflow/workspaces/{workspace}?mode={mode}"
        with app.test_request_context(path, method="DELETE"):
            response = guard.check()
        return None if response is None else response.status_code

    modes = ("RESTRICT", "CASCADE", "SET_DEFAULT")
    assert [delete("team-a", mode) for mode in modes] == [None, 403, 403]
    assert delete("team-b", "CASCADE") is None
    ledger.key = second
    ledger.append(LedgerEntry.model_validate({"action": "overridden", **about}))
    assert delete("team-a", "CASCADE") == 503
    save_trust(trust_in(second, writers=trust_in(second).measurers), trust)
    assert delete("team-a", "CASCADE") is None
