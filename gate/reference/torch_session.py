"""Run the model on a device; base class of dispatch modes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.errors import ModelError
from gate.model.forward_signature import ForwardSignature, leaves
from gate.model.model_state import ModelState
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER
from gate.reference.environment import callers_dtype, default_dtype
from gate.reference.reference import ReferenceSession
from gate.runtimes.runtime import Proof
from gate.storage.arrays import Batch, OutputArray

# PyTorch's own class imports torch._dynamo (1.5 s) at its first operator.


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's `TorchDispatchMode` without the import of torch._dynamo.

    The operators of `torch.cond` and `while_loop` are dispatched one by one.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        dispatch: Callable[..., Any] = cls.__torch_dispatch__

        def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not isinstance(func, HigherOrderOperator):
                return dispatch(mode, func, types, args, kwargs)
            with mode if func._name in ("cond", "while_loop") else nullcontext():
                return _run_control_flow(func, args, kwargs or {})

        cls.__torch_dispatch__ = run  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _run_control_flow(func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
    if func._name == "cond":
        predicate, if_true, if_false, operands = args
        return (if_true if predicate else if_false)(*operands)
    if func._name == "while_loop":
        condition, body, carried, constant = args
        while condition(*carried, *constant):
            carried = body(*carried, *constant)
        return tuple(carried)
    return func(*args, **kwargs)


def is_dispatched() -> bool:
    """Return True inside of a dispatch mode."""
    return bool(_get_current_dispatch_mode_stack())


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions by operators inside of a dispatch mode; `torch.cond` compiles."""
    compiles = "torch._dynamo" in sys.modules and is_dispatched()
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


class ActivationSizes(DispatchMode):
    """Records the bytes of each operator's results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        self.sizes.append(sum(each.numel() * each.element_size() for each in tensors))
        return returned

    def bytes_per_sample(self, larger: ActivationSizes, *, samples: int) -> int:
        """Return the bytes that one sample adds to the largest result. `larger`: sizes of a forward
        with `samples` more."""
        if len(self.sizes) != len(larger.sizes):  # the forward took another path
            return max(larger.sizes, default=0) // samples
        pairs = zip(self.sizes, larger.sizes, strict=True)
        return max((more - less for less, more in pairs), default=0) // samples


def copy_model(model: nn.Module, *, device: str, double: bool = False) -> nn.Module:
    """Return a deep copy of `model` in float32 and eval mode on `device`.

    `double`: keep float64 tensors in float64 (`gate.measure.job`). Raises ModelError if the model
    can't be copied.
    """
    try:
        # no_grad: else copies of TorchScript parameters are not leaf tensors
        with torch.inference_mode(False), torch.no_grad(), _computed_apart(model):
            duplicate = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"the reference model can't be copied: {type(error).__name__}: {error}. Build it so "
            "that copy.deepcopy works: keep no tensors with a gradient history as attributes."
        ) from error
    with torch.inference_mode(False), torch.no_grad():  # so that tensors have version counters
        duplicate.to(device=device)
        # `to(dtype=…)` would also make complex numbers real
        duplicate._apply(_wide if double else _single)  # type: ignore[no-untyped-call]
    duplicate.eval()  # not chained: models that override `train` often forget to return self
    return duplicate


@contextmanager
def _computed_apart(model: nn.Module) -> Iterator[None]:
    """Replace tensors that a hook computes from parameters (`weight_norm`, `prune`) by plain ones.

    torch can't deep-copy computed tensors. Every forward computes them again.
    """
    computed = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    try:
        for module, name, value in computed:
            vars(module)[name] = value.detach()
        yield
    finally:
        for module, name, value in computed:
            vars(module)[name] = value


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else _single(tensor)


class TorchSession(ReferenceSession):
    """Runs a module on one device. The session owns the module.

    Parameters and buffers that forward changes are restored after each run, so every run starts
    with the original state.
    """

    def __init__(
        self,
        model: nn.Module,
        binding: InputBinding,
        *,
        device: str,
        dtype: torch.dtype = torch.float32,
        original: nn.Module | None = None,
    ) -> None:
        """`original`: the model that `model` is a copy of. None: clone the state
        (`gate.model.model_state`)."""
        self._model = model
        self.state = ModelState(model, original)
        self._device = torch.device(device)
        self._dtype = dtype
        self._binding = binding
        self._call = call_of(model, binding)
        self._devices: set[str] = set()
        self._uses_autograd = False

    def run(self, batch: Batch) -> list[OutputArray]:
        """Run forward on a copy of the batch and return the outputs in the model's order.

        Floats are cast to `dtype`, except for float64 inputs that the binding keeps. Outputs that
        are None are dropped. Gradients are off unless forward enables them, as in models that
        return forces.
        """
        keeps_double = self._binding.double and self._dtype == torch.float32
        defaults = default_dtype(callers_dtype()) if keeps_double else nullcontext()
        with torch.no_grad(), defaults, _uncompiled():
            if not self._uses_autograd:
                try:
                    with _below_autograd():
                        return self._run(batch)
                except _AutogradEnabled:
                    self._uses_autograd = True
            return self._run(batch)

    def _run(self, batch: Batch) -> list[OutputArray]:
        tensors = [self._tensor(array) for array in self._binding.by_argument(batch)]
        with self.state.restored():
            output_leaves = leaves(self._call(self._model, tensors))
            outputs = [_to_numpy(leaf.tensor) for leaf in output_leaves]
            if self.state.find_changes():  # an output may be a view of restored state
                outputs = [output.copy() for output in outputs]
        self.keys = tuple(leaf.name if leaf.stated else None for leaf in output_leaves)
        self._devices |= {leaf.tensor.device.type for leaf in output_leaves}
        return self._binding.from_call(outputs)

    def proof(self) -> Proof:
        """Return the devices of the outputs as providers, CPU first if any output is there."""
        names = {"cpu": CPU_PROVIDER, "cuda": CUDA_PROVIDER}
        return Proof(
            providers_active=tuple(names.get(device, device) for device in sorted(self._devices)),
            session_options={
                "device": str(self._device),
                "dtype": str(self._dtype).removeprefix("torch."),
                "mode": "eval",
            },
        )

    def _tensor(self, array: OutputArray) -> Any:
        if array.dtype.kind == "U":
            return array.tolist()
        # A copy, because models that work in place would change the inputs of other runtimes.
        tensor = torch.from_numpy(array.copy())
        kept = self._binding.double and tensor.dtype == torch.float64
        dtype = self._dtype if tensor.is_floating_point() and not kept else tensor.dtype
        return tensor.to(device=self._device, dtype=dtype)


def run_in_parts(
    run: Callable[[Batch], list[OutputArray]], batch: Batch, *, size: int
) -> list[OutputArray]:
    """Return all outputs, computed for `size` samples at a time and joined along axis 0. If the
    outputs of the parts can't be joined, the batch is computed at once."""
    count = length(batch)
    if count <= size:
        return run(batch)
    edges = np.linspace(0, count, -(-count // size) + 1).astype(int).tolist()
    parts = []
    for start, stop in pairwise(edges):
        parts.append(run({name: array[start:stop] for name, array in batch.items()}))
        if any(not output.ndim or len(output) != stop - start for output in parts[-1]):
            return run(batch)
    columns = list(zip(*parts, strict=False))
    if any(len({output.shape[1:] for output in column}) > 1 for column in columns):
        return run(batch)
    return [np.concatenate(column) for column in columns]


class _AutogradEnabled(BaseException):
    """Raised if forward enables gradients. Not an Exception, so that forward can't catch it."""


_SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch._C, "_set_grad_enabled"),
    (torch._C, "_set_fwd_grad_enabled"),
    (forward_ad, "enter_dual_level"),
)
"""Functions that enable autograd: `enable_grad` and `torch.func` call them."""


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Let dispatch modes receive composite operators (linear, lstm) as one call, as their error
    models (`gate.reference.error_models`) expect. Raises _AutogradEnabled if forward enables
    autograd.

    A `TorchFunctionMode` would detect that, too, but it disables fast paths of PyTorch.
    """
    switches = [(owner, name, getattr(owner, name)) for owner, name in _SWITCHES]

    def watched(switch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: bool) -> Any:
            if values != (False,):
                raise _AutogradEnabled
            return switch(*values)

        return call

    try:
        for owner, name, switch in switches:
            setattr(owner, name, watched(switch))
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        for owner, name, switch in switches:
            setattr(owner, name, switch)


def call_of(model: nn.Module, binding: InputBinding) -> ForwardSignature:
    """Return how inputs map to the arguments of `model`.

    By the names of the file, else by the names of the samples, else in the order of the file.
    """
    named = binding.sample_names or tuple(name for name, _ in binding.pairs)
    return ForwardSignature(model, named, binding.arguments)


def _to_numpy(output: torch.Tensor) -> OutputArray:
    host = output.detach().to("cpu")
    if host.is_complex() or host.is_sparse or host.dtype == torch.bfloat16:
        raise ModelError(
            f"the model's forward returned {output.dtype} ({output.layout}), which has no "
            "counterpart among the outputs of a float32 ONNX file. Wrap the model to return it "
            "as float32."
        )
    array: OutputArray = np.ascontiguousarray(host.numpy()).reshape(tuple(host.shape))
    return array
