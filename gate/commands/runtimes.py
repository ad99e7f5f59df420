"""`gate runtimes`, `gate runtimes install`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.click_types import POLICY_FILE
from gate.commands.progress import spinner
from gate.commands.result import CommandResult, Dispatch, ExitCode, machine_options

if TYPE_CHECKING:
    from rich.console import Console

    from gate.runtimes.selection import Listed


_STYLES = {"ok": "green", "broken": "bold red", "absent": "yellow", "by options": "cyan"}


@click.command(
    "runtimes",
    cls=Dispatch,
    subcommands={"install": "gate.commands.runtimes:runtimes_install_command"},
    short_help="List what can run a file on this machine.",
)
@click.option("--policy", type=POLICY_FILE, help="YAML: only the runtimes that it names.")
@machine_options
def command(policy: Path | None) -> CommandResult:
    """List the runtimes: those that are there, and those that are not, and why.

    The gate's own, and those of installed packages (docs/runtimes.md). gate runtimes install NAME
    brings what one needs beside packages of Python. Exit code 0 if none is
    broken, 2 if one is: it is installed, and can't say whether it runs.

    \b
    Examples:
      gate runtimes
      gate runtimes --json
      gate runtimes --policy params.yaml
      gate runtimes install browser-wasm
    """
    from gate.policy.policy import Policy
    from gate.runtimes.selection import listed

    wanted = Policy.from_file(policy) if policy else None
    with spinner("asking the runtimes"):
        rows = listed(wanted)
    broken = any(row.state == "broken" for row in rows)
    return CommandResult(
        ExitCode.NOT_JUDGED if broken else ExitCode.DONE,
        {"runtimes": [row.to_plain() for row in rows]},
        lambda console: _show(rows, console),
    )


def _show(rows: tuple[Listed, ...], console: Console) -> None:
    from rich.text import Text

    from gate.report.terminal import print_table

    console.print(
        print_table(
            ("runtime", "state", "runs on", "versions", "package"),
            (
                (
                    row.name if row.name == row.kind else f"{row.name} ({row.kind})",
                    Text(row.state, style=_STYLES[row.state]),
                    row.provider,
                    ", ".join(f"{name} {version}" for name, version in row.versions.items()),
                    row.package or "parity-gate",
                )
                for row in rows
            ),
        )
    )
    for row in rows:
        if row.reason:
            console.print(Text(f"{row.name}: {row.reason}"))


@click.command("install")
@click.argument("name")
@machine_options
def runtimes_install_command(name: str) -> CommandResult:
    """Bring what the runtime NAME needs beside packages of Python; what is here already stays.

    browser-wasm: onnxruntime-web by npm, of the version that the gate pins with its digests, into
    ~/.cache/parity-gate/runtimes, or GATE_RUNTIMES. browser-webgpu uses the same.

    \b
    Examples:
      gate runtimes install browser-wasm
      GATE_RUNTIMES=/opt/runtimes gate runtimes install browser-wasm
    """
    from gate.errors import PolicyError
    from gate.runtimes import runtime, selection

    entry = selection.find_runtime(name, selection.entries())
    if not entry.builtin:
        raise PolicyError(
            f"{name} comes with {entry.package}, which installs what it needs. See why it is "
            "absent: gate runtimes."
        )
    with spinner(f"installing {name}"):
        brought = runtime.load_runtime(entry.place).install()
    words = "installed" if brought else "was installed before"
    return CommandResult(
        ExitCode.DONE,
        {"runtime": name, "installed": brought},
        lambda console: console.print(f"{name} {words}."),
    )
