"""What this machine can prove, found by trying, and how to mend what it can't.

A provider that is listed proves nothing: each is asked to run a tiny model.
"""

from __future__ import annotations

import importlib
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from gate.doctor.session import active_provider
from gate.doctor.symptom import Diagnosis, State, Symptom
from gate.errors import GateError, PackageMissing
from gate.package import extras
from gate.package.loaded import deaths
from gate.records.runtime import CPU_PROVIDER, ORT, RUNTIMES

__all__ = ["Diagnosis", "Symptom", "examine"]

_NEEDED_MODULES = ("numpy", "torch", "onnx", "onnxruntime", "pydantic", "scipy")
_OTHER_MODULES = ("torchvision", "matplotlib", "rich")
_NEEDED_FOR = {
    "torch": f"gate check {extras.remedy(extras.TORCH)}",
    "onnxruntime": f"gate check {extras.remedy(extras.ONNX_RUNTIME)}",
    "torchvision": "gate preprocess compare --implementations torchvision needs it, and the "
    "pipeline: pip install torchvision, as it goes with your torch",
    "matplotlib": f"a report with charts {extras.remedy('charts')}",
}
"""What is not there, though nothing is broken."""
_FREE_BYTES = 2 * 1024**3
"""A resnet's checkpoint, export, registry copy and reports, several times over."""


def examine(folder: Path, *, registry: str, preflight: Callable[[], None]) -> Diagnosis:
    """Try everything. `preflight` raises GateError if the registry (its address without secrets)
    can't be used; `folder` is where work would be written."""
    deadly = deaths()
    return Diagnosis(
        (
            *_modules(deadly),
            _one_onnxruntime(),
            *(_untried(deadly) if deadly else (_cpu_session(), *_cuda(), *_runtimes())),
            _registry(registry, preflight),
            _dvc(),
            _disk(folder),
        )
    )


def _untried(deadly: Mapping[str, str]) -> Iterator[Symptom]:
    """What would end this process."""
    why = f"not tried: {' and '.join(deadly)} would end this process"
    yield Symptom("ort-cpu", "missing", why, "Install what is named above again.", needed=True)


def _modules(deadly: Mapping[str, str]) -> Iterator[Symptom]:
    yield Symptom("python", "ok", platform.python_version(), needed=True)
    for name in (*_NEEDED_MODULES, *_OTHER_MODULES):
        needed = name in _NEEDED_MODULES
        again = f"Install it again: pip install --force-reinstall {extras.distribution(name)}"
        if name in deadly:
            yield Symptom(name, "missing", deadly[name], again, needed)
            continue
        try:
            version = getattr(importlib.import_module(name), "__version__", None)
            yield Symptom(name, "ok", str(version or metadata.version(name)), needed=needed)
        except Exception as error:  # a broken binary package raises almost anything
            if extras.is_installed(name):
                yield Symptom(name, "missing", f"{type(error).__name__}: {error}", again, needed)
                continue
            state: State = "missing" if needed else "absent"
            yield Symptom(name, state, "not installed", _NEEDED_FOR[name], needed)


def _one_onnxruntime() -> Symptom:
    """All packages write into one folder; which of them is imported is then luck."""
    installed = [f"{name} {version}" for name, version in extras.onnx_runtimes().items()]
    if len(installed) < 2:
        return Symptom("one onnxruntime package", "ok", ", ".join(installed) or "none")
    return Symptom(
        "one onnxruntime package",
        "missing",
        f"{' and '.join(installed)} overwrite each other",
        f"pip uninstall {' '.join(extras.ONNX_RUNTIMES)}, then install the one you want. The "
        "runtime openvino needs none of them: pip install 'parity-gate[openvino]'.",
    )


def _cpu_session() -> Symptom:
    if not extras.is_installed(extras.ONNX_RUNTIME):
        remedy = "Install ONNX Runtime: see onnxruntime."
        return Symptom("ort-cpu", "missing", "ONNX Runtime is not installed", remedy, needed=True)
    try:
        active, _ = active_provider(CPU_PROVIDER)
    except Exception as error:
        again = f"pip install --force-reinstall {extras.distribution(extras.ONNX_RUNTIME)}"
        remedy = f"Install ONNX Runtime again: {again}"
        return Symptom(
            "ort-cpu", "missing", f"{type(error).__name__}: {error}", remedy, needed=True
        )
    state: State = "ok" if active == CPU_PROVIDER else "missing"
    return Symptom("ort-cpu", state, f"ran a model on {active}", needed=True)


def _cuda() -> tuple[Symptom, ...]:
    needed = (extras.TORCH, extras.ONNX_RUNTIME)
    lacks = [name for name in needed if not extras.is_installed(name)]
    if lacks:
        observation = f"not tried without {' and '.join(lacks)}"
        return (Symptom("CUDA", "absent", observation, "Install what is named above first."),)
    try:
        from gate.doctor.cuda import cuda

        return tuple(cuda())
    except Exception as error:  # torch or ONNX Runtime itself is broken; they are named above
        remedy = "Mend torch and onnxruntime first."
        return (Symptom("CUDA", "missing", f"{type(error).__name__}: {error}", remedy),)


def _runtimes() -> Iterator[Symptom]:
    """Those beside the ones that are tried above."""
    try:
        from gate.runtimes.listing import listed

        rows = [row for row in listed() if row.name not in RUNTIMES and row.kind != ORT]
    except Exception as error:
        remedy = "Mend the package that is named."
        yield Symptom("runtimes", "missing", f"{type(error).__name__}: {error}", remedy)
        return
    remedy = "gate runtimes says more; docs/runtimes.md how each is installed."
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        observation = row.reason or f"{row.provider} {versions}".strip()
        state: State = "missing" if row.state == "broken" else "absent"
        yield (
            Symptom(row.name, "ok", observation)
            if row.state in ("ok", "by options")
            else Symptom(row.name, state, observation, remedy)
        )


def _registry(registry: str, preflight: Callable[[], None]) -> Symptom:
    try:
        preflight()
    except PackageMissing as error:
        return Symptom("MLflow", "absent", f"gate promote {error}", "gate check needs no registry.")
    except GateError as error:
        remedy = "Mend that, or set MLFLOW_TRACKING_URI. gate check needs no registry."
        return Symptom("MLflow", "missing", str(error), remedy)
    return Symptom("MLflow", "ok", f"usable at {registry}")


def _dvc() -> Symptom:
    try:
        return Symptom("DVC", "ok", metadata.version("dvc"))
    except metadata.PackageNotFoundError:
        remedy = f"make repro {extras.remedy('pipeline')}. gate check needs no DVC."
        return Symptom("DVC", "absent", "not installed", remedy)


def _disk(folder: Path) -> Symptom:
    free = shutil.disk_usage(folder).free
    free_space = f"{free / 1024**3:.1f} GiB free at {folder}"
    if free >= _FREE_BYTES:
        return Symptom("disk", "ok", free_space)
    return Symptom("disk", "missing", free_space, f"Free at least {_FREE_BYTES / 1024**3:.0f} GiB.")
