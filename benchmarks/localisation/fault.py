"""A fault of one place, and how the changes to a model are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Edit = Callable[[nn.Module], object]
FAULTS: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """What is wrong in the exported model."""

    architecture: str
    title: str
    truth: str
    """Path of the module that is wrong, or of the parameter; empty for the model's own forward."""
    edit: Edit
    """Changes a copy of the model."""

    @property
    def name(self) -> str:
        """`hf-bert/position-row`."""
        return f"{self.architecture}/{self.title}"


def of(architecture: str, *rows: tuple[str, str, Edit]) -> None:
    """Register faults of one architecture: (title, truth, edit)."""
    FAULTS.extend(Fault(architecture, title, truth, edit) for title, truth, edit in rows)


def element(parameter: str) -> Edit:
    """One element in the middle is off by half of the largest."""

    def edit(tensor: torch.Tensor) -> None:
        tensor.view(-1)[tensor.numel() // 2] += 0.5 * float(tensor.abs().max())

    return _of_tensor(parameter, edit)


def row(parameter: str, place: int = 1) -> Edit:
    """One row is off by a tenth of the largest element."""

    def edit(tensor: torch.Tensor) -> None:
        tensor[place] += 0.1 * float(tensor.abs().max())

    return _of_tensor(parameter, edit)


def scaled(parameter: str, factor: float = 1.02) -> Edit:
    """All elements times a factor."""
    return _of_tensor(parameter, lambda tensor: tensor.mul_(factor))


def shifted(parameter: str, by: float = 0.01) -> Edit:
    """All elements plus a number."""
    return _of_tensor(parameter, lambda tensor: tensor.add_(by))


def dropped(parameter: str) -> Edit:
    """All elements are zero."""
    return _of_tensor(parameter, torch.Tensor.zero_)


def rolled(parameter: str) -> Edit:
    """The rows are in another order."""
    return _of_tensor(parameter, lambda tensor: tensor.copy_(tensor.roll(1, 0)))


def halved(parameter: str) -> Edit:
    """Through float16."""
    return _of_tensor(parameter, lambda tensor: tensor.copy_(tensor.half().float()))


def clamped(parameter: str, lowest: float) -> Edit:
    """No element is below."""
    return _of_tensor(parameter, lambda tensor: tensor.clamp_(min=lowest))


def setting(path: str, **values: Any) -> Edit:
    """Attributes of a module are others; a callable gets the value as it is."""

    def edit(model: nn.Module) -> None:
        module = model.get_submodule(path)
        for name, value in values.items():
            before = getattr(module, name)
            setattr(module, name, value(before) if callable(value) else value)

    return edit


def another(path: str, make: Callable[[], nn.Module]) -> Edit:
    """Another module stands in its place."""
    return lambda model: model.set_submodule(path, make().eval())


def forward(path: str, code: Callable[..., Any]) -> Edit:
    """The module's forward is `code(module, *args)`."""

    def edit(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.__class__ = type(type(module).__name__, (type(module),), {"forward": code})

    return edit


def _of_tensor(parameter: str, change: Callable[[torch.Tensor], object]) -> Edit:
    def edit(model: nn.Module) -> None:
        path, _, name = parameter.rpartition(".")
        change(getattr(model.get_submodule(path), name).data)

    return edit
