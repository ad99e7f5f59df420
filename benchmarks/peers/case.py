"""The input of a tool: a model, a file, samples; and the ONNX Runtime session of all tools."""

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
    """The peer can't compare this model with any file; a file that breaks is refused instead."""


@dataclass(frozen=True)
class Case:
    """One (reference, file) pair."""

    model: nn.Module
    """In eval mode, on the CPU."""
    file: Path
    samples: Arrays
    """In the order in which `forward` takes them; axis 0 is the sample."""
    outputs: tuple[str, ...] = ("logits",)
    """How the model's author calls what it returns."""
    classes: bool = True
    """Whether the largest of axis 1 of the first output is an answer."""
    batch_size: int = 4
    """The batch that the file was exported with."""

    def batches(self) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Whole batches, so that a file with a fixed batch can be fed too."""
        count = len(next(iter(self.samples.values())))
        for start in range(0, count - self.batch_size + 1, self.batch_size):
            stop = start + self.batch_size
            yield {name: array[start:stop].copy() for name, array in self.samples.items()}

    def expected(self, batch: Arrays) -> list[NDArray[np.generic]]:
        """What the model returns, nested containers flattened."""
        with torch.no_grad():
            returned = self.model(*tensors(batch))
        return [tensor.numpy() for tensor in torch.utils._pytree.tree_leaves(returned)]


Judge = Callable[[Case], bool]
"""True if the file passes. Raises CannotJudge; what else it raises about the file is a refusal."""


def tensors(batch: Arrays) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in batch.values())


def session(model: str | bytes, *, optimized: bool = True) -> onnxruntime.InferenceSession:
    """On the CPU, with PyTorch's number of threads; else as ONNX Runtime's defaults are."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
