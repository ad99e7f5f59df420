"""`gate doctor`: what this machine can prove."""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gate import installation
from gate.commands.options import TRACKING_URI
from gate.commands.options import tracking_uri as address_of
from gate.commands.result import CommandResult, ExitCode, machine_options, table_result
from gate.errors import GateError, PackageMissing
from gate.storage.safe_text import redacted

if TYPE_CHECKING:
    from gate.commands.provider_trial import ProviderTrial


def active_provider(provider: str) -> tuple[str, str]:
    """Return the provider that runs a small model when `provider` is requested, and the output."""
    import numpy as np

    from gate.commands.provider_trial import residual_network
    from gate.onnx_file.sessions import create_session
    from gate.records.runtime import CPU_PROVIDER

    def run() -> str:
        providers = [provider] if provider == CPU_PROVIDER else [provider, CPU_PROVIDER]
        session = create_session(residual_network(), providers=providers)
        (logits,) = session.run(None, {"images": np.ones((1, 3, 32, 32), np.float32)})
        if not np.isfinite(logits).all():
            raise RuntimeError(f"a model of finite numbers returned {logits.tolist()}")
        return str(session.get_providers()[0])

    return quietly(run)


def quietly(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `call`, and what C libraries wrote to stderr during the call."""
    from gate.onnx_file.sessions import captured_stderr

    with captured_stderr() as lines:
        result = call()
    return result, "\n".join(lines)


def reason_of(printed: str) -> str:
    """Return ONNX Runtime's reason for not loading a library, without prefixes and colors."""
    match = re.search(r"with error: ([^\n\x1b]+)", printed)
    return match[1].strip() if match else " ".join(printed.split())[-200:] or "no reason given"


State = Literal["ok", "missing", "absent", "conflict"]


@dataclass(frozen=True)
class Symptom:
    """The result of one check. `absent`: not available on this machine, which is not a fault.
    `conflict`: another package overwrites its files."""

    name: str
    state: State
    seen: str
    remedy: str | None = None
    needed: bool = False
    """True if no file can be judged without it."""


def _broken(name: str, error: Exception, remedy: str, *, needed: bool = False) -> Symptom:
    return Symptom(name, "missing", f"{type(error).__name__}: {error}", remedy, needed)


@dataclass(frozen=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Symptom, ...]

    @property
    def can_judge(self) -> bool:
        """Return True if a file can be judged on the CPU of this machine."""
        return all(finding.state == "ok" for finding in self.findings if finding.needed)

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict."""
        return {
            "can_judge": self.can_judge,
            "findings": [asdict(finding) for finding in self.findings],
        }


_STYLES = {"ok": "green", "missing": "bold red", "absent": "yellow",
           "conflict": "bold red"}  # fmt: skip


@click.command("doctor", short_help="Check runtimes and libraries on this machine.")
@TRACKING_URI
@machine_options
def command(tracking_uri: str | None) -> CommandResult:
    """Check which runtimes and libraries work on this machine, and how to fix those that do not.

    Each provider runs a tiny model. Exit code 0 if gate check works on the CPU, 2 if not.

    \b
    Examples:
      gate doctor
      gate doctor --json
      gate doctor --tracking-uri http://127.0.0.1:5000
    """
    from gate.commands.progress import spinner

    address = address_of(tracking_uri)

    def preflight() -> None:
        from gate.mlflow_client.connection import check_server

        check_server(address)

    with spinner("checking this machine"):
        diagnosis = examine_machine(Path.cwd(), registry=redacted(address), preflight=preflight)
    findings, can_judge = diagnosis.findings, diagnosis.can_judge
    return table_result(
        diagnosis.to_plain(),
        ("what", "state", "seen"),
        [(finding.name, finding.state, finding.seen) for finding in findings],
        *(f"{f.name}: {f.remedy}" for f in findings if f.remedy and f.state != "ok"),
        "This machine can judge files on the CPU."
        if can_judge
        else "This machine can't judge files: fix what is missing.",
        status=ExitCode.DONE if can_judge else ExitCode.NOT_JUDGED,
        styles=_STYLES,
    )


# ONNX Runtime also lists providers that do not load, so each one runs a tiny model.


_NEEDED_MODULES = ("numpy", "torch", "onnx", "onnxruntime", "pydantic", "scipy")

_OPTIONAL_MODULES = ("torchvision", "matplotlib", "rich")

_NEEDED_FOR = {
    "torch": f"gate check {installation.remedy(installation.TORCH)}",
    "onnxruntime": f"gate check {installation.remedy(installation.ONNX_RUNTIME)}",
    "torchvision": "gate preprocess compare --implementations torchvision and the pipeline need "
    "it: pip install torchvision, in the version that matches your torch",
    "matplotlib": f"a report with charts {installation.remedy('charts')}",
}
"""Module to the message if it is not installed."""

_FREE_BYTES = 2 * 1024**3
"""Enough for several checkpoints, exports, registry copies and reports of a ResNet."""


def examine_machine(folder: Path, *, registry: str, preflight: Callable[[], None]) -> Diagnosis:
    """Run all checks. `preflight` raises GateError if `registry` (an address without secrets) is
    not usable; `folder` is the working folder."""
    crashes = installation.import_crashes()
    return Diagnosis(
        (
            *_modules(crashes),
            _onnxruntime_conflict(),
            *((_untested(crashes),) if crashes else (_cpu_session(), *_cuda(), *_runtimes())),
            _registry(registry, preflight),
            _dvc(),
            _disk(folder),
        )
    )


def _untested(crashes: Mapping[str, str]) -> Symptom:
    why = f"not tried: {' and '.join(crashes)} would crash this process"
    remedy = "Reinstall the packages that are named above."
    return Symptom("ort-cpu", "missing", why, remedy, needed=True)


def _modules(crashes: Mapping[str, str]) -> Iterator[Symptom]:
    yield Symptom("python", "ok", platform.python_version(), needed=True)
    for name in (*_NEEDED_MODULES, *_OPTIONAL_MODULES):
        needed = name in _NEEDED_MODULES
        remedy = f"Reinstall it: pip install --force-reinstall {installation.distribution(name)}"
        if name in crashes:
            yield Symptom(name, "missing", crashes[name], remedy, needed)
            continue
        try:
            too_old = installation.outdated(name)
            if too_old is not None:
                yield Symptom(name, "missing", too_old, "Install a newer version.", needed)
                continue
            version = getattr(importlib.import_module(name), "__version__", None)
            yield Symptom(name, "ok", str(version or metadata.version(name)), needed=needed)
        except Exception as error:  # a broken binary package raises almost anything
            state: State = "missing" if needed else "absent"
            yield (
                _broken(name, error, remedy, needed=needed)
                if installation.is_installed(name)
                else Symptom(name, state, "not installed", _NEEDED_FOR[name], needed)
            )


def _onnxruntime_conflict() -> Symptom:
    """Report whether several ONNX Runtime packages are installed, which overwrite each other."""
    installed = [f"{name} {version}" for name, version in installation.onnx_runtimes().items()]
    if len(installed) < 2:
        return Symptom("one onnxruntime package", "ok", ", ".join(installed) or "none")
    return Symptom(
        "one onnxruntime package",
        "conflict",
        f"{' and '.join(installed)} overwrite each other",
        f"pip uninstall {' '.join(installation.ONNX_RUNTIMES)}, then install the one you need. The "
        "runtime openvino needs none of them: pip install 'parity-gate[openvino]'.",
    )


def _cpu_session() -> Symptom:
    from gate.records.runtime import CPU_PROVIDER

    if not installation.is_installed(installation.ONNX_RUNTIME):
        remedy = "Install ONNX Runtime: see onnxruntime."
        return Symptom("ort-cpu", "missing", "ONNX Runtime is not installed", remedy, needed=True)
    try:
        active, _ = active_provider(CPU_PROVIDER)
    except Exception as error:
        package = installation.distribution(installation.ONNX_RUNTIME)
        remedy = f"Reinstall ONNX Runtime: pip install --force-reinstall {package}"
        return _broken("ort-cpu", error, remedy, needed=True)
    state: State = "ok" if active == CPU_PROVIDER else "missing"
    return Symptom("ort-cpu", state, f"ran a model on {active}", needed=True)


def _cuda() -> tuple[Symptom, ...]:
    needed = (installation.TORCH, installation.ONNX_RUNTIME)
    missing = [name for name in needed if not installation.is_installed(name)]
    if missing:
        observation = f"not tried without {' and '.join(missing)}"
        return (Symptom("CUDA", "absent", observation, "Install the packages above first."),)
    try:
        return tuple(cuda())
    except Exception as error:  # torch or ONNX Runtime is broken; both are reported above
        return (_broken("CUDA", error, "Fix torch and onnxruntime first."),)


def _runtimes() -> Iterator[Symptom]:
    """Yield the symptoms of the runtimes that are not built in."""
    from gate.records.runtime import ORT, RUNTIMES

    try:
        from gate.runtimes.selection import runtime_statuses

        rows = [row for row in runtime_statuses() if row.name not in RUNTIMES and row.kind != ORT]
    except Exception as error:
        yield _broken("runtimes", error, "Fix the package in the error message.")
        return
    remedy = "See gate runtimes for details and docs/runtimes.md for the installation."
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        observation = row.reason or f"{row.provider} {versions}".strip()
        state: State = "missing" if row.state == "broken" else "absent"
        yield (
            Symptom(row.name, "ok", observation)
            if row.state in ("ok", "by options")
            else Symptom(row.name, state, observation, remedy)
        )


def _registry(registry: str, preflight: Callable[[], None]) -> Symptom:
    try:
        preflight()
    except PackageMissing as error:
        return Symptom("MLflow", "absent", f"gate promote {error}", "gate check needs no registry.")
    except GateError as error:
        remedy = "Fix this, or set MLFLOW_TRACKING_URI. gate check needs no registry."
        return Symptom("MLflow", "missing", str(error), remedy)
    return Symptom("MLflow", "ok", f"usable at {registry}")


def _dvc() -> Symptom:
    try:
        return Symptom("DVC", "ok", metadata.version("dvc"))
    except metadata.PackageNotFoundError:
        remedy = f"make repro {installation.remedy('pipeline')}. gate check needs no DVC."
        return Symptom("DVC", "absent", "not installed", remedy)


def _disk(folder: Path) -> Symptom:
    free = shutil.disk_usage(folder).free
    free_space = f"{free / 1024**3:.1f} GiB free at {folder}"
    if free >= _FREE_BYTES:
        return Symptom("disk", "ok", free_space)
    return Symptom("disk", "missing", free_space, f"Free at least {_FREE_BYTES / 1024**3:.0f} GiB.")


_DRIVER_LIBRARY = "libcuda.so.1"

_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]'"

_REPLACE = f"pip uninstall onnxruntime; {_INSTALL}"
"""Both packages install the same files, so onnxruntime must be removed first."""


def cuda() -> Iterator[Symptom]:
    """Yield the symptoms of device, libraries and provider.

    Without a device, missing libraries are `absent`, not `missing`.
    """
    from gate.runtimes.ort import cuda_absent_reason, cuda_unusable_reason

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
    session = _cuda_session(device=absent is None)
    yield session
    if not absent and not unusable and session.state == "ok":
        yield from _cuda_model()


def _cuda_model() -> Iterator[Symptom]:
    """Run a small residual network on CUDA: yield the placement of its nodes, and TF32."""
    from gate.commands.provider_trial import EXACT, try_provider
    from gate.records.runtime import CUDA_PROVIDER

    remedy = "Fix the CUDA problems above, and update the driver and onnxruntime-gpu."
    try:
        trial, _ = quietly(try_provider)
    except Exception as error:  # a broken driver or library raises almost anything
        yield _broken("CUDA model", error, remedy)
        return
    counts = ", ".join(f"{n} on {name}" for name, n in trial.nodes_per_provider.items())
    observation = (
        f"a residual network ran its nodes: {counts}; with TF32 off it differs from the CPU by "
        f"{trial.exact_error:.2g} of the largest output"
    )
    on_cuda = trial.nodes_per_provider.get(CUDA_PROVIDER, 0) > 0 and not trial.cpu_nodes
    state: State = "ok" if on_cuda and trial.exact_error <= EXACT else "missing"
    yield Symptom("CUDA model", state, observation, remedy if state == "missing" else None)
    yield Symptom("TF32", "ok", f"{_tf32(trial)}. gate check sets determinism.tf32 on both sides")


def _tf32(trial: ProviderTrial) -> str:
    """Name the libraries that compute in TF32 by default."""
    from gate.reference.environment import read_determinism

    switches = read_determinism()
    sides = {
        "ONNX Runtime": trial.reduces,
        "PyTorch's matmul": switches.tf32_matmul,
        "cuDNN in PyTorch": switches.tf32_cudnn,
    }
    states = ", ".join(f"{'on' if on else 'off'} in {name}" for name, on in sides.items())
    return f"by default {states} (ONNX Runtime: {trial.default_error:.2g} of the largest output)"


def _device() -> str:
    import torch

    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _cuda_libraries(*, device: bool) -> Symptom:
    """Load each shared library that ONNX Runtime's CUDA provider needs."""
    import onnxruntime

    version = getattr(onnxruntime, "cuda_version", "")
    if not version:
        observation = "this build of ONNX Runtime has no CUDA"
        remedy = _REPLACE if device else f"Not needed without a CUDA device. With one: {_REPLACE}"
        return Symptom("CUDA libraries", "absent", observation, remedy)
    quietly(onnxruntime.preload_dlls)
    missing = [name for name in _library_names(int(version.split(".")[0])) if not _loadable(name)]
    if not missing:
        return Symptom("CUDA libraries", "ok", f"all for CUDA {version}")
    remedies = []
    if _DRIVER_LIBRARY in missing:
        remedies.append("libcuda.so.1 comes with the NVIDIA driver: install the driver, or start "
                        "the container with --gpus all.")  # fmt: skip
    if set(missing) - {_DRIVER_LIBRARY}:
        remedies.append(f"The others: {_INSTALL}")
    state: State = "missing" if device else "absent"
    return Symptom("CUDA libraries", state, f"missing: {', '.join(missing)}", " ".join(remedies))


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


def _loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _cuda_session(*, device: bool) -> Symptom:
    import onnxruntime

    from gate.records.runtime import CUDA_PROVIDER

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
    observation = f"listed, but the model ran on {active}: {reason_of(printed)}"
    remedy = "Fix the CUDA problems above; until then only the CPU can be judged."
    return Symptom("ort-cuda", "missing" if device else "absent", observation, remedy)
