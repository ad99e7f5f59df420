"""No output repeats the passwords in the addresses of the state and the registry."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from gate import cli
from gate.commands.options import address
from gate.service import settings
from tests.service.deliveries import SECRET, wait_until
from tests.service.postgres import Postgres
from tests.service.processes import run_process

PASSWORD = "hunter2%2Fof%40the-test"


def with_password(url: str) -> str:
    return url.replace("://gate@", f"://gate:{PASSWORD}@")


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("kept", ["@{file}", "env:STATE_OF_THE_TEST"])
def test_address_from_a_file_or_variable_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: Postgres, kept: str
) -> None:
    """Run a service with PostgreSQL and check its command line and its log."""
    file = tmp_path / "address"
    file.write_text(f"{with_password(postgres_server.url)}\n# of the test\n")
    file.chmod(0o600)
    monkeypatch.setenv("STATE_OF_THE_TEST", with_password(postgres_server.url))
    with run_process(tmp_path, "--debug", url=kept.format(file=file)) as service:
        response = service.send(delivery=f"in-{kept[1:3].strip(chr(123))}")
        assert (response.status_code, response.json()["outcome"]) == (202, "accepted"), (
            response.text
        )
        wait_until(service.ended)
        command = psutil.Process(service.popen.pid).cmdline()
        assert service.end() == 0
        assert not any(PASSWORD in argument for argument in command)
        log = service.log.read_text()
    assert "hunter2" not in log
    assert "warning: the command line" not in log


def test_world_readable_address_file_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "address"
    file.write_text("postgresql://gate:hunter2@db/gate")
    file.chmod(0o644)
    for option in ("--state", "--tracking-uri"):
        arguments = ["serve", "--model", "digits", option, f"@{file}"]
        assert cli.main(arguments) == 2
        printed = capsys.readouterr().err
        assert "has mode 0644" in printed
        assert "hunter2" not in printed


@pytest.mark.parametrize("given", ["@{file}", "env:NOT_SET_IN_THE_TEST"])
def test_missing_address_is_refused(tmp_path: Path, given: str, capsys) -> None:
    file = tmp_path / "address"
    file.touch(mode=0o600)
    arguments = ["serve", "--model", "digits", "--state", given.format(file=file)]
    assert cli.main(arguments) == 2
    assert "has no address" in capsys.readouterr().err


def test_plain_address_is_unchanged() -> None:
    for arguments in ("sqlite:///a@b.db", "http://host/@x", "", None):
        assert address(arguments) == arguments


class TestPasswordInTheCommandLine:
    """A password in an argument works with a warning; no error, traceback or JSON repeats it."""

    WRONG = (
        ("--state", "postgresql://gate:hunter2xyz@127.0.0.1:1/x"),
        ("--state", "mysql://gate:hunter2xyz@127.0.0.1/x"),
        ("--state", "postgresql://g:hunter2xyz" + "x" * 100 + "@[::1/x" + "y" * 100),
        ("--state", "postgresql://127.0.0.1:1/x?user=gate&password=hunter2xyz"),
        ("--tracking-uri", "http://ann:hunter2xyz@127.0.0.1:1"),
        ("--tracking-uri", "http://ann:hunter2xyz@127.0.0.1:hunter2xyz"),
    )

    @pytest.mark.parametrize(("option", "value"), WRONG)
    def test_password_is_not_repeated_and_a_warning_is_printed(
        self, tmp_path: Path, monkeypatch, capsys, option: str, value: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        (tmp_path / "mlflow.db").touch()
        settings.write_secrets(tmp_path / "secrets", [SECRET])
        arguments = ["serve", "--model", "digits", "--secret-file", "secrets", "--port", "0"]
        assert cli.main([*arguments, option, value, "--debug", "--json"]) == 2
        printed = capsys.readouterr()
        assert "Traceback" in printed.err
        assert "hunter2x" not in printed.err + printed.out
        assert json.loads(printed.out)["error"]["message"]
        assert printed.err.startswith("warning: the command line has a password")
        assert "@FILE" in printed.err.splitlines()[0]

    def test_no_warning_without_a_password(self, capsys) -> None:
        for argument in ("postgresql://gate@db/gate", "sqlite:////a:b@c/x.db", "http://h:1/p@th"):
            cli.main(["history", "x", "--state", argument, "--json"])
            assert "warning" not in capsys.readouterr().err
