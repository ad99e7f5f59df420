"""`gate runtimes`: what can run a file on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.dispatch import Dispatch
from gate.commands.given import POLICY_FILE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.runtimes.listing import Listed

_STYLES = {"ok": "green", "broken": "bold red", "absent": "yellow", "by options": "cyan"}


@click.command(
    "runtimes",
    cls=Dispatch,
    subcommands={"install": "gate.commands.runtimes_install"},
    short_help="List what can run a file on this machine.",
)
@click.option("--policy", type=POLICY_FILE, help="YAML: only the runtimes that it names.")
@machine_options
def command(policy: Path | None) -> Outcome:
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
    from gate.runtimes.listing import listed

    wanted = Policy.of_file(policy) if policy else None
    with spinner("asking the runtimes"):
        rows = listed(wanted)
    broken = any(row.state == "broken" for row in rows)
    return Outcome(
        Status.NOT_JUDGED if broken else Status.DONE,
        {"runtimes": [row.to_plain() for row in rows]},
        lambda console: _show(rows, console),
    )


def _show(rows: tuple[Listed, ...], console: Console) -> None:
    from rich.text import Text

    from gate.report.table import table

    console.print(
        table(
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
