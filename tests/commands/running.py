"""Run a command of `gate` in this process, as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gate import cli

Capture = pytest.CaptureFixture[str]


def as_json(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command line; return the exit code and the output of `--json`."""
    code = cli.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def create_runner(
    command: str,
) -> tuple[Callable[..., tuple[int, str, str]], Callable[..., tuple[int, dict[str, Any]]]]:
    """Return two functions of capsys and arguments.

    The first returns exit code, stdout and stderr; the second exit code and the output of `--json`.
    """

    def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([command, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run, lambda capsys, *arguments: as_json(capsys, command, *arguments)
