"""The interface of a reference: the model that defines the expected outputs of a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from gate.data.input_binding import InputBinding
from gate.model.model_state import ModelState
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import ModelCode
from gate.runtimes.runtime import Session
from gate.storage.arrays import Batch, OutputArray
from gate.storage.digest import Digest

if TYPE_CHECKING:
    from gate.reference.float64 import Float64Reference


class ReferenceSession(Session):
    """A reference that runs on the inputs of one file.

    Outside of a dispatch mode `run` computes in float32, except for what the model keeps in
    float64. Inside of one (`gate.reference.random_rounding`, `gate.reference.choices`) it computes
    with PyTorch operators, which the mode intercepts.
    """

    state: ModelState
    """Parameters and buffers that a run changes. They are restored after each run."""
    keys: tuple[str | None, ...] = ()
    """The model's name of each output of the last run, or None."""

    @abstractmethod
    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs for a batch in the model's order. May raise any exception."""

    def run_operators(self, batch: Batch, outputs: list[OutputArray]) -> list[OutputArray]:
        """Return the outputs as computed by PyTorch operators. `outputs`: the result of `run`."""
        del batch
        return outputs


class ReferenceModel(ABC):
    """The model that defines the expected outputs, in eval mode and without gradients.

    `gate.reference.torch_reference.TorchReference` wraps an nn.Module,
    `gate.reference.onnx_file_reference.OnnxFileReference` an ONNX file. Only the packages
    reference, model, weights and localize may use `module`.
    """

    module: nn.Module
    """The module with its named inner values (outputs of submodules) and weights."""

    @property
    def file(self) -> Path | None:
        """The ONNX file of the reference, None for a PyTorch model."""
        return None

    @abstractmethod
    def for_file(self, file: TestedFile) -> ReferenceModel:
        """Return the reference with the names of the file's inputs and outputs. Raises ModelError
        if the reference is the same file, or if only some of the names match."""

    @abstractmethod
    def parameters(self) -> tuple[str, ...] | None:
        """Return the names of the inputs, in order, or None if it accepts any names."""

    @abstractmethod
    def keeps_double(self, file: TestedFile) -> bool:
        """Return True if float64 tensors stay float64 in a measurement. Otherwise they become
        float32."""

    @abstractmethod
    def copy(self, *, device: str = "cpu", double: bool = False) -> Self:
        """Return a deep copy in float32 on a device. `double`: see `keeps_double`. Raises
        ModelError."""

    @abstractmethod
    def session(self, binding: InputBinding) -> ReferenceSession:
        """Return a session on the device of the reference. The session then owns the reference."""

    @abstractmethod
    def float64(self, binding: InputBinding) -> Float64Reference:
        """Return the reference in float64. Raises ModelError."""

    @abstractmethod
    def flat(self, binding: InputBinding, *, without_submodules: bool) -> nn.Module:
        """Return a module that takes positional inputs and returns a tuple of tensors, for
        `torch.jit.trace`, which is faster for a module `without_submodules`."""

    @abstractmethod
    def weights_digest(self) -> Digest:
        """Return the SHA-256 over names, dtypes, shapes and bytes of all weights. Raises
        PolicyError for weights without bytes."""

    @abstractmethod
    def collect_code(self, factory: str = "", *, chain: str = "") -> ModelCode:
        """Return the digests of the source files and the versions of the packages."""
