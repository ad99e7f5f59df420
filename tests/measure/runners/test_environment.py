from __future__ import annotations

import platform

import psutil
import torch

from gate.records.evidence import Determinism
from gate.reference import environment

SWITCHES = Determinism(
    tf32_matmul=False,
    tf32_cudnn=False,
    cudnn_deterministic=True,
    cudnn_benchmark=False,
    grad=False,
    seed=0,
    threads=2,
)


def test_the_environment_names_versions_and_cpu():
    seen = environment.describe_environment(SWITCHES)
    assert seen.versions["torch"] == torch.__version__
    assert {"python", "torch", "torchvision", "onnx", "onnxruntime", "numpy"} <= set(seen.versions)
    assert seen.cpu
    assert seen.determinism == SWITCHES


def test_without_a_device_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert environment.describe_environment(SWITCHES).gpu is None


def test_the_driver_version_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_DRIVER", tmp_path)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    )
    assert environment.describe_environment(SWITCHES).driver == "580.65.06"


def test_the_machine_is_told_apart_from_others():
    found = environment.describe_environment(SWITCHES)
    assert found.cores is not None
    assert found.cores >= 1
    assert found.os
    assert found.kernel
    assert platform.release() in found.kernel
    assert platform.machine() in found.kernel


def test_a_system_without_affinity_or_a_name_is_no_error(monkeypatch):
    def missing(*_: object) -> None:
        raise OSError

    def unsupported(_: object) -> None:
        raise AttributeError

    monkeypatch.setattr(platform, "freedesktop_os_release", missing)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", unsupported)
    found = environment.describe_environment(SWITCHES)
    assert found.os
    assert found.cores


def test_of_several_builds_the_imported_one_counts(monkeypatch):
    """onnxruntime and onnxruntime-gpu lie in one folder, or one of them before the other."""
    monkeypatch.setattr("onnxruntime.__version__", "1.2.3")
    assert environment.describe_environment(SWITCHES).versions["onnxruntime"] == "1.2.3"
