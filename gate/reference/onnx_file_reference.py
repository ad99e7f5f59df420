"""A reference that is an ONNX file."""

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
    """An ONNX file that ONNX Runtime runs in float32 without optimizations.

    In float64 and with random rounding, its nodes run as PyTorch modules.
    """

    module: OnnxReference

    @classmethod
    def from_file(cls, file: TestedFile) -> OnnxFileReference:
        """Read a file with its external data. Raises DigestMismatch, ModelError."""
        return cls(OnnxReference.from_file(file))

    def for_file(self, file: TestedFile) -> OnnxFileReference:
        """Return the reference with inputs and outputs in the order of the judged file.

        Raises ModelError if the file is a copy of the reference, or if only some of the names
        match.
        """
        reference_file = self.module.file
        if reference_file is not None and file.is_copy_of(reference_file):
            raise ModelError(
                f"the reference {reference_file.path} is identical to the judged file, so the "
                "check would prove nothing. Pass the file that it was made from."
            )
        return OnnxFileReference(self.module.arranged(file.subject), device=self.device)

    @property
    def file(self) -> Path | None:
        """The path of the file, None if it was read from memory."""
        return None if self.module.file is None else self.module.file.path

    def session(self, binding: InputBinding) -> ReferenceSession:
        """Return an ONNX Runtime session on the CPU, or a PyTorch session on another device."""
        if self.device != "cpu" or self.module.loaded is None:
            return super().session(binding)
        return _FileSession(self.module, binding, device=self.device, original=self.original)


class _FileSession(TorchSession):
    """Runs the file in ONNX Runtime, or in PyTorch inside a dispatch mode."""

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
        """Return all outputs, 16-bit floats as float32. Raises any error of ONNX Runtime."""
        return super().run(batch) if is_dispatched() else self._file.run(batch)

    def run_operators(self, batch: Batch, outputs: list[OutputArray]) -> list[OutputArray]:
        """Return the outputs of the file's nodes as PyTorch modules."""
        del outputs
        return super().run(batch)
