"""The reference as a witness: what it does itself is no fault of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gate.parity.rounding.dispatch import DispatchMode
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_SWITCHES = ("train", "training")


@dataclass
class Witness:
    """Answers about the reference. It is run at most once, and only for a file that gives reason.

    `run` computes `batch` with `model`.
    """

    model: nn.Module
    run: Callable[[Batch], list[Array]]
    batch: Batch

    @property
    def samples(self) -> int:
        """In the batch that was run."""
        return len(next(iter(self.batch.values())))

    @cached_property
    def rows(self) -> tuple[int | None, ...]:
        """The first axis of each output for that batch; None: it has no axis."""
        return tuple(output.shape[0] if output.ndim else None for output in self._watched[1])

    @cached_property
    def conduct(self) -> Conduct:
        """What the operators of the reference did."""
        return self._watched[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of all parameters, buffers and plain attributes that hold floats."""
        return ((name, value) for name, value in self.held() if value.is_floating_point())

    def bytes_held(self) -> set[int]:
        """Numbers of elements of what the model holds in integers of eight bits."""
        few = (torch.int8, torch.uint8)
        return {value.numel() for _, value in self.held() if value.dtype in few}

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of every type; what is shared comes under each of its names."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            own = {
                **vars(module),
                **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
                **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
            }
            for name, value in own.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value

    @cached_property
    def _watched(self) -> tuple[Conduct, list[Array]]:
        with Conduct() as conduct:
            outputs = self.run(self.batch)
        return conduct, outputs


class Conduct(DispatchMode):
    """Watches the operators of PyTorch that run inside it.

    Without gradients these are the ones that forward calls, such as `batch_norm` and `linear`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        """Of all tensors that operators returned."""
        self.draws = False
        """True if one drew random numbers."""
        self.batch_statistics = False
        """True if one normalised by the statistics of the batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.dtypes.add(one.dtype)
        given = _arguments(func, args) | kwargs
        training = [bool(given[name]) for name in _SWITCHES if name in given]
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0.0:
            self.draws = self.draws or all(training)
        if "batch_norm" in func.name():
            self.batch_statistics = self.batch_statistics or any(training)
        return result


def _arguments(func: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments and the defaults, by name."""
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False))
