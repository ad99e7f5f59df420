"""The runtimes by name, and what each name promises: engine, provider, graph optimisation level.

The decision checks that a measurement kept the promise of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RuntimeName = Literal[
    "torch-cuda", "ort-cpu", "ort-cpu-optimized", "ort-cuda", "ort-cuda-optimized"
]
Engine = Literal["torch", "onnxruntime"]

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """What a runtime's name promises."""

    engine: Engine
    provider: str
    optimization: str | None
    """`graph_optimization_level` of ONNX Runtime; None for torch."""

    @property
    def cuda(self) -> bool:
        """True if the runtime needs a CUDA device."""
        return self.provider == CUDA_PROVIDER


RUNTIMES: dict[RuntimeName, RuntimeTraits] = {
    "torch-cuda": RuntimeTraits("torch", CUDA_PROVIDER, None),
    "ort-cpu": RuntimeTraits("onnxruntime", CPU_PROVIDER, "ORT_DISABLE_ALL"),
    "ort-cpu-optimized": RuntimeTraits("onnxruntime", CPU_PROVIDER, "ORT_ENABLE_ALL"),
    "ort-cuda": RuntimeTraits("onnxruntime", CUDA_PROVIDER, "ORT_DISABLE_ALL"),
    "ort-cuda-optimized": RuntimeTraits("onnxruntime", CUDA_PROVIDER, "ORT_ENABLE_ALL"),
}
