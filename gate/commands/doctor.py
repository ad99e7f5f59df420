"""`gate doctor`: what this machine can prove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.options import TRACKING_URI, tracking_uri
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.doctor import Diagnosis

_STYLES = {"ok": "green", "missing": "bold red", "absent": "yellow"}


@click.command("doctor", short_help="Show what this machine can prove.")
@TRACKING_URI
@machine_options
def command(tracking_uri: str | None) -> Outcome:
    """Show what this machine can prove, and how to mend what it can't.

    Every provider is asked to run a tiny model: that it is listed proves nothing. Exit code 0 if
    files can be judged on the CPU, 2 if not.

    \b
    Examples:
      gate doctor
      gate doctor --json
      gate doctor --tracking-uri http://127.0.0.1:5000
    """
    return _examine(tracking_uri)


def _examine(given: str | None) -> Outcome:
    from gate.doctor import examine
    from gate.storage.redaction import redacted

    address = tracking_uri(given)

    def preflight() -> None:
        from gate.registry.mlflow.registry import preflight

        preflight(address)

    with spinner("trying what this machine can do"):
        diagnosis = examine(Path.cwd(), registry=redacted(address), preflight=preflight)
    return Outcome(
        Status.DONE if diagnosis.can_judge else Status.NOT_JUDGED,
        diagnosis.to_plain(),
        lambda console: _show(diagnosis, console),
    )


def _show(diagnosis: Diagnosis, console: Console) -> None:
    from rich.text import Text

    from gate.report.table import table

    rows = [
        (Text(found.name), Text(found.state, style=_STYLES[found.state]), Text(found.seen))
        for found in diagnosis.findings
    ]
    console.print(table(("what", "state", "seen"), rows))
    for finding in diagnosis.findings:
        if finding.remedy and finding.state != "ok":
            console.print(Text(f"{finding.name}: {finding.remedy}"))
    if diagnosis.can_judge:
        console.print(Text("This machine can judge files on the CPU.", style="green"))
    else:
        console.print(Text("This machine can't judge files: mend what is missing.", "bold red"))
