"""`gate completion`, as a shell uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.running import Capture, runner

ROOT = Path(__file__).parents[2]
run, as_json = runner("completion")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_as_it_is(capsys: Capture, shell: str) -> None:
    code, out, _ = run(capsys, shell)
    assert code == 0
    assert f"_GATE_COMPLETE={shell}_complete" in out
    code, told = as_json(capsys, shell)
    assert (code, f"{told['script']}\n") == (0, out)


def test_another_shell_is_refused(capsys: Capture) -> None:
    assert run(capsys, "tcsh")[0] == 2


def asked(*words: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """What `gate` answers to the shell at the last of the words."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_GATE_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["gate", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "gate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("verify-",), ["plain,verify-release", "plain,verify-verdict"]),
        (("check", "--jun"), ["plain,--junit"]),
        (("check", "mod"), ["file,mod"]),
        (("check", "m.onnx", "--inputs", "ima"), ["file,ima"]),
        (("check", "--task", "ten"), ["plain,tensors"]),
    ],
)
def test_commands_options_choices_and_paths_are_completed(words: tuple[str, ...], answer: list[str]) -> None:  # fmt: skip
    done = asked(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == answer


def test_a_variable_that_is_left_over_lets_nothing_pass() -> None:
    done = asked("check", arguments=("check", "missing.onnx", "--json"))
    assert done.returncode == 2
    assert "missing.onnx does not exist" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_takes_the_script(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run(capsys, "bash")[1])
    done = subprocess.run(
        ["bash", "-c", "source ./script && complete -p gate"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "_gate_completion" in done.stdout
