"""What a runtime is under the name that a policy gives it."""

from __future__ import annotations

from typing import Any

import pytest

from gate.policy.sections import Bounds, RuntimePolicy
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
