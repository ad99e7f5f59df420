"""Machines, as far as one can have several: each with a folder and, where we are root, a user, a
host name and processes of its own. What they share is what answers on 127.0.0.1.
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
    """One machine. `user`: None where this process can't be another one, and all are one user."""

    name: str
    folder: Path
    """Home and current folder."""
    user: int | None

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of ours but where to find Python and the code."""
        custom = {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return custom | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}

    def start(
        self, *arguments: str, environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """`python arguments…` here."""
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
        """A file that only this machine's user can read."""
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
        locations = [self.name, str(self.user), *_hidden()]
        return [*spaces, "sh", "-c", _ENTER, "sh", *locations]


def signalled(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to a program that was started on a host, whose process may have been wrapped."""
    inner = psutil.Process(process.pid).children()
    is_wrapped = bool(inner) and psutil.Process(process.pid).name() == "unshare"
    os.kill(inner[0].pid if is_wrapped else process.pid, number)


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Machines whose folders nobody else can look into."""
    folder = Path(tempfile.mkdtemp(prefix="gate-hosts-"))
    folder.chmod(0o755)
    apart = why_one_user() is None
    created = []
    try:
        for number, name in enumerate(names):
            host = Host(name, folder / name, 12001 + number if apart else None)
            host.folder.mkdir(mode=0o700)
            if host.user is not None:
                os.chown(host.folder, host.user, host.user)
            created.append(host)
        yield created
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def why_one_user() -> str | None:
    """Why all machines are one user here; None: each has its own."""
    if os.geteuid() != 0:
        return "only root can start processes of other users"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        nobody = Host("try", Path(folder), 12000)
        try:
            result = nobody.run("-c", "import gate, mlflow, os; assert os.getuid() == 12000")
        except OSError as error:
            return f"no unshare here: {error}"
    return None if result.returncode == 0 else f"no other user can run Python here: {result.stderr}"


def _hidden() -> tuple[str, str]:
    """The first folder on the way to Python that others can't enter, and Python's own; empty where
    there is none."""
    python = Path(sys.base_prefix).resolve()
    for location in reversed(python.parents):
        if not location.stat().st_mode & stat.S_IXOTH:
            return str(location), str(python)
    return "", ""


class Program:
    """A program on a host that answers each order, a line of JSON, by another."""

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
