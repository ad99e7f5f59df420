"""Set, verify and restore determinism switches; describe the machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from gate.installation import onnx_runtime, package_versions
from gate.model.loading import seeded
from gate.policy.sections import DeterminismPolicy
from gate.records.evidence import Determinism, Environment

# Sessions of ONNX Runtime take the number of threads and the deterministic algorithms from PyTorch
# (`gate.onnx_file.sessions`), so that both sides run under the same switches.
#
# PyTorch has two interfaces for TF32, flags (`allow_tf32`) and precisions (`fp32_precision`), and
# raises if they contradict each other. Both are set to the same value here if they agreed before.
# If the caller has set only precisions, the flags stay unchanged.


_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic (NVIDIA's documentation of
cuBLAS, "Results reproducibility"; torch.use_deterministic_algorithms)."""

_OPERATIONS = (
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip

# General settings first, then those that inherit from them.
_LEVELS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), *_OPERATIONS)


@contextmanager
def deterministic(policy: DeterminismPolicy) -> Iterator[Determinism]:
    """Set the switches of `policy`, yield the values that are read back, and restore the old ones.

    Also restores them after an exception. Inside the block gradients and autocast are off, new
    tensors are float32, and the CPU computes float32 in float32. The caller's random states do not
    change.
    """
    with ExitStack() as restored:
        restored.enter_context(threads_set(policy.threads))
        restored.enter_context(_algorithms(deterministic=policy.algorithms))
        restored.enter_context(_cudnn(policy))
        restored.enter_context(_tf32(allowed=policy.tf32))
        restored.enter_context(seeded(policy.seed))
        restored.enter_context(torch.autocast("cpu", enabled=False))
        restored.enter_context(torch.autocast("cuda", enabled=False))
        restored.enter_context(torch.no_grad())
        restored.enter_context(_float32_by_default())
        yield read_determinism()


_callers_dtypes: list[torch.dtype] = []
"""The caller's default dtypes, one for each active `deterministic` block."""


@contextmanager
def _float32_by_default() -> Iterator[None]:
    _callers_dtypes.append(torch.get_default_dtype())
    try:
        with default_dtype(torch.float32):
            yield
    finally:
        _callers_dtypes.pop()


def callers_dtype() -> torch.dtype:
    """Return the default dtype outside of `deterministic`, which user code may set."""
    return _callers_dtypes[0] if _callers_dtypes else torch.get_default_dtype()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create new float tensors with this dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read_determinism() -> Determinism:
    """Return the current switches."""
    return Determinism(
        tf32_matmul=_precision("cuda", "matmul") == "tf32",
        tf32_cudnn="tf32" in (_precision("cuda", "conv"), _precision("cuda", "rnn")),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        grad=torch.is_grad_enabled(),
        seed=torch.initial_seed(),
        threads=torch.get_num_threads(),
        algorithms=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def cublas_reason(policy: DeterminismPolicy) -> str | None:
    """Return why deterministic algorithms can't run on CUDA, or None.

    cuBLAS reads the variable when CUDA starts in the process, so the gate can't set it later.
    """
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if not policy.algorithms or workspace in _WORKSPACES:
        return None
    state = "is not set" if workspace is None else f"is '{workspace}'"
    return (
        f"determinism.algorithms is on and CUBLAS_WORKSPACE_CONFIG {state}, so cuBLAS sums in "
        f"another order each time. Set CUBLAS_WORKSPACE_CONFIG={_WORKSPACES[0]} in the environment "
        "before Python starts, or determinism.algorithms: false."
    )


@contextmanager
def threads_set(threads: int | None) -> Iterator[None]:
    """Run PyTorch with `threads` threads inside the block. None: do not change the number."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _algorithms(*, deterministic: bool) -> Iterator[None]:
    """Set deterministic algorithms on or off, and restore the setting at the end.

    PyTorch then also fills uninitialized memory, so that reading it changes the outputs.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )
    try:
        _set_algorithms(deterministic, warn_only=False)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        yield
    finally:
        _set_algorithms(before[0], warn_only=before[1])
        torch._C._set_deterministic_fill_uninitialized_memory(before[2])


def _set_algorithms(mode: bool, *, warn_only: bool) -> None:
    # `torch.use_deterministic_algorithms` would also overwrite a switch of the compiler.
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


@contextmanager
def _cudnn(policy: DeterminismPolicy) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)
    try:
        cudnn.deterministic = policy.cudnn_deterministic
        cudnn.benchmark = policy.cudnn_benchmark
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def _tf32(*, allowed: bool) -> Iterator[None]:
    flags = _flags()
    precisions = _read_precisions()
    try:
        if flags is not None:
            torch.backends.cudnn.allow_tf32 = allowed
            torch.set_float32_matmul_precision("high" if allowed else "highest")
        for backend, operation in _OPERATIONS:
            _set_precision(backend, operation, "tf32" if allowed and backend == "cuda" else "ieee")
        yield
    finally:
        if flags is not None:
            torch.backends.cudnn.allow_tf32 = flags[0]
            torch.set_float32_matmul_precision(flags[1])
        for (backend, operation), precision in precisions.items():
            _set_precision(backend, operation, precision)


def _flags() -> tuple[bool, str] | None:
    """Return the flags, or None if they contradict the precisions: then reading them raises."""
    try:
        return (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def _read_precisions() -> dict[tuple[str, str], str]:
    """Return the precision that is set on each level itself.

    A level without a value returns the inherited one, so the general levels are cleared one after
    the other while reading. `_tf32` sets the needed values afterwards and restores all at its end.
    """
    precisions = {}
    for backend, operation in _LEVELS:
        precisions[backend, operation] = _precision(backend, operation)
        if operation == "all":
            _set_precision(backend, operation, "none")
    return precisions


def _precision(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set_precision(backend: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, precision)


_CPUINFO = Path("/proc/cpuinfo")

_OF_INTEREST = re.compile(
    r"avx2|avx512\w*|avx10\w*|avx_vnni\w*|amx_\w+"  # x86
    r"|neon|asimd|asimdhp|asimddp|asimdfhm|sve\w*|sme2?|smei\w+|smef\w+|i8mm|bf16"  # ARM
)
"""The relevant flags among the hundred that Linux lists. Without AVX-512, or with AMX, other
kernels run, with other rounding and speed."""


def describe_processor() -> tuple[str, tuple[str, ...] | None]:
    """Return the CPU's model and relevant flags by name, None if the system does not list them."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = _field(text, "model name")
    flags = _field(text, "flags") or _field(text, "Features")
    listed = None if flags is None else {f for f in flags.split() if _OF_INTEREST.fullmatch(f)}
    return (
        model or platform.processor() or platform.machine() or "unknown",
        None if listed is None else tuple(sorted(listed)),
    )


def _field(text: str, name: str) -> str | None:
    """Return the first field of this name: all cores of a machine have the same."""
    match = re.search(rf"^{name}[ \t]*:[ \t]*(\S.*)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else None


_DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "numpy": ("numpy",),
}

_DRIVER = Path("/proc/driver/nvidia")


def describe_environment(determinism: Determinism) -> Environment:
    """Return versions and hardware, with the switches of the run."""
    cpu, flags = describe_processor()
    device = torch.cuda.device_count() > 0
    cudnn = torch.backends.cudnn.version() if device else None  # type: ignore[no-untyped-call]
    return Environment(
        versions=_versions(),
        cpu=cpu,
        cpu_flags=flags,
        cores=_cores(),
        os=_os(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}".strip() or None,
        cuda=torch.version.cuda if device else None,
        cudnn=None if cudnn is None else str(cudnn),
        gpu=torch.cuda.get_device_name(0) if device else None,
        driver=_driver_version(),
        determinism=determinism,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name, candidates in _DISTRIBUTIONS.items():
        if installed := package_versions(candidates):
            versions[name] = next(iter(installed.values()))
    versions["torch"] = str(torch.__version__)
    if "onnxruntime" in versions:  # several builds may be installed, but only one is imported
        versions["onnxruntime"] = str(onnx_runtime().__version__)
    return versions


def _cores() -> int | None:
    """Return the number of cores that the process may use, else of all."""
    import psutil

    try:
        return len(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error):  # macOS has no affinity
        return os.cpu_count()


def _os() -> str | None:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True) or None


def _driver_version() -> str | None:
    try:
        text = (_DRIVER / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else None
