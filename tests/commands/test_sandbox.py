"""gate check and gate locate run in a limited child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import psutil
import pytest

from gate import cli
from gate.commands.result import (
    CommandResult,
    ExitCode,
    Line,
    Printed,
    limit_options,
    run_with_limits,
)
from gate.sandbox.limits import SandboxLimits
from tests.onnx_file import hostile

REFERENCE = """
import os
from torch import nn

def build():
    return nn.Identity()

def leave():
    os._exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "foreign_models.py").write_text(REFERENCE)
    np.save(tmp_path / "inputs.npy", np.ones((8, 3), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _gate(command: str, *more: str, reference: str = "build") -> tuple[int, dict, str]:
    """Return exit code, JSON and stderr."""
    arguments = [command, "model.onnx", "--reference", f"foreign_models:{reference}"]
    completed = subprocess.run(
        [sys.executable, "-m", "gate", *arguments, "--inputs", "inputs.npy", *more, "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return completed.returncode, json.loads(completed.stdout), completed.stderr


ENDLESS = {
    "check": ("check", hostile.endless_loop, ["--time-limit", "8s"], "time limit of 8 s"),
    "locate": pytest.param(
        "locate", hostile.endless_loop, ["--time-limit", "8s"], "time limit of 8 s",
        marks=pytest.mark.proof,
    ),
    "memory": ("check", hostile.empty_nodes, ["--memory-limit", "700MB"], "memory limit of 700 MB"),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.rows(3)
@pytest.mark.parametrize(("command", "make", "more", "message"), ENDLESS.values(), ids=ENDLESS)
def test_endless_file_exceeds_the_limit(folder: Path, command, make, more, message) -> None:
    make(folder / "model.onnx")
    code, plain, printed = _gate(command, *more)
    assert (code, plain["error"]["type"]) == (2, "LimitExceeded")
    assert f"gate {command} model.onnx took more than the {message}" in plain["error"]["message"]
    assert "Traceback" not in printed
    ours = [p for p in psutil.process_iter() if _works_in(p, folder)]
    assert ours == []


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and process.cwd() == str(folder)
    except psutil.Error:
        return False


@pytest.mark.proof
def test_code_that_exits_silently_is_not_a_pass(folder: Path) -> None:
    hostile.large_constant(folder / "model.onnx", exponent=1)
    code, plain, _ = _gate("check", reference="leave")
    assert code == 2
    assert "its process ended with code 0" in plain["error"]["message"]


@pytest.mark.parametrize(
    "wrong", [["--time-limit", "soon"], ["--time-limit", "0"], ["--memory-limit", "many"]]
)
def test_invalid_limits_are_refused(folder: Path, capsys, wrong: list[str]) -> None:
    (folder / "model.onnx").touch()
    names = ["model.onnx", "--reference", "foreign_models:build", "--inputs", "inputs.npy"]
    arguments = ["check", *names, *wrong]
    assert cli.main(arguments) == 2
    assert "is not a valid" in capsys.readouterr().err


def _command() -> click.Command:
    @click.command("check")
    @click.argument("model")
    @limit_options(60.0)
    @run_with_limits
    def command(model: str) -> CommandResult:
        return CommandResult(ExitCode.DONE, {"model": model}, lambda _: None)

    return command


def test_child_gets_parsed_options_and_limits(monkeypatch) -> None:
    from gate.sandbox import process

    def call_here(function, arguments, *, limits, task):
        assert function == "gate.cli:in_child"
        assert arguments["command"] == "check"
        assert arguments["options"]["model"] == "m"
        assert set(arguments["stated"]) == {"model", "memory_limit"}
        assert arguments["arguments"] == ("check", "m")
        assert limits == SandboxLimits(5.0, 10**9)
        assert task.endswith(" m")
        return {"code": 1, "json": "{}"}

    monkeypatch.setattr(process, "run_in_child", call_here)
    monkeypatch.setenv("GATE_TIME_LIMIT", "5s")
    arguments = ["m", "--memory-limit", "1GB"]
    line = Line(("check", "m"), child=True)
    with _command().make_context("check", arguments, obj=line) as context:
        assert context.command.invoke(context) == Printed(1, "{}")


def test_child_does_not_parse_options_again(folder: Path, monkeypatch, capsys) -> None:
    """The child uses the received options and does not parse the command line again."""
    from gate.sandbox import process

    def call_here(_function, arguments, **_):
        (folder / "labels.npy").unlink()
        sent = json.loads(json.dumps(arguments))
        return cli.in_child(**{**sent, "arguments": [*sent["arguments"], "--no-such-option"]})

    monkeypatch.setattr(process, "run_in_child", call_here)
    (folder / "model.onnx").write_bytes(b"no model")
    np.save("labels.npy", np.zeros(8, np.int64))
    names = ["model.onnx", "--reference", "foreign_models:build", "--inputs", "inputs.npy"]
    assert cli.main(["check", *names, "--labels", "labels.npy", "--json"], child=True) == 2
    assert "labels.npy" in json.loads(capsys.readouterr().out)["error"]["message"]
