"""The file of a net, and whether it is correct, determined without the gate."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.corpus.architecture import BATCH, Architecture
from benchmarks.corpus.exporters import EXAMPLE, Export
from benchmarks.nets.net import Drawn, tensors_of

Outputs = list[NDArray[np.generic]]


@dataclass(frozen=True)
class _Exported(Architecture):
    """A net as the exporters of the corpus take it: with the axes as they are."""

    moving: dict[str, dict[int, str]] = field(default_factory=dict)

    def dynamic(self, name: str) -> dict[int, str]:
        return self.moving[name]


def write(drawn: Drawn, path: Path) -> None:
    """Export the net. Raises ExportRefused."""
    names = [f"out{place}" for place in range(drawn.outputs)]
    architecture = _Exported(
        name=str(drawn.seed),
        make=lambda: drawn.model,
        draw=lambda count, _seed: {name: a[:count] for name, a in drawn.samples.items()},
        outputs=tuple(names),
        moving={name: {0: BATCH} for name in drawn.samples}
        | dict(zip(names, _moving(drawn), strict=True)),
    )
    Export(drawn.model, architecture, drawn.recipe).write(path)


def _moving(drawn: Drawn) -> Iterator[dict[int, str]]:
    """For each output the axes that follow the size of the batch."""
    fewer, more = (
        run(drawn.model, {name: a[:count] for name, a in drawn.samples.items()}, count)
        for count in (EXAMPLE, EXAMPLE + 3)
    )
    for one, other in zip(fewer, more, strict=True):
        sizes = zip(one[0].shape, other[0].shape, strict=True)
        yield {axis: f"{BATCH}{axis}" for axis, (a, b) in enumerate(sizes) if a != b}


def run(
    model: nn.Module, samples: dict[str, NDArray[np.generic]], size: int, *, double: bool = False
) -> list[Outputs]:
    """For each output of the model its values, batch by batch."""
    copied = copy.deepcopy(model)
    if double:
        copied = copied.double()
    made = []
    for batch in _batches(samples, size):
        tensors = [torch.from_numpy(array.copy()) for array in batch.values()]
        if double:
            tensors = [t.double() if t.is_floating_point() else t for t in tensors]
        with torch.no_grad():
            made.append([t.numpy() for t in tensors_of(copied(*tensors))])
    return [list(arrays) for arrays in zip(*made, strict=True)]


def run_file(path: Path, samples: dict[str, NDArray[np.generic]], size: int) -> list[Outputs]:
    """The same of the file, in ONNX Runtime without optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    made = []
    for batch in _batches(samples, size):
        made.append(session.run(None, {k: v for k, v in batch.items() if k in names}))
    return [list(arrays) for arrays in zip(*made, strict=True)]


def _batches(
    samples: dict[str, NDArray[np.generic]], size: int
) -> Iterator[dict[str, NDArray[np.generic]]]:
    count = len(next(iter(samples.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in samples.items()}
