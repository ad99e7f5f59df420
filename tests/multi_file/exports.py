"""One module as one ONNX file, by the plain exporter."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn


def export(
    module: nn.Module, path: Path, *given: torch.Tensor, grows: str = "", opset: int = 17
) -> None:
    """`grows`: an input whose axis 1 is dynamic, too."""
    names = [f"in_{index}" for index in range(len(given))]
    axes = {name: {0: "n"} for name in (*names, "out")}
    if grows:
        axes[grows][1] = "steps"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, given, str(path), dynamo=False, opset_version=opset, input_names=names,
            output_names=["out"], dynamic_axes=axes,
        )  # fmt: skip
