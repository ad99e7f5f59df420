"""What this machine can prove, found by trying, and how to mend what it can't.

A provider that is listed proves nothing: each is asked to run a tiny model.
"""

from __future__ import annotations

import importlib
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from gate.doctor.session import active_provider
from gate.doctor.symptom import Diagnosis, State, Symptom
from gate.errors import GateError
from gate.records.runtime import CPU_PROVIDER

__all__ = ["Diagnosis", "Symptom", "examine"]

_NEEDED_MODULES = ("numpy", "torch", "onnx", "onnxruntime", "pydantic", "scipy")
_OTHER_MODULES = ("torchvision", "matplotlib", "rich")
_FREE_BYTES = 2 * 1024**3
"""A resnet's checkpoint, export, registry copy and reports, several times over."""


def examine(folder: Path, *, registry: str, preflight: Callable[[], None]) -> Diagnosis:
    """Try everything. `preflight` raises GateError if the registry (its address without secrets)
    can't be used; `folder` is where work would be written."""
    return Diagnosis(
        (
            *_modules(),
            _one_onnxruntime(),
            _cpu_session(),
            *_cuda(),
            _registry(registry, preflight),
            _dvc(),
            _disk(folder),
        )
    )


def _modules() -> Iterator[Symptom]:
    yield Symptom("python", "ok", platform.python_version(), needed=True)
    for name in (*_NEEDED_MODULES, *_OTHER_MODULES):
        needed = name in _NEEDED_MODULES
        try:
            version = getattr(importlib.import_module(name), "__version__", None)
            yield Symptom(name, "ok", str(version or metadata.version(name)), needed=needed)
        except Exception as error:  # a broken binary package raises almost anything
            remedy = "Install it again: pip install --force-reinstall parity-gate"
            yield Symptom(name, "missing", f"{type(error).__name__}: {error}", remedy, needed)


def _one_onnxruntime() -> Symptom:
    """Both packages write into one folder; which of them is imported is then luck."""
    installed = []
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if len(installed) < 2:
        return Symptom("one onnxruntime package", "ok", ", ".join(installed) or "none")
    return Symptom(
        "one onnxruntime package",
        "missing",
        f"{' and '.join(installed)} overwrite each other",
        "pip uninstall onnxruntime onnxruntime-gpu, then install the one you want.",
    )


def _cpu_session() -> Symptom:
    try:
        active, _ = active_provider(CPU_PROVIDER)
    except Exception as error:
        remedy = "Install ONNX Runtime again: pip install --force-reinstall onnxruntime-gpu"
        return Symptom(
            "ort-cpu", "missing", f"{type(error).__name__}: {error}", remedy, needed=True
        )
    state: State = "ok" if active == CPU_PROVIDER else "missing"
    return Symptom("ort-cpu", state, f"ran a model on {active}", needed=True)


def _cuda() -> tuple[Symptom, ...]:
    try:
        from gate.doctor.cuda import cuda

        return tuple(cuda())
    except Exception as error:  # torch or ONNX Runtime itself is broken; they are named above
        remedy = "Mend torch and onnxruntime first."
        return (Symptom("CUDA", "missing", f"{type(error).__name__}: {error}", remedy),)


def _registry(registry: str, preflight: Callable[[], None]) -> Symptom:
    try:
        preflight()
    except GateError as error:
        remedy = "Mend that, or set MLFLOW_TRACKING_URI. gate check needs no registry."
        return Symptom("MLflow", "missing", str(error), remedy)
    return Symptom("MLflow", "ok", f"usable at {registry}")


def _dvc() -> Symptom:
    try:
        return Symptom("DVC", "ok", metadata.version("dvc"))
    except metadata.PackageNotFoundError:
        remedy = "pip install dvc, for the pipeline. gate check needs no DVC."
        return Symptom("DVC", "missing", "not installed", remedy)


def _disk(folder: Path) -> Symptom:
    free = shutil.disk_usage(folder).free
    free_space = f"{free / 1024**3:.1f} GiB free at {folder}"
    if free >= _FREE_BYTES:
        return Symptom("disk", "ok", free_space)
    return Symptom("disk", "missing", free_space, f"Free at least {_FREE_BYTES / 1024**3:.0f} GiB.")
