"""Runtimes and switches of a measurement on CUDA, or on the CPU in a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.sections import (
    Bounds,
    CudaProviderPolicy,
    DeterminismPolicy,
    Instruments,
    RuntimePolicy,
)
from gate.records.runtime import CPU_PROVIDER, ORT, RUNTIMES, RuntimeName
from gate.reference.environment import describe_environment, deterministic
from gate.runtimes import selection
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch

Role = Literal["ort-cpu", "ort-cuda", "ort-cuda-optimized", "torch-cuda"]
BASELINE: Role = "ort-cpu"
ON_CUDA: tuple[Role, ...] = ("ort-cuda", "ort-cuda-optimized", "torch-cuda")

_ON_ORT: tuple[Role, ...] = ("ort-cuda", "ort-cuda-optimized")
_ON_TORCH: tuple[Role, ...] = ("torch-cuda",)
_NUMBERS_ONLY = Instruments(probes=False, search_inputs=0, graph=False)
"""Instruments that a switch can affect: samples and stability."""
_TORCH_KIND = "dry-run-torch"


@dataclass(frozen=True)
class Device:
    """A CUDA device. With `dry`, the CPU replaces it, to test the procedure."""

    dry: bool = False

    def name(self, role: Role) -> RuntimeName:
        """Return the runtime's name, which is never that of a CUDA runtime in a dry run."""
        return f"dry-run-{role}" if self.dry and role != BASELINE else role

    def prepare(self) -> None:
        """Register PyTorch on the CPU as a runtime in a dry run."""
        if self.dry:
            selection.BUILTIN[_TORCH_KIND] = f"{__name__}:TorchOnCpu"

    def absent_reason(self) -> str | None:
        """Return why nothing can be measured on this machine, or None if it can."""
        from gate.runtimes.ort import cuda_absent_reason, cuda_unusable_reason

        return None if self.dry else cuda_absent_reason() or cuda_unusable_reason()

    def describe(self) -> dict[str, Any]:
        """Return the machine and the versions of the libraries."""
        with deterministic(DeterminismPolicy()) as switches:
            plain = describe_environment(switches).to_plain()
        names = ("gpu", "driver", "cuda", "cudnn", "cpu", "versions")
        return {"dry_run": self.dry} | {name: plain.get(name) for name in names}

    def runtime(self, role: Role, bounds: Bounds | None) -> RuntimePolicy:
        """Return the policy of a runtime. `bounds` replace the default ones on CUDA."""
        if role == BASELINE:
            return RuntimePolicy(required="always", bounds=exact_bounds("cpu", classes=True))
        options: dict[str, Any] = {}
        if self.dry and RUNTIMES[role].optimization is None:
            options = {"kind": _TORCH_KIND}
        elif self.dry:
            level = RUNTIMES[role].optimization
            session = {"providers": [CPU_PROVIDER], "graph_optimization_level": level}
            options = {"kind": ORT, "options": session}
        bounds = bounds or exact_bounds("cuda", classes=True)
        return RuntimePolicy(required="always", bounds=bounds, **options)


class TorchOnCpu(Runtime):
    """PyTorch on the CPU, which replaces `torch-cuda` in a dry run."""

    promises = Promises(CPU_PROVIDER, "cuda")
    runs: ClassVar[Literal["file", "model"]] = "model"
    isolated: ClassVar[bool] = False

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,  # noqa: ARG002 - it takes none
        conditions: Conditions,  # noqa: ARG002 - PyTorch's own switches
        example: Batch,  # noqa: ARG002 - nothing is traced
    ) -> Session:
        assert file.in_torch is not None
        return _Float32Session(file.in_torch("cpu"))


class _Float32Session(Session):
    """A session that declares its precision, which the gate requires of third-party runtimes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self, batch: Batch) -> list[Any]:
        return list(self._session.run(batch))

    def proof(self) -> Proof:
        proof = self._session.proof()
        return Proof(
            proof.providers_active,
            session_options=proof.session_options,
            versions=proof.versions,
            precision="float32",
        )


@dataclass(frozen=True)
class Setting:
    """Switches of PyTorch and ONNX Runtime, and the runtimes that they affect."""

    name: str
    roles: tuple[Role, ...]
    tf32: bool = False
    cudnn_deterministic: bool = True
    search: Literal["DEFAULT", "HEURISTIC", "EXHAUSTIVE"] = "HEURISTIC"
    algorithms: bool = False
    """Whether only deterministic algorithms are allowed."""
    every_instrument: bool = False
    threads: int | None = None
    """Number of threads, or None for that of the machine (one in a dry run)."""
    switches: dict[str, str] = field(default_factory=dict)
    """Environment variables that CUDA reads when it starts."""

    @property
    def in_corpus(self) -> bool:
        """Return True if the subjects are entries of the corpus."""
        return self.name.startswith("corpus")

    def environment(self, device: Device) -> dict[str, str]:
        """Return the environment variables of a measuring process."""
        threads = self.threads or (1 if device.dry else None)
        return self.switches | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})

    def policy(self, device: Device, *, proposed: tuple[Bounds, float] | None = None) -> Policy:
        """Return the default policy with these switches.

        proposed: bounds of the CUDA runtimes, and of probes.
        """
        instruments = Instruments() if self.every_instrument else _NUMBERS_ONLY
        if proposed is not None:
            instruments = instruments.model_copy(update={"probe_noise_ratio": proposed[1]})
        roles = self.roles
        if not any(RUNTIMES[role].engine == "onnxruntime" for role in roles):
            roles = (*roles, BASELINE)  # A policy needs a runtime that runs the file.
        bounds = proposed[0] if proposed else None
        return Policy(
            task="auto",
            determinism=DeterminismPolicy(
                tf32=self.tf32,
                cudnn_deterministic=self.cudnn_deterministic,
                algorithms=self.algorithms,
                threads=self.threads or (1 if device.dry else None),
            ),
            cuda_provider=CudaProviderPolicy(cudnn_conv_algo_search=self.search),
            instruments=instruments,
            runtimes={device.name(role): device.runtime(role, bounds) for role in roles},
        )


SWITCHED: Sequence[Setting] = (
    Setting("tf32", ON_CUDA, tf32=True),
    Setting("search-default", _ON_ORT, search="DEFAULT"),
    Setting("search-exhaustive", _ON_ORT, search="EXHAUSTIVE"),
    Setting("cudnn-free", _ON_TORCH, cudnn_deterministic=False),
    Setting(
        "deterministic",
        ON_CUDA,
        algorithms=True,
        switches={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
)
DEFAULT = Setting("default", (BASELINE, *ON_CUDA), every_instrument=True)
CORPUS = Setting("corpus", (BASELINE, *_ON_ORT), every_instrument=True, threads=1)
CORPUS_IN_TORCH = Setting("corpus-torch", _ON_TORCH, every_instrument=True, threads=1)
SETTINGS = {setting.name: setting for setting in (DEFAULT, *SWITCHED, CORPUS, CORPUS_IN_TORCH)}
