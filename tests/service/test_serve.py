"""The process `gate serve` starts, shuts down cleanly, and loses no event in a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gate import cli
from gate.mlflow_client import connection as preflight
from gate.service import app, reconciler, settings
from gate.service.settings import ServiceSettings
from tests import plain_http
from tests.deploy.handmade_store import make_store
from tests.service.deliveries import SECRET, event_body, wait_until
from tests.service.processes import ROOT, run_process


@pytest.mark.parametrize("command", ["serve", "webhooks"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; from gate.cli import main; main(['{command}', '--help']);"
        "print(sorted({'pydantic', 'sqlalchemy', 'starlette', 'mlflow', 'torch', 'rich'}"
        " & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Examples:" in completed.stdout
    assert completed.stdout.splitlines()[-1] == "[]"


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_the_running_reconcile(tmp_path: Path, number: int) -> None:
    with run_process(tmp_path, "--log-format", "json", "--json", slow=1) as service:
        assert service.send(delivery="d-1").status_code == 202
        wait_until(lambda: "digits webhook" in service.lines("begin"))
        assert service.send(delivery="d-2").status_code == 202
        assert service.end(number) == 0
        assert service.ended() == ["webhook"]  # the running pass was finished
        assert service.lines("exit") == ["0 []"]  # torch was not loaded
        log = service.log.read_text()
    assert SECRET not in log
    assert "v1," not in log
    lines = [json.loads(line) for line in log[: log.index("{\n")].splitlines()]
    assert {"uvicorn.access", "gate.service.app"} <= {line["logger"] for line in lines}
    accepted = [line for line in lines if line.get("outcome") == "accepted"]
    assert {line["delivery"] for line in accepted} == {"d-1", "d-2"}
    assert json.loads(log[log.index("{\n") :]) == {
        "schema_version": 1, "stopped": True, "models": ["digits"], "registry": "http://127.0.0.1:1", "exit_code": 0,
    }  # fmt: skip
    with run_process(tmp_path) as service:  # the first pass covers the event of d-2
        wait_until(lambda: service.lines("end").count("digits timer") == 2)


@pytest.mark.further
def test_shutdown_does_not_wait_for_a_hanging_reconcile(tmp_path: Path) -> None:
    with run_process(tmp_path, slow=300) as service:
        assert service.send(delivery="d-1").status_code == 202
        wait_until(lambda: "digits webhook" in service.lines("begin"))
        assert service.end() == 0  # the shutdown timeout is shorter than the pass


@pytest.mark.parametrize(
    ("variable", "value", "field", "read"),
    [
        ("GATE_STATE", "postgresql://gate@db/gate", "state", "postgresql://gate@db/gate"),
        ("GATE_STATE", "/var/a place/state.db", "state", "sqlite:////var/a place/state.db"),
        ("GATE_STATE", "env:STATE_OF_THE_TEST", "state", "postgresql://gate:hunter2@db/gate"),
        ("GATE_SIGNING_KEY", "awskms:alias/gate", "key", "awskms:alias/gate"),
        ("GATE_TRUST", "/etc/gate/trust.yaml", "trust", Path("/etc/gate/trust.yaml")),
        ("GATE_BODY_CAP", "2048", "body_cap", 2048),
        ("GATE_BODY_TIMEOUT", "3", "body_timeout_s", 3.0),
        ("GATE_WINDOW", "100", "window_s", 100.0),
        ("GATE_INTERVAL", "7", "interval_s", 7.0),
        ("GATE_CONFIRM_AFTER", "9", "confirm_s", 9.0),
        ("MLFLOW_TRACKING_URI", "http://elsewhere", "tracking_uri", "http://elsewhere"),
    ],
)
def test_environment_variables_are_read(
    tmp_path, monkeypatch, variable, value, field, read
) -> None:
    observed: list[ServiceSettings] = []
    monkeypatch.setattr(preflight, "check_server", lambda _uri: None)
    created = SimpleNamespace(report_damage=None)
    monkeypatch.setattr(reconciler, "reconciler", lambda _settings, is_service: created)
    monkeypatch.setattr(app, "serve", lambda loaded, *_a, **_o: observed.append(loaded))
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("STATE_OF_THE_TEST", "postgresql://gate:hunter2@db/gate")
    settings.write_secrets(tmp_path / "secrets", [SECRET])
    arguments = ["serve", "--model", "digits", "--secret-file", str(tmp_path / "secrets")]
    uri = [] if field == "tracking_uri" else ["--tracking-uri", "http://x"]
    assert cli.main([*arguments, "--store", str(tmp_path / "store"), *uri]) == 0
    assert getattr(observed[0], field) == read


class TestRefusesToStart:
    def arguments(self, folder: Path, *more: str) -> list[str]:
        secrets = folder / "secrets"
        settings.write_secrets(secrets, [SECRET])
        arguments = ["--model", "digits", "--secret-file", str(secrets), "--port", "0"]
        return ["serve", *arguments, "--state", f"sqlite:///{folder}/state.db", *more]

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["--port", "99999"], "port:"),
            (["--model", "example_model"], "test deliveries"),
            (["--state", "mysql://x/y"], "--state"),
            (["--window", "0"], "window_s"),
            (["--secret-file", "/nonexistent/secrets"], "cannot read the secret file"),
        ],
    )
    def test_wrong_options(self, tmp_path: Path, capsys, more: list[str], said: str) -> None:
        assert cli.main(self.arguments(tmp_path, *more)) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("uri", "said"),
        [
            ("sqlite:///{folder}/mlfow.db", "no registry at"),
            ("sqlite:///{folder}/missing/mlflow.db", "does not exist"),
            ("{folder}", "is a folder"),
            ("http://127.0.0.1:1", "127.0.0.1:1"),
            ("postgresql+psycopg://gate@127.0.0.1:1/x", "no answer from"),
        ],
    )
    def test_a_mistyped_registry(
        self, tmp_path: Path, capsys, monkeypatch, uri: str, said: str
    ) -> None:
        monkeypatch.setattr(app, "serve", lambda *_a, **_o: pytest.fail("it listened"))
        arguments = uri.format(folder=tmp_path)
        assert cli.main(self.arguments(tmp_path, "--tracking-uri", arguments)) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.db"))

    @pytest.mark.proof
    def test_a_taken_port(self, tmp_path: Path) -> None:
        with run_process(tmp_path) as first:
            port = first.address.rpartition(":")[2]
            another = tmp_path / "other"
            another.mkdir()
            with run_process(another, "--port", port) as second:
                assert second.popen.wait(60) == 2
                assert f"cannot listen on 127.0.0.1:{port}" in second.log.read_text()
            assert first.send(event_body()).status_code == 202


@pytest.mark.further
def test_damage_found_by_a_client_triggers_a_repair(tmp_path: Path) -> None:
    _store, path = make_store(tmp_path / "store", b"a model")
    with run_process(tmp_path, "--store", str(tmp_path / "store")) as service:
        url = f"{service.address}/models/digits/model.onnx"
        assert plain_http.get(url).content == b"a model"
        path.write_bytes(b"another")
        assert plain_http.get(url).status_code == 503
        assert plain_http.get(url).status_code == 503
        assert service.lines("doubt") == ["digits"]
        assert service.log.read_text().count("not served") == 1
