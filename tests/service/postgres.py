"""A temporary PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.free_ports import free_port

MISSING = "no PostgreSQL here: as root, make packages; or install Debian's package postgresql"


def find_program(name: str) -> str | None:
    """Find a PostgreSQL program; Debian does not install them in the PATH."""
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or (str(installed[0]) if installed else None)


@dataclass(frozen=True)
class Postgres:
    """A running server."""

    url: str
    """URL of an empty database on 127.0.0.1."""
    _control: Callable[..., None]

    def restart(self) -> None:
        """Restart without a clean shutdown, as after a power cut: all connections break."""
        self.stop()
        self.start()

    def stop(self) -> None:
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        self._control("-w", "start")


@contextmanager
def run_postgres() -> Iterator[Postgres]:
    """Start a server in a temporary folder, which is in memory if conftest.py has chosen it.

    A database has 300 files: to remove those of the ledger tests from a disk took 98 s.
    """
    initdb, pg_ctl = find_program("initdb"), find_program("pg_ctl")
    if initdb is None or pg_ctl is None:
        raise RuntimeError(MISSING)
    user = _find_unprivileged_user()
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")
    folder = Path(tempfile.mkdtemp(prefix="gate-postgres-", dir=root))
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    port = free_port()
    data, options = folder / "data", f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"

    def control(*arguments: str) -> None:
        _run(
            [pg_ctl, "-D", str(data), "-l", f"{folder}/log", "-o", options, *arguments],
            folder,
            user,
        )

    try:
        _run([initdb, "-D", str(data), "-U", "gate", "--auth=trust", "-E", "UTF8"], folder, user)
        server = Postgres(f"postgresql://gate@127.0.0.1:{port}/postgres", control)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_unprivileged_user() -> str | None:
    """Return an unprivileged user, because the server refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


def _run(command: list[str], folder: Path, user: str | None) -> None:
    with (folder / "output").open("ab") as output:
        completed = subprocess.run(
            command, cwd=folder, user=user, stdout=output, stderr=output, check=False, timeout=120
        )
    assert completed.returncode == 0, (folder / "output").read_text()[-2000:]
