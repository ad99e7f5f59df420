"""Another ONNX file as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gate.data.input_binding import InputBinding
from gate.errors import ModelError
from gate.onnx_file.tested_file import TestedFile
from gate.reference.onnx_reference import OnnxReference, RuntimeReference
from gate.reference.reference import ReferenceSession
from gate.reference.torch_reference import TorchReference
from gate.reference.torch_session import TorchSession, is_dispatched
from gate.storage.arrays import Batch, OutputArray


@dataclass(frozen=True)
class OnnxFileReference(TorchReference):
    """A file that ONNX Runtime computes in float32, without optimizations.

    In float64 and under random rounding its nodes are modules of PyTorch.
    """

    module: OnnxReference

    @classmethod
    def from_file(cls, file: TestedFile) -> OnnxFileReference:
        """Read a file with its external data. Raises DigestMismatch, ModelError."""
        return cls(OnnxReference.from_file(file))

    def for_file(self, file: TestedFile) -> OnnxFileReference:
        """Return the reference with the inputs and outputs of a file in its order. Raises
        ModelError for a copy of the reference, and for names of which only some are the same."""
        subject = file.subject
        own = self.module.file
        if own is not None and file.is_copy_of(own):
            raise ModelError(
                f"the reference {own.path} is the very file that is judged, or a copy "
                "of it, so the check would prove nothing. Name the file that it was made from."
            )
        inputs, outputs = ([s.name for s in each] for each in (subject.inputs, subject.outputs))
        return OnnxFileReference(self.module.arranged(inputs, outputs), device=self.device)

    @property
    def file(self) -> Path | None:
        """The path of the file; None: it was read from memory."""
        return None if self.module.file is None else self.module.file.path

    def session(self, binding: InputBinding) -> ReferenceSession:
        """Return a session of ONNX Runtime on the CPU, of PyTorch on another device."""
        if self.device != "cpu" or self.module.loaded is None:
            return super().session(binding)
        return _FileSession(self.module, binding, device=self.device, original=self.original)


class _FileSession(TorchSession):
    """Runs the file in ONNX Runtime, and inside of a dispatch mode in PyTorch."""

    def __init__(
        self,
        model: OnnxReference,
        binding: InputBinding,
        *,
        device: str,
        original: nn.Module | None,
    ) -> None:
        super().__init__(model, binding, device=device, original=original)
        self._file = RuntimeReference(model, binding)

    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs, those of 16 bits as float32. Raises what ONNX Runtime raises."""
        return super().run(batch) if is_dispatched() else self._file.run(batch)

    def run_operators(self, batch: Batch, outputs: list[OutputArray]) -> list[OutputArray]:
        """Return the outputs of the modules."""
        del outputs
        return super().run(batch)
