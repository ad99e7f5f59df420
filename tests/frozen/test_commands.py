"""Frozen help texts of all commands, and the frozen output of a session of commands."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from gate import cli
from tests import small_project
from tests.frozen.store import FOLDER, assert_frozen
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

SESSION = (FOLDER / "cli_session.txt").read_text(encoding="utf-8").splitlines()
MAX_KEY_DEPTH = 3
"""Maximum depth of keys of --json; deeper keys are names of nodes and the like."""
MACHINE_DEPENDENT = ("environment", "versions", "reference_cost")
"""Keys whose values depend on the machine."""
VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "GATE_SIGNING_KEY", "GATE_TRUST",
             "GATE_STATE", "GATE_STORE", "GATE_SECRET_FILE", "GATE_TIME_LIMIT",
             "GATE_MEMORY_LIMIT", "RAY_ADDRESS")  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(threads)


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the command lines of a command and of all its subcommands.

    click caches the help option of a command's first call. Reset it, because other tests may have
    called the command without `-h`.
    """
    command._help_option = None
    yield path
    for name, location in getattr(command, "subcommands", {}).items():
        yield from commands(pkgutil.resolve_name(location), (*path, name))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*path, name))


@pytest.mark.parametrize("name", ["gate", *cli.COMMANDS])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [path for path in commands(cli.gate) if (path or ("gate",))[0] == name]
    text = ""
    for path in expected:
        assert cli.main([*path, "--help"]) == 0
        text += f"$ gate {' '.join(path)} --help\n{capsys.readouterr().out}\n"
    assert_frozen(f"help/{name}.txt", text)


@pytest.mark.proof
def test_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tests write to the folder of `create_project`. Its module is imported from there first, because
    # the folder of this test is removed, and the process keeps the module.
    small_project.create_project()
    folder = small_project.fill_project(tmp_path / "project")
    shutil.copy(FOLDER / "policies" / "cpu.yaml", folder)
    monkeypatch.chdir(folder)
    text = ""
    for line in SESSION:
        if line.startswith("#") or not line:
            continue
        command, _, output = line.partition(" > ")
        arguments = shlex.split(command)
        code = cli.main(arguments)
        printed = capsys.readouterr()
        if output:
            Path(output).write_text(printed.out)
        text += f"$ gate {line}\n  exit code {code}\n"
        # Progress is printed only if a step takes long, which depends on the machine.
        lines = [each for each in printed.err.splitlines() if each and not each.endswith(" …")]
        if lines and code:
            first = next((each for each in lines if each.startswith("error:")), lines[0])
            first = first.replace(str(folder), "FOLDER")
            text += f"  {re.sub(r'[0-9a-f]{12,}', 'HEX', first)}\n"
        if "--json" in arguments and printed.out:
            text += "".join(f"    {key}\n" for key in keys(json.loads(printed.out)))
    assert_frozen("session.txt", text)


def keys(plain: Any, depth: int = MAX_KEY_DEPTH) -> list[str]:
    """Return dotted keys, merged for all elements of a list; `[]` stands for an element."""
    if isinstance(plain, list):
        return sorted({f"[]{key}" for each in plain for key in keys(each, depth)})
    if not isinstance(plain, dict) or not depth:
        return []
    matches = []
    for key, value in plain.items():
        matches.append(f".{key}")
        inner = [] if key in MACHINE_DEPENDENT else keys(value, depth - 1)
        matches += [f".{key}{each}" for each in inner]
    return matches
