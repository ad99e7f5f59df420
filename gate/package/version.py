"""Which gate this is: its version, and the commit that it was made from, if that is known."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""Beside this module in a wheel and an sdist: setup.py writes it."""
_HERE = Path(__file__).parent
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def version_text() -> str:
    """`0.1.0`, or `0.1.0, commit 1a2b3c4d5e6f`."""
    version = metadata.version("parity-gate")
    commit = _stated(_HERE / COMMIT_FILE) or commit_of(_HERE.parents[1]) or _installed_from()
    return version if commit is None else f"{version}, commit {commit[:12]}"


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in `folder`, read from git's files: starting git would take
    longer than all else. None: no checkout, or one that git packed in a way not read here."""
    git = folder / ".git"
    try:
        if git.is_file():  # of a worktree or a submodule: "gitdir: PATH"
            git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _checked(head)
        name = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.exists() else git
        return _stated(git / name) or _stated(common / name) or _packed(common, name)
    except (OSError, UnicodeDecodeError):
        return None


def _packed(git: Path, name: str) -> str | None:
    for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, ref = line.partition(" ")
        if ref == name:
            return _checked(commit)
    return None


def _installed_from() -> str | None:
    """The commit of `pip install git+…`, which pip writes down (PEP 610)."""
    try:
        written = metadata.distribution("parity-gate").read_text("direct_url.json")
        return _checked(str(json.loads(written or "{}")["vcs_info"]["commit_id"]))
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def _stated(path: Path) -> str | None:
    try:
        return _checked(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
