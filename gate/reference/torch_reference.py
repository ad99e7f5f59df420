"""A PyTorch model as the reference."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from typing import Self

import onnx
import torch
from torch import nn

from gate.data.input_binding import InputBinding
from gate.errors import PolicyError
from gate.model.forward_signature import PositionalModel, parameters
from gate.model.loading import collect_code
from gate.onnx_file.reading import tensors_of
from gate.onnx_file.release_file import load_graphs
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import ModelCode
from gate.reference.float64 import Float64Reference
from gate.reference.reference import ReferenceModel, ReferenceSession
from gate.reference.torch_session import TorchSession, call_of, copy_model
from gate.storage.digest import Digest

_DOUBLE = "float64"


@dataclass(frozen=True)
class TorchReference(ReferenceModel):
    """A reference that is a PyTorch module."""

    module: nn.Module
    original: nn.Module | None = None
    """The module that `module` is a copy of. None: the state is cloned."""
    device: str = "cpu"

    def for_file(self, file: TestedFile) -> ReferenceModel:
        """Return self: `ForwardSignature` pairs names and positions."""
        del file
        return self

    def parameters(self) -> tuple[str, ...] | None:
        """Return the keyword names of forward, in order, or None if it accepts any."""
        return parameters(self.module)

    def keeps_double(self, file: TestedFile) -> bool:
        """Return True if parts of the model are float64, or if the whole model and inputs, outputs
        or weights of the file are.

        Otherwise the measurement uses float32, like the file: the model was built in float64 and
        exported as a float32 copy, or it is float32 and casts float64 inputs.
        """
        subject = file.subject
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if dtypes >= {torch.float32, torch.float64}:  # a date or a coordinate is lost in float32
            return True
        floats = {spec.dtype for spec in subject.inputs if spec.dtype.startswith("float")}
        gives = any(spec.dtype == _DOUBLE for spec in subject.outputs)
        if _DOUBLE in floats:
            return gives or dtypes != {torch.float32}
        if floats and dtypes == {torch.float64}:
            return _has_double_weights(file)
        return gives

    def copy(self, *, device: str = "cpu", double: bool = False) -> Self:
        """Return a deep copy in float32 and eval mode on a device. Raises ModelError."""
        copied = copy_model(self.module, device=device, double=double)
        return replace(self, module=copied, original=self.module, device=device)

    def session(self, binding: InputBinding) -> ReferenceSession:
        """Return a session that runs the module."""
        return TorchSession(self.module, binding, device=self.device, original=self.original)

    def float64(self, binding: InputBinding) -> Float64Reference:
        """Return a copy in float64. Raises ModelError."""
        return Float64Reference(self.module, binding)

    def flat(self, binding: InputBinding, *, without_submodules: bool) -> nn.Module:
        """Return the module with flat inputs and outputs."""
        flat = PositionalModel(self.module, call_of(self.module, binding))
        return _WithoutModules(flat) if without_submodules else flat

    def weights_digest(self) -> Digest:
        """Return the SHA-256 over all parameters and buffers. Raises PolicyError for tensors
        without bytes, which can't be compared between processes."""
        sha256 = hashlib.sha256()
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        try:
            for name, tensor in sorted(named, key=lambda pair: pair[0]):
                value = tensor.detach().cpu().contiguous()
                sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                if value.numel():
                    sha256.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        except Exception as error:  # sparse, quantized, on no device
            raise PolicyError(
                f"the tensors of this model can't be compared between processes: {error}. Measure "
                "with one job."
            ) from error
        return Digest(sha256.hexdigest())

    def collect_code(self, factory: str = "", *, chain: str = "") -> ModelCode:
        """Return the digests of the files that define the module and its factory."""
        return collect_code(self.module, factory=factory, chain=chain)


def as_reference(model: nn.Module | ReferenceModel) -> ReferenceModel:
    """Return a PyTorch module as a reference, and a reference unchanged.

    The module that `torch.compile` wraps is taken instead of the compiled one.
    """
    if isinstance(model, ReferenceModel):
        return model
    return TorchReference(getattr(model, "_orig_mod", model))


def _has_double_weights(file: TestedFile) -> bool:
    return any(
        tensor.data_type == onnx.TensorProto.DOUBLE and tensor.dims  # numbers may be float64
        for model in load_graphs(file.path)
        for tensor in tensors_of(model)
    )


class _WithoutModules(nn.Module):
    """The model with all tensors as direct attributes.

    Otherwise the tracer would rebuild every submodule, which takes longer than the forward.
    """

    def __init__(self, model: PositionalModel) -> None:
        super().__init__()
        self._answer = model.forward  # not registered as a submodule
        ids: set[int] = set()
        for kept, parts in (("_parameters", self._parameters), ("_buffers", self._buffers)):
            for part in model.model.modules():
                for tensor in vars(part)[kept].values():
                    if tensor is not None and id(tensor) not in ids:
                        ids.add(id(tensor))
                        parts[f"tensor_{len(ids)}"] = tensor

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._answer(*tensors)
