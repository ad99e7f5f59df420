"""The model's tensors by digest; tensors that forward derives from them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from gate.reference.discretization import FAKE_QUANTIZERS
from gate.reference.error_models import bare
from gate.reference.onnx_reference import OnnxNode
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

# Tensors are looked up by the sum of their bits, which transposition, reshape and flip do not
# change, and then compared element by element.
Values = NDArray[Any]
"""float32, or int64 for integers and bools."""


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A tensor of the model, with all of its names if it is shared."""

    names: tuple[str, ...]
    load: Callable[[], Values]
    shape: tuple[int, ...]
    integer: bool = False
    parts: tuple[tuple[tuple[slice, ...], str], ...] = ()
    """Regions of a packed tensor, with the name of the model's tensor for each."""

    @property
    def name(self) -> str:
        """Return the first name."""
        return self.names[0]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the sorted shape without ones, which is equal for all transpositions."""
        return tuple(sorted(dim for dim in self.shape if dim != 1))

    @cached_property
    def values(self) -> Values:
        """Return the values in float32 or int64; for float32 parameters without a copy."""
        return self.load()

    @cached_property
    def bits(self) -> int:
        """Return the `bit_sum` of the values."""
        return bit_sum(self.values)

    def owner(self, index: tuple[int, ...]) -> str:
        """Return the name of the tensor from which an element comes."""
        for region, name in self.parts:
            if all(_is_within(part, i) for part, i in zip(region, index, strict=False)):
                return name
        return self.name


class TensorIndex:
    """An index of tensors by name, number of elements and bits."""

    def __init__(self, stored: Iterable[ModelTensor]) -> None:
        self.all = tuple(stored)
        self.by_name = {
            name: tensor for tensor in self.all for name in tensor.names if not tensor.parts
        }
        """Tensors by name. Packed tensors are not included."""
        self._by_size: defaultdict[tuple[bool, int], list[ModelTensor]] = defaultdict(list)
        self._by_dims: defaultdict[tuple[bool, tuple[int, ...]], list[ModelTensor]] = defaultdict(
            list
        )
        for tensor in self.all:
            self._by_size[tensor.integer, tensor.size].append(tensor)
            self._by_dims[tensor.integer, tensor.dims].append(tensor)

    def alike(self, values: Values) -> Iterator[ModelTensor]:
        """Yield the tensors with an equal sum of bits: the same elements in any order."""
        candidates = self._by_size.get((_is_integer(values), values.size), [])
        if candidates:
            bits = bit_sum(values)
            yield from (stored for stored in candidates if stored.bits == bits)

    def with_dims(self, values: Values) -> list[ModelTensor]:
        """Return the tensors of this shape, up to transposition and axes of length one."""
        dims = tuple(sorted(dim for dim in values.shape if dim != 1))
        return self._by_dims.get((_is_integer(values), dims), [])


def stored_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[ModelTensor]:
    """Yield the tensors of a model, shared ones once, without those that are not plain."""
    names: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, tensor in named:
        if not is_plain(tensor) or not tensor.numel():
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        names[key].append(name)
        first.setdefault(key, tensor)
    for key, tensor in first.items():
        yield model_tensor(tuple(dict.fromkeys(names[key])), tensor)


def model_tensor(names: tuple[str, ...], tensor: torch.Tensor) -> ModelTensor:
    """Return a tensor of PyTorch under these names."""

    def load() -> Values:
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        values: Values = tensor.detach().to("cpu", kind).contiguous().numpy()
        return values.reshape(tuple(tensor.shape))

    return ModelTensor(names, load, tuple(tensor.shape), not tensor.is_floating_point())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether NumPy can represent a tensor: not sparse, quantized, complex or meta."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()
        and tensor.device.type != "meta"
    )


def canonical(values: NDArray[Any]) -> Values | None:
    """Return the values of a constant as `Values`; None for types that can't be compared."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64, copy=False)
    try:
        with np.errstate(all="ignore"):
            return values.astype(np.float32, copy=False)
    except (TypeError, ValueError):
        return None


def bit_sum(values: Values) -> int:
    """Return the sum of the elements' bits modulo 2^64."""
    flat = np.ascontiguousarray(values).reshape(-1)
    words = flat.view(np.uint32 if flat.itemsize == 4 else np.uint64)
    return int(words.sum(dtype=np.uint64))


def _is_integer(values: Values) -> bool:
    return bool(values.dtype.kind in "iub")


def _is_within(region: slice, i: int) -> bool:
    return (region.start or 0) <= i and (region.stop is None or i < region.stop)


_MAX_STORED_ELEMENTS = 1 << 28
"""Maximum number of stored elements: 1 GiB of float32."""


class DerivedConstants(DispatchMode):
    """Stores the results of operators whose inputs are only the model's tensors and numbers.

    Examples are a masked weight, the weight of a weight norm, and a table of sines. Exporters that
    fold constants write them into the file. Tensors of unknown origin are inputs or depend on them.
    """

    def __init__(self, model_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constant: dict[int, torch.Tensor] = {}
        """Constants by `id`. The reference keeps them alive, so that ids are not reused."""
        self._names: defaultdict[int, dict[str, None]] = defaultdict(dict)
        """Names of the model's tensors by address."""
        for name, tensor in model_tensors:
            self._constant[id(tensor)] = tensor
            if is_plain(tensor) and tensor.numel():
                self._names[_address(tensor)][name] = None
        self._sources: dict[int, dict[str, None]] = {}
        """Names of the model's tensors from which a constant is computed, by its `id`."""
        self._results: dict[int, tuple[str, torch.Tensor]] = {}
        self._result_addresses: Counter[int] = Counter()
        """Addresses of the results."""
        self._elements = 0
        self._written: set[int] = set()

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the computed tensors of floats, with the names of their operators."""
        return (pair for pair in self._results.values() if pair[1].is_floating_point())

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the computed tensors of floats, with the names of the tensors they depend on."""
        for _, tensor in self.results():
            yield from ((name, tensor) for name in self._sources[id(tensor)])

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether forward itself changes the values of a tensor of the model."""
        return _address(tensor) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if _is_tensor(tensor)]
        result = func(*args, **(kwargs or {}))
        outputs = [tensor for tensor in pytree.tree_leaves(result) if _is_tensor(tensor)]
        is_fresh = func.namespace == "aten" and "lift_fresh" in func.name()
        random = torch.Tag.nondeterministic_seeded in func.tags
        constant = not random and (is_fresh or all(self._is_constant(tensor) for tensor in inputs))
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs or {}, constant=constant)
        sources = {name: None for tensor in inputs for name in self._sources_of(tensor)}
        for tensor in outputs:
            if not constant:
                self._forget(tensor)
            elif is_plain(tensor) and self._elements <= _MAX_STORED_ELEMENTS:
                self._constant[id(tensor)] = tensor
                self._sources[id(tensor)] = sources
                if not any(tensor is tensor_read for tensor_read in inputs):
                    self._elements += tensor.numel()
                    self._results[id(tensor)] = (func.name().partition("::")[2], tensor)
                    self._result_addresses[_address(tensor)] += 1
        return result

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._constant:
            return True
        return is_plain(tensor) and _address(tensor) in self._names

    def _sources_of(self, tensor: torch.Tensor) -> Mapping[str, None]:
        if id(tensor) in self._constant and id(tensor) in self._sources:
            return self._sources[id(tensor)]
        return self._names.get(_address(tensor), {}) if is_plain(tensor) else {}

    def _note_writes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: bool
    ) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(target):
                if not _is_tensor(tensor) or not is_plain(tensor):
                    continue
                self._written.add(_address(tensor))
                if not constant:
                    self._forget(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Remove the tensor and all that share its storage from the constants."""
        self._constant.pop(id(tensor), None)
        address = _address(tensor) if is_plain(tensor) else 0
        if not self._result_addresses[address]:
            return
        for number, (_, result) in list(self._results.items()):
            if _address(result) == address:
                self._results.pop(number)
                self._constant.pop(number, None)
        del self._result_addresses[address]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class FormatTolerance(NamedTuple):
    """The tolerance for a number that is stored in a format."""

    relative: float
    absolute: float
    """Tolerance for numbers that underflow in the format."""


def format_tolerance(name: str | None) -> FormatTolerance:
    """Return the tolerance for numbers stored in a format; None: float32."""
    return _TOLERANCES.get(name, _FLOAT32)


def rounded_to(values: Values, stored: Values) -> str | None:
    """Return the format in which `stored` rounds exactly to `values` and is changed, or None."""
    if values.dtype.kind != "f" or values.shape != stored.shape:
        return None
    for name, rounded in FORMATS.items():
        want = rounded(stored)
        if np.array_equal(values, want, equal_nan=True) and not np.array_equal(want, stored):
            return name
    return None


def _to_float16(values: Values) -> Values:
    with np.errstate(all="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _to_bfloat16(values: Values) -> Values:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    rounded: Values = tensor.to(torch.bfloat16).float().numpy()
    return rounded


def _to_tf32(values: Values) -> Values:
    """Round to a 10-bit mantissa, half away from zero, like tensor cores."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


FORMATS: Mapping[str, Callable[[Values], Values]] = {
    "float16": _to_float16,
    "TF32": _to_tf32,
    "bfloat16": _to_bfloat16,
}


def _clamped(least: float) -> Callable[[Values], Values]:
    """Return a rounding to float16 that first raises numbers below `least`, except 0, to `least`.

    Masks of at least 1e9 become 1e4. The conversion that it follows also changes other numbers
    beyond 1e4, so these are not expected.
    """

    def half(values: Values) -> Values:
        size = np.abs(values)
        kept = np.where((size > 0.0) & (size < least), least, size)
        kept = np.where(size >= MIN_MASK, 1e4, kept)
        # Infinite values do not change.
        return _to_float16(np.copysign(np.where(np.isinf(size), size, kept), values))

    return half


MIN_MASK = 1e9
"""Least magnitude of a number that counts as a mask."""


def are_converted_masks(values: Values, stored: Values) -> NDArray[np.bool_]:
    """Return which `values` are masks that a conversion to float16 stores as 1e4 or more."""
    is_mask = np.isfinite(values) & (np.abs(values) >= MIN_MASK)
    is_stored = (np.abs(stored) >= 1e4) & (np.signbit(stored) == np.signbit(values))
    return np.asarray(is_mask & is_stored)


CONVERSIONS: Mapping[str, tuple[Callable[[Values], Values], ...]] = {
    # onnxconverter-common 1.16 (convert_np_to_float16), and the copy in onnxruntime.transformers.
    "float16": (_to_float16, _clamped(1e-7), _clamped(5.96e-8)),
    "bfloat16": (_to_bfloat16,),
}
"""Conversions of weights to narrow formats: rounded, or clamped and rounded."""

_FLOAT32 = FormatTolerance(0.0, float(np.finfo(np.float32).tiny))

_TOLERANCES: Mapping[str | None, FormatTolerance] = {
    "float16": FormatTolerance(2.0**-10, 2.0**-23),  # converters clamp: `CONVERSIONS`
    "bfloat16": FormatTolerance(2.0**-7, float(np.finfo(np.float32).tiny)),
}


# With a folded norm, output channel k of a weight is `weight[k] * scale[k]` and its bias
# `(bias[k] - mean[k]) * scale[k] + beta[k]`, with `scale = gamma / sqrt(var + eps)` (Ioffe and
# Szegedy 2015, section 3.1). If the model was converted to half before the export, each of these
# steps rounds to 16 bits, in this order: the weights of both PyTorch exporters are bit-identical.
Floats = NDArray[np.float64]


def rounding(arithmetic: str | None) -> Callable[[Values], Values]:
    """Return the rounding of a step's float32 result in the arithmetic of a format.

    None: no rounding, because float32 counts as exact.
    """
    return (lambda values: values) if arithmetic is None else FORMATS[arithmetic]


@dataclass(frozen=True, eq=False)
class Norm:
    """A BatchNorm in eval mode, as one scale, mean and shift for each channel."""

    path: str
    scale: Floats
    mean: Floats
    beta: Floats
    way: str = "folded"
    arithmetic: str | None = None
    """Format in which it is folded; None: exactly."""

    @property
    def parameters(self) -> str:
        """Return one name for all parameters; empty for the scale of an attention."""
        return f"{self.path}.*" if self.way == "folded" else ""

    @property
    def size(self) -> Floats:
        """Return the magnitude of the terms except the layer's bias, for the error of folding."""
        size: Floats = np.abs(self.beta) + np.abs(self.mean * self.scale)
        return size

    def folded(self, rows: Values) -> Values:
        """Return the channels of a weight with the folded norm, float32. rows: already rounded."""
        with np.errstate(all="ignore"):
            product: Values = rows * self.scale.astype(np.float32)[:, None]
        return rounding(self.arithmetic)(product)

    def offset(self, bias: Floats) -> Floats:
        """Return the bias of a layer (one axis) with the folded norm."""
        step, (mean, scale, beta, bias) = _stepwise(
            self.arithmetic, self.mean, self.scale, self.beta, bias
        )
        with np.errstate(all="ignore"):
            offset: Floats = step(step(step(bias - mean) * scale) + beta).astype(np.float64)
        return offset


def norms(model: nn.Module, arithmetic: str | None = None) -> Iterator[Norm]:
    """Yield all modules that normalize by running statistics, by the names of their tensors."""
    for path, module in model.named_modules():
        mean, variance = (_numbers(module, name) for name in ("running_mean", "running_var"))
        if mean is None or variance is None:
            continue
        gamma, beta = (_numbers(module, name) for name in ("weight", "bias"))
        gamma = np.ones_like(mean) if gamma is None else gamma
        beta = np.zeros_like(mean) if beta is None else beta
        step, (mean, variance, gamma, beta) = _stepwise(arithmetic, mean, variance, gamma, beta)
        with np.errstate(all="ignore"):
            root = step(np.sqrt(step(variance + variance.dtype.type(getattr(module, "eps", 0.0)))))
            scale = step(gamma / root)
        if scale.shape == mean.shape and scale.ndim == 1:
            scale, mean, beta = (numbers.astype(np.float64) for numbers in (scale, mean, beta))
            yield Norm(path, scale, mean, beta, arithmetic=arithmetic)


def _stepwise(
    arithmetic: str | None, *numbers: Floats
) -> tuple[Callable[[Any], Any], Iterator[NDArray[Any]]]:
    """Return the rounding of a step, and the rounded numbers."""
    step, kind = rounding(arithmetic), np.float64 if arithmetic is None else np.float32
    return step, (step(array.astype(kind)) for array in numbers)


def renormalized_embeddings(model: nn.Module) -> Iterator[tuple[str, Values]]:
    """Yield the weights of embeddings with `max_norm`: names, and values after all rows were
    renormalized by a forward."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            weight, rows = module.weight.detach().clone(), torch.arange(len(module.weight))
            with torch.no_grad():
                torch.embedding_renorm_(weight, rows, module.max_norm, module.norm_type)
            yield f"{path}.weight" if path else "weight", weight.float().numpy()


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return an attribute of a module if it is a plain tensor of floats, or None."""
    try:
        value = getattr(module, name, None)
    except Exception:  # a parametrization that can't be computed
        return None
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and is_plain(value)
    return value if usable else None


def to_float64(tensor: torch.Tensor) -> Floats:
    """Return the values of a tensor in float64."""
    numbers: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return numbers


def _numbers(module: nn.Module, name: str) -> Floats | None:
    tensor = tensor_of(module, name)
    return None if tensor is None else to_float64(tensor)


_MODE_ARGUMENTS = ("train", "training")


@dataclass
class ReferenceObserver:
    """Facts about the reference, which is run lazily and at most once.

    run: runs `model` on `batch`.
    """

    model: nn.Module
    run: Callable[[Batch], list[OutputArray]]
    batch: Batch

    @property
    def samples(self) -> int:
        """Return the number of samples in the batch."""
        return len(next(iter(self.batch.values())))

    @cached_property
    def rows(self) -> tuple[int | None, ...]:
        """Return the size of axis 0 of each output for that batch; None for scalars."""
        return tuple(output.shape[0] if output.ndim else None for output in self._observed[1])

    @cached_property
    def operator_recorder(self) -> OperatorRecorder:
        """Return the record of the operators of the reference."""
        return self._observed[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of all parameters, buffers and attributes that are tensors of
        floats."""
        return ((name, value) for name, value in self.all_tensors() if value.is_floating_point())

    def byte_tensor_sizes(self) -> set[int]:
        """Return the sizes of the model's tensors of 8-bit integers."""
        bytes_ = (torch.int8, torch.uint8)
        return {value.numel() for _, value in self.all_tensors() if value.dtype in bytes_}

    def onnx_operators(self) -> set[str]:
        """Return the operators of an ONNX reference; empty for a PyTorch model."""
        return {m.call.operator for m in self.model.modules() if isinstance(m, OnnxNode)}

    def all_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of any type; a shared tensor under each of its names."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            tensors = {
                **vars(module),
                **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
                **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
            }
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value

    @cached_property
    def _observed(self) -> tuple[OperatorRecorder, list[OutputArray]]:
        with OperatorRecorder() as recorder:
            outputs = self.run(self.batch)
        return recorder, outputs


class OperatorRecorder(DispatchMode):
    """Records the PyTorch operators that run within its context.

    Without gradients these are the operators that forward calls, such as `batch_norm`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        """Dtypes of all returned tensors."""
        self.draws = False
        """True if an operator drew random numbers."""
        self.batch_statistics = False
        """True if an operator normalized with batch statistics."""
        self.fake_quantizes = False
        """True if an operator rounded floats to the steps of a quantized type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor):
                self.dtypes.add(output.dtype)
        arguments = _arguments(func, args) | kwargs
        training = [bool(arguments[name]) for name in _MODE_ARGUMENTS if name in arguments]
        if torch.Tag.nondeterministic_seeded in func.tags and arguments.get("dropout_p") != 0.0:
            self.draws = self.draws or all(training)
        if bare(func._schema.name) in FAKE_QUANTIZERS:
            self.fake_quantizes = True
        if "batch_norm" in func.name():
            self.batch_statistics = self.batch_statistics or any(training)
        return result


def _arguments(func: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments and the defaults by name."""
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False))
