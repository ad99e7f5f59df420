"""In which precision a session of ONNX Runtime computes, by what its providers report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gate.policy.ort_options import OrtSetup
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER

_BOOLEANS = {"true": "1", "false": "0"}
_LOWERED = {
    CUDA_PROVIDER: {"use_tf32": "tf32"},
    "TensorrtExecutionProvider": {
        "trt_fp16_enable": "float16",
        "trt_bf16_enable": "bfloat16",
        "trt_int8_enable": "int8",
    },
}
"""Options that lower the precision, and to what."""
_FLOAT32 = (CPU_PROVIDER, CUDA_PROVIDER, "XnnpackExecutionProvider")
"""Those that compute in float32 where their options, as they report them, lower nothing. What
another one computes in, its options do not say: TensorRT takes TF32 by itself."""


def precision_of(setup: OrtSetup, by_provider: Mapping[str, Mapping[str, Any]]) -> str | None:
    """In which a session computes that reports these options of its providers; None: they don't
    say."""
    if setup.settings.lowered is not None:
        return setup.settings.lowered
    stated = True
    for provider in setup.providers:
        reported, lowering = by_provider.get(provider, {}), _LOWERED.get(provider, {})
        for option, lower in lowering.items():
            if normal(reported.get(option, "0")) != "0":
                return lower
        stated = stated and provider in _FLOAT32 and reported.keys() >= lowering.keys()
    return "float32" if stated else None


def normal(value: Any) -> str:
    """The value of an option: providers write booleans in two ways."""
    text = str(value)
    return _BOOLEANS.get(text.lower(), text)
