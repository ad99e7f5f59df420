"""Tables on a terminal: they all look alike, and what does not fit is folded, never cut."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from gate.story.wording import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def table(
    headings: Iterable[str],
    rows: Iterable[Iterable[str | Text]] = (),
    *,
    right: Container[str] = (),
    title: str | None = None,
) -> Table:
    """The rows below the headings; the columns that `right` names are numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        add_row(made, row)
    return made


def add_row(shown: Table, cells: Iterable[str | Text], *, style: str = "") -> None:
    """Add a row: of a string what is printable, in this style; a `Text` as it is."""
    from rich.text import Text

    shown.add_row(*(Text(printable(c), style=style) if isinstance(c, str) else c for c in cells))
