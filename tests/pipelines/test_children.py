"""make stack ends its servers however it is killed. Small processes replace the servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from gate import GateError
from pipelines import children
from tests.pipelines.conftest import REPOSITORY, clean_environment

# A server with two workers, as MLflow's server; the second worker ignores SIGTERM.
_SERVER = """
import subprocess, sys, time
from pathlib import Path
deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if sys.argv[2] == "deaf" else ""
for before in ("", deaf):
    code = f"import signal, time; {before}print('up', flush=True); time.sleep(120)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    worker.stdout.readline()
Path(sys.argv[1]).touch()
time.sleep(120)
"""

_STACK = """
import os, sys, time
from pathlib import Path
from pipelines import stage
from pipelines.children import alone, started
def main():
    import signal
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    with alone() as left:
        print(f"left: {len(left)}", flush=True)
        with started("server", [sys.executable, *sys.argv[1:]], dict(os.environ)):
            while not Path("up").exists():
                time.sleep(0.02)
            print("up", flush=True)
            time.sleep(120)
stage.run(main)
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


@contextmanager
def stack(*, ignores_sigterm: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a stack and the first line that it prints; end all of its processes afterwards."""
    Path("up").unlink(missing_ok=True)
    server = ["-c", _SERVER, "up", "deaf" if ignores_sigterm else "hears"]
    with subprocess.Popen(
        [sys.executable, "-c", _STACK, *server], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            first_line = process.stdout.readline().strip()
            assert process.stdout.readline() == "up\n"
            yield process, first_line
        finally:
            process.kill()
            for item in list_marked():
                with suppress(psutil.NoSuchProcess):
                    item.kill()
            wait_until(lambda: not list_marked())  # a killed process remains for a moment


def list_marked() -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if children._has_mark(p) and not is_dead(p)]


def is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(found: Callable[[], bool]) -> None:
    while not found():  # the timeout of the test limits it
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_no_process_is_left_after_a_signal(number: int) -> None:
    with stack() as (process, _):
        assert len(list_marked()) == 4  # supervisor, server, two workers
        process.send_signal(number)
        wait_until(lambda: not list_marked())
        process.wait()


def test_process_that_ignores_sigterm_is_killed() -> None:
    code = "import sys; from pipelines import supervisor; supervisor.STOP_S = 0.3; "
    code += "sys.exit(supervisor.main(sys.argv[1:]))"
    env = clean_environment() | {"PYTHONPATH": str(REPOSITORY), children._MARK: children._mark()}
    server = [sys.executable, "-c", _SERVER, "up", "deaf"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *server], env=env, stdin=subprocess.PIPE
    ) as process:
        wait_until(Path("up").exists)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 128 + signal.SIGTERM
        assert list_marked() == []


def test_workers_end_with_their_server() -> None:
    program = _SERVER.removesuffix("time.sleep(120)\n") + "raise SystemExit(7)"
    server = [sys.executable, "-c", program, "up", "hears"]
    env = clean_environment() | {"PYTHONPATH": str(REPOSITORY)}
    with children.started("server", server, env) as child:
        assert child.process.wait() == 7
        assert list_marked() == []
        with pytest.raises(GateError, match="server .* ended with 7"):
            child.check()


@pytest.mark.further
def test_next_start_ends_processes_of_a_killed_stack() -> None:
    with stack() as (process, first_line):
        assert first_line == "left: 0"
        for item in list_marked():
            if "pipelines.supervisor" in item.cmdline():
                item.suspend()  # otherwise it would act between the two kills
                process.kill()
                process.wait()
                item.kill()
        wait_until(lambda: len(list_marked()) == 3)
        remaining_pids = {item.pid for item in list_marked()}
        bystander = subprocess.Popen(["sleep", "60"], env={children._MARK: "/another/project"})
        try:
            with stack() as (_, then):
                assert then == "left: 3"
                assert not remaining_pids & {item.pid for item in list_marked()}
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


def test_second_stack_is_refused() -> None:
    with (
        stack() as (process, _),
        pytest.raises(GateError, match=rf"runs in this folder already .process {process.pid}\)"),
        children.alone(),
    ):
        pass
    with children.alone() as remaining_pids:
        assert remaining_pids == []
    with children.alone():
        assert Path(".gate/stack.lock").read_text() == str(os.getpid())


def test_supervisor_returns_the_exit_code() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pipelines.supervisor", sys.executable, "-c", "raise SystemExit(3)"],
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)}, stdin=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.wait() == 3
