"""PyTorch on the CPU in the place of `torch-cuda`, so that a machine without a device walks the
same way. Of ONNX Runtime the kind `ort` stands in, on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from gate.records.runtime import CPU_PROVIDER
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch

KIND = "dry-run-torch"
PLACE = f"{__name__}:TorchOnCpu"


class TorchOnCpu(Runtime):
    """Runs the model, not the file."""

    promises = Promises(CPU_PROVIDER, "cuda")
    runs: ClassVar[Literal["file", "model"]] = "model"
    apart: ClassVar[bool] = False

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,  # noqa: ARG002 - it takes none
        conditions: Conditions,  # noqa: ARG002 - PyTorch's own switches
        example: Batch,  # noqa: ARG002 - nothing is traced
    ) -> Session:
        """Raises EvidenceError as `torch-cuda` does."""
        assert file.in_torch is not None
        return _InFloat32(file.in_torch("cpu"))


class _InFloat32(Session):
    """A runtime that is none of the gate's own has to say in which precision it computes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self, batch: Batch) -> list[Any]:
        return list(self._session.run(batch))

    def proof(self) -> Proof:
        of_torch = self._session.proof()
        return Proof(
            of_torch.providers_active,
            session_options=of_torch.session_options,
            versions=of_torch.versions,
            precision="float32",
        )
