"""Chromium of this machine, for whoever drives it by Playwright: in one place, because what is
missing is said in the same words by all."""

from __future__ import annotations

import functools
import shutil
import subprocess
from importlib.util import find_spec

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 10.0
"""For its version; a snap that starts for the first time takes seconds."""


def chromium_path() -> str | None:
    """The program; None: there is none that runs."""
    found = filter(None, map(shutil.which, _NAMES))
    return next((path for path in found if _runs(path)), None)


@functools.cache
def _runs(path: str) -> bool:
    """Whether it says its version: Ubuntu's package of this name may be a hint at a snap."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def chromium_missing(extra: str) -> str | None:
    """What is missing to drive it, and what to install; `extra`: of the project, that has
    Playwright."""
    if find_spec("playwright") is None:
        return f"Playwright is not installed: pip install 'parity-gate[{extra}]'"
    if chromium_path() is None:
        return "no Chromium is installed: apt-get install chromium"
    return None
