"""Write the file of a net and run both sides, without the gate."""

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
from benchmarks.nets.net import RandomNet, flatten_outputs

Outputs = list[NDArray[np.generic]]


@dataclass(frozen=True)
class _ExplicitArchitecture(Architecture):
    """A net in the form that the exporters of the corpus take, with explicit dynamic axes."""

    axes_by_name: dict[str, dict[int, str]] = field(default_factory=dict)

    def dynamic_axes(self, name: str) -> dict[int, str]:
        return self.axes_by_name[name]


def write(net: RandomNet, path: Path) -> None:
    """Export the net. Raises ExportRefused."""
    names = [f"out{index}" for index in range(net.outputs)]
    architecture = _ExplicitArchitecture(
        name=str(net.seed),
        make=lambda: net.model,
        draw=lambda count, _seed: {name: a[:count] for name, a in net.samples.items()},
        outputs=tuple(names),
        axes_by_name={name: {0: BATCH} for name in net.samples}
        | dict(zip(names, _find_batch_axes(net), strict=True)),
    )
    Export(net.model, architecture, net.recipe).write(path)


def _find_batch_axes(net: RandomNet) -> Iterator[dict[int, str]]:
    """Yield the axes of each output whose size depends on the batch size."""
    small, large = (
        run(net.model, {name: a[:count] for name, a in net.samples.items()}, count)
        for count in (EXAMPLE, EXAMPLE + 3)
    )
    for small_batches, large_batches in zip(small, large, strict=True):
        sizes = zip(small_batches[0].shape, large_batches[0].shape, strict=True)
        yield {axis: f"{BATCH}{axis}" for axis, (a, b) in enumerate(sizes) if a != b}


def run(
    model: nn.Module, samples: dict[str, NDArray[np.generic]], size: int, *, double: bool = False
) -> list[Outputs]:
    """Return the values of each output of the model, batch by batch."""
    copied = copy.deepcopy(model)
    if double:
        copied = copied.double()
    batch_outputs = []
    for batch in _batches(samples, size):
        tensors = [torch.from_numpy(array.copy()) for array in batch.values()]
        if double:
            tensors = [t.double() if t.is_floating_point() else t for t in tensors]
        with torch.no_grad():
            batch_outputs.append([t.numpy() for t in flatten_outputs(copied(*tensors))])
    return [list(arrays) for arrays in zip(*batch_outputs, strict=True)]


def run_file(path: Path, samples: dict[str, NDArray[np.generic]], size: int) -> list[Outputs]:
    """Return the values of each output of the file in ONNX Runtime without optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    batch_outputs = []
    for batch in _batches(samples, size):
        batch_outputs.append(session.run(None, {k: v for k, v in batch.items() if k in names}))
    return [list(arrays) for arrays in zip(*batch_outputs, strict=True)]


def _batches(
    samples: dict[str, NDArray[np.generic]], size: int
) -> Iterator[dict[str, NDArray[np.generic]]]:
    count = len(next(iter(samples.values())))
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in samples.items()}
