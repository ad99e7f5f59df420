"""The switches that only the TorchScript-based exporter has: as PyTorch takes them, and as the
record says them.

PyTorch calls all of them deprecated; a version without one must not leave it out in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gate.errors import ExportError
from gate.records.strategy import ExportSettings

_FIELDS = (
    "custom_opsets",
    "autograd_inlining",
    "export_modules_as_functions",
    "operator_export_type",
)


@dataclass(frozen=True)
class Switches:
    """Those of one export."""

    settings: ExportSettings

    def check(self, model: nn.Module) -> None:
        """Before anything is exported. Raises ExportError for a switch that is set and that this
        PyTorch lacks, and for a class that no module of `model` has."""
        for field in _FIELDS:
            default = ExportSettings.model_fields[field].default
            if getattr(self.settings, field) != default and field not in _parameters():
                raise ExportError(
                    f"export.{field} is set, and the exporter of the installed PyTorch "
                    f"{torch.__version__} has no such setting. Leave it out."
                )
        self._functions(model)

    def keywords(self, model: nn.Module) -> dict[str, Any]:
        """For `torch.onnx.export(dynamo=False)`: those that it has."""
        from torch.onnx import OperatorExportTypes

        given = {
            "custom_opsets": dict(self.settings.custom_opsets) or None,
            "autograd_inlining": self.settings.autograd_inlining,
            "export_modules_as_functions": self._functions(model),
            "operator_export_type": getattr(
                OperatorExportTypes, self.settings.operator_export_type
            ),
        }
        return {name: value for name, value in given.items() if name in _parameters()}

    def described(self) -> dict[str, bool | str | None]:
        """The same, flat, for the record."""
        settings = self.settings
        opsets = ",".join(f"{domain}={v}" for domain, v in settings.custom_opsets.items())
        functions = settings.export_modules_as_functions
        return {
            "custom_opsets": opsets or None,
            "autograd_inlining": settings.autograd_inlining,
            "export_modules_as_functions": (
                functions if isinstance(functions, bool) else ",".join(functions)
            ),
            "operator_export_type": settings.operator_export_type,
        }

    def _functions(self, model: nn.Module) -> bool | set[type[nn.Module]]:
        wanted = self.settings.export_modules_as_functions
        if isinstance(wanted, bool):
            return wanted
        return {kind for name in wanted for kind in _classes(name, model)}


def _classes(name: str, model: nn.Module) -> Iterator[type[nn.Module]]:
    """Of this name, with its module or without."""
    kinds = {type(module) for module in model.modules()}
    names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    found = [kind for kind, whole in names.items() if f".{whole}".endswith(f".{name}")]
    if not found:
        raise ExportError(
            f"export.export_modules_as_functions names {name}, and no module of the model is one. "
            f"It has: {', '.join(sorted(names.values()))}. Name one of them, or true for all."
        )
    yield from found


def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(torch.onnx.export).parameters)
