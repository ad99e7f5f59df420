"""The machine and the libraries."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from gate.records.evidence import Determinism, Environment

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
    device = torch.cuda.device_count() > 0
    cudnn = torch.backends.cudnn.version() if device else None  # type: ignore[no-untyped-call]
    return Environment(
        versions=_versions(),
        cpu=_cpu(),
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
    return versions


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _driver_version() -> str | None:
    try:
        text = (_DRIVER / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None
