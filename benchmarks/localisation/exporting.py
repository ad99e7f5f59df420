"""Both exporters of PyTorch, as users call them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from benchmarks.localisation.architecture import Arrays
from gate.export.export_warnings import captured

Exporter = Literal["legacy", "dynamo"]


def export(model: nn.Module, example: Arrays, path: Path, *, by: Exporter) -> None:
    """Write a file of a copy of `model`, with a dynamic batch. Raises what the exporter raises."""
    model = copy.deepcopy(model)
    given = tuple(torch.from_numpy(array) for array in example.values())
    names = list(example)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with captured(), torch.no_grad():
            if by == "dynamo":
                program = torch.onnx.export(
                    model, given, dynamo=True, input_names=names, output_names=["out"],
                    dynamic_shapes=tuple({0: torch.export.Dim.DYNAMIC} for _ in given),
                    verbose=False,
                )  # fmt: skip
                program.save(str(path), external_data=False)
            else:
                torch.onnx.export(
                    model, given, str(path), dynamo=False, opset_version=17, input_names=names,
                    output_names=["out"],
                    dynamic_axes={key: {0: "batch"} for key in [*names, "out"]},
                )  # fmt: skip
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
