"""Small releases of two files, good unless a test spoils them; nobody runs their chain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gate.decision.decide import decide
from gate.golden.folder import ExpectedOutput, FileVectors, write_golden
from gate.golden.manifest import GoldenManifest, GoldenModel
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sandboxed_reading import release_within
from gate.policy.policy import Policy
from gate.records.evidence import Evidence, Subject
from gate.registry.release import EvaluatedFile, GoldenFolder, Release
from tests import builders
from tests.golden_vectors import vectors
from tests.registry import releases

NAMES = ("encoder", "head")


def files(folder: Path, *, seed: int = 0) -> Path:
    """The release file; other bytes of both parts for another seed."""
    for index, name in enumerate(NAMES):
        releases.onnx_file(folder / f"{name}.onnx", seed=1000 * (index + 1) + seed)
    path = folder / "release.yaml"
    lines = [f"  {name}: {{file: {name}.onnx}}" for name in NAMES]
    path.write_text("\n".join(["chain: tests.multi_file.tiny:run", "parts:", *lines, ""]))
    return path


def subject(path: Path) -> Subject:
    """As the chain would take and give it."""
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
    return builders.with_drawn_probes(measured.model_copy(update=fields | overrides))


def golden(folder: Path, path: Path) -> GoldenManifest:
    """Of each part by numpy, and of a chain that gives what the encoder does."""
    arguments, complete = vectors.inputs(), subject(path)

    def answers(name: str, model: GoldenModel) -> FileVectors:
        values = arguments @ vectors.weights(path.parent / f"{name}.onnx")
        return FileVectors(
            model, {"input": arguments}, {"logits": ExpectedOutput(values, vectors.TOLERANCE, 1.0)}
        )

    model = GoldenModel(
        sha256=complete.sha256, file=path.name, external_data=complete.external_data
    )
    return write_golden(
        folder,
        answers("encoder", model),
        parts={
            name: answers(name, vectors.golden_model(path.parent / f"{name}.onnx"))
            for name in NAMES
        },
        origin=vectors.origin(),
    )


def release(path: Path, **overrides: Any) -> Release:
    """A release that passes `builders.policy()`."""
    return releases.release(path, evidence=evidence(path), **overrides)


def with_golden(of: Release) -> Release:
    folder = of.onnx_path.parent / "vectors"
    created = golden(folder, of.onnx_path)
    origin = created.origin.model_copy(update={"policy_sha256": of.decision.policy_sha256})
    created.model_copy(update={"origin": origin}).save(folder / "golden.json")
    return replace(of, golden=GoldenFolder.open(folder))


def twin_files(folder: Path, *, of: Path, seed: int = 0, exact: tuple[str, ...] = ()) -> Path:
    """The release file of a twin, whose parts say that they were quantized from those of `of`;
    `exact`: those that travelled byte by byte."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(NAMES):
        there = of.with_name(f"{name}.onnx")
        if name in exact:
            (folder / there.name).write_bytes(there.read_bytes())
        else:
            releases.twin_file(folder / there.name, of=there, seed=5000 + 1000 * index + seed)
    path = folder / of.name
    path.write_bytes(of.read_bytes())
    return path


def twin(path: Path, *, policy: Policy, **overrides: Any) -> EvaluatedFile:
    """A judged release that can be a twin of `release(...)`."""
    return releases.twin_of(path, policy=policy, evidence=evidence(path), **overrides)


def with_twin(
    of: Release, *, policy: Policy, seed: int = 0, exact: tuple[str, ...] = ()
) -> Release:
    """`of`, decided by `policy`, with its twin in a folder of its own."""
    assert policy.twin is not None
    path = twin_files(of.onnx_path.parent / f"twin-{seed}", of=of.onnx_path, seed=seed, exact=exact)
    decision = decide(policy, of.evidence, decided_at=releases.DECIDED_AT)
    pair = replace(of, decision=decision, twin=twin(path, policy=policy.twin))
    return pair if of.golden is None else with_golden(pair)
