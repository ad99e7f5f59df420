"""Measurement contexts without a file, and measurements of a file, for the tests of probes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gate import Digest, MeasurementJob, Policy, SampleSet, TestedFile
from gate.api import measure_job
from gate.data.input_binding import bind_inputs
from gate.measure.context import MeasurementContext, ReferencePass
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.probes.probe import SampleProfile
from gate.records.evidence import Subject, TensorSpec
from gate.reference.float64 import Truth
from gate.reference.torch_reference import TorchReference
from tests.measure import tiny

Arrays = Mapping[str, np.ndarray]


def specs(arrays: Arrays, *, fixed: int | None = None, **axes: dict[int, str]) -> list[TensorSpec]:
    """Return the inputs of a file for these samples, with a dynamic batch and the named axes."""
    created = []
    for name, array in arrays.items():
        shape: list[int | str] = [fixed or "batch", *array.shape[1:]]
        for axis, title in axes.get(name, {}).items():
            shape[axis] = title
        created.append(TensorSpec(name=name, dtype=array.dtype.name, shape=tuple(shape)))
    return created


def policy(**instruments) -> Policy:
    """Return a policy with one runtime, and these instruments in place of the defaults."""
    stable = instruments.get("stability_samples", 8) > 1
    runtime = RuntimePolicy(
        required="always",
        bounds=Bounds(
            scaled_diff=1e-3,
            noise_ratio=3.0 if instruments.get("noise_samples", 1) else None,
            repeatability_ratio=8.0 if stable else None,
            batch_invariance_ratio=16.0 if stable else None,
        ),
    )
    return Policy(
        task="tensors", runtimes={"ort-cpu": runtime}, instruments=Instruments(**instruments)
    )


def create_context(model, arrays, *, fixed=None, size=8, **instruments):
    """Return the context of a measurement without a file."""
    samples = SampleSet.from_arrays(dict(arrays))
    inputs = specs(arrays, fixed=fixed)
    binding = bind_inputs(inputs, samples.specs, count=len(samples), batch_size=size)
    subject = Subject(
        sha256=Digest.from_bytes(b"file"),
        size_bytes=4,
        opset=18,
        producer="",
        inputs=tuple(inputs),
        outputs=(),
    )
    custom = TorchReference(model).copy()
    settings = policy(**instruments)
    truth = Truth(custom, binding, samples=settings.instruments.noise_samples)
    reference, file = (
        ReferencePass(custom.session(binding)),
        TestedFile(Path("model.onnx"), subject),
    )
    return MeasurementContext(custom, reference, truth, binding, samples, settings, file)


def create_profile(model: nn.Module, arrays: Arrays, **options) -> SampleProfile:
    return SampleProfile.from_source(create_context(model, arrays, **options))


def export(
    model, path, arrays, *, batch=4, opset=17, training=False, axes=None, outputs=("output",)
):
    """Export `model` with the legacy exporter in its current mode, with a dynamic batch."""
    example = tuple(torch.from_numpy(array[:batch]) for array in arrays.values())
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            example,
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=list(arrays),
            output_names=list(outputs),
            dynamic_axes=axes or {name: {0: "batch"} for name in (*arrays, *outputs)},
            do_constant_folding=not training,
            training=torch.onnx.TrainingMode.PRESERVE if training else torch.onnx.TrainingMode.EVAL,
        )
    return tiny.candidate(path)


def measured(model, candidate, arrays, *, size=4, **instruments):
    return measure_job(
        MeasurementJob(
            model,
            candidate,
            SampleSet.from_arrays(dict(arrays)),
            policy=policy(**instruments),
            batch_size=size,
        )
    )


def images(count: int = 12, seed: int = 0) -> np.ndarray:
    """Return values in [0, 1) of shape (count, 3, 8, 8)."""
    return np.random.default_rng(seed).random((count, 3, 8, 8), dtype=np.float32)


def vectors(count: int = 12, width: int = 6, seed: int = 0) -> np.ndarray:
    """Return values in [0, 1) of shape (count, width)."""
    return np.random.default_rng(seed).random((count, width), dtype=np.float32)


def tokens(count: int = 12) -> np.ndarray:
    """Return integers in [3, 20] of shape (count, 5)."""
    return np.random.default_rng(0).integers(3, 21, (count, 5))
