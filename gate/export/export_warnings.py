"""What libraries say while they work: warnings, and all text on stdout and stderr, C code's too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from gate.model.source_place import source_place

_STANDARD_DESCRIPTORS = (1, 2)


@dataclass
class Capture:
    """What was said. Filled when the `with` block of `captured` ends, however it ends."""

    text: str = ""
    warnings: list[warnings.WarningMessage] = field(default_factory=list)


@contextlib.contextmanager
def captured() -> Iterator[Capture]:
    """Keep warnings, `print`s and C-level output from the user; nothing is filtered.

    Works on the process's file descriptors 1 and 2: output of other threads is captured too, so
    hold it for the call that needs it only.
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


def place(warning: warnings.WarningMessage) -> str:
    """`torchvision/models/x.py:12`: below the import path, so the same on every machine."""
    return source_place(warning.filename, warning.lineno)


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
    # Line buffering keeps Python's lines in order with those of C code.
    with (
        os.fdopen(os.dup(sink.fileno()), "w", buffering=1, errors="replace") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield


def _flush_c() -> None:
    """Flush Python's own and C's buffers, so that no line lands on the wrong side."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
