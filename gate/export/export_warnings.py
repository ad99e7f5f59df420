"""Capture exporter output; select the warnings that affect the file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

import torch

from gate.errors import first_line
from gate.model.source_code import source_location

_STANDARD_DESCRIPTORS = (1, 2)


@dataclass
class Capture:
    """The captured output, filled when the `with` block of `captured` ends."""

    text: str = ""
    warnings: list[warnings.WarningMessage] = field(default_factory=list)


@contextlib.contextmanager
def captured() -> Iterator[Capture]:
    """Capture warnings, `print` and C-level output without any filter.

    Redirects the file descriptors 1 and 2 of the process, so the output of other threads is
    captured too: keep the block short.
    """
    capture = Capture()
    with tempfile.TemporaryFile() as sink, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with _descriptors_into(sink), _python_streams_into(sink):
                yield capture
        finally:
            sink.seek(0)
            capture.text = sink.read().decode(errors="replace")
            capture.warnings = list(caught)


def warning_location(warning: warnings.WarningMessage) -> str:
    """Return text such as `torchvision/models/x.py:12`, relative to the import path."""
    return source_location(warning.filename, warning.lineno)


@contextlib.contextmanager
def _descriptors_into(sink: IO[bytes]) -> Iterator[None]:
    _flush_c()
    saved: dict[int, int] = {}
    try:
        for descriptor in _STANDARD_DESCRIPTORS:
            with contextlib.suppress(OSError):  # a daemon may have closed it
                saved[descriptor] = os.dup(descriptor)
                os.dup2(sink.fileno(), descriptor)
        yield
    finally:
        _flush_c()
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)


@contextlib.contextmanager
def _python_streams_into(sink: IO[bytes]) -> Iterator[None]:
    # Line buffering keeps the order of lines from Python and C.
    with (
        os.fdopen(os.dup(sink.fileno()), "w", buffering=1, errors="replace") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield


def _flush_c() -> None:
    """Flush the buffers of Python and C, so that each line goes to the right stream."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


_MAX_LENGTH = 240
"""Longest part of a foreign text that is shown, in characters."""


def shorten_message(error: BaseException) -> str:
    """Return type and first line of an error, without the graph that torch appends."""
    line = first_line(error).partition("  [Caused by")[0].rstrip(".: ")
    return clipped(f"{type(error).__name__}: {line}")


def clipped(text: str) -> str:
    """Return the part of a foreign text that is shown."""
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


_IN_EXPORTER = "torch/onnx/"

_IN_TORCH = "torch/"

_HARMLESS_PREFIXES = (
    "no signature found",  # a traced module has none; inputs are positional
    "Constant folding",  # an optimization that was left out
    "Provided key",  # a name of dynamic_axes that another strategy names differently
    "# The axis name",  # an axis of two inputs has one name, as it should
)


def tracer_warnings(caught: Iterable[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return `location: message` of each TracerWarning outside of torch, once, in order.

    Modules of torch cause the same warnings but are written to be traced.
    """
    return _unique(
        f"{warning_location(warning)}: {_message_text(warning)}"
        for warning in caught
        if issubclass(warning.category, torch.jit.TracerWarning)  # type: ignore[attr-defined]
        and not _in_torch_library(warning_location(warning))
    )


def hazards(caught: Iterable[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return the exporter's own warnings: operators left in training mode, batch-bound LSTMs."""
    return _unique(
        _message_text(warning)
        for warning in caught
        if issubclass(warning.category, UserWarning)
        and _IN_EXPORTER in warning.filename.replace("\\", "/")
        and not str(warning.message).startswith(_HARMLESS_PREFIXES)
    )


def _in_torch_library(location: str) -> bool:
    # Warnings from torch/jit about differing outputs come from the tracer's check: keep these.
    return location.startswith(_IN_TORCH) and not location.startswith("torch/jit/")


def _message_text(warning: warnings.WarningMessage) -> str:
    return " ".join(str(warning.message).split())


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
