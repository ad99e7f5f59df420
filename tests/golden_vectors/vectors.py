"""Golden vectors of tiny files, good unless a test spoils them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from gate.golden.folder import ExpectedOutput, FileVectors, write_golden
from gate.golden.manifest import GoldenManifest, GoldenModel, Origin
from gate.onnx_file.reading import read_subject
from gate.records.evidence import Evidence
from gate.storage.digest import Digest
from tests import builders
from tests.registry.releases import onnx_file

SAMPLES = 4
TOLERANCE = 1e-4


def weights(path: Path) -> np.ndarray:
    """Of the model that `onnx_file` makes: logits = input @ w."""
    model = onnx.load(str(path))
    return numpy_helper.to_array(model.graph.initializer[0])


def inputs() -> np.ndarray:
    """Shape (samples, 3)."""
    return np.random.default_rng(7).normal(size=(SAMPLES, 3)).astype(np.float32)


def origin() -> Origin:
    return Origin(policy_sha256=builders.digest("policy"), versions={"torch": "2.15.0"})


def golden_model(path: Path) -> GoldenModel:
    subject = read_subject(path)
    return GoldenModel(sha256=subject.sha256, file=path.name, external_data=subject.external_data)


def write_vectors(folder: Path, *, origin: Origin, **vectors: Any) -> GoldenManifest:
    """Vectors of one file."""
    return write_golden(folder, FileVectors(**vectors), parts={}, origin=origin)


def golden_of(folder: Path, path: Path, **overrides: Any) -> GoldenManifest:
    """Vectors of a file of `onnx_file`, by numpy as the reference."""
    arguments = inputs()
    fields: dict[str, Any] = {
        "model": golden_model(path),
        "inputs": {"input": arguments},
        "outputs": {"logits": ExpectedOutput(arguments @ weights(path), TOLERANCE, 1.0)},
        "origin": origin(),
    }
    return write_vectors(folder, **fields | overrides)


def impossible(folder: Path, path: Path) -> Path:
    """Vectors of a file that nobody can compute; it is hashed, not read."""
    model = GoldenModel(sha256=Digest.from_file(path), file=path.name)
    outputs = {"logits": ExpectedOutput(np.zeros((SAMPLES, 3), np.float32), TOLERANCE, None)}
    write_vectors(folder, model=model, inputs={"input": inputs()}, outputs=outputs, origin=origin())
    return folder


def made(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """A model and its golden vectors: `model.onnx` and `golden/`."""
    path = onnx_file(folder / "model.onnx", seed=seed)
    golden_of(folder / "golden", path)
    return path, folder / "golden"


def evidence(**output: Any) -> Evidence:
    """Evidence whose served runtime saw this."""
    parity = builders.output_parity(**output)
    base = builders.evidence()
    runtimes = tuple(
        runtime.model_copy(update={"outputs": (parity,)}) if runtime.outputs else runtime
        for runtime in base.runtimes
    )
    return base.model_copy(update={"runtimes": runtimes})
