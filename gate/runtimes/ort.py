"""ONNX Runtime: the named runtimes and any other provider."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gate.errors import (
    GateError,
    OutputMismatch,
    PlainSessionFailed,
    PolicyError,
    StorageError,
    describe_failure,
)
from gate.installation import onnx_runtime
from gate.onnx_file.sessions import NO_SPINNING, open_session, read_placement, session_options
from gate.policy.runtime_options import BASIC, OrtOptions, OrtSettings, OrtSetup
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, ORT, RUNTIMES, BoundsKind, RuntimeName
from gate.runtimes.runtime import (
    ON_CUDA,
    Conditions,
    Promises,
    Proof,
    RunnableFile,
    Runtime,
    Session,
)
from gate.storage.arrays import Batch, RuntimeArray
from gate.storage.files import temporary_folder

if TYPE_CHECKING:
    import onnx

_DRIVER = Path("/proc/driver/nvidia")

_CONTROL_DEVICE = Path("/dev/nvidiactl")

_WSL_DEVICE = Path("/dev/dxg")

_WSL_LIBRARY = Path("/usr/lib/wsl/lib/libcuda.so.1")


def cuda_absent_reason() -> str | None:
    """Return why this machine has no CUDA device; None if it has one.

    An unusable device (hidden, no driver library) is not absent: using it is a failure. On WSL the
    device file is not sufficient, because other graphics cards also have it.
    """
    if cuda_traces():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is '{visible}'"
    return (
        "no CUDA device on this machine: PyTorch sees none, and there is no NVIDIA driver "
        f"({_DRIVER}, {_CONTROL_DEVICE}) nor a CUDA device of WSL ({_WSL_DEVICE}){hidden}."
    )


def cuda_traces() -> list[str]:
    """Return the signs of a CUDA device on this machine; empty if there are none."""
    import torch

    traces = []
    count = torch.cuda.device_count()
    if count > 0:
        traces.append(f"PyTorch sees {count} CUDA device{'s' if count > 1 else ''}")
    traces += [f"{path} exists" for path in (_DRIVER, _CONTROL_DEVICE) if path.exists()]
    if _WSL_DEVICE.exists() and _WSL_LIBRARY.exists():
        traces.append(f"{_WSL_DEVICE} and {_WSL_LIBRARY} exist")
    return traces


def cuda_unusable_reason() -> str | None:
    """Return why PyTorch can't use the CUDA device of this machine; None if it can."""
    import torch

    if torch.cuda.device_count() > 0:
        return None
    traces = "; ".join(cuda_traces()) or "nothing shows a device"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"a CUDA device is there ({traces}), but PyTorch sees none and CUDA_VISIBLE_DEVICES is "
            f"'{visible}'. Unset it, or set the runtime to 'never' in the policy."
        )
    return (
        f"a CUDA device is there ({traces}), but PyTorch sees none. Check the driver "
        "(nvidia-smi), give the container access to the device, or set the runtime to 'never' "
        "in the policy."
    )


_BOOLEANS = {"true": "1", "false": "0"}

_LOWERED = {
    CUDA_PROVIDER: {"use_tf32": "tf32"},
    "TensorrtExecutionProvider": {
        "trt_fp16_enable": "float16",
        "trt_bf16_enable": "bfloat16",
        "trt_int8_enable": "int8",
    },
}
"""Options that lower the precision, with the resulting precision."""

_FLOAT32 = (CPU_PROVIDER, CUDA_PROVIDER, "XnnpackExecutionProvider")
"""Providers that compute in float32 unless their reported options lower the precision. The options
of others do not determine it: TensorRT uses TF32 by default."""


def precision_of(setup: OrtSetup, by_provider: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the precision of a session by its providers' options; None if not reported."""
    if setup.settings.reduced_precision is not None:
        return setup.settings.reduced_precision
    stated = True
    for provider in setup.providers:
        reported, lowering = by_provider.get(provider, {}), _LOWERED.get(provider, {})
        for option, lower in lowering.items():
            if normal(reported.get(option, "0")) != "0":
                return lower
        stated = stated and provider in _FLOAT32 and reported.keys() >= lowering.keys()
    return "float32" if stated else None


def normal(value: Any) -> str:
    """Return a normalized option value, because providers write booleans in two ways."""
    text = str(value)
    return _BOOLEANS.get(text.lower(), text)


_BOUNDS: dict[str, BoundsKind] = {
    CPU_PROVIDER: "cpu",
    "XnnpackExecutionProvider": "cpu",
    CUDA_PROVIDER: "cuda",
}
"""The kind of built-in bounds, by provider."""


class OrtSession(Session):
    """A session of ONNX Runtime, with the node placement from a profiled first run."""

    def __init__(
        self, file: RunnableFile, setup: OrtSetup, *, conditions: Conditions, example: Batch
    ) -> None:
        """Open the file and profile one run of `example`, in the session that is used later: after
        the profile ends, its results are bit-identical to those of an unprofiled session.

        Raises EvidenceError if the provider doesn't load, OutputMismatch if inputs or outputs
        differ from the subject's, and the exceptions of ONNX Runtime.
        """
        self._file = file
        self._setup = setup
        self._conditions = conditions
        self._plain_failure: str | None = None
        with temporary_folder() as folder:
            self._session = self._open(Path(folder) / "placement")
            self._session.run(None, dict(example))
            profile = Path(self._session.end_profiling())
            graph = self._optimized_model if self._can_fall else None
            self._placement = read_placement(profile, graph)

    def _open(self, profile: Path) -> Any:
        """Open a profiled session. If the file does not open with optimizations off, use the basic
        ones; neither level is used for serving."""
        try:
            return self._create(profile)
        except Exception as error:
            is_of_runtime = not isinstance(error, GateError | MemoryError)
            if not (is_of_runtime and self._setup.is_named_plain) or "memory" in str(error).lower():
                raise
            self._plain_failure = describe_failure(error)
            self._setup = replace(self._setup, optimization=BASIC)
            try:
                return self._create(profile)
            except Exception as second_error:
                raise PlainSessionFailed(self._plain_failure) from second_error

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Return the outputs of `batch`."""
        return list(self._session.run(None, dict(batch)))

    def proof(self) -> Proof:
        """Return the proof, with the options that the session reports."""
        options, setup = self._session.get_session_options(), self._setup
        reported = {
            "graph_optimization_level": options.graph_optimization_level.name,
            "execution_mode": options.execution_mode.name,
            "intra_op_num_threads": str(options.intra_op_num_threads),
            "use_deterministic_compute": str(int(options.use_deterministic_compute)),
        }
        for key in (NO_SPINNING[0], *setup.settings.config):
            reported[key] = options.get_session_config_entry(key)
        if setup.disabled:  # which no session reports
            reported["disabled_optimizers"] = setup.disabled
        by_provider = self._session.get_provider_options()
        for provider in setup.providers:
            if provider != CPU_PROVIDER:
                values = by_provider.get(provider, {})
                reported |= {setup.key(provider, k): normal(values[k]) for k in sorted(values)}
        fallback = self._placement.cpu_nodes if self._can_fall else ()
        return Proof(
            providers_active=tuple(self._session.get_providers()),
            nodes_per_provider=self._placement.nodes_per_provider,
            fallback_nodes=tuple(node.name for node in fallback),
            cpu_nodes=fallback,
            cpu_time_share=self._placement.cpu_time_share if self._can_fall else None,
            session_options=reported,
            plain_failure=self._plain_failure,
            versions=_versions(),
            precision=precision_of(setup, by_provider),
        )

    @property
    def _can_fall(self) -> bool:
        """Return whether compute nodes on the CPU are a fallback."""
        return CPU_PROVIDER not in self._setup.providers

    def _optimized_model(self) -> onnx.ModelProto:
        """Return the optimized graph without large weights; the file's graph if ONNX Runtime can't
        write it, as for providers that compile nodes."""
        import onnx

        with temporary_folder() as folder:
            path = Path(folder) / "optimized.onnx"
            options = self._options()
            options.optimized_model_filepath = str(path)
            for key, value in (("file_name", "weights"), ("min_size_in_bytes", "1024")):
                entry = f"session.optimized_model_external_initializers_{key}"
                options.add_session_config_entry(entry, value)
            try:
                open_session(self._file.candidate.loadable(), options, self._setup)
                return onnx.load(path, load_external_data=False)
            except Exception:  # a broken provider raises almost anything
                return self._file.parsed()

    def _options(self) -> Any:
        return session_options(
            self._setup,
            threads=self._conditions.threads,
            deterministic=self._conditions.deterministic,
        )

    def _create(self, profile: Path) -> Any:
        """Open a profiled session with the requested provider and check its inputs and outputs."""
        options = self._options()
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
        loadable, start = self._file.candidate.loadable(), time.perf_counter()
        session = open_session(loadable, options, self._setup)
        self.open_seconds = time.perf_counter() - start
        self._check_names(session)
        return session

    def _check_names(self, session: Any) -> None:
        subject = self._file.subject
        for side, got, specs in (
            ("inputs", session.get_inputs(), subject.inputs),
            ("outputs", session.get_outputs(), subject.outputs),
        ):
            names, expected = [value.name for value in got], [spec.name for spec in specs]
            if names != expected:
                raise OutputMismatch(
                    f"the file has the {side} {names}, expected {expected} from its record. "
                    "The file has changed: read it again."
                )


class _OnnxRuntime(Runtime):
    """Base class of runtimes that use ONNX Runtime in this process."""

    isolated: ClassVar[bool] = False

    def absent_reason(self, options: Any) -> str | None:
        """Return why there is no CUDA device, if the provider needs one."""
        if self._setup(options, Conditions()).provider not in ON_CUDA:
            return None
        return cuda_absent_reason()

    def versions(self) -> dict[str, str]:
        """Return the version of the imported package."""
        return _versions()

    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Open a session. Raises EvidenceError if the provider doesn't load, and the exceptions of
        ONNX Runtime."""
        setup = self._setup(options, conditions)
        return OrtSession(file, setup, conditions=conditions, example=example)

    def promised(self, options: Any) -> Promises:
        """Return the first provider, with device bounds unless it is for the CPU or CUDA."""
        provider = self._setup(options, Conditions()).provider
        return Promises(provider, _BOUNDS.get(provider, "device"))

    @abstractmethod
    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup: ...


class NamedOrt(_OnnxRuntime):
    """A built-in runtime with a fixed provider and optimization level."""

    name: ClassVar[RuntimeName]
    options = OrtSettings

    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup:
        settings = options.model_dump(mode="json")
        return OrtSetup.from_traits(RUNTIMES[self.name], settings, conditions.cuda_options)


class OrtCpu(NamedOrt):
    """The CPU with optimizations off, which tests only the export."""

    name = "ort-cpu"


class OrtCpuOptimized(NamedOrt):
    """The CPU with all optimizations, as used for serving."""

    name = "ort-cpu-optimized"


class OrtCuda(NamedOrt):
    """CUDA with optimizations off."""

    name = "ort-cuda"


class OrtCudaOptimized(NamedOrt):
    """CUDA with all optimizations."""

    name = "ort-cuda-optimized"


class Ort(_OnnxRuntime):
    """ONNX Runtime with the providers and optimization level of the options."""

    name: ClassVar[RuntimeName] = ORT
    options = OrtOptions

    def absent_reason(self, options: Any) -> str | None:
        """Return why this build of ONNX Runtime lacks the providers, or the machine the device.

        Raises PolicyError for a provider that no build has.
        """
        missing = _missing_provider(self._setup(options, Conditions()).providers)
        return missing or super().absent_reason(options)

    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup:
        return OrtSetup.from_options(options.model_dump(mode="json"), conditions.cuda_options)


def _missing_provider(providers: Sequence[str]) -> str | None:
    """Return a text about the first provider that this build lacks, or None."""
    onnxruntime = onnx_runtime()
    available, supported = onnxruntime.get_available_providers(), onnxruntime.get_all_providers()
    version = f"ONNX Runtime {onnxruntime.__version__}"
    missing = [name for name in providers if name not in available]
    for name in missing:
        if name not in supported:
            stems = {_stem(each): each for each in (*available, *supported)}
            near = difflib.get_close_matches(_stem(name), stems, n=1, cutoff=0.5)
            hint = f" Did you mean '{stems[near[0]]}'?" if near else ""
            raise PolicyError(
                f"{version} does not support {name}, expected one of {', '.join(supported)}.{hint}"
            )
    if not missing:
        return None
    return (
        f"this build of {version} does not have {missing[0]}, only {', '.join(available)}. Install "
        "the ONNX Runtime package that has it."
    )


def _stem(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()


def _versions() -> dict[str, str]:
    return {"onnxruntime": str(onnx_runtime().__version__)}


@contextlib.contextmanager
def private_copy(file: RunnableFile) -> Iterator[Path]:
    """Yield the path of a temporary copy of the file and its external data.

    The digest of the copy is verified, so that later changes of the original have no effect. Raises
    DigestMismatch, StorageError.
    """
    with temporary_folder() as folder:
        copied = folder / file.path.name
        try:
            for name in (file.path.name, *file.subject.external_data):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.path.parent / name, target)
        except OSError as error:
            raise StorageError(
                f"cannot copy {file.path.name} to measure it: {error.strerror or error}. Its "
                "external data must be in the same folder, and TMPDIR needs space for a copy."
            ) from error
        from gate.onnx_file.tested_file import TestedFile

        TestedFile(copied, file.subject).verify()
        yield copied
