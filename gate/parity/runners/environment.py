"""The machine and the libraries."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from gate.package.loaded import onnx_runtime
from gate.parity.runners.processor import describe_processor
from gate.records.environment import Determinism, Environment

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "numpy": ("numpy",),
}
_DRIVER = Path("/proc/driver/nvidia")


def describe_environment(determinism: Determinism) -> Environment:
    """Versions and hardware, with the switches that were in force."""
    cpu, flags = describe_processor()
    device = torch.cuda.device_count() > 0
    cudnn = torch.backends.cudnn.version() if device else None  # type: ignore[no-untyped-call]
    return Environment(
        versions=_versions(),
        cpu=cpu,
        cpu_flags=flags,
        cores=_cores(),
        os=_os(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}".strip() or None,
        cuda=torch.version.cuda if device else None,
        cudnn=None if cudnn is None else str(cudnn),
        gpu=torch.cuda.get_device_name(0) if device else None,
        driver=_driver_version(),
        determinism=determinism,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name, candidates in _DISTRIBUTIONS.items():
        for distribution in candidates:
            try:
                versions[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    versions["torch"] = str(torch.__version__)
    if "onnxruntime" in versions:  # several builds may be installed, of which one is imported
        versions["onnxruntime"] = str(onnx_runtime().__version__)
    return versions


def _cores() -> int | None:
    """Those that the process may use, else all."""
    import psutil

    try:
        return len(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error):  # macOS has no affinity
        return os.cpu_count()


def _os() -> str | None:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True) or None


def _driver_version() -> str | None:
    try:
        text = (_DRIVER / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None
