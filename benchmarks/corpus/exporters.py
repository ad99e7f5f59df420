"""PyTorch's exporters by name. All are called with a dynamic batch."""

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
from benchmarks.corpus.trained import tensors
from gate.export.export_warnings import captured
from gate.records.evidence import ExportRecord

EXAMPLE = 4
"""Samples in the example that is exported with."""


class ExportRefused(Exception):
    """The exporter says no; the message is its first line."""


@dataclass(frozen=True)
class Recipe:
    """Which exporter, with which settings."""

    exporter: str
    """`traced`: `torch.jit.trace`, then the TorchScript-based exporter; `direct`: that exporter on
    the module; `scripted`: on `torch.jit.script` of it; `dynamo`: on `torch.export`;
    `dynamo-external`: the same with the weights in a file of their own."""
    opset: int
    folding: bool = True
    """Constant folding, of the TorchScript-based exporter."""
    training: bool = False
    """Parts that are in training mode stay so; BatchNorm is not folded into convolutions then."""
    dynamic_batch: bool = True

    @property
    def name(self) -> str:
        """`traced-13`, `direct-17-unfolded`."""
        parts = [self.exporter, str(self.opset)]
        parts += [] if self.folding else ["unfolded"]
        parts += ["preserved"] if self.training else []
        parts += [] if self.dynamic_batch else ["fixed"]
        return "-".join(parts)

    def record(self) -> ExportRecord:
        """What a pipeline would have written down: it always asks for a dynamic batch."""
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
    """One run of an exporter; it can be written more than once. Works on a copy of the model."""

    def __init__(self, model: nn.Module, architecture: Architecture, recipe: Recipe) -> None:
        """Raises ExportRefused where `torch.export` or the translation fails."""
        self._architecture, self._recipe = architecture, recipe
        self._model = copy.deepcopy(model)
        self._example = tensors(architecture.draw(EXAMPLE, 7), 0, EXAMPLE)
        self._inputs = list(architecture.draw(1, 0))
        self._program: Any = None
        if recipe.exporter.startswith("dynamo"):
            with _plainly():
                self._program = self._translated()

    def write(self, path: Path, *, external: bool = False) -> None:
        """Write `path`; `external`: with the weights beside it (dynamo only). Raises
        ExportRefused."""
        with _plainly():
            if self._program is not None:
                self._program.save(str(path), external_data=external)
            else:
                self._by_torchscript(path)
        if not path.is_file():
            raise ExportRefused("no file was written")

    def _translated(self) -> Any:
        model, architecture = self._model, self._architecture
        if architecture.rewritten is not None:
            rewritten = architecture.rewritten()
            rewritten.load_state_dict(model.state_dict())
            model = rewritten.eval()
        shapes: tuple[Any, ...] = tuple(
            dict.fromkeys(architecture.dynamic(name), torch.export.Dim.DYNAMIC)
            for name in self._inputs
        )
        parameters = inspect.signature(model.forward).parameters.values()
        if any(one.kind is one.VAR_POSITIONAL for one in parameters):
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

    def _by_torchscript(self, path: Path) -> None:
        recipe, model = self._recipe, self._model
        if recipe.exporter == "traced":
            model = torch.jit.trace(model, self._example, check_trace=False, strict=False)
        elif recipe.exporter == "scripted":
            model = torch.jit.script(model)
        outputs = list(self._architecture.outputs)
        axes = {name: self._architecture.dynamic(name) for name in (*self._inputs, *outputs)}
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
def _plainly() -> Iterator[None]:
    """No noise on the terminal, no gradients, attention by ordinary operators (the fused one can't
    be exported). What breaks is ExportRefused."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with captured(), torch.no_grad():
            yield
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        first = first.partition("  [Caused by")[0]
        raise ExportRefused(f"{type(error).__name__}: {first[:200]}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
