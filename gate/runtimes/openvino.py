"""The runtime OpenVINO on the CPU."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gate.errors import EvidenceError, OutputMismatch
from gate.installation import package_versions
from gate.records.runtime import PROVIDERS, RuntimeName
from gate.runtimes.ort import private_copy
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch, RuntimeArray

_DEVICE = "CPU"

_INSTALL = "pip install 'parity-gate[openvino]'"

_OTHER_PACKAGE = "onnxruntime-openvino"

_HINT = "INFERENCE_PRECISION_HINT"

_THREADS = "INFERENCE_NUM_THREADS"

_RECORDED = (
    _THREADS,
    "NUM_STREAMS",
    "PERFORMANCE_HINT",
    "CPU_DENORMALS_OPTIMIZATION",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
)

_EXACT = {"f32": "float32", "f64": "float32"}
"""Precisions that count as float32: OpenVINO's CPU plugin also computes doubles in float32."""

_LOWER = {"bf16": "bfloat16", "f16": "float16"}

_LOCATION = re.compile(r"Exception from |Check .* failed at ")

_NO_NUMBERS = ("Const", "Input", "Output")


class OpenVinoOptions(BaseModel):
    """The options that a policy may set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    precision_hint: Literal["f32", "bf16", "f16", "default"] = "f32"
    """`default`: the precision that OpenVINO considers best on this machine."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Number of threads. None: `determinism.threads`, or PyTorch's default."""


class OpenVinoSession(Session):
    """One compiled model."""

    def __init__(
        self, compiled: Any, file: RunnableFile, *, device: str, options: OpenVinoOptions
    ) -> None:
        """Raise EvidenceError if options are not in effect, OutputMismatch if an output is
        missing."""
        self._compiled = compiled
        self._device = device
        self._check(options)
        self._output_indices = [_output_index(compiled, spec.name) for spec in file.subject.outputs]

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Run by the names of inputs and outputs. Raises EvidenceError if OpenVINO fails."""
        with _shortened_errors():
            results = self._compiled(dict(batch))
        return [np.asarray(results[index]) for index in self._output_indices]

    def proof(self) -> Proof:
        """Return hint, device and precision of each node, as the compiled model reports them."""
        compiled = self._compiled
        active = tuple(f"OpenVINO {name}" for name in compiled.get_property("EXECUTION_DEVICES"))
        hint = self._hint()
        nodes = _node_precisions(compiled)
        options = {name: str(compiled.get_property(name)) for name in _RECORDED}
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(nodes.items()))
        options |= {_HINT: hint, "node_precisions": counts}
        return Proof(
            providers_active=active,
            nodes_per_provider=dict.fromkeys(active[:1], nodes.total()),
            session_options=options,
            device=self._device,
            precision=_precision(hint, nodes),
        )

    def _hint(self) -> str:
        return str(self._compiled.get_property(_HINT).get_type_name())

    def _check(self, options: OpenVinoOptions) -> None:
        """Raise EvidenceError if an option is not in effect.

        OpenVINO silently uses f16 for bf16, and no more threads than there are cores.
        """
        hint, threads = self._hint(), int(self._compiled.get_property(_THREADS))
        for option, got, expected, is_set in (
            (_HINT, hint, options.precision_hint, options.precision_hint != "default"),
            (_THREADS, threads, options.threads, options.threads is not None),
        ):
            if is_set and got != expected:
                raise EvidenceError(
                    f"OpenVINO: {option} is {got}, expected {expected}, which this machine does "
                    "not support. Change the option in the policy, or leave it out."
                )


class OpenVinoRuntime(Runtime):
    """The package `openvino`, not ONNX Runtime's OpenVINO provider."""

    name: ClassVar[RuntimeName] = "openvino"
    promises = Promises(PROVIDERS["openvino"])
    options = OpenVinoOptions

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - the same with all
        """Return why the package is missing, also if a similarly named package is installed."""
        if find_spec("openvino") is not None:
            return None
        reason = f"the package openvino is not installed: {_INSTALL}."
        version = package_versions([_OTHER_PACKAGE]).get(_OTHER_PACKAGE)
        if version is None:
            return reason
        return (
            f"{reason} {_OTHER_PACKAGE} {version} is installed, but does not help: it is ONNX "
            "Runtime with a provider, and overwrites files of the ONNX Runtime that the gate "
            f"uses. pip uninstall {_OTHER_PACKAGE}, then install parity-gate again."
        )

    def versions(self) -> dict[str, str]:
        """Return the version of the imported library, with its build: `2026.4.1-22982`."""
        import openvino

        return {"openvino": "-".join(str(openvino.get_version()).split("-")[:2])}

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,
        conditions: Conditions,
        example: Batch,  # noqa: ARG002 - it needs no shapes
    ) -> Session:
        """Compile the file. Raises DigestMismatch, OutputMismatch, EvidenceError if OpenVINO
        fails."""
        import openvino

        core = openvino.Core()
        settings = {_THREADS: options.threads or conditions.threads}
        if options.precision_hint != "default":
            settings[_HINT] = options.precision_hint
        # Open it by path, as a server does: from bytes, OpenVINO drops unused inputs.
        with private_copy(file) as path, _shortened_errors():
            compiled = core.compile_model(core.read_model(path), _DEVICE, settings)
        device = str(core.get_property(_DEVICE, "FULL_DEVICE_NAME"))
        return OpenVinoSession(compiled, file, device=device, options=options)


@contextlib.contextmanager
def _shortened_errors() -> Iterator[None]:
    """Convert OpenVINO's exceptions to EvidenceError, without locations in its source."""
    try:
        yield
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if not _LOCATION.match(line)]
        raise EvidenceError(f"OpenVINO: {' '.join(' '.join(lines).split())[:500]}") from None


def _output_index(compiled: Any, name: str) -> int:
    """Return the index of an output; a tensor may have several names."""
    names = [set(output.get_names()) for output in compiled.outputs]
    for index, tensor_names in enumerate(names):
        if name in tensor_names:
            return index
    raise OutputMismatch(
        f"OpenVINO reads the outputs {list(map(sorted, names))} from the file, expected "
        f"'{name}' among them. Give the outputs of the export plain names."
    )


def _node_precisions(compiled: Any) -> Counter[str]:
    """Count the precisions of the nodes that compute."""
    counts: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        information = node.get_rt_info()
        if information["layerType"].astype(str) not in _NO_NUMBERS:
            counts[information["runtimePrecision"].astype(str)] += 1
    return counts


def _precision(hint: str, nodes: Counter[str]) -> str:
    """Return the lowest precision of the computed floats.

    A hint of lower precision counts even if no node uses it, so that the file does not pass as
    exact by chance.
    """
    for lower, name in _LOWER.items():
        if lower == hint or lower in nodes:
            return name
    return _EXACT.get(hint, hint)
