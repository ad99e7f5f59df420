"""Selected runtimes: bounds, CUDA, and the numbers that they report."""

from __future__ import annotations

from typing import Any

import pytest

from gate.policy.sections import Bounds, RuntimePolicy
from gate.runtimes.isolated import IsolatedRuntime
from gate.runtimes.ort import Ort
from gate.runtimes.selection import SelectedRuntime

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("torch-cuda", {}, True),
        ("ort-cuda", {}, True),
        ("ort-cuda-optimized", {}, True),
        ("mine", {"kind": "ort", "options": {"providers": [TENSORRT]}}, True),
        ("mine", {"kind": "ort", "options": {"providers": [CUDA]}}, True),
        ("mine", {"kind": "ort", "options": {"providers": ["XnnpackExecutionProvider"]}}, False),
        ("mine", {"kind": "ort", "options": {"providers": ["MIGraphXExecutionProvider"]}}, False),
        ("phone", {"kind": "recorded"}, False),
        ("browser-webgpu", {}, False),  # has the bounds of CUDA
        ("ort-cpu", {}, False),
    ],
)
def test_takes_cuda_depends_on_the_provider(
    name: str, wanted: dict[str, Any], expected: bool
) -> None:
    policy = RuntimePolicy(required="when_present", bounds=Bounds(max_abs_diff=1e-3), **wanted)
    assert SelectedRuntime(name, policy).takes_cuda is expected


@pytest.mark.parametrize(
    ("providers", "bounds"),
    [
        (["CPUExecutionProvider"], "cpu"),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda"),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider"], "device"),
        (["DmlExecutionProvider"], "device"),
    ],
)
def test_built_in_bounds_follow_the_first_provider(providers, bounds):
    runtime = Ort()
    assert runtime.promised(runtime.options(providers=tuple(providers))).bounds == bounds


def test_plugin_with_cuda_bounds_gets_device_bounds(monkeypatch):
    runtime = IsolatedRuntime("acme:Acme")
    promises = {"promises": {"provider": "acme", "bounds": "cuda"}}
    monkeypatch.setattr(runtime, "_describe", lambda _: promises)
    assert runtime.promised(None).bounds == "device"
