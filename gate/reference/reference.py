"""The interface of a reference: the model that a file must compute like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from gate.data.input_binding import InputBinding
from gate.model.model_state import ModelState
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import ModelCode, Subject
from gate.runtimes.runtime import Session
from gate.storage.arrays import Batch, OutputArray
from gate.storage.digest import Digest

if TYPE_CHECKING:
    from gate.reference.float64 import Float64Reference


class ReferenceSession(Session):
    """A reference that computes the inputs of one file.

    Outside of a dispatch mode `run` computes in float32, but for what the model keeps in float64.
    Inside of one (`gate.reference.random_rounding`, `gate.reference.choices`) it computes with
    PyTorch's operators, which the mode sees and may change.
    """

    state: ModelState
    """Parameters and buffers that a run changes; they are restored after each run."""
    keys: tuple[str | None, ...] = ()
    """Under which name of its own the model returned each output of the last run, or None."""

    @abstractmethod
    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs for a batch, in the model's order. Raises anything."""

    def run_operators(self, batch: Batch, outputs: list[OutputArray]) -> list[OutputArray]:
        """Return the outputs by PyTorch's operators. `outputs`: what `run` returned."""
        del batch
        return outputs


class ReferenceModel(ABC):
    """The model that a file must compute like: in eval mode, without gradients.

    `gate.reference.torch_reference.TorchReference` is an nn.Module,
    `gate.reference.onnx_file_reference.OnnxFileReference` another ONNX file. Only the packages
    reference, model, weights and localize may use `module`.
    """

    module: nn.Module
    """Its named inner values (outputs of submodules) and its weights."""

    @property
    def file(self) -> Path | None:
        """The ONNX file that it was read from; None: it is a model of PyTorch."""
        return None

    @abstractmethod
    def for_file(self, file: TestedFile) -> ReferenceModel:
        """Return the reference with the inputs and outputs of a file under its names. Raises
        ModelError for a reference that is that very file, or shares only some of its names."""

    @abstractmethod
    def parameters(self) -> frozenset[str] | None:
        """Return the names of its inputs; None where it takes any."""

    @abstractmethod
    def keeps_double(self, subject: Subject) -> bool:
        """Return True if what is in float64 stays so when a file is measured, else it becomes
        float32."""

    @abstractmethod
    def copy(self, *, device: str = "cpu", double: bool = False) -> Self:
        """Return a deep copy in float32 on a device. `double`: as `keeps_double`. Raises
        ModelError."""

    @abstractmethod
    def session(self, binding: InputBinding) -> ReferenceSession:
        """Return a session on the device of the reference, which may not be used otherwise from
        then on."""

    @abstractmethod
    def float64(self, binding: InputBinding) -> Float64Reference:
        """Return the reference in float64. Raises ModelError."""

    @abstractmethod
    def flat(self, binding: InputBinding, *, own_tensors: bool) -> nn.Module:
        """Return a module that takes the inputs by position and returns a tuple of tensors, for
        `torch.jit.trace`. `own_tensors`: without submodules, which traces faster."""

    @abstractmethod
    def weights_digest(self) -> Digest:
        """Return the SHA-256 over names, dtypes, shapes and bytes of all weights. Raises
        PolicyError for weights without bytes."""

    @abstractmethod
    def collect_code(self, factory: str = "", *, chain: str = "") -> ModelCode:
        """Return the digests of its source files and the versions of its packages."""
