"""PyTorch on CUDA: how far the model itself moves between the CPU and the device."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gate.errors import EvidenceError, RuntimeUnusable
from gate.records.runtime import CUDA_PROVIDER, RuntimeName
from gate.runtimes.runtime import Batch, Conditions, Promises, RunnableFile, Runtime, Session


class TorchCuda(Runtime):
    """Runs the model, not the file."""

    name: ClassVar[RuntimeName] = "torch-cuda"
    promises = Promises(CUDA_PROVIDER, "cuda")
    runs: ClassVar[Literal["file", "model"]] = "model"
    apart: ClassVar[bool] = False

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - it takes none
        """Without a device."""
        from gate.runtimes.cuda import cuda_absent_reason

        return cuda_absent_reason()

    def versions(self) -> dict[str, str]:
        """Of PyTorch."""
        import torch

        return {"torch": str(torch.__version__)}

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,  # noqa: ARG002 - it takes none
        conditions: Conditions,  # noqa: ARG002 - PyTorch's own switches
        example: Batch,  # noqa: ARG002 - nothing is traced
    ) -> Session:
        """Raises RuntimeUnusable where PyTorch can't use the device that is there."""
        from gate.runtimes.cuda import cuda_unusable_reason

        unusable = cuda_unusable_reason()
        if unusable is not None:
            raise RuntimeUnusable(unusable)
        if file.in_torch is None:
            raise EvidenceError(
                "torch-cuda runs the model, and only a file was given. Measure it where the model "
                "is, by gate check or gate.measure."
            )
        return file.in_torch("cuda")
