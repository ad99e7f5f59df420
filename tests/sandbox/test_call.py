"""Whatever the child does, the caller continues within its limits, and nothing remains."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from gate.errors import DigestMismatch, EvidenceError, GateError, LimitExceeded, StorageError
from gate.sandbox.limits import SandboxLimits
from gate.sandbox.process import run_in_child, run_in_sandbox

SHORT = SandboxLimits(1.0, 200 * 10**6)
LONG = SandboxLimits(30.0, 200 * 10**6)
ENDED_STATES = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _call(function: str, *, limits: SandboxLimits = LONG, **arguments):
    return run_in_sandbox(
        f"tests.sandbox.behavior:{function}", arguments, limits=limits, task="the work"
    )


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() not in ENDED_STATES


def _await_end(pid: int) -> None:
    while _runs(pid):  # the timeout of the test limits it
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path_factory, monkeypatch):
    """Assert that no process and no temporary folder remains."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    mine = set(psutil.Process().children(recursive=True))
    yield
    assert {
        child for child in psutil.Process().children(recursive=True) if child not in mine
    } == set()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("value", [None, 1, "text ≤ \udcff", [1.5, {"a": True}], "x" * 3_000_000])
def test_values_round_trip(value):
    assert _call("echo", value=value) == {"value": value}


def test_environment_of_the_child(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    monkeypatch.setenv("GATE_WEBHOOK_SECRETS", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('a module beside the foreign file')")
    with (tmp_path / "private").open("w") as private:
        os.set_inheritable(private.fileno(), True)
        its = _call("surroundings")
    assert "secret" not in its["environment"].values()
    assert its["environment"]["PATH"] == os.environ["PATH"]
    assert Path(its["temporary"]).parent.name.startswith("parity-gate-")
    assert not Path(its["temporary"]).exists()
    assert Path(its["json"]).parent.parent == Path(json.__file__).parent.parent
    rest = [kind for number, kind in its["files"] if number > 2]
    assert rest == ["pipe"], "only the answer's"
    assert its["core"] == 0
    assert its["cpu"] == 30 * os.cpu_count() + 60


def test_files_of_the_child_are_removed():
    assert not Path(_call("litter")).exists()


def test_gate_errors_are_returned():
    with pytest.raises(DigestMismatch, match="^other bytes$"):
        _call("refuse")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("stumble", {}), ("no_such", {}), ("pose", {"name": "first_line"}), ("pose", {"name": "x"})],
)
def test_other_errors_are_child_failures(function, arguments):
    with pytest.raises(EvidenceError, match="the work failed unexpectedly"):
        _call(function, **arguments)


ENDS = {
    "time": ("for_ever", {}, SHORT, "took more than the time limit of 1 s.*--time-limit"),
    "time on the processor": ("spin", {}, SHORT, "--time-limit"),
    "stopped": ("stop_itself", {}, SHORT, "--time-limit"),
    "prints without end": ("shout", {}, SHORT, "--time-limit"),
    "memory": ("grow", {}, LONG, "took more than the memory limit of 200 MB.*--memory-limit"),
    "all at once": ("grow_at_once", {}, LONG, "200 MB of memory.*--memory-limit"),
    "MemoryError": ("run_out", {}, LONG, "200 MB of memory.*--memory-limit"),
    "crash": ("die", {"number": signal.SIGSEGV}, LONG, "died of SIGSEGV.*--memory-limit"),
    "killed": ("die", {"number": signal.SIGKILL}, LONG, "died of SIGKILL"),
    "a library's last words": (
        "last_words",
        {},
        LONG,
        "SIGABRT. Its last output: library: assertion",
    ),
    "exit": ("leave", {"code": 0}, LONG, "ended with code 0"),
    "exit 7": ("leave", {"code": 7}, LONG, "ended with code 7"),
    "a flood": ("forge", {"hexadecimal": "41", "times": 1 << 26}, LONG, "returned more than"),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_killed_child_is_not_a_verdict(number):
    """A service manager that stops a whole process group does this."""
    with pytest.raises(StorageError, match="another process sent a signal"):
        _call("die", limits=LONG, number=number)


def test_start_failure_is_not_a_verdict(monkeypatch):
    def full(*_: object, **_options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(StorageError, match="cannot start a process for the work"):
        _call("die", limits=LONG, number=0)


@pytest.mark.rows(4)
@pytest.mark.parametrize(("function", "arguments", "limits", "message"), ENDS.values(), ids=ENDS)
def test_each_misbehavior_ends_within_the_limits(function, arguments, limits, message):
    began = time.monotonic()
    with pytest.raises(LimitExceeded, match=f"(?s)^the work.*{message}") as caught:
        _call(function, limits=limits, **arguments)
    assert time.monotonic() - began < 60
    assert "Nothing was decided" in str(caught.value)


def test_measured_usage_is_a_note():
    with pytest.raises(LimitExceeded) as caught:
        _call("grow")
    assert caught.value.__notes__[0].startswith("seen: ")
    assert "seen" not in str(caught.value)


FORGED = {
    "pickle": pickle.dumps(DigestMismatch("x")),
    "cut off": b'{"value": [1, 2',
    "a list": b"[]",
    "nothing asked": b'{"a": 1}',
    "deep": b'{"value":' + b"[" * 100 + b"]" * 100 + b"}",
    "an error without words": b'{"error": []}',
    "an error that is none": b'{"error": [{"a": 1}, null]}',
    "not finite": b'{"value": NaN}',
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_forged_answers_are_untrusted(data):
    with pytest.raises(GateError):
        _call("forge", hexadecimal=data.hex())


@pytest.mark.parametrize("stay", [False, True])
def test_grandchildren_end_with_the_child(tmp_path, stay):
    pid = tmp_path / "pid"
    arguments = {"pid": str(pid), "stay": stay}
    if stay:
        with pytest.raises(LimitExceeded):
            _call("have_child", limits=SHORT, **arguments)
    else:
        assert _call("have_child", **arguments) == "done"
    _await_end(int(pid.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_child_ends_with_its_parent(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "from gate.sandbox.process import run_in_sandbox as call; from gate.sandbox.limits import SandboxLimits as SandboxLimits;"
        "call('tests.sandbox.behavior:for_ever', {'pid': %r}, limits=SandboxLimits(99, 1 << 30), task='')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code % str(pid)])
    while not (pid.exists() and pid.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    _await_end(int(pid.read_text()))


def test_replacing_child_keeps_environment_and_group(monkeypatch):
    monkeypatch.setenv("OF_THE_REFERENCE", "needed")
    its = run_in_child("tests.sandbox.behavior:surroundings", {}, limits=LONG, task="the work")
    assert its["environment"]["OF_THE_REFERENCE"] == "needed"


def test_child_exits_without_destructors(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # C libraries read it, too
    result = run_in_child("tests.sandbox.behavior:part", {}, limits=LONG, task="the work")
    assert result == "done"
    printed = sorted(capfd.readouterr().out.splitlines())
    assert printed == ["Python", "a C library", "exit handler", "thread"]


@pytest.mark.parametrize("both", [True, False], ids=["ctrl-c", "only the parent"])
def test_interrupt_ends_both_after_cleanup(tmp_path, both):
    pid, cleaned = tmp_path / "pid", tmp_path / "cleaned"
    code = (
        "import signal, gate.sandbox.process as c; from gate.sandbox.limits import SandboxLimits as SandboxLimits\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: c.run_in_child('tests.sandbox.behavior:clean_up', {'pid': %r, 'cleaned': %r},"
        " limits=SandboxLimits(99, 1 << 30), task='')\n"
        "except KeyboardInterrupt: raise SystemExit(130)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code % (str(pid), str(cleaned))],
        process_group=0,
        stderr=subprocess.DEVNULL,
    )
    while not (pid.exists() and pid.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    (os.killpg if both else os.kill)(parent.pid, signal.SIGINT)
    while not Path(f"{cleaned}.begun").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    os.kill(int(pid.read_text()), signal.SIGINT)  # the parent may pass on the signal late
    assert parent.wait() == 130
    assert cleaned.exists()
    _await_end(int(pid.read_text()))
