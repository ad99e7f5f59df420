"""Progress bars and spinners on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

import click

from gate.model.factory import paused_gc
from gate.storage.safe_text import replace_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# Lower layers report their steps with `logging.getLogger("gate.steps").debug`. Only the bars and
# spinners in this module handle these records.


LONG_S = 2.0
"""Seconds after which a step is printed if stderr is not a terminal."""

EVERY_S = 30.0
"""Seconds between two progress lines if stderr is not a terminal."""

_STEPS = logging.getLogger("gate.steps")


class Bar:
    """A progress bar, updated with absolute counts or step by step; never exceeds its total."""

    def __init__(self, progress: Progress, task: TaskID, pulse: Pulse | None = None) -> None:
        self._progress, self._task, self._pulse = progress, task, pulse

    def __call__(self, completed: int, total: int) -> None:
        """Report that `completed` of `total` are complete."""
        if self._pulse is not None:
            self._pulse(completed, total)
        self._progress.update(self._task, completed=min(completed, total), total=total)

    def step(self, note: str = "", *, steps: int = 1) -> None:
        """Advance the bar by `steps` and show `note` after it."""
        task = self._progress.tasks[self._task]
        completed = task.completed + steps
        within = completed if task.total is None else min(completed, task.total)
        self._progress.update(self._task, completed=within, note=note)

    def note(self, text: str) -> None:
        """Show `text` after the bar."""
        self._progress.update(self._task, note=text)


@contextlib.contextmanager
def progress_bar(title: str, *, total: int | None = None) -> Iterator[Bar]:
    """Show a progress bar. `total`: the number of steps, if known at the start."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from gate.commands.result import console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with _duplicated_stderr() as stderr:
        terminal = stderr.isatty()
        with Progress(
            *columns, console=console(stderr), transient=True, disable=not terminal
        ) as progress:
            task = progress.add_task(title, total=total, note="")
            if terminal:
                bar = Bar(progress, task)
                with _steps_to(bar.note):
                    yield bar
            else:
                with _lines_for_long(title, stderr) as pulse:
                    yield Bar(progress, task, pulse)


@contextlib.contextmanager
def spinner(title: str) -> Iterator[None]:
    """Show `title` and the current step until the context ends."""
    with _duplicated_stderr() as stderr:
        if not stderr.isatty():
            with _lines_for_long(title, stderr):
                yield
            return
        from rich.text import Text

        from gate.commands.result import console

        shown = console(stderr).status(Text(title))
        with shown, _steps_to(lambda text: shown.update(Text(f"{title}: {text}"))):
            yield


@contextlib.contextmanager
def _duplicated_stderr() -> Iterator[TextIO]:
    """Yield a duplicate of stderr, so that code that captures stderr does not capture progress."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # not a real file, for example in a test
        yield sys.stderr
        return
    encoding = sys.stderr.encoding
    with os.fdopen(descriptor, "w", encoding=encoding, errors="backslashreplace") as stream:
        yield stream


@contextlib.contextmanager
def _steps_to(show: Callable[[str], None]) -> Iterator[None]:
    """Pass the steps that lower layers log to `show`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(replace_controls(record.getMessage()))

    handler, before = Handler(), (_STEPS.level, _STEPS.propagate)
    _STEPS.addHandler(handler)
    _STEPS.setLevel(logging.DEBUG)
    _STEPS.propagate = False  # handlers of the root logger must not print the steps
    try:
        yield
    finally:
        _STEPS.removeHandler(handler)
        _STEPS.setLevel(before[0])
        _STEPS.propagate = before[1]


@contextlib.contextmanager
def _lines_for_long(title: str, stream: TextIO) -> Iterator[Pulse | None]:
    """Print a line for each long step, and one every 30 s; none with `--json`."""
    if _is_for_machines():
        yield None
        return
    pulse = Pulse(title, stream)
    pulse.begin()
    try:
        with _steps_to(pulse.begin):
            yield pulse
    finally:
        pulse.stop()


class Pulse:
    """Prints a step after it has run for `LONG_S`, then step and remaining samples every 30 s."""

    def __init__(
        self, title: str, stream: TextIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: returns seconds since an arbitrary time."""
        self._title, self._stream, self._clock = title, stream, clock
        self._last = clock()
        self._step = self._left = ""
        self._timer: threading.Timer | None = None

    def begin(self, step: str = "") -> None:
        """Start a new step."""
        self.stop()
        self._step = f" ({step})" if step else ""
        self._timer = threading.Timer(LONG_S, self._print, (f"{self._title}{self._step}",))
        self._timer.daemon = True
        self._timer.start()
        self._beat()

    def stop(self) -> None:
        """Cancel the line of the last step."""
        if self._timer is not None:
            self._timer.cancel()

    def __call__(self, completed: int, total: int) -> None:
        """Report that `completed` of `total` samples are complete."""
        self._left = f": {max(total - completed, 0)} of {total} samples left"
        self._beat()

    def _beat(self) -> None:
        now = self._clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._print(f"{self._title}{self._step}{self._left}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # no reader, or the process is ending
            print(f"{text} …", file=self._stream, flush=True)


def _is_for_machines() -> bool:
    from gate.commands.result import Line

    context = click.get_current_context(silent=True)
    line = context.obj if context is not None else None
    return isinstance(line, Line) and "--json" in line.arguments


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Show a spinner and pause Python's garbage collector, which slows imports down."""
    with paused_gc(), spinner("loading PyTorch and the model"):
        yield
