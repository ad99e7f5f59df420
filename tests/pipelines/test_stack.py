from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import RegistryUnavailable, StorageError
from gate.ledger.ledger import Ledger
from gate.signing.trust import Trust
from pipelines import paths, promote, stack
from pipelines.children import started
from pipelines.override import override
from pipelines.service_trust import ServiceTrust
from tests.end_to_end.stack import wait_for
from tests.free_ports import free_port
from tests.pipelines.conftest import REPOSITORY, clean_environment


def test_encryption_key_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "key"
    key = stack.encryption_key(path)
    assert stack.encryption_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    from cryptography.fernet import Fernet

    Fernet(key)
    path.chmod(0o644)
    with pytest.raises(StorageError, match="chmod 600"):
        stack.encryption_key(path)


def test_encryption_key_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is set when the file is created, not afterwards."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("its mode was changed afterwards")

    for name in ("chmod", "fchmod", "lchmod"):
        monkeypatch.setattr(os, name, refuse, raising=False)
    before = os.umask(0)
    try:
        stack.encryption_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_taken_port_is_reported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind((stack.HOST, 0))
        used.listen()
        port = str(used.getsockname()[1])
        monkeypatch.setattr(
            sys, "argv", ["stack", "--port", str(free_port()), "--service-port", port]
        )
        with pytest.raises(
            RegistryUnavailable, match=f"{os.getpid()}, .*make stack PORT=.* SERVICE_PORT="
        ):
            stack.main()


def test_stack_refuses_an_external_server(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(RegistryUnavailable, match="docs/production.md"):
        stack.run(free_port(), free_port(), model="tiny")


def test_child_that_exits_is_reported(project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # make runs in the project's folder
    with (
        started("brief", [sys.executable, "-c", "raise SystemExit(3)"], environment) as it,
        pytest.raises(RegistryUnavailable, match="brief .* ended with 3"),
    ):
        stack.wait_for("http://127.0.0.1:1", it)


def test_printed_submit_command_is_valid() -> None:
    words = "\n".join(stack.instructions("http://127.0.0.1:5000", "http://127.0.0.1:8400", "tiny"))
    (line,) = [line for line in words.splitlines() if "make repro SET=gate.promotion=by" in line]
    variable, *command = line.split()
    assert variable == "MLFLOW_TRACKING_URI=http://127.0.0.1:5000"
    shown = subprocess.run(
        [*command, "--dry-run", "--no-print-directory"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.stdout.split()[-4:] == [
        "-m", "pipelines.repro", "--set", "'gate.promotion=by_service'",
    ]  # fmt: skip


def read_ledger() -> list[tuple[str, str | None]]:
    """Return the ledger's entries, verified with the service's trust."""
    trust = Trust.from_file(ServiceTrust.from_project().trust)
    return [(e.action, e.version) for e in Ledger(paths.database(), trust=trust).entries()]


def deployed_digest(service_port: int) -> str | None:
    """Return the deployed digest, or None."""
    address = f"http://127.0.0.1:{service_port}/models/tiny/manifest.json"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return str(json.load(answer)["slots"]["exact"]["sha256"])
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


@pytest.mark.slow
@pytest.mark.proof
def test_stack_deploys_earlier_and_submitted_versions(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert promote.main() == 0
    port, service_port = free_port(), free_port()
    registry = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-m", "pipelines.stack", "--port", str(port),
         "--service-port", str(service_port)],
        cwd=measured, text=True, env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            printed_lines = []
            for line in process.stdout:
                printed_lines.append(line)
                if line.startswith("Ctrl-C"):
                    break
            else:
                pytest.fail(process.stderr.read())
            assert any(
                f"MLFLOW_TRACKING_URI={registry} make repro" in line for line in printed_lines
            )
            digest = str(Ledger(paths.database()).entries()[0].sha256)
            assert wait_for(lambda: deployed_digest(service_port) == digest, 30)

            override(["gate.promotion=by_service"])
            monkeypatch.setenv("MLFLOW_TRACKING_URI", registry)
            assert promote.main() == 0
            assert wait_for(lambda: read_ledger()[-1] == ("deployed", "2"), 30), read_ledger()
            client = MlflowClient(registry)
            assert client.get_model_version_by_alias("tiny", "champion").version == "2"
            assert deployed_digest(service_port) == digest

            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert "Stopped." in rest
    for closed_port in (port, service_port):
        stack.require_free(closed_port, remedy="-")
    assert read_ledger() == [
        ("promoted", "1"), ("same_registry", None), ("deployed", "1"), ("promoted", "2"),
        ("deployed", "2"),
    ]  # fmt: skip
    project = Trust.from_file(paths.state() / "trust.yaml")
    assert len(Ledger(paths.database(), trust=project).entries()) == 5
