"""Selected runtimes: bounds, CUDA, and the numbers that they report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gate.policy.sections import Bounds, RuntimePolicy
from gate.runtimes.isolated import IsolatedRuntime
from gate.runtimes.ort import Ort
from gate.runtimes.runtime import count_of, seconds_of
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


INVALID_VALUES: list[Any] = [None, -1, math.nan, math.inf, -math.inf, "0.1", True, [1], 1j, 10**400]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (15, 15),
        (0, 0),
        (1.5e8, 150_000_000),
        (np.int64(15), 15),
        (np.float32(2.0), 2),
        (1.5, None),
        (np.float64("nan"), None),
        (np.array(3), None),
        *((said, None) for said in INVALID_VALUES),
    ],
)
def test_count_of_accepts_whole_numbers(said: Any, expected: int | None) -> None:
    result = count_of(said)
    assert result == expected
    assert result is None or type(result) is int


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (np.int8(2), 2.0),
        (0.0, None),
        *((said, None) for said in INVALID_VALUES),
    ],
)
def test_seconds_of_accepts_positive_numbers(said: Any, expected: float | None) -> None:
    result = seconds_of(said)
    assert result == expected
    assert result is None or type(result) is float
