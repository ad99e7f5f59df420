"""Where the runtimes of CUDA run: on a device or, in a dry run, on the CPU in its place.

This is the only place that knows which of them it is: all else asks for a role and gets a runtime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.cuda import stand_in
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, DeterminismPolicy, RuntimePolicy
from gate.records.runtime import CPU_PROVIDER, ORT, RUNTIMES, RuntimeName
from gate.reference.environment import describe_environment, deterministic
from gate.runtimes import selection

Role = Literal["ort-cpu", "ort-cuda", "ort-cuda-optimized", "torch-cuda"]
BASELINE: Role = "ort-cpu"
ON_CUDA: tuple[Role, ...] = ("ort-cuda", "ort-cuda-optimized", "torch-cuda")
MARK = "dry run: CPU stands in for CUDA"


@dataclass(frozen=True)
class Device:
    """A CUDA device, or the CPU that stands in for it."""

    dry: bool = False

    @property
    def mark(self) -> str:
        """What each line of the output says; empty of a real device."""
        return MARK if self.dry else ""

    @property
    def threads(self) -> int | None:
        """Of the matrix; None: as PyTorch has them. What a dry run takes says nothing, and the
        machine is somebody else's."""
        return 1 if self.dry else None

    @property
    def slowest_s(self) -> float:
        """A subject that takes longer is ended."""
        return 1200.0 if self.dry else 300.0

    def name(self, role: Role) -> RuntimeName:
        """Under which name the role is measured: nothing of a dry run has the name of a runtime of
        CUDA."""
        return f"dry-run-{role}" if self.dry and role != BASELINE else role

    def runtimes(
        self, roles: Iterable[Role], bounds: Bounds | None = None
    ) -> dict[RuntimeName, RuntimePolicy]:
        """By name, all required. `bounds` of those on CUDA; None: the built-in ones."""
        found = {self.name(role): self._runtime(role, bounds) for role in roles}
        if not any(RUNTIMES[role].engine == "onnxruntime" for role in roles):
            # A policy has at least one runtime that runs the file.
            found[BASELINE] = self._runtime(BASELINE, None)
        return found

    def prepare(self) -> None:
        """Make the runtimes findable in this process."""
        if self.dry:
            selection.BUILTIN[stand_in.KIND] = stand_in.PLACE

    def absent_reason(self) -> str | None:
        """Why nothing can be measured here; None: it can."""
        from gate.runtimes.ort import cuda_absent_reason, cuda_unusable_reason

        return None if self.dry else cuda_absent_reason() or cuda_unusable_reason()

    def describe(self) -> dict[str, Any]:
        """The machine and the libraries; None where there is none."""
        with deterministic(DeterminismPolicy()) as switches:
            plain = describe_environment(switches).to_plain()
        names = ("gpu", "driver", "cuda", "cudnn", "cpu", "versions")
        return {"provider": CPU_PROVIDER if self.dry else "CUDAExecutionProvider"} | {
            name: plain.get(name) for name in names
        }

    def _runtime(self, role: Role, bounds: Bounds | None) -> RuntimePolicy:
        if role == BASELINE:
            return RuntimePolicy(required="always", bounds=exact_bounds("cpu", classes=True))
        bounds = bounds or exact_bounds("cuda", classes=True)
        if not self.dry:
            return RuntimePolicy(required="always", bounds=bounds)
        level = RUNTIMES[role].optimization
        if level is None:
            return RuntimePolicy(required="always", bounds=bounds, kind=stand_in.KIND)
        return RuntimePolicy(
            required="always",
            bounds=bounds,
            kind=ORT,
            options={"providers": [CPU_PROVIDER], "graph_optimization_level": level},
        )
