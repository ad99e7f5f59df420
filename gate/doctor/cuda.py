"""CUDA on this machine: the device, the shared libraries, the provider of ONNX Runtime."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

from gate.doctor.session import active_provider, quietly, reason_of
from gate.doctor.symptom import State, Symptom
from gate.records.runtime import CUDA_PROVIDER
from gate.runtimes.cuda import cuda_absent_reason, cuda_unusable_reason

_DRIVER_LIBRARY = "libcuda.so.1"
_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
_REPLACE = f"pip uninstall onnxruntime; {_INSTALL}"
"""Never the second without the first: the packages overwrite each other's files."""


def cuda() -> Iterator[Symptom]:
    """Device, libraries, provider. Where there is no device, what lacks is absent, not missing."""
    if sys.platform == "darwin":
        yield Symptom("CUDA device", "absent", "there is no CUDA on macOS")
        return
    absent = cuda_absent_reason()
    unusable = None if absent else cuda_unusable_reason()
    if absent:
        yield Symptom("CUDA device", "absent", absent)
    elif unusable:
        yield Symptom("CUDA device", "missing", unusable, "Check the driver with nvidia-smi.")
    else:
        yield Symptom("CUDA device", "ok", _device())
    yield _cuda_libraries(device=absent is None)
    yield _cuda_session(device=absent is None)


def _device() -> str:
    import torch

    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _cuda_libraries(*, device: bool) -> Symptom:
    """The shared libraries that ONNX Runtime's CUDA provider needs, each loaded by name."""
    import onnxruntime

    version = getattr(onnxruntime, "cuda_version", "")
    if not version:
        observation = "this build of ONNX Runtime has no CUDA"
        remedy = _REPLACE if device else f"Nothing, without a CUDA device. With one: {_REPLACE}"
        return Symptom("CUDA libraries", "absent", observation, remedy)
    quietly(onnxruntime.preload_dlls)
    missing = [name for name in _library_names(int(version.split(".")[0])) if not _loads(name)]
    if not missing:
        return Symptom("CUDA libraries", "ok", f"all for CUDA {version}")
    remedies = []
    if _DRIVER_LIBRARY in missing:
        remedies.append("libcuda.so.1 comes with the NVIDIA driver: install the driver, or start "
                        "the container with --gpus all.")  # fmt: skip
    if set(missing) - {_DRIVER_LIBRARY}:
        remedies.append(f"The others: {_INSTALL}")
    state: State = "missing" if device else "absent"
    return Symptom("CUDA libraries", state, f"not there: {', '.join(missing)}", " ".join(remedies))


def _library_names(cuda: int) -> tuple[str, ...]:
    cufft = cuda - 1  # CUDA 12 has cuFFT 11, CUDA 13 has cuFFT 12
    return (
        _DRIVER_LIBRARY,
        f"libcudart.so.{cuda}",
        f"libcublasLt.so.{cuda}",
        f"libcublas.so.{cuda}",
        f"libnvrtc.so.{cuda}",
        f"libcufft.so.{cufft}",
        "libcurand.so.10",
        "libcudnn.so.9",
    )


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _cuda_session(*, device: bool) -> Symptom:
    import onnxruntime

    listed = CUDA_PROVIDER in onnxruntime.get_available_providers()
    if not listed:
        observation = "this build of ONNX Runtime does not list the CUDA provider"
        remedy = "See CUDA libraries."
        return Symptom("ort-cuda", "missing" if device else "absent", observation, remedy)
    try:
        active, printed = active_provider(CUDA_PROVIDER)
    except Exception as error:
        active, printed = "none", f"{type(error).__name__}: {error}"
    if active == CUDA_PROVIDER:
        return Symptom("ort-cuda", "ok", f"ran a model on {active}")
    observation = f"listed, but {active} is what runs: {reason_of(printed)}"
    remedy = "Mend what is named above under CUDA; until then only the CPU can be judged."
    return Symptom("ort-cuda", "missing" if device else "absent", observation, remedy)
