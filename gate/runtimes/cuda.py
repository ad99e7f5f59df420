"""Whether a CUDA device is on this machine, and whether PyTorch can use it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia")
_CONTROL_DEVICE = Path("/dev/nvidiactl")
_WSL_DEVICE = Path("/dev/dxg")
_WSL_LIBRARY = Path("/usr/lib/wsl/lib/libcuda.so.1")


def cuda_absent_reason() -> str | None:
    """Why there is no CUDA device on this machine, in words; None: there is one.

    A device that is there and can't be used (hidden, no driver library) is there: what then
    fails is a failure, not an absence. On WSL the device file alone is not enough, because
    other graphics cards have it too.
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
    """What shows that a CUDA device is on this machine; empty: nothing does."""
    traces = []
    count = torch.cuda.device_count()
    if count > 0:
        traces.append(f"PyTorch sees {count} CUDA device{'s' if count > 1 else ''}")
    traces += [f"{path} exists" for path in (_DRIVER, _CONTROL_DEVICE) if path.exists()]
    if _WSL_DEVICE.exists() and _WSL_LIBRARY.exists():
        traces.append(f"{_WSL_DEVICE} and {_WSL_LIBRARY} exist")
    return traces


def cuda_unusable_reason() -> str | None:
    """Why PyTorch can't use the CUDA device that is on this machine; None: it can."""
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
