"""Names and guaranteed properties of the built-in runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from gate.storage.record import Count, Record, added_field

# The decision checks that a measurement kept the promise of its name. What it takes for a promise
# of the gate's own names stands here and in no evidence.


_NAME, _LONGEST = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", 64

RuntimeName = Annotated[str, StringConstraints(pattern=f"^{_NAME}$", max_length=_LONGEST)]
"""Lower-case letters, digits, dashes and dots. The registry (`gate.runtimes.selection`) checks that
there is such a runtime: a reader of evidence need not have it."""

Engine = Literal["torch", "onnxruntime", "other"]

BoundsKind = Literal["cpu", "cuda", "device"]
"""Which of the built-in bounds fit: those of a CPU, those of ONNX Runtime on CUDA, or those of
another device, whose algorithms may round more. Evidence of before has `cuda` for both."""


CPU_PROVIDER = "CPUExecutionProvider"

CUDA_PROVIDER = "CUDAExecutionProvider"

ORT = "ort"
"""ONNX Runtime with the providers that the options name."""

RECORDED = "recorded"
"""Outputs that were computed elsewhere."""

SERVER = "server"
"""A live model server."""


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """The properties that the name of a runtime guarantees."""

    engine: Engine
    provider: str
    optimization: str | None
    """`graph_optimization_level` of ONNX Runtime; None for others."""

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
"""Those whose name is the whole promise."""

PROVIDERS: dict[RuntimeName, str] = {
    "browser-wasm": "wasm",
    "browser-webgpu": "webgpu",
    "openvino": "OpenVINO CPU",
    RECORDED: RECORDED,
    SERVER: SERVER,
    "tract": "tract cpu",
}
"""What the gate's other kinds promise to run on, but for `ort`. Of the kinds of packages only their
evidence says it."""

OWN = frozenset({*RUNTIMES, *PROVIDERS, ORT})
"""All names of the gate's own: nothing else measures under one of them."""

_OTHER = RuntimeTraits("other", "", None)


def is_runtime_name(text: str) -> bool:
    """Return whether a runtime may have this name."""
    return len(text) <= _LONGEST and re.fullmatch(_NAME, text) is not None


def traits_of(name: RuntimeName) -> RuntimeTraits:
    """Return the properties that a name guarantees; none for a name that is not built in."""
    return RUNTIMES.get(name, _OTHER)


HEAVY = re.compile(r"Conv|Gemm|MatMul|Attention|Einsum|LSTM|GRU|RNN")
"""Operators, of any domain, that do the work of a model. On the CPU they are always a fallback."""


class CpuNode(Record):
    """A node that ran on the CPU although another provider was requested, and computes no shape."""

    name: str
    """`op_type:node_name`, as in `RuntimeEvidence.fallback_nodes`."""
    operator: str
    """`domain::op_type`; `op_type` in the standard domain."""
    since_version: Count | None = None
    """The version of the operator in the opset of the file. None: unknown."""
    inputs: tuple[str, ...] = ()
    """Their types: `float`, `int64`; empty where unknown."""


class RuntimeIdentity(Record):
    """The identity of a runtime that its name does not define, or that has its own options."""

    kind: RuntimeName
    """Its name in the registry; `ort` for ONNX Runtime by its options."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """As the policy has them: other options are another runtime."""
    package: str = ""
    """Distribution and version that it comes with; empty: the gate itself."""
    provider: str = ""
    """What it promises to run on."""
    bounds: BoundsKind = "cpu"
    versions: dict[str, str] = added_field({})
    """Of the libraries that compute, by name."""
    device: str | None = added_field(None)
    precision: str | None = added_field(None)
    """In which it computed, proven: `float32`. None: not proven."""
