"""A command of `gate` in this process, as its user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gate import cli

Capture = pytest.CaptureFixture[str]


def as_json(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command line; return the exit code, and what `--json` prints."""
    code = cli.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def runner(
    command: str,
) -> tuple[Callable[..., tuple[int, str, str]], Callable[..., tuple[int, dict[str, Any]]]]:
    """Two functions of capsys and arguments: exit code, stdout and stderr; exit code and `--json`."""

    def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([command, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run, lambda capsys, *arguments: as_json(capsys, command, *arguments)
