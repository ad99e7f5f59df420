"""What a kept cell depends on beside its own setting: the machine, the versions and the code.

The weights of all models follow from it too: they are drawn from fixed seeds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from benchmarks.cuda.device import Device
from benchmarks.cuda.gpu_tests import files_with_gpu_tests

ROOT = Path(__file__).parents[2]
_MEASURES = (
    "gate/data", "gate/distributed", "gate/export", "gate/measure", "gate/model", "gate/onnx_file",
    "gate/policy", "gate/probes", "gate/records", "gate/reference", "gate/runtimes",
    "gate/statistics", "gate/weights", "benchmarks/corpus", "benchmarks/torchvision_models.py",
    "benchmarks/cuda/device.py", "benchmarks/cuda/measuring.py", "benchmarks/cuda/odd_nets.py",
    "benchmarks/cuda/setting.py", "benchmarks/cuda/stand_in.py", "benchmarks/cuda/subjects.py",
)  # fmt: skip
"""What makes and measures files. What judges and shows the cells is not among it: they are judged
anew each time."""


def identity_of(device: Device) -> dict[str, Any]:
    """Equal only where a measurement would be the same."""
    return {"dry_run": device.dry, "device": device.describe(), "code": code_digest(ROOT)}


def code_digest(root: Path) -> str:
    """Of the code that makes and measures files, and of the tests that need a device."""
    digest = hashlib.sha256()
    places = [root / name for name in _MEASURES]
    files = [
        file
        for place in places
        for file in ([place] if place.suffix else sorted(place.rglob("*.py")))
    ]
    for file in [*files, *files_with_gpu_tests(root)]:
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
