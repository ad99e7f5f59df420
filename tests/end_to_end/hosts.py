"""Simulated hosts that share only the servers on 127.0.0.1.

Each host has a folder and, if the tests run as root, a user, a host name and a process namespace.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
_ENTER = """
set -e
hostname "$1"
if [ -n "$3" ]; then  # Python lies where nobody else may look: it alone is shown
  mount -t tmpfs -o mode=0755 none /mnt
  mkdir /mnt/python
  mount --bind "$4" /mnt/python
  mount -t tmpfs -o mode=0755 none "$3"
  mkdir -p "$4"
  mount --bind /mnt/python "$4"
fi
user=$2
shift 4
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --no-new-privs "$@"
"""


@dataclass(frozen=True)
class Host:
    """A simulated host. `user`: None if the tests cannot start processes of other users."""

    name: str
    folder: Path
    """Home and current folder."""
    user: int | None

    @property
    def environment(self) -> dict[str, str]:
        """Return a minimal environment with the paths of Python and the code."""
        host_environment = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return host_environment | {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
        }

    def start(
        self, *arguments: str, environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start `python arguments…` on this host."""
        return subprocess.Popen(
            [*self._enter(), sys.executable, *arguments], cwd=self.folder, text=True,
            env=self.environment | dict(environment), start_new_session=True, **options,
        )  # fmt: skip

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(
            *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            output, errors = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def write(self, name: str, text: str) -> Path:
        """Write a file that only this host's user can read."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        if self.user is not None:
            os.chown(path, self.user, self.user)
        return path

    def _enter(self) -> list[str]:
        if self.user is None:
            return []
        spaces = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc"]
        locations = [self.name, str(self.user), *_find_inaccessible_python()]
        return [*spaces, "sh", "-c", _ENTER, "sh", *locations]


def send_signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to a program on a host, which may be wrapped by `unshare`."""
    inner = psutil.Process(process.pid).children()
    is_wrapped = bool(inner) and psutil.Process(process.pid).name() == "unshare"
    os.kill(inner[0].pid if is_wrapped else process.pid, number)


@contextlib.contextmanager
def create_hosts(*names: str) -> Iterator[list[Host]]:
    """Create hosts whose folders other users cannot read."""
    folder = Path(tempfile.mkdtemp(prefix="gate-hosts-"))
    folder.chmod(0o755)
    has_separate_users = shared_user_reason() is None
    created = []
    try:
        for number, name in enumerate(names):
            host = Host(name, folder / name, 12001 + number if has_separate_users else None)
            host.folder.mkdir(mode=0o700)
            if host.user is not None:
                os.chown(host.folder, host.user, host.user)
            created.append(host)
        yield created
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def shared_user_reason() -> str | None:
    """Return why all hosts share one user; None: each host has its own."""
    if os.geteuid() != 0:
        return "only root can start processes of other users"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        host = Host("try", Path(folder), 12000)
        try:
            result = host.run("-c", "import gate, mlflow, os; assert os.getuid() == 12000")
        except OSError as error:
            return f"no unshare here: {error}"
    return None if result.returncode == 0 else f"no other user can run Python here: {result.stderr}"


def _find_inaccessible_python() -> tuple[str, str]:
    """Return the first parent folder of Python that other users cannot enter, and Python's folder.

    Both are empty if other users can reach Python.
    """
    python = Path(sys.base_prefix).resolve()
    for folder in reversed(python.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return str(folder), str(python)
    return "", ""


class Program:
    """A program on a host that reads orders and writes answers, each a line of JSON."""

    def __init__(self, host: Host, *arguments: str, environment: Mapping[str, str]) -> None:
        self.host = host
        self._log = (host.folder.parent / f"{host.name}.log").open("ab")
        self._process = host.start(
            *arguments, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log,
        )  # fmt: skip

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.order(**order)
        return self.answer()

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()
