"""Files for CI systems are written for every outcome and never replace an input."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from gate import cli
from gate.commands.ci_files import CiFile, CiFilesCommand
from gate.commands.result import CommandResult, ExitCode
from gate.errors import EvidenceError
from gate.storage import files as atomic
from tests.commands.running import Capture, create_runner
from tests.small_project import create_project

OPTIONS = ("--summary", "--junit", "--metrics-file")
NAMES = ("summary.md", "junit.xml", "metrics.txt")
CHECK_OPTIONS = ("--reference", "small_models:build", "--inputs", "images.npy")
run, as_json = create_runner("check")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project in its own folder."""
    folder = tmp_path / "project"
    shutil.copytree(create_project(), folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return folder


def files(folder: str = ".") -> list[str]:
    return [text for pair in zip(OPTIONS, NAMES, strict=True) for text in (pair[0], f"{folder}/{pair[1]}")]  # fmt: skip


def read_exit_code(metrics: Path) -> int:
    result = re.search(r"^parity_gate_exit_code\{.*\} (\d)", metrics.read_text(), re.MULTILINE)
    assert result is not None
    return int(result[1])


@pytest.mark.parametrize(
    ("model", "code", "says"),
    [("good.onnx", 0, "PASS: "), ("bad.onnx", 1, "FAIL: "), ("missing.onnx", 2, "does not exist")],
)
def test_ci_files_are_written_for_every_outcome(
    project: Path, capsys: Capture, model: str, code: int, says: str
) -> None:
    for name in NAMES:
        (project / name).write_text("of the build before")
    ended, reported = as_json(capsys, model, *CHECK_OPTIONS, *files())
    assert ended == code
    assert read_exit_code(project / "metrics.txt") == code
    assert says in (project / "summary.md").read_text()
    assert ("<failure " in (project / "junit.xml").read_text()) == (code == 1)
    assert ("<error " in (project / "junit.xml").read_text()) == (code == 2)
    if code < 2:
        assert reported["ci_files"] == [
            {"option": option, "path": name, "error": None}
            for option, name in zip(OPTIONS, NAMES, strict=True)
        ]


def test_sarif_names_the_file_by_its_path_in_the_repository(project: Path, capsys: Capture) -> None:
    run(capsys, str(project / "bad.onnx"), *CHECK_OPTIONS, "--sarif", "check.sarif")
    (log,) = json.loads(Path("check.sarif").read_text())["runs"]
    places = [each["locations"][0]["physicalLocation"] for each in log["results"]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"bad.onnx"}


# The tests below need no measurement: they run a fake command with one kind of file.
def _text(ending: Any) -> str:
    return ending.failure or str(ending.outcome.plain["text"])


class ScriptedCommand(CiFilesCommand):
    files = (CiFile("--note", "A note.", _text), CiFile("--copy", "Another.", _text))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[], Any]], None]:
    """A function that replaces the command `gate doctor`."""
    monkeypatch.chdir(tmp_path)

    def replace(action: Callable[[], Any]) -> None:
        created = ScriptedCommand(
            "doctor",
            callback=lambda **_: action(),
            params=[click.Option(["--model"]), click.Option(["--count"], type=int)],
        )
        created.params.append(click.Option(["--json"], is_flag=True, expose_value=False))
        monkeypatch.setattr("gate.commands.doctor.command", created)

    return replace


def return_done() -> CommandResult:
    return CommandResult(ExitCode.DONE, {"text": "done"}, lambda console: console.print("told"))


Command = Callable[[Callable[[], Any]], None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--note", "a", "--copy", "./a"], "both name"),
        (["--model", "m.onnx", "--note", "m.onnx"], "would overwrite m.onnx"),
        (["--count", "no", "--model", "m.onnx", "--note", "m.onnx"], "not a valid integer"),
        (["--note", "m.onnx/note"], "is a file, expected a folder"),
        (["--note", "."], "it is a folder"),
        (["--note", "pipe"], "it is not a regular file"),
        (["--note", "/proc/nowhere/note"], "Nothing was judged"),
    ],
)
def test_unwritable_path_is_refused_before_measuring(
    command: Command, tmp_path: Path, capsys: Capture, arguments: list[str], says: str
) -> None:
    (tmp_path / "m.onnx").write_text("a model")
    os.mkfifo(tmp_path / "pipe")
    command(lambda: pytest.fail("measured all the same"))
    assert cli.main(["doctor", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "m.onnx").read_text() == "a model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "pipe"]


@pytest.mark.parametrize(
    "arguments", [["--count", "no"], ["--unheard-of", "x"], ["--model"], ["beyond"]]
)
def test_usage_errors_are_written(
    command: Command, tmp_path: Path, capsys: Capture, arguments: list[str]
) -> None:
    (tmp_path / "note").write_text("of the build before")
    command(return_done)
    assert cli.main(["doctor", "--note", "note", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[0]
    assert error == f"error: {(tmp_path / 'note').read_text()}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EvidenceError("no samples"), "no samples"),
        (click.UsageError("say --yes"), "say --yes"),
        (ValueError("deep inside"), "unexpected ValueError: deep inside"),
        (SystemExit(0), "unexpected SystemExit: 0"),
        (
            EvidenceError("http://me:hush-hush@host/ is down"),
            "http://[hidden]@host/ is down",
        ),
    ],
)
def test_errors_are_written_without_passwords(
    command: Command, tmp_path: Path, capsys: Capture, error: BaseException, text: str
) -> None:
    def fail() -> None:
        raise error

    command(fail)
    assert cli.main(["doctor", "--note", "note"]) == 2
    assert (tmp_path / "note").read_text() == text


def test_interrupted_command_leaves_no_stale_file(command: Command, tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    (tmp_path / "note").write_text("of the build before")
    command(interrupted)
    assert cli.main(["doctor", "--note", "note"]) == ExitCode.INTERRUPTED
    assert not (tmp_path / "note").exists()


@pytest.mark.parametrize("status", [ExitCode.DONE, ExitCode.REJECTED])
def test_full_disk_does_not_change_the_exit_code(
    command: Command,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    status: ExitCode,
) -> None:
    command(lambda: CommandResult(status, {"text": "done"}, lambda console: None))
    write = atomic.write_text

    def full(path: Path, text: str) -> None:
        if path.name == "note":
            raise atomic._storage_error(path, OSError(28, "No space left on device"))
        write(path, text)

    monkeypatch.setattr(atomic, "write_text", full)
    assert cli.main(["doctor", "--note", "note", "--copy", "copy", "--json"]) == status
    printed = capsys.readouterr()
    note, copy = json.loads(printed.out)["ci_files"]
    assert "No space left" in note["error"]
    assert "warning: --note: cannot write note: No space left" in printed.err
    assert copy == {"option": "--copy", "path": "copy", "error": None}
    assert (tmp_path / "copy").read_text() == "done"


def test_github_summary_is_appended_up_to_its_limit(
    command: Command, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom = tmp_path / "step"
    custom.write_text("# My step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(custom))
    command(return_done)
    assert cli.main(["doctor", "--note", "step"]) == 0
    assert cli.main(["doctor", "--note", str(custom)]) == 0
    assert custom.read_text() == "# My step\n\ndone\ndone"
    custom.write_text("x" * (1 << 20))
    assert cli.main(["doctor", "--note", "step"]) == 0
    assert "limit is 1 MiB" in capsys.readouterr().err
    assert custom.stat().st_size == 1 << 20


def test_killed_child_process_is_written(project: Path, capsys: Capture) -> None:
    arguments = ["check", "good.onnx", *CHECK_OPTIONS, "--time-limit", "0.3s", *files()]
    assert cli.main(arguments, child=True) == 2
    assert "took more than" in (project / "summary.md").read_text()
    assert read_exit_code(project / "metrics.txt") == 2
