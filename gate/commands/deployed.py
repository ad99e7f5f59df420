"""`gate deployed`: what serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.options import STORE
from gate.commands.outcome import Outcome, machine_options
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.deploy.manifest import Manifest


@click.command("deployed", short_help="Show what serves.")
@click.argument("name", required=False)
@STORE
@machine_options
def command(name: str | None, store: Path) -> Outcome:
    """Show what serves from a store, and what a rollback would go back to.

    Every file is hashed again: exit code 0 if all are whole, 1 if one is not what was deployed,
    2 if nothing is deployed as NAME.

    \b
    Examples:
      gate deployed --store /srv/models
      gate deployed digits --store /srv/models --json
    """
    return _look(name, store)


def _look(name: str | None, folder: Path) -> Outcome:
    from gate.deploy.staging import prove
    from gate.deploy.store import Store
    from gate.errors import StorageError

    store = Store(folder)
    names = store.names() if name is None else (name,)
    found: list[Manifest] = []
    problems: dict[str, str] = {}
    for each in names:
        live = store.live(each)
        if live is None:
            raise StorageError(
                f"nothing is deployed as '{each}' in {folder}, but {list(store.names())}. "
                "Deploy it first: gate deploy."
            )
        found.append(live)
        for label, slot in live.slots.items():
            problem = prove(store, slot)
            if problem is not None:
                problems[f"{each}/{label}"] = problem
    return Outcome(
        Status.REJECTED if problems else Status.DONE,
        {"deployed": [live.to_plain() for live in found], "problems": problems},
        lambda console: _show(found, problems, console),
    )


def _show(found: list[Manifest], problems: dict[str, str], console: Console) -> None:
    from rich.text import Text

    from gate.report.table import add_row, table
    from gate.story.wording import printable

    if not found:
        console.print("Nothing is deployed.")
        return
    shown = table(("name", "release", "slot", "sha256", "bytes", "golden", "since", "before"))
    for live in found:
        for label, slot in live.slots.items():
            cells = (
                live.name,
                str(live.release),
                label,
                slot.sha256.short,
                str(slot.size_bytes),
                slot.golden.sha256.short if slot.golden else "none",
                live.deployed_at,
                ", ".join(str(earlier.release) for earlier in live.previous),
            )
            add_row(shown, cells)
    console.print(shown)
    for place, problem in problems.items():
        console.print(Text(printable(f"{place}: {problem}"), style="red"))
