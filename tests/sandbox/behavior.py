"""Functions that simulate what a child may do after malicious bytes take control of it."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gate.errors import DigestMismatch


def echo(**arguments: Any) -> Any:
    return arguments


def surroundings() -> dict[str, Any]:
    """Return what the child inherits from its parent."""
    import json
    import resource
    import tempfile

    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.append((int(name), str(Path("/proc/self/fd", name).readlink()).partition(":")[0]))
    return {
        "environment": dict(os.environ),
        "temporary": tempfile.gettempdir(),
        "files": held,
        "json": json.__file__,
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "cpu": resource.getrlimit(resource.RLIMIT_CPU)[0],
    }


def litter() -> str:
    """Leave a file in the temporary folder."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    (folder / "rest").write_bytes(b"x" * 1000)
    return str(folder)


def refuse() -> None:
    raise DigestMismatch("other bytes")


def stumble() -> None:
    raise KeyError("a bug")


def pose(name: str) -> None:
    """Raise an exception class that the gate does not raise."""
    raise type(name, (Exception,), {})("a lie")


def run_out() -> None:
    raise MemoryError


def grow() -> None:
    kept = []
    while True:
        kept.append(b"x" * (1 << 24))


def grow_at_once() -> None:
    bytearray(1 << 40)


def for_ever(pid: str | None = None) -> None:
    if pid is not None:
        Path(pid).write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def clean_up(pid: str, cleaned: str) -> None:
    try:
        for_ever(pid)
    except KeyboardInterrupt:
        Path(f"{cleaned}.begun").touch()
        time.sleep(0.5)
        Path(cleaned).touch()
        raise


def spin() -> None:
    while True:
        pass


def die(number: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # started by nohup
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def leave(code: int) -> None:
    os._exit(code)


def shout() -> None:
    """Write endlessly to both streams."""
    while True:
        os.write(1, b"x" * 65536)
        os.write(2, b"y" * 65536 + b"\nno end\n")


def last_words() -> None:
    os.write(2, b"first\nlibrary: assertion failed\n")
    os.abort()


def have_child(pid: str, stay: bool) -> str:
    """Start a process that outlives this one."""
    code = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    Path(pid).write_text(str(process.pid))
    if stay:
        for_ever()
    return "done"


def forge(hexadecimal: str, times: int = 1) -> None:
    """Write a forged answer to the pipe."""
    data = memoryview(bytes.fromhex(hexadecimal) * times)
    for descriptor in range(3, 4096):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                while data:
                    data = data[os.write(descriptor, data) :]
    os._exit(0)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def part() -> str:
    """Register output at every stage of the interpreter's shutdown."""
    import atexit
    import ctypes
    import threading

    class Kept:
        def __del__(self) -> None:
            os.write(1, b"taken apart\n")

    sys.modules["kept"] = Kept()  # type: ignore[assignment]  # an object that lives to the end
    atexit.register(os.write, 1, b"exit handler\n")
    threading.Timer(0.3, os.write, (1, b"thread\n")).start()
    ctypes.CDLL(None).printf(b"a C library\n")
    sys.stdout.write("Python\n")
    return "done"
