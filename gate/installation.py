"""Which package comes with which extra, which command needs which, and what is said where one is
missing. The one place; pyproject.toml says what an extra installs (tests/package/test_extras.py).

Importing this module loads nothing: packages are looked for, not imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

from gate.errors import PackageMissing

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
    "lint": (TORCH,),
    "export": (TORCH, ONNX_RUNTIME),
    "export compare": (TORCH, ONNX_RUNTIME, "export"),
    "preprocess compare": ("preprocess",),
    "quantize": (ONNX_RUNTIME,),
    "samples export": (TORCH,),
    "promote": ("registry", "pandas"),  # by which MLflow writes down inputs and outputs
    "approve": ("registry",),
    "reject": ("registry",),
    "rollback": ("registry",),
    "absolve": ("registry",),
    "history": ("registry",),
    "history export": ("registry",),
    "history import": ("registry",),
    "history checkpoint": ("registry",),
    "accept-ledger": ("registry",),
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


def require(command: str) -> None:
    """Raise PackageMissing where `command` ("serve", "history export") can't work here."""
    lacks = [name for name in COMMANDS.get(command, ()) if not all(_is_here(name))]
    if lacks:
        raise PackageMissing("; it ".join(dict.fromkeys(map(remedy, lacks))))


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


def _is_here(name: str) -> Iterator[bool]:
    return map(is_installed, EXTRAS.get(name, (name,)))
