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
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gate.errors import PackageBroken, PackageMissing, first_line

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


# Set before torch is imported, because OpenMP reads it then. By default OpenMP threads spin for
# milliseconds: on cores that ONNX Runtime's threads use too, two threads are then several times
# slower than one. If they sleep at once, every operator has to wake them: a network of many small
# operators takes several times as long as with one thread. So they spin for the few microseconds
# between two operators. The results are the same.


_SPINS = 300
"""Measured, two threads on two cores, in units of such that sleep at once: mobilenet_v3_small in
float64 takes 0.24 times the time, with another process beside it up to 1.6 times, and with 1 000
it would be 3 times."""


def wait_asleep() -> None:
    """Let threads of OpenMP spin shortly and then sleep, in this process, if torch is not loaded
    yet, and in those that it starts; nothing if the environment says how they wait."""
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
    """Let processes that this one starts use freed memory again instead of returning it to the
    kernel; nothing if the environment says how memory is allocated."""
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_")) for name in os.environ):
        os.environ.update(_KEPT_BLOCKS)


# Importing this module loads nothing: packages are looked for, not imported.


TORCH, ONNX_RUNTIME, WHOLE_MLFLOW = "torch", "onnxruntime", "alembic"
"""No extra brings the first, one of two the second. The third is the module by which MLflow opens a
database; mlflow-skinny, its client, is without it."""


ONNX_RUNTIMES = ("onnxruntime-gpu", "onnxruntime", "onnxruntime-openvino")
"""All packages that bring the module of this name."""

EXTRAS = {
    "charts": ("matplotlib",),
    "data": ("PIL",),
    "export": ("onnxscript",),
    "pipeline": ("dvc",),
    "preprocess": ("PIL", "cv2"),
    "registry": ("mlflow", "sqlalchemy"),
    "service": ("uvicorn", "starlette", "mlflow", "sqlalchemy"),
}
"""The modules without which a command that needs the extra can do nothing. The extras of a single
runtime and of a source of samples speak for themselves."""

_FURTHER = {"pandas": "registry", "anyio": "service", "sklearn": "pipeline"}
"""Modules that only some of what an extra is for needs."""


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
"""What a command can do nothing without, whatever its options are."""


_REMEDY = {
    TORCH: "needs PyTorch, in the build that fits your machine: pip install torch",
    ONNX_RUNTIME: "needs ONNX Runtime: pip install 'parity-gate[cpu]', or 'parity-gate[cuda]' "
    "for NVIDIA, never both",
    WHOLE_MLFLOW: "needs the whole MLflow for a registry that is a database: pip install mlflow; "
    "for one behind a server (http://…) parity-gate[registry] is enough",
}


OLDEST = {"torch": "2.9", "onnx": "1.18", "onnxruntime": "1.22", "mlflow": "3.10"}
"""The oldest supported version of each package, by its module. pyproject.toml says the same."""


def require(command: str) -> None:
    """Raise PackageMissing where `command` ("serve", "history export") can't work here."""
    names = COMMANDS.get(command, ())
    lacks = [name for name in names if not all(map(is_installed, EXTRAS.get(name, (name,))))]
    if lacks:
        raise PackageMissing("; it ".join(dict.fromkeys(map(remedy, lacks))))
    modules = dict.fromkeys(module for name in names for module in EXTRAS.get(name, (name,)))
    for module in (*modules, "onnx"):
        too_old = outdated(module)
        if too_old is not None:
            raise PackageMissing(too_old)


def outdated(module: str) -> str | None:
    """Say that the installed version of a package is too old, as the rest of a sentence about who
    needs it. None if it is new enough, or its version is unknown."""
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
    """`2.9.1+cu128` as numbers; what follows the release does not count."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _distribution_of(module: str) -> str:
    """Return pip's name of the package that installs a module. MLflow's client has its own."""
    if module != "mlflow":
        return distribution(module)
    try:
        metadata.version("mlflow")
    except metadata.PackageNotFoundError:
        return "mlflow-skinny"
    return "mlflow"


def require_module(module: str) -> None:
    """Raise PackageMissing where a module that an extra brings is not here."""
    if not is_installed(module):
        raise PackageMissing(remedy(extra_of(ModuleNotFoundError(name=module)) or module))


def remedy(name: str) -> str:
    """What to do without an extra, TORCH, ONNX_RUNTIME or WHOLE_MLFLOW: the rest of a sentence
    about who needs it."""
    if name in _REMEDY:
        return _REMEDY[name]
    name = _FURTHER.get(name, name)
    return f"needs parity-gate[{name}]: pip install 'parity-gate[{name}]'"


def missing(error: Exception) -> PackageMissing | None:
    """What to raise in its place where an extra brings the module that Python did not find."""
    name = extra_of(error) if isinstance(error, ModuleNotFoundError) else None
    return None if name is None else PackageMissing(remedy(name))


def extra_of(error: ModuleNotFoundError) -> str | None:
    """The extra that brings what was not found, or another name that `remedy` takes; None: it is
    none of ours."""
    module = (error.name or "").partition(".")[0]
    if module in _REMEDY:
        return module
    if module in _FURTHER:
        return _FURTHER[module]
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def is_installed(module: str) -> bool:
    """Whether a package of this name would be found. An empty folder is none: pip leaves one where
    both packages of ONNX Runtime were uninstalled."""
    try:
        spec = find_spec(module)
    except ImportError:  # of a finder that keeps others from finding it
        return False
    except ValueError:  # it is loaded, and has no spec
        return True
    return spec is not None and spec.origin is not None


def onnx_runtimes() -> dict[str, str]:
    """Versions of the packages of ONNX Runtime that are installed, by name."""
    from importlib import metadata  # a third of what --help imports

    found = {}
    for name in ONNX_RUNTIMES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def distribution(module: str) -> str:
    """What brings a module that is installed, as pip calls it."""
    return module if module != ONNX_RUNTIME else next(iter(onnx_runtimes()), module)


# A shared library may be missing or cut, an upgrade broken off, half of a package removed.


_TITLES = {TORCH: "PyTorch", ONNX_RUNTIME: "ONNX Runtime"}

_WHOLE = {
    TORCH: ("__version__", "Tensor", "nn"),
    ONNX_RUNTIME: ("__version__", "SessionOptions", "InferenceSession"),
}
"""Without these, half of a package was removed: what is left of it may load."""

_LIMIT_S = 120.0
"""To load one in another process: PyTorch takes some seconds, half a minute from a cold disk."""


def onnx_runtime() -> Any:
    """The module. Raises PackageMissing, PackageBroken."""
    return _loaded(ONNX_RUNTIME)


def find_broken(command: str) -> PackageBroken | None:
    """The first of the large packages that `command` needs, is installed and does not load."""
    for name in COMMANDS.get(command, ()):
        try:
            if name in _TITLES:
                _loaded(name)
        except PackageBroken as error:
            return error
        except PackageMissing:
            continue
    return None


def deaths() -> dict[str, str]:
    """Of PyTorch and ONNX Runtime those whose import kills a process, and how: a library that was
    cut short does, and would take with it whoever only wants to say so."""
    found = {name: _death(name) for name in _TITLES if is_installed(name)}
    return {name: how for name, how in found.items() if how}


@functools.cache
def _death(name: str) -> str:
    import subprocess
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
        for part in _WHOLE[name]:
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
"""In the package's folder in a wheel and an sdist: setup.py writes it."""

_HERE = next(folder for folder in Path(__file__).parents if folder.name == "gate")

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def package_folder() -> Path:
    """The folder of the package."""
    return _HERE


def version_text() -> str:
    """`0.1.0`, or `0.1.0, commit 1a2b3c4d5e6f`."""
    version = metadata.version("parity-gate")
    commit = _read_commit(_HERE / COMMIT_FILE) or commit_of(_HERE.parent) or _installed_from()
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
    """The commit of `pip install git+…`, which pip writes down (PEP 610)."""
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
