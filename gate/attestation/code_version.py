"""The code that measures, as Git names it: found by asking Git, once and within seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
from importlib import metadata
from pathlib import Path

from gate.attestation.measurement import CodeVersion

_TIMEOUT_S = 10.0
_COMMIT = "# branch.oid "
_NOT_YET = "(initial)"


def code_version(project: Path) -> CodeVersion:
    """Of this program and of the project around a folder. Nothing of Git is known where there is no
    Git, no repository, or no answer in time."""
    version = metadata.version("parity-gate")
    lines = _status(project)
    commits = [line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)]
    if not commits or commits[0] == _NOT_YET:
        return CodeVersion(parity_gate=version)
    dirty = any(not line.startswith("#") for line in lines)
    return CodeVersion(parity_gate=version, commit=commits[0], dirty=dirty)


def _status(project: Path) -> list[str]:
    """The commit and the tracked files that differ from it, a line each."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Looking must not write: Git would refresh its index otherwise.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return done.stdout.decode(errors="replace").splitlines()
    return []
