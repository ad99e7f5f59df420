"""What the model's forward computes from its own tensors alone, without the inputs.

An exporter that folds constants writes just these into the file: a masked weight, the weight of a
weight norm, a table of sines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gate.parity.graph.pool import is_plain
from gate.parity.rounding.dispatch import DispatchMode

_LIMIT = 1 << 28
"""Elements that are kept at most: 1 GiB of float32."""


class Computed(DispatchMode):
    """Keeps the results of operators that get nothing but the model's tensors and numbers.

    A tensor of unknown origin is an input or made of one.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        """`own`: the model's tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = list(own)
        self._constant = {id(tensor): tensor for tensor in self._own}
        """By identity. They are kept, so that no other tensor gets the number."""
        self._addresses = {
            _address(tensor) for tensor in self._own if is_plain(tensor) and tensor.numel()
        }
        self._results: dict[int, tuple[str, torch.Tensor]] = {}
        self._places: Counter[int] = Counter()
        """Addresses of the results."""
        self._elements = 0
        self._written: set[int] = set()

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of floats that were computed, each under the name of its operator."""
        return (pair for pair in self._results.values() if pair[1].is_floating_point())

    def wrote(self, tensor: torch.Tensor) -> bool:
        """True if forward itself changes the values of a tensor of the model."""
        return _address(tensor) in self._written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if _is_tensor(tensor)]
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in pytree.tree_leaves(result) if _is_tensor(tensor)]
        fresh = func.namespace == "aten" and "lift_fresh" in func.name()
        random = torch.Tag.nondeterministic_seeded in func.tags
        fixed = not random and (fresh or all(self._is_constant(tensor) for tensor in given))
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs or {}, fixed=fixed)
        for tensor in made:
            if not fixed:
                self._forget(tensor)
            elif is_plain(tensor) and self._elements <= _LIMIT:
                self._constant[id(tensor)] = tensor
                if not any(tensor is other for other in given):
                    self._elements += tensor.numel()
                    self._results[id(tensor)] = (func.name().partition("::")[2], tensor)
                    self._places[_address(tensor)] += 1
        return result

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._constant:
            return True
        return is_plain(tensor) and _address(tensor) in self._addresses

    def _note_writes(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, fixed: bool
    ) -> None:
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[at] if at < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(target):
                if not _is_tensor(tensor) or not is_plain(tensor):
                    continue
                self._written.add(_address(tensor))
                if not fixed:
                    self._forget(tensor)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Neither the tensor nor those that share its storage are constants any more."""
        self._constant.pop(id(tensor), None)
        address = _address(tensor) if is_plain(tensor) else 0
        if not self._places[address]:
            return
        for number, (_, one) in list(self._results.items()):
            if _address(one) == address:
                self._results.pop(number)
                self._constant.pop(number, None)
        del self._places[address]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
