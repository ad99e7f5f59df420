"""The input of a tool: a model, a file and samples; and the ONNX Runtime session of all tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

Arrays = Mapping[str, NDArray[np.generic]]


class CannotJudge(Exception):
    """The tool cannot compare this model with any file. A broken file is refused instead."""


@dataclass(frozen=True)
class Case:
    """A reference model and a file."""

    model: nn.Module
    """The model in eval mode on the CPU."""
    file: Path
    samples: Arrays
    """Samples in the order of the arguments of `forward`; axis 0 is the sample."""
    outputs: tuple[str, ...] = ("logits",)
    """Names of the model's outputs."""
    classes: bool = True
    """True if the argmax along axis 1 of the first output is the predicted class."""
    batch_size: int = 4
    """Batch size of the export."""

    def batches(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Yield only complete batches, so that a file with a fixed batch size can be run too."""
        count = len(next(iter(self.samples.values())))
        for start in range(0, count - self.batch_size + 1, self.batch_size):
            stop = start + self.batch_size
            yield {name: array[start:stop].copy() for name, array in self.samples.items()}

    def expected_outputs(self, batch: Arrays) -> list[NDArray[np.generic]]:
        """Return the outputs of the model, with nested containers flattened."""
        with torch.no_grad():
            outputs = self.model(*to_tensors(batch))
        return [tensor.numpy() for tensor in torch.utils._pytree.tree_leaves(outputs)]


Judge = Callable[[Case], bool]
"""Returns True if the file passes. Raises CannotJudge; any other exception is a refusal."""


def to_tensors(batch: Arrays) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in batch.values())


def open_session(model: str | bytes, *, optimized: bool = True) -> onnxruntime.InferenceSession:
    """Open a CPU session with PyTorch's number of threads and ONNX Runtime's other defaults."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
