"""A command of `gate` in this process, as its user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gate import cli

Capture = pytest.CaptureFixture[str]


def runner(
    command: str,
) -> tuple[Callable[..., tuple[int, str, str]], Callable[..., tuple[int, dict[str, Any]]]]:
    """Two functions of capsys and arguments: exit code, stdout and stderr; exit code and `--json`."""

    def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([command, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    def as_json(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = run(capsys, *arguments, "--json")
        return code, json.loads(out)

    return run, as_json
