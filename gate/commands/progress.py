"""A progress bar on stderr, and only where stderr is a terminal: of a command, and of a stage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """Called with what is done and how much there is, or step by step."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def __call__(self, done: int, total: int) -> None:
        """So much of `total` is done."""
        self._progress.update(self._task, completed=done, total=total)

    def step(self, note: str = "", *, steps: int = 1) -> None:
        """`steps` more are done; `note` stands behind the bar from now on."""
        self._progress.update(self._task, advance=steps, note=note)


@contextlib.contextmanager
def bar(title: str, *, total: int | None = None) -> Iterator[Bar]:
    """`total`: where it is clear from the beginning."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from gate.commands.outcome import console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(
        *columns,
        console=console(sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        yield Bar(progress, progress.add_task(title, total=total, note=""))
