"""What a runtime is under the name that a policy gives it."""

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
        ("browser-webgpu", {}, False),  # its bounds are those of CUDA, too
        ("ort-cpu", {}, False),
    ],
)
def test_memory_of_cuda_is_of_who_computes_there(
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
def test_which_built_in_bounds_fit_is_decided_by_the_first_provider(providers, bounds):
    runtime = Ort()
    assert runtime.promised(runtime.options(providers=tuple(providers))).bounds == bounds


def test_a_package_that_promises_the_bounds_of_cuda_means_a_device(monkeypatch):
    runtime = IsolatedRuntime("acme:Acme")
    promises = {"promises": {"provider": "acme", "bounds": "cuda"}}
    monkeypatch.setattr(runtime, "_describe", lambda _: promises)
    assert runtime.promised(None).bounds == "device"
