"""Bars and spinners: on a real terminal, in a pipe, beside `--json`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import sys
import threading

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from gate.commands import progress
from gate.commands.child import Line
from gate.commands.progress import Bar, bar, spinner

STEPS = logging.getLogger("gate.steps")


@given(total=st.integers(1, 50), calls=st.lists(st.integers(0, 80)), step=st.booleans())
def test_a_bar_never_passes_its_total(total: int, calls: list[int], step: bool) -> None:
    shown = Progress(disable=True)
    made = Bar(shown, shown.add_task("measuring", total=total, note=""))
    for number in calls:
        if step:
            made.step(steps=number)
        else:
            made(number, total)
        assert shown.tasks[0].completed <= total


def test_on_a_terminal_what_is_begun_stands_behind_the_spinner(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    mine, its = pty.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with spinner("promoting"):
            STEPS.debug("upload %s", "model\x1b[2J.onnx")
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side was closed
        while part := os.read(mine, 1 << 16):
            shown += part
    os.close(mine)
    assert "promoting: upload model�[2J.onnx" in shown.decode()


def _lines(monkeypatch: pytest.MonkeyPatch, *, arguments: tuple[str, ...] = ()) -> str:
    """What a pipe gets of a step that is long and of one that is short."""
    pipe, said = io.StringIO(), threading.Event()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress, "LONG_S", 0.02)
    monkeypatch.setattr(pipe, "flush", said.set, raising=False)
    context = click.Context(click.Command("promote"), obj=Line(arguments, child=False))
    with context, spinner("promoting"):
        STEPS.debug("read the alias")
        STEPS.debug("upload model.onnx")
        said.wait(0.5 if arguments else 10.0)
        STEPS.debug("read it back")
    return pipe.getvalue()


def test_elsewhere_only_what_takes_long_gets_a_line(monkeypatch) -> None:
    assert _lines(monkeypatch) == "promoting (upload model.onnx) …\n"


def test_beside_json_there_is_none(monkeypatch) -> None:
    assert _lines(monkeypatch, arguments=("promote", "--json")) == ""


def test_afterwards_nobody_listens(monkeypatch) -> None:
    before = (STEPS.level, STEPS.propagate, list(STEPS.handlers))
    with pytest.raises(KeyError), bar("measuring"):
        raise KeyError
    assert (STEPS.level, STEPS.propagate, STEPS.handlers) == before
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)
                and not thread.finished.is_set()]  # fmt: skip


def test_what_a_library_prints_is_captured_without_the_bar(capfd) -> None:
    from gate.export.capture import captured

    with progress._own_stderr() as stream, captured() as capture:
        print("ours", file=stream, flush=True)
        os.write(2, b"the library's\n")
    assert capture.text == "the library's\n"
    assert capfd.readouterr().err == "ours\n"
