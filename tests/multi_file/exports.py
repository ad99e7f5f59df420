"""Export of one module to one ONNX file with the TorchScript exporter."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn


def export_module(
    module: nn.Module,
    path: Path,
    *arguments: torch.Tensor,
    dynamic_steps: str = "",
    opset: int = 17,
) -> None:
    """Export with a dynamic axis 0. `grows`: an input whose axis 1 is also dynamic."""
    names = [f"in_{index}" for index in range(len(arguments))]
    axes = {name: {0: "n"} for name in (*names, "out")}
    if dynamic_steps:
        axes[dynamic_steps][1] = "steps"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, arguments, str(path), dynamo=False, opset_version=opset, input_names=names,
            output_names=["out"], dynamic_axes=axes,
        )  # fmt: skip
