"""Version, commit, extras, broken packages, Chromium."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gate.errors import PackageBroken, PackageMissing, first_line

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")

_NAMES = ("chromium", "chromium-browser", "google-chrome")

_ANSWER_S = 10.0
"""Time limit for printing the version; the first start of a snap takes seconds."""


def chromium_path() -> str | None:
    """Return the path of a working Chromium, or None."""
    paths = filter(None, map(shutil.which, _NAMES))
    return next((path for path in paths if _runs(path)), None)


@functools.cache
def _runs(path: str) -> bool:
    """Return whether the program prints its version: on Ubuntu it may be a stub for a snap."""
    try:
        process = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


def chromium_missing(extra: str) -> str | None:
    """Return what is missing to run Chromium and how to install it, or None. `extra`: the extra
    that includes Playwright."""
    if find_spec("playwright") is None:
        return f"Playwright is not installed: pip install 'parity-gate[{extra}]'"
    if chromium_path() is None:
        return "no Chromium is installed: apt-get install chromium"
    return None


# Set before torch is imported, because OpenMP reads it then. By default, OpenMP threads spin for
# milliseconds; on cores shared with ONNX Runtime, two threads are then several times slower than
# one. If they sleep immediately, each operator must wake them, so that a network of many small
# operators is several times slower than with one thread. So they spin for the few microseconds
# between two operators. The results are the same.


_SPINS = 300
"""Measured with two threads on two cores, relative to threads that sleep immediately:
mobilenet_v3_small in float64 takes 0.24 times as long; with another running process up to 1.6
times, and with 1 000 spins it would be 3 times."""


def limit_openmp_spinning() -> None:
    """Make OpenMP threads spin briefly and then sleep, in this process and its children.

    It has no effect if torch is already loaded, or if the environment configures this.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)  # GNU's, which PyTorch brings, reads it first


# glibc returns freed blocks of megabytes to the kernel, and each operator of a large convolutional
# network then waits for pages that the kernel clears. Measured on the net `convnet` of
# `benchmarks.cost_nets` at 320 x 320, one sample at a time, in seconds of CPU by default and with
# these settings: float32 0.48 and 0.23, random rounding 0.66 and 0.49, float64 1.14 and 0.87.

_KEPT_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the largest value that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
    "THP_MEM_ALLOC_ENABLE": "1",  # PyTorch asks for huge pages for its blocks
}


def keep_freed_memory() -> None:
    """Make child processes reuse freed memory instead of returning it to the kernel, unless the
    environment configures memory allocation."""
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_")) for name in os.environ):
        os.environ.update(_KEPT_BLOCKS)


# This module only searches for packages and does not import them.


TORCH, ONNX_RUNTIME, FULL_MLFLOW = "torch", "onnxruntime", "alembic"
"""No extra installs torch; two extras install ONNX Runtime. MLflow needs alembic to open a
database; mlflow-skinny does not include it."""

ONNX_RUNTIMES = ("onnxruntime-gpu", "onnxruntime", "onnxruntime-openvino")
"""All packages that install the module onnxruntime."""

EXTRAS = {
    "charts": ("matplotlib",),
    "data": ("PIL",),
    "export": ("onnxscript",),
    "pipeline": ("dvc",),
    "preprocess": ("PIL", "cv2"),
    "registry": ("mlflow", "sqlalchemy"),
    "service": ("uvicorn", "starlette", "mlflow", "sqlalchemy"),
}
"""Required modules of each extra. Extras for a single runtime or sample source are not listed."""

_FURTHER = {"pandas": "registry", "anyio": "service", "httpx": "service", "sklearn": "pipeline"}
"""Modules that only some features of an extra need."""

COMMANDS = {
    "check": (TORCH, ONNX_RUNTIME),
    "plan": (TORCH, ONNX_RUNTIME),
    "measure": (TORCH, ONNX_RUNTIME),
    "merge": (TORCH, ONNX_RUNTIME),
    "locate": (TORCH, ONNX_RUNTIME),
    "reproduce": (TORCH, ONNX_RUNTIME),
    "lint": (TORCH,),
    "export": (TORCH, ONNX_RUNTIME),
    "export compare": (TORCH, ONNX_RUNTIME, "export"),
    "mend": (TORCH, ONNX_RUNTIME),
    "preprocess compare": ("preprocess",),
    "quantize": (ONNX_RUNTIME,),
    "samples export": (TORCH,),
    "promote": ("registry", "pandas"),  # by which MLflow writes down inputs and outputs
    "approve": ("registry",),
    "reject": ("registry",),
    "rollback": ("registry",),
    "history": ("registry",),
    "history export": ("registry",),
    "history checkpoint": ("registry",),
    "accept-ledger": ("registry",),
    "override": ("registry",),
    "verify-release": (ONNX_RUNTIME,),
    "deploy": (ONNX_RUNTIME,),
    "serve": (ONNX_RUNTIME, "service"),
    "reconcile": (ONNX_RUNTIME, "registry"),
    "webhooks list": ("registry",),
    "webhooks register": ("registry",),
    "webhooks test": ("registry",),
}
"""Modules and extras that a command always needs."""

_REMEDY = {
    TORCH: "needs PyTorch, in the build that fits your machine: pip install torch",
    ONNX_RUNTIME: "needs ONNX Runtime: pip install 'parity-gate[cpu]', or 'parity-gate[cuda]' "
    "for NVIDIA, never both",
    FULL_MLFLOW: "needs the whole MLflow for a registry that is a database: pip install mlflow; "
    "for one behind a server (http://…) parity-gate[registry] is enough",
}

OLDEST = {"torch": "2.9", "onnx": "1.18", "onnxruntime": "1.22", "mlflow": "3.10"}
"""The oldest supported version of each package, by module, as in pyproject.toml."""


def require(command: str) -> None:
    """Raise PackageMissing if a package for `command` ("serve", "history export") is missing."""
    names = COMMANDS.get(command, ())
    absent = [name for name in names if not all(map(is_installed, EXTRAS.get(name, (name,))))]
    if absent:
        raise PackageMissing("; it ".join(dict.fromkeys(map(remedy, absent))))
    modules = dict.fromkeys(module for name in names for module in EXTRAS.get(name, (name,)))
    for module in (*modules, "onnx"):
        too_old = outdated(module)
        if too_old is not None:
            raise PackageMissing(too_old)


def outdated(module: str) -> str | None:
    """Return the rest of a sentence which states that the installed version is too old.

    None if the version is new enough or unknown.
    """
    if module not in OLDEST or not is_installed(module):
        return None
    try:
        version = metadata.version(_distribution_of(module))
    except metadata.PackageNotFoundError:
        return None
    if _release(version) >= _release(OLDEST[module]):
        return None
    title = _TITLES.get(module, module)
    return (
        f"needs {title} {OLDEST[module]} or newer, and {version} is installed: pip install "
        f"--upgrade {_distribution_of(module)}"
    )


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, for example (2, 9, 1) for `2.9.1+cu128`."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _distribution_of(module: str) -> str:
    """Return the name of the distribution of a module, which may be mlflow-skinny for mlflow."""
    if module != "mlflow":
        return distribution(module)
    try:
        metadata.version("mlflow")
    except metadata.PackageNotFoundError:
        return "mlflow-skinny"
    return "mlflow"


def require_module(module: str) -> None:
    """Raise PackageMissing if a module of an extra is not installed."""
    if not is_installed(module):
        raise PackageMissing(remedy(extra_of(ModuleNotFoundError(name=module)) or module))


def remedy(name: str) -> str:
    """Return the rest of a sentence which tells how to install an extra, TORCH, ONNX_RUNTIME or
    FULL_MLFLOW."""
    if name in _REMEDY:
        return _REMEDY[name]
    name = _FURTHER.get(name, name)
    return f"needs parity-gate[{name}]: pip install 'parity-gate[{name}]'"


def missing(error: Exception) -> PackageMissing | None:
    """Return the exception to raise instead, if an extra includes the missing module."""
    name = extra_of(error) if isinstance(error, ModuleNotFoundError) else None
    return None if name is None else PackageMissing(remedy(name))


def extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra with the missing module, or another argument for `remedy`; None if the
    module belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    if module in _REMEDY:
        return module
    if module in _FURTHER:
        return _FURTHER[module]
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def is_installed(module: str) -> bool:
    """Return whether a package of this name exists.

    An empty folder does not count: pip leaves one after both ONNX Runtime packages are uninstalled.
    """
    try:
        spec = find_spec(module)
    except ImportError:  # from a finder that blocks the module
        return False
    except ValueError:  # the module is loaded and has no spec
        return True
    return spec is not None and spec.origin is not None


def onnx_runtimes() -> dict[str, str]:
    """Return the versions of the installed ONNX Runtime packages, by name."""
    return package_versions(ONNX_RUNTIMES)


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def distribution(module: str) -> str:
    """Return the name of the distribution that installs a module."""
    return module if module != ONNX_RUNTIME else next(iter(onnx_runtimes()), module)


# A shared library may be missing or truncated, an upgrade interrupted, a package partly removed.


_TITLES = {TORCH: "PyTorch", ONNX_RUNTIME: "ONNX Runtime"}

_REQUIRED_ATTRIBUTES = {
    TORCH: ("__version__", "Tensor", "nn"),
    ONNX_RUNTIME: ("__version__", "SessionOptions", "InferenceSession"),
}
"""Attributes that are missing in a partly removed package, which may still import."""

_LIMIT_S = 120.0
"""Time limit for importing a package: PyTorch takes seconds, or half a minute from a cold disk."""


def onnx_runtime() -> Any:
    """Return the module onnxruntime. Raises PackageMissing, PackageBroken."""
    return _loaded(ONNX_RUNTIME)


def find_broken(command: str) -> PackageBroken | None:
    """Return an error if PyTorch or ONNX Runtime is needed by `command` but does not load."""
    for name in COMMANDS.get(command, ()):
        try:
            if name in _TITLES:
                _loaded(name)
        except PackageBroken as error:
            return error
        except PackageMissing:
            continue
    return None


def import_crashes() -> dict[str, str]:
    """Return which of PyTorch and ONNX Runtime crash a process on import, with the reason.

    A truncated library does so. The imports are tested in other processes.
    """
    reasons = {name: _import_crash(name) for name in _TITLES if is_installed(name)}
    return {name: reason for name, reason in reasons.items() if reason}


@functools.cache
def _import_crash(name: str) -> str:
    import sys

    try:
        code = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {_LIMIT_S:.0f} s"
    return f"importing it kills the process by {_signal(-code)}" if code < 0 else ""


def _loaded(name: str) -> Any:
    if not is_installed(name):
        raise PackageMissing(remedy(name))
    try:
        module = importlib.import_module(name)
        for part in _REQUIRED_ATTRIBUTES[name]:
            getattr(module, part)
    except Exception as error:  # a broken binary package raises almost anything
        raise PackageBroken(
            f"needs {_TITLES[name]}, and the one that is installed does not load: "
            f"{type(error).__name__}: {first_line(error)}. Nothing was decided. Install the "
            "library that it names, or it again: pip install --force-reinstall "
            f"{distribution(name)}; gate doctor says more"
        ) from error
    return module


def _signal(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


COMMIT_FILE = "commit.txt"
"""A file in the package's folder, which setup.py writes into wheels and sdists."""

_HERE = next(folder for folder in Path(__file__).parents if folder.name == "gate")

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def package_folder() -> Path:
    """Return the folder of the package."""
    return _HERE


def version_text() -> str:
    """Return the version, for example `0.1.0` or `0.1.0, commit 1a2b3c4d5e6f`."""
    version = metadata.version("parity-gate")
    commit = _read_commit(_HERE / COMMIT_FILE) or commit_of(_HERE.parent) or _installed_from()
    return version if commit is None else f"{version}, commit {commit[:12]}"


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`, or None if unknown.

    It is read from git's files, because starting git is slow.
    """
    git = folder / ".git"
    try:
        if git.is_file():  # in a worktree or submodule: "gitdir: PATH"
            git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _checked(head)
        name = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.exists() else git
        return _read_commit(git / name) or _read_commit(common / name) or _packed(common, name)
    except (OSError, UnicodeDecodeError):
        return None


def _packed(git: Path, name: str) -> str | None:
    for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, ref = line.partition(" ")
        if ref == name:
            return _checked(commit)
    return None


def _installed_from() -> str | None:
    """Return the commit of `pip install git+…`, which pip records (PEP 610)."""
    try:
        written = metadata.distribution("parity-gate").read_text("direct_url.json")
        return _checked(str(json.loads(written or "{}")["vcs_info"]["commit_id"]))
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def _read_commit(path: Path) -> str | None:
    try:
        return _checked(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    import psutil

    return max(min(psutil.cpu_count(logical=False) or 1, logical_cores()), 1)


def logical_cores() -> int:
    """Return the number of logical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1
