"""What a model's Python code reads from its tensors: branches, and how near they are to flip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
    "allclose", "equal", "is_nonzero", "item", "numpy", "tolist",
}  # fmt: skip
_GREATER = {"gt", "ge", "__gt__", "__ge__", "greater", "greater_equal"}
_LESS = {"lt", "le", "__lt__", "__le__", "less", "less_equal"}
_EQUAL = {"eq", "__eq__"}
_UNEQUAL = {"ne", "__ne__", "not_equal"}
_COMBINATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(["__and__", "logical_and", "bitwise_and"], torch.minimum),
    **dict.fromkeys(["__or__", "logical_or", "bitwise_or"], torch.maximum),
    **dict.fromkeys(["__invert__", "logical_not", "bitwise_not"], torch.neg),
    "any": torch.max,
    "all": torch.min,
}
"""How margins combine where bools do."""


@dataclass(frozen=True)
class Read:
    """A value that Python code took out of a tensor."""

    branch: bool | None
    """The value where it is a bool: probably a branch. None: a number, or a whole array."""
    margin: float | None
    """Positive where the bool is true, negative where it is false, and the nearer to zero the
    nearer it is to flip; None where that is not known."""


class Watch(TorchFunctionMode):
    """Records the reads while a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._margins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a comparison's result, which is kept alive so that no other gets its id."""

    @property
    def path(self) -> tuple[bool, ...]:
        """The branches, in the order in which they were taken."""
        return tuple(read.branch for read in self.reads if read.branch is not None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READS:
            branch = returned if isinstance(returned, bool) else None
            self.reads.append(Read(branch, self._margin_of(args[0]) if args else None))
        elif isinstance(returned, torch.Tensor) and returned.dtype == torch.bool and not kwargs:
            self._follow(name, args, returned)
        return returned

    def _margin_of(self, value: Any) -> float | None:
        margin = self._margins.get(id(value))
        return float(margin[1]) if margin is not None and margin[1].numel() == 1 else None

    def _follow(self, name: str, args: tuple[Any, ...], returned: torch.Tensor) -> None:
        try:
            margin = self._margin(name, args)
        except (RuntimeError, TypeError):  # what can't be subtracted has no margin
            return
        if margin is not None:
            self._margins[id(returned)] = (returned, margin)

    def _margin(self, name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        if name in _GREATER | _LESS | _EQUAL | _UNEQUAL:
            return _compared(name, *args)
        margins = [self._margins[id(arg)][1] for arg in args if id(arg) in self._margins]
        combine = _COMBINATIONS.get(name)
        return (
            combine(*margins)
            if combine is not None and margins and len(margins) == len(args)
            else None
        )


def _compared(name: str, left: Any, right: Any) -> torch.Tensor:
    difference = torch.as_tensor(left).double() - torch.as_tensor(right).double()
    if name in _GREATER:
        return difference
    if name in _LESS:
        return -difference
    return difference.abs() if name in _UNEQUAL else -difference.abs()
