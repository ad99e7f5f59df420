"""Messages of C++ code are captured, and stderr is restored."""

from __future__ import annotations

import os
import threading
import time

import pytest

from gate.onnx_file.sessions import captured_stderr


def test_descriptor_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    with captured_stderr() as lines:
        os.write(2, "one\ntwo \N{DEGREE SIGN}\n".encode())
        os.write(2, b"\xff broken")
        assert lines == []
    assert lines == ["one", "two \N{DEGREE SIGN}", "\N{REPLACEMENT CHARACTER} broken"]
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_descriptor_is_restored_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="inside"), captured_stderr() as lines:
        os.write(2, b"before it broke\n")
        raise ValueError("inside")
    assert lines == ["before it broke"]
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_two_threads_restore_the_descriptor() -> None:
    """The thread that begins first also ends first."""
    began, before = threading.Event(), os.fstat(2).st_ino

    def hears(*, for_s: float) -> None:
        with captured_stderr():
            began.set()
            time.sleep(for_s)

    first = threading.Thread(target=hears, kwargs={"for_s": 0.1})
    second = threading.Thread(target=hears, kwargs={"for_s": 0.2})
    first.start()
    began.wait()
    second.start()
    first.join()
    second.join()
    assert os.fstat(2).st_ino == before
