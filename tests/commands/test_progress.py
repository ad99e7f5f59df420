"""Progress bars and spinners on a terminal, in a pipe and with --json."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import sys
import threading
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from gate import cli
from gate.commands import progress
from gate.commands.progress import Bar, spinner
from gate.commands.result import Line
from gate.runtimes.ort import Ort, OrtCpu, OrtCpuOptimized
from tests.distributed import tiny as small
from tests.exhaustive import exhaustive
from tests.multi_file import tiny as parts

STEPS = logging.getLogger("gate.steps")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with samples and a short last batch, and a release of two parts."""
    folder = tmp_path_factory.mktemp("checked")
    model = small.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.zeros(2, 6),), folder / "model.onnx", dynamo=False,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(70, 6)).astype(np.float32)
    np.save(folder / "rows.npy", rows)
    parts.export_files(folder)
    parts.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    return folder


ONE_FILE = ["model.onnx", "--reference", "tests.distributed.tiny:build", "--inputs", "rows.npy"]
RELEASE = ["release.yaml", "--reference", "tests.multi_file.tiny:build", "--inputs", "x.npy"]


@pytest.mark.parametrize(
    ("line", "instruments"),
    [
        pytest.param([*ONE_FILE, "--batch-size", "64"], {}, id="a short last batch"),
        pytest.param(
            ONE_FILE, {"search_inputs": 0, "stability_samples": 3}, id="few other instruments"
        ),
        pytest.param(ONE_FILE, {"absent": True}, id="no runtime"),
        pytest.param(
            [*ONE_FILE, "--jobs", "2"],
            {},
            id="two processes",
            marks=[pytest.mark.proof, exhaustive],
        ),
        pytest.param(RELEASE, {}, id="a release"),
    ],
)
def test_check_reaches_its_announced_total(
    checked: Path, monkeypatch: pytest.MonkeyPatch, line: list[str], instruments: dict[str, int]
) -> None:
    """Read the calls of `Bar`, because the bar itself does not show excess steps."""
    monkeypatch.chdir(checked)
    calls: list[tuple[int, int]] = []

    def recorded(self: Bar, done: int, total: int) -> None:
        calls.append((done, total))

    monkeypatch.setattr(Bar, "__call__", recorded)
    expected = dict(instruments)
    if expected.pop("absent", False):
        monkeypatch.setattr(Ort, "absent_reason", lambda _self, _options: "not here")
        monkeypatch.setattr(OrtCpu, "absent_reason", lambda _self, _options: "not here")
        monkeypatch.setattr(OrtCpuOptimized, "absent_reason", lambda _self, _options: "not here")
    settings = [
        f"--set=instruments.{name}={str(value).lower()}" for name, value in expected.items()
    ]
    assert cli.main(["check", *line, *settings]) == (2 if "absent" in instruments else 0)
    (total,) = {total for _, total in calls}
    counts = [done for done, _ in calls]
    assert counts == sorted(counts)
    assert counts[-1] == total
    assert total >= 70 or line == RELEASE


def test_terminal_shows_the_current_step(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    mine, its = pty.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with spinner("promoting"):
            STEPS.debug("upload %s", "model\x1b[2J.onnx")
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises it when the other end was closed
        while part := os.read(mine, 1 << 16):
            shown += part
    os.close(mine)
    assert "promoting: upload model�[2J.onnx" in shown.decode()


def _lines(monkeypatch: pytest.MonkeyPatch, *, arguments: tuple[str, ...] = ()) -> str:
    """Return the output of a long and a short step to a pipe."""
    pipe, stated = io.StringIO(), threading.Event()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress, "LONG_S", 0.02)
    monkeypatch.setattr(pipe, "flush", stated.set, raising=False)
    context = click.Context(click.Command("promote"), obj=Line(arguments, child=False))
    with context, spinner("promoting"):
        STEPS.debug("read the alias")
        STEPS.debug("upload model.onnx")
        stated.wait(0.5 if arguments else 10.0)
        STEPS.debug("read it back")
    return pipe.getvalue()


def test_pipe_gets_a_line_only_for_long_steps(monkeypatch) -> None:
    assert _lines(monkeypatch) == "promoting (upload model.onnx) …\n"


def test_json_output_has_no_progress(monkeypatch) -> None:
    assert _lines(monkeypatch, arguments=("promote", "--json")) == ""


def test_captured_library_output_has_no_bar(capfd) -> None:
    from gate.export.export_warnings import captured

    with progress._duplicated_stderr() as stream, captured() as capture:
        print("ours", file=stream, flush=True)
        os.write(2, b"the library's\n")
    assert capture.text == "the library's\n"
    assert capfd.readouterr().err == "ours\n"


def test_pipe_gets_the_remaining_time_every_30_seconds() -> None:
    now, stream = [0.0], io.StringIO()
    pulse = progress.Pulse("measuring", stream, clock=lambda: now[0])
    for second in range(0, 95, 5):
        now[0] = float(second)
        if second == 40:
            pulse.begin("probes")
        pulse(second, 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "70 of 100" in lines[0]
    assert "probes" not in lines[0]
    assert "probes" in lines[1]
    assert "40 of 100" in lines[1]
    assert "10 of 100" in lines[2]
