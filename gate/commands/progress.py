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

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# The lower layers report their steps by `logging.getLogger("gate.steps").debug`: only the bars and
# spinners here listen.


LONG_S = 2.0
"""What takes longer is said where no bar can be drawn."""

EVERY_S = 30.0
"""Seconds between two lines of progress where no bar can be drawn."""

_STEPS = logging.getLogger("gate.steps")


class Bar:
    """Called with what is done and how much there is, or step by step. Never passes its total."""

    def __init__(self, progress: Progress, task: TaskID, pulse: Pulse | None = None) -> None:
        self._progress, self._task, self._pulse = progress, task, pulse

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` is complete."""
        if self._pulse is not None:
            self._pulse(done, total)
        self._progress.update(self._task, completed=min(done, total), total=total)

    def step(self, note: str = "", *, steps: int = 1) -> None:
        """`steps` more are done; `note` stands behind the bar from now on."""
        task = self._progress.tasks[self._task]
        done = task.completed + steps
        within = done if task.total is None else min(done, task.total)
        self._progress.update(self._task, completed=within, note=note)

    def note(self, text: str) -> None:
        """`text` stands behind the bar from now on."""
        self._progress.update(self._task, note=text)


@contextlib.contextmanager
def progress_bar(title: str, *, total: int | None = None) -> Iterator[Bar]:
    """`total`: where it is clear from the beginning."""
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
                made = Bar(progress, task)
                with _heard(made.note):
                    yield made
            else:
                with _lines_for_long(title, stderr) as pulse:
                    yield Bar(progress, task, pulse)


@contextlib.contextmanager
def spinner(title: str) -> Iterator[None]:
    """Show `title`, and behind it what is begun meanwhile, until it is done."""
    with _duplicated_stderr() as stderr:
        if not stderr.isatty():
            with _lines_for_long(title, stderr):
                yield
            return
        from rich.text import Text

        from gate.commands.result import console

        shown = console(stderr).status(Text(title))
        with shown, _heard(lambda text: shown.update(Text(f"{title}: {text}"))):
            yield


@contextlib.contextmanager
def _duplicated_stderr() -> Iterator[TextIO]:
    """stderr by a descriptor of its own: who captures what a library prints must not get ours."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no file, such as a test's
        yield sys.stderr
        return
    encoding = sys.stderr.encoding
    with os.fdopen(descriptor, "w", encoding=encoding, errors="backslashreplace") as stream:
        yield stream


@contextlib.contextmanager
def _heard(show: Callable[[str], None]) -> Iterator[None]:
    """Hand on what the rooms below say that they begin."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()  # a name of a registry could steer the terminal
            show("".join(char if char.isprintable() else "�" for char in text))

    handler, before = Handler(), (_STEPS.level, _STEPS.propagate)
    _STEPS.addHandler(handler)
    _STEPS.setLevel(logging.DEBUG)
    _STEPS.propagate = False  # a listener to all log records did not request this
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
    late, pulse = _SlowStepNotice(stream), Pulse(title, stream)
    late.begin(title)

    def begin(text: str) -> None:
        late.begin(f"{title} ({text})")
        pulse.begin(text)

    try:
        with _heard(begin):
            yield pulse
    finally:
        late.stop()


class Pulse:
    """Prints the step and what is left of it, when it is called and 30 s have gone by."""

    def __init__(
        self, title: str, stream: TextIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds from any beginning."""
        self._title, self._stream, self._clock = title, stream, clock
        self._last = clock()
        self._step = self._left = ""

    def begin(self, step: str) -> None:
        """The step before is over."""
        self._step = f" ({step})"
        self._beat()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` samples are complete."""
        self._left = f": {max(total - done, 0)} of {total} samples left"
        self._beat()

    def _beat(self) -> None:
        now = self._clock()
        if now - self._last < EVERY_S:
            return
        self._last = now
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            print(f"{self._title}{self._step}{self._left} …", file=self._stream, flush=True)


class _SlowStepNotice:
    """Says a text once its step has gone on for `LONG_S`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._timer: threading.Timer | None = None

    def begin(self, text: str) -> None:
        """The step before is over."""
        self.stop()
        self._timer = threading.Timer(LONG_S, self._say, (text,))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Cancel the notice of the last step."""
        if self._timer is not None:
            self._timer.cancel()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # no reader, or the process is ending
            print(f"{text} …", file=self._stream, flush=True)


def _is_for_machines() -> bool:
    from gate.commands.result import Line

    context = click.get_current_context(silent=True)
    line = context.obj if context is not None else None
    return isinstance(line, Line) and "--json" in line.arguments


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Say it, and let Python's collector rest meanwhile."""
    with paused_gc(), spinner("loading PyTorch and the model"):
        yield
