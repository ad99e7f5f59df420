"""Which package comes with which extra, which command needs which, and what is said where one is
missing. The one place; pyproject.toml says what an extra installs (tests/test_extras.py).

Importing this module loads nothing: packages are looked for, not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NoReturn

from gate.errors import PackageMissing

TORCH, ONNX_RUNTIME = "torch", "onnxruntime"
"""No extra brings the one, one of two the other."""

EXTRAS = {
    "charts": ("matplotlib",),
    "data": ("PIL", "fsspec", "pyarrow"),
    "export": ("onnxscript",),
    "pipeline": ("dvc", "sklearn", "torchvision"),
    "preprocess": ("PIL",),
    "registry": ("mlflow", "sqlalchemy"),
    "service": ("uvicorn", "starlette", "anyio", "mlflow", "sqlalchemy"),
}
"""The modules without which nothing of an extra works. Each extra of a single runtime speaks for
itself (`gate runtimes`)."""

COMMANDS = {
    "check": (TORCH, ONNX_RUNTIME),
    "plan": (TORCH, ONNX_RUNTIME),
    "measure": (TORCH, ONNX_RUNTIME),
    "merge": (TORCH, ONNX_RUNTIME),
    "locate": (TORCH, ONNX_RUNTIME),
    "lint": (TORCH,),
    "export": (TORCH, ONNX_RUNTIME, "export"),
    "export compare": (TORCH, ONNX_RUNTIME, "export"),
    "preprocess compare": ("preprocess",),
    "quantize": (ONNX_RUNTIME,),
    "samples export": (TORCH,),
    "promote": ("registry",),
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
}


def require(command: str) -> None:
    """Raise PackageMissing where `command` ("serve", "history export") can't work here."""
    missing = [name for name in COMMANDS.get(command, ()) if not all(_is_here(name))]
    if missing:
        raise PackageMissing("; it ".join(map(remedy, missing)))


def remedy(name: str) -> str:
    """What to do without an extra, TORCH or ONNX_RUNTIME: the rest of a sentence about who needs
    it."""
    if name in _REMEDY:
        return _REMEDY[name]
    return f"needs parity-gate[{name}]: pip install 'parity-gate[{name}]'"


def reraise(error: ModuleNotFoundError) -> NoReturn:
    """Raise PackageMissing in its place where an extra brings the module, else the error again."""
    name = extra_of(error)
    if name is None:
        raise error
    raise PackageMissing(remedy(name)) from error


def extra_of(error: ModuleNotFoundError) -> str | None:
    """The extra (or TORCH, ONNX_RUNTIME) that brings what was not found; None: none of ours."""
    module = (error.name or "").partition(".")[0]
    if module in _REMEDY:
        return module
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


def is_installed(module: str) -> bool:
    """Whether a module of this name would be found."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the finders of others; a module without a spec is there
        return True


def _is_here(name: str) -> Iterator[bool]:
    return map(is_installed, EXTRAS.get(name, (name,)))
