"""A PostgreSQL server of our own, thrown away afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISSING = "no PostgreSQL here: as root, make packages; or install Debian's package postgresql"


def program(name: str) -> str | None:
    """Where one of the server's programs is; Debian keeps them out of the PATH."""
    beside = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or (str(beside[0]) if beside else None)


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh, empty database on 127.0.0.1."""
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    if initdb is None or pg_ctl is None:
        raise RuntimeError(MISSING)
    user = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="gate-postgres-", dir="/tmp"))
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data, options = folder / "data", f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
    try:
        _run([initdb, "-D", str(data), "-U", "gate", "--auth=trust", "-E", "UTF8"], folder, user)
        _run([pg_ctl, "-D", str(data), "-w", "-l", f"{folder}/log", "-o", options, "start"], folder, user)  # fmt: skip
        try:
            yield f"postgresql://gate@127.0.0.1:{port}/postgres"
        finally:
            _run([pg_ctl, "-D", str(data), "-m", "immediate", "stop"], folder, user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> str | None:
    """Whom to run the server as: it refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


def _run(command: list[str], folder: Path, user: str | None) -> None:
    with (folder / "output").open("ab") as output:
        done = subprocess.run(
            command, cwd=folder, user=user, stdout=output, stderr=output, check=False, timeout=120
        )
    assert done.returncode == 0, (folder / "output").read_text()[-2000:]
