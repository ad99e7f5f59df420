"""The reference in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.errors import ModelError, first_line
from gate.records.instruments import CodeLocation
from gate.reference.code_location import find_difference
from gate.reference.discretization import find_discretization
from gate.reference.environment import default_dtype
from gate.reference.error_models import named_arguments
from gate.reference.reference import ReferenceModel
from gate.reference.torch_session import DispatchMode, TorchSession, copy_model, run_in_parts
from gate.reference.validity import UNRESTRICTED, Validity
from gate.storage.arrays import Batch, OutputArray

# PyTorch has no fast float64 convolution on the CPU: it unfolds each sample and multiplies it by
# the weights, which it reads again for each sample. For small pictures this costs more than the
# arithmetic: resnet18 on 32 samples of 64 x 64 took twice the CPU time.


_MAX_POSITIONS = 4096
"""With a larger output one sample is enough work for a product, and is computed by rows."""

_MAX_ELEMENTS = 2**20
"""Size of the unfolded inputs that are held at a time: 8 MiB fit into the caches."""

_DEFAULTS = (None, 1, 0, 1, 1)
"""Defaults of `conv2d`: bias, stride, padding, dilation, groups."""


Pair = tuple[int, int]
"""Values for the rows and for the columns."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of several pictures or of a large one, without groups and not transposed."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Pair
    padding: Pair
    dilation: Pair

    @classmethod
    def from_call(cls, func: Any, args: Sequence[Any]) -> Convolution | None:
        """Return the call of an ATen operator in float64, None for a single small picture."""
        aten = torch.ops.aten
        if func is aten.convolution.default:
            *call, transposed, _output_padding, groups = args
            call.append(groups)
        elif func is aten.conv2d.default:
            call, transposed = [*args, *_DEFAULTS[len(args) - 2 :]], False
        else:
            return None
        x, weight, bias, *steps, groups = call
        wide = x.dtype == weight.dtype == torch.float64
        if transposed or groups != 1 or not wide or x.dim() != 4 or not len(x):
            return None
        if not (_is_plain(x) and _is_plain(weight)):
            return None
        conv = cls(x, weight, bias, *map(_pair, steps))
        positions = conv.sizes[0] * conv.sizes[1]
        return conv if positions > _MAX_POSITIONS or (positions > 0 and len(x) > 1) else None

    @property
    def sizes(self) -> Pair:
        """Return the rows and columns of the output."""
        rows, columns = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, dilation in zip(
                self.x.shape[2:],
                self.weight.shape[2:],
                self.stride,
                self.padding,
                self.dilation,
                strict=True,
            )
        )
        return rows, columns

    def run(self) -> torch.Tensor:
        """Return PyTorch's result up to the order of summation.

        Shape (samples, channels, rows, columns), float64.
        """
        (above, left), channels = self.padding, len(self.weight)
        padded = functional.pad(self.x, (left, left, above, above)) if above or left else self.x
        flat = self.weight.reshape(channels, -1)
        rows, columns = self.sizes
        samples = max(1, _MAX_ELEMENTS // (flat.shape[1] * rows * columns))
        # Unfolding a large picture at once allocates pages that the system has to clear each time.
        height = rows if samples > 1 else max(1, _MAX_ELEMENTS // (flat.shape[1] * columns))
        output = self.x.new_empty(len(self.x), channels, rows, columns)
        for start in range(0, len(padded), samples):
            part = padded[start : start + samples]
            for top in range(0, rows, height):
                block = output[start : start + samples, :, top : top + height]
                unfolded = self._unfolded(part[:, :, top * self.stride[0] :], block.shape[2])
                product = flat @ unfolded.reshape(flat.shape[1], -1)
                block.copy_(product.view(channels, len(part), *block.shape[2:]).transpose(0, 1))
        return output if self.bias is None else output.add_(self.bias.view(1, -1, 1, 1))

    def _unfolded(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the inputs by which each kernel element is multiplied in the first output rows.

        A view of shape (channels, kernel's rows, kernel's columns, samples, rows, columns).
        """
        sample, channel, row, column = x.stride()
        strides = (
            channel, row * self.dilation[0], column * self.dilation[1],
            sample, row * self.stride[0], column * self.stride[1],
        )  # fmt: skip
        shape = (*self.weight.shape[1:], len(x), rows, self.sizes[1])
        return x.as_strided(shape, strides, x.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the strides are those of row-major storage.

    PyTorch returns channels_last for channels_last inputs, which views can detect. `is_contiguous`
    is true in both formats for a single channel.
    """
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _pair(value: int | Sequence[int]) -> Pair:
    rows, columns = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return rows, columns


Forward = Callable[[Batch], list[OutputArray]]

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64Reference:
    """Computes batches in float64 with a copy of the model."""

    def __init__(self, model: nn.Module, binding: InputBinding) -> None:
        """Copy the model. Raises ModelError if that fails."""
        self.model = double_copy(model)
        self._runner = TorchSession(
            self.model, binding, device="cpu", dtype=torch.float64, original=model
        )

    def run(self, batch: Batch, *, mode: DispatchMode | None = None) -> list[OutputArray]:
        """Return all outputs, floats in float64. `mode`: a dispatch mode around the forward.

        Raises ModelError with the reason if the model can't run in float64.
        """
        try:
            with in_double(), mode or nullcontext():
                outputs = self._runner.run(batch)
        except ModelError as error:  # which has its own remedy
            raise ModelError(f"the model can't run in float64: {error}") from error
        except Exception as error:
            raise ModelError(
                f"the model can't run in float64: {type(error).__name__}: {first_line(error)}. "
                "Keep fixed dtypes out of forward, or waive noise_ratio in the policy by name."
            ) from error
        narrow = sorted({o.dtype.name for o in outputs if o.dtype.kind == "f"} - {"float64"})
        if narrow:
            raise ModelError(
                f"the model returns {', '.join(narrow)} even when it runs in float64. Keep fixed "
                "dtypes out of forward, or waive noise_ratio in the policy by name."
            )
        return outputs


def double_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy on the CPU in eval mode and float64. Raises ModelError."""
    duplicate = copy_model(model, device="cpu", double=True)
    with torch.inference_mode(False):  # `double` would leave complex numbers in float32
        duplicate._apply(lambda tensor: tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)))  # type: ignore[no-untyped-call]
    return duplicate


@contextmanager
def in_double() -> Iterator[None]:
    """Create new tensors in float64, and let casts of `forward` to float32 yield float64."""
    with default_dtype(torch.float64), _Wide():  # type: ignore[no-untyped-call]
        yield


class _Wide(DispatchMode):
    """A mode that requests float64 wherever float32 is requested."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        small = None if kwargs else Convolution.from_call(func, args)
        if small is not None:
            return small.run()
        if func is torch.ops.aten.fake_quantize_per_channel_affine.default:
            return _in_steps(func, args, kwargs or {})
        narrow = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        args = [_wider(value, narrow) for value in args]
        kwargs = {key: _wider(value, narrow) for key, value in (kwargs or {}).items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not _is_mixed(args, kwargs):
                raise
            args, kwargs = _without_float32(func, args, kwargs)
            return func(*args, **kwargs)


def _is_mixed(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether tensors of both precisions meet, which few operators accept.

    Constants that are neither parameters nor buffers stay in float32.
    """
    leaves = tree_leaves((args, kwargs))
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return not dtypes.isdisjoint(_WIDER) and not dtypes.isdisjoint(_WIDER.values())


def _without_float32(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments in float64 instead of float32, except for those that `func` writes."""
    stated = named_arguments(func, args, kwargs)
    written = {
        id(stated.get(argument.name))
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    def widen(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in _WIDER
        return value.to(_WIDER[value.dtype]) if narrow and id(value) not in written else value

    return tree_map(widen, (args, kwargs))  # type: ignore[no-any-return]


def _in_steps(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the result of fake quantization by channel, for which PyTorch accepts only float32
    scales."""
    stated = named_arguments(func, args, kwargs)
    step = find_discretization("fake_quantize_per_channel_affine", stated)
    if step is None:
        returned: torch.Tensor = func(*args, **kwargs)
        return returned
    return torch.from_numpy(step.from_integers(step.decide(step.operand)))


def _wider(value: Any, narrow: torch.dtype | None) -> Any:
    """Return the dtype to request. A `narrow` tensor is moved, not cast, so it keeps its dtype."""
    if not isinstance(value, torch.dtype) or value == narrow:
        return value
    return _WIDER.get(value, value)


class Truth:
    """The float64 reference. `unmeasured` says why it stopped, if it did."""

    def __init__(self, model: ReferenceModel, binding: InputBinding, *, samples: int) -> None:
        """`samples`: number of first samples that `first_outputs` computes; 0 for none."""
        self._samples, self._computed = samples, 0
        self._float64: Float64Reference | None = None
        self.unmeasured: str | None = None
        self.validity: Validity = UNRESTRICTED
        """Whether float64 computes the function of the model. Set after the first unit."""
        self.decisions: Callable[[Batch], DispatchMode | None] = lambda _: None
        """Creates the dispatch mode for a batch."""
        self.part_size: Callable[[Batch], int] = length
        """Returns the number of samples to compute at a time."""
        if not samples:
            self.unmeasured = "the policy asks for no noise floor (instruments.noise_samples: 0)"
            return
        try:
            self._float64 = model.float64(binding)
        except ModelError as error:
            self.unmeasured = str(error)

    def extend(self, samples: int) -> None:
        """Let `first_outputs` compute `samples` more."""
        self._samples += samples

    def outputs(self, batch: Batch) -> list[OutputArray] | None:
        """Return all outputs in float64, or None if the model can't run in float64."""
        if self._float64 is None:
            return None
        try:
            return self._run(self._float64, batch, self.decisions(batch))
        except ModelError as error:
            self._float64, self.unmeasured = None, str(error)
            return None

    def find_difference(
        self, model: ReferenceModel, run: Forward, batch: Batch
    ) -> CodeLocation | None:
        """Return the first operator of `model` that computes another function in float64, or None.
        `run`: the forward of `model`."""
        if self._float64 is None:
            return None
        double = self._float64
        try:
            return find_difference(
                (model.module, lambda: run(batch)),
                (double.model, lambda mode: double.run(batch, mode=mode)),
            )
        except Exception:  # some recorded operators can't be compared
            return None

    def extra_outputs(
        self, batch: Batch, *, mode: DispatchMode | None = None
    ) -> list[OutputArray] | None:
        """Return the outputs in float64 for inputs that are not samples.

        A failure does not affect the samples. `mode`: as in `Float64Reference.run`.
        """
        if self._float64 is None:
            return None
        try:
            return self._run(self._float64, batch, mode or self.decisions(batch))
        except ModelError:
            return None

    def _run(
        self, double: Float64Reference, batch: Batch, mode: DispatchMode | None
    ) -> list[OutputArray]:
        """Return all outputs. With a `mode` the batch is computed at once."""
        if mode is not None:
            return double.run(batch, mode=mode)
        return run_in_parts(double.run, batch, size=self.part_size(batch))

    @property
    def is_complete(self) -> bool:
        """True after `first_outputs` has computed all first samples."""
        return self._computed >= self._samples

    def rewind(self) -> None:
        """Start again with the first sample."""
        self._computed = 0

    def first_outputs(self, batch: Batch) -> list[OutputArray] | None:
        """Return the outputs in float64 for whole batches, up to the first `samples`; then None."""
        if self.is_complete:
            return None
        self._computed += length(batch)
        return self.outputs(batch)
