"""Names and guaranteed properties of the built-in runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from gate.storage.record import Count, Record, added_field

# The decision checks that a measurement has the properties that the runtime's name guarantees. For
# built-in names they are defined here, so that evidence can't redefine them.
_NAME, _MAX_LENGTH = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", 64

RuntimeName = Annotated[str, StringConstraints(pattern=f"^{_NAME}$", max_length=_MAX_LENGTH)]
"""Lower-case letters, digits, dashes and dots. Only `gate.runtimes.selection` checks that the
runtime exists, because a reader of evidence may not have it installed."""

Engine = Literal["torch", "onnxruntime", "other"]

BoundsKind = Literal["cpu", "cuda", "device"]
"""The applicable built-in bounds: for a CPU, for ONNX Runtime on CUDA, or for another device, whose
algorithms may round more. Older evidence has `cuda` for both devices."""

CPU_PROVIDER = "CPUExecutionProvider"

CUDA_PROVIDER = "CUDAExecutionProvider"

ORT = "ort"
"""ONNX Runtime with the providers in its options."""

RECORDED = "recorded"
"""Recorded outputs that were computed elsewhere."""

SERVER = "server"
"""A live model server."""


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """The properties that the name of a runtime guarantees."""

    engine: Engine
    provider: str
    optimization: str | None
    """`graph_optimization_level` of ONNX Runtime; None for other engines."""

    @property
    def cuda(self) -> bool:
        """Return whether the runtime needs a CUDA device."""
        return self.provider == CUDA_PROVIDER


RUNTIMES: dict[RuntimeName, RuntimeTraits] = {
    "torch-cuda": RuntimeTraits("torch", CUDA_PROVIDER, None),
    "ort-cpu": RuntimeTraits("onnxruntime", CPU_PROVIDER, "ORT_DISABLE_ALL"),
    "ort-cpu-optimized": RuntimeTraits("onnxruntime", CPU_PROVIDER, "ORT_ENABLE_ALL"),
    "ort-cuda": RuntimeTraits("onnxruntime", CUDA_PROVIDER, "ORT_DISABLE_ALL"),
    "ort-cuda-optimized": RuntimeTraits("onnxruntime", CUDA_PROVIDER, "ORT_ENABLE_ALL"),
}
"""Runtimes that are fully defined by their names."""

PROVIDERS: dict[RuntimeName, str] = {
    "browser-wasm": "wasm",
    "browser-webgpu": "webgpu",
    "openvino": "OpenVINO CPU",
    RECORDED: RECORDED,
    SERVER: SERVER,
    "tract": "tract cpu",
}
"""Providers of the other built-in kinds except `ort`. For kinds from plug-in packages only the
evidence has the provider."""

BUILTIN_NAMES = frozenset({*RUNTIMES, *PROVIDERS, ORT})
"""All built-in names, which plug-ins can't use."""

_NO_TRAITS = RuntimeTraits("other", "", None)


def is_runtime_name(text: str) -> bool:
    """Return whether a runtime may have this name."""
    return len(text) <= _MAX_LENGTH and re.fullmatch(_NAME, text) is not None


def traits_of(name: RuntimeName) -> RuntimeTraits:
    """Return the properties that a name guarantees; none for a name that is not built in."""
    return RUNTIMES.get(name, _NO_TRAITS)


HEAVY = re.compile(r"Conv|Gemm|MatMul|Attention|Einsum|LSTM|GRU|RNN")
"""Compute-intensive operators of any domain. On the CPU they always count as a fallback."""


class CpuNode(Record):
    """A compute node that ran on the CPU although another provider was requested."""

    name: str
    """`op_type:node_name`, as in `RuntimeEvidence.fallback_nodes`."""
    operator: str
    """`domain::op_type`; `op_type` in the standard domain."""
    since_version: Count | None = None
    """Version of the operator in the file's opset. None: unknown."""
    inputs: tuple[str, ...] = ()
    """Types of the inputs: `float`, `int64`; empty if unknown."""


class RuntimeIdentity(Record):
    """The identity of a runtime that is not defined by its name, or that has options."""

    kind: RuntimeName
    """Name of the runtime's kind; `ort` for ONNX Runtime with options."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options in the policy. Different options make a different runtime."""
    package: str = ""
    """Distribution and version of the plug-in; empty for built-in kinds."""
    provider: str = ""
    """Provider on which the runtime claims to run."""
    bounds: BoundsKind = "cpu"
    versions: dict[str, str] = added_field({})
    """Versions of the libraries that compute, by name."""
    device: str | None = added_field(None)
    precision: str | None = added_field(None)
    """Verified precision of the computation: `float32`. None: not verified."""
