"""Small releases of two parts, which pass unless a test changes them. The chain never runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gate import Evidence, Policy, decide
from gate.golden.folder import ExpectedOutput, FileVectors, write_golden
from gate.golden.manifest import GoldenManifest, GoldenModel
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sandboxed_reading import release_within
from gate.records.evidence import Subject
from gate.registry.release import EvaluatedFile, GoldenFolder, Release
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import releases

NAMES = ("encoder", "head")


def write_release(folder: Path, *, seed: int = 0) -> Path:
    """Write the release file and its parts; the weights depend on the seed."""
    for index, name in enumerate(NAMES):
        releases.onnx_file(folder / f"{name}.onnx", seed=1000 * (index + 1) + seed)
    path = folder / "release.yaml"
    lines = [f"  {name}: {{file: {name}.onnx}}" for name in NAMES]
    path.write_text("\n".join(["chain: tests.multi_file.tiny:run", "parts:", *lines, ""]))
    return path


def subject(path: Path) -> Subject:
    """Return the subject of a chain with the inputs and outputs of the encoder."""
    first = read_subject(path.parent / "encoder.onnx")
    return release_within(path, None).subject(inputs=first.inputs, outputs=first.outputs)


def evidence(path: Path, **overrides: Any) -> Evidence:
    measured = releases.evidence(path.parent / "encoder.onnx")
    fields: dict[str, Any] = {
        "subject": subject(path),
        "graph": None,
        "parts": {
            name: releases.evidence(part.path)
            for name, part in release_within(path, None).parts.items()
        },
    }
    return builders.add_drawn_probes(measured.model_copy(update=fields | overrides))


def write_vectors(folder: Path, path: Path) -> GoldenManifest:
    """Write golden vectors of the parts, and of a chain that equals the encoder."""
    samples, release_subject = vectors.inputs(), subject(path)

    def vectors_of(name: str, model: GoldenModel) -> FileVectors:
        values = samples @ vectors.weights(path.parent / f"{name}.onnx")
        return FileVectors(
            model, {"input": samples}, {"logits": ExpectedOutput(values, vectors.TOLERANCE, 1.0)}
        )

    model = GoldenModel(
        sha256=release_subject.sha256, file=path.name, external_data=release_subject.external_data
    )
    return write_golden(
        folder,
        vectors_of("encoder", model),
        parts={
            name: vectors_of(name, vectors.golden_model(path.parent / f"{name}.onnx"))
            for name in NAMES
        },
        origin=vectors.origin(),
    )


def release(path: Path, **overrides: Any) -> Release:
    """Return a release that passes `builders.policy()`."""
    return releases.release(path, evidence=evidence(path), **overrides)


def with_golden(of: Release) -> Release:
    folder = of.onnx_path.parent / "vectors"
    created = write_vectors(folder, of.onnx_path)
    origin = created.origin.model_copy(update={"policy_sha256": of.decision.policy_sha256})
    created.model_copy(update={"origin": origin}).save(folder / "golden.json")
    return replace(of, golden=GoldenFolder.open(folder))


def write_twin(folder: Path, *, of: Path, seed: int = 0, exact: tuple[str, ...] = ()) -> Path:
    """Write the release file of a twin whose parts name those of `of` as their origin.

    `exact`: the parts that are copied unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(NAMES):
        source = of.with_name(f"{name}.onnx")
        if name in exact:
            (folder / source.name).write_bytes(source.read_bytes())
        else:
            releases.twin_file(folder / source.name, of=source, seed=5000 + 1000 * index + seed)
    path = folder / of.name
    path.write_bytes(of.read_bytes())
    return path


def twin(path: Path, *, policy: Policy, **overrides: Any) -> EvaluatedFile:
    """Return an evaluated multi-file release that can be the twin of `release(...)`."""
    return releases.twin_of(path, policy=policy, evidence=evidence(path), **overrides)


def with_twin(
    of: Release, *, policy: Policy, seed: int = 0, exact: tuple[str, ...] = ()
) -> Release:
    """Return `of`, decided by `policy`, with a twin in a separate folder."""
    assert policy.twin is not None
    path = write_twin(of.onnx_path.parent / f"twin-{seed}", of=of.onnx_path, seed=seed, exact=exact)
    decision = decide(policy, of.evidence, decided_at=releases.DECIDED_AT)
    pair = replace(of, decision=decision, twin=twin(path, policy=policy.twin))
    return pair if of.golden is None else with_golden(pair)
