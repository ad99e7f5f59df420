"""Golden vectors of small files, which pass unless a test changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from gate import Digest, Evidence, Policy
from gate.golden.folder import ExpectedOutput, FileVectors, write_golden
from gate.golden.manifest import GoldenManifest, GoldenModel, Origin
from gate.onnx_file.reading import read_subject
from gate.registry.release import GoldenFolder
from tests import builders
from tests.registry.releases import onnx_file

SAMPLES = 4
TOLERANCE = 1e-4


def weights(path: Path) -> np.ndarray:
    """Return the weights of a file of `onnx_file`: logits = input @ w."""
    model = onnx.load(str(path))
    return numpy_helper.to_array(model.graph.initializer[0])


def inputs() -> np.ndarray:
    """Return inputs of shape (samples, 3)."""
    return np.random.default_rng(7).normal(size=(SAMPLES, 3)).astype(np.float32)


def origin() -> Origin:
    return Origin(policy_sha256=builders.digest("policy"), versions={"torch": "2.15.0"})


def golden_model(path: Path) -> GoldenModel:
    subject = read_subject(path)
    return GoldenModel(sha256=subject.sha256, file=path.name, external_data=subject.external_data)


def write_vectors(folder: Path, *, origin: Origin, **vectors: Any) -> GoldenManifest:
    """Write the vectors of one file."""
    return write_golden(folder, FileVectors(**vectors), parts={}, origin=origin)


def write_model_vectors(folder: Path, path: Path, **overrides: Any) -> GoldenManifest:
    """Write vectors of a file of `onnx_file`, with numpy as the reference."""
    arguments = inputs()
    fields: dict[str, Any] = {
        "model": golden_model(path),
        "inputs": {"input": arguments},
        "outputs": {"logits": ExpectedOutput(arguments @ weights(path), TOLERANCE, 1.0)},
        "origin": origin(),
    }
    return write_vectors(folder, **fields | overrides)


def write_uncomputable_vectors(folder: Path, path: Path) -> Path:
    """Write vectors of a file that cannot be computed; the file is hashed but not read."""
    model = GoldenModel(sha256=Digest.from_file(path), file=path.name)
    outputs = {"logits": ExpectedOutput(np.zeros((SAMPLES, 3), np.float32), TOLERANCE, None)}
    write_vectors(folder, model=model, inputs={"input": inputs()}, outputs=outputs, origin=origin())
    return folder


def write_model_and_vectors(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write `model.onnx` and its golden vectors in `golden/`, and return both paths."""
    path = onnx_file(folder / "model.onnx", seed=seed)
    write_model_vectors(folder / "golden", path)
    return path, folder / "golden"


def evidence(**output: Any) -> Evidence:
    """Return evidence in which all measured runtimes have this output."""
    parity = builders.output_parity(**output)
    base = builders.evidence()
    runtimes = tuple(
        runtime.model_copy(update={"outputs": (parity,)}) if runtime.outputs else runtime
        for runtime in base.runtimes
    )
    return base.model_copy(update={"runtimes": runtimes})


def write_golden_of(path: Path, folder: Path, policy: Policy, **overrides: Any) -> GoldenFolder:
    """Write vectors of a file with the tolerances of a policy, and open their folder."""
    with_policy = origin().model_copy(update={"policy_sha256": policy.digest()})
    write_model_vectors(folder, path, **{"origin": with_policy, **overrides})
    return GoldenFolder.open(folder)
