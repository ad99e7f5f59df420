"""The precision that ONNX Runtime's providers report determines the recorded precision."""

from __future__ import annotations

import pytest

from gate.policy.runtime_options import OrtSetup
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER
from gate.runtimes.ort import precision_of

XNNPACK, TENSORRT = "XnnpackExecutionProvider", "TensorrtExecutionProvider"
FP16, TF32 = {"trt_fp16_enable": "True"}, {"use_tf32": "1"}
BFLOAT16 = {"mlas.enable_gemm_fastmath_arm64_bfloat16": "1"}


@pytest.mark.parametrize(
    ("providers", "reported", "config", "precision"),
    [
        ([TENSORRT], {TENSORRT: {"trt_fp16_enable": "0"}}, {}, None),
        ([TENSORRT], {TENSORRT: FP16}, {}, "float16"),
        ([TENSORRT, CUDA_PROVIDER], {CUDA_PROVIDER: {"use_tf32": "0"}}, {}, None),
        ([TENSORRT, CUDA_PROVIDER], {CUDA_PROVIDER: TF32}, {}, "tf32"),
        (["NvTensorRTRTXExecutionProvider"], {}, {}, None),
        ([CUDA_PROVIDER], {CUDA_PROVIDER: {"use_tf32": "0"}}, {}, "float32"),
        ([CUDA_PROVIDER], {CUDA_PROVIDER: TF32}, {}, "tf32"),
        ([CUDA_PROVIDER], {}, {}, None),
        ([CPU_PROVIDER], {}, {}, "float32"),
        ([CPU_PROVIDER], {}, BFLOAT16, "bfloat16"),
        ([XNNPACK, CPU_PROVIDER], {}, BFLOAT16, "bfloat16"),
    ],
)
def test_float32_is_reported_only_when_proven(providers, reported, config, precision):
    """TensorRT uses TF32 by default, and its options do not show it."""
    setup = OrtSetup.from_options({"providers": providers, "config": config}, {})
    assert precision_of(setup, reported) == precision
