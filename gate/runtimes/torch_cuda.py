"""PyTorch on CUDA."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from gate.errors import EvidenceError, RuntimeAbsent, RuntimeUnusable, first_line
from gate.records.runtime import CUDA_PROVIDER, RuntimeName
from gate.runtimes.runtime import Conditions, Promises, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch

_CPU_ALONE = re.compile(
    r"same device"  # torch.arange(n) in forward, a tensor as plain attribute, a state of an LSTM
    r"|\(torch\.[A-Za-z]+Tensor\)"  # a weight of a convolution; on CUDA torch.cuda.FloatTensor
    r"|can't convert cuda"  # to numpy
)
"""Parts of PyTorch's messages for models that only support the CPU."""


class TorchCudaRuntime(Runtime):
    """Runs the PyTorch model on CUDA instead of the file."""

    name: ClassVar[RuntimeName] = "torch-cuda"
    promises = Promises(CUDA_PROVIDER, "cuda")
    runs: ClassVar[Literal["file", "model"]] = "model"
    isolated: ClassVar[bool] = False

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - it takes none
        """Return why there is no CUDA device, or None."""
        from gate.runtimes.ort import cuda_absent_reason

        return cuda_absent_reason()

    def versions(self) -> dict[str, str]:
        """Return the version of PyTorch."""
        import torch

        return {"torch": str(torch.__version__)}

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,  # noqa: ARG002 - it takes none
        conditions: Conditions,  # noqa: ARG002 - PyTorch's own switches
        example: Batch,
    ) -> Session:
        """Open a session. Raises RuntimeUnusable if PyTorch can't use the device, RuntimeAbsent if
        the model can't be moved to it."""
        from gate.runtimes.ort import cuda_unusable_reason

        unusable = cuda_unusable_reason()
        if unusable is not None:
            raise RuntimeUnusable(unusable)
        if file.in_torch is None:
            raise EvidenceError(
                "torch-cuda runs the model, and only a file was given. Measure it where the model "
                "is, by gate check or gate.measure."
            )
        session = file.in_torch("cuda")
        try:
            session.run(example)
        except Exception as error:
            if _CPU_ALONE.search(str(error)):
                raise RuntimeAbsent(
                    "the model runs on the CPU alone, because it makes or keeps tensors there: "
                    f"{first_line(error)}"
                ) from error
            # Other errors may be specific to this small batch; the samples will show them.
        return session
