"""PyTorch's exporters by name, called with a dynamic batch axis unless a recipe disables it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.trained import to_tensors
from gate.export.export_warnings import captured
from gate.records.evidence import ExportRecord

EXAMPLE = 4
"""Number of samples in the example of the export."""


class ExportRefused(Exception):
    """An error of an exporter. The message is the first line of the exporter's message."""


@dataclass(frozen=True)
class Recipe:
    """An exporter with its settings."""

    exporter: str
    """`traced`: `torch.jit.trace`, then the TorchScript-based exporter; `direct`: that exporter on
    the module; `scripted`: on the result of `torch.jit.script`; `dynamo`: the exporter on
    `torch.export`; `dynamo-external`: the same with external data.
    """
    opset: int
    folding: bool = True
    """Whether the TorchScript-based exporter folds constants."""
    training: bool = False
    """Whether modules in training mode stay in it. BatchNorm is then not folded into convolutions.
    """
    dynamic_batch: bool = True

    @property
    def name(self) -> str:
        """Return the name, such as `traced-13` or `direct-17-unfolded`."""
        parts = [self.exporter, str(self.opset)]
        parts += [] if self.folding else ["unfolded"]
        parts += ["preserved"] if self.training else []
        parts += [] if self.dynamic_batch else ["fixed"]
        return "-".join(parts)

    def record(self) -> ExportRecord:
        """Return the record that a pipeline would write, which always has a dynamic batch axis."""
        return ExportRecord(
            strategy=self.exporter,
            settings={
                "opset_version": self.opset,
                "do_constant_folding": self.folding,
                "dynamic_batch": True,
                "batch_size": EXAMPLE,
            },
        )


TRACED_13, TRACED_17 = Recipe("traced", 13), Recipe("traced", 17)
DIRECT_13, DIRECT_17, DIRECT_20 = Recipe("direct", 13), Recipe("direct", 17), Recipe("direct", 20)
SCRIPTED_17 = Recipe("scripted", 17)
DYNAMO_18, DYNAMO_20 = Recipe("dynamo", 18), Recipe("dynamo", 20)
EXTERNAL_18 = Recipe("dynamo-external", 18)
PRESERVED_17 = Recipe("direct", 17, training=True)

Example = tuple[torch.Tensor, ...]


class Export:
    """One run of an exporter on a copy of the model, which can be written more than once."""

    def __init__(self, model: nn.Module, architecture: Architecture, recipe: Recipe) -> None:
        """Export with dynamo if the recipe says so. Raises ExportRefused if that fails."""
        self._architecture, self._recipe = architecture, recipe
        self._model = copy.deepcopy(model)
        self._example = to_tensors(architecture.draw(EXAMPLE, 7), 0, EXAMPLE)
        self._inputs = list(architecture.draw(1, 0))
        self._program: Any = None
        if recipe.exporter.startswith("dynamo"):
            with _export_context():
                self._program = self._export_with_dynamo()

    def write(self, path: Path, *, external: bool = False) -> None:
        """Write the file, with external data if `external` (dynamo only). Raises ExportRefused."""
        with _export_context():
            if self._program is not None:
                self._program.save(str(path), external_data=external)
            else:
                self._export_with_torchscript(path)
        if not path.is_file():
            raise ExportRefused("no file was written")

    def _export_with_dynamo(self) -> Any:
        model, architecture = self._model, self._architecture
        if architecture.rewritten is not None:
            rewritten_model = architecture.rewritten()
            rewritten_model.load_state_dict(model.state_dict())
            model = rewritten_model.eval()
        shapes: tuple[Any, ...] = tuple(
            dict.fromkeys(architecture.dynamic_axes(name), torch.export.Dim.DYNAMIC)
            for name in self._inputs
        )
        parameters = inspect.signature(model.forward).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            shapes = (shapes,)
        return torch.onnx.export(
            model,
            self._example,
            dynamo=True,
            opset_version=self._recipe.opset,
            input_names=self._inputs,
            output_names=list(architecture.outputs),
            dynamic_shapes=shapes if self._recipe.dynamic_batch else None,
            verbose=False,
        )

    def _export_with_torchscript(self, path: Path) -> None:
        recipe, model = self._recipe, self._model
        if recipe.exporter == "traced":
            model = torch.jit.trace(model, self._example, check_trace=False, strict=False)
        elif recipe.exporter == "scripted":
            model = torch.jit.script(model)
        outputs = list(self._architecture.outputs)
        axes = {name: self._architecture.dynamic_axes(name) for name in (*self._inputs, *outputs)}
        mode = torch.onnx.TrainingMode
        torch.onnx.export(
            model,
            self._example,
            str(path),
            dynamo=False,
            opset_version=recipe.opset,
            do_constant_folding=recipe.folding,
            input_names=self._inputs,
            output_names=outputs,
            dynamic_axes=axes if recipe.dynamic_batch else None,
            training=mode.PRESERVE if recipe.training else mode.EVAL,
        )


@contextmanager
def _export_context() -> Iterator[None]:
    """Suppress output and gradients, and disable fused attention, which cannot be exported.

    Raises ExportRefused for any exception.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with captured(), torch.no_grad():
            yield
    except Exception as error:
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        message = message.partition("  [Caused by")[0]
        raise ExportRefused(f"{type(error).__name__}: {message[:200]}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
