"""A progress bar on stderr, and only where stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield what takes (done, total), or None where nobody would see a bar."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    from gate.commands.outcome import console

    with Progress(console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield advance
