"""Undo what a forward does to the parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class _Slot:
    """One parameter or buffer of the copy."""

    holder: MutableMapping[str, torch.Tensor | None]
    """`_parameters` or `_buffers` of its module."""
    key: str
    tensor: torch.Tensor
    data: torch.Tensor
    """The same memory, also after forward has given `tensor` another one by `.data = ...`."""
    version: int
    original: torch.Tensor

    @property
    def current(self) -> torch.Tensor | None:
        """Return the value that forward left under the name; None if it was deleted."""
        return self.holder[self.key] if self.key in self.holder else None  # noqa: SIM401

    def is_written(self) -> bool:
        """Return True if an operator has written into the tensor."""
        return _version(self.tensor) != self.version

    def differs(self) -> bool:
        """Return True if it is another tensor, or has other values."""
        if self.current is not self.tensor or self.tensor.shape != self.original.shape:
            return True
        try:
            value = self.original.detach().to(self.tensor)
            if torch.equal(self.tensor, value):
                return False
            nan = self.tensor.isnan() & value.isnan()
            return not bool(((self.tensor == value) | nan).all())
        except RuntimeError:  # sparse, quantized, meta: no such operators
            return False

    def write(self, value: torch.Tensor) -> None:
        """Put a value under the name."""
        if value.shape != self.data.shape:
            self.holder[self.key] = value
            return
        if self.current is not self.tensor:
            self.holder[self.key] = self.tensor
        if self.tensor.data_ptr() != self.data.data_ptr():
            self.tensor.data = self.data
        self.tensor.copy_(value)

    def restore(self) -> None:
        """Put the original value back."""
        self.write(self.original.detach())
        self.version = _version(self.tensor)


class ModelState:
    """The parameters and buffers of a private copy of a model, restored after each forward.

    Changes are found by the version counters of the tensors, which cost nothing. Writes of
    batch_norm and through `.data` do not count there, so the values are also compared once, after
    the first forward.
    """

    def __init__(self, model: nn.Module, original: nn.Module | None = None) -> None:
        """original: the model that `model` is a copy of, which never runs. None: the values are
        cloned."""
        self._modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        values = {} if original is None else dict(_slots(original))
        self._slots: dict[str, _Slot] = {}
        for name, (holder, key, tensor) in _slots(model):
            value = values[name][2] if name in values else tensor.detach().clone()
            with torch.inference_mode(tensor.is_inference()):
                data = tensor.data
            self._slots[name] = _Slot(holder, key, tensor, data, _version(tensor), value)
        self._changed: dict[str, _Slot] = {}
        self._is_compared = False
        self._values_after: dict[str, torch.Tensor] = {}

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the parameters and buffers that a forward has changed so far."""
        return tuple(self._changed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state after the `with` block, in which forward may change it."""
        may_change = not self._is_compared or bool(self._changed)
        attributes = self._attributes() if may_change else []
        try:
            yield
        finally:
            if self.find_changes():
                with _without_modes():
                    self._restore(attributes)

    def find_changes(self) -> bool:
        """Return True if a forward has changed the state, now or earlier."""
        with _without_modes():
            for name, slot in self._slots.items():
                if slot.is_written() or (not self._is_compared and slot.differs()):
                    self._changed[name] = slot
        self._is_compared = True
        return bool(self._changed)

    def after(self, forward: Callable[[], object]) -> dict[str, torch.Tensor]:
        """Return the changed state after calling `forward` inside `restored`."""
        self._values_after.clear()
        forward()
        return dict(self._values_after)

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the values of changed parameters and buffers for the next forward, by name."""
        with _without_modes():
            for name, value in values.items():
                self._changed[name].write(value)

    def _attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return everything that modules refer to, without copying.

        A forward that replaces a buffer may keep its length in a plain attribute.
        """
        attributes_before = []
        for module in self._modules:
            for attributes in (vars(module), module._parameters, module._buffers):
                attributes_before.append((attributes, dict(attributes)))
        return attributes_before

    def _restore(self, attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for name, slot in self._changed.items():
            if slot.current is not None:
                self._values_after[name] = slot.current.detach().clone()
        for current, original in attributes:
            for name in current.keys() - original.keys():
                del current[name]
            current.update(original)
        for slot in self._changed.values():
            slot.restore()


def _slots(
    model: nn.Module,
) -> Iterator[tuple[str, tuple[MutableMapping[str, torch.Tensor | None], str, torch.Tensor]]]:
    """Yield the parameters and buffers by name, without those that have no values yet."""
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and not nn.parameter.is_lazy(tensor):
                    yield f"{path}.{key}" if path else key, (holder, key, tensor)


def _version(tensor: torch.Tensor) -> int:
    """Return the version counter; 0 for tensors of inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _without_modes() -> Iterator[None]:
    """Disable the modes that observe or change operators."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield
