"""Small modules, their exports, and samples for them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from gate import Digest, Evidence, MeasurementJob, Policy, SampleSet, TestedFile
from gate.api import INSTRUMENTS
from gate.measure.run import MeasurementRun
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import Subject, TensorSpec
from gate.records.runtime import RuntimeName
from gate.statistics.sample_table import SampleTable

CLASSES = 7


class Net(nn.Module):
    """A convolutional classifier: images (n, 3, 8, 8) to logits (n, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).amax((2, 3))
        return self.head(self.drop(x))


class TwoInputs(nn.Module):
    """A module with two named inputs that returns a tensor, a difference and a mask, nested in a
    tuple and a dict.
    """

    def forward(self, left, right):
        return {"sum": left + right, "more": (left - 2 * right, (left > right).any(1))}


def net(seed: int = 0) -> Net:
    """Return a network that predicts several classes and has nontrivial BatchNorm statistics."""
    torch.manual_seed(seed)
    model = Net()
    nn.init.normal_(model.head.weight, std=2.0)
    for _ in range(3):
        model(torch.randn(16, 3, 8, 8) * 2 + 0.5)
    return model.eval()


def images(count: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def samples(count: int = 20, seed: int = 0) -> SampleSet:
    return SampleSet.from_arrays({"input": images(count, seed)})


def export(model, path, *, example=None, outputs=("logits",), dynamic=True, opset=13):
    """Export a copy of `model` with the TorchScript exporter."""
    example = example or {"input": images(2)}
    axes = {name: {0: "batch"} for name in (*example, *outputs)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(model).eval(),
            tuple(torch.from_numpy(array) for array in example.values()),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=list(example),
            output_names=list(outputs),
            dynamic_axes=axes if dynamic else None,
        )
    return candidate(path)


def edit(source: TestedFile, path: Path, change: Callable[[onnx.ModelProto], Any]) -> TestedFile:
    """Write the file of `source` after `change` and return it as a tested file."""
    proto = onnx.load(source.path)
    change(proto)
    onnx.save(proto, path)
    return candidate(path)


def candidate(path: Path) -> TestedFile:
    proto = onnx.load(path, load_external_data=False)
    subject = Subject(
        sha256=Digest.from_file(path),
        size_bytes=path.stat().st_size,
        opset=proto.opset_import[0].version,
        producer=proto.producer_name,
        inputs=tuple(_spec(value) for value in proto.graph.input),
        outputs=tuple(_spec(value) for value in proto.graph.output),
    )
    return TestedFile(path, subject)


def policy(*names: RuntimeName, **overrides: Any) -> Policy:
    """Return a policy for these runtimes; the default is ONNX Runtime on the CPU without
    optimizations.
    """
    bounds = Bounds(max_abs_diff=1e-4, top1_agreement=1.0)
    runtimes = {
        name: RuntimePolicy(required="always", bounds=bounds) for name in names or ("ort-cpu",)
    }
    return Policy(**{"runtimes": runtimes, **overrides})


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorSpec(name=value.name, dtype=dtype.name, shape=shape)


def stored(evidence: Evidence) -> Evidence:
    """Return the evidence after a round trip through JSON."""
    return Evidence.from_json(evidence.to_json())


def sample_table(job: MeasurementJob) -> SampleTable:
    """Measure a job and return its sample table, which has one row per sample."""
    with MeasurementRun.open(job) as run:
        run.run(INSTRUMENTS)
        return run.sample_table()
